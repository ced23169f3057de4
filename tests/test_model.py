"""The custom class against vanilla Hugging Face: losses, gradients, generation, saved files."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from longctx.config import ModelArguments, UserError
from longctx.loading import PRESETS, load_config, load_model
from longctx.model import patch

pytestmark = pytest.mark.usefixtures("reference_kernels")

CPU = torch.device("cpu")


def tiny_config(**changes) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 331,  # prime: no chunk or block divides it
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            **changes,
        }
    )


def vanilla_and_custom(arguments=None, **changes) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    torch.manual_seed(0)
    vanilla = LlamaForCausalLM(tiny_config(**changes))
    with torch.no_grad():  # a fresh norm weight is 1 and a fresh bias 0: hide nothing behind them
        for parameter in vanilla.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    custom = copy.deepcopy(vanilla)
    patch(custom, ModelArguments(**(arguments or {})), CPU)
    return vanilla, custom


def packed_batch(rows: int = 2) -> dict[str, Tensor]:
    """Rows of 48 tokens: documents of 20, 27 and 1 tokens, the first third of each not trained."""
    torch.manual_seed(1)
    ids = torch.randint(331, (rows, 48))
    position_ids = torch.cat([torch.arange(n) for n in (20, 27, 1)]).repeat(rows, 1)
    labels = ids.masked_fill(position_ids < 7, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids, "use_cache": False}


def loss_and_gradients(model, batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_training(vanilla, custom, batch) -> None:
    """fp32: summation order is all that may differ."""
    loss, gradients = loss_and_gradients(vanilla, batch)
    ours, our_gradients = loss_and_gradients(custom, batch)
    torch.testing.assert_close(ours, loss, rtol=2e-6, atol=0)
    assert our_gradients.keys() == gradients.keys()
    for name, truth in gradients.items():
        error = (our_gradients[name] - truth).norm() / truth.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        **PRESETS["llama-3.1-8b"]["rope_parameters"],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"rope_parameters": rope}, id=f"rope-{kind}") for kind, rope in ROPE.items()]
    + [
        # Rows of 48 tokens are past 16 positions, where dynamic RoPE starts to change its base.
        pytest.param(
            {"rope_parameters": ROPE["dynamic"], "max_position_embeddings": 16}, id="rope-grown"
        ),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"num_key_value_heads": 1}, id="gqa-4"),
        pytest.param({"num_key_value_heads": 4}, id="no-gqa"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"head_dim": 24}, id="head-dim-24"),
    ],
)
def test_custom_trains_like_vanilla(changes) -> None:
    assert_same_training(*vanilla_and_custom(**changes), packed_batch())


@pytest.mark.parametrize("items", [7, torch.tensor(113)], ids=["int", "tensor"])
def test_num_items_in_batch_is_the_denominator(items) -> None:
    assert_same_training(*vanilla_and_custom(), {**packed_batch(), "num_items_in_batch": items})


def test_shift_labels_win_over_labels() -> None:
    batch = packed_batch()
    shifted = torch.randint(331, batch["labels"].shape)
    assert_same_training(*vanilla_and_custom(), {**batch, "shift_labels": shifted})


def test_padded_batch_with_a_mask() -> None:
    batch = packed_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 30:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    assert_same_training(
        *vanilla_and_custom(),
        {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask},
    )


@pytest.mark.parametrize("frozen", ["lm_head", "model.embed_tokens", "model.layers", "model.norm"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    models = vanilla_and_custom()
    for model in models:
        model.get_submodule(frozen).requires_grad_(False)
    assert_same_training(*models, packed_batch())


def test_activation_checkpointing_changes_nothing() -> None:
    vanilla, custom = vanilla_and_custom()
    custom.train()
    custom.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_training(vanilla.train(), custom, packed_batch())


@pytest.mark.parametrize("class_type", ["vanilla", "custom"])
def test_no_token_attends_to_another_document(class_type: str) -> None:
    """A document's tokens get the same gradient packed with others as alone."""
    _, model = vanilla_and_custom()
    if class_type == "vanilla":
        model, _ = vanilla_and_custom()
    batch = packed_batch(rows=1)
    packed = batch | {"labels": batch["labels"].clone(), "num_items_in_batch": 1}
    packed["labels"][:, 20:] = -100  # only the first document is trained
    packed["labels"][:, 0] = -100
    other = {**packed, "input_ids": packed["input_ids"].clone()}
    other["input_ids"][:, 20:] = 5
    second = {**packed, "labels": batch["labels"].clone()}
    second["labels"][:, :21] = -100  # only the second
    changed = {**second, "input_ids": second["input_ids"].clone()}
    changed["input_ids"][:, :20] = 5
    assert model(**packed).loss == model(**other).loss
    torch.testing.assert_close(model(**second).loss, model(**changed).loss, rtol=1e-6, atol=0)


