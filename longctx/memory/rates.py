"""Measures this GPU's rates of matmuls and copies, once for this hardware and these versions, and
keeps them on disk (`Measured`).

    products      y = x W, dx = dy W', dW = x' dy of a tile of Llama-3.1-8B's MLP
    copies        1 GiB on the GPU: bytes read and written
    link          256 MiB of page-locked memory: up, down, both at once
    attention     train/plan/measure.py

`longctx doctor` and `longctx plan` measure all of them (train/plan/measure.py), each for up to a
second, so that clocks settle as in a step. A run takes the rates that are kept. If there are none,
it measures for 30 ms.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from longctx.constants import GIB
from longctx.cost.fitted import ATTENTION_SHARES
from longctx.cost.machines import between, machine_like
from longctx.cost.rates import AttentionRates, Rates, of_heads
from longctx.errors import UserError, print_rank0
from longctx.memory.slab import PinnedSlab
from longctx.system import CACHE, cpu_line, expanded, version_of

FORMAT = 1
"""The version of the file and of the measurement: any change raises it."""
BRIEF_S, SETTLED_S = 0.01, 1.0
"""Seconds for which a work is repeated: in a run, and for rates that are kept on disk."""
BESIDE_S = 0.1
"""Seconds in which processes copy at the same time: much longer than the time between their
starts."""
CUBE, TILE = (4096, 4096, 4096), (8192, 4096, 14336)
"""Tokens, D and F of the matmuls that are measured."""
COPIED_BYTES, LINK_BYTES, BRIEF_BYTES = GIB, 2**28, 2**26
LOCKED_BYTES, LEAST_LOCKED_BYTES = 4 * GIB, 2**26
"""The most host bytes that are locked on trial, and the fewest: if these fail, 0 is recorded."""


class Link(NamedTuple):
    """Bytes per second over the link: up alone, down alone, and each way when both run at once."""

    up: float
    down: float
    both: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rates of this machine, in FLOP/s and bytes per second."""

    flops: float
    memory_bytes: float
    link: Link
    attention: Mapping[str, Mapping[int, tuple[float, float]]]
    """Maps backends, the one that `auto` takes first, to document lengths in tokens, and these to
    the rates of forward and backward."""
    locked_bytes: int
    """Host bytes that could be page-locked on trial."""
    tried_bytes: int
    """Host bytes that the trial asked for."""


@cache
def gpu_rates(
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    document: int,
    head_dim: int,
    capped: bool = False,
    link_bytes: float | None = None,
) -> Rates:
    """Returns the rates of matmuls in `dtype`, of copies on the GPU, of copies over the link with
    equal traffic back, and of a backend's attention over documents of this length, whose scores may
    have a softcap. `link_bytes` is the link's rate if other processes of the host use it
    (loop/host_link.py); the rates on disk are those of a single process."""
    kept = read_rates(device) if dtype.itemsize == 2 else None
    if kept is not None:
        flops, memory_bytes, alone = kept.flops, kept.memory_bytes, kept.link.both
    else:
        flops = products(device, dtype, CUBE, BRIEF_S)
        alone = link_bytes or link(device, BRIEF_BYTES, BRIEF_S).both
        memory_bytes = copies(device, BRIEF_BYTES, BRIEF_S)
    profile = machine_like(torch.cuda.get_device_name(device))
    if kept is not None and (lengths := kept.attention.get(backend)):
        attention = between({n: AttentionRates(*pair) for n, pair in lengths.items()}, document)
    elif profile is not None and backend in profile.attention:
        scale = flops / profile.flops
        attention = AttentionRates(*(scale * rate for rate in profile.attention[backend]))
    else:
        attention = AttentionRates(*(share * flops for share in ATTENTION_SHARES))
    attention = of_heads(attention, backend, head_dim, capped)
    return Rates(flops, link_bytes or alone, memory_bytes, attention)


# --- kept on disk ----------------------------------------------------------------------------


def rates_path(device: torch.device) -> Path:
    """Returns the file that keeps this machine's rates."""
    key = hashlib.sha256(json.dumps(identity(device)).encode()).hexdigest()[:20]
    return expanded(CACHE) / "rates" / f"rates-v{FORMAT}-{key}.json"


def read_rates(device: torch.device) -> Measured | None:
    """Returns the rates on disk; None if there are none, or if their file is damaged."""
    path = rates_path(device)
    if not os.path.isfile(path):  # reading a pipe would wait for its writer
        return None
    try:
        found = json.loads(path.read_text())
        attention = {
            name: {int(tokens): (float(f), float(b)) for tokens, (f, b) in lengths.items()}
            for name, lengths in found["attention"].items()
        }
        measured = Measured(**{**found, "attention": attention, "link": Link(*found["link"])})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return measured if _is_sound(measured) else None


