"""Model FLOPs against the table of the count, and against counts by hand."""

from __future__ import annotations

import pytest
from cost_sizes import ATTENTION, LLAMA_8B, MATRICES

from longctx.cost.flops import matmul_parameters, mfu, squared_length, step_flops
from longctx.cost.sizes import Batch
from longctx.cost.table import load
from longctx.runtime.costs import StepTable


@pytest.mark.parametrize("document", [131072, 8192])
def test_model_flops_are_those_of_the_table(document: int) -> None:
    """Forward three times over, for backward's matmuls are twice forward's; the loss has its
    backward in it. Parameters of Llama-3.1-8B but its embedding's and norms'."""
    tokens, s = 131072, LLAMA_8B
    tables = StepTable.of(s, Batch(tokens, document))
    layer, loss = load(tables.kinds[0].forward), load(tables.loss.forward)
    flops = step_flops(
        parameters=s.layers * MATRICES + s.vocab * s.hidden,
        tokens=tokens,
        attended=s.layers * ATTENTION.wide * (tokens // document) * squared_length(document),
    )
    assert flops == 3 * s.layers * (layer.at("matmul") + layer.at("attention")) + loss.at("matmul")


def test_pairs_of_a_window() -> None:
    """A window of 3 in a document of 5 tokens: 1 + 2 + 3 + 3 + 3 pairs."""
    assert squared_length(5) == squared_length(5, 5) == squared_length(5, 9) == 25
    assert squared_length(5, 3) == 2 * 12 - 5 == sum(2 * min(p, 2) + 1 for p in range(5))


def test_frozen_parameters_have_no_gradient() -> None:
    assert matmul_parameters(9, 0) == 9
    assert matmul_parameters(9, 6) == 7


def test_share_of_a_peak() -> None:
    assert mfu(450.0, 3.0, 300.0) == 0.5
