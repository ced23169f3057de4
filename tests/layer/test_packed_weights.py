"""Weights as they are published under adapters, experts in MXFP4 and linear layers in FP8: the bits
of the dense weights that they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import family_config
from small_layer import PACKED, batch, gradients
from torch import nn
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.families.blocks import decoder_layers, scales
from longctx.families.look import whole_shape
from longctx.families.matrices import linears, stack_names, stacks
from longctx.families.stand_ins import shaped_experts
from longctx.layer.packed_weights import Fp8, Mxfp4, dense, packed_state, packed_weight
from longctx.loop.collectives import whole_numel

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")


def drawn(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """A weight of experts (E, K, O) in MXFP4: random bytes, and scales about 2^-6."""
    experts, columns, rows = shape
    packed = torch.randint(256, (experts, rows, columns // 2)).byte()
    scale = torch.randint(119, 123, (experts, rows, columns // 32)).byte()
    state = Mxfp4(shape, dtype, scale.to(DEVICE), transposed=True)
    return packed_weight(packed.to(DEVICE), state)


def pair(dtype: torch.dtype, *, experts: bool, **options: Any) -> tuple[Any, Any]:
    """(A model with packed experts, the same with dense ones that lie in memory as these do.)"""
    torch.manual_seed(0)
    sizes = dict(intermediate_size=96)
    packed = AutoModelForCausalLM.from_config(family_config("gpt_oss", **sizes)).to(DEVICE, dtype)
    plain = copy.deepcopy(packed)
    layers, others = (stacks(decoder_layers(model)) for model in (packed, plain))
    for owner, other in zip(layers.values(), others.values(), strict=True):
        for name in stack_names(owner):
            weight = drawn(owner.get_parameter(name).shape, dtype)
            setattr(other, name, nn.Parameter(dense(weight), requires_grad=False))
            setattr(owner, name, weight)
    return tuple(adapted(model, experts, options) for model in (packed, plain))


def adapted(model: Any, experts: bool, options: Any) -> Any:
    where = ["q_proj", "v_proj", "o_proj", "qkv_proj"]
    more = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]) if experts else {}
    config = peft.LoraConfig(r=4, target_modules=where, init_lora_weights=False, **more)
    with shaped_experts(model):
        model = peft.get_peft_model(model, config).train()
    torch.manual_seed(1)
    for name, x in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(x, std=0.1)
    return longctx.patch(model, strict=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("options", [{}, dict(tile_tokens=31, keep="x")])
def test_loss_and_gradients_have_the_bits_of_dense_weights(dtype, experts, options, capsys) -> None:
    ours, plain = pair(dtype, experts=experts, **options)
    loss, grads = gradients(ours, batch(PACKED))
    truth, expected = gradients(plain, batch(PACKED))
    assert torch.equal(loss, truth) and grads.keys() == expected.keys()
    assert len(grads) == 3 * 2 * (5 if experts else 3)
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def fp8_pair(family: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """(A model whose linear layers are in FP8, the same with dense ones.)"""
    torch.manual_seed(0)
    packed = AutoModelForCausalLM.from_config(family_config(family)).to(DEVICE, dtype)
    plain = copy.deepcopy(packed)
    ours, theirs = (linears(decoder_layers(model)) for model in (packed, plain))
    for (path, linear), other in zip(ours.items(), theirs.values(), strict=True):
        shape, block = linear.weight.shape, (1, linear.in_features) if "o_" in path else (32, 48)
        codes = torch.randint(0x28, shape).byte() + 128 * torch.randint(2, shape).byte()
        grid = [-(-n // of) for n, of in zip(shape, block, strict=True)]
        state = Fp8(shape, dtype, torch.rand(grid, device=DEVICE) + 0.5, block)
        linear.weight = packed_weight(codes.to(DEVICE), state)
        other.weight = nn.Parameter(dense(linear.weight), requires_grad=False)
    return tuple(adapted(model, False, options) for model in (packed, plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_linear_layers_in_fp8_have_the_bits_of_dense_ones(family, dtype, capsys) -> None:
    """Blocks at the ends of weights have less rows or columns."""
    ours, plain = fp8_pair(family, dtype)
    (loss, grads), (truth, expected) = (gradients(m, batch(PACKED)) for m in (ours, plain))
    assert torch.equal(loss, truth) and loss.isfinite() and len(grads) >= 6
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def test_hugging_faces_layers_compute_with_dense_weights() -> None:
    """In generation, whose keys and values the schedule does not keep."""
    ids = torch.arange(3, 23, device=DEVICE)[None]
    found = [m.eval().generate(ids, max_new_tokens=3) for m in pair(torch.float32, experts=True)]
    assert torch.equal(*found) and found[0].shape[1] == 23


def test_what_is_said_of_it() -> None:
    weight: Any = drawn(torch.Size((3, 64, 10)), torch.bfloat16)
    assert whole_shape(weight) == (3, 64, 10) and whole_numel(weight) == 1920
    (part,) = scales(weight)
    assert part.tensor is weight.quant_state.scale
    part.put(part.tensor.clone())
    assert packed_state(weight) is weight.quant_state
    room = torch.empty(3, 64, 10, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(dense(weight, room), dense(weight)) and dense(room) is room
