"""Patches any causal language model of transformers with our checkpoints, attention and loss.

Where our attention or our loss cannot serve, the model keeps its own, and the line that `patch_any`
returns says which and why.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from longctx.any_model.attention import NAMES
from longctx.any_model.loss import AnyForward, any_forward
from longctx.any_model.measured import measured_layers
from longctx.any_model.probe import find_loss, why_no_head, why_not_our_attention
from longctx.any_model.runtime import NAME, AnyRuntime, LossFactors, any_runtime_of
from longctx.any_model.seam import attach_seam, detach_seam
from longctx.calls.positions import keep_documents_apart
from longctx.errors import UserError
from longctx.memory.store import ActivationStore
from longctx.mixers.fla_kernels import prepare_imported_fla
from longctx.runtime.runtime import runtime_of
from longctx.settings import Backend, PatchOptions

OPTIONS = ("offload_activations", "attn_backend", "host_memory_gib")
"""The options of `patch` that any model takes."""


def patch_any(model: PreTrainedModel, args: PatchOptions, device: torch.device) -> str:
    """Patches `model` in place and returns words for what runs. Raises UserError for an
    encoder-decoder, a model without layers that could be checkpointed, a patched one, and for
    attention that was asked for by name and that the model cannot have."""
    _refuse(model)
    prepare_imported_fla(model)
    kind, config = type(model), model.config
    name, why = any_attention(config, kind, args.attn_backend, device)
    loss, why_own = _loss_of(model, device)
    store = ActivationStore(device, args.host_memory_gib)
    runtime = AnyRuntime(args=args, store=store, loss=loss)
    layers = attach_seam(model, runtime)
    if name is not None:
        vars(model)[_BEFORE] = config._attn_implementation
        model.set_attn_implementation(name)
    runtime.layers = partial(measured_layers, config, kind, config._attn_implementation)
    vars(model)[NAME], vars(model)[_HOOKS] = runtime, keep_documents_apart(model)
    model.forward = AnyForward(model, any_forward)
    attention = f"{config._attn_implementation} attention"
    if name is not None:
        attention = "our attention"
    elif why:
        attention += f", the model's own ({why})"
    said = "lm_head + cross-entropy in chunks"
    if loss is None:
        said = f"the model's own loss over all logits ({why_own})"
    return f"{layers} checkpointed layers of Hugging Face's, {attention}, {said}"


_BEFORE, _HOOKS = "_longctx_attention_before", "_longctx_hooks"
"""The attributes of a model with the name of the attention that the patch replaced, and with the
handles of its hooks."""


def unpatch_any(model: Any) -> None:
    """Removes everything that `patch_any` put on this model."""
    detach_seam(model)
    del model.forward
    vars(model).pop(NAME)
    for handle in vars(model).pop(_HOOKS):
        handle.remove()
    if before := vars(model).pop(_BEFORE, None):
        model.set_attn_implementation(before)


def any_attention(
    config: Any, kind: Any, backend: Backend, device: torch.device
) -> tuple[str | None, str]:
    """Returns transformers' name of our attention for models of the class `kind`, or None and why
    not; the reason is empty if theirs was asked for. Raises UserError if ours was asked for by name
    and cannot serve."""
    if backend not in NAMES:
        return None, ""
    own = "eager" if getattr(config.get_text_config(), _CAP, None) is not None else None
    why = why_not_our_attention(config, kind, own, device)
    if why is not None and backend != "auto":
        raise UserError(
            f"--attn_backend {backend}: {kind.__name__} cannot have our attention ({why}): use "
            "--attn_backend auto, which keeps the model's own then"
        )
    return (NAMES[backend] if why is None else None), why or ""


_CAP = "attn_logit_softcapping"
"""The setting for a cap of scores, which transformers' sdpa lacks: 5.17 left it out in silence."""


def _loss_of(model: Any, device: torch.device) -> tuple[LossFactors | None, str]:
    """Returns how our loss is this model's, or None and why it is not."""
    if reason := why_no_head(model.get_output_embeddings()):
        return None, reason
    if "_loss_function" in vars(model):
        return None, "its loss_function was exchanged"
    return find_loss(model.config, type(model), device)


def _refuse(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"patch takes a model of transformers; got {type(model).__name__}")
    if any_runtime_of(model) or any(runtime_of(part) for part in model.modules()):
        raise UserError("this model is patched already: longctx.unpatch(model) first")
    if "forward" in vars(model):
        raise UserError(
            f"somebody has exchanged the forward of this {type(model).__name__}, which would be "
            "lost: patch before you build the trainer, and before accelerate prepares the model"
        )
    if reason := why_not_any(model.config):
        raise UserError(f"any_model: {type(model).__name__} {reason}")


def why_not_any(config: Any) -> str | None:
    """Returns why no model of a configuration can be patched as any model; None if one can."""
    if getattr(config, "is_encoder_decoder", False):
        return (
            "is an encoder-decoder, whose loss is not of the next token of one row: use "
            "--class_type vanilla, or its decoder alone"
        )
    return None
