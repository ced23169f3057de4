"""profiling/memory_timeline.py: a snapshot made by hand -> bytes by category -> pictures.

The Python stacks in it are real ones, of steps of both class types on the CPU.
"""

from __future__ import annotations

import gc
import gzip
import inspect
import json
import pickle
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from browser import open_page
from small_model import CPU, packed_batch, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from longctx.head import loss, pieces
from longctx.head import stream as head
from longctx.kernels import launch
from longctx.layer import schedule
from longctx.memory.store import ActivationStore
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

GIB = 2**30
WEIGHTS, STATES, UNKNOWN, GRADIENT = 0x1000, 0x2000, 0x3000, 0x9000


@pytest.fixture
def timelines(monkeypatch: pytest.MonkeyPatch):
    from profiling import memory_timeline

    return memory_timeline


# --- real stacks -----------------------------------------------------------------------------

Stack = list[dict[str, Any]]
"""As the allocator records it, innermost first."""


class Call(NamedTuple):
    """An operator that a step called."""

    phase: str
    part: str
    """Told by the functions and modules that called it; no file's name is looked at."""
    stack: Stack


FUNCTIONS = {
    inspect.unwrap(function).__code__: part
    for function, part in (
        (loss.linear_cross_entropy, "loss"),
        (pieces.RowCount.__init__, "loss"),
        (head._Reduced.forward, "loss"),
        (head._Reduced.backward, "loss"),
        (ForCausalLMLoss, "loss"),
        (ActivationStore.load, "store"),
        (ActivationStore.retire, "store"),
        (schedule._ScheduledLayer.forward, "layer"),
        (schedule._ScheduledLayer.backward, "layer"),
    )
}


class RecordCalls(TorchDispatchMode):
    """Notes who called each operator. Backward has a thread of its own, as on a GPU."""

    def __init__(self, model: LlamaForCausalLM, phase: str, calls: list[Call]) -> None:
        super().__init__()
        self.model, self.phase, self.calls = model, phase, calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        frame: FrameType | None = sys._getframe(1)
        stack, part = [], ""
        while frame is not None:
            code = frame.f_code
            place = {"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno}
            stack.append(place)
            part = part or FUNCTIONS.get(code) or self.part_of(frame.f_locals.get("self"))
            frame = frame.f_back
        self.calls.append(Call(self.phase, part, stack))
        return function(*args, **(kwargs or {}))

    def part_of(self, module: object) -> str:
        if module is self.model.lm_head:
            return "lm_head"
        is_linear = isinstance(module, torch.nn.Linear)
        return "linear of a layer" if is_linear else ""


def recorded_step(name: str) -> list[Call]:
    model = LlamaForCausalLM(tiny_config()).train()
    if name == "custom":
        patch_as(model, PatchOptions(offload_activations="all"), CPU)
    elif name == "vanilla":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls: list[Call] = []
    with RecordCalls(model, "forward", calls):
        output = model(**packed_batch())

    def backward() -> None:
        with RecordCalls(model, "backward", calls):
            output.loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert {call.phase for call in calls} == {"forward", "backward"}
    return calls


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, list[Call]]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "INTERPRETED", False)
        yield {name: recorded_step(name) for name in ("custom", "vanilla", "all kept")}


CATEGORY = {
    ("custom", "forward", "loss"): "loss",
    ("custom", "forward", "layer"): "working buffers",
    ("custom", "backward", "loss"): "loss",
    ("custom", "backward", "layer"): "working buffers",
    ("custom", "backward", "store"): "kept activations",
    ("vanilla", "forward", "loss"): "loss",
    ("vanilla", "forward", "lm_head"): "loss",
    ("vanilla", "forward", "linear of a layer"): "working buffers",
    ("vanilla", "backward", "linear of a layer"): "working buffers",  # recomputed
    ("all kept", "forward", "loss"): "loss",
    ("all kept", "forward", "lm_head"): "loss",
    ("all kept", "forward", "linear of a layer"): "working buffers",
}
"""(step, phase, part) -> category of what such a call makes and soon frees."""


