"""A model's parameters in blocks: each in exactly one, in the order in which forward uses them."""

from __future__ import annotations

import peft
import pytest
import torch
from small_model import CPU, tiny_config
from small_vision import vision_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    GemmaConfig,
    GPT2Config,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from longctx.families.blocks import decoder_layers, state_blocks
from longctx.families.vision import rest_, towers
from longctx.memory.place import moment_of
from longctx.memory.states import BlockSpec
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.lora.quantise import quantise_

SIZES = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYERS = ["layer 0", "layer 1"]
LORA = peft.LoraConfig(r=2, target_modules=["q_proj"])
REST = "norms and the rest"


def assert_complete(model: nn.Module, blocks: list[BlockSpec]) -> None:
    """Every parameter is in one block, under its name, and the modules reach those of the block."""
    named = [item for block in blocks for item in block.parameters.items()]
    assert len(named) == len(dict(named)) == len({p for _, p in named})
    assert dict(named).keys() == dict(model.named_parameters()).keys()
    assert all(p is model.get_parameter(name) for name, p in named)
    assert all(block.parameters for block in blocks)
    for block in blocks:
        reached = {p for module in block.modules for p in module.parameters()}
        assert not block.modules or reached >= set(block.parameters.values())


def of(blocks: list[BlockSpec]) -> dict[str, BlockSpec]:
    return {block.name: block for block in blocks}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_a_llama(patched, biases) -> None:
    model = LlamaForCausalLM(tiny_config(attention_bias=biases, mlp_bias=biases))
    if patched:
        patch_as(model, PatchOptions(), CPU)
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    assert [block.name for block in blocks] == ["embedding", *LAYERS, "lm_head", REST]
    assert [block.layer for block in blocks] == [None, 0, 1, None, None]
    assert [block.movable for block in blocks] == [True, True, True, True, False]
    embedding, first, second, head, rest = (list(block.modules) for block in blocks)
    assert embedding == [model.model.embed_tokens] and head == [model.lm_head]
    assert first == [model.model.layers[0]] and second == [model.model.layers[1]] and rest == []
    assert len(blocks[1].parameters) == 7 and all("proj.weight" in n for n in blocks[1].parameters)
    assert all("norm" in name or "bias" in name for name in blocks[-1].parameters)
    assert all(not b.movable for b in state_blocks(model, movable=False))


def test_a_tied_head_is_the_embeddings_block_and_stays() -> None:
    """Forward needs it at both ends."""
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=True))
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    assert [block.name for block in blocks] == ["embedding", *LAYERS, REST]
    assert [block.movable for block in blocks] == [False, True, True, False]
    assert list(blocks[0].modules) == [model.model.embed_tokens, model.lm_head]
    assert list(blocks[0].parameters) == ["model.embed_tokens.weight"]


def test_frozen_parameters_are_in_their_blocks() -> None:
    model = LlamaForCausalLM(tiny_config())
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    named = of(blocks)
    assert len(named["layer 0"].parameters) == 7 and named["layer 0"].trained == []
    assert len(named["layer 1"].parameters) == 7 and len(named["layer 1"].trained) == 6
    first, second = (named[name].sizes(accumulates=False) for name in LAYERS)
    assert first.frozen == first.weight == second.weight
    assert second.frozen == model.model.layers[1].mlp.up_proj.weight.nbytes  # a multiple of 256


CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES),
    "gemma": GemmaConfig(**SIZES, head_dim=8),  # tied
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_other_families(family) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    blocks = state_blocks(model, movable=False)
    assert_complete(model, blocks)
    tied = model.config.tie_word_embeddings
    ends = ["embedding", *LAYERS] + ([] if tied else ["lm_head"])
    assert [block.name for block in blocks] == [*ends, REST]
    assert all(p.dim() == 1 for p in blocks[-1].parameters.values())  # Qwen2's biases
    assert not any(block.movable for block in blocks)


def test_quantised_weights_and_their_scales_move_with_their_layer() -> None:
    """Bytes of any dtype, in one flat tensor: 4 bits a weight, 8 for each 64 and 32 for each 64 of
    those. Another map of the layer may be as it was."""
    pytest.importorskip("bitsandbytes")
    model = LlamaForCausalLM(tiny_config(hidden_size=128)).to(torch.bfloat16)
    kept = model.model.layers[1].mlp.up_proj
    quantise_(model, CPU)
    model.model.layers[1].mlp.up_proj = kept.requires_grad_(False)
    blocks = state_blocks(peft.get_peft_model(model, LORA), movable=True)
    first, second = (of(blocks)[name] for name in LAYERS)
    assert len(first.parameters) == len(second.parameters) == 7
    assert (len(first.beside), len(second.beside)) == (14, 12)
    assert {part.tensor.dtype for part in first.beside} == {torch.uint8, torch.float32}
    sizes = first.sizes(accumulates=False)
    assert (sizes.states, sizes.grad, sizes.movable, sizes.fixed) == (0, 0, True, False)
    numel = sum(p.numel() for p in first.parameters.values()) * 2
    assert sizes.weight == pytest.approx(numel * (1 / 2 + 1 / 64 + 4 / 64 / 256), rel=0.05)
    larger = second.sizes(accumulates=False).weight - sizes.weight
    assert larger == pytest.approx(kept.weight.numel() * (2 - 1 / 2 - 1 / 64), rel=0.05)


