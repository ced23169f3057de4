"""profiling/memory_timeline.py: a snapshot made by hand -> bytes by category -> pictures."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from browser import open_page

GIB = 2**30
WEIGHTS, STATES, UNKNOWN, GRADIENT = 0x1000, 0x2000, 0x3000, 0x9000


@pytest.fixture
def timelines(monkeypatch: pytest.MonkeyPatch):
    from profiling import memory_timeline

    return memory_timeline


def frames(*files: str) -> list[dict]:
    """As the allocator records them, innermost first."""
    return [{"filename": f"/src/{file}", "name": "f", "line": 1} for file in files]


LAYER = frames("longctx/layer.py", "longctx/model.py", "train.py")
HEAD = frames("torch/nn/modules/linear.py", "models/llama/modeling_llama.py", "train.py")
MLP = frames("torch/nn/modules/linear.py", "transformers/modeling_layers.py", "train.py")
AGAIN = frames("torch/nn/modules/linear.py", "torch/utils/checkpoint.py")


def snapshot() -> dict:
    """A step with times 0..100: forward from 10, backward from 40, optimizer from 80."""
    trace: list[dict] = []

    def alloc(time_us: int, address: int, gib: float, stack: list[dict]) -> None:
        event = dict(action="alloc", addr=address, size=int(gib * GIB), time_us=time_us)
        trace.append(dict(event, frames=stack, stream=0))

    def free(time_us: int, address: int, gib: float) -> None:
        event = dict(addr=address, size=int(gib * GIB), time_us=time_us, frames=[], stream=0)
        trace.append(dict(event, action="free_requested"))
        trace.append(dict(event, action="free_completed"))

    alloc(10, 0x100, 2, LAYER)  # a layer's input: alive until backward
    alloc(20, 0x200, 4, MLP)  # within forward only
    free(25, 0x200, 4)
    alloc(30, 0x200, 3, HEAD)  # the logits, at an address used before
    alloc(45, 0x300, 3, [])  # their gradient: no Python frames, the size of the logits
    free(50, 0x200, 3)
    free(55, 0x300, 3)
    alloc(56, 0x300, 1, AGAIN)  # recomputed in backward
    alloc(57, 0x400, 1.5, frames("longctx/offload.py", "longctx/layer.py"))
    alloc(60, GRADIENT, 1, [])
    free(62, 0x300, 1)
    free(65, 0x400, 1.5)
    free(70, 0x100, 2)
    alloc(85, 0x500, 0.5, frames("torch/optim/adamw.py"))
    free(86, 0x500, 0.5)
    free(90, GRADIENT, 1)
    trace.insert(4, dict(action="segment_alloc", addr=0x200, size=4 * GIB, time_us=29, frames=[]))
    free(95, UNKNOWN, 0.25)  # was there before, and nobody knows what it is
    blocks = [
        dict(address=WEIGHTS, size=5 * GIB, state="active_allocated", frames=[]),
        dict(address=STATES, size=6 * GIB, state="active_allocated", frames=[]),
        dict(address=0x100, size=9 * GIB, state="inactive", frames=[]),
    ]
    segment = dict(device=0, address=WEIGHTS, total_size=20 * GIB, blocks=blocks)
    return {"segments": [segment], "device_traces": [trace]}


def marks(timelines):
    from profiling.memory_categories import Marks

    return Marks(
        phases=[("forward", 5), ("backward", 40), ("optimizer", 80)],
        before={WEIGHTS: "weights", STATES: "optimizer"},
        gradients={GRADIENT: 80},
    )


def live_gib(timelines, at_us: int) -> dict[str, float]:
    from profiling.memory_categories import categorise

    live: dict[str, float] = {}
    for change in categorise(snapshot(), marks(timelines)):
        if change.time_us <= at_us:
            live[change.category] = live.get(change.category, 0) + change.allocated_bytes / GIB
    return {name: gib for name, gib in live.items() if gib}


@pytest.mark.parametrize(
    ("at_us", "live"),
    [
        (9, {}),
        (10, {"kept activations": 2}),
        (20, {"kept activations": 2, "working buffers": 4}),
        (30, {"kept activations": 2, "loss": 3}),
        (45, {"kept activations": 2, "loss": 6}),
        (57, {"kept activations": 3.5, "working buffers": 1}),
        (60, {"kept activations": 3.5, "working buffers": 1, "gradients": 1}),
        (70, {"gradients": 1}),
        (85, {"gradients": 1, "optimizer": 0.5}),
        (90, {}),
    ],
)
def test_each_moment_knows_what_its_memory_is_for(timelines, at_us: int, live: dict) -> None:
    before = {"weights": 5, "optimizer": 6, "other": 0.25} if at_us >= 10 else {}
    expected = {name: before.get(name, 0) + live.get(name, 0) for name in {*before, *live}}
    assert live_gib(timelines, at_us) == expected


def test_the_record_keeps_the_peak_and_what_was_reserved(timelines, monkeypatch) -> None:
    about = {"class_type": "vanilla", "tokens": 32768, "layers": 4}
    timeline = timelines.record(snapshot(), marks(timelines), about)
    assert timeline["peak_gib"] == 5 + 6 + 0.25 + 2 + 6
    assert timeline["peak_by_category_gib"]["loss"] == 6
    assert (timeline["reserved_gib"][0], timeline["reserved_gib"][-1]) == (16, 20)
    monkeypatch.setattr(timelines, "POINTS", 4)  # a bin keeps its moment of most memory
    coarse = timelines.record(snapshot(), marks(timelines), about)
    assert len(coarse["time_s"]) <= 4 and coarse["peak_gib"] == timeline["peak_gib"]
    total = [sum(values) for values in zip(*coarse["allocated_gib"].values(), strict=True)]
    assert max(total) == pytest.approx(timeline["peak_gib"])


def test_nothing_recorded_is_an_error(timelines) -> None:
    with pytest.raises(ValueError, match="recorded nothing on GPU 1"):
        timelines.record({"segments": [], "device_traces": [[], []]}, marks(timelines), {}, 1)


def test_two_class_types_side_by_side_in_a_browser(timelines, tmp_path, monkeypatch) -> None:
    paths = []
    for class_type in ("custom", "vanilla"):
        about = {"class_type": class_type, "tokens": 131072, "layers": 4, "capacity_gib": 24.0}
        about |= {"hardware": "none: made by hand", "command": "python <x>", "commit": "abc"}
        paths.append(tmp_path / f"{class_type}.json.gz")
        timelines.save(timelines.record(snapshot(), marks(timelines), about), paths[-1])
    words = ["memory_timeline.py", *map(str, paths), "--output", str(tmp_path / "both")]
    monkeypatch.setattr(sys, "argv", words)
    timelines.main()
    assert (tmp_path / "both.png").stat().st_size > 10000
    page = (tmp_path / "both.html").read_text()
    assert "vanilla, 131,072 tokens, 4 layers" in page and "python &lt;x&gt;" in page
    opened = open_page(tmp_path / "both.html", tmp_path, height=1600)
    assert opened.console == [] and opened.svgs == 1
    assert opened.colours >= 4  # weights, optimizer, kept activations, loss at the least


@pytest.mark.parametrize("content", [None, "{}", "x"])
def test_what_is_no_timeline_is_one_line(timelines, content, tmp_path, monkeypatch) -> None:
    path = tmp_path / "memory.json.gz"
    if content is not None:
        timelines.gzip.open(path, "wt").write(content)
    words = ["memory_timeline.py", str(path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as error:
        timelines.main()
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)


def test_the_recorder_marks_phases_and_writes_both_files(timelines, tmp_path, monkeypatch) -> None:
    """The callback on a CPU step, with the allocator's functions answering by hand."""
    from profiling import memory_recorder
    from profiling.build import PhaseMarks, build_trainer

    asked: list[dict] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: asked.append(kw), False)
    monkeypatch.setattr(memory, "_snapshot", snapshot, False)
    flags = ["--preset", "tiny", "--seq_len", "64", "--use_cpu"]
    trainer, _ = build_trainer(flags, steps=2, output_dir=tmp_path / "run", layers=1)
    about = {"class_type": "custom", "tokens": 64}
    recorder = memory_recorder.RecordMemory(trainer, 1, about, tmp_path / "memory_rank0")
    trainer.add_callback(recorder)
    trainer.add_callback(PhaseMarks(trainer, recorder.mark))
    trainer.train()
    assert asked[0]["max_entries"] > 10000 and asked[1] == {"enabled": None}
    assert [name for name, _ in recorder.marks.phases] == ["forward", "backward", "optimizer"]
    assert json.dumps(timelines.read(tmp_path / "memory_rank0.json.gz")["marks"])
    assert (tmp_path / "memory_rank0.pickle").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
