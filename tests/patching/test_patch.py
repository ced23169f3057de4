"""The custom class against vanilla Hugging Face: losses, gradients, generation, saved files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_model import CPU, ROPE, packed_batch, tiny_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
)

from longctx.head.logits import LazyLogits
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")


def vanilla_and_custom(arguments=None, **changes) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    torch.manual_seed(0)
    vanilla = LlamaForCausalLM(tiny_config(**changes))
    with torch.no_grad():  # a fresh norm weight is 1 and a fresh bias 0: hide nothing behind them
        for parameter in vanilla.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    custom = copy.deepcopy(vanilla)
    patch_as(custom, PatchOptions(**(arguments or {})), CPU)
    return vanilla, custom


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
    assert output.logits.grad_fn is None
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
    assert isinstance(custom(**packed_batch()).logits, LazyLogits)
    custom.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    ours, theirs = custom.state_dict(), vanilla.state_dict()
    assert ours.keys() == theirs.keys() == loaded.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in ours.items())


def test_room_is_made_in_the_dtype_that_computes() -> None:
    """FSDP2 turns weights into fp32 after patching; activations stay 16 bits wide."""
    slabs = []
    for turned in (False, True):
        model = LlamaForCausalLM(tiny_config()).bfloat16()
        patch_as(model, PatchOptions(offload_activations="all"), CPU)
        model.longctx.reserve(model.float() if turned else model, 96)
        slabs.append(model.longctx.store._slab.numel())
    assert slabs[0] == slabs[1] > 0


def test_evaluation_keeps_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    _, custom = vanilla_and_custom()
    monkeypatch.setattr(custom.longctx.store, "open", pytest.fail)
    with torch.no_grad():
        custom(**packed_batch(), num_items_in_batch=1)
