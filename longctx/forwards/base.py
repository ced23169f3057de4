"""The base model's forward: the schedule if it covers the call, else Hugging Face's own code."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast, get_args

import torch
from torch import Tensor
from transformers import modeling_outputs
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput, can_return_tuple

from longctx.attention.documents import Documents
from longctx.calls.call import Call
from longctx.calls.caller import Caller
from longctx.calls.hidden_states import last_alone
from longctx.calls.positions import four_rows, positions_of, with_masks
from longctx.calls.routing import EXPERT_IDS
from longctx.errors import UserError
from longctx.families.families import family_of_class, known_family, mixes
from longctx.families.strangers import asks_for_router_logits
from longctx.families.vision import NotScheduled
from longctx.forwards.covered import CACHE, Covered, covered
from longctx.forwards.said import HF_LAYERS, check_untraced, decline, known_runtime, untraced
from longctx.forwards.scheduled import scheduled_forward
from longctx.runtime.runtime import runtime_of


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
    runtime = runtime_of(self)
    caller = caller or (runtime and runtime.caller) or Caller()
    call = Call.of(
        *(self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache),
        others=kwargs,
        caller=caller,
    )
    if runtime is None:
        return type(self).forward(self, **call.arguments())
    check_untraced()
    runtime.attach(self)
    if call.trains or call.parents is not None:
        call = call.without_cache()
    found: Covered | Tensor | str = covered(self, call)
    if known_family(self).balances and asks_for_router_logits(self.config, call.others):
        caller.router_logits = ()
    if isinstance(found, Covered):
        found = scheduled_forward(self, call, found)
    if isinstance(found, Tensor):
        return _output(self, call, found)
    return _hugging_faces(self, call, found)


def _output(base: Any, call: Call, hidden: Tensor) -> ModelOutput:  # (B, S, D)
    """Returns the schedule's hidden states as Hugging Face's model does."""
    found: dict[str, Any] = dict(last_hidden_state=hidden)
    found["hidden_states"] = last_alone(call.states, hidden, len(base.layers))
    if call.caller.router_logits is not None:
        found["router_logits"] = call.caller.router_logits
    kind: Any = type(base)
    return output_class(kind)(**found)


def _hugging_faces(base: Any, call: Call, reason: str) -> ModelOutput:
    """Runs Hugging Face's forward, and says once for what reason."""
    if reason != CACHE or torch.is_grad_enabled():
        decline(known_runtime(base), HF_LAYERS, reason)
    if call.seen_both_ways is not None:
        raise NotScheduled(reason)
    inputs = call.arguments()
    inputs.pop(EXPERT_IDS, None)
    if call.caller.balances:
        inputs["output_router_logits"] = True
    if call.attention_mask is None and reason != CACHE:
        _check_apart(base, call, reason)
        inputs["position_ids"] = four_rows(base, _restarting(call))
        inputs = with_masks(base, inputs)
    kind: Any = type(base)
    found: ModelOutput = kind.forward(base, **inputs)
    return found


def _restarting(call: Call) -> Any:
    """Returns a call's positions, made of its bounds if these alone say where documents begin:
    without flash attention Hugging Face's layers do not read them."""
    if call.bounds is None or call.position_ids is not None:
        return call.position_ids
    shape = call.rows.shape[:2]
    found = Documents.from_bounds(call.bounds.tolist(), shape.numel(), call.bounds.device)
    return found.position_ids().view(shape)


def _check_apart(base: Any, call: Call, reason: str) -> None:
    """Raises UserError if Hugging Face's mixers would hand the state of a document on to the next
    one in its row."""
    if not mixes(base.config):
        return
    found = positions_of(_restarting(call), known_family(base).position_rows)
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
