"""Files of exact AdamW states: what damages them is one clear line, and nothing else is lost.

Whoever damages a file here takes manifest.json away, or its checksums would notice it first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_run import add_callback, run
from transformers import TrainerCallback

from longctx.errors import UserError
from longctx.train.output.state_files import FORMAT, KEY

EXACT = ["--dtype", "bfloat16", "--place", "host"]
LAYER = "optimizer.01.safetensors"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def exact(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "run"
    run([*flags, *EXACT], folder)
    return folder


@pytest.fixture
def copy(exact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exact, tmp_path / "run"))


def resume(flags: list[str], folder: Path, *more: str) -> None:
    run([*flags, *EXACT], folder, "--resume_from_checkpoint", str(folder / "checkpoint-2"), *more)


def rewrite(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Change:
    """Another content of a layer's file: its tensors and its metadata."""

    def write(checkpoint: Path) -> None:
        tensors = load_file(checkpoint / LAYER)
        with safe_open(checkpoint / LAYER, framework="pt") as file:
            metadata = json.loads(file.metadata()[KEY])
        written = change(tensors, metadata) or metadata
        save_file(tensors, checkpoint / LAYER, {KEY: json.dumps(written)})

    return write


def cut(checkpoint: Path) -> None:
    path = checkpoint / LAYER
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shape(tensors: dict[str, Any], metadata: Any) -> None:
    tensors[f"{WEIGHT}.exp_avg"] = torch.zeros(3, 5)


