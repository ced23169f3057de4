"""The cost of Hugging Face's layers and of Liger-Kernel's, with checkpointing by layer: forward
keeps x, and backward recomputes the layer.

A layer with an MLP is counted from what Llama-3.1-8B's took (`PEERS`). One with experts is counted
element by element, from the code of transformers 5.17 and 5.23 and of Liger-Kernel 0.8.5
(`Counted`). transformers' `grouped_mm_experts_forward` gathers the inputs of all slots, and keeps
these, gate and up, silu, their product and what a slot gives, 2 D + 4 I elements a slot; backward
has three gradients of D beside them. Its kernels that only read and write reach the same share of
the rate of copies as those of Llama-3.1-8B's layers.

Two layers of Qwen3-30B-A3B at 32768 and 131072 tokens need what is counted within 1%, and take as
long within 3% (h100_experts_layer.json). Liger-Kernel's experts were not measured.

T tokens, D hidden size, F intermediate size; I features of an expert, k experts for each token, k T
slots. The rate of matmuls includes the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from longctx.cost.dims import LayerKind, MeasuredLayer, Spent
from longctx.cost.fitted import DEQUANTISE, PEERS
from longctx.cost.rates import SECONDS
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work
from longctx.head.loss import loss_cost
from longctx.layer.specs.attention_sizes import attention_flops
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mlp_spec import MlpSpec


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Elements a token of a layer with experts. Each pair has those in a width of the layer that
    are held when the experts' backward has most, and those that forward reads and writes."""

    stream: tuple[float, float]
    """In D: two norms and two sums."""
    heads: tuple[float, float]
    """In columns of q and k: q, k, v and o, and RoPE."""
    head_norms: tuple[float, float]
    """In the same columns, if q and k have norms."""
    slots: tuple[float, float]
    """In k D."""
    features: tuple[float, float]
    """In k I."""
    shared: tuple[float, float]
    """In the features of a shared expert."""
    in_forward: tuple[float, float]
    """In k D and k I: held when the experts' forward has most."""
    of_weights: tuple[float, float] = (0, 0)
    """In k D and k I: held for the gradients of experts' weights alone."""
    wide: tuple[float, float] = (0, 0)
    """In k D, besides, if routing weights are in fp32, and what they multiply is from then on."""
    always_gradients: bool = False
    """Whether the gradients of frozen experts are made, too."""


COUNTED = {
    "vanilla": Counted(
        stream=(8, 42),
        heads=(2, 10),
        head_norms=(3, 18),
        slots=(5, 7),
        features=(4, 5),
        shared=(4, 5),
        in_forward=(4, 0),
        of_weights=(1, 1),
        wide=(4, 4),
    ),
    "liger": Counted(
        stream=(4, 10),
        heads=(2, 2),
        head_norms=(1, 2),
        slots=(1, 1),
        features=(5, 0),
        shared=(3, 3),
        in_forward=(1, 3),
        always_gradients=True,
    ),
}
LLAMA_COLUMNS = 1.25
"""The columns of q and k in D, of Llama-3.1-8B, whose layers `PEERS` has."""


def peer_layer_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The rows of a layer that was measured, or has an MLP or experts."""
    if kind.measured is not None:
        return _as_measured(s, kind.measured, batch)
    attends, experts = kind.one(AttentionSpec), kind.part(ExpertsSpec)
    if experts is not None:
        return _with_experts(s, _Mixture(kind, attends, experts), batch)
    return _with_mlp(s, kind, attends, kind.one(MlpSpec), batch)


def _as_measured(s: Sizes, layer: MeasuredLayer, batch: Batch) -> Table:
    """A layer of --class_type any, whose input comes up while the layer above runs (seam.py)."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    of = tokens, batch.document

    def work(spent: Spent) -> tuple[Work, ...]:
        return (Work(name="a layer", flops=spent.seconds_of(*of), rate=SECONDS),)

    return Table(
        forward=work(layer.forward),
        backward=work(layer.backward),
        keepables=(Keepable(name="x", nbytes=unit, always=True),),
        buffers=(
            Buffer(name="a layer", nbytes=layer.forward.nbytes_of(*of), during="layer forward"),
            Buffer(name="a layer", nbytes=layer.backward.nbytes_of(*of), during="layer backward"),
            Buffer(name=_COMING, nbytes=unit, during="layer backward"),
        ),
    )


_COMING = "x of the layer below, on its way"


def _with_mlp(
    s: Sizes, kind: LayerKind, attends: AttentionSpec, mlp: MlpSpec, batch: Batch
) -> Table:
    peer, tokens, unit = PEERS[s.class_type], batch.tokens, s.unit(batch.tokens)

    def nbytes(multiples: tuple[float, float]) -> int:
        elements = multiples[0] * s.hidden + multiples[1] * mlp.width
        return int(tokens * elements) * s.itemsize

    matrices = (2 + mlp.gated) * mlp.width + 2 * attends.wide + 2 * attends.narrow
    matrices += attends.wide * attends.output_gate
    matmuls = 2 * tokens * s.hidden * matrices
    forward = (
        Work(name="matmuls", flops=matmuls, nbytes=nbytes(peer.moves)),
        Work(name="attention", flops=attention_flops(s, attends, batch), rate="attention"),
    )
    layer = nbytes(peer.works)
    coming = unit if s.class_type == "any" else 0  # any_model/seam.py
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
            Buffer(name=_COMING, nbytes=coming, during="layer backward"),
        ),
    )


