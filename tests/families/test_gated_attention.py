"""A gate of attention's output, in whole models: Qwen3.5's layers of full attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_families import SIZES, family_config
from small_layer import assert_trains_exactly, batch, cast, gradients
from test_every_family import trio
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.families.families import FAMILIES, family_of
from longctx.families.strangers import why_not_scheduled
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")


def test_a_checkpoint_with_images_trains_its_text_model() -> None:
    """AutoModelForCausalLM makes a text model of the whole model's configuration."""
    text = family_config("qwen3_5_text-attention").to_dict()
    vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2)
    vision |= dict(out_hidden_size=SIZES["hidden_size"])
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    assert family_of(config) is FAMILIES["qwen3_5_text"]
    longctx.patch(AutoModelForCausalLM.from_config(config), strict=True)


def test_a_layer_that_was_turned_into_another_kind() -> None:
    ours = trio("qwen3_5_text-attention", torch.float32)[2]
    ours.model.layers[1].block_type = "linear_attention"
    assert "of another kind than in the configuration" in str(why_not_scheduled(ours.model))


@pytest.mark.parametrize("rows", [3, 4])
def test_three_rows_of_positions(rows: int, scheduled: Any) -> None:
    """As tokens of images have them: each frequency of the rotated part reads one of them."""
    _, naive, ours = trio("qwen3_5_text-attention", torch.float32)
    inputs, draw = batch([[48]]), torch.Generator().manual_seed(3)
    moved = torch.randint(0, 9, (3, 1, 48), generator=draw).to(DEVICE)
    text = inputs["position_ids"][None]
    inputs["position_ids"] = torch.cat([text, text + moved])[4 - rows :]
    (loss, grads), (theirs, wanted) = (gradients(model, inputs) for model in (ours, naive))
    assert scheduled
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=0)
    for name, grad in wanted.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_packed_rows_are_those_of_separate_documents() -> None:
    ours = trio("qwen3_5_text-attention", torch.float32, dict(head_groups=2, tile_tokens=7))[2]
    packed = batch([[20, 27, 1]])
    sums: dict[str, Tensor] = {}
    loss, grads = gradients(ours, packed)
    grads, count = {n: g.clone() for n, g in grads.items()}, 0
    total = torch.zeros(())
    for start, stop in ((0, 20), (20, 47)):  # the last document has nothing to predict
        alone = {n: x[:, start:stop] for n, x in packed.items() if isinstance(x, Tensor)}
        own, found = gradients(ours, alone | {"use_cache": False})
        labels = int((alone["labels"][:, 1:] != -100).sum())
        total, count = total + own.detach() * labels, count + labels
        for name, grad in found.items():
            sums[name] = sums.get(name, 0) + grad * labels
    torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        assert (grad - sums[name] / count).norm() <= 2e-5 * grad.norm(), name


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    """q_proj stays one parameter, in which each head's rows precede those of its gate."""
    ours = longctx.patch(AutoModelForCausalLM.from_config(family_config("qwen3_5_text-attention")))
    ours.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    q = theirs.model.layers[0].self_attn.q_proj
    assert q.out_features == 2 * SIZES["num_attention_heads"] * 32
    ids = batch([[24]])["input_ids"].cpu()
    torch.testing.assert_close(
        copy.deepcopy(ours).to("cpu").eval()(ids).logits, theirs.eval()(ids).logits
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flash", "cudnn"])
def test_published_dimensions_in_bf16(backend: str) -> None:
    """Two layers of full attention of Qwen3.5-9B, with heads of 256 of which 64 elements are
    rotated, a row of 8192 tokens: every gradient at most 1.1 times vanilla's error."""
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=2, layer_types=2 * ["full_attention"], vocab_size=32000
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        naive = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    with torch.no_grad():
        for name, parameter in naive.named_parameters():
            if "norm" in name:  # zeros hide what they are for
                parameter.add_(torch.randn_like(parameter) * 0.2)
    truth = cast(copy.deepcopy(naive), torch.float32)
    ours = copy.deepcopy(naive)
    settings = PatchOptions(
        offload_activations="all", keep="qkv", attn_backend=backend, cuda_graphs="off"
    )
    patch_as(ours, settings, torch.device(DEVICE))
    assert_trains_exactly((truth, naive, ours), batch([[5000, 3192]]))
    assert not ours.longctx.warned
