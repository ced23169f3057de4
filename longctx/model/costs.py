"""What each part of a model costs in a step: its rows of the count (longctx/cost/table.py).

T tokens, D hidden size, F intermediate size; bytes that matmuls read and write are in their rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work

# --- attention: n1 = norm(x); q, k, v = n1 W'; o = attention(q, k, v); x + o Wo' ---------------


def attention_cost(s: Sizes, batch: Batch) -> Table:
    """Of a layer's first residual block."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    tile_tokens, groups, _ = s.cut(tokens)
    n = tokens * s.itemsize
    columns = s.wide + 2 * s.narrow
    rotated = 2 * n * (s.wide + s.narrow)
    projected = Work(
        name="q k v",
        flops=2 * tokens * s.hidden * columns,
        nbytes=rotated + groups * 2 * unit,  # n1 of each head group
    )
    attended = Work(name="attention", flops=attention_flops(s, batch), rate="attention")
    output = Work(name="o", flops=2 * tokens * s.wide * s.hidden, nbytes=unit)
    sums = weight_sums(s, tokens, s.hidden * (2 * s.wide + 2 * s.narrow))
    gradients = (1 + s.trains_weights) * (projected.flops + output.flops)
    return Table(
        forward=(projected, attended, output),
        backward=(
            Work(
                name="attention",
                flops=2.5 * attended.flops,
                rate="attention backward",
                nbytes=rotated + n * (4 * s.wide + 6 * s.narrow),
            ),
            Work(name="q k v, o", flops=gradients, nbytes=6 * unit + sums),
        ),
        keepables=(
            Keepable(name="x", nbytes=unit, always=True, read_first=True),
            Keepable(
                name="o",
                nbytes=tokens * (s.wide * s.itemsize + 4 * s.heads),
                tensors=2,
                spares=(projected, attended),
                read_first=True,
                buffered=True,
            ),
            Keepable(
                name="h",
                nbytes=unit,
                spares=(Work(name="o", flops=output.flops),),
                needs=frozenset({"o"}),
                of_tiles=True,
            ),
            Keepable(
                name="q k v",
                nbytes=n * columns,
                tensors=s.kv_heads,
                spares=(projected,),
                needs=frozenset({"o"}),
            ),
        ),
        buffers=_attention_buffers(s, tokens),
    )


