"""Both layouts of a batch score the same tokens of the same answers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_groups import PAD, make_groups, packed, some_groups

from longctx.attention.documents import Documents
from longctx.train.data.pack.batches import collate_separate, collate_shared
from longctx.train.data.pack.packing_groups import build_group_row

SCORING = ("targets", "answers", "sides", "groups", "rows", "records", "margins")


def test_the_worked_example():
    first, second = make_groups([[3, 2, 1], [2, 3]])
    row = build_group_row([first, second], 12, PAD)
    shared = collate_shared([row, row])
    assert shared["input_ids"].shape == (2, 12)
    bounds = [0, 3, 5, 6, 8, 11, 12, 15, 17, 18, 20, 23, 24]
    assert shared["cu_seq_lens_q"].tolist() == bounds
    assert shared["parents"].tolist() == [-1, 0, 0, -1, 3, -1, -1, 6, 6, -1, 9, -1]
    assert shared["predictors"].tolist()[:6] == [2, 3, 2, 7, 8, 9]
    assert shared["targets"].tolist()[:6] == [4, 5, 6, 9, 10, 11]
    assert shared["answers"].tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5]
    assert shared["sides"].tolist() == [0, 1, 0] * 2
    assert shared["groups"].tolist() == [0, 0, 1, 2, 2, 3]
    assert shared["rows"].tolist() == [0, 0, 0, 1, 1, 1]
    assert shared["records"].tolist() == [0, 1, 0, 1]
    separate = collate_separate([row, row])
    assert separate["input_ids"][1].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert separate["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert separate["predictors"].tolist()[6:] == [16, 17, 21, 24, 25, 26]


batches = given(
    groups=some_groups(answers=(1, 3)), spare=st.integers(0, 50), mismatched=st.booleans()
)


def collated(groups, spare, mismatched):
    mismatched = mismatched and len(groups) > 1
    seq_len = spare + 2 * max(map(len, groups))
    rows, _ = packed(groups, seq_len, mismatched=mismatched)
    return rows, collate_shared(rows), collate_separate(rows)


@settings(max_examples=100, deadline=None)
@batches
def test_layouts_agree(groups, spare, mismatched):
    _, shared, separate = collated(groups, spare, mismatched)
    for name in SCORING:
        assert torch.equal(shared[name].nan_to_num(), separate[name].nan_to_num()), name
    for batch in (shared, separate):
        ids, positions = batch["input_ids"].flatten(), batch["position_ids"].flatten()
        first = batch["answers"].diff(prepend=torch.tensor([-1])) != 0
        here = batch["predictors"] + 1
        assert torch.equal(ids[here[~first]], batch["targets"][~first])
        assert torch.equal(positions[here[~first]], positions[batch["predictors"][~first]] + 1)
    same = [batch["input_ids"].flatten()[batch["predictors"]] for batch in (shared, separate)]
    assert torch.equal(*same)
    same = [batch["position_ids"].flatten()[batch["predictors"]] for batch in (shared, separate)]
    assert torch.equal(*same)


@settings(max_examples=100, deadline=None)
@batches
def test_separate_streams_are_prompt_and_answer(groups, spare, mismatched):
    _, _, batch = collated(groups, spare, mismatched)
    ids, positions = batch["input_ids"].numpy(), batch["position_ids"].numpy()
    streams = []
    for row_ids, row_positions in zip(ids, positions, strict=True):
        starts = np.flatnonzero(row_positions == 0)
        pieces = np.split(row_ids, starts[1:])
        assert all(p.tolist() == list(range(len(p))) for p in np.split(row_positions, starts[1:]))
        streams += [piece.tolist() for piece in pieces if piece[0] != PAD]
        # Only the longest row has no padding.
        assert sum(piece[0] == PAD for piece in pieces) <= 1
    assert len(streams) == len(batch["sides"])
    counts = np.bincount(batch["answers"].numpy())
    targets = np.split(batch["targets"].numpy(), np.cumsum(counts)[:-1])
    for number, stream in enumerate(streams):
        group = groups[batch["records"][batch["groups"][number]]]
        side = int(batch["sides"][number])
        expected = targets[number].tolist()
        assert stream == [*group.prompt.tolist(), *expected]
        if side in group.sides:
            own = [a.tolist() for a in group.answers]
            assert expected in own or mismatched
    assert any(row_ids[-1] != PAD for row_ids in ids)


@settings(max_examples=100, deadline=None)
@batches
def test_the_shared_layout_is_what_attention_takes(groups, spare, mismatched):
    rows, batch, _ = collated(groups, spare, mismatched)
    documents, _ = Documents.of_batch(
        batch["position_ids"], None, batch["cu_seq_lens_q"], batch["parents"]
    )
    arguments = documents.arguments()
    assert torch.equal(arguments["position_ids"][0], batch["position_ids"].flatten())
    assert torch.equal(arguments["cu_seq_lens_q"], batch["cu_seq_lens_q"])
    assert torch.equal(arguments["parents"], batch["parents"])
    labels = np.concatenate([row["labels"] for row in rows])
    assert labels[labels >= 0].tolist() == batch["targets"].tolist()


@pytest.mark.parametrize("collate", [collate_shared, collate_separate])
def test_types_and_processes(collate):
    """Rows may be lists, and workers of a data loader get the function by its name."""
    row = build_group_row(make_groups([[3, 2, 1]]), 8, PAD)
    batch = pickle.loads(pickle.dumps(collate))([{k: v.tolist() for k, v in row.items()}])
    kinds = {name: x.dtype for name, x in batch.items()}
    assert kinds.pop("margins") == torch.float32
    assert kinds.pop("cu_seq_lens_q", torch.int32) == torch.int32
    assert set(kinds.values()) == {torch.int64}
