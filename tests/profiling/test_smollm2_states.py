"""profiling/bench/smollm2.py's study of states: how far the weights moved, and the picture."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from small_run import prepare
from transformers import LlamaForCausalLM

from longctx.errors import UserError
from longctx.train.commands import train
from profiling.bench import smollm2, weights_moved


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_COMMIT", "a" * 40)
    from profiling.bench import weights_moved as states

    return states


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command's, for the small run of the tests with a model in bf16."""
    prepare(tmp_path)
    model = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    texts = [path.read_text() for path in sorted((tmp_path / "data").iterdir())]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    words = ["--model", str(model), "--data", str(tmp_path / "data"), "--rows", "2"]
    words += ["--output", str(tmp_path / "s.json"), "--runs", str(tmp_path / "runs")]
    words += ["--seq_len", "64", "--", "--use_cpu", "--cache_dir", str(tmp_path / "cache")]
    return [*words, "--warmup_steps", "0", "--max_steps", "8"]


def run(states, monkeypatch, words: list[str], *more: str) -> list[list[str]]:
    """Runs the command with its runs in this process; returns their flags."""
    asked = []

    def in_process(command: list[str], cwd: Path, check: bool) -> None:
        assert command[:2] == [sys.executable, "train.py"] and check
        asked.append(command[2:])
        with monkeypatch.context() as place:
            place.chdir(cwd)
            train.main(command[2:])

    monkeypatch.setattr("profiling.bench.smollm2_steps.subprocess.run", in_process)
    monkeypatch.setattr(
        sys, "argv", ["profiling/bench/smollm2.py", "--study", "states", *more, *words]
    )
    smollm2.main()
    return asked


def read(tmp_path: Path) -> dict[tuple[str, float], dict[str, Any]]:
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    return {(row["states"], row["learning_rate"]): row for row in rows}


def test_bf16_states_lose_what_exact_ones_keep(
    states, reference_kernels, words, tmp_path: Path, monkeypatch
) -> None:
    rate, flags = states.PARTS["-1e-5"]
    assert flags[:2] == ["--max_steps", "20"]
    monkeypatch.setitem(states.PARTS, "-1e-5", (rate, ["--max_steps", "4", *flags[2:]]))
    assert len(run(states, monkeypatch, words)) == 6
    rows = read(tmp_path)
    assert list(rows) == [(name, rate) for rate in (3e-4, 1e-5) for name in states.RUNS]
    for (name, rate), row in rows.items():
        assert len(row["losses"]) == (8 if rate == 3e-4 else 4)
        assert row["seq_len"] == 64 and row["rows"] == 2 and row["tokens_per_s"] > 0
        assert ("distance" in row) == (name != "truth")
    for rate in (3e-4, 1e-5):
        exact, rounded = rows["fp32", rate], rows["as_weights", rate]
        assert exact["distance_masters"] < 0.1 and 0.95 < exact["share_moved_masters"] < 1.05
        assert exact["distance_masters"] < 0.5 * rounded["distance"]
        assert exact["rms_loss_difference"] < rounded["rms_loss_difference"]
    assert rounded["share_moved"] < 0.5 and rounded["share_unchanged"] > 0.7  # of 1e-5
    assert exact["share_unchanged"] < rounded["share_unchanged"]
    height, width, _ = image.imread(tmp_path / "s.png").shape
    assert (width, height) == (1320, 770)


def test_a_part_is_made_again_alone(
    states, reference_kernels, words, tmp_path: Path, monkeypatch
) -> None:
    short = [*words, "--max_steps", "2"]
    first = run(states, monkeypatch, short, "--only", "as_weights", "truth")
    assert [flags[flags.index("--dtype") + 1] for flags in first] == ["float32", "bfloat16"]
    (again,) = run(states, monkeypatch, short, "--only", "as_weights")
    assert again == first[1]
    assert list(read(tmp_path)) == [("truth", 3e-4), ("as_weights", 3e-4)]


@pytest.mark.parametrize(
    ("study", "more", "message"),
    [
        ("states", ["--windows", "4"], "--windows has no effect on states"),
        ("32k", ["--rows", "4"], "--rows has no effect on 32k"),
        ("lora", ["--only", "base", "yarn"], "lora has no yarn, but base train-lora"),
        ("64k", [], "invalid choice: '64k'"),
    ],
)
def test_what_a_study_does_not_have_is_refused(study, more, message, tmp_path, capsys) -> None:
    words = ["--study", study, "--model", "m", "--data", "d", "--output", str(tmp_path / "s.json")]
    with pytest.raises(SystemExit):
        smollm2.parse([*words, *more])
    assert message in capsys.readouterr().err


def test_the_recorded_command_makes_the_whole_file(tmp_path) -> None:
    words = ["--study", "states", "--model", "m", "--data", "d", "--output"]
    args = smollm2.parse([*words, str(tmp_path / "s.json"), "--only", "truth", "--rows", "1"])
    assert args.seq_len == 2048 and args.windows is None
    recorded = smollm2.command(args)
    assert recorded.endswith("--output profiling/results/s.json --rows 1")
    again = smollm2.parse(shlex.split(recorded)[2:])
    assert again.only == [*smollm2.STUDIES["states"].steps, "picture"] and again.rows == 1


def test_measures() -> None:
    """Of four weights, two moved in truth, by 3 and 4: |t - w0| = 5."""
    start, truth = {"a": torch.zeros(3), "b": torch.ones(1)}, {"a": torch.tensor([3.0, 0, 0])}
    truth["b"] = torch.tensor([5.0])
    found = weights_moved.measure(
        start, truth, {"a": torch.tensor([3.0, 0, -2]), "b": torch.ones(1)}
    )
    assert found == {
        "distance": math.sqrt((16 + 4) / 25),
        "share_moved": 9 / 25,
        "share_unchanged": 2 / 4,
    }


def test_masters_are_measured_beside_their_bf16_weights() -> None:
    """1 + 2^-9 is the master of 1 in bf16, 1 + 3 2^-9 that of 1 + 2^-7."""
    start = {"w": torch.ones(2, dtype=torch.bfloat16)}
    masters = {"w": torch.tensor([1 + 2**-9, 1 + 3 * 2**-9])}
    found = weights_moved.compare(start, masters, masters)
    assert found["distance_masters"] == 0 and found["share_moved_masters"] == 1
    assert found["share_unchanged"] == 0.5 and "share_unchanged_masters" not in found
    assert found["distance"] == math.sqrt(2 / 10) and found["share_moved"] == 12 / 10
    with pytest.raises(UserError, match="different names"):
        weights_moved.compare(start, masters, {"v": masters["w"]})


def test_what_could_not_be_compared_is_refused_before_a_run(
    states, words, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(SystemExit, match="add truth-1e-5 to --only"):
        run(states, monkeypatch, words, "--only", "fp32-1e-5")
    with pytest.raises(SystemExit, match="truth, fp32, as_weights first"):
        run(states, monkeypatch, words, "--only", "picture")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match="is in torch.float32: bfloat16 is needed"):
        run(states, monkeypatch, words)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="holds no .safetensors"):
        run(states, monkeypatch, words)
