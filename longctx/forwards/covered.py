"""Whether the schedule covers a call of a base model, and as which positions and padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.calls.call import BOUNDS, DEEPSTACK, Call
from longctx.calls.hidden_states import NAME as HIDDEN_STATES
from longctx.calls.hidden_states import is_served
from longctx.calls.parents import PARENTS
from longctx.calls.positions import Positions, positions_of
from longctx.calls.read_padding import ComputedPadding, padding_of
from longctx.calls.routing import check_chosen
from longctx.errors import UserError
from longctx.families.families import known_family, mixes
from longctx.families.strangers import asks_for_router_logits, is_heard, why_not_scheduled
from longctx.forwards.said import known_runtime
from longctx.runtime.runtime import Runtime

CACHE = "a key/value cache"
DOUBLE = "weights in float64"
_OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")
_KNOWN = {*BOUNDS, *DEEPSTACK, *_OF_THE_LOSS, PARENTS}
"""The keywords that the schedule serves in any family, or that change nothing in a base model."""


class Covered(NamedTuple):
    """How the schedule runs a call."""

    positions: Positions
    padding: ComputedPadding | None
    """The padding that is computed; None: it is left out."""
    asked_later: bool
    """Nothing has asked yet whether the model is one that the schedule knows: a model with graphs
    is asked while the GPU works (graphs.py)."""


def covered(base: Any, call: Call) -> Covered | str:
    """Returns how the schedule runs a call of `base`, or as a short reason why it does not. Raises
    UserError for a call that only the schedule can run, if it does not."""
    runtime = known_runtime(base)
    found = _found(base, call, runtime)
    reason = found if isinstance(found, str) else None
    if call.parents is not None and reason:
        raise UserError(f"parents need the schedule, and this call has {reason}")
    if runtime.shards is not None:
        _check_shared(call, reason)
    if call.expert_ids is not None:
        check_chosen(base, call.expert_ids, tuple(call.rows.shape[:2]), reason)
    return found


def _found(base: Any, call: Call, runtime: Runtime) -> Covered | str:
    asked_later = call.trains and runtime.graphs is not None and len(runtime.graphs) > 0
    if reason := _why_not_called(base, call, runtime):
        return reason
    if not asked_later and (reason := why_not_scheduled(base)):
        return reason
    padding, reason = _padding(base, call)
    if reason:
        return reason
    positions = positions_of(call.position_ids, known_family(base).position_rows)
    if positions is None:
        assert call.position_ids is not None
        return f"positions of shape {tuple(call.position_ids.shape)}"
    of_image = positions.rope is not None and positions.rope.dim() > 2
    if of_image and call.parents is not None and runtime.shards is not None:
        return "images in prompts of rows that ranks share"
    if call.seen_both_ways is not None and padding is not None:
        return "images beside padding that may be read"
    return Covered(positions, padding, asked_later)


def _padding(base: Any, call: Call) -> tuple[ComputedPadding | None, str | None]:
    """Returns the padding that the schedule is to compute, and why it cannot run the call."""
    if call.attention_mask is None or call.parents is not None:
        return None, None
    read = call.caller.may_read_padding()
    padding, reason = padding_of(base, call.attention_mask, read=read)
    if padding is not None and reason is None and mixes(base.config):
        reason = "padding that may be read, beside mixers"
    return padding, reason


def _check_shared(call: Call, reason: str | None) -> None:
    """Raises UserError if Hugging Face's layers would take a rank's tokens for the whole row. With
    parents, bounds and parents are those of the whole rows, on every rank."""
    given = {**call.others, "attention_mask": call.attention_mask}
    for name in ("attention_mask", *(BOUNDS if call.parents is None else ())):
        if given.get(name) is not None:
            reason = reason or f"{name} (position_ids say where documents begin)"
    if reason:
        raise UserError(f"ranks that share rows need the schedule, and this call has {reason}")


def _why_not_called(base: Any, call: Call, runtime: Runtime) -> str | None:
    """Returns as a short reason why the arguments of a call keep it from the schedule; None if they
    do not."""
    config = base.config
    given = {k: v for k, v in call.others.items() if v is not None}
    if not given.get("is_causal", True):
        return "attention to later tokens (is_causal=False)"
    caches = config.use_cache if call.use_cache is None else call.use_cache
    if caches or call.past_key_values is not None:
        return CACHE
    if runtime.images:
        return runtime.images
    if unknown := _unknown(base, call, given):
        return ", ".join(sorted(unknown))
    if (call.input_ids is None) == (call.inputs_embeds is None):
        return "input_ids and inputs_embeds together, or neither"
    if not known_family(base).balances and asks_for_router_logits(config, call.others):
        return "output_router_logits"
    mask: Any = call.attention_mask
    if mask is not None and getattr(mask, "shape", None) != call.rows.shape[:2]:
        return "an attention mask of another shape than the batch"
    return _why_not_dtype(base, call.inputs_embeds)


def _unknown(base: Any, call: Call, given: dict[str, Any]) -> set[str]:
    """Returns the keywords of a call that Hugging Face's model would hear and the schedule does
    not."""
    known = _KNOWN | {"is_causal", HIDDEN_STATES}
    known |= {"output_router_logits"} if known_family(base).balances else set()
    heard = {k for k, v in given.items() if v is not False and is_heard(base, k)}
    served = is_served(base.config, call.states, trains=call.trains)
    return heard - known | (set() if served else {HIDDEN_STATES})


def _why_not_dtype(base: Any, embeds: Tensor | None) -> str | None:  # (B, S, D)
    """Returns why the dtypes of weights, autocast and embeddings keep a call from the schedule."""
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
