"""Groups into rows of `seq_len` tokens: each prompt once, followed by its answers, never cut apart.

Whole groups go into rows as documents do (packing.py). seq_len 12, a prompt `pqr` with the answers
`ab` and `c`, a prompt `st` with the answer `xyz`, padding `_`:

    input_ids       p    q    r  a  b  c     s    t  x  y  z     _
    labels       -100 -100 -100  a  b  c  -100 -100  x  y  z  -100
    position_ids    0    1    2  3  4  3     0    1  2  3  4     0
    lengths         3, 2, 1,  2, 3,  1        tokens of each document of the row, padding last
    parents        -1, 0, 0, -1, 3, -1        the document that each one continues
    sides          -1, 0, 1, -1, 0, -1        of answers (groups.py); -1 for prompts and padding
    documents       the numbers of the two records, one a group
    margins         one a group, NaN where the record names none

Labels are NOT shifted, and every token of an answer has one: its first token is predicted by the
prompt's last, also where another answer lies between them. batches.py makes batches of such rows.

A group that is longer than a row is handled as --long_documents says:

    split            refused, because half a group compares nothing
    truncate         all answers keep at most L tokens, the largest L with which the group fits
    truncate_start   the prompt loses its beginning; one with images is left out instead

For KTO each answer gets a mismatched one beside it: the answers of the next record in the shuffled
order, the last record those of the first. TRL gives each example the answer before it, cyclically
within each batch of per_device_train_batch_size examples of the unshuffled data. Both use every
answer once as a mismatched one if all records have equally many answers. Here the answers of the KL
estimate are those of other rows, so a batch's two sets of answers differ, while TRL's are equal.
The estimate is unbiased either way: the answers are drawn independently of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice

import numpy as np
from datasets import Features, List, Value

from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError, many
from longctx.train.data.pack.packing import (
    OPEN_ROWS,
    TOKEN_COLUMNS,
    LongDocuments,
    best_fit,
    left_out,
)
from longctx.train.data.reading.groups import MISMATCHED, TASKS, Group, Rows

GROUP_ROW_FEATURES = Features(
    {
        **{name: List(Value("int32")) for name in (*TOKEN_COLUMNS, "documents")},
        **{name: List(Value("int32")) for name in ("lengths", "parents", "sides")},
        "margins": List(Value("float32")),
    }
)


@dataclass(kw_only=True)
class GroupStats:
    """Counts of packing: groups that were packed, cut or left out, unless a name says `tokens`,
    `answers` or `rows`."""

    kind: Rows = "pairs"
    groups: int = 0
    """Groups that were packed. The three counts of tokens below are of these alone."""
    answers: int = 0
    """Answers in them, without mismatched ones."""
    desirable: int = 0
    """Those of them that were chosen or are desirable."""
    tokens: int = 0
    separate_tokens: int = 0
    """Tokens of the same groups with a copy of the prompt before each answer."""
    answer_tokens: int = 0
    equal: int = 0
    """Groups left out because their two answers are the same tokens."""
    too_long: int = 0
    """Groups left out because cutting cannot make them fit."""
    images: int = 0
    """Images in the groups that were packed."""
    uncut: list[str] = field(default_factory=list)
    """The names of the groups with images among those that are too long."""
    truncated: int = 0
    truncated_tokens: int = 0
    diverged: int = 0
    """Groups whose answers do not begin where the chat template's generation prompt ends."""
    rows: int = 0
    padding_tokens: int = 0
    largest_token_id: int = -1

    def summary(self, seq_len: int, use: str = "trained") -> str:
        """The line that a run prints; `use` says what becomes of the tokens that count."""
        prompts, answers = many(self.groups, "prompt"), many(self.answers, "answer")
        rated = f"{prompts} with {answers}, {self.desirable:,} of them desirable"
        what = many(self.groups, "pair") if self.kind == "pairs" else rated
        saved = 1 - self.tokens / max(1, self.separate_tokens)
        padding = self.padding_tokens / max(1, self.rows * seq_len)
        parts = []
        if self.truncated:
            parts.append(f"{many(self.truncated_tokens, 'token')} cut from {self.truncated:,}")
        if self.equal:
            parts.append(f"left out: {self.equal:,} with equal answers")
        if self.too_long:
            names = left_out(self.uncut)
            parts.append(
                f"left out: {self.too_long:,} too long"
                + (f", {len(self.uncut):,} with images: {names}" if names else "")
            )
        parts.append(f"{self.padding_tokens:,} padding = {padding:.1%}")
        images = f" and {many(self.images, 'image')}" if self.images else ""
        return (
            f"{what}, {many(self.tokens, 'token')}{images} ({self.separate_tokens:,} without "
            f"sharing prompts, {saved:.1%} saved) -> {many(self.rows, 'row')} of {seq_len:,} "
            f"({'; '.join(parts)}); {self.answer_tokens:,} are of answers"
        )

    def warnings(self) -> list[str]:
        """Returns lines about groups whose data or chat template the user may want to change."""
        if not self.diverged:
            return []
        return [
            f"{self.diverged:,} of {self.groups:,} prompts are rendered differently by the chat "
            "template alone and before their answers: the answers begin where both diverge, as in "
            "TRL, so the model is trained on another context than it sees when it generates"
        ]


