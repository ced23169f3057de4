"""Documents of a batch that begin with the same tokens: their prompt is computed once.

    batch, two rows        computed: documents P, a, b     returned
    [P P P a a]            [P P P a a b]                   [P P P a a]
    [P P P b .]            parents    -   0   0            [P P P b .]

`found` compares the documents and chooses the prompts; attention/prefixes.py computes attention.
`spread` returns hidden states in the batch's shape, and its backward sums the gradients of a shared
token in fp32.

The prompts that any two documents share form a tree. Each document may use one node on its path,
and k documents at a node of d tokens save (k - 1) d tokens. `best_groups` finds the most that can
be saved. Prompts of fewer than `LEAST_TOKENS` are not shared: they would save less than another
launch of each kernel costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.kernels.launch import once_differentiable

LEAST_TOKENS = 256
MOST_COMPARED = 2**31
"""The most pairs of tokens that one batch compares: 512 documents of 8192 tokens."""
PIECE = 2**22
"""Elements of gradients that are summed at a time: 16 MiB in fp32."""


class Group(NamedTuple):
    """Documents, by their numbers, which share their first `tokens` tokens."""

    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Sharing:
    """The tokens of a batch that are computed, of T without padding."""

    documents: Documents
    kept: Tensor  # (computed,) int64: numbers of the tokens
    shift: Tensor | None  # (computed,): added to positions, where prompts do not begin alike
    source: Tensor  # (T,) int64: the computed token that stands for each
    prompts: list[tuple[slice, list[int]]]
    """The computed tokens of each shared prompt, and its first token in the batch for each
    document."""

    @property
    def saved(self) -> float:
        """The share of the batch's tokens that is not computed."""
        return 1 - len(self.kept) / len(self.source)


def found(
    ids: Tensor,  # (T,)
    positions: Tensor,  # (T,)
    documents: Documents,
    *,
    absolute: bool = False,
    least: int | None = None,
) -> Sharing | None:
    """Returns how to compute the batch; None if no prompt is worth sharing. Reads the lengths that
    documents have in common from the device: one synchronisation.

    Positions must rise by 1 in each document. They need not begin with the same number, since
    attention depends on their differences; where it does not (`absolute`), only documents with
    equal first positions share.
    """
    lengths, least = documents.lengths, LEAST_TOKENS if least is None else least
    count = len(lengths)
    if sum(n >= least for n in lengths) < 2 or count**2 * max(lengths) > MOST_COMPARED:
        return None
    starts = [part.start for part in documents.slices()]
    common, begins = _compared(ids, positions, starts, lengths)
    for i in range(count):
        for j in range(count):
            if begins[i] is None or begins[j] is None or (absolute and begins[i] != begins[j]):
                common[i][j] = 0
    groups = best_groups(common, least)
    return _sharing(groups, starts, lengths, begins, ids.device) if groups else None


def _compared(
    ids: Tensor, positions: Tensor, starts: list[int], lengths: tuple[int, ...]
) -> tuple[list[list[int]], list[int | None]]:
    """Returns the number of first tokens that each two documents have in common, and each
    document's first position, or None if its positions do not rise by 1."""
    device, longest = ids.device, max(lengths)
    begin, ends = (torch.tensor(x, device=device)[:, None] for x in (starts, lengths))
    columns = torch.arange(longest, device=device)
    beyond = columns >= ends
    where = (begin + columns).clamp_(max=len(ids) - 1)
    # Beyond its end each document has a negative number that no other has: nothing is equal.
    numbers = -1 - torch.arange(len(lengths), device=device)[:, None]
    rows = torch.where(beyond, numbers, ids[where])
    found = [_first(rows != row) for row in rows]
    rises = ((positions[where] - columns == positions[begin]) | beyond).all(1)
    first = torch.where(rises, positions[begin[:, 0]], -1)
    *common, first = torch.stack([*found, first]).tolist()
    return common, [None if x < 0 else x for x in first]


def _first(different: Tensor) -> Tensor:  # (documents, L) -> (documents,)
    """Returns the first column where each row is true; L if there is none."""
    column = different.to(torch.uint8).argmax(1)
    return torch.where(different.any(1), column, different.shape[1])


# --- which documents share which prompt ------------------------------------------------------


class _Best(NamedTuple):
    """The most tokens that groups below a node save, if these documents are left for a node
    above."""

    saved: int
    groups: tuple[Group, ...]
    left: tuple[int, ...]


def best_groups(common: list[list[int]], least: int) -> list[Group]:
    """Returns the groups that save the most tokens, each with a prompt of at least `least`;
    `common[i][j]` is the number of first tokens that documents i and j have in common."""
    everyone = list(range(len(common)))
    return sorted(_choices(everyone, common, least)[0].groups)


