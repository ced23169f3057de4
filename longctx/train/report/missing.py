"""What a machine lacks for speed, each with what to do: from facts alone (doctor.py finds them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from longctx.constants import GIB, __distribution__
from longctx.cost.machines import Machine, machine_like
from longctx.errors import many
from longctx.memory.rates import Measured
from longctx.packages import Namesake, pip_install
from longctx.train.plan.measure import Gpu

SLOW, SLOW_LINK = 0.85, 0.8
"""Shares of the profile's rates below which something is in the way."""
LEAST_SHM = GIB
LEAST_OUTPUT, LEAST_CACHE = 16 * GIB, 2 * GIB
CONTAINER_SHARE = 0.8
"""A container that may take less than this share of the host's free memory is reported."""


class Missing(NamedTuple):
    what: str
    found: str
    do: str


class Unfit(NamedTuple):
    """A package in a version that longctx does not take."""

    package: str
    version: str
    takes: str


class Rate(NamedTuple):
    what: str
    measured: float
    profile: float | None
    unit: str

    @property
    def share(self) -> float | None:
        return None if self.profile is None else self.measured / self.profile


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts found on this machine."""

    gpu: Gpu | None = None
    has_card: bool = False
    """An NVIDIA card is here, whether torch can use it or not."""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None
    fa4: str | None = None
    """Why flash-attn-4, which this GPU would take, does not run."""
    allocator: str = ""
    measured: Measured | None = None
    unmeasured: str | None = None
    """Why there are no rates."""
    kept_in: Path | None = None
    host_bytes: int = 0
    host_free_bytes: int = 0
    """On the whole machine,"""
    allowed_bytes: int = 0
    """and what this process may take of it."""
    memlock_bytes: int | None = None
    """`ulimit -l`; None: no limit."""
    shm_bytes: int | None = None
    """/dev/shm."""
    folders: dict[str, tuple[Path, int, bool]] = field(default_factory=dict)
    """Maps a purpose to its folder, the bytes free there, and whether it may be written."""
    unfit: list[Unfit] = field(default_factory=list)
    namesakes: list[Namesake] = field(default_factory=list)

    @property
    def profile(self) -> Machine | None:
        return machine_like(self.gpu.name) if self.gpu else None


# --- what is missing -------------------------------------------------------------------------


def missing(facts: Facts) -> Iterator[Missing]:
    """Yields what the machine lacks for speed, the most important first."""
    yield from _of_the_gpu(facts)
    yield from _of_the_rates(facts)
    yield from _of_the_host(facts)
    for name, version, takes in facts.unfit:
        found = f"longctx takes {takes} and {version} is installed"
        yield Missing(name, found, f"pip install '{name}{takes}'")
    for other in facts.namesakes:
        yield _of_a_namesake(other)


def _of_a_namesake(other: Namesake) -> Missing:
    found = f"{other.distribution} {other.version} is imported as longctx, too; {other.folder} runs"
    undo = f"pip uninstall {other.distribution}"
    if other.overwritten:
        found += f", where {many(other.overwritten, 'file')} of {__distribution__} "
        found += f"{'is' if other.overwritten == 1 else 'are'} overwritten"
        undo += f" {__distribution__}, then install {__distribution__} again"
    return Missing("another longctx", found, undo)


def _of_the_gpu(facts: Facts) -> Iterator[Missing]:
    torch_cuda = tuple(map(int, (facts.torch_cuda or "0.0").split(".")[:2]))
    driver = f"driver {facts.driver or 'of unknown version'}"
    if facts.driver_cuda:
        driver += " for CUDA {}.{}".format(*facts.driver_cuda)
    if facts.gpu is None and facts.has_card:
        if facts.torch_cuda is None:
            yield Missing(
                "GPU",
                "an NVIDIA card is here, and torch was built without CUDA",
                "pip install torch from https://download.pytorch.org/whl/cu130",
            )
        else:
            yield Missing(
                "GPU",
                f"torch for CUDA {facts.torch_cuda} finds no GPU; {driver}",
                "nvidia-smi: does the container have the GPU (docker run --gpus all)? is the "
                f"driver older than CUDA {facts.torch_cuda}? then update it",
            )
    elif facts.gpu is None:
        yield Missing(
            "GPU",
            "none",
            "the quick start and other small models train here; for larger ones take a machine "
            "with an NVIDIA GPU: longctx plan --gpu NAME says how fast it is",
        )
        return
    if facts.gpu is None:
        return
    if facts.driver_cuda and facts.driver_cuda < torch_cuda:
        yield Missing(
            "driver",
            f"{driver}, torch is for CUDA {facts.torch_cuda}",
            "update the driver: kernels that are compiled here may be refused",
        )
    if facts.fa4:
        advice = pip_install("flash-attn-4")
        found = facts.fa4.removesuffix(f" ({advice})")
        yield Missing("flash-attn-4", found, advice.replace("install", "install --upgrade"))
    if "expandable_segments:true" not in facts.allocator.lower():
        yield Missing(
            "allocator",
            "memory fragments in long runs",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def _of_the_rates(facts: Facts) -> Iterator[Missing]:
    if facts.unmeasured:
        yield Missing("rates", facts.unmeasured, "free the GPU, then longctx doctor --again")
    for rate in rates(facts):
        if rate.share is None:
            continue
        found = f"{rate.measured:.3g} {rate.unit}, {rate.share:.0%} of the profile's"
        if rate.what == LINK and rate.share < SLOW_LINK:
            yield Missing(
                rate.what,
                found,
                "nvidia-smi -q -d PCIE: is it the slot's full width and generation? On hosts of "
                "several sockets: numactl --cpunodebind and --membind of the GPU's node",
            )
        elif rate.what != LINK and rate.share < SLOW:
            yield Missing(
                rate.what,
                found,
                "nvidia-smi: does another process compute? nvidia-smi -q -d PERFORMANCE: does "
                "power or heat hold the clocks down? then longctx doctor --again",
            )


def _of_the_host(facts: Facts) -> Iterator[Missing]:
    measured = facts.measured
    refused = measured is not None and measured.locked_bytes < measured.tried_bytes
    untried = measured is None and facts.gpu is not None and facts.memlock_bytes is not None
    if refused or untried:
        found = f"ulimit -l is {_gib(facts.memlock_bytes)}"
        if measured is not None:
            found = f"{_gib(measured.locked_bytes)} of {_gib(measured.tried_bytes)} could be locked"
        yield Missing(
            "locked memory",
            found,
            "ulimit -l unlimited; in containers docker run --ulimit memlock=-1; under systemd "
            "LimitMEMLOCK=infinity",
        )
    if facts.allowed_bytes < CONTAINER_SHARE * facts.host_free_bytes:
        yield Missing(
            "host memory",
            f"this container may take {_gib(facts.allowed_bytes)} of "
            f"{_gib(facts.host_free_bytes)} that are free",
            "docker run --memory, Slurm --mem, Kubernetes resources.limits.memory",
        )
    if facts.shm_bytes is not None and facts.shm_bytes < LEAST_SHM:
        yield Missing(
            "shared memory",
            f"/dev/shm has {_gib(facts.shm_bytes)}, through which data loader workers and "
            "processes of NCCL talk",
            "docker run --ipc host, or --shm-size 8g",
        )
    yield from _of_the_disks(facts)


def _of_the_disks(facts: Facts) -> Iterator[Missing]:
    least = {"output": LEAST_OUTPUT, "cache": LEAST_CACHE}
    takes = {
        "output": "a checkpoint and the final model take 14 bytes a parameter: 16 GiB for "
        "Llama-3.2-1B, 105 for Llama-3.1-8B",
        "cache": "16 bytes a token",
    }
    for what, (folder, free_bytes, writable) in facts.folders.items():
        if not writable:
            yield Missing(f"{what} folder", f"{folder} may not be written", f"another --{what}_dir")
        elif free_bytes < least[what]:
            yield Missing(
                f"{what} folder",
                f"{folder} has {_gib(free_bytes)} free; {takes[what]}",
                f"free some, or give another --{what}_dir",
            )


def _gib(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else f"{nbytes / GIB:.3g} GiB"


# --- rates -----------------------------------------------------------------------------------

LINK = "link, each way of both at once"


def rates(facts: Facts) -> list[Rate]:
    """Returns the rates that were measured with those of the profile; nothing if none were
    measured."""
    measured, profile = facts.measured, facts.profile
    if measured is None:
        return []
    flops, memory, link = (
        (profile.flops, profile.memory_bytes, profile.link_bytes) if profile else 3 * (None,)
    )
    found = [
        _rate("products", measured.flops, flops, 1e12),
        _rate("memory", measured.memory_bytes, memory, 1e9),
        _rate("link, up alone", measured.link.up, None, 1e9),
        _rate("link, down alone", measured.link.down, None, 1e9),
        _rate(LINK, measured.link.both, link, 1e9),
    ]
    for backend, lengths in measured.attention.items():
        known = profile.attention.get(backend) if profile else None
        for tokens, pair in lengths.items():
            longest = tokens == max(lengths)  # the profile's rates are those of long documents
            for i, what in enumerate(("forward", "backward")):
                expected = known[i] if known and longest else None
                name = f"{backend} {what}, {tokens} tokens"
                found.append(_rate(name, pair[i], expected, 1e12))
    return found


def _rate(what: str, measured: float, profile: float | None, unit: float) -> Rate:
    word = "TFLOP/s" if unit == 1e12 else "GB/s"
    return Rate(what, measured / unit, None if profile is None else profile / unit, word)
