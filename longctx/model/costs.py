"""The cost of a step: a table for each kind of layers, of the rows (longctx/cost/table.py) that
its parts declare, and those of the loss, the embedding and the update.

The layer's parts and the loss declare their rows where they compute. This file has the rows of
torch's embedding, of the update, and of Hugging Face's and Liger-Kernel's layers, and the sum.

T tokens, D hidden size, F intermediate size. The rate of matmuls includes the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import DEQUANTISE, PEERS
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, joined
from longctx.head.log_probs import scoring_cost
from longctx.head.loss import loss_cost
from longctx.layer.adapters.dora import dora_cost
from longctx.layer.adapters.lora import adapters_cost
from longctx.layer.linear import dense_cost
from longctx.layer.parts.attention import attention_flops

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


# --- Hugging Face's layers and Liger-Kernel's, with checkpointing by layer ---------------------


def peer_layer_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of a layer with checkpointing: forward keeps x, backward recomputes the layer."""
    peer, tokens, unit = PEERS[s.class_type], batch.tokens, s.unit(batch.tokens)

    def nbytes(multiples: tuple[float, float]) -> int:
        elements = multiples[0] * s.hidden + multiples[1] * kind.intermediate
        return int(tokens * elements) * s.itemsize

    matrices = (2 + kind.gated) * kind.intermediate + 2 * kind.wide + 2 * kind.narrow
    matrices += kind.wide * kind.output_gate
    matmuls = 2 * tokens * s.hidden * matrices
    forward = (
        Work(name="matmuls", flops=matmuls, nbytes=nbytes(peer.moves)),
        Work(name="attention", flops=attention_flops(s, kind, batch), rate="attention"),
    )
    layer = nbytes(peer.works)
    return Table(
        forward=forward,
        backward=(
            *forward,
            Work(
                name="gradients",
                flops=(1 + kind.trains_weights) * matmuls,
                nbytes=peer.more * nbytes(peer.moves),
            ),
            Work(name="attention", flops=2.5 * forward[1].flops, rate="attention backward"),
        ),
        keepables=(Keepable(name="x", nbytes=unit, always=True),),
        buffers=(
            Buffer(name="a layer", nbytes=layer // 2, during="layer forward"),
            Buffer(name="a layer", nbytes=layer - unit, during="layer backward"),
        ),
    )


def peer_adapters_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of PEFT's adapters and of bitsandbytes' weights in a layer, by count: no row was
    measured. Each adapted map makes its own fp32 copy of x, which waits for backward, with
    dropout the mask too. u B' is made in fp32, scaled, added to y and rounded: 28 bytes an element.
    A weight of 4 bits is made dense alone, for as long as its matmul runs."""
    adapted = kind.adapted
    inputs, outputs = (batch.tokens * n for n in (adapted.inputs, adapted.outputs))
    saved = int((4 + kind.drops) * inputs)
    flops = 2 * batch.tokens * adapted.parameters
    dense = s.hidden * kind.intermediate * s.itemsize if kind.dense_bytes else 0
    works = (
        Work(name="adapters", flops=flops, nbytes=10 * inputs + 28 * outputs),
        Work(name="quantised weights made dense", nbytes=int(DEQUANTISE * kind.dense_bytes)),
    )
    return Table(
        forward=works,
        backward=(*works, Work(name="adapters", flops=2 * flops, nbytes=10 * (inputs + outputs))),
        buffers=(
            Buffer(name="inputs of adapters, fp32", nbytes=saved, during="layer backward"),
            Buffer(name="a dense weight", nbytes=dense, during="layer forward"),
            Buffer(name="a dense weight", nbytes=dense, during="layer backward"),
        ),
    )


def peer_loss_cost(s: Sizes, batch: Batch) -> Table:
    """The cost of a loss that holds all logits with their gradients in bf16 and fp32, or of
    Liger-Kernel's fused loss, which computes in pieces (h200_kernels.json)."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    buffers = {"logits": 12 * tokens * s.vocab + unit}
    if s.class_type == "liger":
        head = s.hidden * s.vocab * s.itemsize * s.trains_head
        buffers = {"lm_head's gradient": head, "logits": 2 * unit}
    return Table(
        forward=loss_cost(s, batch).forward,
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )


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
        blocks = [block.cost(s, kind, batch) for block in kind.blocks]
        adapters = [adapters_cost(s, kind, batch), dora_cost(s, kind, batch)]
        return joined([*blocks, *adapters, dense_cost(kind)])

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
