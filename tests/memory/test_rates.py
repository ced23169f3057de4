"""Rates: what is timed and how often, and the file they are kept in."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from longctx.constants import GIB
from longctx.cost.fitted import SMALL_HEADS, WIDE_HEADS
from longctx.cost.machines import MACHINES
from longctx.cost.rates import AttentionRates, Rates
from longctx.errors import UserError
from longctx.memory import rates
from longctx.memory.rates import (
    Link,
    Measured,
    gpu_rates,
    lock,
    read_rates,
    seconds_of,
    write_rates,
)

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MEASURED = Measured(
    flops=6e14,
    memory_bytes=3e12,
    link=Link(5e10, 4e10, 3e10),
    attention={"flash": {8192: (4e14, 3e14), 131072: (5e14, 4e14)}},
    locked_bytes=GIB,
    tried_bytes=GIB,
)


class Clock:
    """Each work takes so many seconds; counts them."""

    def __init__(self, *once: float) -> None:
        self.once, self.timed = list(once), list[int]()

    def __call__(self, work, repeats: int) -> float:
        work()
        self.timed.append(repeats)
        return (self.once[0] if len(self.once) == 1 else self.once.pop(0)) * repeats


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "identity", lambda device: ["a GPU", "torch 2"])
    monkeypatch.setattr(rates, "expanded", lambda path: tmp_path)
    gpu_rates.cache_clear()
    yield tmp_path
    gpu_rates.cache_clear()


@pytest.mark.parametrize(
    ("once", "for_s", "repeats"),
    [
        (0.01, 1.0, [1, 50, 50]),
        (2.0, 1.0, [1]),
        (0.4, 0.5, [1, 1, 1]),
        (1e-6, 1.0, [1, 1000, 1000]),
    ],
)
def test_the_second_half_of_the_time_is_measured(monkeypatch, once, for_s, repeats) -> None:
    clock, calls = Clock(once), list[int]()
    monkeypatch.setattr(rates, "timed", clock)
    assert seconds_of(lambda: calls.append(1), for_s) == pytest.approx(once)
    assert clock.timed == repeats
    assert len(calls) == 1 + len(repeats)


def test_products_and_copies_by_count(monkeypatch) -> None:
    monkeypatch.setattr(rates, "timed", Clock(0.5))
    assert rates.products(CPU, torch.float32, (3, 4, 5), 1.0) == 6 * 3 * 4 * 5 / 0.5
    assert rates.copies(CPU, 1000, 1.0) == 2 * 1000 / 0.5


class Stream:
    """Says who waits for whom."""

    def __init__(self, device: torch.device, said: list[str] | None = None) -> None:
        self.said = said

    def wait_stream(self, other: Stream) -> None:
        waits.append("beside waits" if self.said is None else "here waits")


waits: list[str] = []


def test_the_link_is_timed_up_down_and_both_at_once(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, []))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(rates, "timed", Clock(1.0, 2.0, 4.0))
    waits.clear()
    assert rates.link(CPU, 1000, 0.5) == Link(1000, 500, 250)
    assert waits == 2 * ["beside waits", "here waits"]  # to warm up, and timed


def test_the_link_beside_others_is_timed_after_all_are_ready(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, []))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    clock, began = Clock(0.1), list[list[int]]()
    monkeypatch.setattr(rates, "timed", clock)
    found = rates.link_beside_others(CPU, 1000, 1.0, lambda: began.append([*clock.timed]))
    assert found == pytest.approx(10000)
    assert began == [[1]] and clock.timed == [1, 1, 5, 5]


class Event:
    """CUDA's, in milliseconds; each is recorded 500 later."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 500
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_seconds_between_two_events(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls = []
    assert rates.timed(lambda: calls.append(1), 3) == 0.5
    assert len(calls) == 3


def test_an_identity_is_the_hardware_and_the_versions(monkeypatch) -> None:
    gpu = SimpleNamespace(name="a GPU", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    before = rates.rates_path(CPU)
    assert before == rates.rates_path(CPU) and before.parent.name == "rates"
    assert torch.__version__ in json.dumps(rates.identity(CPU))
    gpu.total_memory = 94 * GIB
    assert rates.rates_path(CPU) != before
    more = rates.rates_path(CPU)
    monkeypatch.setattr(rates, "driver_version", lambda: "999.1")
    assert rates.rates_path(CPU) != more


def test_what_is_refused_is_tried_in_halves(monkeypatch) -> None:
    tried = []

    def slab(nbytes: int, device: torch.device) -> None:
        tried.append(nbytes)
        if nbytes > 2**27:
            raise UserError("cannot page-lock")

    monkeypatch.setattr(rates, "PinnedSlab", slab)
    assert lock(CPU, 2**29) == 2**27 and tried == [2**29, 2**28, 2**27]
    monkeypatch.setattr(rates, "LEAST_LOCKED_BYTES", 2**28)
    assert lock(CPU, 2**29) == 0


def test_kept_by_hardware_and_versions(folder, monkeypatch) -> None:
    assert read_rates(CPU) is None
    path = write_rates(CPU, MEASURED)
    assert path and path.parent == folder / "rates" and [*path.parent.iterdir()] == [path]
    assert read_rates(CPU) == MEASURED
    monkeypatch.setattr(rates, "identity", lambda device: ["a GPU", "torch 3"])
    assert read_rates(CPU) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps(asdict(replace(MEASURED, flops=0.0))),
        json.dumps(asdict(replace(MEASURED, flops="many"))),
        json.dumps(asdict(replace(MEASURED, attention={}))),
        json.dumps(asdict(MEASURED) | {"link": [1.0]}),
        json.dumps(asdict(MEASURED) | {"more": 1}),
        "[" * 100_000,
        json.dumps(asdict(replace(MEASURED, flops=float("inf")))),
        json.dumps(asdict(replace(MEASURED, memory_bytes=float("nan")))),
        json.dumps(asdict(replace(MEASURED, attention={"fa4": {8192: (0.0, 1e12)}}))),
        json.dumps(asdict(replace(MEASURED, attention={"fa4": {8192: (float("nan"), 1e12)}}))),
        json.dumps(asdict(MEASURED) | {"locked_bytes": "all"}),
        json.dumps(asdict(MEASURED) | {"tried_bytes": -1}),
    ],
)
def test_a_damaged_file_is_none(folder, text) -> None:
    path = write_rates(CPU, MEASURED)
    assert path is not None
    path.write_text(text)
    assert read_rates(CPU) is None


