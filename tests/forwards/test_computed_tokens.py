"""Which tokens the layers compute, and how hidden states go back to their places."""

from __future__ import annotations

import pytest
import torch
from small_model import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import longctx
from longctx.calls.call import Call
from longctx.calls.positions import Positions
from longctx.forwards.computed_tokens import ComputedTokens
from longctx.forwards.covered import Covered

X = torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 3)
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])


@pytest.fixture(scope="module")
def base():
    model = AutoModelForCausalLM.from_config(tiny_config())
    return longctx.patch(model, share_prefixes=True).model.train()


def tokens_of(base, mask: Tensor | None = None, positions: Tensor | None = None) -> ComputedTokens:
    ids = torch.arange(8).view(2, 4)
    call = Call.of(base, ids, mask, positions, None, None, False, others={})
    return ComputedTokens.of(base, call, Covered(Positions(positions, positions), None, False), X)


def test_every_token_of_a_row_without_padding(base) -> None:
    tokens = tokens_of(base)
    assert tokens.computed is None and tokens.documents.lengths == (4, 4)
    assert tokens.rope.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert torch.equal(tokens.numbers, torch.arange(8))
    assert torch.equal(tokens.spread(tokens.taken(X)).view(X.shape), X)


def test_padding_is_left_out_and_comes_back_as_zeros(base) -> None:
    tokens = tokens_of(base, MASK)
    assert tokens.documents.lengths == (4, 2) and tokens.rope.tolist() == [0, 1, 2, 3, 1, 2]
    assert tokens.numbers.tolist() == [0, 1, 2, 3, 5, 6] and tokens.total == 8
    assert torch.equal(tokens.spread(tokens.taken(X)).view(X.shape), X * MASK[..., None])


def test_positions_tell_documents_of_a_packed_row_apart(base) -> None:
    tokens = tokens_of(base, positions=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]]))
    assert tokens.documents.lengths == (2, 2, 3, 1)


def test_features_of_images_are_added_to_tokens_that_are_computed(base) -> None:
    of_images = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    features = torch.arange(4.0)[:, None]
    (added,) = tokens_of(base, MASK).added((of_images, [features]))
    assert added.where.tolist() == [2, 3, 4] and added.features[:, 0].tolist() == [0, 1, 3]
    assert [*tokens_of(base).added(None)] == []
