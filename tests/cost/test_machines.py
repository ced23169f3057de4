"""One list of GPUs: what they reach beside what their datasheets say."""

from __future__ import annotations

import pytest

from longctx.cost.machines import MACHINES, peak_flops


@pytest.mark.parametrize("name", MACHINES)
def test_rates_are_below_the_peak(name: str) -> None:
    """Matmuls reach 65 to 91% of it, and attention less."""
    machine = MACHINES[name]
    assert machine.peak_flops is not None
    assert 0.645 < machine.flops / machine.peak_flops < 0.91
    for attention in machine.attention.values():
        assert 0 < attention.backward <= attention.forward <= machine.flops


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
    ],
)
def test_peaks_by_the_name_that_cuda_has(gpu: str, tflops: float) -> None:
    assert peak_flops(gpu) == tflops * 1e12


def test_no_peak_is_guessed() -> None:
    assert peak_flops("NVIDIA T4") is None
