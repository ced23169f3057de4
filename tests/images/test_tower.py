"""The vision tower by groups of images: what all at once give, in the memory of one group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small_layer import Run, assert_exact_run, gradients, run
from small_vision import FEW, KINDS, image_batch, video_batch, vision_model
from test_images import QWENS, on_device, trained, trio
from torch import Tensor

import longctx
from longctx.images import tower
from longctx.images.tower import tower_of

pytestmark = pytest.mark.usefixtures("reference_kernels")
IMAGES = [[4, 22], [9]]
"""Three images of 16 patches each."""


def most_patches(monkeypatch, count: int) -> None:
    monkeypatch.setattr(tower, "FROZEN_PATCHES", count)
    monkeypatch.setattr(tower, "patches_of", lambda *args: count)


@pytest.fixture(params=[1, 32], ids=["one by one", "two at a time"])
def groups(request, monkeypatch) -> int:
    most_patches(monkeypatch, request.param)
    return 3 if request.param == 1 else 2


def calls_of(model: Any) -> list[int]:
    """Counts how often the tower's first linear layer runs."""
    found: list[int] = []
    linear = next(m for m in tower_of(model).modules() if isinstance(m, torch.nn.Linear))
    linear.register_forward_pre_hook(lambda *args: found.append(1))
    return found


Make = Callable[[str, int], dict[str, Tensor]]


def three_images(kind: str, seed: int) -> dict[str, Tensor]:
    return image_batch(kind, IMAGES, seed=seed)


@cache  # tests differ by the sizes of groups, which vanilla has not
def vanilla_runs(kind: str, make: Make) -> tuple[Run, Run]:
    """(truth, naive)"""
    truth, naive, _ = trio(kind)
    found = [on_device(make(kind, seed)) for seed in range(3)]
    return run(truth, *found), run(naive, *found)


def assert_exact(ours: Any, kind: str, make: Make) -> None:
    found = run(ours, *(on_device(make(kind, seed)) for seed in range(3)))
    truth, naive = vanilla_runs(kind, make)
    assert_exact_run(found, naive, truth, torch.float32)


@pytest.mark.parametrize("kind", FEW)
def test_a_tower_that_trains(kind, groups) -> None:
    """Backward computes each group again."""
    ours = longctx.patch(trained(kind), strict=True)
    calls = calls_of(ours)
    assert_exact(ours, kind, three_images)
    assert len(calls) == 3 * 2 * groups


@pytest.mark.parametrize("count", [1, 1000], ids=["several groups", "one group"])
def test_its_layers_do_not_recompute_by_themselves(count, monkeypatch) -> None:
    """Trainer switches that on in all of a model. Backward of a group computes it once again, and
    of a single one not at all."""
    most_patches(monkeypatch, count)
    ours = longctx.patch(trained("qwen3_vl"), strict=True)
    ours.gradient_checkpointing_enable()
    calls = calls_of(ours)
    assert_exact(ours, "qwen3_vl", three_images)
    assert len(calls) == 3 * (2 * 3 if count == 1 else 1)


@pytest.mark.parametrize("kind", FEW)
def test_a_tower_that_is_frozen(kind, groups) -> None:
    """It runs once, and what projects its features trains."""
    model = trained(kind)
    for name, parameter in tower_of(model).named_parameters():
        parameter.requires_grad_("merger" in name)
    usual, ours = copy.deepcopy(model), longctx.patch(model, strict=True)
    calls = calls_of(ours)
    inputs = on_device(image_batch(kind, IMAGES))
    (loss, grads), (found, theirs) = gradients(usual, inputs), gradients(ours, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(theirs[name], grad, rtol=1e-4, atol=2e-6, msg=name)
    assert len(calls) == groups


@pytest.mark.parametrize(
    ("kind", "patches"),
    [*(("qwen2_5_vl", patches) for patches in (1, 40, 4096)), *((kind, 40) for kind in QWENS[::2])],
)
def test_frames_of_a_video(kind, patches, monkeypatch) -> None:
    """Groups cut a video between its frames."""
    most_patches(monkeypatch, patches)
    assert_exact(longctx.patch(trained(kind), strict=True), kind, video_batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_called_alone(kind, groups) -> None:
    """The features that a patched model's `get_image_features` returns are Hugging Face's."""
    model = vision_model(kind).eval()
    ours = longctx.patch(copy.deepcopy(model))
    inputs = image_batch(kind, IMAGES)
    given: dict[str, Any] = {"pixel_values": inputs["pixel_values"]}
    for name in ("image_grid_thw", "image_sizes"):
        if name in inputs:
            given[name] = inputs[name]
    with torch.no_grad():
        theirs, found = (m.get_image_features(**given).pooler_output for m in (model, ours))
    for a, b in zip(theirs, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_group_is_larger_than_it_must_be() -> None:
    assert tower._cut(7, 3) == [3, 3, 1] and tower._cut(3, 3) == [3]
    assert [*tower._packed("abcd", [4000, 96, 1, 9000], 4096)] == [["a", "b"], ["c"], ["d"]]
