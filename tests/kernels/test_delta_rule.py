"""Gradients in the chunks of a Gated DeltaNet, against autograd in fp64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, assert_exact
from longctx.kernels.delta_rule import chunk_gradients, chunk_gradients_reference

SHAPES = [
    # B, T, H, G, K, V, chunk
    (1, 37, 1, 1, 24, 16, 16),  # a last chunk of five tokens, heads that are no power of two
    (2, 64, 1, 3, 16, 40, 32),  # rows of whole chunks, heads of values that share keys
    (1, 70, 2, 2, 136, 136, 64),  # two blocks of keys and of values
]
GPU_SHAPES = [(1, 16384, 16, 32, 128, 128, 64), (3, 1000, 4, 4, 96, 192, 64)]
NAMES = ("dq", "dk", "dw", "db")


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The decay is slow enough for a chunk's first token to reach the last."""
    B, T, H, G, K, V, chunk = shape
    torch.manual_seed(T)
    chunks = -(-T // chunk)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE).to(dtype)

    steps = -torch.rand(B, T, G, device=DEVICE) / 8
    b = torch.cat([steps[:, i : i + chunk].cumsum(1) for i in range(0, T, chunk)], dim=1)
    given = {name: normal(B, T, H, K) for name in ("q", "k")}
    given |= {name: normal(B, T, G, V) for name in ("v", "do", "dv")}
    states = {name: normal(B, chunks, G, K, V) for name in ("h", "dh")}
    return given | {"b": b} | states | {"scale": K**-0.5, "chunk": chunk}


def by_autograd(given: dict[str, Any]) -> list[Tensor]:
    """(dq, dk, dw, db) in fp64, of the three equations of forward."""
    named = {name: x.double() for name, x in given.items() if isinstance(x, Tensor)}
    q, k, b = (named[name].requires_grad_() for name in ("q", "k", "b"))
    heads, T = named["v"].shape[2] // q.shape[2], q.shape[1]
    wide_q, wide_k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    w = torch.zeros_like(wide_k).requires_grad_()
    total = q.new_zeros(())
    bounds = [*range(0, T, given["chunk"]), T]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        cut = (wide_q, wide_k, w, named["v"], named["do"], named["dv"])
        q_, k_, w_, v, do, dv = (x[:, start:stop].transpose(1, 2) for x in cut)
        b_ = b[:, start:stop].transpose(1, 2)[..., None]  # (B, G, t, 1)
        h, dh = named["h"][:, i], named["dh"][:, i]
        s = (q_ @ k_.mT) * (b_ - b_.mT).tril().exp().tril()
        o = given["scale"] * (b_.exp() * (q_ @ h) + s @ v)
        end = b_[:, :, -1:]
        then = end.exp() * h + ((end - b_).exp() * k_).mT @ v
        total = total + (do * o).sum() + (dh * then).sum() - (dv * (w_ @ h)).sum()
    return list(torch.autograd.grad(total, (q, k, w, b)))


def compare(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = draw(shape, dtype)
    truth = by_autograd(given)
    given["b"] = given["b"] / math.log(2)
    naive = chunk_gradients_reference(**given)
    ours = chunk_gradients(**given)
    for name, own, plain, true in zip(NAMES, ours, naive, truth, strict=True):
        assert_exact(name, own, plain, true, dtype)
        assert own.dtype == (torch.float32 if name == "db" and dtype != torch.float64 else dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_by_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(shape, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_equations(shape: tuple[int, ...]) -> None:
    """Plain torch in fp64 has no error but that of b, which is fp32."""
    given = draw(shape, torch.float64)
    truth = by_autograd(given)
    given["b"] = given["b"].double() / math.log(2)
    for name, own, true in zip(NAMES, chunk_gradients_reference(**given), truth, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)


LENGTHS = [21, 64, 1, 16, 40]
"""The lengths of a row's documents: most do not fill their last chunk of 16 tokens."""
PARTS = ("q", "k", "v", "do", "dv", "b")


def packed(dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments of a row of documents, and what each document gives by itself."""
    shapes = [(1, length, 2, 4, 24, 40, 16) for length in LENGTHS]
    alone = [draw(shape, dtype) for shape in shapes]
    given = {name: torch.cat([x[name] for x in alone], dim=1) for name in (*PARTS, "h", "dh")}
    found = [chunk_gradients(**one) for one in alone]
    bounds = torch.tensor([0, *LENGTHS], device=DEVICE, dtype=torch.int32).cumsum(0)
    more = dict(scale=alone[0]["scale"], chunk=16, bounds=bounds.int())
    return given | more, [torch.cat(grads, dim=1) for grads in zip(*found, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_documents_of_a_row_are_as_rows_of_their_own(dtype: torch.dtype) -> None:
    """To the bit: the kernel in 16 bits, plain torch in fp64."""
    given, expected = packed(dtype)
    for name, own, alone in zip(NAMES, chunk_gradients(**given), expected, strict=True):
        assert torch.equal(own, alone), name
    with pytest.raises(ValueError, match="lie in one row, got 2"):
        chunk_gradients(**given | {"q": given["q"].expand(2, -1, -1, -1)})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_heads_of_released_models(shape: tuple[int, ...]) -> None:
    """Qwen3.5-9B's and OLMo Hybrid's."""
    compare(shape, torch.bfloat16)


def test_what_is_refused() -> None:
    given = draw(SHAPES[0], torch.bfloat16)
    with pytest.raises(ValueError, match="dh must have shape"):
        chunk_gradients(**given | {"dh": given["h"][:, :1]})
    with pytest.raises(ValueError, match="dtype"):
        chunk_gradients(**given | {"h": given["h"].float()})
    wide = draw((1, 16, 1, 1, 16, 272, 16), torch.bfloat16)
    with pytest.raises(ValueError, match="at most 256 columns"):
        chunk_gradients(**wide)