@pytest.mark.parametrize(
    "elsewhere", ["", "/home/other/", "C:\\other\\"], ids=["here", "other folder", "Windows"]
)
def test_real_calls_of_a_step_have_their_category(calls, elsewhere: str) -> None:
    """Also where the snapshot is of another machine, whose files lie elsewhere."""
    from profiling.memory_categories import Marks, categorise

    def moved(stack: Stack) -> Stack:
        if not elsewhere:
            return stack
        paths = [re.sub(".*/(longctx|torch|transformers)/", r"\1/", f["filename"]) for f in stack]
        paths = [elsewhere + path.replace("/", elsewhere[-1]) for path in paths]
        return [{**f, "filename": path} for f, path in zip(stack, paths, strict=True)]

    found = Counter()
    for name, made in calls.items():
        for call in made:
            start_us = {"forward": 10, "backward": 50}[call.phase]
            block = dict(addr=1, size=8, stream=0, frames=moved(call.stack))
            trace = [
                dict(block, action="alloc", time_us=start_us),
                dict(block, action="free_completed", time_us=start_us + 1),
            ]
            marks = Marks(phases=[("forward", 5), ("backward", 40)])
            changes = categorise({"segments": [], "device_traces": [trace]}, marks)
            (category,) = {change.category for change in changes if change.allocated_bytes}
            key = (name, call.phase, call.part)
            assert category == CATEGORY.get(key, "working buffers"), (key, call.stack)
            found[key] += 1
    assert CATEGORY.keys() <= found.keys()


# --- a snapshot made by hand -----------------------------------------------------------------


@pytest.fixture
def snapshot(calls) -> dict:
    stacks = {
        (name, call.phase, call.part): call.stack for name, made in calls.items() for call in made
    }
    return make_snapshot(
        layer=stacks["custom", "forward", "layer"],
        head=stacks["vanilla", "forward", "lm_head"],
        mlp=stacks["vanilla", "forward", "linear of a layer"],
        again=stacks["vanilla", "backward", "linear of a layer"],
        store=stacks["custom", "backward", "store"],
    )


def make_snapshot(*, layer: Stack, head: Stack, mlp: Stack, again: Stack, store: Stack) -> dict:
    """A step with times 0..100: forward from 10, backward from 40, optimizer from 80."""
    trace: list[dict] = []

    def alloc(time_us: int, address: int, gib: float, stack: list[dict]) -> None:
        event = dict(action="alloc", addr=address, size=int(gib * GIB), time_us=time_us)
        trace.append(dict(event, frames=stack, stream=0))

    def free(time_us: int, address: int, gib: float) -> None:
        event = dict(addr=address, size=int(gib * GIB), time_us=time_us, frames=[], stream=0)
        trace.append(dict(event, action="free_requested"))
        trace.append(dict(event, action="free_completed"))

    alloc(10, 0x100, 2, layer)  # a layer's input: alive until backward
    alloc(20, 0x200, 4, mlp)  # within forward only
    free(25, 0x200, 4)
    alloc(30, 0x200, 3, head)  # the logits, at an address used before
    alloc(45, 0x300, 3, [])  # their gradient: no Python frames, the size of the logits
    free(50, 0x200, 3)
    free(55, 0x300, 3)
    alloc(56, 0x300, 1, again)  # recomputed in backward
    alloc(57, 0x400, 1.5, store)
    alloc(60, GRADIENT, 1, [])
    free(62, 0x300, 1)
    free(65, 0x400, 1.5)
    free(70, 0x100, 2)
    alloc(85, 0x500, 0.5, [])
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


def marks():
    from profiling.memory_categories import Marks

    return Marks(
        phases=[("forward", 5), ("backward", 40), ("optimizer", 80)],
        before={WEIGHTS: "weights", STATES: "optimizer"},
        gradients={GRADIENT: 80},
    )