class _Mixture(NamedTuple):
    """A layer with experts."""

    kind: LayerKind
    attends: AttentionSpec
    experts: ExpertsSpec

    @property
    def makes(self) -> bool:
        """Whether gradients of experts' weights are made: they are trained, or a copy of them is
        that has an adapter folded into it."""
        return self.kind.trains_weights or self.kind.folded > 0


def _with_experts(s: Sizes, m: _Mixture, batch: Batch) -> Table:
    fused = s.class_type == "liger" and not m.experts.biases  # it leaves gpt-oss's as they are
    name = "liger" if fused else "vanilla"
    peer, count, tokens = PEERS[name], COUNTED[name], batch.tokens
    slow = peer.moves[0] / (count.stream[1] + LLAMA_COLUMNS * count.heads[1])
    moved = slow * tokens * _elements(count, m, s.hidden, 1) * s.itemsize
    columns = 2 * m.attends.wide + 2 * m.attends.narrow + m.attends.wide * m.attends.output_gate
    columns += m.experts.experts + 3 * m.experts.shared_width
    matmuls = 2 * tokens * s.hidden * columns
    experts = 6 * tokens * m.experts.chosen * s.hidden * m.experts.width
    makes = m.makes or count.always_gradients
    forward = (
        Work(name="matmuls", flops=matmuls, nbytes=moved),
        Work(name="experts", flops=experts, rate="grouped"),
        Work(name="attention", flops=attention_flops(s, m.attends, batch), rate="attention"),
    )
    return Table(
        forward=forward,
        backward=(
            *forward,
            Work(
                name="gradients",
                flops=(1 + m.kind.trains_weights) * matmuls,
                nbytes=peer.more * moved,
            ),
            Work(name="gradients of experts", flops=(1 + makes) * experts, rate="grouped"),
            Work(name="attention", flops=2.5 * forward[2].flops, rate="attention backward"),
        ),
        keepables=(Keepable(name="x", nbytes=s.unit(tokens), always=True),),
        buffers=_buffers_with_experts(s, m, batch, count),
    )


def _buffers_with_experts(
    s: Sizes, m: _Mixture, batch: Batch, count: Counted
) -> tuple[Buffer, ...]:
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    held = tokens * _elements(count, m, s.hidden, 0)
    slot = count.in_forward[0] * s.hidden + count.in_forward[1] * m.experts.width
    slot += m.experts.fp32_weights * count.wide[0] * s.hidden
    of_slots = int(tokens * m.experts.chosen * slot) * s.itemsize
    stays = m.makes  # and is counted as a gradient or as a copy
    if not stays:
        spared = count.of_weights[0] * s.hidden + count.of_weights[1] * m.experts.width
        held -= tokens * m.experts.chosen * spared
    dropped = (
        3 * s.hidden * m.experts.width * m.experts.experts * count.always_gradients * (not stays)
    )
    return (
        Buffer(name="a layer", nbytes=4 * unit + of_slots, during="layer forward"),
        Buffer(name="a layer", nbytes=unit + int(held) * s.itemsize, during="layer backward"),
        Buffer(
            name="gradients of frozen experts",
            nbytes=dropped * s.itemsize,
            during="layer backward",
        ),
    )


def _elements(count: Counted, m: _Mixture, hidden: int, which: int) -> float:
    """Returns the elements a token that are held, or that forward reads and writes."""
    heads = count.heads[which] + ("q_norm" in m.attends.norms) * count.head_norms[which]
    slot = (count.slots[which] + m.experts.fp32_weights * count.wide[which]) * hidden
    slot += count.features[which] * m.experts.width
    stream = count.stream[which] * hidden + heads * (m.attends.wide + m.attends.narrow)
    return stream + m.experts.chosen * slot + count.shared[which] * m.experts.shared_width


def peer_adapters_cost(s: Sizes, kind: LayerKind, batch: Batch) -> Table:
    """The cost of PEFT's adapters and of bitsandbytes' weights in a layer, by count: no row was
    measured. Each adapted map makes its own fp32 copy of x, which waits for backward, with
    dropout the mask too. u B' is made in fp32, scaled, added to y and rounded: 28 bytes an element.
    A weight of 4 bits is made dense alone, for as long as its matmul runs.

    The adapters of a stack of experts are folded into a copy of the stack, in forward and when it
    is recomputed, and the gradients of A and B come from that of the whole copy."""
    adapted = kind.adapted
    inputs, outputs = (batch.tokens * n for n in (adapted.inputs, adapted.outputs))
    saved = int((4 + kind.drops) * inputs)
    flops = 2 * batch.tokens * adapted.parameters
    width = max(part.width for part in (kind.part(MlpSpec), kind.part(ExpertsSpec)) if part)
    dense = s.hidden * width * s.itemsize if kind.dense_bytes else 0
    folds, copies = 2 * kind.rank * kind.folded, kind.folded * s.itemsize
    works = (
        Work(name="adapters", flops=flops + folds, nbytes=10 * inputs + 28 * outputs + 2 * copies),
        Work(name="quantised weights made dense", nbytes=int(DEQUANTISE * kind.dense_bytes)),
    )
    return Table(
        forward=works,
        backward=(
            *works,
            Work(
                name="adapters",
                flops=2 * (flops + folds),
                nbytes=10 * (inputs + outputs) + 2 * copies,
            ),
        ),
        buffers=(
            Buffer(name="copies of experts", nbytes=copies, during="layer forward"),
            Buffer(name="copies of experts", nbytes=2 * copies, during="layer backward"),
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
