"""RMSNorm times the SiLU of a gate, against fp64."""

from __future__ import annotations

from functools import partial
from inspect import signature

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from exactness import DEVICE, DTYPES, assert_exact, with_gradients
from longctx.kernels.gated_norm import gated_norm, gated_norm_reference

SHAPES = [(1, 8), (2, 33, 128), (70, 96), (3, 1000)]
EPS = 1e-5
HOW = [{}, {"gate_first": True}, {"gate_first": True, "groups": 2}]


@pytest.mark.parametrize("how", HOW, ids=["norm first", "gate first", "groups"])
@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_in_fp64(shape, dtype, plain, how, request) -> None:
    if plain:
        request.getfixturevalue("reference_kernels")
    torch.manual_seed(shape[-1])
    x, gate, dy = torch.randn(3, *shape, device=DEVICE).to(dtype)
    given = (x, 3 * gate, torch.randn(shape[-1], device=DEVICE).to(dtype))
    plainly = partial(gated_norm_reference, eps=EPS, **how)
    truth = with_gradients(plainly, [tensor.double() for tensor in given], dy)
    naive = with_gradients(plainly, given, dy)
    ours = with_gradients(partial(gated_norm, eps=EPS, **how), given, dy)
    for name, own, near, true in zip(("y", "dx", "d_gate", "dw"), ours, naive, truth, strict=True):
        assert_exact(name, own, near, true)


@pytest.mark.parametrize("kind", [Qwen3_5RMSNormGated, OlmoHybridRMSNormGated])
def test_as_transformers(kind) -> None:
    """In fp32; in 16 bits transformers rounds in between."""
    torch.manual_seed(0)
    theirs = kind(24, eps=EPS).to(DEVICE)
    torch.nn.init.normal_(theirs.weight)
    x, gate = torch.randn(2, 7, 24, device=DEVICE)
    torch.testing.assert_close(gated_norm(x, gate, theirs.weight, EPS), theirs(x, gate))


@pytest.mark.parametrize("kind", [GraniteMoeHybridRMSNormGated, Zamba2RMSNormGated])
def test_the_gate_first_as_transformers(kind) -> None:
    torch.manual_seed(0)
    takes_groups = "group_size" in signature(kind).parameters
    theirs = kind(24, eps=EPS, **({"group_size": 8} if takes_groups else {})).to(DEVICE)
    torch.nn.init.normal_(theirs.weight)
    x, wide = torch.randn(7, 24, device=DEVICE), torch.randn(7, 40, device=DEVICE)
    how = {"gate_first": True, "groups": 3 if takes_groups else 1}
    gate = wide[:, 3:27]  # rows at a stride, as a part of what a linear layer gives
    torch.testing.assert_close(gated_norm(x, gate, theirs.weight, EPS, **how), theirs(x, gate))


def test_what_is_refused() -> None:
    x, weight = torch.randn(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match="gate must have shape"):
        gated_norm(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match="dtype of gate"):
        gated_norm(x, x.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match="no multiple of 3 groups"):
        gated_norm(x, x, weight, EPS, groups=3)
    with pytest.raises(ValueError, match="eps"):
        gated_norm(x, x, weight, -1.0)
