"""A frozen vision tower whose weights wait on the host while it does not run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_layer import DEVICE
from small_vision import KINDS, image_batch, vision_model
from test_images import on_device
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

import longctx
from longctx.errors import UserError
from longctx.families.blocks import TOWER
from longctx.families.vision import joint_of, towers
from longctx.memory.stream import StateStream

pytestmark = pytest.mark.usefixtures("reference_kernels")
ROWS: list[Any] = [[[5]], [[3, 25], [20]], [[], []], [[4, 22], [9]]]
"""Batches with images, and one of text."""


def adapted(kind: str) -> Any:
    """A model with adapters beside a frozen tower."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|down_proj)")
    model = peft.get_peft_model(vision_model(kind).to(DEVICE), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return longctx.patch(model, strict=True)


def whole(kind: str) -> Any:
    """A model that trains as a whole around a frozen tower."""
    model = vision_model(kind).to(DEVICE)
    for _, tower in towers(model):
        tower.requires_grad_(False)
    return longctx.patch(model, strict=True)


MODELS = {"adapters": adapted, "whole": whole}


def of_towers(optimizer: Any) -> Any:
    return next(block for block in optimizer.stream.blocks if block.spec.name == TOWER)


def steps(model: Any, place: str, kind: str) -> tuple[list[float], Any]:
    """Losses of a step of each batch, and the optimizer."""
    optimizer = longctx.exact_adamw(model, lr=1e-2, tokens=96, place=place)
    losses = []
    for seed, rows in enumerate(ROWS):
        loss = model(**on_device(image_batch(kind, rows, seed=seed))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def weights(model: Any) -> dict[str, Tensor]:
    return {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "trains"),
    [("llava", "whole"), *((kind, [*MODELS][i % 2]) for i, kind in enumerate(KINDS))],
)
def test_no_bit_depends_on_where_they_wait(kind, trains) -> None:
    here = MODELS[trains](kind)
    away = copy.deepcopy(here)
    losses, optimizer = steps(here, "gpu", kind)
    assert not of_towers(optimizer).streams
    found, other = steps(away, "host", kind)
    assert of_towers(other).is_away and found == losses
    expected, saved = weights(here), weights(away)
    assert expected.keys() == saved.keys()
    assert all(torch.equal(x, saved[name]) for name, x in expected.items())


def watched(block: Any, monkeypatch: Any) -> list[tuple[str, bool]]:
    """Notes whether the weights are on the GPU as each block begins to compute."""
    found: list[tuple[str, bool]] = []
    need = StateStream._need

    def noted(self: StateStream, one: Any, order: Any) -> None:
        need(self, one, order)
        found.append((one.spec.name, not block.is_away))

    monkeypatch.setattr(StateStream, "_need", noted)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_on_the_gpu_while_it_runs_alone(kind, monkeypatch) -> None:
    """A batch of text does not bring them."""
    model = whole(kind)
    optimizer = longctx.exact_adamw(model, lr=1e-2, tokens=96, place="host")
    block = of_towers(optimizer)
    found = watched(block, monkeypatch)
    assert {p for p in block.parameters} == {p for _, t in towers(model) for p in t.parameters()}
    for rows in ([[5]], [[]]):
        found.clear()
        model(**on_device(image_batch(kind, rows))).loss.backward()
        names = [name for name, _ in found]
        assert names.count("layer 1") == 2 and (TOWER in names) == bool(rows[0])
        assert all(here == (name == TOWER) for name, here in found)
        assert block.is_away and all(p.grad is None for p in block.parameters)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_they_are_saved_and_copied_as_they_came(kind, tmp_path) -> None:
    """Also right after the tower ran, when they have not left the GPU yet."""
    model = whole(kind)
    before = weights(model)
    optimizer = longctx.exact_adamw(model, lr=1e-2, tokens=96, place="host")
    joint_of(model).get_image_features(**features_of(image_batch(kind)))
    assert not of_towers(optimizer).is_away
    model.save_pretrained(tmp_path)
    assert of_towers(optimizer).is_away
    joint_of(model).get_image_features(**features_of(image_batch(kind)))
    again, moved = copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)
    read = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for found in (read, again, model):
        saved = weights(found)
        assert all(torch.equal(x, saved[name]) for name, x in before.items())
    assert {p.dtype for p in moved.parameters()} == {torch.float64}


def features_of(batch: dict[str, Tensor]) -> dict[str, Any]:
    names = ("pixel_values", "image_grid_thw", "image_sizes")
    return on_device({name: batch[name] for name in names if name in batch})


def test_a_tower_of_which_something_trains_stays() -> None:
    model = whole("llava")
    model.model.multi_modal_projector.requires_grad_(True)
    optimizer = longctx.exact_adamw(model, lr=1e-2, tokens=96, place="host")
    names = [block.spec.name for block in optimizer.stream.blocks if block.streams]
    assert "layer 0" in names and TOWER not in names


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_embeddings_that_are_to_have_gradients_keep_none_of_it(kind) -> None:
    """Trainer has them so for checkpoints with adapters: in towers, too."""
    model = adapted(kind)
    usual = copy.deepcopy(model)
    for one in (model, usual):
        one.enable_input_require_grads()
    losses = [steps(one, place, kind)[0] for one, place in ((usual, "gpu"), (model, "host"))]
    assert losses[0] == losses[1]
    features = joint_of(model.get_base_model()).get_image_features(
        **features_of(image_batch(kind)), return_dict=True
    )
    assert not features.last_hidden_state.requires_grad


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_gradients_of_pixels_need_it_on_the_gpu(kind) -> None:
    """Layers' norms would be read in backward, and are away."""
    given = features_of(image_batch(kind))
    given["pixel_values"].requires_grad_()
    for place in ("gpu", "host"):
        model = whole(kind)
        optimizer = longctx.exact_adamw(model, lr=1e-2, tokens=96, place=place)
        if of_towers(optimizer).streams:
            with pytest.raises(UserError, match="gradients of pixels.*keep them on the GPU"):
                joint_of(model).get_image_features(**given)
        else:
            found = joint_of(model).get_image_features(**given, return_dict=True).pooler_output
            sum(x.sum() for x in found).backward()
            assert given["pixel_values"].grad.abs().sum() > 0
