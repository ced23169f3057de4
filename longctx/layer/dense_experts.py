"""Packed weights of experts that are dense a few experts at a time, because all of a layer's would
take much of the GPU: 5.9 GiB of gpt-oss-120b's, whose files have 1.6 GiB of a layer.

Each grouped matmul makes the experts of a chunk dense, computes their slots, and frees them
(`grouped_mm(first=...)`), in every tile of tokens anew. The results have the bits of a matmul with
all experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import DEQUANTISE
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work
from longctx.layer.packed_weights import packed_state

STACKS = ("experts_in", "experts_out")
"""The names of the weights of all experts: of gate and up, and of down."""
WHOLE_BYTES = 4 * 2**30
"""The most bytes that a layer's experts take while all of them are dense at once: once in each
direction, and not in each tile."""
CHUNK_BYTES = 2**30
"""The most bytes of a chunk, unless one expert has more."""


def by_chunks(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the bytes of a layer's dense experts, by their names in STACKS, if they are dense by
    chunks. `weights` are the layer's, as they lie."""
    states = {name: packed_state(weights.get(name)) for name in STACKS}
    nbytes = {
        name: math.prod(state.shape) * state.dtype.itemsize
        for name, state in states.items()
        if state is not None and state.by_expert
    }
    return nbytes if sum(nbytes.values()) > WHOLE_BYTES else {}


@dataclass(frozen=True)
class PackedExperts:
    """Packed weights of experts, (E, O, K), in the place of dense ones."""

    packed: Tensor
    dtype: torch.dtype
    """The dtype in which the weights are multiplied."""
    transposed: bool
    """Whether the parameter's dense weight is (E, K, O)."""

    @property
    def shape(self) -> tuple[int, int, int]:
        state = packed_state(self.packed)
        assert state is not None
        experts, outputs, inputs = state.shape
        return (experts, inputs, outputs) if self.transposed else (experts, outputs, inputs)

    def __len__(self) -> int:
        return self.shape[0]

    def chunks(self) -> Iterator[slice]:
        experts, outputs, inputs = self.shape
        each = max(1, CHUNK_BYTES // (outputs * inputs * self.dtype.itemsize))
        for first in range(0, experts, each):
            yield slice(first, min(first + each, experts))

    def dense(self, some: slice) -> Tensor:  # (experts, O, K)
        """Returns the dense weights of some of the experts."""
        state = packed_state(self.packed)
        assert state is not None
        made = state.of_experts(self.packed.detach(), some).to(self.dtype)
        return made.transpose(1, 2) if self.transposed else made


def chunks_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of making experts dense by chunks: in forward all of them for each tile, in backward
    gate and up twice."""
    if not kind.dense_stacks:
        return Table()
    gate_up, down = kind.dense_stacks
    tiles = -(-batch.tokens // s.cut(batch.tokens).tile_tokens)
    forward, backward = (
        Work(name="experts made dense", nbytes=int(DEQUANTISE * tiles * nbytes))
        for nbytes in (gate_up + down, 2 * gate_up + down)
    )
    largest = min(CHUNK_BYTES, max(gate_up, down))
    there = (
        Buffer(name="some experts' dense weights", nbytes=largest, during=during)
        for during in ("forward", "backward")
    )
    return Table(forward=(forward,), backward=(backward,), buffers=(*there,))