def _choices(members: list[int], common: list[list[int]], least: int) -> dict[int, _Best]:
    """Returns the best choice for each number of documents that are left for a node above."""
    if len(members) == 1:
        return {0: _Best(0, (), ()), 1: _Best(0, (), (members[0],))}
    depth = min(common[members[0]][i] for i in members[1:])
    choices = {0: _Best(0, (), ())}
    for below in _branches(members, common, depth):
        choices = _joined(choices, _choices(below, common, least))
    if depth >= least:
        for left, (saved, groups, documents) in list(choices.items()):
            here = saved + (left - 1) * depth
            if left > 1 and here > choices[0].saved:
                group = Group(tuple(sorted(documents)), depth)
                choices[0] = _Best(here, (*groups, group), ())
    return choices


def _branches(members: list[int], common: list[list[int]], depth: int) -> list[list[int]]:
    """Splits the documents by the tokens that they have in common beyond `depth`."""
    branches: list[list[int]] = []
    for i in members:
        mine = next((branch for branch in branches if common[branch[0]][i] > depth), None)
        if mine is None:
            branches.append([i])
        else:
            mine.append(i)
    return branches


def _joined(a: dict[int, _Best], b: dict[int, _Best]) -> dict[int, _Best]:
    found: dict[int, _Best] = {}
    for x in a.values():
        for y in b.values():
            both = _Best(x.saved + y.saved, x.groups + y.groups, x.left + y.left)
            left = len(both.left)
            if left not in found or both.saved > found[left].saved:
                found[left] = both
    return found


# --- the tokens that are computed, and the tokens that they stand for ------------------------


def _sharing(
    groups: list[Group],
    starts: list[int],
    lengths: tuple[int, ...],
    begins: list[int | None],
    device: torch.device,
) -> Sharing:
    group_of = {i: group for group in groups for i in group.members}
    pieces: list[tuple[int, int]] = []  # of the batch: first token, tokens
    parents: list[int | None] = []
    shifts: list[int] = []
    source = torch.empty(sum(lengths), dtype=torch.int64)
    prompts: list[tuple[slice, list[int]]] = []
    computed = 0

    def compute(start: int, tokens: int, parent: int | None, shift: int = 0) -> None:
        nonlocal computed
        source[start : start + tokens] = torch.arange(computed, computed + tokens)
        pieces.append((start, tokens))
        parents.append(parent)
        shifts.append(shift)
        computed += tokens

    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        group = group_of.get(i)
        if group is None:
            compute(start, length, None)
        elif i == group.members[0]:
            number, prompt = len(pieces), slice(computed, computed + group.tokens)
            compute(start, group.tokens, None)
            for j in group.members:
                source[starts[j] : starts[j] + group.tokens] = torch.arange(
                    prompt.start, prompt.stop
                )
                begin, first = begins[j], begins[i]
                assert begin is not None and first is not None
                rest = starts[j] + group.tokens, lengths[j] - group.tokens
                compute(*rest, number, first - begin)
            prompts.append((prompt, [starts[j] for j in group.members]))
    kept = torch.cat([torch.arange(start, start + tokens) for start, tokens in pieces])
    counts = torch.tensor([tokens for _, tokens in pieces])
    shift = torch.tensor(shifts).repeat_interleave(counts) if any(shifts) else None
    return Sharing(
        documents=Documents.of(counts.tolist(), parents, device=device),
        kept=kept.to(device, non_blocking=True),
        shift=None if shift is None else shift.to(device, non_blocking=True),
        source=source.to(device, non_blocking=True),
        prompts=prompts,
    )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing, where: Tensor, tokens: int) -> Tensor:
        source = sharing.source.new_full((tokens,), -1)
        source[where] = sharing.source
        ctx.sharing, ctx.where = sharing, where
        y = x.index_select(0, source.clamp(min=0))
        return y.masked_fill_((source < 0)[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sharing, where = ctx.sharing, ctx.where
        dx = dy.index_select(0, where[sharing.kept])
        rows = max(1, PIECE // dy.shape[1])
        for prompt, starts in sharing.prompts:
            for first in range(0, prompt.stop - prompt.start, rows):
                part = slice(prompt.start + first, min(prompt.start + first + rows, prompt.stop))
                total = torch.zeros_like(
                    dx[part], dtype=torch.promote_types(dx.dtype, torch.float32)
                )
                for start in starts:
                    begin = start + first
                    total += dy[where[begin : begin + len(total)]]
                dx[part] = total
        return dx, None, None, None


def spread(
    x: Tensor,  # (computed, D)
    sharing: Sharing,
    where: Tensor,  # (T,) int64: which of the caller's tokens are no padding
    tokens: int,  # of the caller, with padding
) -> Tensor:  # (tokens, D)
    """Returns hidden states in the caller's rows; those of padding are zero."""
    y: Tensor = _Spread.apply(x, sharing, where, tokens)
    return y
