"""The causal model's forward: with labels the loss, in chunks, and logits if they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from longctx.calls.call import Call
from longctx.calls.caller import Caller
from longctx.calls.labels import Labels, labels_on_padding
from longctx.calls.parents import check_labels
from longctx.calls.read_padding import refuse_gradient
from longctx.calls.routing import auxiliary_factor, balance_loss
from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError
from longctx.families.families import base_of, head_of, logits_cap, logits_scaling
from longctx.families.look import look
from longctx.families.strangers import (
    asks_for_router_logits,
    changing_hooks,
    has_known_loss,
    why_not_chunked,
)
from longctx.forwards.base import output_class
from longctx.forwards.covered import DOUBLE
from longctx.forwards.said import check_untraced, decline, known_runtime, say, untraced
from longctx.head.logits import lazy_logits
from longctx.head.loss import RowCount
from longctx.runtime.runtime import Runtime, runtime_of

REPLACED = "_longctx_replaced"
"""The attribute of a model that keeps the forward which `patch` found on it."""
_ZERO = (
    "padding is left out of all work with labels, and its hidden states are zero: means of logits "
    "over whole rows differ from Hugging Face's; losses do not"
)
_MEANS = (
    "padding is left out of all work: logits/chosen and logits/rejected of TRL's ORPO and CPO are "
    "means over real tokens, where Hugging Face's are over padding, too; losses do not differ"
)


@untraced
@can_return_tuple
def causal_forward(
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
    ignore_index: int = IGNORE_INDEX,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Runs Hugging Face's forward, except that with labels the loss is computed in chunks, and
    logits when they are read."""
    call = Call.of(
        *(self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache),
        others=kwargs,
        labels=Labels(
            labels=labels,
            shift_labels=shift_labels,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
            logits_to_keep=logits_to_keep,
        ),
    )
    runtime = runtime_of(self)
    if runtime is None:  # unpatched, while others hold on to this forward inside one of theirs
        return type(self).forward(self, **call.arguments(), **call.labels.arguments())
    check_untraced()
    runtime.attach(self)
    _check_parents(call, runtime)
    targets = call.labels.targets(runtime.shards)
    if targets is None or labels is None or call.labels.wants_logits:
        return _all_logits(self, call, targets)
    if reason := _why_all_logits(self, kwargs):
        decline(runtime, "all logits are computed", reason)
        if self.training and runtime.around.label_smoothing:
            raise UserError(f"--label_smoothing_factor is impossible with {reason}")
        return _all_logits(self, call, targets)
    return _in_chunks(self, call, targets)


def _check_parents(call: Call, runtime: Runtime) -> None:
    """Raises UserError for documents with parents that the schedule does not run, or whose labels
    no token can predict."""
    if call.parents is None:
        return
    if not runtime.args.schedules:
        raise UserError("parents need the schedule, and this model has single parts")
    labels, ignored = call.labels.labels, call.labels.ignore_index
    if labels is not None and call.labels.shift_labels is None:
        of_rows = runtime.shards.whole(labels) if runtime.shards else labels
        check_labels(of_rows, call.bounds, call.parents, ignored)


def _reads_padding(call: Call, targets: Tensor | None) -> bool | None:  # (B, S)
    """Whether hidden states of padding are read; None: the call stack says. Callers that read
    hidden states beside the loss may read those of padding."""
    if targets is None or call.labels.labels is None or call.states is not None:
        return None
    return labels_on_padding(targets, call.attention_mask)


def _all_logits(
    model: Any,
    call: Call,
    targets: Tensor | None,  # (B, S)
) -> CausalLMOutputWithPast:
    """Runs Hugging Face's forward over our base model, and says once what logits of padding are."""
    labels, inputs = call.labels, call.arguments()
    caller = Caller(
        reads_padding=_reads_padding(call, targets),
        averages=labels.labels is None and not labels.wants_logits,
    )
    if labels.labels is None or has_known_loss(model):  # another loss would get the keyword, too
        inputs |= caller.as_keyword(model.model)
    kind: Any = type(model)
    found: CausalLMOutputWithPast = kind.forward(model, **inputs, **labels.arguments())
    if caller.padded and not labels.wants_logits:
        say(known_runtime(model), _MEANS if caller.averages else _ZERO)
    return found


