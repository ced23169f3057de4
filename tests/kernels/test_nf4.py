"""Weights of 4 bits made dense: the bits of bitsandbytes, and of the equation in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import DEVICE
from longctx.kernels import nf4
from longctx.kernels.nf4 import dense_nf4

bitsandbytes = pytest.importorskip("bitsandbytes")
HALVES = (torch.bfloat16, torch.float16)


def quantised(*shape: int, dtype: torch.dtype, double: bool, **how: Any) -> tuple[Tensor, Any]:
    torch.manual_seed(shape[0])
    weight = torch.randn(shape, dtype=dtype, device=DEVICE) * 0.05
    how = {"quant_type": "nf4", "compress_statistics": double, **how}
    return bitsandbytes.functional.quantize_4bit(weight, **how)


def equation(packed: Tensor, state: Any) -> Tensor:
    """w = code[q] s in plain torch, each operation rounded to fp32."""
    scales = state.absmax
    if state.nested:
        inner = state.state2
        of_scales = inner.absmax.repeat_interleave(inner.blocksize)[: len(scales)]
        scales = inner.code[scales.long()] * of_scales + state.offset
    packed = packed.contiguous().view(torch.uint8).flatten()
    q = torch.stack([packed >> 4, packed & 15], 1).flatten()[: state.shape.numel()]
    wide = scales.repeat_interleave(state.blocksize)[: len(q)]
    return (state.code[q.long()] * wide).to(state.dtype).view(state.shape)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("shape", [(8, 8), (3, 64), (136, 264), (2100, 32), (3, 40, 24)])
def test_the_bits_of_the_equation(shape, dtype, double) -> None:
    packed, state = quantised(*shape, dtype=dtype, double=double)
    found = dense_nf4(packed, state)
    assert found.dtype == dtype and torch.equal(found, equation(packed, state))


@pytest.mark.parametrize("blocksize", [128, 4096])
def test_other_blocks_and_a_place_for_it(blocksize) -> None:
    packed, state = quantised(96, 128, dtype=torch.bfloat16, double=True, blocksize=blocksize)
    room = torch.zeros(100, 128, dtype=torch.bfloat16, device=DEVICE)
    assert dense_nf4(packed, state, out=room[2:98]).data_ptr() == room[2:].data_ptr()
    assert torch.equal(room[2:98], equation(packed, state)) and not room[98:].any()


def test_bytes_in_another_dtype() -> None:
    """bitsandbytes may store the packed bytes as bf16 numbers, which FSDP can shard."""
    packed, state = quantised(
        64, 128, dtype=torch.bfloat16, double=True, quant_storage=torch.bfloat16
    )
    assert packed.dtype == torch.bfloat16
    assert torch.equal(dense_nf4(packed, state), equation(packed, state))


@pytest.mark.parametrize(
    ("shape", "how"), [((5, 13), {}), ((16, 64), {"quant_type": "fp4"})], ids=["odd", "fp4"]
)
def test_what_is_left_to_bitsandbytes(shape, how, monkeypatch) -> None:
    monkeypatch.setattr(nf4, "_dense_kernel", None)
    packed, state = quantised(*shape, dtype=torch.bfloat16, double=True, **how)
    with torch.compiler.set_stance("force_eager"):  # it would compile what an odd shape takes, 15 s
        expected = bitsandbytes.functional.dequantize_4bit(packed, state)
        assert torch.equal(dense_nf4(packed, state), expected)


def test_a_place_that_does_not_fit_is_refused() -> None:
    state = SimpleNamespace(shape=torch.Size((4, 16)), dtype=torch.bfloat16)
    packed = torch.zeros(32, 1, dtype=torch.uint8, device=DEVICE)
    for out in (torch.empty(4, 16), torch.empty(16, 4, dtype=torch.bfloat16).t()):
        with pytest.raises(ValueError, match=r"out must be \(4, 16\) in torch.bfloat16"):
            dense_nf4(packed, state, out=out.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_bits_of_bitsandbytes(dtype, double) -> None:
    packed, state = quantised(14336, 4096, dtype=dtype, double=double)
    expected = bitsandbytes.functional.dequantize_4bit(packed, state)
    assert torch.equal(dense_nf4(packed, state), expected)
