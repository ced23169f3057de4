"""The modules beside torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import tiny_config
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

import longctx
from longctx.any_model.runtime import any_part
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")


def assert_same(ours: nn.Module, theirs: nn.Module, x: torch.Tensor, *more: Any) -> None:
    theirs.load_state_dict(ours.state_dict())
    found = []
    for module in (ours, theirs):
        module.zero_grad()
        copy = x.clone().requires_grad_()
        value = module(copy, *more)
        value.square().sum().backward()
        found.append([value, copy.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_rms_norm() -> None:
    ours = longctx.RMSNorm(24, eps=1e-5)
    nn.init.normal_(ours.weight)
    assert_same(ours, nn.RMSNorm(24, eps=1e-5), torch.randn(3, 5, 24))
    assert_same(ours, LlamaRMSNorm(24, eps=1e-5), torch.randn(3, 5, 24))
    assert repr(ours) == "RMSNorm(24, eps=1e-05)"


def test_layer_norm() -> None:
    for ours, theirs in (
        (longctx.LayerNorm(24, eps=1e-3), nn.LayerNorm(24, eps=1e-3)),
        (longctx.LayerNorm(24, bias=False), Cohere2LayerNorm(24)),
        (longctx.LayerNorm(24, offset=1.0), NemotronLayerNorm1P(24)),
    ):
        x = torch.randn(3, 5, 24)
        assert_close(ours(x), nn.functional.layer_norm(x, (24,), eps=ours.eps))  # a new norm
        for parameter in ours.parameters():
            nn.init.normal_(parameter)
        assert_same(ours, theirs, x)
    assert repr(longctx.LayerNorm(24, bias=False)) == "LayerNorm(24, eps=1e-05, bias=False)"


@pytest.mark.parametrize("kind", [longctx.RMSNorm, longctx.LayerNorm])
def test_a_norm_that_cannot_be(kind) -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    for eps in (-1e-6, float("nan")):
        with pytest.raises(ValueError, match=f"eps must be at least 0 and finite, got {eps}"):
            kind(8, eps=eps)
        for norm in (longctx.rms_norm, longctx.layer_norm):
            with pytest.raises(ValueError, match="eps must be at least 0"):
                norm(x, weight, eps)
    for features in (0, -8, (8,)):
        with pytest.raises(ValueError, match="normalized_shape must be a number of elements"):
            kind(features)


def test_swiglu() -> None:
    config = tiny_config(hidden_size=16, intermediate_size=40, head_dim=8)
    assert_same(longctx.SwiGLU(16, 40), LlamaMLP(config), torch.randn(2, 7, 16))
    assert longctx.SwiGLU(16, 40, 3, bias=True)(torch.randn(5, 16)).shape == (5, 3)


def test_geglu() -> None:
    config = tiny_config("gemma3_text", hidden_size=16, intermediate_size=40)
    assert_same(longctx.GeGLU(16, 40), Gemma3MLP(config), torch.randn(2, 7, 16))


def test_rotary_embedding() -> None:
    config = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, head_dim=16)
    q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    truth = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    found = longctx.RotaryEmbedding(16, base=500.0)(q, k, positions)
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 3, "reduction": "none"}, {"label_smoothing": 0.1, "reduction": "sum"}],
)
def test_cross_entropy_loss(options) -> None:
    """torch's with the classes as the last dimension."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 11, requires_grad=True)
    target = torch.randint(11, (4, 6)).masked_fill(torch.rand(4, 6) < 0.3, 3)
    weight = torch.rand(11) if not options.get("label_smoothing") else None
    found, truth = (
        kind(weight, **options) for kind in (longctx.CrossEntropyLoss, nn.CrossEntropyLoss)
    )
    values = found(x, target), truth(x.mT, target)
    assert_close(*values, rtol=1e-5, atol=1e-6)
    assert_close(*(torch.autograd.grad(v.sum(), x)[0] for v in values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "ignore_index": 3, "reduction": "sum"},
        {"reduction": "none"},
        {"ce_weight": torch.linspace(0.5, 1.5, 11), "bias": True},
    ],
)
def test_linear_cross_entropy_loss(options) -> None:
    """With a layer of its own, and with one that is given in Liger-Kernel's order."""
    torch.manual_seed(0)
    ours = longctx.LinearCrossEntropyLoss(8, 11, **options)
    target = torch.randint(11, (4, 6)).masked_fill(torch.rand(4, 6) < 0.3, 3)
    how = {"ignore_index": -100, **options}
    how.pop("bias", None)
    how["weight"] = how.pop("ce_weight", None)
    x = torch.randn(4, 6, 8)
    loss, truth = ours(x, target), nn.CrossEntropyLoss(**how)(ours.linear(x).mT, target)
    torch.testing.assert_close(loss, truth, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours(input=x, target=target), loss)
    of_given = longctx.LinearCrossEntropyLoss(**{**options, "bias": False})
    assert not list(of_given.parameters())
    assert torch.equal(of_given(ours.linear.weight, x, target, ours.linear.bias), loss)


