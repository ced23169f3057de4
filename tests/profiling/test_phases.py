"""profiling/phases.py: every moment of a step goes to exactly one line of the table."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from browser import open_page
from paths import ROOT

MAIN, AUTOGRAD = 11, 22


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch):
    from profiling import phases

    return phases


class Trace:
    """A trace as kineto writes it: `annotation` and `op` on a thread, `kernel` with its launch."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self.number = 0

    def _add(self, cat: str, name: str, tid: int, ts: float, dur: float, **args) -> None:
        event = dict(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur, args=args)
        self.events.append(event)

    def annotation(self, name: str, ts: float, end: float, tid: int = MAIN) -> None:
        self._add("user_annotation", name, tid, ts, end - ts)

    def op(self, name: str, ts: float, end: float, tid: int = MAIN) -> None:
        self._add("cpu_op", name, tid, ts, end - ts)

    def kernel(
        self, launched: float, ts: float, end: float, tid: int = MAIN, name: str = "k"
    ) -> None:
        self.number += 1
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self._add("cuda_runtime", "cudaLaunchKernel", tid, launched, 1, correlation=self.number)
        self._add(cat, name, 7, ts, end - ts, correlation=self.number)

    def link(self, forward: float, backward: float) -> None:
        """Autograd's node at `backward` differentiates the operator at `forward`."""
        self.number += 1
        flow = dict(cat="fwdbwd", name="fwdbwd", id=self.number, pid=1)
        self.events.append(dict(flow, ph="s", tid=MAIN, ts=forward))
        self.events.append(dict(flow, ph="f", tid=AUTOGRAD, ts=backward, bp="e"))

    def as_json(self) -> dict:
        return {"traceEvents": self.events}


def seconds(table) -> dict[str, float]:
    """In the trace's microseconds a step."""
    return {name: round(value * 1e6, 6) for name, value in table.seconds.items() if value}


def test_a_gpu_step_is_given_out_to_the_last_microsecond(phases) -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#3", 0, 100)
    # The host launches everything early; the kernels run long after their ranges have closed.
    trace.annotation("layer forward", 0, 20)
    trace.annotation("mlp", 1, 9)
    trace.annotation("norm", 2, 4)
    trace.kernel(launched=3, ts=20, end=30)  # norm, the innermost range
    trace.kernel(launched=5, ts=30, end=50)  # mlp
    trace.kernel(launched=10, ts=50, end=55)  # layer forward alone is no phase: other
    trace.kernel(launched=11, ts=45, end=65, name="Memcpy DtoH (Device -> Pinned)")
    trace.kernel(launched=12, ts=60, end=70, name="ncclDevKernel_AllGather")
    trace.kernel(launched=13, ts=75, end=80, name="Memcpy DtoD (Device -> Device)")
    table = phases.phase_table(trace.as_json())
    assert seconds(table) == {
        "norm": 10,
        "mlp": 20,
        "other": 5 + 5,
        "communication not hidden": 10,  # 60 to 70, beside a copy
        "copies not hidden": 5,  # 55 to 60: the rest of it runs beside a kernel or NCCL
        "idle": 20 + 5 + 20,
    }
    assert sum(seconds(table).values()) == 100 and table.on_gpu
    assert table.copies_s == pytest.approx(20e-6)
    assert sum(row["share"] for row in table.rows()) == pytest.approx(1)


def test_autograds_own_backward_takes_the_phase_of_its_forward(phases) -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#0", 0, 50)
    trace.annotation("ProfilerStep#1", 50, 100)
    trace.annotation("mlp", 0, 10)
    trace.op("aten::mm", 1, 5)
    trace.kernel(launched=2, ts=2, end=12)
    trace.op("MmBackward0", 20, 24, tid=AUTOGRAD)
    trace.link(forward=1, backward=20)
    trace.kernel(launched=21, ts=22, end=42, tid=AUTOGRAD)
    # Recomputation inside a backward node: the inner range wins.
    trace.annotation("attention", 30, 40, tid=AUTOGRAD)
    trace.kernel(launched=31, ts=42, end=52, tid=AUTOGRAD)
    # Telling names where there is no range, and none.
    trace.op("LigerFusedLinearCrossEntropyFunction", 60, 64)
    trace.kernel(launched=61, ts=61, end=71)
    trace.annotation("Optimizer.step#AdamW.step", 65, 70)
    trace.kernel(launched=66, ts=71, end=81)
    trace.kernel(launched=90, ts=91, end=93)
    table = phases.phase_table(trace.as_json())
    assert table.steps == 2
    assert seconds(table) == {
        "mlp": (10 + 20) / 2,
        "attention": 10 / 2,
        "loss": 10 / 2,
        "optimizer": 10 / 2,
        "other": 2 / 2,
        "idle": (100 - 62) / 2,
    }


