"""Throughput and MFU figures against counts made by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen2Config

from longctx.cost.flops import step_flops
from longctx.loop.metrics import (
    Throughput,
    attended,
    parameters_in_matmuls,
    peak_memory,
)


def model(tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def test_matmul_parameters_count_lm_head_but_not_the_embedding() -> None:
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16
    for tied in (False, True):
        assert parameters_in_matmuls(model(tied)) == 2 * layer + 16 + 50 * 16


def test_flops_of_packed_documents() -> None:
    """Documents of 3 and 5 tokens: attention is 6 * layers * H * d * (9 + 25)."""
    config = model().config
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    throughput = Throughput(config, parameters=1000, world_size=2, peak_flops=1e6)
    throughput.start_clock()
    throughput.count(positions)
    throughput.step_done()
    seconds = throughput._seconds
    figures = throughput.read()
    flops = 2 * (6 * 1000 * 8 + 6 * 2 * 16 * (9 + 25))
    assert step_flops(parameters=1000, tokens=16, attended=2 * 2 * 16 * 34) == flops
    assert figures["tokens_per_s"] == pytest.approx(16 / seconds)
    assert figures["mfu"] == pytest.approx(flops / seconds / 2e6)
    assert throughput.read() == {}


def test_flops_of_windows() -> None:
    """One layer of two sees 3 tokens: in documents of 3 and 5 tokens 6 and 1 + 2 + 3 + 3 + 3
    pairs. All count twice, but a token with itself."""
    windowed = Qwen2Config(
        num_hidden_layers=2, use_sliding_window=True, sliding_window=3, max_window_layers=1
    )
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert attended(windowed, positions) == 4096 * ((9 + 25) + (2 * (6 + 12) - 8))
    assert attended(GPT2Config(n_layer=3), positions) == 768 * 3 * (9 + 25)


def test_flops_of_heads_of_other_sizes() -> None:
    """Gemma 4's differ from layer to layer, and DeepSeek-V3's scores and values from each other."""
    positions = torch.tensor([[0, 1, 2, 3, 4]])
    types = 5 * ["sliding_attention"] + ["full_attention"]
    gemma = AutoConfig.for_model("gemma4_text", layer_types=types, num_hidden_layers=6)
    assert attended(gemma, positions) == 8 * (5 * 256 + 512) * 25
    deepseek = AutoConfig.for_model("deepseek_v3", num_hidden_layers=2)
    assert attended(deepseek, positions) == 128 * (128 + 64 + 128) / 2 * 2 * 25


def test_flops_of_hybrids() -> None:
    """Layers with a recurrence have no attention, and some of Nemotron-H have neither."""
    positions = torch.tensor([[0, 1, 2, 3, 4]])
    hybrid = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=8)  # two of them attend
    wide = hybrid.num_attention_heads * hybrid.head_dim
    assert attended(hybrid, positions) == wide * 2 * 25
    blocks = ["linear_attention", "mlp", "full_attention", "moe"]
    single = AutoConfig.for_model("nemotron_h", layers_block_type=blocks)
    assert attended(single, positions) == single.num_attention_heads * single.head_dim * 25
    both = AutoConfig.for_model("falcon_h1", num_hidden_layers=3)
    assert attended(both, positions) == both.hidden_size * 3 * 25


def test_no_figure_is_invented_without_a_gpu() -> None:
    throughput = Throughput(model().config, parameters=1, peak_flops=None)
    throughput.count(torch.zeros(1, 1, dtype=torch.long))
    throughput.step_done()
    assert "mfu" not in throughput.read()
    assert peak_memory(torch.device("cpu")).keys() == {"peak_host_gib"}