def _attention_buffers(s: Sizes, tokens: int) -> tuple[Buffer, ...]:
    """Forward: a head group's q, k, v. Backward: those and do; their gradients, which
    flash-attention sums in fp32, and makes before they are copied, unless it writes them in their
    places; q and k once more, if they are normed; dk and dv of all groups; the MLP's weight
    gradients, rounded."""
    groups = s.cut(tokens).head_groups
    columns = s.wide + 2 * s.narrow
    made = (s.wide + (0 if s.writes_gradients else columns)) * s.itemsize
    made += 4 * columns if s.itemsize < 4 else 0
    made += (s.wide + s.narrow) * s.itemsize if s.qk_norms else 0
    weights = s.hidden * (3 * s.intermediate + s.wide) * s.itemsize * s.trains_weights
    shared = 8 * (s.wide + s.narrow) // groups * s.itemsize if s.ranks > 1 else 0

    def back(name: str, nbytes: int, spared_by: str | None = None) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="attention backward", spared_by=spared_by)

    group = columns // groups * s.itemsize
    return (
        Buffer(name="a head group", nbytes=tokens * group, during="attention forward"),
        back("dy", s.unit(tokens)),
        back("the MLP's gradients", weights),
        back("dk, dv", tokens * 2 * s.narrow * s.itemsize),
        back("a head group", tokens * (made // groups + _adapter_bytes(s))),
        back("a head group", tokens * group, spared_by="q k v"),
        # of the group before and of the next, both ways (attention/sharded.py)
        back("exchanges", tokens * shared),
        back("a layer's dense weights", s.dense_bytes),
    )


def attention_flops(s: Sizes, batch: Batch) -> float:
    """Of one layer's forward, the mean of all: 2 H d L^2 for a document of L tokens without a
    window, since a token sees half of the others; ranks that share rows have a share each."""
    tokens, document = batch.tokens * s.ranks, batch.document
    windows = s.windows or (None,)
    squared = sum(squared_length(document, window) for window in windows)
    rest = sum(squared_length(tokens % document, window) for window in windows)
    pairs = (tokens // document * squared + rest) / len(windows)
    return 2.0 * s.wide * pairs / s.ranks


def squared_length(document: int, window: int | None) -> int:
    """Twice the pairs of tokens that attend to each other."""
    if window is None or document <= window:
        return document**2
    return window**2 + (document - window) * (2 * window - 1)


# --- the MLP: n2 = norm(h); h + (silu(n2 Wg') * (n2 Wu')) Wd' ----------------------------------


def mlp_cost(s: Sizes, batch: Batch) -> Table:
    """Of a layer's second residual block."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    gate = tokens * s.itemsize * s.intermediate
    gate_up = 4 * tokens * s.hidden * s.intermediate
    sums = weight_sums(s, tokens, 3 * s.hidden * s.intermediate)
    matmuls = gate_up + gate_up // 2
    return Table(
        forward=(
            Work(name="gate up", flops=gate_up, nbytes=2 * unit),
            Work(name="down", flops=matmuls - gate_up, nbytes=3 * gate + unit),
        ),
        backward=(
            Work(
                name="gate up, down",
                flops=(1 + s.trains_weights) * matmuls,
                nbytes=6 * unit + 6 * gate + sums,
            ),
        ),
        keepables=(
            Keepable(
                name="gate up",
                nbytes=2 * gate,
                tensors=2,
                spares=(Work(name="gate up", flops=gate_up),),
                needs=frozenset({"o", "h"}),
                of_tiles=True,
            ),
        ),
        buffers=_mlp_buffers(s, tokens),
    )


def _mlp_buffers(s: Sizes, tokens: int) -> tuple[Buffer, ...]:
    """Of a tile: gate, up and their product; h, n2 and their gradients. Beside it, in backward, the
    gradients of gate, up, down and o in fp32, one of them rounded."""
    rows = min(tokens, s.cut(tokens).tile_tokens)
    wide, narrow = (rows * size * s.itemsize for size in (s.intermediate, s.hidden))
    masked = 2 * wide if s.drops else 0  # and the mask
    gradients = s.hidden * ((12 + s.itemsize) * s.intermediate + 4 * s.wide) * s.trains_weights

    def back(name: str, nbytes: int, spared_by: str | None = None) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="mlp backward", spared_by=spared_by)

    def forward(name: str, nbytes: int, spared_by: str | None = None) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="mlp forward", spared_by=spared_by)

    return (
        forward("its output", s.unit(tokens)),
        forward("a tile", wide + 2 * narrow),
        forward("a tile", wide, spared_by="gate up"),
        back("dy", s.unit(tokens)),
        back("the MLP's gradients, fp32", gradients),
        back("a tile", wide + 2 * narrow + masked + rows * _adapter_bytes(s)),
        back("a tile", 2 * wide + 2 * narrow, spared_by="gate up"),
        back("a layer's dense weights", s.dense_bytes),
    )


# --- what both have in common ------------------------------------------------------------------


def weight_sums(s: Sizes, tokens: int, elements: int) -> int:
    """Bytes that weight gradients read and write as they add up over tiles in fp32."""
    tiles = -(-tokens // s.cut(tokens).tile_tokens)
    return elements * s.trains_weights * (8 * tiles + 2 if tiles > 1 else 2)


def _adapter_bytes(s: Sizes) -> int:
    """Of a token inside an adapter: in fp32 twice and once, and spread."""
    return s.rank * (12 + 3 * s.itemsize)


def adapters_cost(s: Sizes, batch: Batch) -> Table:
    """Of one layer's share of all adapters. u = x A' reads x, which q, k and v have in common, and
    gate and up; u B' is added to y; v = dy B reads dy, v A is added to dx, dA reads x, dB reads dy,
    and u is computed again."""
    adapted = s.adapted
    flops = 2 * batch.tokens * adapted.parameters / s.layers
    inputs, outputs = (
        batch.tokens * s.itemsize * n / s.layers for n in (adapted.inputs, adapted.outputs)
    )
    return Table(
        forward=(Work(name="adapters", flops=flops, nbytes=inputs + 2 * outputs),),
        backward=(Work(name="adapters", flops=3 * flops, nbytes=4 * inputs + 2 * outputs),),
    )


DEQUANTISE = 3.5
"""A byte that bitsandbytes makes dense takes as long as so many that are read or written: 0.096 ms
for 14336 x 4096 on an H200."""


def dense_cost(s: Sizes) -> Table:
    """Of quantised weights that are made dense."""
    made = Work(name="quantised weights made dense", nbytes=int(DEQUANTISE * s.dense_bytes))
    return Table(forward=(made,), backward=(made,))


# --- lm_head and the loss ----------------------------------------------------------------------


def loss_cost(s: Sizes, batch: Batch) -> Table:
    """Logits are written and read twice in fp32, their gradient written and read twice in 16 bits;
    lm_head's gradient adds up in fp32 for each group of rows."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    rows = loss_rows(s, tokens)
    head = s.hidden * s.vocab * s.trains_head
    workspace = min(s.cut(tokens).logits_bytes, 4 * tokens * s.vocab)
    rounded = s.itemsize * head
    buffers = {
        "last layer's output": unit,
        "the same, normed": unit,
        "its gradient": unit,
        "lm_head's gradient, fp32": 4 * head,
        # the workspace, which a short batch does not fill, goes before the gradient is rounded
        "logits" if workspace >= rounded else "the same, rounded": max(workspace, rounded),
        # hidden and its gradient, where labels that do not count are left out
        "rows of the loss": 2 * min(tokens, rows) * s.hidden * s.itemsize,
    }
    return Table(
        forward=(
            Work(
                name="loss",
                flops=(6 if s.trains_head else 4) * tokens * s.vocab * s.hidden,
                nbytes=18.0 * tokens * s.vocab + 8 * -(-tokens // rows) * head,
            ),
        ),
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )


def loss_rows(s: Sizes, tokens: int) -> int:
    """Of a group of pieces (model/loss.py)."""
    lines = s.cut(tokens).logits_bytes // (2 * s.vocab)
    return max(1, lines * 7 // 8 if s.itemsize < 4 else lines // 2)


def embedding_cost(s: Sizes, batch: Batch) -> Table:
    """While the embedding's gradient, the last one, is made: torch sums the rows of each token in
    fp32, in segments of 10 (embedding_dense_backward)."""
    segments = batch.tokens // 10 + min(batch.tokens, s.vocab)
    buffers = {"its sums, fp32": 4 * segments * s.hidden, "dx": s.unit(batch.tokens)}
    return Table(
        buffers=tuple(Buffer(name=k, nbytes=n, during="embedding") for k, n in buffers.items())
    )


def update_cost(s: Sizes) -> Table:
    """Exact AdamW reads 14 and writes 12 bytes a parameter, the norm reads 2. torch's, whose states
    are bf16: 8 and 6, and clipping reads and writes each gradient once more."""
    return Table(forward=(Work(name="update", nbytes=(28 if s.exact else 20) * s.trained),))


# --- Hugging Face's layers and Liger-Kernel's, with checkpointing by layer ---------------------


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Elements a token, as multiples of D and of F."""

    works: tuple[float, float]
    """Of a layer in backward, its input among them (h200_layer.json: 31.5 and 21.5 units of
    Llama-3.1-8B, at 32768 and at 131072 tokens)."""
    moves: tuple[float, float]
    """Read and written in forward (h200_layer.json);"""
    more: float
    """backward moves as much once more, and so often besides."""


PEERS = {
    "vanilla": Peer(works=(7, 7), moves=(116, 5), more=1.6),
    "liger": Peer(works=(4, 5), moves=(36, 3), more=0.4),
}


def peer_layer_cost(s: Sizes, batch: Batch) -> Table:
    """Forward keeps x; backward runs the whole layer forward once more."""
    peer, tokens, unit = PEERS[s.class_type], batch.tokens, s.unit(batch.tokens)

    def nbytes(multiples: tuple[float, float]) -> int:
        elements = multiples[0] * s.hidden + multiples[1] * s.intermediate
        return int(tokens * elements) * s.itemsize

    matmuls = 2 * tokens * s.layer_weights
    forward = (
        Work(name="matmuls", flops=matmuls, nbytes=nbytes(peer.moves)),
        Work(name="attention", flops=attention_flops(s, batch), rate="attention"),
    )
    layer = nbytes(peer.works)
    return Table(
        forward=forward,
        backward=(
            *forward,
            Work(
                name="gradients",
                flops=(1 + s.trains_weights) * matmuls,
                nbytes=peer.more * nbytes(peer.moves),
            ),
            Work(name="attention", flops=2.5 * forward[1].flops, rate="attention backward"),
        ),
        keepables=(Keepable(name="x", nbytes=unit, always=True),),
        buffers=(
            Buffer(name="a layer", nbytes=layer // 2, during="mlp forward"),
            Buffer(name="a layer", nbytes=layer - unit, during="mlp backward"),
        ),
    )


def peer_loss_cost(s: Sizes, batch: Batch) -> Table:
    """All logits with their gradients in bf16 and fp32; Liger-Kernel's fused loss has pieces
    (h200_kernels.json)."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    buffers = {"logits": 12 * tokens * s.vocab + unit}
    if s.class_type == "liger":
        buffers = {"lm_head's gradient": s.hidden * s.vocab * s.itemsize, "logits": 2 * unit}
    return Table(
        forward=loss_cost(s, batch).forward,
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )


# --- one table a model and cut -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTable:
    """Everything that a step costs on the GPU, but for where its states live."""

    sizes: Sizes
    batch: Batch

    @classmethod
    def of(cls, sizes: Sizes, batch: Batch) -> StepTable:
        return cls(sizes=sizes, batch=batch)

    @cached_property
    def layer(self) -> Table:
        s, batch = self.sizes, self.batch
        if s.class_type != "custom":
            return peer_layer_cost(s, batch) + adapters_cost(s, batch)
        parts = attention_cost(s, batch) + mlp_cost(s, batch)
        return parts + adapters_cost(s, batch) + dense_cost(s)

    @cached_property
    def loss(self) -> Table:
        count = loss_cost if self.sizes.class_type == "custom" else peer_loss_cost
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
    def finishing_flops(self) -> float:
        columns = self.sizes.wide + 2 * self.sizes.narrow
        matmul = 2 * self.batch.tokens * self.sizes.hidden * columns
        return (1 + self.sizes.trains_weights) * matmul