def test_a_pipe_in_place_of_the_file_is_not_waited_for(folder) -> None:
    path = write_rates(CPU, MEASURED)
    assert path is not None
    path.unlink()
    os.mkfifo(path)
    assert read_rates(CPU) is None


def test_where_nothing_can_be_kept_a_line_says_so(folder, capsys) -> None:
    (folder / "rates").write_text("a file")
    assert write_rates(CPU, MEASURED) is None
    assert "rates are not kept in" in capsys.readouterr().out


def test_a_ladder_takes_what_is_kept_and_else_measures(folder, monkeypatch) -> None:
    monkeypatch.setattr(rates, "timed", Clock(0.5))
    monkeypatch.setattr(rates, "CUBE", (2, 3, 4))
    monkeypatch.setattr(rates, "link", lambda *_: Link(3.0, 2.0, 1.0))
    monkeypatch.setattr(rates, "copies", lambda *_: 7.0)
    asked, flops = ("cudnn", 8192, 128), 6 * 24 / 0.5
    name = "a card that nobody knows"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    guessed = AttentionRates(*(share * flops for share in rates.ATTENTION_SHARES))
    assert gpu_rates(CPU, BF16, *asked) == Rates(flops, 1.0, 7.0, guessed)
    name = "NVIDIA H100 80GB HBM3"  # whose attention is known beside its matmuls
    gpu_rates.cache_clear()
    profile = MACHINES["h100"]
    scaled = AttentionRates(*(flops / profile.flops * r for r in profile.attention["cudnn"]))
    assert gpu_rates(CPU, BF16, *asked).attention == scaled
    small = gpu_rates(CPU, BF16, "cudnn", 8192, 64).attention
    assert small == AttentionRates(*(SMALL_HEADS * rate for rate in scaled))
    wide = gpu_rates(CPU, BF16, "cudnn", 8192, 256).attention
    forward, backward = WIDE_HEADS["cudnn"]
    assert wide == AttentionRates(forward * scaled.forward, backward * scaled.backward)
    write_rates(CPU, MEASURED)
    gpu_rates.cache_clear()
    [(backend, lengths)] = [*MEASURED.attention.items()][:1]
    length = min(lengths)
    kept = gpu_rates(CPU, BF16, backend, length, 128)
    attention = AttentionRates(*lengths[length])
    assert kept == Rates(6e14, 3e10, MEASURED.memory_bytes, attention)
    other = gpu_rates(CPU, torch.float32, *asked)  # matmuls of another dtype
    assert other.flops == flops
    beside = gpu_rates(CPU, BF16, backend, length, 128, link_bytes=2e10)
    assert beside == kept._replace(link_bytes=2e10)
    monkeypatch.setattr(rates, "link", None)  # is not measured alone
    assert gpu_rates(CPU, torch.float32, *asked, link_bytes=2e10).link_bytes == 2e10


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    assert rates.products(gpu, BF16, rates.CUBE, 0.01) > 1e13
    assert rates.copies(gpu, 2**26, 0.01) > 1e11
    found = rates.link(gpu, 2**26, 0.01)
    assert min(found) > 1e9 and found.both <= 1.1 * max(found.up, found.down)
    assert json.dumps(rates.identity(gpu)) == json.dumps(rates.identity(gpu))