def test_bf16_autocast_over_fp32_weights() -> None:
    vanilla, custom = vanilla_and_custom()
    with torch.autocast("cpu", torch.bfloat16):
        loss = vanilla(**packed_batch()).loss
        ours = custom(**packed_batch()).loss
    ours.backward()
    assert custom.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours, loss, rtol=2**-9, atol=0)


def test_evaluation_builds_no_graph_and_no_logits() -> None:
    _, custom = vanilla_and_custom()
    with torch.no_grad():
        output = custom(**packed_batch())
    assert output.logits is None
    assert not output.loss.requires_grad


def test_without_labels_the_forward_is_hugging_faces() -> None:
    vanilla, custom = vanilla_and_custom()
    ids = packed_batch()["input_ids"]
    assert torch.equal(custom(input_ids=ids).logits, vanilla(input_ids=ids).logits)
    kept = custom(input_ids=ids, labels=ids[:, -3:], logits_to_keep=3)
    assert kept.logits.shape == (2, 3, 331)
    assert kept.loss is not None
    prompt = ids[:1, :5]
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(custom.generate(prompt, **settings), vanilla.generate(prompt, **settings))


def test_the_patch_is_on_the_instance_only(tmp_path: Path) -> None:
    vanilla, custom = vanilla_and_custom()
    assert type(custom) is type(vanilla) is LlamaForCausalLM
    assert vanilla(**packed_batch()).logits is not None
    assert custom(**packed_batch()).logits is None
    custom.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    ours, theirs = custom.state_dict(), vanilla.state_dict()
    assert ours.keys() == theirs.keys() == loaded.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in ours.items())


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
        ({"model_name_or_path": "/no/such/folder"}, "cannot load a model"),
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


def test_custom_refuses_other_families_before_loading_weights(tmp_path: Path) -> None:
    GPT2Config(n_layer=1).save_pretrained(tmp_path)  # a configuration without weights
    with pytest.raises(UserError, match="'gpt2': use --class_type vanilla"):
        load_config(ModelArguments(model_name_or_path=str(tmp_path)), vocab_size=9)


def write_gguf(path: Path, layers: int = 1) -> None:
    """A GGUF file of a tiny Llama with unquantised tensors, as llama.cpp names them."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(331)
    shapes = {"token_embd": (331, 64), "output_norm": (64,), "output": (331, 64)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{n}": (64, 64) for n in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{n}": (32, 64) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_{n}": (96, 64) for n in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (64, 96)}
        shapes |= {f"blk.{i}.{n}_norm": (64,) for n in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape, scale=0.1).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def test_room_is_made_in_the_dtype_that_computes() -> None:
    """FSDP2 turns weights into fp32 after patching; activations stay 16 bits wide."""
    slabs = []
    for turned in (False, True):
        model = LlamaForCausalLM(tiny_config()).bfloat16()
        patch(model, ModelArguments(offload_activations="all"), CPU)
        model.longctx.reserve(model.float() if turned else model, 96)
        slabs.append(model.longctx.store._slab.numel())
    assert slabs[0] == slabs[1] > 0


def test_evaluation_keeps_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    _, custom = vanilla_and_custom()
    monkeypatch.setattr(custom.longctx.store, "save", pytest.fail)
    with torch.no_grad():
        custom(**packed_batch(), num_items_in_batch=1)
