"""A Gated DeltaNet from our functions, beside transformers' module in fp64: kernels, adapters,
segments and packed documents."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
from small_families import IN_TORCH_ALONE
from torch import Tensor
from transformers import AutoConfig
from wide import in_fp64

from exactness import DEVICE, assert_exact
from longctx.families.families import layers_of
from longctx.kernels import launch
from longctx.layer.row_documents import RowDocuments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers import gated_delta_net
from longctx.mixers.mixers import Carried, ModelsMixer

pytestmark = [pytest.mark.usefixtures("reference_kernels"), IN_TORCH_ALONE]
T, HIDDEN = 100, 64
HEADS = dict(linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=24)
KINDS = {
    "qwen3_5_text": ("Qwen3_5TextModel", 4),
    "qwen3_next": ("Qwen3NextModel", 4),
    "olmo_hybrid": ("OlmoHybridModel", 2),
}
"""Families, with their classes and heads of values."""


def built(kind: str) -> tuple[Any, MixerSpec]:
    """Returns a mixer with LoRA on half of its linear layers, in fp32, whose states last."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        hidden_size=HIDDEN,
        intermediate_size=8,
        vocab_size=8,
        pad_token_id=0,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=KINDS[kind][1],
        **HEADS,
    )
    home = import_module(f"transformers.models.{kind.removesuffix('_text')}")
    ((layer, own), *_) = layers_of(getattr(home, KINDS[kind][0])(config))
    spec = own.part(MixerSpec)
    assert spec is not None
    module = layer.get_submodule(spec.path).train()
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            slow = path.endswith("A_log")  # a leak between segments shows
            drawn = torch.randn(parameter.shape) / 6
            parameter.copy_(torch.full_like(drawn, -2.0) if slow else drawn)
    targets = ["in_proj_qkv", "in_proj_b", "in_proj_qkvz", "out_proj", "q_proj", "g_proj", "a_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, module)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(".base_layer." not in path)
    return module.to(DEVICE), spec


def trained(module: Any) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def theirs(module: Any, spec: MixerSpec, n: Tensor, dy: Tensor, bounds: list[int]) -> list[Tensor]:
    """Returns the module's own output of rows with these documents, and all gradients."""
    n = n.detach().requires_grad_()
    cut = [module(**{"hidden_states": n[:, a:b], spec.cache: None}) for a, b in pairwise(bounds)]
    z = torch.cat(cut, dim=1)
    wanted = [n, *trained(module).values()]
    return [z.detach(), *torch.autograd.grad(z, wanted, dy.to(z.dtype))]


def in_segments(module: Any, spec: MixerSpec, n: Tensor, dy: Tensor) -> list[Tensor]:
    """Returns ours of a row in three segments, one shorter than a filter, and all gradients."""
    n, run = n.detach().requires_grad_(), ModelsMixer(module, spec)
    parameters, state, found = dict(module.named_parameters()), (), []
    for a, b in pairwise([0, 2, 70, T]):
        z, state = run(n[:, a:b], state, parameters)
        found.append(z)
    z = torch.cat(found, dim=1)
    wanted = [n, *trained(module).values()]
    return [z.detach(), *torch.autograd.grad(z, wanted, dy.to(z.dtype))]


def packed(module: Any, spec: MixerSpec, n: Tensor, dy: Tensor, bounds: list[int]) -> list[Tensor]:
    """Returns ours of one row with these documents, and all gradients."""
    n, run = n.detach().requires_grad_(), ModelsMixer(module, spec)
    documents = RowDocuments(torch.tensor(bounds, dtype=torch.int32, device=DEVICE), T)
    z, _ = run(n, (), dict(module.named_parameters()), ends=False, packed=documents)
    wanted = [n, *trained(module).values()]
    return [z.detach(), *torch.autograd.grad(z, wanted, dy.to(z.dtype))]


BOUNDS = [0, 60, 61, T]
DRAWS = {torch.float32: 2, torch.bfloat16: 5}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("way", ["segments", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_exact_as_the_module_itself(kind, way, dtype, monkeypatch) -> None:
    """Errors are those of all draws together, since those of a gradient of few numbers scatter."""
    ran: list[Any] = []
    of_heads = gated_delta_net.conv_heads

    def counted(*given: Any, **how: Any) -> Any:
        ran.append(given)
        return of_heads(*given, **how)

    monkeypatch.setattr(gated_delta_net, "conv_heads", counted)
    module, spec = built(kind)
    bounds = [0, T] if way == "segments" else BOUNDS
    drawn = []
    for seed in range(DRAWS[dtype]):
        torch.manual_seed(seed)
        n, dy = torch.randn(2, 1, T, HIDDEN, device=DEVICE).to(dtype)
        rounded = module.to(dtype).float()
        with in_fp64(rounded):
            truth = theirs(rounded, spec, n.double(), dy, bounds)
        naive = theirs(module.to(dtype), spec, n, dy, bounds)
        with monkeypatch.context() as changed:
            changed.setattr(launch, "INTERPRETED", DEVICE == "cpu")
            how = in_segments if way == "segments" else packed
            given = () if way == "segments" else (bounds,)
            drawn.append((how(module, spec, n, dy, *given), naive, truth))
    assert ran
    names = ["z", "dn", *trained(module)]
    for i, name in enumerate(names):
        ours, naive, truth = (torch.stack([draw[j][i] for draw in drawn]) for j in range(3))
        assert_exact(name, ours, naive, truth, dtype)


def test_what_is_no_plain_linear_layer_runs_by_itself() -> None:
    """A hook sees its layer's input and output, and others are computed together."""
    module, spec = built("qwen3_5_text")
    n = torch.randn(1, 9, HIDDEN, device=DEVICE)
    wanted, _ = ModelsMixer(module, spec)(n, (), dict(module.named_parameters()))
    seen = []
    module.in_proj_z.register_forward_hook(lambda inner, given, out: seen.append(out.shape))
    found, _ = ModelsMixer(module, spec)(n, (), dict(module.named_parameters()))
    assert seen == [(1, 9, 96)] and torch.equal(found, wanted)
    assert "forward" not in vars(module)


def test_modules_that_stay_transformers(monkeypatch) -> None:
    """Under autocast, and with other code in the place of forward."""
    module, spec = built("qwen3_5_text")
    n = torch.randn(1, 9, HIDDEN, device=DEVICE)
    assert gated_delta_net.can_be_ours(module, spec, n)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not gated_delta_net.can_be_ours(module, spec, n)
    assert not gated_delta_net.can_be_ours(module, spec, n.bfloat16())
    module.forward = lambda **given: n
    assert not gated_delta_net.can_be_ours(module, spec, n)
    z, _ = ModelsMixer(module, spec)(n, (), dict(module.named_parameters()))
    assert torch.equal(z, n)


def test_the_state_that_is_handed_on_is_transformers() -> None:
    module, spec = built("olmo_hybrid")
    n = torch.randn(2, 9, HIDDEN, device=DEVICE)
    carried = Carried(())
    with torch.no_grad():
        module(**{"hidden_states": n, spec.cache: carried})
        _, state = ModelsMixer(module, spec)(n, (), dict(module.named_parameters()))
    for own, other in zip(state, carried.end, strict=True):
        torch.testing.assert_close(own, other)