def test_a_real_step_on_a_gpu(timelines, class_type: str, tmp_path: Path, monkeypatch) -> None:
    """Categories against what is known: weights, Adam's two moments, gradients, all in bf16."""
    from profiling import profile_step

    words = ["--profile_dir", str(tmp_path), "--preset", "llama-3.2-1b", "--layers", "2"]
    words += ["--seq_len", "4096", "--class_type", class_type]
    args, flags = profile_step.parse(words)
    gc.collect()
    earlier_gib = torch.cuda.memory_allocated() / GIB  # of other tests
    trainer = profile_step.run(args, flags)
    weights_gib = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / GIB
    timeline = timelines.read(tmp_path / "memory_rank0.json.gz")
    most = {name: max(gib) for name, gib in timeline["allocated_gib"].items()}
    assert most["weights"] == pytest.approx(weights_gib, rel=0.02)
    assert most["optimizer"] >= 2 * weights_gib * 0.98
    assert most["gradients"] == pytest.approx(weights_gib, rel=0.05)
    assert most["kept activations"] > 0 and most["working buffers"] > 0
    logits_gib = 4096 * 128256 * 2 / GIB
    assert most["loss"] > (2 * logits_gib if class_type == "vanilla" else 0.2)
    assert most["other"] < earlier_gib + 0.3  # cuBLAS's workspaces
    assert timeline["peak_gib"] <= max(timeline["reserved_gib"])
    rows = json.loads((tmp_path / "phases_rank0.json").read_text())["rows"]
    share = {row["phase"]: row["share"] for row in rows}
    assert share["mlp"] > 0.05 and share["attention"] > 0.01 and share["loss"] > 0.05
    assert share.get("other", 0) < 0.1
