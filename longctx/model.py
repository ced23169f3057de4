"""Patches a model as `--class_type` says.

    vanilla   Hugging Face's model as it is
    liger     Liger-Kernel's full patch (Liger replaces functions of transformers for the process)
    custom    one *instance* of Hugging Face's LlamaForCausalLM gets longctx's training forward;
              its class, its parameters, their names and the files it saves stay Hugging Face's

With labels, the custom forward runs the scheduled layers (`longctx/layer.py`), the final norm, and
lm_head with cross-entropy chunk by chunk (`longctx/loss.py`), so that neither a layer's activations
nor the (tokens, vocabulary) logits are ever there as a whole: at 131072 tokens and a vocabulary of
128256 the logits are 31 GiB in bf16, and vanilla holds them twice more in fp32. Without labels
(generation, logits), and for what the schedule does not cover, Hugging Face's own code runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from longctx.attention import Attention, choose_attention
from longctx.config import Engine, ModelArguments, UserError, say
from longctx.documents import Documents
from longctx.engine import gather_layers_whole, pending_bytes
from longctx.layer import Schedule, Weights, final_norm, scheduled_layer
from longctx.loss import LOGITS_BYTES, linear_cross_entropy
from longctx.offload import ActivationStore


def patch(model: PreTrainedModel, args: ModelArguments, device: torch.device) -> str:
    """Patches `model` in place and says in a few words what was patched."""
    if args.class_type == "vanilla":
        return f"nothing patched; {model.config._attn_implementation} attention"
    if args.class_type == "liger":
        return _patch_liger(model)
    return _patch_custom(model, args, device)


# --- custom ----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Custom:
    """What the patched instance carries, as `model.longctx`."""

    args: ModelArguments
    attention: Attention
    store: ActivationStore
    dtype: torch.dtype
    """Of the activations. FSDP2 later turns the weights, and `model.dtype`, into fp32."""
    engine: Engine = "plain"
    label_smoothing: float = 0.0
    reserved_tokens: int = 0
    """The longest batch for which the store has room."""
    said: set[str] = field(default_factory=set)
    """Reasons already printed for running Hugging Face's layers."""

    def schedule(
        self,
        model: LlamaForCausalLM,
        embedded: Tensor,  # (B, S, D)
        position_ids: Tensor,  # (B, S)
        attention_mask: Tensor | None,  # (B, S)
    ) -> Schedule:
        config, tokens = model.config, position_ids.numel()
        rotary = model.model.rotary_emb
        # Called for its side effect: dynamic RoPE sets inv_freq by the longest position.
        rotary(embedded[:1, :1], position_ids.max().view(1, 1))
        kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        groups = self.args.head_groups or default_head_groups(tokens, kv_heads)
        if kv_heads % groups:
            raise UserError(
                f"--head_groups {groups} must divide the model's {kv_heads} key/value heads"
            )
        return Schedule(
            documents=Documents.from_position_ids(position_ids, attention_mask),
            position_ids=position_ids.flatten(),
            inv_freq=rotary.inv_freq.float(),
            rope_scaling=rotary.attention_scaling,
            head_dim=model.model.layers[0].self_attn.head_dim,
            eps=config.rms_norm_eps,
            attention=self.attention,
            store=self.store,
            tile_tokens=self.args.tile_tokens or default_tile_tokens(tokens),
            head_groups=groups,
            keep_attention=self.args.keep_attention,
        )

    def reserve(self, model: LlamaForCausalLM, tokens: int) -> None:
        """Makes room for the activations of `tokens` tokens, once per longest batch so far."""
        if tokens <= self.reserved_tokens:
            return
        self.reserved_tokens = tokens
        config, itemsize = model.config, self.dtype.itemsize
        row_bytes = config.hidden_size * itemsize
        kept_bytes = row_bytes
        if self.args.keep_attention:
            heads = config.num_attention_heads
            kept_bytes += heads * (model.model.layers[0].self_attn.head_dim * itemsize + 4)
        # Backward holds five rows a token, and the fp32 gradient of an MLP or, before it, lm_head.
        widest = max(3 * config.intermediate_size, config.vocab_size)
        working_bytes = 5 * tokens * row_bytes + 4 * config.hidden_size * widest + LOGITS_BYTES
        self.store.plan(
            config.num_hidden_layers,
            tokens * kept_bytes + 2048,
            working_bytes + pending_bytes(model, self.engine),
        )


