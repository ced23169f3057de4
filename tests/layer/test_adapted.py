"""A linear layer with a LoRA adapter as a function of autograd, against fp64 and PEFT."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from exactness import DEVICE, assert_exact
from longctx.families.adapters import keep_layout_
from longctx.layer.adapted import Linear, linears
from longctx.layer.packed_weights import dense
from longctx.mixers.mixer_kernels import our_adapters, ours_in

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Small(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 80, bias=bias)


def adapted(dtype: torch.dtype, *, bias: bool = False, **settings: Any) -> Any:
    """PEFT's layer, with an adapter in fp32 that changes something."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["inner"], init_lora_weights=False, **settings
    )
    return peft.get_peft_model(Small(bias).to(dtype), config).base_model.model.inner.to(DEVICE)


def run(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    trained = [p for p in layer.parameters() if p.requires_grad]
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *trained], dy.to(y.dtype))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_exact_as_pefts(dtype, bias) -> None:
    layer = adapted(dtype, bias=bias)
    truth = copy.deepcopy(layer).double()
    x, dy = torch.randn(2, 70, 48, device=DEVICE).to(dtype), torch.randn(2, 70, 80, device=DEVICE)
    dy = dy.to(dtype)
    theirs = run(layer, x, dy)
    with our_adapters(ours_in(nn.ModuleList([layer]))):
        assert "forward" in vars(layer)
        ours = run(layer, x, dy)
    assert "forward" not in vars(layer)
    exact = run(truth, x.double(), dy.double())
    for name, own, naive, true in zip(("y", "dx", "da", "db"), ours, theirs, exact, strict=True):
        assert_exact(name, own, naive, true, dtype)


def test_a_weight_in_4_bits() -> None:
    """Beside PEFT's layer, whose base is bitsandbytes'; on a CPU too."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    small = Small(bias=False)
    quantised = bnb.nn.Linear4bit(
        48, 80, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    small.inner = quantised
    quantised.weight = bnb.nn.Params4bit(
        torch.randn(80, 48).bfloat16(), requires_grad=False, quant_type="nf4"
    )
    small = keep_layout(small.to(DEVICE))
    config = peft.LoraConfig(r=4, target_modules=["inner"], init_lora_weights=False)
    layer = peft.get_peft_model(small, config).base_model.model.inner.to(DEVICE)
    x, dy = torch.randn(70, 48, device=DEVICE), torch.randn(70, 80, device=DEVICE)
    theirs = run(layer, x.bfloat16(), dy.bfloat16())
    with our_adapters(ours_in(nn.ModuleList([layer]))):
        assert "forward" in vars(layer)
        ours = run(layer, x.bfloat16(), dy.bfloat16())
    plain = adapted(torch.float64)
    plain.base_layer.weight.data = dense(quantised.weight).double()
    for name in ("lora_A", "lora_B"):
        factor = getattr(layer, name)["default"].weight.detach()
        getattr(plain, name)["default"].weight.data = factor.double()
    plain.scaling["default"] = layer.scaling["default"]
    exact = run(plain, x.bfloat16().double(), dy.bfloat16().double())
    for name, own, naive, true in zip(("y", "dx", "da", "db"), ours, theirs, exact, strict=True):
        assert_exact(name, own, naive, true, torch.bfloat16)


def keep_layout(model: nn.Module) -> nn.Module:
    keep_layout_(model)
    return model


def test_layers_that_stay_pefts() -> None:
    plain = adapted(torch.float32)
    hooked = adapted(torch.float32)
    hooked.base_layer.register_forward_hook(lambda *given: None)
    trained = adapted(torch.float32)
    trained.base_layer.weight.requires_grad_()
    layers = nn.ModuleList([plain, hooked, trained, adapted(torch.float64), nn.Linear(2, 2)])
    with our_adapters(ours_in(layers)):
        assert ["forward" in vars(layer) for layer in layers] == [True, *4 * [False]]
        # These are PEFT's when they are called.
        dropping = adapted(torch.float32, lora_dropout=0.5)
    with our_adapters(
        ours_in(nn.ModuleList([dropping.eval(), adapted(torch.float32, use_dora=True)]))
    ):
        x = torch.randn(3, 48, device=DEVICE)
        found = dropping(x)
    torch.testing.assert_close(found, dropping(x))


def test_a_frozen_adapter_has_no_gradient() -> None:
    layer = adapted(torch.float32).requires_grad_(False)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(5, 48, device=DEVICE, requires_grad=True)
    y = linears(x, [Linear(layer.base_layer.weight, None, a, b.requires_grad_(), 1.5)])[0]
    y.sum().backward()
    assert a.grad is None and b.grad is not None and x.grad is not None
