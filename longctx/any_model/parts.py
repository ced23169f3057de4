"""Puts single kernels into Hugging Face's layers, for `longctx.patch(model, parts=["rope"])`.

    rms_norm, layer_norm         every norm of the decoder: in its layers, of q and k, the last one
    rope                         attention's own forward, with our rotation of q and k in it
    swiglu, geglu                the MLP's forward, around its own linear layers
    cross_entropy                the loss over whole logits, whose memory their gradient takes
    fused_linear_cross_entropy   lm_head and the loss in chunks, without logits (forwards/causal.py)

Each kernel is put on the modules of one model, for training and evaluation. No class and no
function of transformers changes, so that other models of the process run as before. Adapters,
quantised weights, hooks and checkpoints remain Hugging Face's and PEFT's.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError
from longctx.families.families import (
    base_of,
    family_of,
    head_of,
    known_family,
    layer_specs,
    layers_of,
)
from longctx.families.family import Layer, part_of
from longctx.families.strangers import forward_name, has_known_loss, why_not_chunked
from longctx.forwards.attach import Forward
from longctx.forwards.said import untraced
from longctx.head.logits_loss import cross_entropy
from longctx.kernels.rope_tables import apply_rotary_pos_emb
from longctx.kernels.swiglu import geglu, swiglu
from longctx.layer.norm_spec import NormSpec
from longctx.layer.parts.norms import final_norm
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.runtime.runtime import runtime_of
from longctx.settings import FUSED, WHOLE

_GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}
"""Maps parts to the activation of the gated MLPs that can take them."""


# --- which a model can take ------------------------------------------------------------------


def why_not_part(config: PretrainedConfig, part: str) -> str | None:
    """Returns why models of this configuration cannot take a part; None if they can."""
    family = family_of(config)
    assert family is not None
    layers, centred = layer_specs(config), family.norm.spec(eps=1.0).centred
    if part == "rms_norm" and centred:
        return "its norms are LayerNorms: layer_norm"
    if part == "layer_norm" and not centred:
        return "its norms are RMSNorms: rms_norm"
    if part == "rope" and not family.rotary:
        return "they have no RoPE"
    attends = next((spec for x in layers if (spec := x.part(AttentionSpec))), None)
    if part == "rope" and attends and attends.interleaved:
        return "its RoPE rotates neighbours, and the part rotates halves"
    if part == "rope" and attends and attends.half_tables:
        return "its cosines and sines have half the columns that the part reads"
    return _why_not_gated(layers, part) if part in _GATED else None


def _why_not_gated(layers: Sequence[Layer], part: str) -> str | None:
    """Returns why MLPs cannot take a part that computes their gate, in any layer."""
    for mlp in (layer.part(MlpSpec) for layer in layers):
        if mlp is None or not mlp.gated:
            return "its MLP has no gate"
        if "mlp" not in mlp.modules:
            return "its MLP has linear layers of other names"
        if mlp.activation != _GATED[part]:
            return f"its MLP is of {next(n for n, a in _GATED.items() if a == mlp.activation)}"
    return None


def check_family(where: str, parts: tuple[str, ...], config: PretrainedConfig) -> None:
    """Raises UserError for a part that models of this configuration cannot take."""
    for part in parts:
        if reason := why_not_part(config, part):
            raise UserError(f"{where}: {part} is not for models of {config.model_type!r}: {reason}")


# --- where they go ---------------------------------------------------------------------------


def attach_parts(model: Any, parts: tuple[str, ...]) -> None:
    """Puts the kernels into a model's layers, and replaces its loss by ours over whole logits.
    Raises UserError, before anything is changed, for a module that is not the family's, and for a
    loss that the model does not ask for."""
    places = [place for part in parts for place in _places(base_of(model), part)]
    for loss in (WHOLE, FUSED):
        if loss in parts and (reason := _why_no_loss(model, loss)):
            raise UserError(f"{loss}: {reason}")
    for module, function in places:
        module.forward = Forward(module, function)
    if WHOLE in parts:
        model.loss_function = WholeLoss(model)


def detach_loss(model: Any) -> None:
    """Restores a model's own loss."""
    if isinstance(vars(model).get(_OWN_LOSS), WholeLoss):
        delattr(model, _OWN_LOSS)


_OWN_LOSS = "_loss_function"
"""The attribute in which transformers keeps the loss of one model."""


def _why_no_loss(model: Any, part: str) -> str | None:
    """Returns a short reason why a model cannot have this loss of ours; None if it can."""
    if head_of(model) is None:
        return f"{type(model).__name__} has no lm_head"
    if part == FUSED:
        return why_not_chunked(model)
    if not has_known_loss(model):
        return "this model has a loss or a forward of its own"
    if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        return f"{type(model).__name__} computes its loss by itself"
    return None


