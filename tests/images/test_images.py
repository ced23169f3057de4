"""Batches with images: the language model runs the schedule, with the tower's features in its row.

Losses and all gradients, of the tower, of the projector and of the text, are held to the rule of
tests/exactness.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_layer import (
    DEVICE,
    REPEATABLE,
    assert_trains_exactly,
    cast,
    every_kth,
    gradients,
    truth_of,
)
from small_vision import (
    DENSE,
    FEW,
    IN_TURNS,
    KINDS,
    image_batch,
    packed,
    vision_model,
    with_gradients_,
)
from torch import Tensor

import longctx
from longctx.calls.positions import rows_of
from longctx.cost.kept import Keep
from longctx.errors import UserError
from longctx.runtime.runtime import patched_part

pytestmark = pytest.mark.usefixtures("reference_kernels")
QWENS = [kind for kind in KINDS if kind.startswith("qwen")]
ROWS: list[Any] = [[[5]], [[3, 25], [20]], [[4, 20], []]]
"""One image; two, and a row of one; two in a row, and a row of none."""


def on_device(inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in inputs.items()}


def trained(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose tower trains."""
    return with_gradients_(cast(vision_model(kind).to(DEVICE), dtype), kind)


def trio(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """(truth, naive, ours) with the same weights."""
    naive = trained(kind, dtype)
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    return truth_of(naive, dtype), naive, ours


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_images_are_exact(kind) -> None:
    found = [image_batch(kind, rows, seed=seed) for seed, rows in enumerate(ROWS)]
    assert_trains_exactly(trio(kind), *map(on_device, found))


@pytest.mark.parametrize("kind", DENSE)
def test_in_16_bits(kind) -> None:
    found = [on_device(image_batch(kind, [[5, 30], [9]], seed=seed)) for seed in range(8)]
    for inputs in found:
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    assert_trains_exactly(trio(kind, torch.bfloat16), *found)


@pytest.mark.parametrize("rows", [[[], []], [[5], [9]]], ids=["text", "images"])
def test_the_auxiliary_loss_of_experts(rows) -> None:
    models = trio("qwen3_vl_moe")
    for model in models:
        model.config.text_config.router_aux_loss_coef = 0.5
        model.model.visual.requires_grad_(False)
    inputs = on_device(image_batch("qwen3_vl_moe", rows)) | {"output_router_logits": True}
    assert_trains_exactly(models, inputs)
    found = [model(**inputs).aux_loss for model in models]
    torch.testing.assert_close(found[2], found[0].float())


@pytest.mark.parametrize("kind", FEW)
def test_padding_beside_images(kind) -> None:
    found = []
    for seed, side in enumerate(2 * ["right", "left"]):
        inputs = image_batch(kind, [[20], [24]], seed=seed)
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, slice(41, None) if side == "right" else slice(7)] = 0
        labels = inputs["labels"].masked_fill(mask == 0, -100)
        labels[0, 7] = -100  # where padding is on the left, its last token would predict this one
        found.append(on_device(inputs | {"attention_mask": mask, "labels": labels}))
    assert_trains_exactly(trio(kind), *found)


@pytest.mark.parametrize("kind", FEW)
def test_packed_documents_are_those_of_rows_of_their_own(kind) -> None:
    """In the middle one is no image. Each image's positions go on from its own document's."""
    model = longctx.patch(trained(kind), strict=True)
    rows = [image_batch(kind, [s], n, seed=n) for s, n in (([5], 48), ([], 31), ([2, 22], 40))]
    together = packed(model, rows)
    loss, found = gradients(model, on_device(together))
    summed: dict[str, Tensor] = {}
    total = together["labels"].ne(-100).sum()
    whole = loss.detach() * 0
    for row in rows:
        labels = row["labels"].clone()
        labels[:, 0] = -100  # as in the packed row
        share = labels.ne(-100).sum() / total
        loss_alone, grads = gradients(model, on_device(row | {"labels": labels}))
        whole += share * loss_alone.detach()
        for name, grad in grads.items():
            if grad is not None:
                summed[name] = summed.get(name, 0) + share * grad
    torch.testing.assert_close(loss.detach(), whole, rtol=1e-6, atol=0)
    for name, grad in summed.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", QWENS)
def test_each_frequency_reads_its_row(kind) -> None:
    """Qwen2-VL and 2.5 by sections, Qwen3-VL and Qwen3.5 in turns."""
    base = vision_model(kind).model.language_model
    rope = base.config.rope_parameters["mrope_section"]
    rows = rows_of(base.rotary_emb, base.rotary_emb.inv_freq).tolist()
    sections = [row for row, count in enumerate(rope) for _ in range(count)]
    turns = [j % 3 if j < 3 * rope[j % 3] else 0 for j in range(sum(rope))]
    assert rows == (turns if kind.startswith(IN_TURNS) else sections)


