"""The cost of a step: a table for each kind of layers, of the rows (longctx/cost/table.py) that
its parts declare, and those of the loss, the embedding and the update.

The specs of a layer's parts and the loss declare their rows, and peer_costs.py has those of
Hugging Face's and Liger-Kernel's layers. This file has the rows of torch's embedding and of the
update, and the sum. The rate of matmuls includes the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Table, Work, joined
from longctx.head.log_probs import scoring_cost
from longctx.head.loss import loss_cost
from longctx.layer import segments as cutting
from longctx.layer.adapters.dora import dora_cost
from longctx.layer.adapters.lora import adapters_cost
from longctx.layer.dense_experts import chunks_cost
from longctx.layer.linear import dense_cost
from longctx.layer.specs.layer_cost import parts_cost
from longctx.runtime.peer_costs import peer_adapters_cost, peer_layer_cost, peer_loss_cost

# --- the embedding and the update -----------------------------------------------------------


def embedding_cost(s: Sizes, batch: Batch) -> Table:
    """The buffers while the embedding's gradient, the last one, is computed: torch sums the rows of
    each token in fp32, in segments of 10 (embedding_dense_backward)."""
    segments = batch.tokens // 10 + min(batch.tokens, s.vocab)
    buffers = {"its sums, fp32": 4 * segments * s.hidden, "dx": s.unit(batch.tokens)}
    return Table(
        buffers=tuple(Buffer(name=k, nbytes=n, during="embedding") for k, n in buffers.items())
    )


def update_cost(s: Sizes) -> Table:
    """The cost of the update. Exact AdamW reads 14 and writes 12 bytes per parameter, and the norm
    reads 2. torch's AdamW, whose states are bf16, reads 8 and writes 6, and clipping reads and
    writes each gradient once more."""
    return Table(forward=(Work(name="update", nbytes=(28 if s.exact else 20) * s.trained),))


# --- one table a model and cut -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTable:
    """The whole cost of a step on the GPU, except for the place of its optimizer states."""

    sizes: Sizes
    batch: Batch

    @classmethod
    def of(cls, sizes: Sizes, batch: Batch) -> StepTable:
        return cls(sizes=sizes, batch=batch)

    @cached_property
    def kinds(self) -> tuple[Table, ...]:
        """The table of a layer of each kind."""
        return tuple(self._of(kind) for kind in self.sizes.kinds)

    def _of(self, kind: LayerKind) -> Table:
        s, batch = self.sizes, self.batch
        if s.class_type != "custom":
            return peer_layer_cost(s, kind, batch) + peer_adapters_cost(s, kind, batch)
        adapters = [adapters_cost(s, kind, batch), dora_cost(s, kind, batch)]
        of_weights = dense_cost(kind), chunks_cost(s, kind, batch)
        return joined([*parts_cost(s, kind, batch), *adapters, *of_weights])

    @cached_property
    def layers(self) -> tuple[Table, ...]:
        """The table of each layer."""
        return tuple(self.kinds[kind] for kind in self.sizes.of_layer)

    @cached_property
    def loss(self) -> Table:
        if self.batch.scored is not None:
            return scoring_cost(self.sizes, self.batch)
        count = loss_cost if self.sizes.chunks_loss else peer_loss_cost
        return count(self.sizes, self.batch)

    @cached_property
    def embedding(self) -> Table:
        return embedding_cost(self.sizes, self.batch)

    @cached_property
    def update(self) -> Table:
        return update_cost(self.sizes)

    @property
    def unit(self) -> int:
        return self.sizes.unit(self.batch.tokens)

    @property
    def tiles(self) -> int:
        return -(-self.batch.tokens // self.sizes.cut(self.batch.tokens).tile_tokens)

    @property
    def segments(self) -> int:
        return -(-self.batch.tokens // cutting.SEGMENT_TOKENS)
