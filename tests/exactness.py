"""The one tolerance of the test suite: no path may be less exact than the plain one in the same
dtype.

Truth is a run in fp32 or fp64, naive is the plain implementation in the dtype under test. Per
tensor, the relative Frobenius error of ours may be at most 1.1 times naive's, plus a floor.

Without a GPU the kernels' tests run under Triton's interpreter. With one the same tests run them
compiled, and the tests marked `gpu` go past 2^31 elements. For memory errors, on a GPU:

    compute-sanitizer --tool memcheck python -m pytest -m "not gpu" -k "127" tests/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FACTOR = 1.1
# A sixteenth of the dtype's epsilon, where one rounding costs about a fifth of it: room for the
# scatter of tensors with few elements. For fp32 eight epsilons: sums in another order, exp and log
# of the hardware.
FLOOR = {torch.bfloat16: 2**-7 / 16, torch.float16: 2**-10 / 16, torch.float32: 8 * 2**-23}


def relative_error(x: Tensor, truth: Tensor) -> float:
    """|x - truth| / |truth|, in fp64 and Frobenius norm; |x| itself where the truth is zero."""
    x, truth = x.detach().double(), truth.detach().double()
    norm = truth.norm().item()
    return (x - truth).norm().item() / (norm or 1.0)


def assert_exact(
    name: str, ours: Tensor, naive: Tensor, truth: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Ours is as close to the truth as naive is. NaN never passes. Errors are those of `dtype`, by
    default naive's: under autocast gradients are fp32 and their errors those of 16 bits."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, not {tuple(truth.shape)}"
    error, naive_error = relative_error(ours, truth), relative_error(naive, truth)
    limit = FACTOR * naive_error + FLOOR[dtype or naive.dtype]
    assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} (naive {naive_error:.3g})"


def with_gradients(
    op: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor
) -> list[Tensor]:
    """The result of an op, and the gradients of all of its tensors for the result's gradient dy."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = op(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [torch.bfloat16, torch.float32]
"""The dtypes in which shapes matter: fp16 takes bf16's path through a kernel."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
