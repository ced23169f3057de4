"""The recipes for other trainers, each where its framework is installed: the schedule runs, and the
losses are those of the framework without longctx."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from both import LAYERS, make_model, sentence
from small_tokenizer import small_tokenizer

import longctx

pytestmark = pytest.mark.usefixtures("reference_kernels")
RECIPES = Path(__file__).parents[2] / "recipes"
LINE = f"longctx patched: {LAYERS} scheduled decoder layers"


def recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path) -> Path:
    make_model().save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("\n".join(map(sentence, range(60))))
    return tmp_path


def test_lightning(folder, monkeypatch, capsys, scheduled) -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning, which CI has not")
    script, losses = recipe("lightning_sft"), []
    step = script.Finetune.training_step

    def recorded(self: Any, ids: Any, number: int) -> Any:
        loss = step(self, ids, number)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(script.Finetune, "training_step", recorded)
    words = [str(folder / name) for name in ("model", "notes.txt", "out")]
    for patch in (lambda model, **options: model, longctx.patch):
        monkeypatch.setattr(longctx, "patch", patch)
        lightning.seed_everything(1)
        script.main([*words, "--seq_len", "32", "--max_steps", "3", "--learning_rate", "1e-3"])
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-5)
    assert capsys.readouterr().out.count(LINE) == 1 and scheduled == 3 * LAYERS * [32]
    assert (folder / "out/model.safetensors").is_file()