def check_groups(stats: GroupStats, name: str) -> None:
    """Raises UserError where the records of `name` gave no row."""
    if stats.rows == 0:
        raise UserError(
            f"nothing to train on in {name}: {many(stats.equal, 'record')} with equal answers, and "
            f"{stats.too_long:,} that do not fit into --seq_len"
        )


def pack_groups(
    groups: Iterable[Group],
    seq_len: int,
    *,
    long_documents: LongDocuments,
    pad_token_id: int,
    stats: GroupStats,
    where: Callable[[int], str],
    mismatched: bool = False,
    open_rows: int = OPEN_ROWS,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows of GROUP_ROW_FEATURES; counts in `stats`. `where` names a record by its number.

    `mismatched` adds as many answers of the next group to each. Groups without answers are skipped.
    Raises UserError for a group that is longer than a row under `split`, and for a single group
    that would need another one's answers.
    """
    usable = _usable(groups, stats)
    if mismatched:
        usable = with_mismatched(usable)
    fitting = _fitting(usable, seq_len, long_documents, stats, where)
    for packed in best_fit(fitting, seq_len, open_rows):
        stats.rows += 1
        stats.padding_tokens += seq_len - sum(map(len, packed))
        yield build_group_row(packed, seq_len, pad_token_id)


def build_group_row(groups: list[Group], seq_len: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Lays groups one after another into a row and fills it up with padding."""
    input_ids = np.full(seq_len, pad_token_id, dtype=np.int32)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int32)
    position_ids = np.empty(seq_len, dtype=np.int32)
    lengths: list[int] = []
    parents: list[int] = []
    sides: list[int] = []
    start = 0

    def add(ids: np.ndarray, parent: int, side: int, position: int) -> None:
        nonlocal start
        end = start + len(ids)
        input_ids[start:end] = ids
        if side >= 0:
            labels[start:end] = ids
        position_ids[start:end] = np.arange(position, position + len(ids))
        lengths.append(len(ids))
        parents.append(parent)
        sides.append(side)
        start = end

    for group in groups:
        prompt = len(lengths)
        add(group.prompt, -1, -1, 0)
        for answer, side in zip(group.answers, group.sides, strict=True):
            add(answer, prompt, side, len(group.prompt))
    if start < seq_len:
        add(input_ids[start:], -1, -1, 0)
    margins = [np.nan if group.margin is None else group.margin for group in groups]
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "documents": np.array([group.record for group in groups], np.int32),
        "lengths": np.array(lengths, np.int32),
        "parents": np.array(parents, np.int32),
        "sides": np.array(sides, np.int32),
        "margins": np.array(margins, np.float32),
    }


