"""Patches, features and tokens of an image against the processors and the models themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_vision import KINDS as SMALL
from small_vision import image_batch, vision_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from longctx.cost.images import Images
from longctx.errors import UserError
from longctx.families.classes import without_storage
from longctx.families.vision import PREFIXES, joint_of, towers
from longctx.images.image_sizes import KINDS, image_of, tower_sizes
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

SIZES = [(448, 448), (640, 480), (333, 1000), (2000, 1500)]


def test_every_vision_language_family_is_known() -> None:
    assert KINDS.keys() == PREFIXES.keys() == SMALL.keys()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "patch"), [("qwen2_vl", 14), ("qwen2_5_vl", 14), ("qwen3_vl", 16)]
)
def test_qwen_rounds_as_its_processor(kind: str, patch: int, size: tuple[int, int]) -> None:
    """With room for all pixels: how many a processor leaves is a setting of its own."""
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    found = image_of(AutoConfig.for_model(kind), size)
    height, width = theirs.smart_resize(
        *size[::-1], factor=2 * patch, min_pixels=1, max_pixels=10**9
    )
    assert (found.width, found.height) == (width, height)
    assert found.patches == height * width // patch**2 == 4 * found.features
    assert found.tokens == found.features + 2


@pytest.mark.parametrize("size", SIZES)
def test_mistral_rounds_as_its_processor(size: tuple[int, int]) -> None:
    theirs = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    vision = dict(model_type="pixtral", image_size=1540, patch_size=14)
    found = image_of(AutoConfig.for_model("mistral3", vision_config=vision), size)
    pixels = np.zeros((*size[::-1], 3))
    sizes = dict(size=(1540, 1540), patch_size=(28, 28))
    height, width = theirs.get_resize_output_image_size(pixels, **sizes)
    assert (found.width, found.height) == (width, height)
    lines, columns = height // 28, width // 28
    assert found.features == lines * columns and found.tokens == lines * (columns + 1)
    assert found.patches == 4 * found.features


def test_gemma_and_llava_see_one_size() -> None:
    """Gemma 3's processor writes 256 tokens, a mark and a line's end on either side."""
    gemma = AutoConfig.for_model("gemma3", vision_config=dict(image_size=896, patch_size=14))
    llava = AutoConfig.for_model("llava")
    for size in (None, (448, 448), (16, 9000)):
        found = image_of(gemma, size)
        assert (found.patches, found.features, found.tokens) == (4096, 256, 260)
        found = image_of(llava, size)
        assert (found.patches, found.features, found.tokens) == (577, 576, 576)
    with pytest.raises(UserError, match="'qwen3_vl' sees images in their own size.*--image_pixels"):
        image_of(AutoConfig.for_model("qwen3_vl"), None)


def model_of(kind: str) -> Any:
    """A small model whose attention is of plain products, and whose SigLIP has no head."""
    config = vision_config(kind)
    config.vision_config.vision_use_head = False
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", SMALL)
def test_flops_and_features_are_those_of_the_model(kind: str) -> None:
    """Two images. CLIP's token of a class is counted as a patch, which no pixels were made of."""
    model, batch = model_of(kind), image_batch(kind, ((5, 22),))
    names = ("pixel_values", "image_grid_thw", "image_sizes")
    given = {name: batch[name] for name in names if name in batch}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        seen = joint_of(model).get_image_features(**given, return_dict=True)
    tower, image = tower_sizes(model), image_of(model.config, (16, 16))
    assert tower is not None
    images = Images(tower=tower, image=image, count=2)
    assert counter.get_total_flops() == pytest.approx(images.flops, rel=0.003)
    features = [x for x in seen.pooler_output]
    assert sum(x.numel() for x in features) == images.features * tower.features
    assert len(getattr(seen, "deepstack_features", None) or ()) == tower.deepstack
    states = seen.last_hidden_state.numel() * tower.states
    assert states == images.patches * tower.hidden * tower.states
    assert given["pixel_values"].numel() == pytest.approx(tower.numbers * images.patches, rel=0.07)
    parameters = [p for _, module in towers(model) for p in module.parameters()]
    assert tower.parameters == sum(p.numel() for p in parameters)


@pytest.mark.parametrize("size", [(64, 64), (72, 104), (8, 40)])
def test_windows_are_counted_as_they_are_cut(size: tuple[int, int]) -> None:
    model = model_of("qwen2_5_vl")
    image = image_of(model.config, size)
    grid = torch.tensor([[1, image.height // 4, image.width // 4]])
    pixels = torch.randn(image.patches, 3 * 2 * 4 * 4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        joint_of(model).get_image_features(pixels, grid, return_dict=True)
    tower = tower_sizes(model)
    assert tower is not None
    assert counter.get_total_flops() == Images(tower=tower, image=image, count=1).flops


def test_a_model_of_text_has_no_tower() -> None:
    args = ModelArguments(preset="tiny", seq_len=16)
    assert tower_sizes(without_storage(load_config(args, vocab_size=64))) is None


def test_the_tower_of_qwen3_vl_8b() -> None:
    """27 layers of 15.2M parameters, and four mergers of 40.1M."""
    model = without_storage(load_config(ModelArguments(preset="qwen3-vl-8b"), vocab_size=1))
    found = tower_sizes(model)
    assert found is not None
    layer = 4 * 1152**2 + 2 * 1152 * 4304
    assert found.patch_parameters == 27 * layer + 1536 * 1152
    assert found.feature_parameters == 4 * (4608**2 + 4608 * 4096)
    assert found.parameters == 576_388_336 and found.deepstack == 3
