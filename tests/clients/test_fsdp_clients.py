"""Under accelerate's FSDP all processes but the first have no weights when they patch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from both import make_model, sentence
from paths import TESTS
from small_run import on_ranks
from small_tokenizer import small_tokenizer

import longctx
from longctx.errors import UserError

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
FSDP |= {"FSDP_VERSION": "2"}


def train(source: Path, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In two processes, forked from this one, which must not import what they do."""

    def check(rank: int, processes: int) -> None:
        from fsdp_job import train_all

        train_all(source, folder)

    for room in ("engines", "clients"):
        patch.syspath_prepend(TESTS / room)
    for name, value in (FSDP | {"CUDA_VISIBLE_DEVICES": ""}).items():
        patch.setenv(name, value)
    folder.mkdir()
    on_ranks(2, check, folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_a_script_that_patches_in_every_process(
    tmp_path: Path, monkeypatch, reference_kernels
) -> None:
    """Trains as vanilla, sharded alike, and runs the schedule in both; with prompts once, too."""
    make_model().save_pretrained(tmp_path / "model")
    found = train(tmp_path / "model", tmp_path / "run", monkeypatch)
    vanilla, patched, shared = (found[name] for name in ("vanilla", "patched", "shared"))
    assert patched["meta"][0] == 0 < patched["meta"][1] and vanilla["ran"] == [0, 0]
    for ours in (patched, shared):
        assert ours["ran"] == [2 * 3, 2 * 3]
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(vanilla[name], rel=2e-5) and len(ours[name]) == 3
    texts = [f"{sentence(3)} {sentence(n)}" for n in range(12)]  # each is trained once
    tokens = sum(map(len, small_tokenizer()(texts)["input_ids"]))
    for run in found.values():  # EfficiencyCallback adds up what the processes count
        assert len(run["tokens of steps"]) == 3
        assert sum(run["tokens of steps"]) == pytest.approx(tokens, rel=1e-9)
    for ours, others in zip(shared["tokens"], patched["tokens"], strict=True):
        assert 0 < ours < 0.9 * others


def test_elsewhere_a_model_without_weights_is_one_line() -> None:
    with pytest.raises(UserError, match="load them and patch then"):
        longctx.patch(make_model().to("meta"))
