"""The sizes of a model whose layers are Hugging Face's or Liger-Kernel's, for the count of a step.

A run asks `peer_sizes` with its model, a plan with one that has no storage, so that both place
states by one count (costs.py). A family need not be known: dimensions come from the configuration,
adapters and 4-bit weights from the modules. Layers with experts, and those with an MLP between
them, are two kinds, by what longctx knows of the family (mixtures.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from longctx.cost.dims import Adapted, LayerKind, MeasuredLayer
from longctx.cost.sizes import Sizes, kinds_of
from longctx.families.adapters import Applied, applied, inside_peft, is_adapted, is_wrapped
from longctx.families.blocks import decoder_layers, language_models
from longctx.families.families import layer_specs, score_cap
from longctx.layer.packed_weights import packed_state
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mlp_spec import GATED, MLP_WIDTH, MlpSpec
from longctx.layer.specs.part_spec import head_dim, kv_heads
from longctx.settings import FUSED, LAYER_PARTS, ClassType, PatchOptions

FLASH = {"flash_attention_2": "flash", "flash_attention_4": "fa4", "eager": "math"}


def peer_kind(options: PatchOptions) -> tuple[ClassType, bool]:
    """Returns how a model so patched is counted if the schedule does not run it: whose layers it
    has, and whether a loss in chunks runs over Hugging Face's. Liger-Kernel's layers with some of
    its parts, and ours with single parts, count as Hugging Face's, which hold no less."""
    if options.class_type == "any":
        return "any", True
    if options.class_type != "liger":
        return "vanilla", options.fuses_loss
    parts = {*(options.parts or (*LAYER_PARTS, FUSED))}
    if {"rope", "rms_norm", FUSED} <= parts and {"swiglu", "geglu"} & parts:
        return "liger", False
    return "vanilla", FUSED in parts


def peer_kind_of(model: Any) -> tuple[ClassType, bool]:
    """Returns the same of a model that is made, and not patched by us."""
    if not _is_ligers(inside_peft(model)):
        return "vanilla", False
    layers = (layer for one in language_models(model) for layer in decoder_layers(one))
    whole = _is_ligers(getattr(next(layers, None), "mlp", None))
    return ("liger", False) if whole else ("vanilla", True)


def _is_ligers(module: Any) -> bool:
    forward = getattr(module, "forward", None)
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel")


def peer_backend(model: Any) -> str:
    """Returns our name of the attention that Hugging Face's layers run; sdpa takes cuDNN's."""
    models = language_models(model)
    asked = models[0].config._attn_implementation if models else None
    return FLASH.get(str(asked), "cudnn")


