"""Prepares the launch of kernels: Triton, the device, checks of tensors, and configurations.

Shapes: T tokens, D hidden, F intermediate, H query and K key/value heads of size d, V vocabulary.

Triton is imported here and nowhere else. Without Triton the library still works on the CPU, where
every op runs its plain torch reference; CUDA tensors then raise an error that names the fix.

Each op uses one configuration (block sizes, warps) per size, the fastest of a small sweep on one
H200 (notes in `profiling/bench/kernel_bench.py`).
"""

from __future__ import annotations

import functools
import math
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
        """Stands in for `triton` and `tl`, so that files with kernels import without Triton."""

        def __getattr__(self, name: str) -> _Absent:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
            return self

    triton = tl = _Absent()

INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)
"""True if TRITON_INTERPRET=1 was set when Triton was imported: kernels then run on CPU tensors,
slowly."""

_BY_HAND = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x as `dtype`, rounded to nearest even.

    Triton's interpreter, unlike its compiler, truncates to bf16, so there it is done by hand.
    """
    if _BY_HAND:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, total):
    """total + a b. The interpreter multiplies 16-bit operands in 16 bits, or as integers."""
    if _BY_HAND:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def row_start(rows, stride, stride_head, HEADS: tl.constexpr):
    """Offsets of rows that `row_strides` describes; with HEADS > 1 row i is a head of token
    i // HEADS."""
    start = rows * stride
    if HEADS > 1:
        start = rows // HEADS * stride + rows % HEADS * stride_head
    return start


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's, but `create_graph=True` is a RuntimeError: torch leaves a gradient without a graph
    there, whose own gradient would be missing from a sum in silence."""
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("longctx computes no second derivatives (create_graph=True)")
        return once(ctx, *grads)

    return checked


FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernel(*tensors: Tensor | None) -> bool:
    """True if the Triton kernel handles these tensors, False if the plain torch reference does.

    The kernel handles all CUDA tensors, and CPU tensors only under Triton's interpreter. Raises
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
    """Makes the tensor's device the current one: that is where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def sm_count(x: Tensor) -> int:
    """Number of multiprocessors of the tensor's device (2 on the CPU): it sets the size of a
    persistent grid.
    """
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def check_float(name: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must have dtype {dtype}, got {x.dtype}")


def check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")


def check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError if `out` is no room for a dense result of this shape and dtype."""
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be {tuple(shape)} in {dtype} and contiguous, got {tuple(out.shape)} in "
            f"{out.dtype}"
        )


def check_same(name: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises ValueError for the first of many tensors whose value, `name`, is not as expected."""
    if found != expected:
        got, needed = next((x, y) for x, y in zip(found, expected, strict=True) if x != y)
        raise ValueError(f"{name} must be {needed}, got {got}")


def check_eps(eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")


def check_no_leaf(name: str, x: Tensor, written: str) -> None:
    """Raises ValueError if the memory that is to be written over is a trained leaf's."""
    owner = x if x._base is None else x._base
    if owner.is_leaf and owner.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} is {written}, so it must be neither a leaf nor a view of one")


def check_rows(name: str, x: Tensor) -> None:
    """Rows may lie at any stride, but the elements of a row must be contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tuple(x.stride())}"
        )


def as_rows(name: str, x: Tensor) -> Tensor:
    """A view of x (..., D) as (T, D); ValueError if its strides allow none without a copy."""
    check_rows(name, x)
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        shape, strides = tuple(x.shape), tuple(x.stride())
        raise ValueError(
            f"{name} must be rows at one stride, got shape {shape} with strides {strides}"
        ) from None


def rows_or_heads(*tensors: tuple[str, Tensor]) -> list[Tensor]:
    """Returns views as (rows, D), or all of them as (T, H, D) if the heads of one do not lie at one
    stride."""
    try:
        return [as_rows(name, x) for name, x in tensors]
    except ValueError:
        if any(x.dim() != 3 for _, x in tensors):
            raise
    for name, x in tensors:
        check_rows(name, x)
    return [x for _, x in tensors]


def row_strides(x: Tensor) -> tuple[int, int]:
    """Returns the strides of rows and 0, or those of tokens and heads."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """The launch configuration of a kernel."""

    block: int
    """Elements that one program handles along the last dimension."""
    num_warps: int
    rows: int = 1
    """Rows (or tokens) that one program holds at a time."""
    programs_per_sm: int = 1
    """Programs started per multiprocessor, where the grid is persistent."""
    num_stages: int = 1
    maxnreg: int | None = None
    """Upper limit of registers per thread, so that more programs fit on a multiprocessor."""
    fp_fusion: bool = True
    """A product and a sum may be contracted into one instruction, which rounds once."""


def over_tiles(
    kernel: Any,
    rows: Sequence[Tensor],  # (T, F) or wider, each
    F: int,
    config: Config,
    *numbers: float,
    **constants: Any,
) -> None:
    """Starts a program for each tile of rows and columns. The kernel takes the tensors, T, F, the
    tiles of a row, each tensor's stride, and the numbers."""
    T, tiles = len(rows[0]), triton.cdiv(F, config.block)
    with on_device(rows[0]):
        kernel[(triton.cdiv(T, config.rows) * tiles,)](
            *(*rows, T, F, tiles, *(x.stride(0) for x in rows), *numbers),
            **constants,
            ROWS=config.rows,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
