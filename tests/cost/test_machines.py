"""GPUs by all names that people use: what they reach beside what their datasheets say."""

from __future__ import annotations

import pytest

from longctx.cost.cards import OWN_SPREAD, SPREAD, TOO_OLD
from longctx.cost.fitted import SHARED_LINK
from longctx.cost.machines import MACHINES, machine_like, peak_flops
from longctx.cost.named import machine_named, several
from longctx.errors import UserError


@pytest.mark.parametrize("name", MACHINES)
def test_rates_are_below_the_peak(name: str) -> None:
    """Matmuls reach 45 to 90% of it, and attention less."""
    machine = MACHINES[name]
    assert machine.peak_flops is not None
    assert 0.44 < machine.flops / machine.peak_flops < 0.91
    for attention in machine.attention.values():
        assert 0 < attention.backward <= attention.forward <= machine.flops
    assert machine.spread == ((1.0, 1.0) if machine.measured else SPREAD)
    assert machine_named(name) is machine


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4060 Ti", 44.1),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5080", 112.6),
        ("NVIDIA RTX A5000", 111.1),
        ("NVIDIA GeForce RTX 5090", 209.5),
    ],
)
def test_peaks_by_the_name_that_cuda_has(gpu: str, tflops: float) -> None:
    assert peak_flops(gpu) == tflops * 1e12
    assert machine_named(gpu) is machine_like(gpu)


@pytest.mark.parametrize("gpu", ["Tesla T4", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A4000"])
def test_no_peak_is_guessed(gpu: str) -> None:
    assert peak_flops(gpu) is None


def test_cards_of_one_chip_differ_by_their_memory() -> None:
    small = machine_like("NVIDIA A100-SXM4-40GB")
    assert small is MACHINES["a100-40gb"] and small.gpu_gib < MACHINES["a100"].gpu_gib


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        *(("4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("RTX 4090", "rtx-4090")),
        *(("rtx_4090", "rtx-4090"), ("geforce-rtx-4090", "rtx-4090"), ("H100", "h100")),
        *(("a100-80gb", "a100"), ("A100 40GB", "a100-40gb"), ("h100-sxm", "h100")),
        *(("a100-40", "a100-40gb"), ("a100-80", "a100"), ("h100 80 GB", "h100")),
        *(("4090-24gb", "rtx-4090"), ("l40s-48", "l40s"), ("h100-94", "h100-nvl")),
        *(("4060 Ti", "rtx-4060-ti"), ("4060ti 8gb", "rtx-4060-ti-8gb"), ("A5000", "a5000")),
        *(("4070ti", "rtx-4070-ti"), ("5070 Ti", "rtx-5070-ti"), ("5080", "rtx-5080")),
        *(("rtx-a6000", "a6000"), ("6000 Ada", "rtx-6000-ada"), ("pro 6000", "rtx-pro-6000")),
    ],
)
def test_names_as_people_type_them(typed: str, name: str) -> None:
    assert machine_named(typed) is MACHINES[name]


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        *(
            ("2x4090", (2, "4090")),
            ("4090x2", (2, "4090")),
            ("0x4090", (1, "0x4090")),
            ("8 x H100", (8, "H100")),
            ("4*l40s", (4, "l40s")),
        ),
        *(("rtx-4090", (1, "rtx-4090")), ("h100", (1, "h100")), ("2x", (1, "2x"))),
    ],
)
def test_several_cards_in_one_name(typed: str, means: tuple[int, str]) -> None:
    assert several(typed) == means


def test_a_card_of_ones_own() -> None:
    """Its rates are those of a known card with the same numbers and shares."""
    like, asked = MACHINES["l40s"], "gib=44.4,flops=362e12,bandwidth=864e9,link=31.5e9"
    own = machine_named(asked)
    assert (own.flops, own.memory_bytes, own.link_bytes) == (
        *(like.flops, like.memory_bytes, like.link_bytes),
    )
    assert own.attention == like.attention and own.gpu_gib == 44.4
    assert own.spread == OWN_SPREAD and not own.assumed
    assert machine_named("gib=24, flops=165e12").assumed == (
        "assumed: bandwidth=1100e9, link=31.5e9"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10", "no such machine is known; did you mean h100? Those that are: h100, h200, "),
        ("voodoo", "no such machine is known. Those that are: h100, "),
        ("", "no such machine is known. Those that are: h100, "),
        ("v100-32gb", "125 TFLOP/s in fp16 by its datasheet, and at most its 15.7 of fp32 in bf"),
        *((amd, "this is an AMD GPU, and longctx plans") for amd in ("mi300x", "RX 7900 XTX")),
        ("MI355X", "plans and trains on NVIDIA alone: plan for b200"),
        *((m, "this is a chip of Apple") for m in ("m2", "M3 Max", "apple-m4-pro")),
        ("gaudi2", "this is a chip of Intel"),
        ("tpu-v5e", "this is a chip of Google"),
        ("4090-48gb", "rtx-4090 is known with 23.5 GiB as CUDA counts them: plan for rtx-4090, or"),
        ("a100-64", "a100 is known with 79.25 or 39.4 GiB"),
        *((old, "computes bfloat16 without tensor cores") for old in (*TOO_OLD, "Tesla T4")),
        ("gib=24", "flops is missing (dense bf16 FLOP/s"),
        ("flops=165e12", "gib is missing (GiB of memory)"),
        ("gib=24,flop=165e12", "there is no flop; did you mean flops?"),
        ("gib=24,flops=165e12,", "there is no empty part: a card of your own is gib=24,"),
        ("gib=24,gib=24", "gib is given twice"),
        ("gib=24,flops=165", "a number from 1e+12 to 1e+17, not '165'"),
        ("gib=nan,flops=165e12", "a number from 1 to 4096, not 'nan'"),
        ("gib=-1,flops=165e12", "a number from 1 to 4096, not '-1'"),
        ("gib=,flops=165e12", "a number from 1 to 4096, not ''"),
    ],
)
def test_what_names_no_machine_is_one_line(name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        machine_named(name)
    assert f"--gpu {name}: " in str(error.value)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_link_that_several_gpus_of_a_host_use() -> None:
    """Where it was measured, for more than two; and whoever asks twice gets it once."""
    h100, h200 = MACHINES["h100"], MACHINES["h200"]
    alone, four = h100.among(2), h100.among(4)
    assert alone.link_bytes == h100.link_bytes
    assert four.link_bytes == four.among(4).link_bytes == SHARED_LINK * h100.link_bytes
    assert h200.among(4).link_bytes == h200.link_bytes
