"""Groups for tests: every token of all of them has an id of its own, above PAD."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from longctx.train.data.pack.packing_groups import GroupStats, pack_groups
from longctx.train.data.reading.groups import AnswerGroup

PAD = 0
Row = dict[str, np.ndarray]


def make_groups(shapes: list[list[int]], first_side: int = 0) -> list[AnswerGroup]:
    """A group for each [prompt, answer, ...] of lengths."""
    made, first_id = [], 1
    for record, lengths in enumerate(shapes):
        parts = []
        for length in lengths:
            parts.append(np.arange(first_id, first_id + length, dtype=np.int32))
            first_id += length
        prompt, *answers = parts
        sides = tuple(range(first_side, first_side + len(answers)))
        made.append(AnswerGroup(prompt, tuple(answers), sides, record, margin=record / 2 or None))
    return made


@st.composite
def some_groups(draw: st.DrawFn, answers: tuple[int, int] = (1, 2)) -> list[AnswerGroup]:
    lengths = st.lists(st.integers(1, 25), min_size=1 + answers[0], max_size=1 + answers[1])
    return make_groups(draw(st.lists(lengths, min_size=1, max_size=20)))


def packed(groups: list[AnswerGroup], seq_len: int, **options) -> tuple[list[Row], GroupStats]:
    stats = GroupStats()
    given = {"long_documents": "truncate", "pad_token_id": PAD, "where": "record {}".format}
    rows = list(pack_groups(groups, seq_len, stats=stats, **{**given, **options}))
    return rows, stats
