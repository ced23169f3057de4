"""The gates of a Gated DeltaNet, against their equations in fp64. Naive are the operations of
transformers, one after the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, DTYPES, assert_exact, with_gradients
from longctx.kernels.delta_gates import delta_gates

NAMES = "gates", "da", "db", "dA", "d bias"


def in_turn(a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor, most: float) -> Tensor:
    """Returns g and beta side by side."""
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -A_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + bias)
    beta = b.sigmoid() if most == 1 else b.sigmoid() * most
    return torch.cat([g, beta.to(wide)], dim=-1)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [1.0, 2.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 75, 24)], ids=str)
def test_as_in_fp64(shape, most, dtype, plain, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(shape[1])
    H = shape[-1]
    wide = (torch.randn(*shape[:2], 2 * H, device=DEVICE) * 4).to(dtype)
    a, b = wide.split(H, dim=-1)  # rows at a stride
    A_log, bias = torch.randn(2, H, device=DEVICE).to(dtype)
    given, dy = [a, b, A_log, bias], torch.randn(*shape[:2], 2 * H, device=DEVICE).to(dtype).float()
    theirs = partial(in_turn, most=most)
    truth = with_gradients(theirs, [x.double() for x in given], dy)

    def ours(*given: Tensor) -> Tensor:
        g, beta = delta_gates(*given, most=most)
        assert g.dtype == torch.float32 and beta.dtype == dtype
        return torch.cat([g, beta.float()], dim=-1)

    naive = with_gradients(theirs, given, dy)
    for name, own, near, true in zip(
        NAMES, with_gradients(ours, given, dy), naive, truth, strict=True
    ):
        assert_exact(name, own, near, true, dtype)


def test_far_from_zero() -> None:
    """The softplus is exact where 1 + e^x is about 1 in fp32, and where e^x is none of its numbers.
    An exponential in fp32 has the error of its exponent."""
    a = torch.cat([torch.linspace(-32, 32, 4097), torch.tensor([-100.0, 200.0])])[:, None]
    a = a.to(DEVICE)
    one, nothing = torch.zeros(1, device=DEVICE), torch.zeros_like(a)
    g, beta = delta_gates(a, nothing, one, one)
    true = -torch.logaddexp(a.double(), nothing.double())
    errors = (g.double() - true).abs()
    bound = (4 + a.double().clamp(max=0).abs()) * 2**-23 * true.abs() + 1e-38
    assert (errors <= bound).all(), (a[errors > bound], (errors / true.abs()).max())
    assert beta.unique().tolist() == [0.5]


def test_what_is_refused() -> None:
    a, heads = torch.randn(3, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    with pytest.raises(ValueError, match="b must have shape"):
        delta_gates(a, a[:, :2], heads, heads)
    with pytest.raises(ValueError, match="A_log must have shape"):
        delta_gates(a, a, heads[:2], heads)
    with pytest.raises(ValueError, match="bias must have shape"):
        delta_gates(a, a, heads, heads[:2])
