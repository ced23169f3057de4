"""A model's processor is tried before it sees images: without bounds, or for another model, it is
refused in one line."""

from __future__ import annotations

import functools
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from longctx.errors import UserError
from longctx.images.image_fit import misfit
from longctx.train.options.config import DataArguments, ModelArguments
from longctx.train.start.image_processor import LazyProcessor

small = pytest.importorskip("small_images")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    return functools.cache(lambda kind: small.image_model(tmp_path_factory.mktemp(kind), kind))


def lazy(model: Path) -> LazyProcessor:
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    model_args = ModelArguments(model_name_or_path=str(model))
    return LazyProcessor(model_args, DataArguments(), config, tokenizer)


@pytest.mark.parametrize("kind", small.PLACES)
def test_a_models_own_processor_fits(kind, model_of) -> None:
    found = lazy(model_of(kind))
    assert found.read() is found.read() and found.processor.tokens_of((16, 16), "it")


def changed(model: Path, folder: Path, file: str, **settings: Any) -> Path:
    """The model with other settings in one of its files, those of images where they have a place of
    their own."""
    shutil.copytree(model, folder)
    content = json.loads((folder / file).read_text())
    for key, value in settings.items():
        inner = content.get("image_processor", {})
        (inner if key in inner else content)[key] = value
    (folder / file).write_text(json.dumps(content))
    return folder


QWEN, PROCESSOR = "preprocessor_config.json", "processor_config.json"
EDGES = {"shortest_edge": 10**15, "longest_edge": 10**16}
OTHER_TOKEN = {"image_token_id": 5, "image_token_index": 5}
REFUSED = {
    "tokens without end": ("gemma3", PROCESSOR, dict(image_seq_length=10**8), "GiB of memory"),
    "pixels without end": ("qwen3_vl", QWEN, dict(size=EDGES), "GiB of memory|makes nothing"),
    "a side without end": (
        *("llava", PROCESSOR, dict(size={"shortest_edge": 10**6}, do_center_crop=False)),
        "GiB of memory|makes nothing|does not end",
    ),
    "patches of no size": ("qwen3_vl", QWEN, dict(patch_size=0), "makes nothing of an image"),
    "other patches": ("qwen3_vl", QWEN, dict(patch_size=8), "`pixel_values` of .* and the model"),
    "another merge": ("qwen3_vl", QWEN, dict(merge_size=1), r"writes [\d,]+ tokens for an image"),
    "other frames": ("qwen3_vl", QWEN, dict(temporal_patch_size=4), "`pixel_values` of"),
    "another size": ("gemma3", PROCESSOR, dict(size={"height": 32, "width": 32}), "x 32 x 32, and"),
    "another count": ("gemma3", PROCESSOR, dict(image_seq_length=9), "writes 9 tokens for a"),
    "a token more": ("llava", PROCESSOR, dict(num_additional_image_tokens=3), "writes 18 tokens"),
    "another token": ("llava", "config.json", OTHER_TOKEN, "image_token_id 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_processor_without_bounds_or_for_another_model(case, model_of, tmp_path) -> None:
    kind, file, settings, said = REFUSED[case]
    model = changed(model_of(kind), tmp_path / "model", file, **settings)
    start = time.monotonic()
    with pytest.raises(UserError, match=said) as error:
        lazy(model).read()
    assert "\n" not in str(error.value) and str(model) in str(error.value)
    assert time.monotonic() - start < 60


def test_another_models_processor_and_none(model_of, tmp_path) -> None:
    model = shutil.copytree(model_of("gemma3"), tmp_path / "model")
    shutil.copy(model_of("llava") / PROCESSOR, model)
    with pytest.raises(UserError, match="processor of .*model"):
        lazy(model).read()
    (model / PROCESSOR).unlink()
    with pytest.raises(UserError, match="has no processor that reads images"):
        lazy(model).read()


def test_mistral_3() -> None:
    """Whose processor needs torchvision."""
    vision = SimpleNamespace(patch_size=14, model_type="pixtral")
    config = SimpleNamespace(model_type="mistral3", vision_config=vision, spatial_merge_size=2)
    shapes = {"pixel_values": (1, 3, 56, 84), "image_sizes": (1, 2)}
    assert misfit(config, shapes, {"image_sizes": [56, 84]}, 6) is None
    assert "writes 24 tokens" in str(misfit(config, shapes, {"image_sizes": [56, 84]}, 24))
    other = {**shapes, "image_grid_thw": (1, 3)}
    assert "makes `image_grid_thw`, and" in str(misfit(config, other, {}, 6))
    assert "does not make `image_sizes`" in str(
        misfit(config, {"pixel_values": (1, 3, 56, 84)}, {}, 6)
    )
