"""Tiny models of every family of AutoModelForCausalLM, by one generic configuration, and what
`patch(any_model=True)` makes of them beside Hugging Face's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import longctx

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, WIDTH, LAYERS, HEADS = 128, 32, 3, 4
_SIZES: dict[str, Any] = dict(
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "dim_ff", "inner_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_ctx"), 64),
    vocab_size=VOCAB,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    use_cache=False,
)
_MLA = dict(
    **dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12),
    **dict(head_dim=8, num_key_value_heads=HEADS, n_group=1, topk_group=1),
    first_k_dense_replace=1,
)
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
_MAMBA |= dict(mamba_chunk_size=16)  # rows are padded to it
_MIXED = dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
_DELTA = _MIXED | dict(
    **dict(linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=8, linear_value_head_dim=8),
)
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "axk2", "minicpm3", "youtu"), _MLA),
    **dict.fromkeys(("glm4_moe_lite", "longcat_flash"), _MLA),
    "dots1": dict(_MLA, n_shared_experts=1),
    "falcon_h1": dict(_MAMBA, mamba_d_ssm=64),
    "mamba2": dict(num_heads=8),
    "xmod": dict(languages=["en"], default_language="en"),
    "zaya": dict(num_experts_per_tok=1),
    "bamba": dict(_MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": _MAMBA | _MIXED,
    "codegen": dict(rotary_dim=4),
    "dots3_note_text": dict(num_key_value_heads=HEADS),
    "falcon": dict(head_dim=None),
    "gemma3n_text": dict(
        **dict(num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8),
        **dict(laurel_rank=4, vocab_size_per_layer_input=VOCAB),
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        layer_types=2 * ["sliding_attention", "full_attention"],
    ),
    "gemma4_text": dict(
        **dict(num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8),
        **dict(vocab_size_per_layer_input=VOCAB, global_head_dim=8),
        layer_types=2 * ["sliding_attention", "full_attention"],
    ),
    "gpt_neo": dict(attention_types=[[["global", "local", "global"], 1]]),
    "gptj": dict(rotary_dim=4),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    "minimax": _MIXED,
    "nemotron_h": dict(
        mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=16
    ),
    "kimi_linear": _MLA | _MIXED,
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
}
"""What a family's configuration needs beside the sizes, or what makes it telling: shared keys and
values, a dense layer before those with experts. None takes a size away."""
LARGE = 5_000_000
"""Parameters of a model that is not tiny, as the sizes do not reach all of it."""


def config_of(family: str, **more: Any) -> Any:
    """Returns a tiny configuration of a family. Raises whatever transformers raises."""
    given = _SIZES | OWN.get(family, {}) | more
    with quiet():
        return AutoConfig.for_model(family, **{n: x for n, x in given.items() if x is not None})


def make(family: str, **more: Any) -> Any:
    """Makes a tiny model in fp32. Raises whatever transformers raises, and ValueError for a model
    that is not tiny."""
    config = config_of(family, **more)
    with quiet():
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        if (count := sum(p.numel() for p in outline.parameters())) > LARGE:
            raise ValueError(f"{count / 1e6:.0f}M parameters with the sizes of small_any.py")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def step(model: Any, **given: Any) -> dict[str, Tensor]:
    """Runs forward and backward on two rows; returns the loss and all gradients by name."""
    ids = torch.randint(10, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(2)  # dropout
    loss = model(**{"input_ids": ids, "labels": ids, **given}).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found


REFUSED = dict.fromkeys(
    ("cpmant", "ctrl", "gpt_neox_japanese", "openai-gpt", "xlm"),
    "transformers cannot checkpoint its layers",
)
"""Families that build tiny and are refused, with the reason."""
UNBUILT = frozenset(
    "bailing_hybrid blt cohere_compass_text dbrx deepseek_v32 dots3_note dots3_note_text emu3 "
    "gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git "
    "glm_moe_dsa got_ocr2 hy_v4 llama4 mllama moss_transcribe_diarize musicgen "
    "musicgen_melody phi4_multimodal prophetnet qwen3_5 qwen3_5_moe qwen4_exp reformer "
    "roc_bert xlnet zamba zamba2".split()
)
"""Families that the sizes above do not make tiny: wholes with towers, configurations of parts, and
those whose checks want more of them to fit together."""


def compare(family: str) -> dict[str, Any]:
    """Trains a step of a family's model as Hugging Face's and as any model. Returns whether the
    bits are equal with the model's own attention and loss in our checkpoints, with which factors
    our loss is the model's, and the errors that our loss and our attention then have."""
    model = make(family)
    if family == "big_bird":  # short rows switch its sparse attention off, in the first step
        step(model)
    own = step(model)
    name = model.config._attn_implementation
    longctx.patch(model, any_model=True, attn_backend=name, offload_activations="all")
    runtime = model.longctx_any
    factors, runtime.loss = runtime.loss, None
    theirs = step(model)
    equal = own.keys() == theirs.keys() and all(torch.equal(x, theirs[n]) for n, x in own.items())
    found: dict[str, Any] = dict(family=family, equal=equal, loss_is_ours=None)
    found |= dict(loss_error=None, gradient_error=None)
    if factors is not None:
        runtime.loss = factors
        found["loss_is_ours"] = dict(scaling=factors.scaling, cap=factors.cap)
        found |= errors(step(model), own)
    longctx.patch(longctx.unpatch(model), any_model=True)
    found["attention_is_ours"] = model.config._attn_implementation.startswith("longctx")
    if found["attention_is_ours"]:
        ours = errors(step(model), own)
        found |= {f"{key}_with_attention": value for key, value in ours.items()}
    return found


@torch.no_grad()
def generation_error(family: str) -> float | None:
    """Returns the relative error of the logits of tokens that a model generates with its cache, as
    any model against Hugging Face's, in rows of which one is padded; None where Hugging Face's own
    model cannot generate with these sizes."""
    model = make(family).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)  # so that each token depends on those before it
    ids = torch.randint(10, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = dict(attention_mask=mask, use_cache=True, do_sample=False, pad_token_id=0)
    given |= dict(max_new_tokens=5, min_new_tokens=5)
    given |= dict(return_dict_in_generate=True, output_logits=True)
    ours = copy.deepcopy(model)
    try:
        own = torch.stack(model.generate(ids, **given).logits)
    except (TypeError, ValueError):
        return None
    longctx.patch(ours, any_model=True)
    found = torch.stack(ours.generate(ids, **given).logits)
    return float((found - own).norm() / own.norm())


def errors(ours: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, float]:
    """Returns the relative error of the loss, and the largest one of a gradient. That of a gradient
    near 0, as of a bias of keys, is relative to a ten-thousandth of the largest gradient."""
    assert ours.keys() == own.keys()
    least = 1e-4 * max(float(x.norm()) for name, x in own.items() if name != "loss")
    found = {n: float((ours[n] - x).norm() / max(float(x.norm()), least)) for n, x in own.items()}
    return {"loss_error": found.pop("loss"), "gradient_error": max(found.values())}
