"""What every kernel needs before it can start: Triton, a device, and a launch configuration.

Triton is imported here and nowhere else. Without it the library still works on the CPU, where every
op runs its plain torch reference; asking for a kernel then is an error that names the fix.

One configuration (block sizes, warps) is used per op and size. Each was the fastest of a small
sweep on one H200 (`profiling/kernel_bench.py` keeps the notes). `LONGCTX_AUTOTUNE=1` times the
alternatives instead, once per op and *binned* size, so that sequences of changing length do not
tune again and again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = True
try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stands where `triton` and `tl` would: files with kernels import without Triton."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
            return self

    triton = tl = _Absent()

INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)
"""TRITON_INTERPRET=1 was set when Triton was imported: kernels run on CPU tensors, slowly."""

_ROUND_BF16 = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x, fp32, rounded to nearest even. Triton's interpreter alone truncates a bf16, so it gets it
    done by hand.
    """
    if _ROUND_BF16:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernel(*tensors: Tensor | None) -> bool:
    """True if these tensors go to the Triton kernel, False if they go to the plain torch reference.

    CUDA tensors always go to the kernel, and CPU tensors only under Triton's interpreter. Raises
    ValueError for tensors on different devices and RuntimeError for CUDA tensors without Triton.
    """
    devices = {x.device for x in tensors if x is not None}
    if len(devices) != 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type == "cpu":
        return INTERPRETED
    if device.type != "cuda":
        return False
    if not HAS_TRITON:
        raise RuntimeError("CUDA tensors need the Triton kernels: pip install 'triton>=3.6'")
    return True


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def sm_count(x: Tensor) -> int:
    """Multiprocessors of the tensor's device, from which a persistent grid takes its size."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def check_float(name: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must have dtype {dtype}, got {x.dtype}")


def check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")


def check_rows(name: str, x: Tensor) -> None:
    """Kernels walk rows at any stride, but inside a row the elements have to be neighbours."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tuple(x.stride())}"
        )


def as_rows(name: str, x: Tensor) -> Tensor:
    """x (..., D) seen as (N, D) without a copy; ValueError where its strides do not allow that."""
    check_rows(name, x)
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        shape, strides = tuple(x.shape), tuple(x.stride())
        raise ValueError(
            f"{name} must be rows at one stride, got shape {shape} with strides {strides}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one kernel is started."""

    block: int
    """Elements along the dimension that the kernel walks."""
    num_warps: int
    rows: int = 1
    """Rows (or tokens) that one program holds at a time."""
    programs_per_sm: int = 1
    """For persistent grids: programs started per multiprocessor."""
    num_stages: int = 1
    maxnreg: int | None = None
    """At most so many registers a thread, so that more programs fit on a multiprocessor."""


_tuned: dict[tuple[Any, ...], Config] = {}


def choose(
    op: str,
    key: tuple[Any, ...],
    default: Config,
    candidates: Callable[[Config], Sequence[Config]],
    run: Callable[[Config], object],
    overwrites: Sequence[Tensor] = (),
) -> Config:
    """The configuration to start `op` with: `default`, or under LONGCTX_AUTOTUNE=1 the fastest of
    it and `candidates(default)`.

    `key` holds what the choice depends on (binned by the caller); `overwrites` are the tensors that
    `run` changes: they are restored after the trials.
    """
    if os.environ.get("LONGCTX_AUTOTUNE") != "1" or INTERPRETED:
        return default
    entry = (op, *key)
    if entry not in _tuned:
        saved = [x.clone() for x in overwrites]
        trials = (default, *candidates(default))
        times = {c: triton.testing.do_bench(lambda c=c: run(c)) for c in trials}
        for x, value in zip(overwrites, saved, strict=True):
            x.copy_(value)
        _tuned[entry] = min(times, key=lambda c: times[c])
        print(f"longctx: autotuned {op}{key}: {_tuned[entry]} ({times[_tuned[entry]]:.3f} ms)")
    return _tuned[entry]
