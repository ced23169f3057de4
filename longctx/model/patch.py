"""Patches a model as `--class_type` says.

    vanilla   Hugging Face's model as it is
    liger     Liger-Kernel's full patch (Liger replaces functions of transformers for the process)
    custom    one *instance* of Hugging Face's model (families.py) gets longctx's training forward;
              its class, its parameters, their names and the files it saves stay Hugging Face's

With labels, the custom forward runs the scheduled layers (layer.py), the final norm, and
lm_head with cross-entropy chunk by chunk (loss.py), so that neither a layer's activations
nor the (tokens, vocabulary) logits are ever there as a whole: at 131072 tokens and a vocabulary of
128256 the logits are 31 GiB in bf16, and vanilla holds them twice more in fp32. Without labels
(generation, logits), and for what the schedule does not cover, Hugging Face's own code runs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from longctx.config import ModelArguments
from longctx.errors import UserError, print_rank0
from longctx.memory.store import ActivationStore
from longctx.model.backends import choose_attention
from longctx.model.families import (
    FAMILIES,
    embedding_multiplier,
    has_windows,
    is_causal_lm,
    is_ours,
    layer_weights,
    logits_scaling,
    replaceable,
    why_not_chunked,
    why_not_scheduled,
)
from longctx.model.layer import Schedule, final_norm, scheduled_layer
from longctx.model.loss import linear_cross_entropy
from longctx.model.runtime import Runtime, make_schedule, runtime_of


def patch(model: PreTrainedModel, args: ModelArguments, device: torch.device) -> str:
    """Patches `model` in place and says in a few words what was patched."""
    if args.class_type == "vanilla":
        return f"nothing patched; {model.config._attn_implementation} attention"
    if args.class_type == "liger":
        return _patch_liger(model)
    return _patch_custom(model, args, device)


# --- custom ----------------------------------------------------------------------------------


def _patch_custom(model: Any, args: ModelArguments, device: torch.device) -> str:
    if not is_causal_lm(model):
        names = ", ".join(f"{family.prefix}ForCausalLM" for family in FAMILIES.values())
        raise UserError(f"custom patches {names}; got {type(model).__name__}")
    if "forward" in vars(model) and not is_ours(model):
        raise UserError(
            "custom patches a model whose forward was exchanged already, which would be lost: "
            "patch it first"
        )
    backend, attention = choose_attention(
        args.attn_backend, device, model.dtype, has_windows(model.config)
    )
    store = ActivationStore(device, args.host_memory_gib)
    runtime: Any = Runtime(args=args, attention=attention, store=store, dtype=model.dtype)
    model.longctx = runtime
    forwards: list[tuple[Any, Any]] = [
        *((layer, _layer_forward) for layer in model.model.layers),
        (model.model.norm, _norm_forward),
        (model.lm_head, _head_forward),
    ]
    model.forward = MethodType(_model_forward, model)  # type: ignore[method-assign]
    for module, forward in forwards:
        if replaceable(module):  # or it stays as it is, which is found and said on the first call
            module.forward = MethodType(forward, module)
    return (
        f"patched: {len(model.model.layers)} scheduled decoder layers, {backend} attention, "
        "RMSNorm, lm_head + cross-entropy"
    )


@can_return_tuple
def _model_forward(
    self: Any,
    input_ids: Tensor | None = None,  # (B, S)
    attention_mask: Tensor | None = None,  # (B, S)
    position_ids: Tensor | None = None,  # (B, S), restarting at every packed document
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,  # (B, S, D)
    labels: Tensor | None = None,  # (B, S), not shifted; -100 is ignored
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,  # (B, S), already shifted; wins over labels, as in HF
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Hugging Face's forward, except that with labels it returns the loss and no logits."""
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    wants_logits = not isinstance(logits_to_keep, int) or logits_to_keep != 0
    all_logits = None if labels is None or wants_logits else why_not_chunked(self)
    if labels is not None and use_cache is None:
        inputs["use_cache"] = False  # with a cache Hugging Face does not look for documents
    if labels is None or wants_logits or all_logits:
        if all_logits:
            _warn_once(self, f"{all_logits}, which takes all logits")
            if self.training and _runtime(self).label_smoothing:
                raise UserError(f"--label_smoothing_factor is impossible with {all_logits}")
        loss_inputs = dict(num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
        given = {k: v for k, v in loss_inputs.items() if v is not None}
        return type(self).forward(
            self, labels=labels, logits_to_keep=logits_to_keep, **inputs, **given
        )
    reason = _not_covered(self, inputs)
    if reason is None:
        hidden = _scheduled_forward(self, input_ids, attention_mask, position_ids, inputs_embeds)
        output = CausalLMOutputWithPast()
    else:
        _warn_once(self, reason)
        base = self.model(**inputs)
        hidden = base.last_hidden_state
        output = CausalLMOutputWithPast(
            past_key_values=base.past_key_values,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
        )
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
    output.loss = self.lm_head(
        hidden,
        labels=shift_labels.to(hidden.device),
        num_items=num_items_in_batch,
        logits_scaling=logits_scaling(self),
        label_smoothing=_runtime(self).label_smoothing if self.training else 0.0,
    )
    return output


def _runtime(model: PreTrainedModel) -> Runtime:
    runtime = runtime_of(model)
    assert runtime is not None
    return runtime


def _warn_once(model: PreTrainedModel, reason: str) -> None:
    warned = _runtime(model).warned
    if reason not in warned:
        warned.add(reason)
        print_rank0(f"custom: Hugging Face's layers run for calls with {reason}")


def _not_covered(model: Any, inputs: dict[str, Any]) -> str | None:
    """Why this call cannot run the scheduled layers, in a few words; None if it can."""
    config, mask = model.config, inputs["attention_mask"]
    known = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"}
    unknown = {k for k, v in inputs.items() if k not in known and v is not None and v is not False}
    if unknown:
        return ", ".join(sorted(unknown))
    if inputs["use_cache"]:
        return "a key/value cache"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions or output_hidden_states"
    if mask is not None and mask.dim() != 2:
        return f"a {mask.dim()}-dimensional attention mask"
    if model.dtype == torch.float64:
        return "weights in float64"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast (use --dtype bfloat16 instead of --bf16 for the schedule)"
    return why_not_scheduled(model)


def _scheduled_forward(
    model: Any,
    input_ids: Tensor | None,  # (B, S)
    attention_mask: Tensor | None,  # (B, S)
    position_ids: Tensor | None,  # (B, S)
    inputs_embeds: Tensor | None,  # (B, S, D)
) -> Tensor:  # (B, S, D)
    """Embedding, scheduled layers, final norm."""
    base, runtime = model.model, _runtime(model)
    x = base.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    B, S, D = x.shape
    if (multiplier := embedding_multiplier(model)) != 1.0:
        x = x * multiplier
    if position_ids is None:
        position_ids = torch.arange(S, device=x.device)[None]
    position_ids = position_ids.expand(B, S)
    if torch.is_grad_enabled():
        runtime.reserve(model, B * S)
    schedule = make_schedule(model, runtime, x, position_ids, attention_mask)
    x = x.reshape(B * S, D)
    for above, layer in zip(reversed(range(len(base.layers))), base.layers, strict=True):
        # Module.__call__ runs the hooks of DeepSpeed and FSDP, and leaves out the checkpointing
        # that Hugging Face's layer class would put around the schedule.
        x = nn.Module.__call__(layer, x, schedule=schedule, layers_above=above)
    return base.norm(x, scheduled=True).view(B, S, D)


def _layer_forward(
    self: Any,
    hidden_states: Tensor,  # (T, D) with a schedule
    *args: Any,
    schedule: Schedule | None = None,
    layers_above: int = 0,
    **kwargs: Any,
) -> Tensor:
    if schedule is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    return scheduled_layer(hidden_states, schedule, layers_above, layer_weights(self))


def _norm_forward(self: Any, x: Tensor, scheduled: bool = False) -> Tensor:
    if not scheduled:
        return type(self).forward(self, x)
    return final_norm(x, self.weight, self.variance_epsilon)


def _head_forward(
    self: Any,
    hidden: Tensor,  # (B, S, D)
    labels: Tensor | None = None,  # (B, S), already shifted
    **options: Any,
) -> Tensor:  # the logits, or with labels the loss
    if labels is None:
        return type(self).forward(self, hidden)
    return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, **options)


# --- liger -----------------------------------------------------------------------------------


def _patch_liger(model: PreTrainedModel) -> str:
    from liger_kernel.transformers import monkey_patch

    kind = model.config.model_type
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise UserError(f"Liger-Kernel has no patch for {kind!r} models: use --class_type vanilla")
    apply(model=model)
    attention = model.config._attn_implementation
    return (
        "patched by Liger-Kernel: RMSNorm, RoPE, SwiGLU, fused linear cross-entropy; "
        f"{attention} attention"
    )