LADDERS = {
    "x": (Keep(frozenset({"x"})),),
    "all on the host": (Keep(frozenset({"x", "o", "h", "q k v", "gate up"}), frozenset({"x"})),),
    "the input of every 2nd": every_kth(2, 3),
    "one input": every_kth(3, 3),
}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_no_bit_depends_on_what_is_kept(kind) -> None:
    """Qwen3-VL's first layers add features of images, also where they run forward again."""
    model = trained(kind)
    settings: dict[str, Any] = dict(tile_tokens=19, head_groups=2, attn_backend=REPEATABLE)
    inputs = on_device(image_batch(kind, [[5, 30]]))
    usual = longctx.patch(copy.deepcopy(model), keep="o", **settings, strict=True)
    loss, grads = gradients(usual, inputs)
    other = longctx.patch(copy.deepcopy(model), **settings, strict=True)
    gradients(other, inputs)
    for ladder in LADDERS:
        patched_part(other).longctx.store.ladder = LADDERS[ladder]
        again, found = gradients(other, inputs)
        assert torch.equal(loss, again), ladder
        for name, grad in grads.items():
            assert torch.equal(grad, found[name]), (ladder, name)


@pytest.mark.parametrize("kind", FEW)
def test_adapters_of_the_language_model_beside_a_frozen_tower(kind) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|down_proj)")
    naive = peft.get_peft_model(vision_model(kind).to(DEVICE), config)
    for name, parameter in naive.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    truth, ours = truth_of(naive, torch.float32), copy.deepcopy(naive)
    longctx.patch(ours, strict=True)
    assert_trains_exactly((truth, naive, ours), on_device(image_batch(kind, [[5], [9]])))


OUTPUTS = {
    "whole, with labels": lambda model, inputs: model(**inputs),
    "whole": lambda model, inputs: model(**without_labels(inputs)),
    "joint": lambda model, inputs: model.model(**without_labels(inputs)),
}
CLOSE = dict(rtol=1e-4, atol=1e-5)


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in inputs.items() if name != "labels"}


def pair(kind: str) -> tuple[Any, Any]:
    """(naive, ours), of which ours may run Hugging Face's layers."""
    naive = vision_model(kind).to(DEVICE)
    return naive, longctx.patch(copy.deepcopy(naive))


@pytest.mark.parametrize("called", OUTPUTS)
@pytest.mark.parametrize("kind", FEW)
def test_outputs_have_the_class_and_the_fields_of_hugging_faces(kind, called) -> None:
    """Features of images among them, through which a loss of one's own may train the projector, and
    what generation goes on from. In training there is no cache."""
    naive, ours = pair(kind)
    for rows in ([[], []], [[5], [9]]):
        inputs = on_device(image_batch(kind, rows)) | {"use_cache": False}
        expected, found = (OUTPUTS[called](model, inputs) for model in (naive, ours))
        assert type(found) is type(expected)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(found[name], value, **CLOSE, msg=name)
                if name != "logits":  # which have their gradient once they are read
                    assert found[name].requires_grad == value.requires_grad, name
        features = getattr(expected, "image_hidden_states", None)
        if kind.startswith("qwen"):
            expected, found = (model.model.rope_deltas for model in (naive, ours))
            assert (expected is None) == (found is None) == (rows == [[], []])
            assert expected is None or torch.equal(expected, found)
        else:
            assert (features is None) == (rows == [[], []])


@pytest.mark.parametrize("called", OUTPUTS)
@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen3_vl"])
def test_states_and_attentions_beside_images(kind, called, capsys) -> None:
    """As of text: in training the last state alone, in evaluation and for attentions Hugging Face's
    layers."""
    naive, ours = pair(kind)
    inputs = on_device(image_batch(kind, [[5], [9]])) | {"use_cache": False}
    asked = inputs | {"output_hidden_states": True}
    expected, found = (OUTPUTS[called](model, asked).hidden_states for model in (naive, ours))
    assert len(found) == len(expected)
    torch.testing.assert_close(found[-1], expected[-1], **CLOSE)
    with pytest.raises(UserError, match=r"hidden_states\[0\] was not kept"):
        found[0].sum()
    assert "Hugging Face's layers" not in capsys.readouterr().out
    for model in (naive, ours):
        model.eval().set_attn_implementation("eager")
    asked["output_attentions"] = True
    with torch.no_grad():
        expected, found = (OUTPUTS[called](model, asked) for model in (naive, ours))
    assert "Hugging Face's layers run for calls with output_" in capsys.readouterr().out
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name]) >= 3
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_hugging_faces_mixers_take_a_document_with_an_image_and_no_second_one() -> None:
    """They run for the sake of a hook."""
    naive, ours = pair("qwen3_5")
    ours.model.language_model.layers[0].mlp.register_forward_hook(lambda *a: None)
    first, second = (image_batch("qwen3_5", [[5]], seed=seed) for seed in range(2))
    with torch.no_grad():
        expected, found = (model(**on_device(first)).loss for model in (naive, ours))
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match="would join the documents of a packed row"):
        ours(**on_device(packed(ours, [first, second])))
