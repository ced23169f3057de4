"""This machine as a `Machine`: measured, kept, or by its profile."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longctx.attention.backends import FlashOnCpu
from longctx.constants import GIB
from longctx.cost.fitted import CONTEXT_BYTES
from longctx.cost.machines import MACHINES, AttentionRates
from longctx.errors import UserError
from longctx.memory import rates
from longctx.memory.rates import Link, Measured
from longctx.train.plan import measure
from longctx.train.plan.measure import Gpu, known_machine, measured_machine, this_machine

CPU = torch.device("cpu")
GPU = Gpu(CPU, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB)
UNKNOWN = GPU._replace(name="Some GPU")
MEASURED = Measured(
    flops=6e14,
    memory_bytes=3e12,
    link=Link(5e10, 4e10, 3e10),
    attention={
        "fa4": {8192: (4e14, 3e14), 32768: (6e14, 5e14), 131072: (8e14, 5e14)},
        "flash": {32768: (3e14, 2e14)},
    },
    locked_bytes=4 * GIB,
    tried_bytes=4 * GIB,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Makes the machine one with this GPU, that is measured as `MEASURED`; counts how often."""
    calls = []

    def measured(device: torch.device) -> Measured:
        calls.append(device)
        return MEASURED

    def become(gpu: Gpu | None) -> list:
        monkeypatch.setattr(measure, "gpu_here", lambda: gpu)
        return calls

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(rates, "identity", lambda device: ["a GPU"])
    monkeypatch.setattr(rates, "expanded", lambda path: tmp_path)
    return become


def test_measured_once_and_said(here, capsys) -> None:
    calls = here(GPU)
    first = this_machine()
    said = capsys.readouterr()
    assert not said.out and "measuring what this NVIDIA H100" in said.err and "kept in" in said.err
    assert this_machine() == known_machine() == first
    assert len(calls) == 1 and not capsys.readouterr().err
    this_machine(again=True)
    assert len(calls) == 2


def test_a_measured_machine() -> None:
    machine = measured_machine(GPU, MEASURED)
    assert (machine.name, machine.gpu_bytes, machine.measured, machine.here) == (
        *("h100", 80 * GIB),
        *(True, True),
    )
    assert machine.link_bytes == 3e10 and machine.lockable_bytes is None
    assert [*machine.attention] == ["fa4", "flash", "cudnn"]  # auto takes the first
    assert machine.attention["cudnn"] == AttentionRates(3e14, 2e14)
    assert machine.held_bytes == GIB
    assert measured_machine(GPU._replace(free_bytes=80 * GIB), MEASURED).held_bytes == CONTEXT_BYTES
    limited = measured_machine(UNKNOWN, replace(MEASURED, locked_bytes=GIB))
    assert limited.lockable_bytes == GIB and limited.name == "Some GPU"


@pytest.mark.parametrize(
    ("document", "forward"),
    [(100, 4e14), (8192, 4e14), (16384, 5e14), (65536, 7e14), (131072, 8e14), (2**20, 8e14)],
)
def test_attention_by_the_length_of_documents(document, forward) -> None:
    machine = measured_machine(GPU, MEASURED)
    assert machine.attention_at("fa4", document).forward == pytest.approx(forward)
    assert machine.attention_at("flash", document) == AttentionRates(3e14, 2e14)
    assert MACHINES["h100"].attention_at("fa4", document) == MACHINES["h100"].attention["fa4"]


def test_without_a_measurement_the_profile_is_known(here) -> None:
    calls = here(GPU._replace(free_bytes=60 * GIB))
    machine = known_machine()
    assert machine is not None and not machine.here and not calls
    asked = "flash", 8192, 128
    assert machine.rates(*asked) == MACHINES["h100"].rates(*asked)
    assert machine.gpu_bytes - machine.held_bytes == 60 * GIB
    here(UNKNOWN)
    assert known_machine() is None
    here(None)
    assert known_machine() is None


def test_what_cannot_be_measured(here, monkeypatch, capsys) -> None:
    def fails(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "measure", fails)
    here(GPU)
    asked = "flash", 8192, 64
    assert this_machine().rates(*asked) == MACHINES["h100"].rates(*asked)
    assert "cannot be measured (CUDA out of memory): the profile h100 is taken" in (
        capsys.readouterr().err
    )
    here(UNKNOWN)
    with pytest.raises(UserError, match="name one like it with --gpu"):
        this_machine()
    here(None)
    with pytest.raises(UserError, match=r"no GPU: name the one to plan for with --gpu \(h100"):
        this_machine()


def test_all_is_measured_and_locking_last(monkeypatch) -> None:
    """CUDA keeps the error of a refused lock for the next kernel to find."""
    order = []

    def stub(name: str, value):
        def measured(*_):
            order.append(name)
            return value

        monkeypatch.setattr(measure, name, measured)

    for name, value in (
        *(("products", MEASURED.flops), ("copies", MEASURED.memory_bytes)),
        *(("link", MEASURED.link), ("measure_attention", MEASURED.attention)),
        ("lock", GIB),
    ):
        stub(name, value)
    monkeypatch.setattr(measure, "host_share_bytes", lambda: 8 * GIB)
    found = measure.measure(CPU)
    assert order[-1] == "lock" and found.tried_bytes == 2 * GIB
    assert found == replace(MEASURED, locked_bytes=GIB, tried_bytes=2 * GIB)


def test_what_cuda_says_of_this_gpu(monkeypatch) -> None:
    assert torch.cuda.is_available() or measure.gpu_here() is None
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(measure, "free_gpu_bytes", lambda device: 70 * GIB)
    found = measure.gpu_here()
    assert found == Gpu(torch.device("cuda", 1), "a GPU", 80 * GIB, 70 * GIB)


def test_attention_by_count(monkeypatch) -> None:
    monkeypatch.setattr(measure, "LENGTHS", {32: (4, 2), 64: (2, 1)})
    monkeypatch.setattr(measure, "MIDDLE", 32)
    monkeypatch.setattr(rates, "timed", lambda work, repeats: (work(), 0.5 * repeats)[1])
    flops = 2 * 4 * 128 * 32**2
    assert measure.attention_rates(FlashOnCpu(), CPU, 32) == (flops / 0.5, 2.5 * flops / 0.5)
    found = measure.measure_attention(CPU)
    assert [*found] == ["flash"] and [*found["flash"]] == [32, 64]  # the others need a GPU


@pytest.mark.gpu
def test_on_a_gpu_in_fifteen_seconds() -> None:
    gpu = measure.gpu_here()
    assert gpu is not None
    measure.measure_attention(gpu.device)  # compiles
    start = time.perf_counter()
    machine = measured_machine(gpu, measure.measure(gpu.device))
    assert time.perf_counter() - start < 15
    assert machine.flops > 1e13 and machine.memory_bytes > 1e11 and machine.link_bytes > 1e9
    assert len(machine.by_length[next(iter(machine.attention))]) == 3
    for backend in machine.attention.values():
        assert min(backend) > 1e12
