"""The recipes for other trainers, each where its framework is installed: the schedule runs, and the
losses are those of the framework without longctx."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
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


def losses_of(module: str, words: list[str], folder: Path) -> tuple[list[float], int]:
    """Returns the losses that a command logs, and how often it prints longctx's line."""
    path = os.pathsep.join([str(RECIPES), str(RECIPES.parent)])
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled", "USE_HF": "1"},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    return [float(x) for x in re.findall(r"'loss': '?([\d.]+)", said)], said.count(LINE)


def records(folder: Path, **record: Any) -> str:
    (folder / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 16)
    return str(folder / "data.jsonl")


def assert_same_losses(run: Any) -> None:
    (vanilla, none), (ours, once) = run(False), run(True)
    assert len(ours) == 3 and ours == pytest.approx(vanilla, rel=1e-3)
    assert (none, once) == (0, 1)


def test_swift(folder) -> None:
    pytest.importorskip("swift.arguments", reason="needs ms-swift, which CI has not")
    turns = [{"role": role, "content": sentence(0)} for role in ("user", "assistant")]
    words = f"--model model --model_type llama --template dummy --output_dir {folder / 'out'}"
    words += f" --dataset {records(folder, messages=turns)} --tuner_type full --torch_dtype float32"
    words += " --max_steps 3 --per_device_train_batch_size 4 --gradient_accumulation_steps 1"
    words += " --max_length 64 --logging_steps 1 --learning_rate 1e-3 --save_strategy no --seed 1"
    words += " --report_to none --use_cpu true"
    plugin = ["--external_plugins", str(RECIPES / "swift_longctx.py")]
    assert_same_losses(
        lambda ours: losses_of("swift.cli.sft", [*words.split(), *(plugin if ours else [])], folder)
    )


def test_axolotl(folder) -> None:
    pytest.importorskip("axolotl", reason="needs axolotl, which CI has not")
    data = {"path": records(folder, text=sentence(0)), "type": "completion", "ds_type": "json"}
    numbers = dict(sequence_len=64, micro_batch_size=4, gradient_accumulation_steps=1, max_steps=3)
    settings = dict(
        base_model="model",
        datasets=[data],
        dataset_prepared_path="prepared",
        output_dir="out",
        learning_rate=1e-3,
        optimizer="adamw_torch",
        lr_scheduler="constant",
        attn_implementation="sdpa",
        logging_steps=1,
        save_strategy="no",
        seed=1,
        gradient_checkpointing=True,
        **dict.fromkeys(("bf16", "fp16", "tf32", "sample_packing"), False),
        **numbers,
    )
    plugin = dict(plugins=["axolotl_longctx.LongctxPlugin"], longctx={"keep": "x"})

    def run(ours: bool) -> tuple[list[float], int]:
        (folder / "config.yaml").write_text(json.dumps(settings | (plugin if ours else {})))
        return losses_of("axolotl.cli.train", ["config.yaml"], folder)

    assert_same_losses(run)