def _places(base: Any, part: str) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yields each module and the forward that it gets."""
    is_norm = part in ("rms_norm", "layer_norm")
    if is_norm:
        family = known_family(base)
        yield _known(base, family.last_norm, family.norm_classes, part), norm_part
    for i, (_, spec) in enumerate(layers_of(base)):
        where = f"layers.{i}."
        if is_norm:
            for path in spec.norms.values():
                yield _known(base, where + path, spec.family.norm_classes, part), norm_part
        elif part == "rope" and (attends := spec.part(AttentionSpec)):
            at = attends.path
            attention = _known(base, where + at, spec.in_layer[at], part)
            if _ROTATION not in type(attention).forward.__code__.co_names:
                raise UserError(f"rope: {type(attention).__name__} rotates by another function")
            yield attention, rope_part
        elif part in _GATED:
            for path in spec.one(MlpSpec).activations:
                _known(base, where + path, spec.in_layer[path], part)
            mlp = _known(base, f"{where}mlp", spec.in_layer["mlp"], part)
            yield mlp, swiglu_part if part == "swiglu" else geglu_part


def _known(base: Any, path: str, classes: tuple[str, ...], part: str) -> nn.Module:
    """Returns the module at a path. Raises UserError unless its forward is the family's."""
    module = part_of(base, path)
    if module is None:
        raise UserError(f"{part}: this model has no model.{path}")
    if "forward" in vars(module) or forward_name(type(module).forward) not in classes:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise UserError(f"{part}: model.{path}, a {kind}, has a forward that longctx does not know")
    return module


# --- what runs -------------------------------------------------------------------------------


@untraced
def norm_part(self: Any, hidden_states: Tensor) -> Tensor:  # (..., n) -> (..., n)
    spec = _spec(self)
    return final_norm(hidden_states, self.weight, getattr(self, "bias", None), spec, owned=False)


def _spec(norm: Any) -> NormSpec:
    family = family_of(norm)
    if family is None:  # torch's LayerNorm
        return NormSpec(eps=norm.eps, centred=True, llama_rounding=False)
    return family.norm.spec(eps=getattr(norm, family.norm.epsilon))


@untraced
def swiglu_part(self: Any, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
    return self.down_proj(swiglu(*_gate_and_up(self, x)))


@untraced
def geglu_part(self: Any, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
    return self.down_proj(geglu(*_gate_and_up(self, x)))


def _gate_and_up(mlp: Any, x: Tensor) -> tuple[Tensor, ...]:  # two of (..., F)
    if hasattr(mlp, "gate_up_proj"):
        return tuple(mlp.gate_up_proj(x).chunk(2, dim=-1))
    return mlp.gate_proj(x), mlp.up_proj(x)


@untraced
def rope_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs attention's own forward, in which our function replaces transformers' rotation."""
    return _with_our_rope(type(self).forward)(self, *args, **kwargs)


@cache
def _with_our_rope(forward: FunctionType) -> FunctionType:
    """Returns a function with the same code, whose globals have our rotation under transformers'
    name. The module's own globals stay, for all other models."""
    names = {**forward.__globals__, _ROTATION: _rotated}
    code, defaults = forward.__code__, forward.__defaults__
    ours = FunctionType(code, names, forward.__name__, defaults, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


_ROTATION = "apply_rotary_pos_emb"


def _rotated(
    q: Tensor,  # (B, H, S, d)
    k: Tensor,  # (B, K, S, d)
    cos: Tensor,  # (B or 1, S, r), r <= d
    sin: Tensor,  # (B or 1, S, r)
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, ...]:
    """Rotates the first r features of q and k, and leaves the others."""
    r = cos.shape[-1]
    turned = apply_rotary_pos_emb(q[..., :r], k[..., :r], cos, sin, unsqueeze_dim)
    if r == q.shape[-1]:
        return turned
    return tuple(torch.cat((x, y[..., r:]), dim=-1) for x, y in zip(turned, (q, k), strict=True))


class WholeLoss:
    """The loss over whole logits, which transformers' forward calls instead of the model's own. It
    holds the model weakly, and is saved and copied with it."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(
        self,
        logits: Tensor,  # (B, S, V)
        labels: Tensor | None,  # (B, S), not shifted
        vocab_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,  # (B, S), already shifted; wins over labels
        **kwargs: Any,
    ) -> Tensor:  # () fp32
        model: Any = self._model()
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        runtime = runtime_of(model)
        assert runtime is not None
        loss = cross_entropy(
            logits,
            shift_labels.to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=runtime.around.label_smoothing if model.training else 0.0,
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeLoss, (self._model(),)
