"""The arithmetic of a step's memory: worked examples, and against a GPU's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from longctx.config import ModelArguments
from longctx.memory.plan import (
    GIB,
    Sizes,
    default_head_groups,
    default_tile_tokens,
    layers_on_gpu,
    pending_bytes,
)
from longctx.model.patch import patch
from longctx.run.loading import load_config

LLAMA_8B = Sizes(
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    head_dim=128,
    vocab=128256,
    itemsize=2,
    keep_attention=True,
)


def test_a_layer_of_llama_8b_at_131072_tokens_keeps_two_units_and_the_log_sum_exp() -> None:
    """A unit is 1 GiB there, and 32 heads' log-sum-exp in fp32 are 16 MiB."""
    assert LLAMA_8B.kept_bytes(131072) == 2 * GIB + 2**24 + 2048
    assert replace(LLAMA_8B, keep_attention=False).kept_bytes(131072) == GIB + 2048


def test_backward_works_in_five_units_and_lm_heads_gradient() -> None:
    """128256 x 4096 in fp32 are 1.957 GiB; an MLP's three gradients, 0.656 GiB, come later."""
    working_gib = LLAMA_8B.working_bytes(131072, logits_bytes=GIB) / GIB
    assert working_gib == pytest.approx(5 + 1.957 + 1, abs=0.001)
    wide = replace(LLAMA_8B, intermediate=65536)
    assert wide.working_bytes(1, 0) == 5 * 4096 * 2 + (4 * 4 * 4096 + 3 * 2) * 65536


@pytest.mark.parametrize(
    ("offload", "free_bytes", "layers"),
    [
        ("none", 0, 32),
        ("all", 10**12, 1),
        ("auto", -5, 1),  # the layer whose backward runs is always there
        ("auto", 0, 1),
        ("auto", 70, 7),
        ("auto", 79, 7),
        ("auto", 10**12, 32),
    ],
)
def test_how_many_layers_stay_on_the_gpu(offload: str, free_bytes: int, layers: int) -> None:
    assert layers_on_gpu(offload, 32, 10, free_bytes) == layers


def test_short_batches_run_whole_long_ones_in_parts() -> None:
    assert [default_head_groups(tokens, 8) for tokens in (65535, 65536)] == [1, 8]
    assert [default_tile_tokens(tokens) for tokens in (65535, 65536)] == [4096, 8192]


def test_only_trained_parameters_on_a_gpu_are_pending() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    trained, frozen = (
        torch.zeros(3, 5).as_subclass(OnGpu).requires_grad_(t) for t in (True, False)
    )
    assert pending_bytes([trained, frozen, torch.zeros(7, requires_grad=True)]) == 3 * 15 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("free_gib", [7, 8, 40])
def test_auto_fills_a_gpu_and_does_not_overflow_it(free_gib: float) -> None:
    """Six layers of Llama-3.1-8B at 32768 tokens beside a block that leaves `free_gib`: 0.5 GiB a
    layer are kept, gradients and 5 units come on top. Nothing runs out, and all layers stay on the
    GPU where there is room."""
    device, tokens = torch.device("cuda"), 32768
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=tokens), vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 6, 1024
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    patch(model, ModelArguments(offload_activations="auto"), device)
    model.longctx.pending_bytes = lambda model: pending_bytes(model.parameters()) // 3  # no Adam
    ids = torch.randint(1024, (1, tokens), device=device)
    batch = dict(input_ids=ids, labels=ids, position_ids=torch.arange(tokens, device=device)[None])
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    block = torch.empty(free_bytes - int(free_gib * GIB), dtype=torch.uint8, device=device)
    try:
        for _ in range(2):
            model.zero_grad()
            model(**batch).loss.backward()
        on_gpu = model.longctx.store.layers_on_gpu
    finally:
        del block
    assert on_gpu == 6 if free_gib == 40 else 1 <= on_gpu < 6, on_gpu
