"""One tiny training run under any engine, and how it is launched, killed and compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.run as torchrun
from accelerate.commands import launch as accelerate_launch
from paths import PYTHONPATH, ROOT
from safetensors.torch import load_file
from small_families import family_config
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.train.output import METRICS

ACCELERATE, TORCHRUN = accelerate_launch.__file__, torchrun.__file__
"""Launchers as scripts, which a warm process need not import again: what they start is new."""
STEPS = 4
ROWS_A_STEP = 4


def batch(processes: int) -> list[str]:
    return ["--gradient_accumulation_steps", str(ROWS_A_STEP // processes)]


def environment(gpus: int = 0) -> dict[str, str]:
    """One thread a process: two processes with two each on two cores are slower than one."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "PYTHONPATH": os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")]),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def of_family(family: str, job: list[str], folder: Path) -> list[str]:
    """The same run with a model of another family, which goes to `folder`."""
    at = job.index("--model_name_or_path") + 1
    shutil.copytree(job[at], folder)
    vocab_size = AutoConfig.from_pretrained(job[at]).vocab_size
    config = family_config(family, vocab_size=vocab_size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return [*job[:at], str(folder), *job[at + 1 :]]


LORA = ["--lora_r", "4"]
DORA = [*LORA, "--use_dora", *"--dtype bfloat16 --max_steps 2 --save_strategy no".split()]
DORA += ["--loraplus_lr_ratio", "4"]


def launch(processes: int, *words: str) -> list[str]:
    if processes == 1:
        return [sys.executable, *words]
    launcher = [sys.executable, TORCHRUN, "--standalone"]
    return [*launcher, "--nproc_per_node", str(processes), *words]


def run(command: list[str], gpus: int = 0) -> str:
    env = environment(gpus)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Hugging Face's layers run" not in done.stdout  # an engine's hooks are no strangers
    return done.stderr


class Launched:
    """Runs of a script in so many processes, each on a GPU of its own, by a launcher."""

    def run(self, processes: int, *words: str) -> str:
        return run(launch(processes, *words), gpus=processes)

    def kill_after_saving(self, folder: Path, processes: int, *words: str) -> None:
        """Runs until the second step's checkpoint is there, then kills every process at once."""
        log = folder.parent / "stderr"
        with log.open("w") as stderr:
            command, env = launch(processes, *words), environment(processes)
            process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=stderr)
        while not (folder / "checkpoint-2").exists():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.05)
        launcher = psutil.Process(process.pid)
        for victim in [*launcher.children(recursive=True), launcher]:  # each has its own session
            victim.kill()
        process.wait()
        assert not (folder / "final").exists()


class Warm:
    """The same on CPUs, forked from a warm process (warm.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            cwd=ROOT,
            env=environment() | {"TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ended(self, processes: int, *words: str, until: Path | None = None) -> tuple[int, str]:
        """The first status that is not 0, and all that was said."""
        self.runs += 1
        log = self.folder / f"{self.runs}.log"
        job = {"processes": processes, "words": words, "log": str(log)}
        job["until"] = until and str(until)
        assert self.process.stdin and self.process.stdout
        print(json.dumps(job), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
        return next(filter(None, statuses), 0), log.read_text()

    def run(self, processes: int, *words: str) -> str:
        status, said = self.ended(processes, *words)
        assert status == 0, said[-3000:]
        assert "Hugging Face's layers run" not in said
        return said

    def kill_after_saving(self, folder: Path, processes: int, *words: str) -> None:
        status, said = self.ended(processes, *words, until=folder / "checkpoint-2")
        assert status == -signal.SIGKILL, said[-3000:]
        assert not (folder / "final").exists()

    def end(self) -> None:
        """By a word: a child that another test has forked may hold this end of the pipe open."""
        assert self.process.stdin
        print("end", file=self.process.stdin, flush=True)
        self.process.wait()


def on_cpu(config: Path, folder: Path) -> str:
    """The published file without pinned memory, which a machine without a GPU has not."""
    path = folder / config.name
    path.write_text(config.read_text().replace('"pin_memory": true', '"pin_memory": false'))
    return str(path)


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def assert_same_run(folder: Path, vanilla: Path) -> None:
    """fp32 on both sides: they differ by the order of sums."""
    ours, theirs = lines_of(folder), lines_of(vanilla)
    # DeepSpeed's norm of the same gradients differs by 1e-4 from torch's, for vanilla as well.
    for key, rel in (("loss", 2e-5), ("eval_loss", 2e-5), ("grad_norm", 5e-4)):
        a, b = ([line[key] for line in lines if key in line] for lines in (ours, theirs))
        assert len(a) >= len(b) >= 1
        assert a[-len(b) :] == pytest.approx(b, rel=rel), key
    weights, truth = (trained_weights(f / "final") for f in (folder, vanilla))
    assert weights.keys() == truth.keys()
    for name, p in weights.items():  # Adam moves 3e-3 a step
        torch.testing.assert_close(p, truth[name], rtol=0, atol=2e-4, msg=name)


def assert_near_run(folder: Path, truth: Path) -> None:
    """Over 16 bits, where another order of sums moves what was rounding noise by a learning rate.
    Adapters are trained in fp32: their weights have other bits than those of bf16."""
    ours, theirs = lines_of(folder), lines_of(truth)
    for key, rel in (("loss", 2e-5), ("eval_loss", 2e-5), ("grad_norm", 5e-4)):
        a, b = ([line[key] for line in lines if key in line] for lines in (ours, theirs))
        assert a == pytest.approx(b, rel=rel) and b, key
    found, expected = (trained_weights(f / "final") for f in (folder, truth))
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        assert (found[name] - p).norm() <= 0.02 * p.norm(), name
        assert not torch.equal(found[name].bfloat16().float(), found[name]), name


def trained_weights(final: Path) -> dict[str, torch.Tensor]:
    """The weights of a model, or those of an adapter."""
    if (adapter := final / "adapter_model.safetensors").exists():
        return load_file(adapter)
    return dict(AutoModelForCausalLM.from_pretrained(final).named_parameters())


def assert_adapters_alone(folder: Path, job: list[str]) -> None:
    """Checkpoints and `final/` hold adapters in fp32 and their states, and no whole model."""
    base = Path(job[job.index("--model_name_or_path") + 1], "model.safetensors")
    checkpoint = max(folder.glob("checkpoint-*"))
    assert sum(f.stat().st_size for f in checkpoint.rglob("*")) < base.stat().st_size / 2
    for place in (checkpoint, folder / "final"):
        found = load_file(place / "adapter_model.safetensors")
        assert len(found) == 4 * 7 * 2 and all("lora_" in name for name in found)
        assert {x.dtype for x in found.values()} == {torch.float32}
