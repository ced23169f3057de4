"""Embedding, scheduled layers and the final norm of one call that the schedule covers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longctx.attention.documents import Documents, Parents
from longctx.attention.images import with_images
from longctx.attention.padding import sorted_rows
from longctx.calls.caller import Caller
from longctx.calls.parents import check_positions
from longctx.calls.positions import Positions
from longctx.calls.read_padding import COMPUTED, ComputedPadding, with_means
from longctx.calls.routing import chosen_of, times_of
from longctx.calls.shared_prefixes import Sharing, spread
from longctx.calls.shared_prefixes import found as found_prefixes
from longctx.errors import print_rank0
from longctx.families.families import (
    embedding_multiplier,
    embedding_of,
    experts_of,
    final_norm_of,
    final_norm_spec,
    known_family,
    layer_adapters,
    layers_of,
    mixes,
    query_scale,
    rotary_embeddings,
)
from longctx.families.look import look
from longctx.families.strangers import why_not_scheduled
from longctx.forwards.said import known_runtime, say
from longctx.layer.balance import Balance, RouterLogits, with_said
from longctx.layer.passes import Added
from longctx.mixers.mixers import why_slow
from longctx.runtime.graphs import graphed
from longctx.runtime.runtime import Runtime, copied_keys, follows_positions, make_schedule

Deepstack = tuple[Tensor, Sequence[Tensor]]  # (B, S) bool, (n, D) each


def scheduled_forward(
    base: Any,
    input_ids: Tensor | None,  # (B, S)
    attention_mask: Tensor | None,  # (B, S)
    positions: Positions,
    inputs_embeds: Tensor | None,  # (B, S, D)
    bounds: Tensor | None = None,  # (documents + 1,)
    parents: Parents = None,  # (documents,)
    *,
    caller: Caller,
    padding: ComputedPadding | None = None,
    deepstack: Deepstack | None = None,
    types: Tensor | None = None,  # (B, S): 1 where a token is of an image that is seen both ways
    asked: bool = True,
    expert_ids: Tensor | None = None,  # (L, B, S, k)
) -> Tensor | str:  # (B, S, D)
    """Runs embedding, scheduled layers, final norm. Padding is left out, and its output is zero, if
    it is not to be computed. Where nobody has asked yet whether the schedule covers the model,
    returns why it does not, in a few words."""
    runtime = known_runtime(base)
    x = _embedded(base, runtime, input_ids, inputs_embeds)
    B, S, D = x.shape
    runtime.follow(x, _compute_dtype(x), base.config)
    runtime.begin_pass()
    if mixes(base.config) and (slow := why_slow(base, x.device)):
        say(runtime, slow)
    multiplier = embedding_multiplier(base, given=inputs_embeds is not None)
    x = x if multiplier == 1.0 else x * multiplier
    rope, documents, real = _positions(base, x, positions, attention_mask, bounds, parents, padding)
    caller.padded = real is not None and padding is None
    x, rope = x.reshape(B * S, D), rope.flatten(-2)  # (T,), or (3, T) with images
    where = torch.arange(B * S, device=x.device) if real is None else real
    sharing = None
    if types is not None:
        documents = with_images(documents, (types.flatten() == 1)[where])
    elif deepstack is None and rope.dim() == 1:
        sharing = _sharing(base, runtime, input_ids, where, rope, documents)
    if sharing is not None:
        documents, real = sharing.documents, where[sharing.kept]
    if real is not None:
        x, rope = x[real], rope[..., real]
    if sharing is not None and sharing.shift is not None:
        rope = rope + sharing.shift
    if torch.is_grad_enabled():
        tokens = B * S if sharing is None else len(x)
        runtime.reserve((runtime.whole and runtime.whole()) or base, tokens)
    with torch.autocast(x.device.type, enabled=False):  # the schedule casts by itself
        hidden, documents = None, copied_keys(base, runtime, documents)
        balance, computed = None, where if real is None else real
        chosen = chosen_of(base, expert_ids, computed)
        if caller.balances:
            mask = None if padding is None else attention_mask
            times = times_of(documents, sharing, mask, real)
            if documents.parents and runtime.shards is not None and times is not None:
                times = runtime.shards.own(times.view(B, -1)).flatten()
            experts = experts_of(base.config)
            assert experts is not None
            balance = Balance(experts.router, times, runtime.shards)
        logits = RouterLogits() if caller.router_logits is not None else None
        if not (sharing or runtime.shards or deepstack or balance or logits or chosen):
            hidden = graphed(base, runtime, x, rope, documents)
        is_settled = hidden is not None and runtime.settled
        if not asked and not is_settled and (reason := why_not_scheduled(base)):
            return reason
        if hidden is None:
            # The loop stands here and not in a function, whose caller would hold the embedding's
            # output.
            schedule = make_schedule(
                *(base, runtime, rope, documents, B),
                balance=balance,
                router_logits=logits,
                expert_ids=chosen,
            )
            layers, added = layers_of(base), _added(deepstack, real)
            for above, (layer, spec) in zip(reversed(range(len(layers))), layers, strict=True):
                # Module.__call__ runs the hooks of DeepSpeed and FSDP, and leaves out the
                # checkpointing that Hugging Face's layer class would put around the schedule.
                given = dict(schedule=schedule, layers_above=above, spec=spec)
                given["added"] = next(added, None)
                x = nn.Module.__call__(layer, x, **given)
            if balance is not None:
                x, (caller.balance,) = with_said(x, balance)
            elif logits is not None:
                x, said = with_said(x, logits)
                caller.router_logits = tuple(
                    _spread(one, sharing, where, real, B * S) for one in said
                )
            owned = caller.owns_gradient or sharing is not None
            hidden = final_norm_of(base)(x, spec=final_norm_spec(base), owned=owned)
    x = hidden
    x = _spread(x, sharing, where, real, B * S).view(B, S, D)
    if attention_mask is not None and caller.padded and caller.averages:
        x = with_means(x, attention_mask)
    return x


def _added(deepstack: Deepstack | None, real: Tensor | None) -> Iterator[Added]:
    """Yields what each of the first layers adds, by the tokens that are computed, `real` (T,)."""
    if deepstack is None:
        return
    seen, every = deepstack
    where = seen.flatten().nonzero()[:, 0]
    there: Any = slice(None)
    if real is not None:
        places = where.new_full((seen.numel(),), -1)
        places[real] = torch.arange(len(real), device=real.device)
        where = places[where]
        there = where >= 0  # an image's token may be padding
    for features in every:
        yield Added(where[there], features[there])


def _positions(
    base: Any,
    x: Tensor,  # (B, S, D)
    positions: Positions,
    attention_mask: Tensor | None,  # (B, S)
    bounds: Tensor | None,  # (documents + 1,)
    parents: Parents,  # (documents,)
    padding: ComputedPadding | None,
) -> tuple[Tensor, Documents, Tensor | None]:  # (B, S), documents, (T,)
    """Returns the position of each token for RoPE, the documents, and which tokens are computed;
    None for all. Tells the rotary embedding of the longest position if it follows them."""
    runtime = known_runtime(base)
    B, S, _ = x.shape
    shards = runtime.shards
    own = torch.arange(S * (shards.ranks if shards else 1), device=x.device)[None]
    own = shards.own(own) if shards else own
    rope, of_documents = (
        own.expand(B, S) if p is None else p.expand(*p.shape[:-2], B, S) for p in positions
    )
    whole = shards.whole(of_documents) if shards else of_documents  # NCCL takes its memory first
    if padding is None:
        documents, real = Documents.of_batch(whole, attention_mask, bounds, parents)
    else:
        say(runtime, COMPUTED)
        documents, real = sorted_rows(padding.rows, x.device, blind=padding.blind)
    if documents.parents and positions.rope is None:
        rope = documents.position_ids().view(whole.shape)
        rope = shards.own(rope) if shards else rope
    elif documents.parents:
        check_positions(shards.whole(rope) if shards else rope, documents)
    if follows_positions(base):
        _follow_positions(base, x, shards.whole(rope) if shards else rope)
    return rope, documents, real


def _follow_positions(base: Any, x: Tensor, rope: Tensor) -> None:  # (B, S, D), (B, S)
    """Calls the rotary embedding for its side effect, with the longest position: of padding, too,
    as Hugging Face does."""
    longest = rope.max().view(1, 1)
    if known_family(base).position_rows > 1:
        longest = longest.expand(3, 1, 1)
    for name in rotary_embeddings(base):
        of_type = () if name == "all" else (name,)
        base.rotary_emb(x[:1, :1], longest, *of_type)


def _sharing(
    base: Any,
    runtime: Runtime,
    input_ids: Tensor | None,  # (B, S)
    where: Tensor,  # (T,): the tokens that are computed
    rope: Tensor,  # (B S,)
    documents: Documents,
) -> Sharing | None:
    """Returns how prompts that documents share are computed once; None if they are not. Says once
    what is saved, or why nothing is."""
    if not runtime.args.share_prefixes or documents.parents:
        return None
    reason = _why_not_shared(base, runtime, input_ids)
    if reason := "padding is computed" if documents.padding else reason:
        say(runtime, f"prompts are not shared: {reason}")
        return None
    assert input_ids is not None
    absolute = follows_positions(base) or query_scale(base, rope[:1]) is not None
    found = found_prefixes(input_ids.flatten()[where], rope[where], documents, absolute=absolute)
    if found is not None and _SHARED not in runtime.warned:
        runtime.warned.add(_SHARED)
        rows, tokens = sum(len(starts) for _, starts in found.prompts), len(found.source)
        print_rank0(
            f"custom: {_SHARED}: {tokens} tokens of the first such batch, in which {rows} "
            f"documents share {len(found.prompts)}, are {len(found.kept)} ({found.saved:.0%} less)"
        )
    return found


_SHARED = "a prompt that documents of a batch share is computed once"


def _why_not_shared(base: Any, runtime: Runtime, input_ids: Tensor | None) -> str | None:
    if input_ids is None:
        return "the call has inputs_embeds, which are not compared"
    if runtime.shards is not None:
        return "ranks share rows"
    adapters = (x for layer in layers_of(base) for x in layer_adapters(*layer, look).values())
    if base.training and any(adapter.dropout for adapter in adapters):
        return "dropout of adapters draws another mask for each row"
    return None


def _spread(
    x: Tensor,  # (T, D)
    sharing: Sharing | None,
    where: Tensor,  # (T,), or with sharing more
    real: Tensor | None,  # (T,)
    tokens: int,
) -> Tensor:  # (tokens, D)
    """Puts every row at its token's place. Documents that share a prompt get its rows, and padding
    that was left out is zero."""
    if sharing is not None:
        return spread(x, sharing, where, tokens)
    return x if real is None else x.new_zeros(tokens, x.shape[-1]).index_copy(0, real, x)


def _embedded(
    base: Any,
    runtime: Runtime,
    input_ids: Tensor | None,  # (B, S)
    inputs_embeds: Tensor | None,  # (B, S, D)
) -> Tensor:  # (B, S, D)
    """Returns the embedding's output, or what the call has in its place. transformers asks for the
    gradient of a frozen embedding's output, for the sake of checkpoints. Nobody reads it, and its
    graph would hold the output until backward ends, so it is cut off, unless an engine needs it."""
    x: Tensor = embedding_of(base)(input_ids) if inputs_embeds is None else inputs_embeds
    if runtime.needs_input_gradient and torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_()
    if inputs_embeds is not None:
        return x
    models = (base, runtime.whole and runtime.whole())
    asked = any(getattr(model, "_require_grads_hook", None) is not None for model in models)
    return x.detach() if asked and x.is_leaf else x


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matmuls: autocast's over fp32 weights, else x's."""
    kind = x.device.type
    wide = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if wide else x.dtype
