"""Mixers with flash-linear-attention's kernels, which run on a GPU alone and in 16 bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_layer import batch, gradients
from transformers import AutoConfig, AutoModelForCausalLM

import longctx
from exactness import DEVICE, relative_error

pytestmark = pytest.mark.gpu
ROUNDED = 0.02
"""bf16 has 0.004, and a sum of segments is rounded elsewhere than one over the row."""


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


def test_segments_of_a_long_row_are_the_row() -> None:
    """Three segments, beside Hugging Face's layers with the same kernels over the whole row."""
    theirs, ours = pair(keep="x", offload_activations="all")
    inputs = batch([[40000]])
    loss, grads = gradients(theirs, inputs)
    grads = {name: grad.clone() for name, grad in grads.items()}
    theirs.zero_grad()
    own, found = gradients(ours, inputs)
    assert abs(own - loss) <= ROUNDED * loss
    for name, grad in grads.items():
        assert relative_error(found[name], grad) < ROUNDED, name


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
