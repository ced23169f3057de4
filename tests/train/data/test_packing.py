from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from longctx.constants import IGNORE_INDEX
from longctx.train.data.pack.packing import TOKEN_COLUMNS, PackingStats, Piece, build_row, pack


def document(length: int, first_id: int = 0) -> Piece:
    ids = np.arange(first_id, first_id + length, dtype=np.int32)
    return Piece(ids, np.arange(length) > 0)


def random_documents(seed: int, count: int = 200, longest: int = 100) -> list[Piece]:
    """Every token of every document has an id of its own."""
    documents, first_id = [], 1000
    for length in np.random.default_rng(seed).integers(2, longest, count):
        documents.append(document(int(length), first_id))
        first_id += int(length)
    return documents


def packed(documents, seq_len, long_documents="split", pad_token_id=7, open_rows=8):
    stats = PackingStats()
    rows = list(
        pack(
            documents,
            seq_len,
            long_documents=long_documents,
            pad_token_id=pad_token_id,
            stats=stats,
            open_rows=open_rows,
        )
    )
    return rows, stats


def test_the_worked_example():
    pieces = [replace(document(5, 10), record=4), replace(document(2, 20), record=9)]
    row = build_row(pieces, 8, pad_token_id=7)
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 14, 20, 21, 7]
    assert row["labels"].tolist() == [-100, 11, 12, 13, 14, -100, 21, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert row["documents"].tolist() == [4, 9]
    assert all(column.dtype == np.int32 for column in row.values())


@pytest.mark.parametrize("seq_len", [2, 3, 16, 17, 64, 1000])
@pytest.mark.parametrize("open_rows", [1, 8])
def test_split_keeps_every_token_exactly_once(seq_len, open_rows):
    documents = random_documents(seed=seq_len)
    rows, stats = packed(documents, seq_len, open_rows=open_rows)
    seen = Counter(int(token) for row in rows for token in row["input_ids"])
    padding = seen.pop(7, 0)
    given = [int(token) for document in documents for token in document.input_ids]
    if seq_len == 2:  # a tail of one token cannot be given company, and trains nothing
        assert set(seen) <= set(given) and len(given) - len(seen) == stats.untrained_tokens
    else:
        assert seen == Counter(given)
        assert stats.untrained_tokens == 0
    assert stats.padding_tokens == padding
    assert stats.tokens == len(given) and stats.rows == len(rows)
    assert all(len(row[name]) == seq_len for row in rows for name in TOKEN_COLUMNS)


@pytest.mark.parametrize("long_documents", ["split", "truncate", "truncate_start"])
def test_labels_never_cross_documents_and_positions_restart(long_documents):
    documents = random_documents(seed=1)
    owner = {int(t): i for i, document in enumerate(documents) for t in document.input_ids}
    rows, stats = packed(documents, 48, long_documents)
    trained = 0
    for row in rows:
        ids, labels, positions = (row[k].tolist() for k in ("input_ids", "labels", "position_ids"))
        assert positions[0] == 0
        for i in range(len(ids)):
            new_segment = i == 0 or owner.get(ids[i]) != owner.get(ids[i - 1])
            if new_segment:
                assert positions[i] == 0
            assert positions[i] in (0, positions[i - 1] + 1)
            assert labels[i] in (IGNORE_INDEX, ids[i])
            if positions[i] == 0 or ids[i] == 7:
                assert labels[i] == IGNORE_INDEX
            else:
                assert labels[i] == ids[i] == ids[i - 1] + 1  # the very next token of the document
            trained += labels[i] != IGNORE_INDEX
    assert trained == stats.trained_tokens


def test_truncate_keeps_the_start_and_counts_the_rest():
    rows, stats = packed([document(10, 100), document(3, 200)], 8, "truncate")
    assert sorted(int(t) for row in rows for t in row["input_ids"] if t != 7) == [
        *range(100, 108),
        *range(200, 203),
    ]
    assert stats.truncated_tokens == 2
    assert stats.padding_tokens == 5
    assert "2 tokens dropped" in stats.summary(8) and "5 padding = 31.2%" in stats.summary(8)


def test_truncate_start_keeps_the_end():
    rows, stats = packed([document(10, 100), document(3, 200)], 8, "truncate_start")
    kept = sorted(int(t) for row in rows for t in row["input_ids"] if t != 7)
    assert kept == [*range(102, 110), *range(200, 203)]
    assert stats.truncated_tokens == 2


def test_a_tail_of_one_token_is_trained():
    rows, stats = packed([document(17, 100)], 8)
    assert [int((row["labels"] != IGNORE_INDEX).sum()) for row in rows] == [7, 6, 1]
    assert stats.untrained_tokens == 0


def test_pieces_without_a_label_are_left_out_and_counted():
    chat = Piece(np.arange(20, dtype=np.int32), np.arange(20) >= 18)  # a long prompt first
    rows, stats = packed([chat, document(1, 50)], 8)
    assert len(rows) == 1 and stats.untrained_tokens == 17
    assert rows[0]["labels"].tolist()[:4] == [-100, -100, 18, 19]


def test_documents_that_fit_are_not_cut():
    documents = random_documents(seed=2, longest=48)
    rows, _ = packed(documents, 48)
    starts = {
        int(row["input_ids"][i])
        for row in rows
        for i in np.flatnonzero((row["position_ids"] == 0) & (row["input_ids"] != 7))
    }
    assert starts == {int(document.input_ids[0]) for document in documents}


def test_best_fit_beats_one_open_row():
    documents = random_documents(seed=3, count=500)
    waste = [packed(documents, 128, open_rows=n)[1].padding_tokens for n in (1, 32)]
    assert waste[1] < 0.4 * waste[0]
    assert waste[1] < 0.06 * 500 * 50


def test_the_first_rows_come_before_the_last_documents():
    """Packing is online: a stream needs no end."""
    taken = 0

    def stream():
        nonlocal taken
        for piece in random_documents(seed=4, count=1000):
            taken += 1
            yield piece

    rows = pack(stream(), 64, long_documents="split", pad_token_id=0, stats=PackingStats())
    next(rows)
    assert taken < 10


def test_blank_documents_disappear():
    assert packed([document(0)], 8)[0] == []
