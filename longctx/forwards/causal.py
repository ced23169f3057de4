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

from longctx.calls.caller import Caller, labels_on_padding
from longctx.calls.hidden_states import asked as asked_states
from longctx.calls.parents import PARENTS, check_labels
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
from longctx.forwards.base import DOUBLE, output_class
from longctx.forwards.said import check_untraced, decline, say, untraced
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
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    given: dict[str, Any] = dict(num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
    given = {name: value for name, value in given.items() if value is not None}
    if ignore_index != IGNORE_INDEX:
        given["ignore_index"] = ignore_index
    given |= dict(labels=labels, logits_to_keep=logits_to_keep)
    runtime = runtime_of(self)
    if runtime is None:  # unpatched, while others hold on to this forward inside one of theirs
        return type(self).forward(self, **inputs, **given)
    check_untraced()
    runtime.attach(self)
    if kwargs.get(PARENTS) is not None and not runtime.args.schedules:
        raise UserError("parents need the schedule, and this model has single parts")
    if labels is not None and shift_labels is None and kwargs.get(PARENTS) is not None:
        of_rows = runtime.shards.whole(labels) if runtime.shards else labels
        check_labels(of_rows, kwargs.get("cu_seq_lens_q"), kwargs[PARENTS], ignore_index)
    targets = shift_labels
    if labels is not None and targets is None:
        targets = _shifted(labels, runtime, ignore_index)
    if targets is not None and ignore_index != IGNORE_INDEX:
        targets = targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
    # Whoever reads hidden states beside the loss may read those of padding, and has a gradient.
    shows_states = asked_states(self.config.get_text_config(), kwargs) is not None
    trains_padding = targets is not None and labels_on_padding(targets, attention_mask)
    reads_padding = None if labels is None or shows_states else trains_padding
    wants_logits = not isinstance(logits_to_keep, int) or logits_to_keep != 0
    whole = None if labels is None or wants_logits else _why_all_logits(self, kwargs)
    if labels is None or wants_logits or whole:
        if whole:
            decline(runtime, "all logits are computed", whole)
            if self.training and runtime.label_smoothing:
                raise UserError(f"--label_smoothing_factor is impossible with {whole}")
        caller = Caller(
            reads_padding=reads_padding,
            averages=labels is None and not wants_logits,
        )
        if labels is None or has_known_loss(self):  # another loss would get the keyword, too
            inputs |= caller.as_keyword(self.model)
        found: CausalLMOutputWithPast = type(self).forward(self, **inputs, **given)
        if caller.padded and not wants_logits:
            say(runtime, _MEANS if caller.averages else _ZERO)
        return found
    if use_cache is None:
        inputs["use_cache"] = False  # with a cache Hugging Face does not look for documents
    assert targets is not None
    shards = runtime.shards
    caller = Caller(
        owns_gradient=not shows_states and not any(map(_is_held, {self.model, base_of(self)})),
        reads_padding=reads_padding,
        balances=asks_for_router_logits(self.config, kwargs),
    )
    if caller.balances:
        inputs["output_router_logits"] = False  # sums of them are enough (layer/balance.py)
    counted = RowCount(targets)
    inputs |= caller.as_keyword(self.model)
    base = self.model(**inputs, return_dict=True)  # a config may ask for tuples
    hidden = base.last_hidden_state
    parts = 1  # of the auxiliary loss: where the items of all ranks are counted, losses add up
    if shards is not None and num_items_in_batch is not None:
        parts = shards.ranks
    elif shards is not None:
        # The mean over the ranks is the loss, and so it is of their gradients.
        count = (targets != IGNORE_INDEX).sum().to(hidden.device)
        num_items_in_batch = shards.total(count).clamp(min=1) / shards.ranks
    head, scaling, cap = head_of(self), logits_scaling(self), logits_cap(self)
    left_out = None
    if attention_mask is not None and caller.padded:
        left_out = partial(_say_left_out, runtime, attention_mask)
    loss = head(
        hidden,
        labels=targets.to(hidden.device),
        counted=counted,
        num_items=num_items_in_batch,
        logits_scaling=scaling,
        softcap=cap,
        label_smoothing=runtime.label_smoothing if self.training else 0.0,
        logits_bytes=runtime.cut and runtime.cut.logits_bytes,
    )
    logits = partial(_logits, head, scaling, cap, left_out)
    said: dict[str, Any] = {}
    if caller.balances:
        said["aux_loss"] = balance_loss(self, caller, base, attention_mask)
        loss = loss + auxiliary_factor(self) / parts * said["aux_loss"].to(loss.device)
    own: Any = type(self)
    kind: Any = output_class(own, CausalLMOutputWithPast)
    # Hugging Face's model hands on what its base has found, as features of images.
    handed = {field.name: getattr(base, field.name, None) for field in fields(kind)}
    lazy = lazy_logits(hidden, logits, _vocab(head), loss)
    return cast(CausalLMOutputWithPast, kind(**handed | said | {"loss": loss, "logits": lazy}))


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


def _shifted(labels: Tensor, runtime: Runtime, ignore_index: int) -> Tensor:  # (B, S)
    if runtime.shards is not None:
        return runtime.shards.shifted(labels, ignore_index)
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
