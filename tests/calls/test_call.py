"""What a call of a model says, read once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_model import tiny_config
from small_vision import vision_model
from torch import nn
from transformers import AutoModelForCausalLM

from longctx.calls.call import DEEPSTACK, Call
from longctx.calls.caller import Caller
from longctx.calls.labels import Labels
from longctx.constants import IGNORE_INDEX
from longctx.families.vision import SeenBothWays

IDS = torch.arange(8).view(2, 4)
MASK = torch.ones_like(IDS)


def read(model: nn.Module, mask=MASK, use_cache=None, said=None, **others) -> Call:
    """Returns the call of `model` with IDS."""
    positional = IDS, mask, None, None, None, use_cache
    return Call.of(model, *positional, others=others, **(said or {}))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config(tiny_config()).train()


def test_a_call_cannot_be_changed(model) -> None:
    call = read(model)
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.use_cache = True
    assert call.without_cache().use_cache is False and call.use_cache is None
    asked = read(model, use_cache=True)
    assert asked.without_cache() is asked


def test_hugging_face_gets_every_argument_as_it_was_given(model) -> None:
    others = dict(cu_seq_lens_q=torch.tensor([0, 8]), unknown=None)
    found = read(model, **others).arguments()
    assert found.pop("input_ids") is IDS and found.pop("attention_mask") is MASK
    none = ("position_ids", "past_key_values", "inputs_embeds", "use_cache")
    assert found == dict.fromkeys(none) | others


def test_where_documents_begin_and_which_experts_are_chosen(model) -> None:
    bounds, parents, ids = torch.tensor([0, 4, 8]), [-1, 0], torch.zeros(1, 2, 4, 2)
    call = read(model, None, cu_seq_lens_q=bounds, parents=parents, expert_ids=ids)
    assert call.bounds is bounds and call.parents is parents and call.expert_ids is ids
    plain = read(model)
    assert plain.bounds is plain.parents is plain.expert_ids is None


def test_a_call_trains_with_a_gradient_in_training_alone(model) -> None:
    assert read(model).trains
    with torch.no_grad():
        assert not read(model).trains
    model.eval()
    assert not read(model).trains
    model.train()


def test_hidden_states_are_those_of_the_argument_or_else_of_the_configuration(model) -> None:
    assert read(model).states is None
    assert read(model, output_hidden_states=True).states is True
    model.config.output_hidden_states = True
    try:
        assert read(model).states is True
        assert read(model, output_hidden_states=False).states is None
    finally:
        model.config.output_hidden_states = False


def test_the_mask_of_a_call_with_images_that_are_seen_both_ways(model) -> None:
    types = torch.zeros_like(IDS)
    call = read(model, SeenBothWays(MASK, types))
    assert call.attention_mask is MASK and call.image_types is types
    assert read(model).seen_both_ways is read(model).image_types is None


def test_features_of_images_count_for_models_that_add_them_alone(model) -> None:
    given = dict(zip(DEEPSTACK, (IDS > 3, [torch.ones(4, 8)]), strict=True))
    call = read(model.model, **given)
    assert call.deepstack(model.model) is None  # Llama's forward has no such argument
    base = vision_model("qwen3_vl").model.language_model
    assert read(base, **given).deepstack(base) == (given[DEEPSTACK[0]], given[DEEPSTACK[1]])
    assert read(base, **given | {DEEPSTACK[1]: None}).deepstack(base) is None


def test_a_call_tells_its_own_caller_alone(model) -> None:
    caller = Caller(averages=True)
    assert read(model, said=dict(caller=caller)).caller is caller
    first, second = read(model).caller, read(model).caller
    assert first is not second and not first.averages


def test_labels_are_shifted_by_one_token_unless_they_are_already() -> None:
    assert Labels().targets(None) is None
    labels = torch.tensor([[5, 6, 7]])
    assert Labels(labels=labels).targets(None).tolist() == [[6, 7, IGNORE_INDEX]]
    shifted = torch.tensor([[1, 2, 3]])
    assert Labels(labels=labels, shift_labels=shifted).targets(None) is shifted


def test_labels_with_another_ignored_number() -> None:
    found = Labels(labels=torch.tensor([[5, -1, 7]]), ignore_index=-1).targets(None)
    assert found.tolist() == [[IGNORE_INDEX, 7, IGNORE_INDEX]]


def test_labels_say_to_hugging_face_what_they_were_told_alone() -> None:
    labels = torch.tensor([[5, 6, 7]])
    assert Labels(labels=labels).arguments() == dict(labels=labels, logits_to_keep=0)
    found = Labels(shift_labels=labels, ignore_index=-1, num_items=3, logits_to_keep=2).arguments()
    assert found == dict(
        shift_labels=labels, ignore_index=-1, num_items_in_batch=3, labels=None, logits_to_keep=2
    )


@pytest.mark.parametrize("kept, wants", [(0, False), (1, True), (torch.tensor([0]), True)])
def test_logits_of_some_tokens(kept, wants: bool) -> None:
    assert Labels(logits_to_keep=kept).wants_logits is wants
