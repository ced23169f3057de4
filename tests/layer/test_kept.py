"""A part that keeps one tensor more touches its own file only: nothing else names what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_layer import PACKED, batch, gradients, trio
from torch import Tensor

from longctx.cost.kept import Keep
from longctx.layer.parts.mlp import MLP
from longctx.layer.parts.table import PARTS
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.runtime.runtime import Adopted

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Routed(MLP):
    """An MLP that notes for each token what it was given, as experts keep a router's choice."""

    seen: list[bool] = []

    def __init__(self, p: Any, kept: Any = None) -> None:
        super().__init__(p, kept or {})
        self._route = None if kept is None else kept["route"]

    def keep(self, x: Tensor) -> None:
        super().keep(x)
        if self._pass.keeps("route"):
            self._route = x.new_empty(len(x), 1)
            self._pass.keep("route", {"route": self._route}, of_tiles=True)

    def forward(self, h: Tensor, tile: slice, **rest: Any) -> None:
        super().forward(h, tile, **rest)
        if self._route is not None:
            self._route[tile] = h.sum(1, keepdim=True)

    def backward(self, dy: Tensor, h: Tensor, tile: slice, **rest: Any) -> None:
        assert self._route is not None
        self.seen.append(torch.equal(self._route[tile], h.sum(1, keepdim=True)))
        super().backward(dy, h, tile, **rest)


@pytest.mark.parametrize(
    "hosted", [set(), {"route"}, {"x", "o", "route"}], ids=["nothing", "it alone", "all"]
)
def test_a_second_tensor_that_must_be_kept_comes_back(hosted, monkeypatch) -> None:
    monkeypatch.setitem(PARTS, MlpSpec, Routed)
    monkeypatch.setattr(Routed, "seen", [])
    ours = trio(torch.float32, dict(tile_tokens=31))[2]
    inputs = batch(PACKED)
    with torch.no_grad():
        expected = ours(**inputs).loss
    ours.longctx.adopted = Adopted(tokens=2**20)  # the ladder stays
    ours.longctx.store.reserve((Keep(frozenset({"x", "o", "route"}), frozenset(hosted)),), 2**21)
    loss, _ = gradients(ours, inputs)
    assert loss == expected
    assert Routed.seen == 3 * 5 * [True]  # layers and tiles
    assert ours.longctx.store.tensors_on_gpu() == []