def live_gib(snapshot: dict, at_us: int) -> dict[str, float]:
    from profiling.memory_categories import categorise

    live: dict[str, float] = {}
    for change in categorise(snapshot, marks()):
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
def test_each_moment_knows_what_its_memory_is_for(snapshot, at_us: int, live: dict) -> None:
    before = {"weights": 5, "optimizer": 6, "other": 0.25} if at_us >= 10 else {}
    expected = {name: before.get(name, 0) + live.get(name, 0) for name in {*before, *live}}
    assert live_gib(snapshot, at_us) == expected


def test_the_record_keeps_the_peak_and_what_was_reserved(timelines, snapshot, monkeypatch) -> None:
    description = {"class_type": "vanilla", "tokens": 32768, "layers": 4}
    timeline = timelines.record(snapshot, marks(), description)
    assert timeline["peak_gib"] == 5 + 6 + 0.25 + 2 + 6
    assert timeline["peak_by_category_gib"]["loss"] == 6
    assert (timeline["reserved_gib"][0], timeline["reserved_gib"][-1]) == (16, 20)
    monkeypatch.setattr(timelines, "POINTS", 4)  # a bin keeps its moment of most memory
    coarse = timelines.record(snapshot, marks(), description)
    assert len(coarse["time_s"]) <= 4 and coarse["peak_gib"] == timeline["peak_gib"]
    total = [sum(values) for values in zip(*coarse["allocated_gib"].values(), strict=True)]
    assert max(total) == pytest.approx(timeline["peak_gib"])


def test_nothing_recorded_is_an_error(timelines) -> None:
    with pytest.raises(ValueError, match="recorded nothing on GPU 1"):
        timelines.record({"segments": [], "device_traces": [[], []]}, marks(), {}, 1)