def peer_sizes(
    model: Any, class_type: ClassType, itemsize: int, *, chunks_loss: bool = False
) -> Sizes:
    """Returns the sizes of a model, or of a module that holds models: all their layers count as
    the widest one's, each with its experts, and the logits of all are there together. A module
    without a language model has nothing but its parameters. With `chunks_loss` our loss runs over
    Hugging Face's layers."""
    models = language_models(model)
    configs = [one.config.get_text_config() for one in models]
    common: dict[str, Any] = dict(
        itemsize=itemsize,
        class_type=class_type,
        chunks_loss=chunks_loss,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    if not models:
        return Sizes(**_nothing(1), **common)
    alike: dict[Mixture | None, list[nn.Module]] = {}
    of_layer = []
    for one, config in zip(models, configs, strict=True):
        for i, layer in enumerate(decoder_layers(one)):
            of_layer.append(_mixture(config, i))
            alike.setdefault(of_layer[-1], []).append(layer)
    of_layer, alike = of_layer or [None], alike or {None: []}
    kinds = {x: _kind(configs, layers, x, itemsize) for x, layers in alike.items()}
    widest: Any = max(configs, key=lambda config: config.hidden_size)
    ends = [head for one in models if (head := one.get_output_embeddings()) is not None]
    return Sizes(
        **kinds_of(kinds[x] for x in of_layer),
        hidden=widest.hidden_size,
        vocab=sum(config.vocab_size for config in configs),
        head_groups=1,
        trains_head=not ends or any(p.requires_grad for h in ends for p in h.parameters()),
        **common,
    )


def as_measured(sizes: Sizes, layers: Sequence[MeasuredLayer]) -> Sizes:
    """Returns the sizes of a model each of whose layers was measured."""
    each = zip(sizes.of_layer, layers, strict=True)
    return replace(sizes, **kinds_of(replace(sizes.kinds[i], measured=x) for i, x in each))


def trains_weights(sizes: Sizes) -> bool:
    """Whether layers' own weights are trained, and not adapters beside them alone."""
    return any(kind.trains_weights for kind in sizes.kinds)


class Mixture(NamedTuple):
    """The parts of a layer with experts, of a known family."""

    attends: AttentionSpec
    experts: ExpertsSpec


def _mixture(config: Any, layer: int) -> Mixture | None:
    """Returns the parts of a layer with experts; None if it has none, or if its family is not
    known."""
    known = layer_specs(config)
    experts = known[layer].part(ExpertsSpec) if known else None
    if experts is None:
        return None
    attends = known[layer].part(AttentionSpec) or _attention(config)
    return Mixture(replace(attends, window=None), experts)


def _attention(config: Any) -> AttentionSpec:
    """Returns the attention of a layer of any model, as far as its configuration says it."""
    heads = _read(attrgetter("num_attention_heads"), config, 1)
    d = _read(head_dim, config, max(1, config.hidden_size // heads))
    known = [spec for x in layer_specs(config) if (spec := x.part(AttentionSpec))]
    return AttentionSpec(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=_read(kv_heads, config, heads),
        head_dim=d,
        scale=d**-0.5,
        output_gate=any(spec.output_gate for spec in known),
        score_cap=score_cap(config),
    )


def _kind(
    configs: list[Any], layers: list[nn.Module], mixture: Mixture | None, itemsize: int
) -> LayerKind:
    """Returns the kind of layers that all have these experts, or none."""
    config: Any = max(configs, key=lambda config: config.hidden_size)
    count, adapters = max(1, len(layers)), _adapters(layers)
    factors = {id(x) for adapter in adapters for x in adapter.parameters.values()}
    of_linears = [adapter for adapter in adapters if adapter.experts == 1]
    stacked = (x.experts * x.inputs * x.outputs for x in adapters if x.experts > 1)
    matrices = [p for layer in layers for p in layer.parameters() if p.dim() > 1]
    first = next(iter(layers), nn.Module())
    packed = [s for p in first.parameters() if (s := packed_state(p)) is not None]
    return LayerKind(
        parts=mixture or (_attention(config), _mlp(config, max(map(_intermediate, configs)))),
        trains_weights=any(p.requires_grad and id(p) not in factors for p in matrices),
        dense_bytes=sum(math.prod(state.shape) * itemsize for state in packed),
        rank=max((adapter.rank for adapter in adapters), default=0),
        drops=any(adapter.dropout for adapter in adapters),
        adapted=Adapted(
            inputs=sum(adapter.inputs for adapter in of_linears) / count,
            outputs=sum(adapter.outputs for adapter in of_linears) / count,
            parameters=sum(x.a.numel() + x.b.numel() for x in of_linears) / count,
        ),
        folded=sum(stacked) // count,
    )


def _mlp(config: Any, width: int) -> MlpSpec:
    """Returns an MLP of this width, which has a gate unless those of the family have none."""
    known = [spec for x in layer_specs(config) if (spec := x.part(MlpSpec))]
    linears = known[0].linears if known else GATED
    return MlpSpec(hidden=config.hidden_size, width=width, linears=linears)


def _nothing(layers: int) -> dict[str, Any]:
    one: dict[str, Any] = dict(hidden=1, scale=1.0, heads=1, kv_heads=1, head_dim=1)
    kind = LayerKind(parts=(AttentionSpec(**one), MlpSpec(hidden=1, width=1)))
    ones = ("hidden", "vocab", "head_groups", "tile_tokens", "logits_bytes")
    return kinds_of(layers * [kind]) | dict.fromkeys(ones, 1)


def idle_sizes(layers: int) -> Sizes:
    """Returns the sizes of a model whose work is counted elsewhere: a few bytes a token."""
    return Sizes(**_nothing(max(1, layers)), itemsize=1, class_type="vanilla")


def _read(read: Callable[[Any], int], config: Any, otherwise: int) -> int:
    """Returns a number of a configuration, or another one for families that have none: recurrences
    without heads, or heads that differ from layer to layer."""
    try:
        found = read(config)
    except Exception:  # transformers has errors of its own for what differs by layer
        return otherwise
    return found if isinstance(found, int) else otherwise


def _adapters(layers: list[nn.Module]) -> list[Applied]:
    """Returns all adapters of these layers, those of a stack of experts as one."""
    modules: dict[str, Any] = {
        f"{i}.{name}": module
        for i, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if is_adapted(module)
    }
    return [
        x._replace(experts=modules[name].num_experts) if is_wrapped(modules[name]) else x
        for name, x in applied(modules).items()
    ]


def _intermediate(config: Any) -> int:
    """Returns the width of a layer's MLP; GPT-2's configuration has none, and means four times the
    hidden size."""
    found = getattr(config, MLP_WIDTH, None)
    return found if isinstance(found, int) else 4 * config.hidden_size
