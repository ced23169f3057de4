"""The base model's forward: the schedule if it covers the call, else Hugging Face's own code."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput, can_return_tuple

from longctx.attention.documents import Documents, Parents
from longctx.calls.caller import Caller
from longctx.calls.hidden_states import NAME as HIDDEN_STATES
from longctx.calls.hidden_states import asked as asked_states
from longctx.calls.hidden_states import is_served, last_alone
from longctx.calls.parents import PARENTS
from longctx.calls.positions import Positions, four_rows, positions_of, with_masks
from longctx.calls.read_padding import padding_of
from longctx.calls.routing import EXPERT_IDS, check_chosen
from longctx.errors import UserError
from longctx.families.families import family_of_class, known_family, mixes
from longctx.families.strangers import asks_for_router_logits, is_heard, why_not_scheduled
from longctx.families.vision import NotScheduled, SeenBothWays
from longctx.forwards.said import HF_LAYERS, check_untraced, decline, known_runtime, untraced
from longctx.forwards.scheduled import Deepstack, scheduled_forward
from longctx.runtime.runtime import Runtime, runtime_of

_BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""The arguments in which packing collators say where documents begin."""
_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
"""Qwen3-VL's arguments: which tokens are of images, and the features that its first layers add."""
_OF_THE_LOSS = {"num_items_in_batch", "shift_labels", "ignore_index"}


@untraced
@can_return_tuple
def base_forward(
    self: Any,
    input_ids: Tensor | None = None,  # (B, S)
    attention_mask: Tensor | None = None,  # (B, S)
    position_ids: Tensor | None = None,  # (B, S); of three rows also (3, B, S) or (4, B, S)
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,  # (B, S, D)
    use_cache: bool | None = None,
    caller: Caller | None = None,
    **kwargs: Any,
) -> ModelOutput:
    """Runs Hugging Face's forward, with the scheduled layers if they cover the call. Raises
    NotScheduled if they do not and it has `SeenBothWays` for a mask."""
    both_ways = attention_mask if isinstance(attention_mask, SeenBothWays) else None
    if both_ways is not None:
        attention_mask = both_ways.attention_mask
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    runtime = runtime_of(self)
    if runtime is None:
        return type(self).forward(self, **inputs)
    check_untraced()
    runtime.attach(self)
    bounds, parents = kwargs.get("cu_seq_lens_q"), kwargs.get(PARENTS)
    trains = self.training and torch.is_grad_enabled()
    if use_cache is None and (trains or parents is not None):
        inputs["use_cache"] = False
    caller = caller or runtime.caller or Caller()
    # Of a model with graphs that is asked later, beside the work of the GPU (graphs.py).
    asked_later = trains and runtime.graphs is not None and len(runtime.graphs) > 0
    wanted = asked_states(self.config, kwargs)
    reason, positions, padding = _call_not_covered(self, inputs, trains), None, None
    if reason is None and not asked_later:
        reason = why_not_scheduled(self)
    if reason is None and attention_mask is not None and parents is None:
        read = caller.may_read_padding()
        padding, reason = padding_of(self, attention_mask, read=read)
    if padding is not None and reason is None and mixes(self.config):
        reason = "padding that may be read, beside mixers"
    if reason is None:
        positions = positions_of(position_ids, known_family(self).position_rows)
        reason = _why_not_positions(positions, position_ids, parents, runtime)
    if both_ways is not None and padding is not None and reason is None:
        reason = "images beside padding that may be read"
    if parents is not None and reason:
        raise UserError(f"parents need the schedule, and this call has {reason}")
    if runtime.shards is not None:
        _check_shared(inputs, reason)
    if known_family(self).balances and asks_for_router_logits(self.config, inputs):
        caller.router_logits = ()
    expert_ids = inputs.pop(EXPERT_IDS, None)
    if expert_ids is not None:
        rows: Any = inputs_embeds if input_ids is None else input_ids
        check_chosen(self, expert_ids, tuple(rows.shape[:2]), reason)
    if positions is not None and reason is None:
        hidden = scheduled_forward(
            *(self, input_ids, attention_mask, positions, inputs_embeds, bounds, parents),
            caller=caller,
            padding=padding,
            deepstack=_deepstack(self, inputs),
            types=None if both_ways is None else both_ways.token_type_ids,
            asked=not asked_later,
            expert_ids=expert_ids,
        )
        kind: Any = type(self)
        if isinstance(hidden, Tensor):
            said: dict[str, Any] = {}
            if caller.router_logits is not None:
                said["router_logits"] = caller.router_logits
            states = last_alone(wanted, hidden, len(self.layers))
            return output_class(kind)(last_hidden_state=hidden, hidden_states=states, **said)
        reason = hidden
    assert reason is not None
    if reason != _CACHE or torch.is_grad_enabled():
        decline(runtime, HF_LAYERS, reason)
    if both_ways is not None:
        raise NotScheduled(reason)
    if caller.balances:
        inputs["output_router_logits"] = True
    if attention_mask is None and reason != _CACHE:
        _check_apart(self, inputs, bounds, reason)
        inputs["position_ids"] = four_rows(self, _restarting(inputs, bounds))
        inputs = with_masks(self, inputs)
    return type(self).forward(self, **inputs)


