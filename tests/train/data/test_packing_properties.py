"""Packing, for any documents: what hypothesis could not break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.constants import IGNORE_INDEX
from longctx.train.data.pack.packing import PackingStats, Piece, pack

PAD = 0
Row = dict[str, np.ndarray]


@st.composite
def documents(draw: st.DrawFn) -> list[Piece]:
    """Up to 30 documents; every token of all of them has an id of its own, above PAD."""
    made, first_id = [], 1
    for record, length in enumerate(draw(st.lists(st.integers(0, 60), max_size=30))):
        trained = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), bool)
        trained[:1] = False
        ids = np.arange(first_id, first_id + length, dtype=np.int32)
        made.append(Piece(ids, trained, record))
        first_id += length
    return made


def run(
    docs: list[Piece], seq_len: int, long_documents: str, open_rows: int
) -> tuple[list[Row], PackingStats]:
    stats = PackingStats()
    rows = pack(
        docs,
        seq_len,
        long_documents=long_documents,  # type: ignore[arg-type]
        pad_token_id=PAD,
        stats=stats,
        open_rows=open_rows,
    )
    return list(rows), stats


def segments(row: Row) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """ids, labels and positions of each stretch between two zeros of position_ids."""
    starts = [*np.flatnonzero(row["position_ids"] == 0), len(row["position_ids"])]
    for a, b in zip(starts, starts[1:], strict=False):
        ids, labels, positions = (row[k][a:b] for k in ("input_ids", "labels", "position_ids"))
        yield ids.tolist(), labels.tolist(), positions.tolist()


any_packing = given(
    docs=documents(),
    seq_len=st.integers(1, 70),
    long_documents=st.sampled_from(["split", "truncate", "truncate_start"]),
    open_rows=st.integers(1, 8),
)


@settings(max_examples=150, deadline=None)
@any_packing
def test_every_token_is_in_one_row_or_counted_as_left_out(
    docs, seq_len, long_documents, open_rows
) -> None:
    rows, stats = run(docs, seq_len, long_documents, open_rows)
    seen = Counter(int(token) for row in rows for token in row["input_ids"])
    padding = seen.pop(PAD, 0)
    given_tokens = {int(token) for document in docs for token in document.input_ids}
    assert set(seen) <= given_tokens
    assert all(count == 1 for count in seen.values())
    left_out = stats.untrained_tokens + stats.truncated_tokens
    assert len(seen) == len(given_tokens) - left_out
    assert padding == stats.padding_tokens == len(rows) * seq_len - len(seen)
    assert stats.tokens == len(given_tokens) and stats.rows == len(rows)


@settings(max_examples=150, deadline=None)
@any_packing
def test_a_segment_is_one_stretch_of_one_document(docs, seq_len, long_documents, open_rows) -> None:
    """So attention and labels never cross documents, whatever reads position_ids."""
    rows, _ = run(docs, seq_len, long_documents, open_rows)
    owner = {int(t): n for n, document in enumerate(docs) for t in document.input_ids}
    for row in rows:
        parts = list(segments(row))
        named = [owner[ids[0]] for ids, _, _ in parts if ids[0] != PAD]
        assert row["documents"].tolist() == named
        for number, (ids, _, positions) in enumerate(parts):
            assert positions == list(range(len(ids)))
            if ids[0] == PAD:
                assert number == len(parts) - 1 and set(ids) == {PAD}
            else:
                assert ids == list(range(ids[0], ids[0] + len(ids)))
                assert {owner[token] for token in ids} == {owner[ids[0]]}


@settings(max_examples=150, deadline=None)
@any_packing
def test_labels_are_the_trained_tokens_but_the_first_of_a_segment(
    docs, seq_len, long_documents, open_rows
) -> None:
    rows, stats = run(docs, seq_len, long_documents, open_rows)
    trained = {
        int(t)
        for d in docs
        for t, is_trained in zip(d.input_ids, d.trained, strict=True)
        if is_trained
    }
    labelled = 0
    for row in rows:
        for ids, labels, _ in segments(row):
            assert labels[0] == IGNORE_INDEX
            for token, label in zip(ids[1:], labels[1:], strict=True):
                assert label == (token if token in trained else IGNORE_INDEX)
                labelled += label != IGNORE_INDEX
    assert labelled == stats.trained_tokens


@settings(max_examples=50, deadline=None)
@any_packing
def test_a_document_that_fits_is_not_cut(docs, seq_len, long_documents, open_rows) -> None:
    rows, _ = run(docs, seq_len, long_documents, open_rows)
    whole = {(ids[0], len(ids)) for row in rows for ids, _, _ in segments(row) if ids[0] != PAD}
    for document in docs:
        if 0 < len(document) <= seq_len and document.trained.any():
            assert (int(document.input_ids[0]), len(document)) in whole