def test_layers_are_found_under_another_name() -> None:
    config = GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    assert list(decoder_layers(model)) == list(model.transformer.h)
    assert [block.name for block in blocks] == ["embedding", "layer 0", "layer 1", REST]


def test_a_model_whose_layers_are_not_found_stays_whole() -> None:
    config = CTRLConfig(vocab_size=101, n_positions=32, n_embd=32, dff=32, n_layer=2, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    assert list(decoder_layers(model)) == []
    assert [block.name for block in blocks] == ["embedding", REST]
    assert any(p.dim() == 2 for p in blocks[-1].parameters.values())


def test_a_matrix_of_another_dtype_stays_with_the_rest() -> None:
    """A block's flat tensors have one dtype."""
    model = LlamaForCausalLM(tiny_config()).to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.float()
    blocks = state_blocks(model, movable=True)
    assert_complete(model, blocks)
    named = of(blocks)
    assert "model.layers.1.mlp.up_proj.weight" in named[REST].parameters
    for block in blocks[:-1]:
        assert {p.dtype for p in block.parameters.values()} == {torch.bfloat16}
    rest = named[REST]
    assert rest.sizes(accumulates=False).fixed
    assert rest.sizes(accumulates=False).states >= 10 * sum(p.numel() for p in rest.trained)


def test_an_adapter() -> None:
    """LoRA's matrices move with their layer; the weights under them are frozen."""
    model = LlamaForCausalLM(tiny_config()).to(torch.bfloat16)
    patch_as(model, PatchOptions(), CPU)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    blocks = state_blocks(adapted, movable=True)
    assert_complete(adapted, blocks)
    assert [block.name for block in blocks] == ["embedding", *LAYERS, "lm_head", REST]
    for name in LAYERS:
        trained = of(blocks)[name].trained
        assert len(of(blocks)[name].parameters) == 7 + 4 and len(trained) == 4
        assert all(p.dtype == torch.bfloat16 for p in trained)
    assert not any(block.trained for block in blocks if block.name not in LAYERS)


def test_an_adapter_in_fp32_stays_on_the_gpu() -> None:
    """PEFT's default."""
    model = LlamaForCausalLM(tiny_config()).to(torch.bfloat16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    blocks = state_blocks(adapted, movable=True)
    assert_complete(adapted, blocks)
    assert len(of(blocks)[REST].trained) == 4


def test_a_head_that_losses_read_stays() -> None:
    model = LlamaForCausalLM(tiny_config())
    named = of(state_blocks(model, movable=True, head_movable=False))
    assert not named["lm_head"].movable and named["embedding"].movable


def test_the_vision_tower_is_a_block() -> None:
    """A tower that trains has its gradients last, as the embedding has, and stays on the GPU; a
    frozen one computes after the embedding and may wait on the host; one at rest is in no block."""
    model = vision_model("qwen3_vl")
    blocks = of(state_blocks(model, movable=False))
    assert_complete(model, [*blocks.values()])
    tower = blocks["vision tower"]
    assert (
        tower.first
        and not tower.tower
        and not tower.modules
        and all("visual" in name for name in tower.parameters)
    )
    sizes = [block.sizes(accumulates=False) for block in blocks.values()]
    moments = {name: moment_of(one, sizes, 3) for name, one in zip(blocks, sizes, strict=True)}
    assert moments["vision tower"] == moments["embedding"] == 0 < moments["layer 0"]
    for _, tower in towers(model):
        tower.requires_grad_(False)
    frozen = of(state_blocks(model, movable=True))
    assert_complete(model, [*frozen.values()])
    assert [*frozen][:3] == ["embedding", "vision tower", "layer 0"]
    found = frozen["vision tower"]
    assert found.tower and found.movable and found.modules == [model.model.visual]
    assert {*found.parameters} == {name for name, _ in model.named_parameters() if "visual" in name}
    model.model.visual.merger.requires_grad_(True)
    some = of(state_blocks(model, movable=True))
    assert all("visual.merger" in name for name in some["vision tower"].parameters)
    assert any("visual" in name for name in some[REST].parameters)
    rest_(model)
    at_rest = of(state_blocks(model, movable=False))
    assert not any("visual" in name for block in at_rest.values() for name in block.parameters)
