"""DoRA in the schedule, against PEFT's over Hugging Face's layers by the rule of
tests/exactness.py; its norms, its FLOPs, what is left to Hugging Face's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_layer import (
    PACKED,
    assert_exact_run,
    batch,
    gradients,
    run,
)
from test_adapters import (
    UP,
    Explicit,
    adapted,
    assert_lora_trains_exactly,
    lora,
)
from test_adapters import trio as trio_of_lora
from torch.utils.flop_counter import FlopCounterMode

import longctx
from exactness import DEVICE
from longctx.families.families import layer_specs
from longctx.families.strangers import why_not_scheduled
from longctx.forwards import modules
from longctx.layer.adapters import dora

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("reference_kernels")
FEW = dict(tile_tokens=31, head_groups=2, keep="x")
FEW_ROWS = {torch.float32: [batch(PACKED)], torch.bfloat16: [batch(PACKED, i) for i in range(1, 7)]}


SOME = [
    ("phi3", torch.float32),
    ("qwen3_5_text-attention", torch.float32),
    ("llama", torch.bfloat16),
]


def trio(family: str, dtype: torch.dtype, settings: Any = None, **changes: Any) -> Any:
    """(truth, naive, ours), whose magnitudes differ from the norms that PEFT begins with."""
    models = trio_of_lora(family, dtype, lora(use_dora=True, **changes), settings)
    torch.manual_seed(5)
    found = [dict(model.named_parameters()) for model in models]
    with torch.no_grad():
        for name in [name for name in found[1] if "magnitude" in name]:
            factor = 5 * (1 + 0.2 * torch.randn_like(found[1][name]))  # `adapted` shrinks by 5
            drawn = found[1][name] * factor
            for parameters in found:
                parameters[name].copy_(drawn)
    return models


@pytest.mark.parametrize(
    ("family", "dtype", "settings", "changes"),
    [
        ("llama", torch.float32, FEW, {}),
        ("granite-biases", torch.bfloat16, FEW, {}),  # a factor of both sums
        ("phi3", torch.float32, FEW, {}),  # one A for q, k and v
        ("qwen3_5_text-attention", torch.float32, FEW, {}),  # q beside a gate, row by row
        ("qwen3_5_text-attention", torch.bfloat16, FEW, {}),
        ("gemma2", torch.float32, {}, {}),
        ("cohere2", torch.float32, {}, {}),
        ("qwen2", torch.float32, FEW, dict(target_modules=["k_proj", "down_proj"])),
        ("llama", torch.float32, {}, dict(target_modules=["o_proj"], use_rslora=True)),
    ],
)
def test_exactness_on_packed_rows(family, dtype, settings, changes) -> None:
    models = trio(family, dtype, settings, **changes)
    assert_lora_trains_exactly(models, dtype, *FEW_ROWS[dtype])
    trained = [n for n, p in models[2].named_parameters() if p.grad is not None]
    assert sum("magnitude" in name for name in trained) * 3 == len(trained)


@pytest.mark.parametrize(("family", "dtype"), SOME)
def test_over_4_bits(family, dtype) -> None:
    pytest.importorskip("bitsandbytes")
    from test_quantised import trio as quantised

    models = quantised(family, dtype, FEW, use_dora=True)
    truth, naive, ours = (run(model, *FEW_ROWS[dtype]) for model in models)
    assert_exact_run(ours, naive, truth, dtype)


@pytest.mark.parametrize(("family", "dtype"), SOME)
def test_dropout_is_exact_against_an_explicit_mask(family, dtype, monkeypatch) -> None:
    """DoRA's own product sees the masked input, the linear layer all of it."""
    truth, naive, ours = trio(family, dtype, dict(tile_tokens=31, head_groups=2), lora_dropout=0.3)
    drawn: list[Any] = []
    scheduled = modules.scheduled_layer

    def watched(*given):
        drawn.append(given[4])
        return scheduled(*given)

    monkeypatch.setattr(modules, "scheduled_layer", watched)
    found: list[list[Any]] = [[], [], []]
    for inputs in FEW_ROWS[dtype]:
        drawn.clear()
        found[0].append(run(ours, inputs))
        for runs, model in zip(found[1:], (naive, truth), strict=True):
            for layer, own in zip(model.get_base_model().model.layers, drawn, strict=True):
                for name, path in layer_specs(model.config)[0].linears.items():
                    layer.get_submodule(path).lora_dropout["default"] = Explicit(own[name], 31)
            runs.append(run(model, inputs))
    assert_exact_run(*map(together, found), dtype)


