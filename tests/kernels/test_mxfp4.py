"""Weights in MXFP4 made dense: the bits of transformers' own reader."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from exactness import DEVICE
from longctx.kernels import mxfp4
from longctx.kernels.mxfp4 import dense_mxfp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    """Random bytes of weights of this shape, and scales near 1."""
    random = torch.Generator().manual_seed(sum(shape))
    *rows, columns = shape
    packed = torch.randint(256, (*rows, columns // 2), generator=random).byte()
    scale = torch.randint(110, 130, (*rows, columns // 32), generator=random).byte()
    return packed.to(DEVICE), scale.to(DEVICE)


def theirs(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Theirs is transposed, (E, K, O)."""
    blocks = packed.unflatten(-1, (-1, 16))
    return convert_moe_packed_tensors(blocks, scale, dtype=dtype).mT.to(packed.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_under_every_scale(dtype, monkeypatch) -> None:
    """Triton's interpreter has no numbers in bf16 below 2^-126; plain torch and GPUs do."""
    least = 2 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
    packed = torch.arange(256, device=DEVICE).byte().repeat(255, 1)[None]
    scale = torch.arange(255, device=DEVICE).byte()[:, None].repeat(1, 16)[None]
    found, expected = dense_mxfp4(packed, scale, dtype), theirs(packed, scale, dtype)
    assert torch.equal(found[:, least:], expected[:, least:])
    assert torch.equal(found.signbit(), expected.signbit())
    monkeypatch.setattr(mxfp4, "runs_kernel", lambda *_: False)
    assert torch.equal(dense_mxfp4(packed, scale, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 5, 96), (2, 40, 2880)])
def test_the_bits_of_transformers(shape, dtype, monkeypatch) -> None:
    """On a CPU without the interpreter, too, a few rows at a time."""
    packed, scale = drawn(*shape)
    expected = theirs(packed, scale, dtype)
    assert torch.equal(dense_mxfp4(packed, scale, dtype), expected)
    monkeypatch.setattr(mxfp4, "runs_kernel", lambda *_: False)
    monkeypatch.setattr(mxfp4, "PIECE", 64)
    assert torch.equal(dense_mxfp4(packed, scale, dtype), expected)


def test_a_scale_that_is_no_number(monkeypatch) -> None:
    packed, scale = drawn(1, 2, 32)
    scale[0, 1] = 255
    for kernel in (True, False):
        monkeypatch.setattr(mxfp4, "runs_kernel", lambda *_, kernel=kernel: kernel)
        found = dense_mxfp4(packed, scale, torch.float32)
        assert found[0, 1].isnan().all() and not found[0, 0].isnan().any()


def test_a_place_for_it() -> None:
    packed, scale = drawn(2, 3, 64)
    room = torch.zeros(4, 3, 64, dtype=torch.bfloat16, device=DEVICE)
    made = dense_mxfp4(packed, scale, torch.bfloat16, out=room[1:3])
    assert made.data_ptr() == room[1].data_ptr()
    assert torch.equal(room[1:3], theirs(packed, scale, torch.bfloat16))
    assert not room[0].any() and not room[3].any()


def test_what_is_refused() -> None:
    packed, scale = drawn(2, 3, 64)
    bf16 = torch.bfloat16
    with pytest.raises(ValueError, match="scale must have shape"):
        dense_mxfp4(packed, scale[..., :1], bf16)
    with pytest.raises(ValueError, match="multiple of 32"):
        dense_mxfp4(packed[..., :8], scale, bf16)
    with pytest.raises(ValueError, match="must be bytes"):
        dense_mxfp4(packed.char(), scale, bf16)
    with pytest.raises(ValueError, match="out must be .* and contiguous"):
        dense_mxfp4(packed, scale, bf16, out=torch.empty(2, 3, 64, device=DEVICE))