def with_mismatched(groups: Iterable[Group]) -> Iterator[Group]:
    """Each group with as many answers of the next one as it has itself, which is the first one for
    the last. Raises UserError for a single group."""
    following = iter(groups)
    first = next(following, None)
    if first is None:
        return
    current, second = first, next(following, None)
    if second is None:
        raise UserError(
            f"{TASKS['rated']} needs at least two records: it compares each prompt's answers with "
            "another prompt's"
        )
    for after in chain([second], following, [first]):
        borrowed = tuple(islice(cycle(after.answers), len(current.answers)))
        yield replace(
            current,
            answers=(*current.answers, *borrowed),
            sides=(*current.sides, *[MISMATCHED] * len(borrowed)),
        )
        current = after


def _usable(groups: Iterable[Group], stats: GroupStats) -> Iterator[Group]:
    """Groups of at least one answer, without those whose answers are equal.

    Public datasets hold a few equal pairs. Their loss has no gradient (or trains both answers up
    and down), so they are left out and counted: to end the run at such a record would help nobody.
    """
    for group in groups:
        if not group.answers:
            continue
        largest = max(int(ids.max(initial=-1)) for ids in (group.prompt, *group.answers))
        stats.largest_token_id = max(stats.largest_token_id, largest)
        if _has_equal_answers(group):
            stats.equal += 1
        else:
            yield group


def _has_equal_answers(group: Group) -> bool:
    own = [a for a, side in zip(group.answers, group.sides, strict=True) if side != MISMATCHED]
    return len(own) == 2 and np.array_equal(own[0], own[1])


def _fitting(
    groups: Iterable[Group],
    seq_len: int,
    long_documents: LongDocuments,
    stats: GroupStats,
    where: Callable[[int], str],
) -> Iterator[Group]:
    """Groups of at most seq_len tokens."""
    following = iter(groups)
    for group in following:
        if len(group) > seq_len:
            if long_documents == "split":
                longer = [group, *(other for other in following if len(other) > seq_len)]
                raise _too_long(longer, seq_len, where)
            cut = cut_group(group, seq_len, long_documents)
            if cut is None:
                stats.too_long += 1
                if group.images:
                    stats.uncut.append(where(group.record))
                continue
            if _has_equal_answers(cut):  # they differed in what was cut
                stats.equal += 1
                continue
            stats.truncated += 1
            stats.truncated_tokens += len(group) - len(cut)
            group = cut
        stats.groups += 1
        stats.answers += sum(side != MISMATCHED for side in group.sides)
        stats.desirable += group.sides.count(0)
        stats.tokens += len(group)
        stats.separate_tokens += group.separate_tokens
        stats.answer_tokens += len(group) - len(group.prompt)
        stats.diverged += group.dropped > 0
        stats.images += group.images
        yield group


def cut_group(group: Group, seq_len: int, long_documents: LongDocuments) -> Group | None:
    """The group in seq_len tokens; None where a prompt that keeps its tokens leaves no room for the
    answers, or answers that keep theirs none for the prompt, or a prompt with images less."""
    if long_documents == "truncate_start":
        if group.images:
            return None
        room = seq_len - (len(group) - len(group.prompt))
        return replace(group, prompt=group.prompt[-room:]) if room >= 1 else None
    longest = _longest_answer([len(a) for a in group.answers], seq_len - len(group.prompt))
    if longest < 1:
        return None
    return replace(group, answers=tuple(answer[:longest] for answer in group.answers))


def _longest_answer(lengths: list[int], room: int) -> int:
    """The largest L with sum(min(length, L)) <= room: short answers leave their share to others."""
    left = sorted(lengths)
    while left and left[0] * len(left) <= room:
        room -= left.pop(0)
    return room // len(left) if left else max(lengths)


def _too_long(groups: list[Group], seq_len: int, where: Callable[[int], str]) -> UserError:
    longest = max(groups, key=len)
    others = f" ({len(groups) - 1:,} others are too long as well)" if len(groups) > 1 else ""
    smaller = ", lower --image_pixels" if longest.images else ""
    return UserError(
        f"{where(longest.record)}: prompt and answers take {len(longest):,} tokens, more than "
        f"--seq_len {seq_len:,}{others}: raise --seq_len{smaller}, or cut the answers' ends with "
        "--long_documents truncate or the prompt's start with --long_documents truncate_start"
    )