def custom_of(model: PreTrainedModel) -> Custom:
    return model.longctx  # type: ignore[return-value]


def default_head_groups(tokens: int, kv_heads: int) -> int:
    """One group is fastest; from 64K tokens on its q, k, v (up to 3 units) are worth splitting."""
    return kv_heads if tokens >= 65536 else 1


def default_tile_tokens(tokens: int) -> int:
    """8192 is 0.5% faster than 4096 at 131072 tokens of Llama-3.1-8B, for 0.3 GiB of the MLP's."""
    return 8192 if tokens >= 65536 else 4096


def _patch_custom(model: PreTrainedModel, args: ModelArguments, device: torch.device) -> str:
    if not isinstance(model, LlamaForCausalLM):
        raise UserError(f"custom patches LlamaForCausalLM, got {type(model).__name__}")
    backend, attention = choose_attention(args.attn_backend, device, model.dtype)
    store = ActivationStore(device, args.offload_activations, args.host_memory_gib)
    # Not a submodule and not a buffer: nothing of it reaches the state dict.
    custom: Any = Custom(args=args, attention=attention, store=store, dtype=model.dtype)
    model.longctx = custom
    forwards: list[tuple[Any, Any]] = [
        (model, _model_forward),
        *((layer, _layer_forward) for layer in model.model.layers),
        (model.model.norm, _norm_forward),
        (model.lm_head, _head_forward),
    ]
    for module, forward in forwards:
        module.forward = MethodType(forward, module)
    gather_layers_whole(model.model.layers)
    kept = "input and attention output" if args.keep_attention else "input"
    return (
        f"patched: {len(model.model.layers)} scheduled decoder layers (keep their {kept}, offload "
        f"{args.offload_activations}), {backend} attention, RMSNorm, lm_head + cross-entropy"
    )


@can_return_tuple
def _model_forward(
    self: LlamaForCausalLM,
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
    """LlamaForCausalLM.forward, except that with labels it returns the loss and no logits."""
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
    if labels is None or wants_logits:
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
        said = custom_of(self).said
        if reason not in said:
            say(f"custom: Hugging Face's layers run for calls with {reason}")
            said.add(reason)
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
        label_smoothing=custom_of(self).label_smoothing if self.training else 0.0,
    )
    return output


def _not_covered(model: LlamaForCausalLM, inputs: dict[str, Any]) -> str | None:
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
    if config.attention_dropout and model.training:
        return "attention dropout"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act!r}"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast (use --dtype bfloat16 instead of --bf16 for the schedule)"
    return None


def _scheduled_forward(
    model: LlamaForCausalLM,
    input_ids: Tensor | None,  # (B, S)
    attention_mask: Tensor | None,  # (B, S)
    position_ids: Tensor | None,  # (B, S)
    inputs_embeds: Tensor | None,  # (B, S, D)
) -> Tensor:  # (B, S, D)
    """Embedding, scheduled layers, final norm."""
    base, custom = model.model, custom_of(model)
    x = base.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    B, S, D = x.shape
    if position_ids is None:
        position_ids = torch.arange(S, device=x.device)[None]
    position_ids = position_ids.expand(B, S)
    if torch.is_grad_enabled():
        custom.reserve(model, B * S)
    schedule = custom.schedule(model, x, position_ids, attention_mask)
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
    return scheduled_layer(hidden_states, schedule, layers_above, _weights(self))


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


def _weights(layer: Any) -> Weights:
    attn, mlp = layer.self_attn, layer.mlp
    return Weights(
        norm1=layer.input_layernorm.weight,
        q=attn.q_proj.weight,
        k=attn.k_proj.weight,
        v=attn.v_proj.weight,
        o=attn.o_proj.weight,
        norm2=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_bias=attn.q_proj.bias,
        k_bias=attn.k_proj.bias,
        v_bias=attn.v_proj.bias,
        o_bias=attn.o_proj.bias,
        gate_bias=mlp.gate_proj.bias,
        up_bias=mlp.up_proj.bias,
        down_bias=mlp.down_proj.bias,
    )


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