def test_a_linear_loss_says_how_it_is_called() -> None:
    head = longctx.LinearCrossEntropyLoss(8, 11)
    x, target = torch.randn(4, 8), torch.zeros(4).long()
    with pytest.raises(TypeError, match=r"takes \(input, target\): .*LinearCrossEntropyLoss\(\)"):
        head(head.linear.weight, x, target)
    with pytest.raises(TypeError, match="in_features and num_classes, or neither"):
        longctx.LinearCrossEntropyLoss(8)
    for kind in (longctx.LinearCrossEntropyLoss, longctx.CrossEntropyLoss):
        with pytest.raises(ValueError, match="has no return_token_accuracy: .*is_top1"):
            kind(return_token_accuracy=True)


@pytest.mark.parametrize("options", [{}, {"bias": True, "ignore_index": 3, "temperature": 0.5}])
def test_linear_log_probs(options) -> None:
    torch.manual_seed(0)
    ours = longctx.LinearLogProbs(8, 11, **options, outputs=("log_probs", "entropy"))
    target = torch.randint(11, (2, 4, 6))
    counts = target != options.get("ignore_index", -100)
    x = torch.randn(2, 4, 6, 8)
    found = ours(x, target)
    log_p = (ours.linear(x) / options.get("temperature", 1.0)).log_softmax(-1)
    truth = log_p.gather(-1, target[..., None]).squeeze(-1) * counts
    assert_close(found.log_probs, truth, rtol=1e-5, atol=1e-6)
    assert_close(found.entropy, -(log_p.exp() * log_p).sum(-1) * counts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bias": True, "ignore_index": 3, "reduction": "none"}])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_divergence_losses(kind, options) -> None:
    torch.manual_seed(0)
    ours = {
        "forward": lambda: longctx.LinearKLLoss(8, 11, **options),
        "reverse": lambda: longctx.LinearKLLoss(8, 11, reverse=True, **options),
        "jsd": lambda: longctx.LinearJSDLoss(8, 11, **options),
    }[kind]()
    teacher, target = nn.Linear(5, 11), torch.randint(11, (4, 6))
    x, y = torch.randn(4, 6, 8), torch.randn(4, 6, 5)
    found = ours(x, y, teacher, target)
    log_p, log_q = ours.linear(x).log_softmax(-1), teacher(y).log_softmax(-1)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    forward, reverse, p_m, q_m = (
        nn.functional.kl_div(b, a, reduction="none", log_target=True).sum(-1)
        for a, b in ((log_q, log_p), (log_p, log_q), (log_p, log_m), (log_q, log_m))
    )
    truth = {"forward": forward, "reverse": reverse, "jsd": (p_m + q_m) / 2}[kind]
    truth = truth * (target != 3) if options else truth.mean()
    assert_close(found, truth, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert ours.linear.weight.grad is not None and teacher.weight.grad is None
    assert_close(ours(x, y, teacher).mean(), ours(x, y, teacher, torch.zeros(4, 6).long()).mean())


def test_from_pretrained(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    model = longctx.AutoLongctxModelForCausalLM.from_pretrained(tmp_path, keep="x", dtype="auto")
    assert type(model) is LlamaForCausalLM and model.longctx.args.keep == "x"


def test_from_config() -> None:
    """Weights are random, as transformers makes them; Liger's switches are refused before."""
    torch.manual_seed(0)
    ours = longctx.AutoLongctxModelForCausalLM.from_config(tiny_config(), keep="x", strict=True)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(tiny_config())
    assert ours.longctx.args.keep == "x" and ours.model.longctx.around.strict
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    for call in (longctx.patch, longctx.AutoLongctxModelForCausalLM.from_config):
        with pytest.raises(UserError, match=r"rope=False .* parts=\['rms_norm'"):
            call(theirs if call is longctx.patch else tiny_config(), rope=False)
    with pytest.raises(UserError, match="from_config has no option 'kep'.*keep"):
        longctx.AutoLongctxModelForCausalLM.from_config(tiny_config(), kep="x")
    with pytest.raises(UserError, match="rms_norm=True .*schedule has all of them"):
        longctx.patch_class("llama", rms_norm=True)
    model = longctx.AutoLongctxModelForCausalLM.from_config(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32), any_model=True
    )
    assert any_part(model) is not None
