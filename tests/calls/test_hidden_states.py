"""`output_hidden_states` in training: the schedule gives the last one, and nothing in its place."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate.utils.operations import convert_to_fp32
from small_model import packed_batch, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import longctx
from longctx.calls.hidden_states import NotKept
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")
LAYERS = 2
IDS = packed_batch()["input_ids"]


def pair(config: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    vanilla = AutoModelForCausalLM.from_config(config or tiny_config()).train()
    return vanilla, longctx.patch(copy.deepcopy(vanilla), **options)


def assert_same(vanilla: Any, ours: Any, loss: Any) -> None:
    """Loss and gradients."""
    found = []
    for model in (vanilla, ours):
        model.zero_grad()
        value = loss(model)
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=2e-4, atol=1e-6)


def states(model: Any, **more: Any) -> Any:
    return model(input_ids=IDS, output_hidden_states=True, **more).hidden_states


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_the_last_state_is_served(scheduled, capsys, family) -> None:
    """After the final norm, as a tensor of the graph; the tuple has its length."""
    vanilla, ours = pair(tiny_config(family), strict=True)
    assert_same(vanilla, ours, lambda model: states(model)[-1].square().mean())
    assert len(scheduled) == LAYERS and "Hugging Face's layers" not in capsys.readouterr().out
    found = ours.model(input_ids=IDS, output_hidden_states=True, use_cache=False)
    assert len(found.hidden_states) == LAYERS + 1
    assert found.hidden_states[-1] is found.last_hidden_state
    assert states(ours, return_dict=True)[LAYERS].shape == (2, 48, 64)


def test_beside_the_models_own_loss(scheduled) -> None:
    """The gradient of the states is no longer the loss' alone, which may not write over it."""
    vanilla, ours = pair(strict=True)

    def loss(model: Any) -> Tensor:
        found = model(**packed_batch(), output_hidden_states=True)
        return found.loss + found.hidden_states[-1].square().mean()

    assert_same(vanilla, ours, loss)
    assert len(scheduled) == LAYERS


@pytest.mark.parametrize("labels", [False, True])
def test_states_of_padding_are_computed(scheduled, labels) -> None:
    """Whoever reads states may read those of padding, also where the labels have none."""
    vanilla, ours = pair()
    mask = torch.ones_like(IDS)
    mask[0, 30:] = 0
    more = {"labels": IDS.masked_fill(mask == 0, -100)} if labels else {}
    assert_same(vanilla, ours, lambda m: states(m, attention_mask=mask, **more)[-1].square().mean())
    assert scheduled == [IDS.numel()] * LAYERS


def test_as_the_configuration_asks(scheduled) -> None:
    """PEFT hands on None, which asks for nothing."""
    config = tiny_config(output_hidden_states=True)
    vanilla, ours = pair(config, strict=True)
    assert_same(vanilla, ours, lambda m: m(input_ids=IDS).hidden_states[-1].square().mean())
    assert len(scheduled) == LAYERS
    for model in (vanilla, ours):
        assert model(input_ids=IDS, output_hidden_states=None).hidden_states is None
        assert model(input_ids=IDS, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("index", [-1, LAYERS, [-1]])
def test_one_state_by_its_index(scheduled, index) -> None:
    """transformers gives None in the place of the others."""
    vanilla, ours = pair(strict=True)
    found, truth = (
        m(input_ids=IDS, output_hidden_states=index).hidden_states for m in (ours, vanilla)
    )
    assert len(scheduled) == LAYERS
    assert [x is None for x in found] == [x is None for x in truth] == [True] * LAYERS + [False]
    torch.testing.assert_close(found[-1], truth[-1], rtol=1e-5, atol=1e-5)


def test_other_states_by_their_index(scheduled, capsys) -> None:
    _, ours = pair()
    found = ours(input_ids=IDS, output_hidden_states=[0, -1]).hidden_states
    assert scheduled == [] and isinstance(found[0], Tensor)
    assert "for calls with output_hidden_states" in capsys.readouterr().out


READS = {
    "shape": lambda h: h.shape,
    "a slice": lambda h: h[:, -1],
    "a product": lambda h: h * 2,
    "a product of a tensor": lambda h: torch.ones(2) * h,
    "a function": lambda h: torch.nn.functional.mse_loss(h, torch.zeros(2)),
    "a stack": lambda h: torch.stack([torch.zeros(2), h]),
    "a loop": lambda h: list(h),
    "a number": lambda h: float(h),
}


@pytest.mark.parametrize("read", READS)
def test_reading_another_state_is_one_clear_line(scheduled, read) -> None:
    _, ours = pair()
    first = states(ours)[1]
    with pytest.raises(UserError) as error:
        READS[read](first)
    assert str(error.value) == (
        "hidden_states[1] was not kept: in training the schedule gives hidden_states[-1] alone; "
        "for the others call model.eval() or longctx.unpatch(model) first"
    )
    assert len(scheduled) == LAYERS


def test_what_hands_a_tuple_on_does_not_stumble() -> None:
    """accelerate's autocast and copies go through all elements, and a display shows them."""
    _, ours = pair()
    found = ours(input_ids=IDS, output_hidden_states=True)
    for passed in (convert_to_fp32(found), copy.copy(found)):
        assert isinstance(passed.hidden_states[0], NotKept)
        assert torch.equal(passed.hidden_states[-1], found.hidden_states[-1])
    assert "hidden_states[0]" in repr(found.hidden_states[0])
    again = pickle.loads(pickle.dumps(copy.deepcopy(found.hidden_states[:-1])))
    with pytest.raises(UserError, match=r"hidden_states\[1\] was not kept"):
        again[1].mean()


def test_evaluation_has_all_states(scheduled, capsys) -> None:
    """By Hugging Face's layers, whose hooks stay and are passed by."""
    vanilla, ours = (model.eval() for model in pair())
    of_both = (states(model, use_cache=False) for model in (ours, vanilla))
    for found, truth in zip(*of_both, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    assert scheduled == [] and "calls with output_hidden_states" in capsys.readouterr().out
    ours.train()
    assert states(ours)[-1].requires_grad and len(scheduled) == LAYERS
    longctx.unpatch(ours)
    assert isinstance(states(ours)[0], Tensor)


def test_a_classifier(scheduled) -> None:
    config = tiny_config(num_labels=3)
    torch.manual_seed(0)
    vanilla = AutoModelForTokenClassification.from_config(config).train()
    ours = longctx.patch(copy.deepcopy(vanilla), strict=True)
    assert_same(vanilla, ours, lambda m: states(m)[-1].square().mean())
    assert len(scheduled) == LAYERS