def together(runs: list[Any]) -> Any:
    losses, gradients = zip(*runs, strict=True)
    return torch.cat(losses), {n: torch.cat([g[n] for g in gradients]) for n in gradients[0]}


@pytest.mark.usefixtures("deterministic")
def test_no_bit_depends_on_what_is_kept_and_where() -> None:
    found = []
    for keep, offload in (("x", "none"), ("o", "all"), ("all", "all")):
        settings = FEW | dict(keep=keep, offload_activations=offload)
        *_, ours = trio("llama", torch.bfloat16, settings, lora_dropout=0.3)
        torch.manual_seed(7)
        loss, grads = gradients(ours, batch(PACKED))
        found.append([loss, *grads.values()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_norms_a_few_rows_at_a_time(monkeypatch) -> None:
    weight, a, b = torch.randn(37, 16), torch.randn(4, 16), torch.randn(37, 4)
    expected = (weight.double() + 0.5 * b.double() @ a.double()).norm(dim=1)
    before = weight.clone()
    for elements in (1, 80, 2**22):
        monkeypatch.setattr(dora, "CHUNK", elements)
        found = dora.row_norms(weight, a, b, 0.5)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(weight, before)


@pytest.mark.skipif(DEVICE != "cpu", reason="torch counts nothing of our attention's kernels")
def test_it_costs_one_matmul_more_in_backward() -> None:
    """What LoRA costs, norms of W + s B A in both passes, and a product for the magnitudes."""
    *_, without = trio_of_lora("llama", torch.float32, lora(r=4))
    *_, ours = trio("llama", torch.float32, r=4)
    D, F, wide, narrow = ours.config.hidden_size, ours.config.intermediate_size, 8 * 64, 2 * 64
    weights = 3 * (2 * D * wide + 2 * D * narrow + 3 * D * F)
    (plain, plain_back), (forward, backward) = _flops(without), _flops(ours)
    assert forward - plain == 2 * 4 * weights
    assert backward - plain_back == 2 * 4 * weights + 2 * 144 * weights


def _flops(model: Any) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        loss = model(**batch([[144]])).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.base_layer.requires_grad_(), "Dora over a weight that is trained"),
        (lambda x: x.lora_magnitude_vector.half(), "an adapter in torch.float16"),
        (
            lambda x: x.lora_magnitude_vector["default"].register_forward_hook(print),
            "hooks on model.layers.1.mlp.up_proj, inside its adapter",
        ),
        (lambda x: x.lora_variant.clear(), "a variant of LoRA (NoneType)"),
    ],
    ids=["trained", "dtype", "hook", "no variant"],
)
def test_what_is_left_to_hugging_faces_layers(change, says) -> None:
    model = longctx.patch(adapted("llama", torch.float32, lora(use_dora=True)))
    base = model.get_base_model().model
    assert why_not_scheduled(base) is None
    change(model.get_submodule(UP))
    assert says in str(why_not_scheduled(base))


def test_factors_alone_or_magnitudes_alone() -> None:
    for wanted in ("lora_A", "lora_B", "magnitude"):
        models = trio("llama", torch.float32, FEW)
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(wanted in name)
        assert_lora_trains_exactly(models, torch.float32, batch(PACKED))
