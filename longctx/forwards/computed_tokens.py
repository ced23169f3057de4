"""The tokens of a call that the layers compute, their order, and the way back of hidden states.

    rows (B, S)         without padding     a shared prompt once
    [P P a a .]         [P P a a P P b]     [P P a a b]
    [P P b . .]

Padding is left out unless it is to be computed. A prompt with which documents begin is computed
once if that is asked for (calls/shared_prefixes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.attention.images import with_images
from longctx.attention.padding import sorted_rows
from longctx.attention.shards import Shards
from longctx.calls.call import Call, Deepstack
from longctx.calls.parents import check_positions
from longctx.calls.read_padding import COMPUTED
from longctx.calls.shared_prefixes import Sharing, spread
from longctx.calls.shared_prefixes import found as found_prefixes
from longctx.errors import print_rank0
from longctx.families.families import (
    known_family,
    layer_adapters,
    layers_of,
    query_scale,
    rotary_embeddings,
)
from longctx.families.look import look
from longctx.forwards.covered import Covered
from longctx.forwards.said import known_runtime, say
from longctx.layer.passes import Added
from longctx.runtime.runtime import Runtime, follows_positions


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedTokens:
    """The tokens of a call that are computed."""

    rope: Tensor  # (computed,), or (3, computed) with images
    documents: Documents
    sharing: Sharing | None
    """How prompts that documents share are computed once; None: each document has its own."""
    real: Tensor  # (T,): the numbers of all tokens but those of padding that is left out
    computed: Tensor | None  # (computed,): the numbers of those in `documents`; None: all tokens
    total: int
    """B S, with padding."""

    @classmethod
    def of(cls, base: Any, call: Call, covered: Covered, x: Tensor) -> ComputedTokens:  # (B, S, D)
        """Returns the tokens of a call with the embedded tokens x. Tells the rotary embedding of
        the longest position if it follows them."""
        runtime, total = known_runtime(base), x.shape[:2].numel()
        rope, whole = _positions(x, covered, runtime.shards)
        documents, computed = _documents(call, covered, whole, runtime)
        rope = _of_documents(rope, documents, covered, runtime.shards)
        if follows_positions(base):
            _follow_positions(base, x, _whole(rope, runtime.shards))
        rope, sharing = rope.flatten(-2), None
        real = torch.arange(total, device=x.device) if computed is None else computed
        if call.image_types is not None:
            documents = with_images(documents, (call.image_types.flatten() == 1)[real])
        elif call.deepstack(base) is None and rope.dim() == 1:
            sharing = _sharing(base, runtime, call.input_ids, real, rope, documents)
        if sharing is not None:
            documents, computed = sharing.documents, real[sharing.kept]
        rope = rope if computed is None else rope[..., computed]
        if sharing is not None and sharing.shift is not None:
            rope = rope + sharing.shift
        return cls(
            rope=rope,
            documents=documents,
            sharing=sharing,
            real=real,
            computed=computed,
            total=total,
        )

    @property
    def numbers(self) -> Tensor:  # (computed,)
        """The number of each computed token among all B S."""
        return self.real if self.computed is None else self.computed

    def taken(self, x: Tensor) -> Tensor:  # (B, S, D) -> (computed, D)
        flat = x.reshape(self.total, x.shape[-1])
        return flat if self.computed is None else flat[self.computed]

    def spread(self, x: Tensor) -> Tensor:  # (computed, D) -> (B S, D)
        """Puts every row at its token's place. Documents that share a prompt get its rows, and
        padding that was left out is zero."""
        if self.sharing is not None:
            return spread(x, self.sharing, self.real, self.total)
        if self.computed is None:
            return x
        return x.new_zeros(self.total, x.shape[-1]).index_copy(0, self.computed, x)

    def added(self, deepstack: Deepstack | None) -> Iterator[Added]:
        """Yields what each of the first layers adds to the computed tokens."""
        if deepstack is None:
            return
        of_images, every = deepstack
        where = of_images.flatten().nonzero()[:, 0]
        there: Any = slice(None)
        if self.computed is not None:
            places = where.new_full((of_images.numel(),), -1)
            places[self.computed] = torch.arange(len(self.computed), device=where.device)
            where = places[where]
            there = where >= 0  # an image's token may be padding
        for features in every:
            yield Added(where[there], features[there])


def _whole(x: Tensor, shards: Shards | None) -> Tensor:
    return shards.whole(x) if shards else x


def _positions(
    x: Tensor,  # (B, S, D)
    covered: Covered,
    shards: Shards | None,
) -> tuple[Tensor, Tensor]:  # (B, S) or (3, B, S); (B, S) of whole rows
    """Returns the position of each token for RoPE, and those that tell documents apart."""
    B, S, _ = x.shape
    own = torch.arange(S * (shards.ranks if shards else 1), device=x.device)[None]
    own = shards.own(own) if shards else own
    rope, of_documents = (
        own.expand(B, S) if p is None else p.expand(*p.shape[:-2], B, S) for p in covered.positions
    )
    return rope, _whole(of_documents, shards)  # NCCL takes its memory first


def _documents(
    call: Call,
    covered: Covered,
    whole: Tensor,  # (B, S)
    runtime: Runtime,
) -> tuple[Documents, Tensor | None]:  # documents, (T,)
    """Returns the documents of whole rows, and which tokens are computed; None for all."""
    if covered.padding is None:
        return Documents.of_batch(whole, call.attention_mask, call.bounds, call.parents)
    say(runtime, COMPUTED)
    return sorted_rows(covered.padding.rows, whole.device, blind=covered.padding.blind)


def _of_documents(
    rope: Tensor,  # (B, S) or (3, B, S)
    documents: Documents,
    covered: Covered,
    shards: Shards | None,
) -> Tensor:  # (B, S) or (3, B, S)
    """Returns positions that go on from a document's parent: the caller's, if they do, else those
    of the documents."""
    if not documents.parents:
        return rope
    if covered.positions.rope is not None:
        check_positions(_whole(rope, shards), documents)
        return rope
    found = documents.position_ids().view(len(rope), -1)
    return shards.own(found) if shards else found


def _follow_positions(base: Any, x: Tensor, rope: Tensor) -> None:  # (B, S, D), (B, S)
    """Calls the rotary embedding for its side effect, with the longest position: of padding, too,
    as Hugging Face does."""
    longest = rope.max().view(1, 1)
    if known_family(base).position_rows > 1:
        longest = longest.expand(3, 1, 1)
    for name in rotary_embeddings(base):
        of_type = () if name == "all" else (name,)
        base.rotary_emb(x[:1, :1], longest, *of_type)


_SHARED = "a prompt that documents of a batch share is computed once"


def _sharing(
    base: Any,
    runtime: Runtime,
    input_ids: Tensor | None,  # (B, S)
    real: Tensor,  # (T,)
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
    found = found_prefixes(input_ids.flatten()[real], rope[real], documents, absolute=absolute)
    if found is not None and _SHARED not in runtime.warned:
        runtime.warned.add(_SHARED)
        rows, tokens = sum(len(starts) for _, starts in found.prompts), len(found.source)
        print_rank0(
            f"custom: {_SHARED}: {tokens} tokens of the first such batch, in which {rows} "
            f"documents share {len(found.prompts)}, are {len(found.kept)} ({found.saved:.0%} less)"
        )
    return found


def _why_not_shared(base: Any, runtime: Runtime, input_ids: Tensor | None) -> str | None:
    if input_ids is None:
        return "the call has inputs_embeds, which are not compared"
    if runtime.shards is not None:
        return "ranks share rows"
    adapters = (x for layer in layers_of(base) for x in layer_adapters(*layer, look).values())
    if base.training and any(adapter.dropout for adapter in adapters):
        return "dropout of adapters draws another mask for each row"
    return None