def test_two_class_types_side_by_side_in_a_browser(
    timelines, snapshot, tmp_path, monkeypatch
) -> None:
    paths = []
    for class_type in ("custom", "vanilla"):
        description = {
            "class_type": class_type,
            "tokens": 131072,
            "layers": 4,
            "capacity_gib": 24.0,
        }
        description |= {"hardware": "none: made by hand", "command": "python <x>", "commit": "abc"}
        paths.append(tmp_path / f"{class_type}.json.gz")
        timelines.save(timelines.record(snapshot, marks(), description), paths[-1])
    words = ["memory_timeline.py", *map(str, paths), "--output", str(tmp_path / "both")]
    monkeypatch.setattr(sys, "argv", words)
    timelines.main()
    assert (tmp_path / "both.png").stat().st_size > 10000
    page = (tmp_path / "both.html").read_text()
    assert "vanilla, 131,072 tokens, 4 layers" in page and "python &lt;x&gt;" in page
    opened = open_page(tmp_path / "both.html", tmp_path, height=1600)
    assert opened.console == [] and opened.svgs == 1
    assert opened.colours >= 4  # weights, optimizer, kept activations, loss at the least


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*: No such file"),
        ("{}", "is no memory timeline"),
        ("x", "is no memory"),
    ],
    ids=["missing", "another object", "no JSON"],
)
def test_what_is_no_timeline_is_one_line(
    timelines, content, message, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "memory.json.gz"
    if content is not None:
        with gzip.open(path, "wt") as file:
            file.write(content)
    words = ["memory_timeline.py", str(path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as error:
        timelines.main()
    assert re.match(f"error: .*{message}", str(error.value)) and "\n" not in str(error.value)


def test_the_recorder_marks_phases_and_writes_both_files(
    timelines, snapshot, tmp_path, monkeypatch
) -> None:
    """The callback on a CPU step, with the allocator's functions answering by hand."""
    from profiling import memory_recorder
    from profiling.build import PhaseMarks, build_trainer

    asked: list[dict] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: asked.append(kw), False)
    monkeypatch.setattr(memory, "_snapshot", lambda: snapshot, False)
    flags = ["--preset", "tiny", "--seq_len", "64", "--use_cpu"]
    trainer, _ = build_trainer(flags, steps=2, output_dir=tmp_path / "run", layers=1)
    description = {"class_type": "custom", "tokens": 64}
    recorder = memory_recorder.RecordMemory(trainer, 1, description, tmp_path / "memory_rank0")
    trainer.add_callback(recorder)
    trainer.add_callback(PhaseMarks(trainer, recorder.mark))
    trainer.train()
    assert asked[0]["max_entries"] > 10000 and asked[1] == {"enabled": None}
    phases = ["forward", "backward", "optimizer"]
    assert [name for name, _ in recorder.marks.phases] == phases
    timeline = timelines.read(tmp_path / "memory_rank0.json.gz")
    assert [name for name, _ in timeline["marks"]] == phases and timeline["tokens"] == 64
    assert pickle.loads((tmp_path / "memory_rank0.pickle").read_bytes()) == snapshot


def test_the_beginning_is_recorded_until_the_first_step_ends(
    timelines, snapshot, tmp_path, monkeypatch
) -> None:
    """Memory that lives from step to step is in its category; everything else that is allocated
    when the first forward begins is in `other`."""
    from profiling import memory_recorder
    from profiling.build import PhaseMarks, build_trainer
    from profiling.memory_categories import categorise

    asked: list[dict] = []
    memory = torch.cuda.memory
    for name in ("synchronize", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append({"device": device}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: asked.append(kw), False)
    monkeypatch.setattr(memory, "_snapshot", lambda: snapshot, False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    recorder = memory_recorder.RecordBeginning()
    monkeypatch.delenv("LOCAL_RANK")
    assert asked[0] == {"device": 1} and asked[1]["max_entries"] > 10000
    flags = ["--preset", "tiny", "--seq_len", "64", "--use_cpu"]
    trainer, _ = build_trainer(flags, steps=2, output_dir=tmp_path / "run", layers=1)
    recorder.loaded(trainer, {"class_type": "custom", "tokens": 64}, tmp_path / "beginning_rank0")
    trainer.add_callback(recorder)
    trainer.add_callback(PhaseMarks(trainer, recorder.mark))
    trainer.train()
    assert asked[2:] == [{"enabled": None}] and len(recorder.marks.seen) == 2
    timeline = timelines.read(tmp_path / "beginning_rank0.json.gz")
    phases = ["loading", "engine", "forward", "backward", "optimizer"]
    assert [name for name, _ in timeline["marks"]] == phases
    assert timelines.from_beginning(timeline)
    (section, _) = timelines.memory_section([timeline])
    assert "from before the model is loaded to the end of the first step" in section

    marks = recorder.marks
    marks.phases = [("loading", 5), ("engine", 25), ("forward", 58), ("optimizer", 80)]
    marks.seen, marks.gradients = [(59, {0x100: "weights"}), (85, {0x500: "optimizer"})], {}
    found = {(c.time_us, c.category) for c in categorise(snapshot, marks) if c.allocated_bytes > 0}
    assert {(10, "weights"), (20, "working buffers"), (56, "other"), (85, "optimizer")} <= found


@pytest.mark.gpu
@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
def test_a_real_step_on_a_gpu(timelines, class_type: str, tmp_path: Path, monkeypatch) -> None:
    """Categories against what is known: weights, Adam's two moments, gradients, all in bf16."""
    from profiling import profile_step

    words = ["--profile_dir", str(tmp_path), "--preset", "llama-3.2-1b", "--layers", "2"]
    words += ["--seq_len", "4096", "--class_type", class_type, "--from_beginning"]
    args, flags = profile_step.parse(words)
    gc.collect()
    earlier_gib = torch.cuda.memory_allocated() / GIB  # of other tests
    trainer = profile_step.run(args, flags)
    weights_gib = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / GIB
    beginning = timelines.read(tmp_path / "beginning_rank0.json.gz")
    assert max(beginning["allocated_gib"]["weights"]) == pytest.approx(weights_gib, rel=0.02)
    assert [name for name, _ in beginning["marks"]][:3] == ["loading", "engine", "forward"]
    assert (tmp_path / "beginning.png").exists()
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
