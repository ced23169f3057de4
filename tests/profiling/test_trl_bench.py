"""profiling/bench/trl_bench.py: the same rows for TRL's trainer and for ours."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from profiling.bench import trl_bench
from profiling.ladders import ladder_of

TINY = dict(preset="tiny", layers=2, tokens=512, states="fp32")


def test_rows_are_the_same_in_every_run_and_full() -> None:
    rows, again = (trl_bench.PackedRows(3, 32768, 1000) for _ in range(2))
    for index, lengths in enumerate(rows.lengths):
        row = rows[index]
        assert sum(lengths) == 32768 and again.lengths[index] == lengths
        assert all(torch.equal(row[name], again[index][name]) for name in row)
        starts = (row["position_ids"] == 0).nonzero().flatten()
        assert starts.tolist() == [sum(lengths[:n]) for n in range(len(lengths))]
        assert torch.equal(row["labels"] == -100, row["position_ids"] == 0)
    assert rows.lengths[0] != rows.lengths[1]
    assert not torch.equal(rows[0]["input_ids"], rows[1]["input_ids"])


@pytest.mark.parametrize("tokens", [1, 499, 500, 9000, 9001, 9499, 32768, 131072])
def test_documents_have_the_lengths_that_are_said(tokens: int) -> None:
    for seed in range(50):
        lengths = trl_bench.document_lengths(tokens, random.Random(seed))
        assert sum(lengths) == tokens
        assert all(min(500, tokens) <= n <= 9000 for n in lengths)


def test_cases_say_their_settings() -> None:
    cases = trl_bench.BENCH.cases(None)
    assert len({tuple(case.items()) for case in cases}) == len(cases) == 11
    for case in cases:
        ours = case["class_type"] == "custom" or case["layers_by"] == "longctx"
        assert case["offload"] == ("auto" if ours else "none")
        assert (case["checkpointing"] is None) == ours


def measured(**settings: Any) -> dict[str, Any]:
    """Measures a case of the benchmark whose rows hold several documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_bench, "SHORTEST", 50)
        patch.setattr(trl_bench, "LONGEST", 200)
        (row,) = trl_bench.run_case(trl_bench.BENCH.case({**TINY, **settings}), 1, [])
    return row


@pytest.fixture(scope="module")
def ours(plain_kernels) -> dict[str, Any]:
    return measured(class_type="custom", backend="auto")


def test_our_trainer_is_timed(ours) -> None:
    assert ours["status"] == "ok" and ours["step_s"] > 0
    assert ours["tokens_per_s"] == pytest.approx(512 / ours["step_s"], rel=0.01)
    assert len(ladder_of(ours)) == 2 and ours["cut"]["head_groups"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        dict(checkpointing="none", backend="sdpa"),
        dict(checkpointing="layers", backend="sdpa"),
        dict(checkpointing="selective", backend="fa4"),
        dict(layers_by="longctx", backend="auto"),
    ],
)
def test_trl_trains_the_same_rows(ours, settings, reference_kernels) -> None:
    """With the same loss and gradients: its packing, positions and labels are ours. On a CPU only
    `selective` has attention by documents; sdpa gets it from a mask."""
    pytest.importorskip("trl")
    row = measured(**settings)
    assert row["status"] == "ok" and row["class_type"] == "trl"
    assert row["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    assert row["grad_norm"] == pytest.approx(ours["grad_norm"], rel=5e-3)  # bf16 autocast
