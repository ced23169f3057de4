"""Which models keep documents apart, by the probe and by a truth that is computed beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_families import FIRST_OF_EACH, family_config
from small_vision import KINDS, vision_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from exactness import DEVICE
from longctx.any_model.packed import why_joined, with_short_windows
from longctx.any_model.specimen import POOL_NUMBERS, Specimen, _view, outline
from longctx.calls.positions import keep_documents_apart
from longctx.families.classes import class_of
from longctx.families.families import mixes
from longctx.train.data.pack.batches import collate

ROUNDING = 1e-5 if DEVICE == "cpu" else 1e-4
"""Of fp32: kernels of GPUs for recurrences, which transformers takes where it finds them, multiply
in TF32."""
SIZES: dict[str, Any] = dict(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=None,
)
_GDN = dict(
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **dict(linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16),
    **dict(linear_key_head_dim=16, linear_value_head_dim=16),
)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
MODELS: dict[str, tuple[bool, dict[str, Any]]] = {
    "llama": (True, {}),
    "gemma3_text": (True, dict(sliding_window=23, head_dim=16)),
    "qwen3_moe": (True, _EXPERTS),
    "gpt2": (True, dict(n_embd=64, n_layer=2, n_head=4)),
    "opt": (False, dict(word_embed_proj_dim=64, ffn_dim=96)),  # positions along the row
    "bloom": (False, dict(n_head=4, n_layer=2)),  # takes no positions
    "afmoe": (False, dict(num_experts=8, head_dim=16)),  # a mask made without positions
    "qwen3_5_text": (False, _GDN),
    "lfm2": (False, dict(layer_types=["conv", "conv", "full_attention", "conv"])),
    "granitemoehybrid": (
        False,
        dict(layer_types=["linear_attention", "full_attention"] * 2, **_MAMBA2),
    ),
    "jamba": (False, dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8)),
}
"""Whether documents are apart, and what a small configuration needs."""


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind][1]})


def specimen(config: Any, dtype: torch.dtype = torch.float32) -> Specimen:
    made = Specimen(outline(config, class_of(config), None, dtype), torch.device(DEVICE))
    keep_documents_apart(made.model)
    return made


def batch_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: values.to(DEVICE) for name, values in collate(rows).items()}


def small(kind: str) -> nn.Module:
    """A model whose gates are open and whose recurrences are slow to forget."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).eval()
    model.config.use_cache = False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if name.endswith("A_log"):
                parameter.fill_(-3.0)
    return model.to(DEVICE)


@pytest.mark.parametrize("kind", MODELS)
def test_the_probe_says_what_is_true(kind) -> None:
    model, draw = small(kind), torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, 211, (1, n), generator=draw).to(DEVICE) for n in (30, 41))
    own = torch.arange(41, device=DEVICE)[None]
    with torch.no_grad():
        alone = model(input_ids=second, position_ids=own).logits
        positions = torch.cat([own[:, :30], own], 1)
        packed = model(input_ids=torch.cat([first, second], 1), position_ids=positions).logits
    error = (packed[:, 30:] - alone).norm() / alone.norm()
    apart, _ = MODELS[kind]
    assert (error < ROUNDING) == apart and (error > 1e-3) != apart
    for dtype in (torch.float32, torch.bfloat16):
        assert (why_joined(specimen(config_of(kind), dtype), dtype) is None) == apart


@pytest.mark.parametrize("family", [*FIRST_OF_EACH, *KINDS])
def test_hugging_faces_layers_of_our_families_keep_documents_apart(family) -> None:
    """All but mixers, which the schedule alone keeps apart."""
    config = vision_config(family) if family in KINDS else family_config(family)
    apart = not mixes(config.get_text_config())
    assert (why_joined(specimen(config), torch.float32) is None) == apart
    if with_short_windows(config):
        assert why_joined(specimen(config), torch.float32) is None


def test_no_decay_hides_a_leak() -> None:
    """Recurrences as they are initialised: a token on, 3e-5 of a state is left."""
    probed = specimen(config_of("qwen3_5_text"))
    with torch.no_grad():
        for name, parameter in probed.model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.fill_(2.0 if name.endswith("A_log") else 1.0)
            if "conv1d" in name:
                parameter[..., :-1] = 0  # reaches no other token
    assert "the second changes, by" in (why_joined(probed, torch.float32) or "")


def test_a_document_of_the_future_is_a_leak() -> None:
    probed = specimen(AutoConfig.for_model("bert", **SIZES))
    assert why_joined(probed, torch.float32)


@pytest.mark.parametrize("at", [0, 7919, 9 * 7919])
@pytest.mark.parametrize("shape", [(4, 48, 64), (1 << 12, 1 << 12)])
def test_rows_of_noise_are_aligned(shape, at) -> None:
    """torch's grouped matmul takes no others on a GPU."""
    view = _view(torch.zeros(POOL_NUMBERS), torch.Size(shape), at)
    assert view.shape == shape and view.data_ptr() % 16 == 0
    assert all(stride % 16 == 0 for stride in view.stride()[:-1])


def test_a_specimen_of_a_large_model_is_small() -> None:
    """One of 671 billion parameters: its first expert layer is the fourth."""
    config = AutoConfig.for_model("deepseek_v3")
    model = outline(config, class_of(config), None, torch.bfloat16)
    state = torch.random.get_rng_state()
    made = Specimen(model, torch.device(DEVICE))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(made.model.model.layers) == 4 and config.num_hidden_layers == 61
    storages = {p.untyped_storage() for p in made.model.parameters() if p.numel() > 1 << 16}
    assert sum(p.numel() for p in made.model.parameters()) > 10**10
    expert = 2 * config.moe_intermediate_size * config.hidden_size  # gate and up
    assert {storage.nbytes() for storage in storages} == {2 * (expert + 128 * 256)}


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid", "opt"])
def test_padding_behind_a_document_changes_nothing(kind) -> None:
    """What the collator makes of rows of one document each."""
    rows = []
    for tokens in (23, 41):
        ids = torch.randint(3, 211, (tokens,)).numpy()
        rows.append({"input_ids": ids, "labels": ids, "position_ids": range(tokens)})
    model, batch = small(kind), batch_of(rows)
    assert batch["labels"][0, 23:].eq(-100).all() and "attention_mask" not in collate(rows[:1])
    with torch.no_grad():
        together = model(**batch, num_items_in_batch=62).loss
        alone = [model(**batch_of([row]), num_items_in_batch=62).loss for row in rows]
    torch.testing.assert_close(together, sum(alone), rtol=ROUNDING / 10, atol=ROUNDING / 10)