def _in_chunks(
    model: Any,
    call: Call,
    targets: Tensor,  # (B, S)
) -> CausalLMOutputWithPast:
    """Runs the base model, then lm_head and the loss chunk by chunk. Logits are computed if they
    are read."""
    runtime, head = known_runtime(model), head_of(model)
    is_held = call.states is not None or any(map(_is_held, {model.model, base_of(model)}))
    caller = Caller(
        owns_gradient=not is_held,
        reads_padding=_reads_padding(call, targets),
        balances=asks_for_router_logits(model.config, call.others),
    )
    # With a cache Hugging Face does not look for documents.
    inputs = call.without_cache().arguments()
    if caller.balances:
        inputs["output_router_logits"] = False  # sums of them are enough (layer/balance.py)
    counted = RowCount(targets)
    inputs |= caller.as_keyword(model.model)
    base = model.model(**inputs, return_dict=True)  # a config may ask for tuples
    hidden = base.last_hidden_state
    num_items, parts = _items(call, targets, hidden, runtime)
    left_out = None
    if call.attention_mask is not None and caller.padded:
        left_out = partial(_say_left_out, runtime, call.attention_mask)
    scaling, cap = logits_scaling(model), logits_cap(model)
    loss = head(
        hidden,
        labels=targets.to(hidden.device),
        counted=counted,
        num_items=num_items,
        logits_scaling=scaling,
        softcap=cap,
        label_smoothing=runtime.around.label_smoothing if model.training else 0.0,
        logits_bytes=runtime.adopted.cut and runtime.adopted.cut.logits_bytes,
    )
    found: dict[str, Any] = {}
    if caller.balances:
        found["aux_loss"] = balance_loss(model, caller, base, call.attention_mask)
        loss = loss + auxiliary_factor(model) / parts * found["aux_loss"].to(loss.device)
    logits = partial(_logits, head, scaling, cap, left_out)
    found |= dict(loss=loss, logits=lazy_logits(hidden, logits, _vocab(head), loss))
    return _output(model, base, found)


def _items(
    call: Call,
    targets: Tensor,  # (B, S)
    hidden: Tensor,  # (B, S, D)
    runtime: Runtime,
) -> tuple[Any, int]:
    """Returns the number of labels by which the loss is divided, and the parts in which the
    auxiliary loss is added: where the items of all ranks are counted, losses add up."""
    num_items, shards = call.labels.num_items, runtime.shards
    if shards is None:
        return num_items, 1
    if num_items is not None:
        return num_items, shards.ranks
    # The mean over the ranks is the loss, and so it is of their gradients.
    count = (targets != IGNORE_INDEX).sum().to(hidden.device)
    return shards.total(count).clamp(min=1) / shards.ranks, 1


def _output(model: Any, base: Any, found: dict[str, Any]) -> CausalLMOutputWithPast:
    """Returns what was found, and what Hugging Face's model hands on of its base model's output, as
    features of images."""
    own: Any = type(model)
    kind: Any = output_class(own, CausalLMOutputWithPast)
    handed = {field.name: getattr(base, field.name, None) for field in fields(kind)}
    return cast(CausalLMOutputWithPast, kind(**handed | found))


def as_causal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the signature of `causal_forward`, and leaves it the name by which it is
    pickled."""
    return functools.update_wrapper(function, causal_forward, assigned=(), updated=())


@as_causal
def fused_forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
    """Runs TRL's own head over our base model if TRL asks for it; else `causal_forward`."""
    if fused_lm_head:
        return vars(self)[REPLACED](*args, fused_lm_head=True, **kwargs)
    return causal_forward(self, *args, **kwargs)


def _logits(
    head: Any,
    scaling: float,
    cap: float | None,
    left_out: Callable[[Tensor], None] | None,  # told of logits that hold padding's
    hidden: Tensor,  # (B, S, D)
) -> Tensor:  # (B, S, V)
    logits: Tensor = head(hidden)
    logits = logits if scaling == 1.0 else logits / scaling
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    if left_out is not None:
        left_out(logits)
    return logits


def _say_left_out(runtime: Runtime, mask: Tensor, logits: Tensor) -> None:  # (B, S), (B, S, V)
    """Says once that logits of padding are no logits, and lets no loss have a gradient of them."""
    say(runtime, _ZERO)
    refuse_gradient(logits, mask)


def _vocab(head: Any) -> int:
    weight = head._parameters.get("weight")
    return int(head.out_features) if weight is None else len(weight)


def _why_all_logits(model: Any, given: dict[str, Any]) -> str | None:
    reason = why_not_chunked(model, given)
    if reason is None and look(head_of(model), "weight").dtype == torch.float64:
        return DOUBLE
    return reason


def _is_held(module: nn.Module) -> bool:
    """Whether hooks of others see what the module returns."""
    return any(changing_hooks(module))
