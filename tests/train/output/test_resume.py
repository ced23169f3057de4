"""Resuming runs no code from a checkpoint, holds no second copy of it, names what is damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from freed_memory import give_back_freed_memory
from safetensors.torch import load_file, save_file
from small_run import run
from transformers import TrainerState

from longctx.errors import UserError
from longctx.train.options.config import TrainArguments
from longctx.train.output.resume import integrity_problem, mapped_files, resolve_resume
from longctx.train.trainer.callbacks import MetricsFile


def test_a_run_that_is_over_says_so(flags, copy, capsys) -> None:
    before = (copy / "final" / "model.safetensors").read_bytes()
    run(flags, copy, "--resume_from_checkpoint", "last")
    out, err = capsys.readouterr()
    assert "checkpoint-4 is where this run ends: nothing was left" in out
    assert "missing keys" not in out + err  # the embedding's weight is lm_head's
    assert (copy / "final" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("named", ["/gone/run/checkpoint-2", "/etc"])
def test_the_best_checkpoint_of_a_moved_run_becomes_final(flags, copy, capsys, named) -> None:
    """No loss comes below the one that its state tells. One that names another folder begins
    again."""
    path = copy / "checkpoint-4" / "trainer_state.json"
    told = {"best_model_checkpoint": named, "best_metric": 1e-9, "best_global_step": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    (copy / "checkpoint-4" / "manifest.json").unlink()
    text = flags[flags.index("--train_file") + 1] + "/0.txt"
    evaluating = ["--eval_file", text, "--eval_strategy", "steps", "--eval_steps", "2"]
    resume = ["--resume_from_checkpoint", str(copy / "checkpoint-4"), "--max_steps", "6"]
    old = (copy / "checkpoint-2" / "model.safetensors").read_bytes()
    run(flags, copy, *resume, *evaluating, "--load_best_model_at_end")
    final, new = (
        (copy / name / "model.safetensors").read_bytes() for name in ("final", "checkpoint-6")
    )
    assert final == (new if named == "/etc" else old) and old != new
    said = "names /etc as its best checkpoint, which is not in"
    assert (said in capsys.readouterr().out) == (named == "/etc")


def test_a_checkpoint_without_some_weights_is_refused(flags, copy) -> None:
    """transformers would keep those that the model had before, with a warning."""
    path = copy / "checkpoint-2" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    (path.parent / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"1 of the model's weights are not in .*1.mlp.up_proj"):
        run(flags, copy, "--resume_from_checkpoint", str(path.parent))


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


FILES = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "legacy"),
    [(FILES[0], True), *((name, i % 2 > 0) for i, name in enumerate(FILES))],
)
def test_no_file_of_a_checkpoint_runs_code(flags, copy, tmp_path, name, legacy) -> None:
    checkpoint = copy / "checkpoint-2"
    if name == "pytorch_model.bin":  # read where there is no safetensors file
        (checkpoint / "model.safetensors").unlink()
    (checkpoint / "manifest.json").unlink()  # whoever plants a file would do that too
    payload = Payload(tmp_path / "ran")
    if legacy:
        (checkpoint / name).write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, checkpoint / name)
    resume = ("--resume_from_checkpoint", str(checkpoint))
    if name == "training_args.bin":  # never read
        run(flags, copy, *resume)
    else:
        with pytest.raises(UserError, match="checkpoint-2.*from another checkpoint") as error:
            run(flags, copy, *resume)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "empty state", "cut manifest"])
def test_last_passes_over_a_damaged_checkpoint(copy: Path, damage: str, capsys) -> None:
    newest = copy / "checkpoint-4"
    victim = newest / ("trainer_state.json" if "state" in damage else "model.safetensors")
    if damage == "cut manifest":
        (newest / "manifest.json").write_text('{"model.saf')
    elif damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:1000] if damage == "cut" else b"")
    args = TrainArguments(output_dir=str(copy), use_cpu=True, resume_from_checkpoint="last")
    assert resolve_resume(args) == copy / "checkpoint-2"
    assert f"not resuming from {newest}" in capsys.readouterr().out
    args.resume_from_checkpoint = str(newest)
    with pytest.raises(UserError, match="checkpoint-4 is no whole checkpoint"):
        resolve_resume(args)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_flipped_bytes_are_one_clear_line(flags, copy, name) -> None:
    path = copy / "checkpoint-2" / name
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(UserError, match="checkpoint-2") as error:
        run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-2"))
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_model(flags, copy, tmp_path) -> None:
    state = copy / "checkpoint-2" / "optimizer.pt"
    states = torch.load(state, weights_only=True)
    states["param_groups"][0]["params"].pop()
    torch.save(states, state)
    (copy / "checkpoint-2" / "manifest.json").unlink()
    with pytest.raises(UserError, match="cannot resume from .*parameter group"):
        run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-2"))


def anonymous_kib() -> int:
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0])


def taken(path: Path, way: Callable[[], AbstractContextManager[Any]]) -> tuple[int, float]:
    """The memory of its own, in KiB, that a process takes to read moments; and some of these."""
    before = anonymous_kib()
    with way():
        state = torch.load(path, map_location="cpu", weights_only=True)
    total = sum(float(t[0, 0]) for t in state["state"][0].values() if t.dim())
    return anonymous_kib() - before, total


def test_the_optimizer_is_mapped_not_copied(tmp_path: Path) -> None:
    """Two moments of 64 MiB: read, they are 128 MiB of the process's own memory; mapped, they
    are pages of the file, which the kernel takes back as they are copied to the GPU."""
    weight = torch.nn.Parameter(torch.zeros(16, 2**20))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    give_back_freed_memory()
    found = []
    for way in (nullcontext, mapped_files):  # a process each, which begins with the same memory
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(taken, (tmp_path / "optimizer.pt", way)))
    (read_kib, total), (mapped_kib, same) = found
    assert total == same == pytest.approx(0.101)
    assert read_kib > 120 * 1024
    assert mapped_kib < 8 * 1024


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"global_step": null}', '{"new_field": 1}'])
def test_damaged_descriptions_of_a_checkpoint_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    assert integrity_problem(tmp_path) == "trainer_state.json is unreadable"
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    assert integrity_problem(tmp_path) is None
    (tmp_path / "manifest.json").write_text("[]")
    assert integrity_problem(tmp_path) == "manifest.json is unreadable"


def test_damaged_lines_of_metrics_are_dropped_on_resume(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 2}', "{}", "null", '{"step": "x"}', '{"step": 2}', '{"step": 3}']
    text = "".join(line + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n" + text.encode())
    state = TrainerState(global_step=2)
    MetricsFile().on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state, None)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert kept == ['{"step": 1, "loss": 2}', '{"step": 2}']