def another_weight(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    steps = metadata["steps"]
    steps["model.layers.9.weight"] = steps.pop(WEIGHT)
    for kind in ("exp_avg", "exp_avg_sq", "remainder"):
        tensors[f"model.layers.9.weight.{kind}"] = tensors.pop(f"{WEIGHT}.{kind}")


def drop(*keys: str) -> Change:
    return rewrite(lambda tensors, metadata: [tensors.pop(f"{WEIGHT}.{key}") for key in keys][:0])


def remove(*names: str) -> Change:
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


def plain(checkpoint: Path) -> None:
    save_file(load_file(checkpoint / LAYER), checkpoint / LAYER)


CANNOT = "cannot resume from .*checkpoint-2"
NEWER = "which this version of longctx does not read: resume with the one that wrote it"
DAMAGE: dict[str, tuple[Change, str]] = {
    "cut": (cut, CANNOT),
    "a pickle": (lambda checkpoint: torch.save({"a": 1}, checkpoint / LAYER), CANNOT),
    "a tensor of another shape": (rewrite(shape), CANNOT + r".*exp_avg has \(3, 5\)"),
    "no moment": (drop("exp_avg_sq"), CANNOT + ".*no exp_avg_sq: they are not AdamW's"),
    "no tensors": (drop("exp_avg", "exp_avg_sq", "remainder"), CANNOT),
    "a newer format": (rewrite(lambda t, m: m | {"format": "exact AdamW 9"}), f"AdamW 9.*{NEWER}"),
    "no metadata": (plain, NEWER),
    "metadata that is a list": (rewrite(lambda t, m: [FORMAT]), CANNOT),
    "a step that is a word": (rewrite(lambda t, m: m | {"steps": {WEIGHT: "two"}}), CANNOT),
    "a weight that is not trained": (
        rewrite(another_weight),
        r"holds states of 1 weight that this run does not train \(model.layers.9.weight\)",
    ),
    "the last file is missing": (remove("optimizer.03.safetensors"), "holds 3 of 4 files"),
    "all are missing": (
        remove(*(f"optimizer.{n:02d}.safetensors" for n in range(4))),
        "holds no optimizer .* start from its weights with --model_name_or_path",
    ),
    "the schedule is missing": (remove("scheduler.pt"), "holds no scheduler"),
}


@pytest.mark.parametrize(("change", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_line(flags, copy, change, says) -> None:
    checkpoint = copy / "checkpoint-2"
    change(checkpoint)
    (checkpoint / "manifest.json").unlink()
    before = contents(copy)
    with pytest.raises(UserError, match=says) as error:
        resume(flags, copy)
    assert "\n" not in str(error.value)
    assert contents(copy) == before


def contents(folder: Path) -> dict[str, bytes]:
    """By names as they were before later checkpoints were set aside; what was logged is repeated
    from the checkpoint's step on."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("metrics.jsonl", ".lock"):
            name = str(path.relative_to(folder)).removeprefix("abandoned-")
            found[name] = path.read_bytes()
    return found


@pytest.mark.parametrize("name", [LAYER, "optimizer.00.safetensors"])
def test_a_flipped_byte_is_noticed_by_its_checksum(flags, copy, name) -> None:
    path = copy / "checkpoint-2" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"no whole checkpoint.*{name}"):
        resume(flags, copy)


def test_states_that_would_be_rounded_are_refused(flags, copy) -> None:
    before = contents(copy)
    words = [*flags, "--dtype", "bfloat16", "--optimizer_states", "as_weights"]
    with pytest.raises(UserError, match="holds exact fp32 states, which .* would round"):
        run(words, copy, "--resume_from_checkpoint", str(copy / "checkpoint-2"))
    assert contents(copy) == before


def test_states_of_another_dtype_are_refused(flags, copy) -> None:
    before = contents(copy)
    with pytest.raises(UserError, match="dtype torch.bfloat16 -> torch.float32"):
        run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-2"))
    assert contents(copy) == before


def test_fp32_weights_do_not_lose_exact_states(flags, tmp_path) -> None:
    folder = tmp_path / "run"
    run(flags, folder, "--optimizer_states", "fp32")
    with pytest.raises(UserError, match="exact fp32 states: resume with --optimizer_states fp32"):
        run(flags, folder, "--resume_from_checkpoint", str(folder / "checkpoint-2"))
    assert (folder / "checkpoint-2" / LAYER).exists()


def test_torchs_states_go_on_in_fp32(flags, tmp_path, capsys) -> None:
    """Its moments are those of the checkpoint, its masters the weights."""
    folder = tmp_path / "run"
    torchs = ["--dtype", "bfloat16", "--optimizer_states", "as_weights"]
    run([*flags, *torchs], folder)
    saved = torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    with pytest.MonkeyPatch.context() as patch:
        first = First()
        add_callback(first, patch)
        resume(flags, folder)
    out = capsys.readouterr().out
    assert (
        out.count("states of torch's AdamW: they go on in fp32, and the weights as they are") == 1
    )
    assert "optimizer_states as_weights -> None" in out
    assert first.states.keys() == saved.keys()
    for n, states in saved.items():
        ours = first.states[n]
        assert ours["step"] == states["step"] == 2 and not ours["remainder"].any()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert ours[kind].dtype == torch.float32
            assert torch.equal(ours[kind], states[kind].float())
    assert (folder / "checkpoint-4" / LAYER).exists()
    assert not (folder / "checkpoint-4" / "optimizer.pt").exists()


class First(TrainerCallback):
    """Keeps the states before the first step."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        self.states = optimizer.state_dict()["state"]


def test_a_weight_without_states_starts_from_zero(flags, copy, capsys) -> None:
    """As one that was frozen before, or that no row had used."""

    def forget(tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
        del metadata["steps"][WEIGHT]
        for kind in ("exp_avg", "exp_avg_sq", "remainder"):
            del tensors[f"{WEIGHT}.{kind}"]

    rewrite(forget)(copy / "checkpoint-2")
    (copy / "checkpoint-2" / "manifest.json").unlink()
    resume(flags, copy)
    assert f"has no states for 1 weight ({WEIGHT}, ...): they start" in capsys.readouterr().out
    with safe_open(copy / "checkpoint-4" / LAYER, framework="pt") as file:
        steps = json.loads(file.metadata()[KEY])["steps"]
    assert steps.pop(WEIGHT) == 2 and set(steps.values()) == {4}