def test_overlapping_work_is_counted_once(phases) -> None:
    item = phases.Item
    assigned, left = phases.assign_time(
        [item(0, 10, "a"), item(5, 20, "b"), item(6, 8, "c"), item(30, 50, "a")],
        [(2, 12), (15, 18), (40, 60)],
    )
    assert dict(assigned) == {"a": 8 + 10, "b": 2 + 3}
    assert left == [(50, 60)]


def test_a_trace_of_a_cpu_says_so(phases, capsys) -> None:
    trace = Trace()
    trace.annotation("ProfilerStep#0", 0, 100)
    trace.annotation("norm", 0, 50)
    trace.op("aten::linear", 10, 40)
    trace.op("aten::addmm", 12, 30)  # the innermost operator stands for the kernel
    table = phases.phase_table(trace.as_json())
    assert seconds(table) == {"norm": 18, "idle": 82} and not table.on_gpu
    phases.show(table)
    assert "no GPU in this" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"not json", "cannot read"),
        (gzip.compress(b"{}"), "is no trace"),
        (gzip.compress(b'{"traceEvents": []}'), "has no ProfilerStep"),
    ],
    ids=["missing", "not gzipped", "no events", "no steps"],  # gzip's bytes hold the time
)
def test_what_is_no_trace_is_one_line(phases, content, message, tmp_path, monkeypatch) -> None:
    path = tmp_path / "trace.json.gz"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["phases.py", str(path)])
    with pytest.raises(SystemExit) as error:
        phases.main()
    assert message in str(error.value) and "\n" not in str(error.value)


TINY = "--layers 2 --wait 0 --preset tiny --seq_len 256 --use_cpu".split()


def check_profile(folder: Path, class_type: str, processes: int) -> None:
    written = json.loads((folder / "phases_rank0.json").read_text())
    share = {row["phase"]: row["share"] for row in written["rows"]}
    known = {"attention", "projections", "mlp", "norm", "rope", "loss", "optimizer", "idle"}
    assert known <= share.keys()
    assert sum(share.values()) == pytest.approx(1)
    assert share.get("other", 0) < 0.2
    assert {row["class_type"] for row in written["rows"]} == {class_type}
    for rank in range(processes):
        with gzip.open(folder / f"trace_rank{rank}.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert "layer forward" in names
        assert ("tile" in names) == (class_type == "custom")
    page = (folder / "profile.html").read_text()
    assert "There is no GPU in this profile. It cannot tell where a step on a GPU would" in page
    opened = open_page(folder / "profile.html", folder)
    assert opened.console == [] and opened.svgs == 1 and opened.ink > 0.01


def test_a_profile_of_huggingfaces_layers_on_a_cpu(phases, tmp_path, monkeypatch, capsys) -> None:
    from transformers.models.llama import modeling_llama

    from profiling import profile_step

    # The profiler names a function of that module: put back afterwards.
    rotation = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotation)
    words = ["--profile_dir", str(tmp_path), *TINY, "--class_type", "vanilla"]
    monkeypatch.setattr(sys, "argv", ["profiling/profile_step.py", *words])
    profile_step.main()
    assert "no memory timeline" in capsys.readouterr().out
    check_profile(tmp_path, "vanilla", 1)


# Forks its two ranks, as a launcher starts them, when everything is imported, once for both.
TWO_RANKS = """
import multiprocessing, os
from profiling import profile_step

def run(rank):
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    profile_step.main()

ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in "01"]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
print("exit codes", *(rank.exitcode for rank in ranks))
"""


def test_a_profile_of_two_processes_on_a_cpu(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = ["--profile_dir", str(tmp_path), *TINY, "--class_type", "custom"]
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **{"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
            **{"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        },
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["exit codes 0 0"], (done.stdout, done.stderr)
    assert done.stdout.count("no memory timeline") == 1
    check_profile(tmp_path, "custom", 2)


def test_a_misspelt_option_is_trainpys_error(phases, monkeypatch) -> None:
    from profiling import profile_step

    monkeypatch.setattr(sys, "argv", ["profile_step.py", "--preset", "tiny", "--seq_length", "5"])
    with pytest.raises(SystemExit, match="write --seq_len,"):
        profile_step.main()
    monkeypatch.setattr(sys, "argv", ["profile_step.py", "--active", "0"])
    with pytest.raises(SystemExit, match="--active must be at least 1"):
        profile_step.main()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # which --memory_only sets: put back
    monkeypatch.setattr(sys, "argv", ["profile_step.py", "--memory_only", "--use_cpu"])
    with pytest.raises(SystemExit, match="--memory_only needs a GPU"):
        profile_step.main()
