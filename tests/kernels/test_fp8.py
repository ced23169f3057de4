"""Weights in FP8 made dense: one product in fp32, the bits of transformers' own reader where it
takes a weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from exactness import DEVICE
from longctx.kernels import fp8
from longctx.kernels.fp8 import dense_fp8

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Block = tuple[int, int]


def drawn(shape: tuple[int, ...], block: Block) -> tuple[Tensor, Tensor]:
    """Random bytes, all of them numbers, and scales near 1."""
    torch.manual_seed(sum(shape))
    packed = torch.randint(255, shape).byte()
    packed[packed == 127] = 0  # NaN, as 255 is
    *lead, M, K = shape
    scale = torch.rand(*lead, -(-M // block[0]), -(-K // block[1])) + 0.5
    return packed.to(DEVICE), scale.to(DEVICE)


def equation(packed: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    *_, M, K = packed.shape
    wide = scale.repeat_interleave(block[0], -2)[..., :M, :]
    wide = wide.repeat_interleave(block[1], -1)[..., :K]
    return (packed.view(torch.float8_e4m3fn).float() * wide).to(dtype)


CASES = [
    ((256, 384), (128, 128)),
    ((3, 128, 256), (128, 128)),  # experts
    ((576, 200), (128, 128)),  # DeepSeek's kv_a_proj_with_mqa ends in half a block
    ((9, 1536), (4, 1024)),
    ((5, 21), (2, 6)),  # a byte a thread
    ((40, 72), (40, 72)),  # a scale a matrix
    ((2, 40, 72), (1, 72)),  # a scale a row
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block"), CASES)
def test_the_bits_of_the_equation(shape, block, dtype, monkeypatch) -> None:
    """On a CPU without the interpreter, too, a few rows at a time."""
    packed, scale = drawn(shape, block)
    expected = equation(packed, scale, block, dtype)
    assert torch.equal(dense_fp8(packed, scale, block, dtype), expected)
    monkeypatch.setattr(fp8, "runs_kernel", lambda *_: False)
    monkeypatch.setattr(fp8, "PIECE", 7)
    assert torch.equal(dense_fp8(packed.view(torch.float8_e4m3fn), scale, block, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_transformers(dtype) -> None:
    packed, scale = drawn((256, 384), (128, 128))
    theirs = Fp8Dequantize(None)._dequantize_one(packed.view(torch.float8_e4m3fn), scale, dtype)
    assert torch.equal(dense_fp8(packed, scale, (128, 128), dtype), theirs)


def test_every_byte() -> None:
    packed = torch.arange(256, device=DEVICE).byte()[None]
    scale = torch.ones(1, 1, device=DEVICE)
    found = dense_fp8(packed, scale, (128, 256), torch.float32)
    expected = packed.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.signbit()[expected == 0], expected.signbit()[expected == 0])
    assert found.isnan().nonzero()[:, 1].tolist() == [127, 255]


def test_a_place_for_it() -> None:
    packed, scale = drawn((64, 96), (32, 32))
    room = torch.zeros(66, 96, dtype=torch.bfloat16, device=DEVICE)
    made = dense_fp8(packed, scale, (32, 32), torch.bfloat16, out=room[1:65])
    assert made.data_ptr() == room[1].data_ptr()
    assert torch.equal(room[1:65], equation(packed, scale, (32, 32), torch.bfloat16))
    assert not room[0].any() and not room[65].any()


def test_bytes_at_any_place() -> None:
    packed, scale = drawn((64, 96), (32, 32))
    room = torch.zeros(1 + packed.numel(), dtype=torch.uint8, device=DEVICE)
    room[1:] = packed.flatten()
    found = dense_fp8(room[1:].view(64, 96), scale, (32, 32), torch.bfloat16)
    assert torch.equal(found, equation(packed, scale, (32, 32), torch.bfloat16))


def test_what_is_refused() -> None:
    packed, scale = drawn((64, 96), (32, 32))
    with pytest.raises(ValueError, match="scale must have shape"):
        dense_fp8(packed, scale, (32, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="scales in fp32 are needed"):
        dense_fp8(packed, scale.bfloat16(), (32, 32), torch.bfloat16)
    with pytest.raises(ValueError, match="out must be .* and contiguous"):
        dense_fp8(packed, scale, (32, 32), torch.bfloat16, out=torch.empty(64, 96, device=DEVICE))
