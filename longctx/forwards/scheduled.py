"""Embedding, scheduled layers and the final norm of one call that the schedule covers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.calls.call import Call
from longctx.calls.caller import Caller
from longctx.calls.read_padding import with_means
from longctx.calls.routing import chosen_of, times_of
from longctx.families.families import (
    embedding_multiplier,
    embedding_of,
    experts_of,
    final_norm_of,
    final_norm_spec,
    layers_of,
    mixes,
)
from longctx.families.strangers import why_not_scheduled
from longctx.forwards.computed_tokens import ComputedTokens
from longctx.forwards.covered import Covered
from longctx.forwards.said import known_runtime, say
from longctx.layer.balance import Balance, RouterLogits, with_said
from longctx.mixers.mixers import why_slow
from longctx.runtime.graphs import graphed
from longctx.runtime.runtime import Runtime, copied_keys, make_schedule


def scheduled_forward(base: Any, call: Call, covered: Covered) -> Tensor | str:  # (B, S, D)
    """Runs embedding, scheduled layers, final norm. Padding is left out, and its output is zero, if
    it is not to be computed. If the model is asked later, returns as a short reason why the
    schedule does not know it."""
    runtime, caller = known_runtime(base), call.caller
    x = _embedded(base, call, runtime)
    rows, deepstack = x.shape, call.deepstack(base)
    tokens = ComputedTokens.of(base, call, covered, x)
    caller.padded = tokens.computed is not None and covered.padding is None
    x = tokens.taken(x)
    if torch.is_grad_enabled():
        longest = tokens.total if tokens.sharing is None else len(x)
        runtime.reserve((runtime.whole and runtime.whole()) or base, longest)
    with torch.autocast(x.device.type, enabled=False):  # the schedule casts by itself
        hidden, documents = None, copied_keys(base, runtime, tokens.documents)
        routers = _Routers.of(base, call, covered, tokens)
        if not (tokens.sharing or runtime.shards or deepstack or any(routers)):
            hidden = graphed(base, runtime, x, tokens.rope, documents)
        is_settled = hidden is not None and runtime.settled
        if covered.asked_later and not is_settled and (reason := why_not_scheduled(base)):
            return reason
        if hidden is None:
            # The loop stands here and not in a function, whose caller would hold the embedding's
            # output.
            schedule = make_schedule(
                base, runtime, tokens.rope, documents, rows[0], **routers._asdict()
            )
            layers, added = layers_of(base), tokens.added(deepstack)
            for above, (layer, spec) in zip(reversed(range(len(layers))), layers, strict=True):
                # Module.__call__ runs the hooks of DeepSpeed and FSDP, and leaves out the
                # checkpointing that Hugging Face's layer class would put around the schedule.
                given = dict(schedule=schedule, layers_above=above, spec=spec)
                given["added"] = next(added, None)
                x = nn.Module.__call__(layer, x, **given)
            x = routers.tell(x, caller, tokens)
            owned = caller.owns_gradient or tokens.sharing is not None
            hidden = final_norm_of(base)(x, spec=final_norm_spec(base), owned=owned)
    x = tokens.spread(hidden).view(rows)
    if call.attention_mask is not None and caller.padded and caller.averages:
        x = with_means(x, call.attention_mask)
    return x


def _embedded(base: Any, call: Call, runtime: Runtime) -> Tensor:  # (B, S, D)
    """Returns the first layer's input. Backend and store follow its device and dtype."""
    x = _of_embedding(base, call, runtime)
    runtime.follow(x, _compute_dtype(x), base.config)
    runtime.begin_pass()
    if mixes(base.config) and (slow := why_slow(base, x.device)):
        say(runtime, slow)
    multiplier = embedding_multiplier(base, given=call.inputs_embeds is not None)
    return x if multiplier == 1.0 else x * multiplier


def _of_embedding(base: Any, call: Call, runtime: Runtime) -> Tensor:  # (B, S, D)
    """Returns the embedding's output, or what the call has in its place. transformers asks for the
    gradient of a frozen embedding's output, for the sake of checkpoints. Nobody reads it, and its
    graph would hold the output until backward ends, so it is cut off, unless an engine needs it."""
    given = call.inputs_embeds
    x: Tensor = embedding_of(base)(call.input_ids) if given is None else given
    if runtime.around.needs_input_gradient and torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_()
    if given is not None:
        return x
    models = (base, runtime.whole and runtime.whole())
    asked = any(getattr(model, "_require_grads_hook", None) is not None for model in models)
    return x.detach() if asked and x.is_leaf else x


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matmuls: autocast's over fp32 weights, else x's."""
    kind = x.device.type
    wide = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if wide else x.dtype


class _Routers(NamedTuple):
    """The arguments of `Schedule` on routers, by its names: the auxiliary loss and the logits that
    they are to collect, and the experts that the caller chose."""

    balance: Balance | None
    router_logits: RouterLogits | None
    expert_ids: tuple[Tensor | None, ...]  # (computed, k) each

    @classmethod
    def of(cls, base: Any, call: Call, covered: Covered, tokens: ComputedTokens) -> _Routers:
        chosen = chosen_of(base, call.expert_ids, tokens.numbers)
        logits = RouterLogits() if call.caller.router_logits is not None else None
        if not call.caller.balances:
            return cls(None, logits, chosen)
        mask = None if covered.padding is None else call.attention_mask
        times = times_of(tokens.documents, tokens.sharing, mask, tokens.computed)
        shards = known_runtime(base).shards
        if tokens.documents.parents and shards is not None and times is not None:
            times = shards.own(times.view(len(call.rows), -1)).flatten()
        experts = experts_of(base.config)
        assert experts is not None
        return cls(Balance(experts.router, times, shards), logits, chosen)

    def tell(self, x: Tensor, caller: Caller, tokens: ComputedTokens) -> Tensor:  # (computed, D)
        """Tells the caller the auxiliary loss, or the logits of routers. Returns x, whose backward
        hands the gradients of either to the layers."""
        if self.balance is not None:
            x, (caller.balance,) = with_said(x, self.balance)
        elif self.router_logits is not None:
            x, logits = with_said(x, self.router_logits)
            caller.router_logits = tuple(tokens.spread(one) for one in logits)
        return x
