"""AdamW's step on many tensors in one launch, with the bits of `adamw_` on each.

The 448 adapters of an 8B model hold 42 million numbers, which a GPU updates in less time than the
host takes for 448 launches. So where all tensors are, and the numbers of each one's step, go up in
a table (many.py), and a program finds there what it updates. Groups with different rates, decay and
counts of steps share a launch. Tensors of other dtypes have one of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from longctx.kernels.adamw import CHECKED, Options, adamw_reference, update_block
from longctx.kernels.launch import (
    Config,
    check_float,
    check_same,
    check_shape,
    on_device,
    runs_kernel,
    tl,
    triton,
)
from longctx.kernels.many import NUMEL, ROW, are_aligned, find_row, launches, pointer_at, size_at

Launch = Callable[[Tensor | None], None]
_WIDE, _SPLIT, _SCALED, _ALIGNED = 1, 2, 4, 8
"""Tensors of the same kind, a sum of these, share a launch: the gradient has 32 bits, the weight
has a remainder, there is a scale, and loads of 16 bytes are allowed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """A tensor's states, contiguous, which stay where they are from step to step.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """

    exp_avg: Tensor  # (n,) fp32
    exp_avg_sq: Tensor  # (n,) fp32
    remainder: Tensor | None = None  # (n,) int16 for a bf16 weight
    checksums: Tensor | None = None  # (ceil(n / CHECKED),) int32 for a bf16 weight

    def __post_init__(self) -> None:
        if (self.remainder is None) != (self.checksums is None):
            raise ValueError("a bfloat16 weight needs its remainder and their checksums")
        n = self.exp_avg.numel()
        for name, x, size, dtype in (
            ("exp_avg", self.exp_avg, n, torch.float32),
            ("exp_avg_sq", self.exp_avg_sq, n, torch.float32),
            ("remainder", self.remainder, n, torch.int16),
            ("checksums", self.checksums, -(-n // CHECKED), torch.int32),
        ):
            if x is not None:
                check_shape(name, x, (size,))
                check_same(f"dtype of {name}", [x.dtype], [dtype])
                check_same(f"device of {name}", [x.device], [self.device])
                check_same(f"contiguity of {name}", [x.is_contiguous()], [True])

    @cached_property
    def numel(self) -> int:
        return self.exp_avg.numel()

    @cached_property
    def device(self) -> torch.device:
        return self.exp_avg.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return torch.float32 if self.remainder is None else torch.bfloat16

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the four tensors; 0 for None."""
        tensors = (self.exp_avg, self.exp_avg_sq, self.remainder, self.checksums)
        return tuple(0 if x is None else x.data_ptr() for x in tensors)


@triton.jit(do_not_specialize=["rows"])
def _many_kernel(
    table_ptr,  # (rows, ROW) int64: first program, numel, 7 addresses, 5 numbers
    guard_ptr,  # () fp32
    rows,
    GRAD: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_GUARD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_GUARD:
        if tl.load(guard_ptr) != 0.0:
            return
    row = find_row(table_ptr, rows)
    numel = size_at(row + 1, ALIGNED)
    exp_avg_ptr = pointer_at(row + 2, tl.float32, ALIGNED)
    exp_avg_sq_ptr = pointer_at(row + 3, tl.float32, ALIGNED)
    remainder_ptr = pointer_at(row + 4, tl.int16, ALIGNED)
    checksums_ptr = pointer_at(row + 5, tl.int32, False)
    weight_ptr = pointer_at(row + 6, tl.int16 if SPLIT else tl.float32, ALIGNED)
    grad_ptr = pointer_at(row + 7, GRAD, ALIGNED)
    scale_ptr = pointer_at(row + 8, tl.float32, False)
    numbers_ptr = (row + 9).to(tl.pointer_type(tl.float32))
    decay, one_minus_beta1 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    one_minus_beta2, step_size = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    floor = tl.load(numbers_ptr + 4)
    update_block(
        *(weight_ptr, remainder_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, scale_ptr),
        *(checksums_ptr, tl.program_id(0) - tl.load(row), numel),
        *(decay, one_minus_beta1, one_minus_beta2, step_size, floor),
        *(SPLIT, HAS_SCALE, SPLIT, BLOCK),
    )


def adamw_many_(
    weights: Sequence[Tensor],  # any shapes, bf16 or fp32
    states: Sequence[States],
    grads: Sequence[Tensor],  # of as many elements, bf16 or fp32
    options: Sequence[Options],
    scales: Sequence[Tensor | None],  # () fp32
) -> None:
    """`adamw_` of many contiguous tensors on one device: in one launch, or a few where dtypes,
    scales or alignments differ. The table goes up in one copy, for which the host does not wait.

    Raises ValueError for a wrong shape, dtype, device or layout.
    """
    prepared_adamw(weights, states, grads, options, scales)(None)


def prepared_adamw(
    weights: Sequence[Tensor],
    states: Sequence[States],
    grads: Sequence[Tensor],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
) -> Launch:
    """Checks, and sends the table; returns what launches `adamw_many_`, while the tensors stay
    where they are. It takes a guard, () fp32 or None: unless that is 0, nothing is updated."""
    if not weights:
        return _nothing
    numels = _check(weights, states, grads, scales)
    if not runs_kernel(weights[0], states[0].exp_avg):
        return partial(_reference, weights, states, grads, options, scales)
    table = np.zeros((len(weights), ROW), np.int64)
    table[:, NUMEL] = numels
    table[:, 2:6] = [of.addresses for of in states]
    table[:, 6] = [*map(Tensor.data_ptr, weights)]
    table[:, 7] = [*map(Tensor.data_ptr, grads)]
    table[:, 8] = [0 if scale is None else scale.data_ptr() for scale in scales]
    place = {given: i for i, given in enumerate(dict.fromkeys(options))}
    numbers = np.array([(*given.numbers, 0.0) for given in place], np.float32)
    table[:, 9:] = numbers[[place[given] for given in options]].view(np.int64)
    kinds = np.array([grad.dtype is torch.float32 for grad in grads]) * _WIDE
    kinds += (table[:, 4] != 0) * _SPLIT + (table[:, 8] != 0) * _SCALED
    kinds += are_aligned(table[:, [NUMEL, 2, 3, 4, 6, 7]]) * _ALIGNED
    found = [*launches(table, kinds, CONFIG.block, weights[0].device)]
    return partial(_launch, found, weights[0])


def _nothing(guard: Tensor | None) -> None:
    pass


def _launch(found: list[tuple[int, Tensor, int]], like: Tensor, guard: Tensor | None) -> None:
    with on_device(like):
        for kind, rows, programs in found:
            _many_kernel[(programs,)](
                rows,
                guard,
                len(rows),
                HAS_GUARD=guard is not None,
                GRAD=tl.float32 if kind & _WIDE else tl.bfloat16,
                SPLIT=bool(kind & _SPLIT),
                HAS_SCALE=bool(kind & _SCALED),
                ALIGNED=bool(kind & _ALIGNED),
                BLOCK=CONFIG.block,
                num_warps=CONFIG.num_warps,
                enable_fp_fusion=CONFIG.fp_fusion,
            )


def _check(
    weights: Sequence[Tensor],
    states: Sequence[States],
    grads: Sequence[Tensor],
    scales: Sequence[Tensor | None],
) -> list[int]:
    """Returns the numbers of elements."""
    numels = [of.numel for of in states]
    where = [states[0].device] * len(states)
    check_same("dtype of a weight", [x.dtype for x in weights], [of.dtype for of in states])
    for x in grads:
        if x.dtype is not torch.float32 and x.dtype is not torch.bfloat16:
            raise ValueError(f"a gradient must be bfloat16 or float32, got {x.dtype}")
    for name, tensors in (("weight", weights), ("gradient", grads)):
        check_same(f"elements of a {name}", [*map(Tensor.numel, tensors)], numels)
        check_same(f"device of a {name}", [x.device for x in tensors], where)
        contiguous = [*map(Tensor.is_contiguous, tensors)]
        check_same(f"contiguity of a {name}", contiguous, [True] * len(tensors))
    check_same("device of states", [of.device for of in states], where)
    for scale in {id(scale): scale for scale in scales if scale is not None}.values():
        check_shape("scale", scale, ())
        check_float("scale", scale, torch.float32)
        check_same("device of a scale", [scale.device], where[:1])
    return numels


def _reference(
    weights: Sequence[Tensor],
    states: Sequence[States],
    grads: Sequence[Tensor],
    options: Sequence[Options],
    scales: Sequence[Tensor | None],
    guard: Tensor | None,
) -> None:
    if guard is not None and guard != 0.0:
        return
    for weight, of, grad, given, scale in zip(weights, states, grads, options, scales, strict=True):
        tensors = weight.data.view(-1), of.remainder, of.exp_avg, of.exp_avg_sq, grad.reshape(-1)
        adamw_reference(*tensors, given, scale=scale, checksums=of.checksums)


CONFIG = Config(block=CHECKED, num_warps=4, fp_fusion=False)
