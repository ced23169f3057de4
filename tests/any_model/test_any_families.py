"""Every family of AutoModelForCausalLM that builds tiny, as any model: loss and gradients bit-equal
to Hugging Face's own, in fp32, with the families' own dropout, tied ends, and shared keys.

Some telling families always; all of them with LONGCTX_ALL_FAMILIES=1, which takes three minutes.
profiling/any_families.py records them.
"""

from __future__ import annotations

import os

import pytest
import torch
from small_any import FAMILIES, REFUSED, UNBUILT, compare, errors, generation_error, make, step
from transformers import (
    MllamaConfig,
    MllamaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import longctx
from longctx.errors import UserError

TELLING = (
    *("bloom", "cohere", "deepseek_v3", "deepseek_v4", "doge", "falcon", "falcon_h1", "gemma2"),
    *("gemma3n_text", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss", "jamba", "minimax", "mpt"),
    *("nemotron_h", "opt", "phi", "qwen3_next", "rwkv", "whisper", "xlstm"),
)
"""Attention and masks of their own, latent attention, experts, shared keys and values, recurrences,
dropout, factors and caps of logits, a loss of its own, a decoder of an encoder-decoder."""
TRIED = FAMILIES if os.environ.get("LONGCTX_ALL_FAMILIES") else TELLING


@pytest.mark.parametrize("family", [f for f in TRIED if f not in UNBUILT | REFUSED.keys()])
def test_it_trains_as_hugging_face_does(family) -> None:
    found = compare(family)
    assert found["equal"], "the model's own loss and attention in our checkpoints: other bits"
    assert found["loss_is_ours"] is None or found["loss_error"] < 2e-5, found
    assert found["gradient_error"] is None or found["gradient_error"] < 1e-4, found
    assert found.get("gradient_error_with_attention", 0.0) < 1e-4, found


CACHED = FAMILIES if TRIED is FAMILIES else ("minimax", "gemma2", "gpt_oss", "qwen3_next")
"""A first layer that keeps no keys, a cap of scores, sinks, and layers of two kinds."""


@pytest.mark.parametrize("family", [f for f in CACHED if f not in UNBUILT | REFUSED.keys()])
def test_it_generates_as_hugging_face_does_with_a_cache(family) -> None:
    error = generation_error(family)
    assert error is None or error < 1e-5


@pytest.mark.parametrize("family", [f for f in TRIED if f in REFUSED] or ["openai-gpt"])
def test_models_that_nobody_can_checkpoint_are_refused(family) -> None:
    with pytest.raises(UserError, match="no layers that transformers could checkpoint"):
        longctx.patch(make(family), any_model=True)


def test_encoder_decoders_are_refused() -> None:
    sizes = dict(vocab_size=64, d_model=16, d_ff=32, d_kv=4, num_layers=1, num_heads=4)
    with pytest.raises(UserError, match="T5ForConditionalGeneration is an encoder-decoder"):
        longctx.patch(T5ForConditionalGeneration(T5Config(**sizes)), any_model=True)


def test_llama_vision_trains_with_images() -> None:
    """Its text attends to images in layers of cross-attention, whose masks are no causal ones."""
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    text = dict(vocab_size=128, hidden_size=32, intermediate_size=64, pad_token_id=0, **heads)
    text |= dict(cross_attention_layers=[1, 3], use_cache=False)
    of_towers = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_global_layers=1)
    of_towers |= dict(attention_heads=4, image_size=28, patch_size=14, max_num_tiles=1)
    of_towers |= dict(supported_aspect_ratios=[[1, 1]], intermediate_layers_indices=[0])
    torch.manual_seed(0)
    of_towers |= dict(vision_output_dim=64)
    config = MllamaConfig(vision_config=of_towers, text_config=text, image_token_index=127)
    model = MllamaForConditionalGeneration(config).train()
    for name, parameter in model.named_parameters():
        if "gate" in name:  # shut in a new model
            parameter.data.fill_(0.5)
    given = dict(pixel_values=torch.randn(2, 1, 1, 3, 28, 28), use_cache=False)
    given |= dict.fromkeys(("aspect_ratio_ids",), torch.ones(2, 1, dtype=torch.long))
    given |= dict(aspect_ratio_mask=torch.ones(2, 1, 1, dtype=torch.long))
    given |= dict(cross_attention_mask=torch.ones(2, 24, 1, 1, dtype=torch.long))
    own = step(model, **given)
    longctx.patch(model, any_model=True, attn_backend="sdpa", offload_activations="all")
    factors, model.longctx_any.loss = model.longctx_any.loss, None
    ours = step(model, **given)
    assert all(torch.equal(ours[name], x) for name, x in own.items())
    longctx.patch(longctx.unpatch(model), any_model=True)
    assert factors is not None and model.config.get_text_config()._attn_implementation == "longctx"
    found = errors(step(model, **given), own)
    assert found["loss_error"] < 1e-6 and found["gradient_error"] < 1e-4


@pytest.mark.parametrize("offload", ["none", "all", "auto"])
@pytest.mark.parametrize("tied", [True, False])
def test_inputs_wait_anywhere(offload, tied) -> None:
    model = make("gpt2", tie_word_embeddings=tied)
    own = step(model)
    longctx.patch(model, any_model=True, offload_activations=offload)
    model.longctx_any.loss = None
    ours = step(model)
    assert all(torch.equal(ours[name], x) for name, x in own.items())
