"""Presets, GGUF files, context lengths, and requests that cannot be met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_families import family_config
from small_gguf import write_gguf
from small_model import CPU, ROPE, packed_batch, tiny_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PretrainedConfig,
    Trainer,
    TrainingArguments,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import longctx
from longctx.attention import flash4
from longctx.errors import UserError
from longctx.families.classes import without_storage
from longctx.train.options.config import ModelArguments
from longctx.train.start import loading
from longctx.train.start.loading import check_request, load_config, load_model

pytestmark = pytest.mark.usefixtures("reference_kernels")


def test_presets_are_the_published_architectures() -> None:
    """Parameter counts of the released models: 1,235,814,400 and 8,030,261,248."""
    counts = {}
    for preset in ("llama-3.2-1b", "llama-3.1-8b"):
        config = load_config(ModelArguments(preset=preset, seq_len=131072), vocab_size=100)
        with torch.device("meta"):
            counts[preset] = LlamaForCausalLM(config).num_parameters()
        assert config.vocab_size == 128256
        assert config.rope_parameters["rope_type"] == "llama3"
    assert counts == {"llama-3.2-1b": 1235814400, "llama-3.1-8b": 8030261248}


def test_load_model_prints_once_what_was_patched(capsys) -> None:
    for class_type, says in (("vanilla", "nothing patched"), ("custom", "patched: 4 scheduled")):
        args = ModelArguments(preset="tiny", class_type=class_type)
        load_model(args, load_config(args, vocab_size=100), device=CPU)
        assert capsys.readouterr().out.count(says) == 1


def test_rows_longer_than_the_model(capsys, tmp_path: Path) -> None:
    for kind, says in (("default", "extrapolated"), ("dynamic", "raises its base")):
        folder = tmp_path / kind
        tiny_config(rope_parameters=ROPE[kind]).save_pretrained(folder)
        with pytest.raises(UserError, match="max_position_embeddings 128.*--extend_context"):
            load_config(ModelArguments(model_name_or_path=str(folder), seq_len=256), vocab_size=9)
        args = ModelArguments(model_name_or_path=str(folder), seq_len=256, extend_context=True)
        load_config(args, vocab_size=9)
        assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": "/no/such/folder"}, "is no folder"),
        ({"model_name_or_path": "/no/such/model.gguf"}, "no such GGUF file"),
        ({"class_type": "liger"}, "liger"),
        ({"attn_backend": "fa4"}, "--attn_backend fa4 needs a GPU"),
    ],
)
def test_bad_requests(changes, message) -> None:
    args = ModelArguments(
        **{"preset": None if "model_name_or_path" in changes else "tiny"} | changes
    )
    with pytest.raises(UserError, match=message):
        load_model(args, load_config(args, vocab_size=9), device=CPU)


@pytest.mark.parametrize("class_type", ["vanilla", "liger"])
def test_flash_attn_4_of_hugging_face_is_made_ready_too(class_type, monkeypatch) -> None:
    """Its kernels are kept and its compiler quiet for all that call it (tests/model)."""
    answers = ["has no backward kernel for this GPU (sm_80)", None]
    monkeypatch.setattr(flash4, "why_not", lambda device, head_dim: answers.pop(0))
    monkeypatch.setattr(loading, "installed", lambda module: True)
    args = ModelArguments(class_type=class_type, attn_backend="fa4")
    with pytest.raises(UserError, match=r"flash-attn-4 has no backward .*\(sm_80\); use sdpa"):
        check_request(args, torch.device("cuda"))
    check_request(args, torch.device("cuda"))
    assert not answers


@pytest.mark.parametrize(
    ("preset", "parameters", "layer"),
    [
        ("llama-3.2-1b", 1_235_814_400, "LlamaDecoderLayer"),
        ("llama-3.1-8b", 8_030_261_248, "LlamaDecoderLayer"),
        ("smollm2-135m", 134_515_008, "LlamaDecoderLayer"),
        ("qwen3-0.6b", 596_049_920, "Qwen3DecoderLayer"),
        ("qwen3-8b", 8_190_735_360, "Qwen3DecoderLayer"),
        ("qwen2.5-7b", 7_615_616_512, "Qwen2DecoderLayer"),
        ("mistral-7b", 7_241_732_096, "MistralDecoderLayer"),
        ("phi-4", 14_659_507_200, "Phi3DecoderLayer"),
        ("gemma-3-1b", 999_885_952, "Gemma3DecoderLayer"),
        ("gemma-2-9b", 9_241_705_984, "Gemma2DecoderLayer"),
        ("gemma-3-4b", 3_880_263_168, "Gemma3DecoderLayer"),
        ("gemma-3-12b", 11_766_034_176, "Gemma3DecoderLayer"),
        ("gemma-3-27b", 27_009_346_304, "Gemma3DecoderLayer"),
        ("exaone-4-32b", 32_003_216_384, "Exaone4DecoderLayer"),
        ("olmo-2-7b", 7_298_617_344, "Olmo2DecoderLayer"),
        ("olmo-3-7b", 7_298_011_136, "Olmo3DecoderLayer"),
        ("ministral-3-8b", 8_489_553_920, "Ministral3DecoderLayer"),
        ("glm-4-9b", 9_400_279_040, "Glm4DecoderLayer"),
        ("command-r7b", 8_028_033_024, "Cohere2DecoderLayer"),
        ("qwen1.5-moe-a2.7b", 14_315_784_192, "Qwen2MoeDecoderLayer"),
        ("glm-4.5-air", 106_852_245_504, "Glm4MoeDecoderLayer"),
        ("ernie-4.5-21b-a3b", 21_825_437_888, "Ernie4_5_MoeDecoderLayer"),
        ("falcon-h1-0.5b", 521_411_104, "FalconH1DecoderLayer"),
        ("lfm2-1.2b", 1_170_340_608, "Lfm2DecoderLayer"),
        ("granite-4.0-h-tiny", 6_939_037_248, "GraniteMoeHybridDecoderLayer"),
        ("granite-4.0-h-small", 32_207_337_984, "GraniteMoeHybridDecoderLayer"),
        ("gpt-oss-20b", 20_914_757_184, "GptOssDecoderLayer"),
        ("gpt-oss-120b", 116_829_156_672, "GptOssDecoderLayer"),
        ("qwen3-8b-fp8", 8_190_735_360, "Qwen3DecoderLayer"),
        ("ministral-3-8b-fp8", 8_489_553_920, "Ministral3DecoderLayer"),
    ],
)
def test_presets_have_the_published_sizes(preset: str, parameters: int, layer: str) -> None:
    config = load_config(ModelArguments(preset=preset, seq_len=4096), vocab_size=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert set(model._no_split_modules) == {layer}  # what FSDP wraps


def test_a_preset_without_a_family_is_for_any() -> None:
    args = ModelArguments(preset="moonlight-16b-a3b", class_type="any", seq_len=4096)
    model = without_storage(load_config(args, vocab_size=1))
    assert model is not None
    biases = sum(b.numel() for name, b in model.named_buffers() if "correction" in name)
    assert sum(p.numel() for p in model.parameters()) + biases == 15_960_110_208
    with pytest.raises(UserError, match="--preset moonlight-16b-a3b: .*--class_type any"):
        load_config(replace(args, class_type="custom"), vocab_size=1)


def test_a_preset_that_sees_images_has_special_tokens_where_its_language_model_looks() -> None:
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    args = ModelArguments(preset="qwen3-vl-8b", seq_len=262144)
    config = load_config(args, vocab_size=1, special_ids=special)
    for part in (config, config.text_config):
        assert {name: getattr(part, name) for name in special} == special
    assert config.text_config.vocab_size == 151936 and config.image_token_id == 151655
    model = without_storage(config)
    assert model is not None and model.get_input_embeddings().padding_idx == 3
    assert sum(p.numel() for p in model.parameters()) == 8_767_123_696
    with pytest.raises(UserError, match="above the model's max_position_embeddings 262144"):
        load_config(replace(args, seq_len=262145), vocab_size=1)


def test_an_unknown_family_is_refused_by_name_and_trains_as_any_model(tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    config = AutoConfig.for_model("gpt_neox", intermediate_size=48, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError) as patched:
        longctx.patch(model)
    config.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path), seq_len=16)
    with pytest.raises(UserError) as loaded:
        load_config(args, vocab_size=64)
    for error, named in ((patched, "GPTNeoXForCausalLM"), (loaded, "'gpt_neox'")):
        said = str(error.value)
        assert f"no family for {named}. Any model trains" in said
        assert "--class_type any" in said and "`longctx help add_a_family`" in said
        assert "`longctx help flags` lists the families" in said
    for kind in ("any", "vanilla"):
        load_config(replace(args, class_type=kind), vocab_size=64)


def test_cudnn_is_refused_for_windows_before_loading_weights() -> None:
    args = ModelArguments(preset="mistral-7b", attn_backend="cudnn", seq_len=8192)
    with pytest.raises(UserError, match="cudnn has no sliding windows"):
        load_config(args, vocab_size=1)
    load_config(replace(args, class_type="vanilla", attn_backend="auto"), vocab_size=1)


def test_sdpa_never_computes_scores_that_have_a_cap(monkeypatch) -> None:
    """Before 5.23 transformers took it for Gemma 2, and left the cap out."""
    config = family_config("gemma2", attn_implementation=None)  # transformers' own choice
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "sdpa"
    args = ModelArguments(preset="tiny", class_type="vanilla", seq_len=16)
    for class_type in ("vanilla", "custom"):
        model = load_model(replace(args, class_type=class_type), config, device=CPU)
        assert model.config._attn_implementation == "eager"
    with pytest.raises(UserError, match="'gemma2' by eager alone, or by fa2; use auto"):
        load_model(replace(args, attn_backend="sdpa"), config, device=CPU)
    theirs = AutoModelForCausalLM.from_config(config)
    longctx.patch(theirs)
    assert theirs.config._attn_implementation == "eager"  # where Hugging Face's layers run


def test_a_rope_that_a_family_does_not_know_is_refused() -> None:
    args = ModelArguments(preset="phi-4", rope_scaling="yarn", seq_len=65536)
    with pytest.raises(UserError, match="yarn is impossible with models of type 'phi3'"):
        load_config(args, vocab_size=1)
    load_config(replace(args, preset="qwen3-8b"), vocab_size=1)


def test_a_rope_of_each_type_is_scaled_where_there_is_no_window() -> None:
    """And the model has it: a factor that nobody reads would be an extension in name only."""
    args = ModelArguments(preset="gemma-3-1b", seq_len=32768)
    scaled = replace(args, rope_scaling="yarn", seq_len=65536)
    plain, yarn = (
        AutoModelForCausalLM.from_config(config).model.rotary_emb
        for config in (small(load_config(a, vocab_size=1)) for a in (args, scaled))
    )
    assert not torch.equal(plain.full_attention_inv_freq, yarn.full_attention_inv_freq)
    assert torch.equal(plain.sliding_attention_inv_freq, yarn.sliding_attention_inv_freq)
    with pytest.raises(UserError, match="this model's is 'linear' already"):
        load_config(replace(scaled, preset="gemma-3-4b", seq_len=262144), vocab_size=1)


def small(config: PretrainedConfig) -> PretrainedConfig:
    config.hidden_size, config.intermediate_size, config.vocab_size = 32, 32, 8
    config.num_hidden_layers, config.layer_types = 6, config.layer_types[:6]
    return config


def test_a_gguf_file_is_trained_and_saved_like_any_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    args = ModelArguments(model_name_or_path=str(tmp_path / "tiny.gguf"), seq_len=48)
    model = load_model(args, load_config(args, vocab_size=331), device=CPU)
    assert model.config.num_key_value_heads == 2
    model(**packed_batch()).loss.backward()
    assert Trainer(model, TrainingArguments(str(tmp_path / "t"), use_cpu=True)).model is model
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(
        torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "more", ["rope_freqs", "blk.0.attn_q_norm", "blk.1.ffn_down", "blk.0.attn_q.scale"]
)
def test_what_nobody_reads_of_a_gguf_file_is_refused(tmp_path: Path, more) -> None:
    write_gguf(tmp_path / "tiny.gguf", more={more: (8,)})
    args = ModelArguments(model_name_or_path=str(tmp_path / "tiny.gguf"), seq_len=48)
    with pytest.raises(UserError, match=rf"1 of the tensors .* by nobody \({more}.weight\)"):
        load_model(args, load_config(args, vocab_size=331), device=CPU)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            r"1 of the .* \(model.layers.1.mlp.up",
        ),
        (lambda w: w.pop("model.norm.weight"), r"are not in .* \(model.norm.weight\)"),
        (lambda w: w.clear(), r"30 of the model's weights are not in .*, \.\.\.\): they would"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(63)}),
            r"another shape in .* \(model.norm.weight \(63,\)\)",
        ),
        (
            lambda w: w.update({"vision.weight": torch.ones(3)}),
            r"1 of the tensors in .* are read by nobody \(vision.weight\)",
        ),
        (lambda w: None, None),
    ],
    ids=["projection", "norm", "empty", "shape", "more", "whole"],
)
def test_a_weight_that_is_missing_is_an_error(tied, change, message, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=tied, num_hidden_layers=3)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    args = ModelArguments(model_name_or_path=str(tmp_path), seq_len=48)
    if message is None:
        load_model(args, load_config(args, vocab_size=331), device=CPU)
        return
    with pytest.raises(UserError, match=message) as error:
        load_model(args, load_config(args, vocab_size=331), device=CPU)
    assert "\n" not in str(error.value)


def test_a_head_that_is_missing_and_not_tied(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    args = ModelArguments(model_name_or_path=str(tmp_path), seq_len=48)
    with pytest.raises(UserError, match="lm_head.weight"):
        load_model(args, load_config(args, vocab_size=331), device=CPU)