def _why_not_positions(
    found: Positions | None, given: Tensor | None, parents: Parents, runtime: Runtime
) -> str | None:
    """Returns why the positions of a call keep it from the schedule, in a few words; else None."""
    if found is None:
        assert given is not None
        return f"positions of shape {tuple(given.shape)}"
    of_image = found.rope is not None and found.rope.dim() > 2
    if of_image and parents is not None and runtime.shards is not None:
        return "images in prompts of rows that ranks share"
    return None


def _deepstack(base: Any, inputs: dict[str, Any]) -> Deepstack | None:
    """Returns which tokens are of images, and what is added to them after each of the first
    layers."""
    seen, features = (inputs.get(name) for name in _DEEPSTACK)
    if seen is None or features is None or not is_heard(base, _DEEPSTACK[1]):
        return None
    return seen, features


def _restarting(inputs: dict[str, Any], bounds: Tensor | None) -> Any:
    """Returns a call's positions, made of its bounds if these alone say where documents begin:
    without flash attention Hugging Face's layers do not read them."""
    if bounds is None or inputs["position_ids"] is not None:
        return inputs["position_ids"]
    tokens = inputs["input_ids"]
    shape = (inputs["inputs_embeds"][..., 0] if tokens is None else tokens).shape
    found = Documents.from_bounds(bounds.tolist(), shape.numel(), bounds.device)
    return found.position_ids().view(shape)


def _check_apart(base: Any, inputs: dict[str, Any], bounds: Tensor | None, reason: str) -> None:
    """Raises UserError if Hugging Face's mixers would hand the state of a document on to the next
    one in its row."""
    if not mixes(base.config):
        return
    found = positions_of(_restarting(inputs, bounds), known_family(base).position_rows)
    if found is None or found.documents is None:  # those of an image tell no documents apart
        return
    if (found.documents.diff(dim=-1) != 1).any():
        raise UserError(
            "Hugging Face's mixers would join the documents of a packed row, and the schedule does "
            f"not run calls with {reason}: pass one document a row"
        )


@functools.cache
def output_class(
    kind: Any, default: type[ModelOutput] = BaseModelOutputWithPast
) -> type[ModelOutput]:
    """Returns the class that a model's own forward says it returns: what its caller reads, as
    `router_logits` or `image_hidden_states`, is an attribute of it."""
    family = family_of_class(kind)
    if family is not None and family.output and kind.__name__ == family.prefix + family.base:
        return cast(type[ModelOutput], getattr(modeling_outputs, family.output))
    said = inspect.signature(kind.forward).return_annotation
    for found in (said, *get_args(said)):  # some say that it may also be a tuple
        if isinstance(found, type) and issubclass(found, ModelOutput):
            return found
    return default


_CACHE = "a key/value cache"
DOUBLE = "weights in float64"


def _check_shared(inputs: dict[str, Any], reason: str | None) -> None:
    """Raises UserError if Hugging Face's layers would take a rank's tokens for the whole row. With
    parents, bounds and parents are those of the whole rows, on every rank."""
    for name in ("attention_mask", *(_BOUNDS if inputs.get(PARENTS) is None else ())):
        if inputs.get(name) is not None:
            reason = reason or f"{name} (position_ids say where documents begin)"
    if reason:
        raise UserError(f"ranks that share rows need the schedule, and this call has {reason}")


def _call_not_covered(base: Any, inputs: dict[str, Any], trains: bool) -> str | None:
    """Returns why this call cannot run the scheduled layers, in a few words; None if it can, as far
    as the model is what it was."""
    config, mask, embeds = base.config, inputs["attention_mask"], inputs["inputs_embeds"]
    known = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"}
    known |= {*_BOUNDS, *_OF_THE_LOSS, PARENTS, *_DEEPSTACK}
    known |= {"output_router_logits"} if known_family(base).balances else set()
    given = {k: v for k, v in inputs.items() if k not in known and v is not None}
    if not given.pop("is_causal", True):
        return "attention to later tokens (is_causal=False)"
    unknown = {k for k, v in given.items() if v is not False and is_heard(base, k)}
    unknown -= {HIDDEN_STATES}
    if not is_served(config, asked_states(config, inputs), trains=trains):
        unknown |= {HIDDEN_STATES}
    uses_cache = inputs["use_cache"]
    if (config.use_cache if uses_cache is None else uses_cache) or "past_key_values" in unknown:
        return _CACHE
    if images := known_runtime(base).images:
        return images
    if unknown:
        return ", ".join(sorted(unknown))
    if (inputs["input_ids"] is None) == (embeds is None):
        return "input_ids and inputs_embeds together, or neither"
    if not known_family(base).balances and asks_for_router_logits(config, inputs):
        return "output_router_logits"
    tokens = inputs["input_ids"] if embeds is None else embeds
    if mask is not None and getattr(mask, "shape", None) != tokens.shape[:2]:
        return "an attention mask of another shape than the batch"
    if base.dtype == torch.float64:
        return DOUBLE
    whole = type(next(base.parameters())) is nn.Parameter  # FSDP's shards have another dtype
    if whole and embeds is not None and embeds.dtype != base.dtype:
        return f"inputs_embeds in {embeds.dtype} over weights in {base.dtype}"
    device = base.device.type
    if torch.is_autocast_enabled(device):
        if base.dtype not in (torch.float32, torch.get_autocast_dtype(device)):
            return f"weights in {base.dtype} in autocast to {torch.get_autocast_dtype(device)}"
    return None
