"""profiling/bench/smollm2.py's study of adapters, on the small model of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_run import prepare

from longctx.train import cli
from longctx.train.commands import train

pytest.importorskip("peft")
SEQ_LEN = 1024


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    prepare(tmp_path)
    texts = [path.read_text() for path in sorted((tmp_path / "data").iterdir())]
    (tmp_path / "data" / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts)
    )
    held_out = {"text": " ".join(5 * texts)}
    (tmp_path / "data" / "eval.jsonl").write_text(json.dumps(held_out))
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    words += ["--output", str(tmp_path / "s.json"), "--runs", str(tmp_path / "runs")]
    words += ["--seq_len", str(SEQ_LEN), "--windows", "2", "--device", "cpu"]
    more = ["--use_cpu", "--cache_dir", str(tmp_path / "cache"), "--max_steps", "2"]
    return [*words, "--", *more, "--warmup_steps", "0"]


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_before_and_after(name, plain_kernels, words, tmp_path: Path, monkeypatch) -> None:
    """All steps of a kind of adapters: what is trained can be merged, loaded and generates. (On
    CPUs bitsandbytes generates with layers of at least 64 features.)"""
    generates = name == "lora"
    if not generates:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("LONGCTX_COMMIT", "a" * 40)
    from profiling.bench import smollm2

    def in_process(command: list[str], cwd: Path, check: bool) -> None:
        with monkeypatch.context() as place:
            place.chdir(cwd)
            if command[1] == "train.py":
                train.main(command[2:])
            else:
                cli.run(command[3:])

    monkeypatch.setattr("profiling.bench.smollm2_steps.subprocess.run", in_process)
    steps = ["base", f"train-{name}", name, *([f"generate-{name}"] * generates)]
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--study", "lora", "--only", *steps, *words])
    smollm2.main()
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    before, trained, after, *rest = rows
    assert [row["step"] for row in rows] == steps
    assert len(trained["losses"]) == 2 and trained["lora_r"] == 16 and trained["adapter_mib"] > 0
    assert {line["tokens"] for line in after["needles"]} == {128, 256, 512, 1024}
    losses = [[line["loss"] for line in row["loss_by_position"]] for row in (before, after)]
    assert losses[1] < losses[0]
    for generated in rest:
        assert generated["prompt_tokens"] == SEQ_LEN * 30000 // 32768 and generated["text"]
    assert before["rope"]["rope_type"] == after["rope"]["rope_type"]
