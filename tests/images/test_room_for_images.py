"""A run whose rows have images leaves room on the GPU for what these bring."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from small_vision import IMAGE, KINDS, vision_config, vision_model

import longctx
from longctx.families.vision import BOTH_WAYS
from longctx.images.image_sizes import image_of, tower_sizes
from longctx.images.room_for_images import (
    USUAL,
    ImageTokens,
    image_bytes,
    prepare,
    why_eager,
)
from longctx.images.tower import patches_of, tower_of
from longctx.runtime.runtime import runtime_of

IMAGES = SimpleNamespace(marks=lambda ids: ids == IMAGE)


def rows_of(*counts: int) -> Dataset:
    ids = [[IMAGE] * count + [1] * (2 + number) for number, count in enumerate(counts)]
    half = len(ids) // 2
    tables = [pa.table({"input_ids": pa.array(part)}) for part in (ids[:half], ids[half:])]
    return Dataset(pa.concat_tables(tables))


def test_tokens_of_images_are_counted_row_by_row() -> None:
    assert ImageTokens.of(rows_of(3, 0, 7, 2), IMAGES) == (7, 3.0)
    assert ImageTokens.of(rows_of(0, 0), IMAGES) == (0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_batch_counts(kind) -> None:
    """Features and pixels grow with it, and the tower's weights are a block of the model."""
    config = vision_config(kind)
    per_image = image_of(config, USUAL).features
    one, two = (
        image_bytes(config, torch.bfloat16, [ImageTokens(most, 1.0), ImageTokens(1, 1.0)], 1)
        for most in (per_image, 2 * per_image)
    )
    assert 0 < one < two == 2 * one
    assert image_bytes(config, torch.bfloat16, [ImageTokens(per_image, 1.0)], 2) == two
    assert tower_sizes(vision_model(kind)).parameters > 0


def test_a_batch_of_one_group_keeps_what_a_larger_one_does_not() -> None:
    """Room is left for the one that needs more, whichever comes first."""
    config = vision_config("qwen3_vl")
    image = image_of(config, USUAL)

    def room(images: int, group: int) -> int:
        most = [ImageTokens(images * image.features, 1.0)]
        return image_bytes(config, torch.bfloat16, most, 1, trained_group=group * image.patches)

    kept = room(2, 2) - room(2, 0)
    assert kept > 0
    assert room(5, 2) == max(room(5, 0), room(2, 2))
    assert room(5, 5) > room(5, 2)


def test_the_search_leaves_them_room() -> None:
    model = longctx.patch(vision_model("qwen3_vl"))
    runtime = runtime_of(model)
    prepare(model, runtime, [ImageTokens(400, 10.0)], 1)
    step = runtime.step(runtime.sizes(model), 512)
    assert step.beside_bytes == runtime.around.image_bytes > 0
    assert not step.graphs and runtime._why_not_recorded() == "images are added in several layers"


def test_a_loop_of_ones_own_leaves_them_room() -> None:
    """The states are placed within what images leave of the GPU."""
    model = longctx.patch(vision_model("qwen3_vl"))
    longctx.exact_adamw(model, tokens=512, image_tokens=400)
    runtime = runtime_of(model)
    expected = [ImageTokens(400, 400)]
    assert runtime.around.image_bytes == image_bytes(
        model.config, runtime.dtype, expected, 1, trained_group=patches_of(tower_of(model))
    )


def test_a_second_family_that_sees_images_both_ways_is_data(monkeypatch) -> None:
    """No code compares names: an entry of the table has its layers run eagerly."""
    config = vision_config("llava")
    assert why_eager(config) == ""
    monkeypatch.setattr("longctx.families.vision.BOTH_WAYS", BOTH_WAYS | {"llava"})
    model = longctx.patch(vision_model("llava"))
    prepare(model, runtime_of(model), [ImageTokens(40, 10.0)], 1)
    assert runtime_of(model)._why_not_recorded() == "images are seen both ways"
