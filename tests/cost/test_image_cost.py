"""What images add to a step, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longctx.cost.fitted import TOWER_LAUNCH_S, TOWERS
from longctx.cost.images import Image, Images, Tower
from longctx.cost.named import machine_named
from longctx.cost.sizes import Batch

TOWER = Tower(
    parameters=1000,
    patch_parameters=400,
    feature_parameters=100,
    hidden=10,
    features=20,
    layers=3,
    saved=50,
    numbers=12,
    states=1,
    deepstack=2,
    masks=False,
    itemsize=2,
    frozen_group=64,
    trained_group=32,
)
IMAGE = Image(width=8, height=8, patches=16, features=4, tokens=6, pairs=3 * 16**2)
FROZEN = Images(tower=TOWER, image=IMAGE, count=9)
TRAINED = replace(FROZEN, trained=True)


def test_flops() -> None:
    """A tower that trains in several groups runs forward twice; backward's matmuls are twice as
    many products, and its attention 5 instead of 2."""
    matmuls, attention = 2 * (400 * 144 + 100 * 36), 4 * 10 * 9 * 3 * 16**2
    assert FROZEN.flops == matmuls + attention
    assert TRAINED.flops == 4 * matmuls + 4.5 * attention
    one = replace(TRAINED, count=2)
    assert one.groups == 1 and one.flops == (3 * matmuls + 3.5 * attention) * 2 / 9


def test_a_group_has_whole_images_and_masks_are_of_all_its_patches() -> None:
    assert (FROZEN.group, FROZEN.groups, TRAINED.group, TRAINED.groups) == (4, 3, 2, 5)
    assert replace(FROZEN, image=replace(IMAGE, patches=100)).group == 1
    masked = replace(FROZEN, tower=replace(TOWER, masks=True))
    assert masked.attention_flops == 4 * FROZEN.attention_flops
    held = masked.tower_buffers()["a group of images"] - FROZEN.tower_buffers()["a group of images"]
    assert held == 2 * 64**2


def test_bytes() -> None:
    """Features of 36 x 20 elements: the tower's, two of deepstack's, and a joined copy."""
    assert FROZEN.standing == {"vision tower": 2000, "pixels": 2 * 12 * 144}
    assert FROZEN.forward["features of images"] == 2 * (4 * 36 * 20 + 144 * 10)
    assert FROZEN.backward["features of images"] == 2 * (2 * 36 * 20)
    assert TRAINED.standing["vision tower"] == 0  # a block of the model
    away = replace(FROZEN, away=True)
    assert away.forward["vision tower"] == away.backward["vision tower"] == 0
    assert away.tower_buffers() == FROZEN.tower_buffers() and away.batch_bytes == FROZEN.batch_bytes
    layer = 25 * 10
    assert FROZEN.tower_buffers()["a group of images"] == 2 * 64 * layer
    assert TRAINED.tower_buffers(backward=True)["a group of images"] == 2 * 32 * (layer + 3 * 50)


def test_the_only_group_of_a_tower_that_trains_is_kept() -> None:
    """Its layers save 3 x 50 elements a patch, which nobody computes again."""
    one = replace(TRAINED, count=2)
    kept = 2 * 32 * 3 * 50
    assert one.forward["a group of images"] == one.backward["a group of images"] == kept
    assert (
        one.tower_buffers()["a group of images"]
        == one.tower_buffers(backward=True)["a group of images"]
    )
    assert "a group of images" not in TRAINED.forward | FROZEN.forward | TRAINED.backward


def test_frozen_activations_do_not_grow_with_the_images() -> None:
    many = replace(FROZEN, count=900)
    assert many.group_bytes() == FROZEN.group_bytes() == FROZEN.tower_buffers()["a group of images"]
    assert many.standing["pixels"] == 100 * FROZEN.standing["pixels"]


def test_features_take_their_places_after_the_tower() -> None:
    """masked_scatter's mask and sum of 64 bits, for each number of a feature."""
    many = replace(FROZEN, count=900)
    assert many.tower_buffers()["a group of images"] == 9 * 3600 * 20 > many.group_bytes()


def test_seconds_are_those_of_kernels_or_of_their_launches() -> None:
    rates = machine_named("h100").rates("fa4", 8192, 128)
    assert FROZEN.seconds(rates) == pytest.approx(3 * 3 * 25 * TOWER_LAUNCH_S, rel=1e-3)
    large = replace(FROZEN, tower=replace(TOWER, patch_parameters=10**12))
    assert large.seconds(rates) == pytest.approx(large.flops / rates.flops / TOWERS, rel=1e-3)


def test_images_have_no_labels() -> None:
    assert Batch(100, 100).labelled == 100 and Batch(100, 100, images=60).labelled == 40