def _is_sound(measured: Measured) -> bool:
    """Whether all values that were read can be rates and bytes."""
    attention = measured.attention.values()
    if not attention or not all(attention):
        return False
    counts = [measured.locked_bytes, measured.tried_bytes]
    counts += [tokens for lengths in attention for tokens in lengths]
    numbers: list[float] = [measured.flops, measured.memory_bytes, *measured.link]
    numbers += [rate for lengths in attention for pair in lengths.values() for rate in pair]
    return all(type(count) is int and count >= 0 for count in counts) and all(
        isinstance(number, float) and 0 < number < math.inf for number in numbers
    )


def write_rates(device: torch.device, measured: Measured) -> Path | None:
    """Writes the rates atomically and returns their file. If they cannot be written, prints a line
    and returns None."""
    path = rates_path(device)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(measured), indent=1))
        os.replace(temporary, path)
        return path
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        print_rank0(f"this machine's rates are not kept in {path}: {error.strerror or error}")
        return None


def identity(device: torch.device) -> list[Any]:
    """Returns what the rates depend on: GPU, host, driver and libraries, since machines may share a
    home folder."""
    gpu = torch.cuda.get_device_properties(device)
    host = [
        platform.machine(),
        cpu_line("model name"),
        os.cpu_count(),
        psutil.virtual_memory().total,
    ]
    versions = [torch.__version__, torch.version.cuda, torch.backends.cudnn.version()]
    return [
        *(gpu.name, gpu.total_memory, gpu.major, gpu.minor, driver_version()),
        *(host, versions, version_of("flash-attn-4")),
    ]


def driver_version() -> str | None:
    """Returns the version of the kernel's NVIDIA module; None if the container does not show it."""
    with suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
        words = text.splitlines()[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


# --- measured --------------------------------------------------------------------------------


def products(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], for_s: float
) -> float:
    """Returns the FLOP/s of matmuls."""
    tokens, hidden, intermediate = shape
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    w = torch.randn(hidden, intermediate, device=device, dtype=dtype)
    y, dx, dw = x @ w, torch.empty_like(x), torch.empty_like(w)

    def work() -> None:
        torch.mm(x, w, out=y)
        torch.mm(y, w.t(), out=dx)
        torch.mm(x.t(), y, out=dw)

    return 6 * tokens * hidden * intermediate / seconds_of(work, for_s)


def copies(device: torch.device, nbytes: int, for_s: float) -> float:
    """Returns the bytes read and written on the GPU per second."""
    here = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    return 2 * nbytes / seconds_of(lambda: there.copy_(here), for_s)


def link(device: torch.device, nbytes: int, for_s: float) -> Link:
    """Returns the rates of the link to the host."""
    return Link(*(nbytes / seconds_of(work, for_s) for work in _over_the_link(device, nbytes)))


def link_beside_others(
    device: torch.device, nbytes: int, for_s: float, begin: Callable[[], object]
) -> float:
    """Returns the bytes per second each way, with traffic both ways, while other processes copy
    too. `begin` is called when the copies can start, and waits until those of the others can."""
    *_, both = _over_the_link(device, nbytes)
    both()
    timed(both, 1)
    begin()
    return nbytes / seconds_of(both, for_s)


def _over_the_link(device: torch.device, nbytes: int) -> tuple[Callable[[], None], ...]:
    """Returns three works: copies up, down, and both at once."""
    host_up, host_down = (torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2))
    gpu_up, gpu_down = (torch.zeros_like(host_up, device=device) for _ in range(2))
    here, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def up() -> None:
        gpu_up.copy_(host_up, non_blocking=True)

    def down() -> None:
        host_down.copy_(gpu_down, non_blocking=True)

    def both() -> None:
        other.wait_stream(here)
        with torch.cuda.stream(other):
            down()
        up()
        here.wait_stream(other)

    return up, down, both


def lock(device: torch.device, nbytes: int) -> int:
    """Returns how many bytes of host memory can be page-locked, at most `nbytes`. CUDA keeps the
    error of a refused lock until the next kernel finds it, so this must be called last."""
    while nbytes >= LEAST_LOCKED_BYTES:
        with suppress(UserError):
            PinnedSlab(nbytes, device)
            return nbytes
        nbytes //= 2
    return 0


def seconds_of(work: Callable[[], object], for_s: float) -> float:
    """Returns the seconds of one call, measured in the second half of about `for_s` seconds of
    calls."""
    work()  # compiles, allocates
    once = timed(work, 1)
    if once >= for_s:
        return once
    repeats = max(1, min(1000, int(for_s / 2 / once)))
    timed(work, repeats)
    return timed(work, repeats) / repeats


def timed(work: Callable[[], object], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
