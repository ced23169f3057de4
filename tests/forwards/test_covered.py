"""Which calls the schedule covers, and why it does not cover others."""

from __future__ import annotations

import pytest
import torch
from small_model import tiny_config
from transformers import AutoModelForCausalLM

import longctx
from longctx.calls.call import Call
from longctx.calls.caller import Caller
from longctx.errors import UserError
from longctx.forwards.covered import Covered, covered

IDS = torch.arange(8).view(2, 4)


@pytest.fixture(scope="module")
def base():
    return longctx.patch(AutoModelForCausalLM.from_config(tiny_config())).model.train()


def found(base, mask=None, positions=None, embeds=None, use_cache=False, ids=IDS, **others):
    caller = Caller(reads_padding=True)
    said = ids, mask, positions, None, embeds, use_cache
    return covered(base, Call.of(base, *said, others=others, caller=caller))


def test_a_plain_call_is_covered(base) -> None:
    call = found(base)
    assert isinstance(call, Covered) and call.padding is None and not call.asked_later
    assert call.positions == (None, None)


def test_padding_that_is_read_is_computed(base) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    call = found(base, mask)
    assert [row.real for row in call.padding.rows] == [4, 2]


@pytest.mark.parametrize(
    "said, reason",
    [
        (dict(use_cache=True), "a key/value cache"),
        (dict(is_causal=False), r"attention to later tokens \(is_causal=False\)"),
        (dict(output_attentions=True), "output_attentions"),
        (dict(embeds=torch.zeros(2, 4, 32)), "input_ids and inputs_embeds together, or neither"),
        (dict(mask=torch.ones(2, 3)), "an attention mask of another shape than the batch"),
        (dict(positions=torch.zeros(2, 2, 2, 4)), r"positions of shape \(2, 2, 2, 4\)"),
        (dict(output_router_logits=True), "output_router_logits"),
    ],
)
def test_what_keeps_a_call_from_the_schedule(base, said, reason: str) -> None:
    call = found(base, **said)
    assert isinstance(call, str)
    with pytest.raises(UserError, match=f"parents need the schedule, and this call has {reason}"):
        found(base, parents=[-1, 0], cu_seq_lens_q=torch.tensor([0, 4, 8]), **said)


def test_keywords_that_hugging_face_does_not_hear_change_nothing(base) -> None:
    assert isinstance(found(base, of_nothing=3, output_attentions=False), Covered)
