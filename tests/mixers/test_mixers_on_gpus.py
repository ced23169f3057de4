"""Mixers with flash-linear-attention's kernels, which run on a GPU alone and in 16 bits."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_layer import batch, gradients
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import longctx
from exactness import DEVICE, FACTOR, relative_error
from longctx.layer import segments as cutting
from longctx.mixers.fla_kernels import prepare_fla

pytestmark = pytest.mark.gpu
ROUNDED = 0.02
"""bf16 has 0.004, and a sum of segments is rounded elsewhere than one over the row."""
RULE = "torch_chunk_gated_delta_rule"
"""transformers' name of the function that is flash-linear-attention's where that is installed, and
otherwise the one in torch which it wraps."""


def pair(**settings: Any) -> tuple[Any, Any]:
    """(Hugging Face's, ours): a layer of attention among three mixers of Qwen3.5-9B."""
    pytest.importorskip("fla")
    types = 3 * ["linear_attention"] + ["full_attention"]
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=4, layer_types=types, vocab_size=32000
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        theirs = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()
    for name, parameter in theirs.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-3.0)  # it forgets slowly, so that a lost state shows
    return theirs, longctx.patch(copy.deepcopy(theirs), strict=True, **settings)


@contextmanager
def rule_in_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_5, RULE, getattr(modeling_qwen3_5, RULE).__wrapped__)
        yield


def assert_as_exact(ours: Any, theirs: Any, tokens: int) -> None:
    """In the median of all gradients ours are as near the truth as Hugging Face's, which are
    computed over the whole row by the same kernels. The truth is in fp32, by torch's code."""
    inputs = batch([[tokens]])
    with rule_in_torch():
        loss, truth = gradients(copy.deepcopy(theirs).float(), inputs)
    errors = []
    for model in (ours, theirs):
        own, found = gradients(model, inputs)
        assert abs(own - loss) <= ROUNDED * loss
        errors.append(statistics.median(relative_error(found[n], truth[n]) for n in truth))
        model.zero_grad()
    assert errors[0] <= FACTOR * errors[1], errors


def test_segments_of_a_long_row_are_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 1500)
    theirs, ours = pair(keep="x", offload_activations="all")
    assert_as_exact(ours, theirs, tokens=4000)


def test_the_kernels_are_transformers_equations() -> None:
    """Forward, backward and the gradient through the state, beside torch's code in fp32."""
    pytest.importorskip("fla")
    prepare_fla(AutoConfig.for_model("qwen3_5_text"))
    torch.manual_seed(0)
    heads = (1, 300, 4, 128)
    given = [torch.randn(heads, device=DEVICE).bfloat16() for _ in range(3)]
    given += [-torch.rand(heads[:3], device=DEVICE) / 16, torch.rand(heads[:3], device=DEVICE)]
    given.append(torch.randn(1, 4, 128, 128, device=DEVICE) / 8)
    weights = torch.randn(heads, device=DEVICE), torch.randn(1, 4, 128, 128, device=DEVICE) / 8

    def run(rule: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype if x.dim() == 4 and len(x[0]) > 4 else x.dtype) for x in given]
        q, k, v, g, beta, state = leaves = [x.detach().requires_grad_() for x in leaves]
        how = dict(g=g, beta=beta.to(dtype), initial_state=state, output_final_state=True)
        found = rule(q, k, v, **how, use_qk_l2norm_in_kernel=True)
        total = sum((x.float() * w).sum() for x, w in zip(found, weights, strict=True))
        return [*found, *torch.autograd.grad(total, leaves)]

    kernel = getattr(modeling_qwen3_5, RULE)
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "d_state")
    truths = run(kernel.__wrapped__, torch.float32)
    for name, own, truth in zip(names, run(kernel, torch.bfloat16), truths, strict=True):
        assert relative_error(own, truth) < ROUNDED, name


def test_adapters_in_mixers_are_as_exact_as_pefts() -> None:
    peft = pytest.importorskip("peft")
    theirs, _ = pair()
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    config = peft.LoraConfig(r=16, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, config)
    ours = longctx.patch(copy.deepcopy(adapted), strict=True)
    assert_as_exact(ours, adapted, tokens=4000)


def test_packed_documents_are_separate_ones() -> None:
    _, ours = pair()
    packed = batch([[700, 3000, 300]])
    sums: dict[str, Any] = {}
    _, grads = gradients(ours, packed)
    grads, count = {name: grad.clone() for name, grad in grads.items()}, 0
    for start, stop in ((0, 700), (700, 3700), (3700, 4000)):
        alone = {n: x[:, start:stop] for n, x in packed.items() if n != "use_cache"}
        _, found = gradients(ours, alone | {"use_cache": False})
        labels = int((alone["labels"][:, 1:] != -100).sum())
        count += labels
        for name, grad in found.items():
            sums[name] = sums.get(name, 0) + grad.float() * labels
    for name, grad in grads.items():
        assert relative_error(grad, sums[name] / count) < ROUNDED, name
