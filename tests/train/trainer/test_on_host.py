"""Batches say on the host where documents begin, so that no step reads it back from the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from both import arguments, make_model
from torch import Tensor
from torch.utils.data import default_collate
from transformers import TrainingArguments

import longctx
from longctx.attention.documents import Documents
from longctx.train.trainer.on_host import BoundsOnHost, as_tensors

pytestmark = pytest.mark.usefixtures("reference_kernels")


def rows(count: int = 6) -> list[dict[str, Tensor]]:
    """Rows of three documents each."""
    positions = torch.cat([torch.arange(n) for n in (5, 1, 10)])
    drawn = [
        torch.randint(3, 60, (16,), generator=torch.Generator().manual_seed(n))
        for n in range(count)
    ]
    return [{"input_ids": ids, "labels": ids, "position_ids": positions} for ids in drawn]


def test_what_a_batch_says() -> None:
    batch = default_collate(rows(2))
    made = BoundsOnHost(lambda _: batch)([])
    assert "cu_seq_lens_q" not in batch
    assert isinstance(made["cu_seq_lens_q"], np.ndarray)
    assert made["cu_seq_lens_q"].tolist() == [0, 5, 6, 16, 21, 22, 32]
    assert as_tensors(made)["cu_seq_lens_q"].device.type == "cpu"


@pytest.mark.parametrize(
    "more",
    [
        {"attention_mask": torch.ones(2, 16)},
        {"position_ids": torch.zeros(3, 2, 16)},
        {"position_ids": None},
        {"position_ids": None, "cu_seq_lens_q": [0, 5, 32], "parents": [-1, 0]},
        {"position_ids": torch.zeros(2, 16, device="meta")},
    ],
)
def test_batches_that_stay_as_they_are(more) -> None:
    batch = default_collate(rows(2)) | more
    made = BoundsOnHost(lambda _: batch)([])
    assert made.keys() == batch.keys() and all(made[k] is x for k, x in batch.items())


def test_bounds_and_parents_that_a_collator_made_stay_on_the_host() -> None:
    given = Documents.of([4, 2, 3], [None, 0, 0]).arguments()
    made = BoundsOnHost(lambda _: given)([])
    assert {name for name, x in made.items() if isinstance(x, np.ndarray)} == {
        "cu_seq_lens_q",
        "parents",
    }
    assert all(torch.equal(x, given[name]) for name, x in as_tensors(made).items())


def train(folder: Path, on_host: bool) -> Any:
    torch.manual_seed(0)
    trainer = longctx.LongTrainer(
        longctx.patch(make_model()),
        TrainingArguments(**arguments(folder, eval_strategy="epoch")),
        seq_len=16,
        train_dataset=rows(),
        eval_dataset=rows(2),
        data_collator=default_collate,
    )
    if not on_host:
        assert isinstance(trainer.data_collator, BoundsOnHost)
        trainer.data_collator = default_collate
    trainer.train()
    return trainer


def test_a_run_has_the_same_bits_and_reads_no_positions(scheduled, tmp_path, monkeypatch) -> None:
    truth = train(tmp_path / "truth", on_host=False)
    collating: list[bool] = []
    of_positions, collate = Documents.from_position_ids, BoundsOnHost.__call__

    def watched(self: Any, given: Any) -> Any:
        collating.append(True)
        try:
            return collate(self, given)
        finally:
            collating.pop()

    def read(positions: Tensor) -> Documents:
        assert collating, "a step reads positions"
        return of_positions(positions)

    monkeypatch.setattr(BoundsOnHost, "__call__", watched)
    monkeypatch.setattr(Documents, "from_position_ids", read)
    found = train(tmp_path / "found", on_host=True)
    losses = [
        [line.get("loss", line.get("eval_loss")) for line in t.state.log_history]
        for t in (truth, found)
    ]
    assert losses[0] == losses[1] and len(losses[0]) > 2
    for p, q in zip(truth.model.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(p, q)
