"""The sizes of attention in a decoder layer, and what its residual block costs: rows of its work,
of what it may keep and of its buffers.

T tokens, D hidden size, H query heads and K key/value heads of d columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import WINDOW_EDGES
from longctx.cost.flops import squared_length
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, buffers_during
from longctx.layer.adapters.lora import adapter_bytes
from longctx.layer.linear import weight_sums
from longctx.layer.specs.part_spec import PartSpec, kept_input


@dataclass(frozen=True, kw_only=True)
class AttentionSizes(PartSpec):
    """What decides about the cost of attention in one layer."""

    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it; None: to all before it."""
    score_cap: float | None = None
    """The softcap of attention's scores."""
    wide_norms: bool = False
    """The norms of q and k are over all heads together, instead of each head."""
    output_gate: bool = False
    """q's projection also has the rows of a gate of o, those of each head after the head's own
    (parts/output_gate.py)."""

    @property
    def wide(self) -> int:
        """Columns of q and of attention's output, all query heads together."""
        return self.heads * self.head_dim

    @property
    def narrow(self) -> int:
        """Columns of k, and of v, all key/value heads together."""
        return self.kv_heads * self.head_dim

    @property
    def qk_norms(self) -> bool:
        """Whether each head of q and k has a norm. Attention then takes copies."""
        return "q_norm" in self.norms and not self.wide_norms

    @property
    def of_all_heads(self) -> bool:
        """Whether q and k have norms over all heads."""
        return "q_norm" in self.norms and self.wide_norms

    @property
    def sinks(self) -> bool:
        """Whether each head has an attention sink."""
        return "sinks" in self.parameters

    @property
    def scores(self) -> tuple[int, bool]:
        return self.head_dim, self.score_cap is not None

    @property
    def kv_heads_in_groups(self) -> int:
        return self.kv_heads

    @property
    def widest(self) -> int:
        return max(self.hidden, self.wide)

    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        tokens, unit = batch.tokens, s.unit(batch.tokens)
        tile_tokens, groups, _ = s.cut(tokens)
        n = tokens * s.itemsize
        rstd = 8 * self.of_all_heads  # of q and of k
        columns = self.wide + 2 * self.narrow
        rotated = 2 * n * (self.wide + self.narrow)
        projected = Work(
            name="q k v",
            flops=2 * tokens * s.hidden * columns,
            nbytes=rotated + groups * 2 * unit,  # each head group reads x and writes n1
        )
        attended = Work(name="attention", flops=attention_flops(s, self, batch), rate="attention")
        of_edges = [edge_flops(self, batch, keys) for keys in WINDOW_EDGES]
        edges = Work(name="edges of windows", flops=of_edges[0], rate="attention")
        merged = self.sinks and not s.fuses_sinks
        sinks = Work(name="sinks", nbytes=2 * n * self.wide * merged)
        # Norms over all heads make q and k once more: before several groups, and in backward.
        again = 2 * tokens * s.hidden * (self.wide + self.narrow) * self.of_all_heads
        measured = Work(
            name="q k, for their norms",
            flops=again * (groups > 1),
            nbytes=(unit + n * (self.wide + self.narrow)) * self.of_all_heads,
        )
        normed = (2 * n * s.hidden + 2 * unit) * self.post
        output = Work(
            name="o",
            flops=2 * tokens * self.wide * s.hidden,
            nbytes=unit + normed,
            of_tiles=True,
        )
        in_q = self.wide * (1 + self.output_gate)
        sums = weight_sums(s, kind, tokens, s.hidden * (in_q + self.wide + 2 * self.narrow))
        gates = _gate_cost(s, self, kind, tokens)
        twice = 1 + kind.trains_weights  # the gradients of inputs, and of weights
        h = Keepable(
            name="h",
            nbytes=n * s.hidden if self.post else unit,
            spares=(Work(name="o", flops=output.flops),),
            word="h",
            needs=frozenset({"o"}),
            of_tiles=True,
        )
        return Table(
            forward=(projected, measured, attended, edges, sinks, *gates.forward, output),
            backward=(
                Work(
                    name="attention",
                    flops=2.5 * attended.flops,
                    rate="attention backward",
                    nbytes=rotated + n * (4 * self.wide + 6 * self.narrow),
                ),
                replace(edges, flops=2.5 * of_edges[1], rate="attention backward"),
                replace(sinks, nbytes=sinks.nbytes * kind.trains_weights),
                Work(name="o", flops=twice * output.flops, nbytes=6 * unit + 2 * normed + sums),
                Work(name="q k v", flops=twice * projected.flops, finishing=True),
                replace(measured, flops=again, nbytes=2 * rotated * self.of_all_heads),
                *gates.backward,
            ),
            keepables=(
                kept_input(s, batch),
                Keepable(
                    name="o",
                    nbytes=tokens * (self.wide * s.itemsize + 4 * self.heads + rstd),
                    tensors=2 + self.of_all_heads,
                    spares=(projected, measured, attended, edges, sinks),
                    word="o",
                    read_first=True,
                    buffered=True,
                ),
                *([h] if kind.between else []),
                Keepable(
                    name="q k v",
                    nbytes=n * columns,
                    tensors=self.kv_heads,
                    spares=(projected,),
                    word="qkv",
                    needs=frozenset({"o"}),
                ),
            ),
            buffers=(*_buffers(s, self, kind, tokens), *gates.buffers),
        )


def attention_flops(s: Sizes, spec: AttentionSizes, batch: Batch) -> float:
    """FLOPs of attention in a layer's forward on one rank. A document of L tokens without a window
    costs 2 H d L^2, since a token attends to half of the others."""
    tokens, document = batch.tokens * s.ranks, batch.document
    squared = squared_length(document, spec.window)
    pairs = tokens // document * squared + squared_length(tokens % document, spec.window)
    return 2.0 * spec.wide * pairs / s.ranks


def edge_flops(spec: AttentionSizes, batch: Batch, keys: int) -> float:
    """FLOPs of `keys` more keys for each query where a window is shorter than the documents:
    kernels compute whole tiles."""
    cut = spec.window is not None and spec.window < batch.document
    return 4.0 * spec.wide * batch.tokens * keys * cut


def _gate_cost(s: Sizes, spec: AttentionSizes, kind: LayerKind, tokens: int) -> Table:
    """The cost of the gate in one layer. In both passes a tile's n1 is made, g, and p from o and
    g; the rows of the gate are copied, and those of q. Backward also copies o to where do is made,
    reads dp, writes do, dg and p, and has dg in the projections' matmuls, for inputs and for
    weights. Where that makes rows of attention larger (do, sums of gradients), they stand there. A
    tile of g and p is smaller than one of the MLP, which comes after it."""
    if not spec.output_gate:
        return Table()
    wide, unit = tokens * spec.wide * s.itemsize, s.unit(tokens)
    weight = s.hidden * spec.wide * s.itemsize
    flops = 2 * tokens * s.hidden * spec.wide
    nbytes = unit + tokens * s.hidden * s.itemsize + 4 * wide + 4 * weight
    u = 2 * tokens * s.hidden * kind.rank  # of q's adapter, which q has had made before
    made = Work(name="gate of o", flops=flops + u, nbytes=nbytes)
    copied = weight * (1 + (kind.adapted.rescaled > 0))  # DoRA holds the weight once more
    return Table(
        forward=(made,),
        backward=(
            replace(made, nbytes=nbytes + 8 * wide),
            Work(
                name="q k v",
                flops=(1 + kind.trains_weights) * flops,
                nbytes=2 * wide,
                finishing=True,
            ),
        ),
        buffers=(
            Buffer(name="the gate's weight", nbytes=copied, during="forward"),
            Buffer(name="the gate's weight", nbytes=copied, during="backward"),
            Buffer(name="dg", nbytes=wide, during="backward"),
        ),
    )


def _buffers(s: Sizes, spec: AttentionSizes, kind: LayerKind, tokens: int) -> tuple[Buffer, ...]:
    """Buffers of attention. Forward has a head group's q, k, v. Backward has these, do, and their
    gradients, which flash-attention sums in fp32 and allocates itself before they are copied,
    unless it writes them in place; q and k once more if they are normed; dk and dv of all groups,
    and do where a norm or a gate follows (key_gradients.py); and o's rounded weight gradient, which
    was summed in fp32 beside the MLP's. The projections' backward has a tile of dq, dk, dv, n1 and
    dn1, the weights of q, k and v in one, and their gradients in fp32."""
    groups = s.cut(tokens).head_groups
    columns = spec.wide + 2 * spec.narrow
    whole = spec.post or spec.output_gate  # do is there of all heads
    held = whole * min(2, spec.heads // spec.kv_heads)  # of dk and dv, do holds so many
    alone = not (whole and s.writes_gradients)  # torch's flash copies do's columns
    made = spec.wide * alone + held * spec.narrow + (0 if s.writes_gradients else columns)
    made *= s.itemsize
    made += 4 * columns if s.itemsize < 4 else 0
    made += (spec.wide + spec.narrow) * s.itemsize if spec.qk_norms else 0
    of_o = s.hidden * spec.wide * kind.trains_weights
    shared = 8 * (spec.wide + spec.narrow) // groups * s.itemsize if s.ranks > 1 else 0
    rows = min(tokens, s.cut(tokens).tile_tokens)
    again = (spec.wide + spec.narrow) * spec.of_all_heads  # q, k as projected, for their norms
    projected = columns + spec.wide * spec.output_gate
    tile = rows * (projected + s.hidden + max(s.hidden, again)) * s.itemsize
    stacked = s.itemsize + 4 * kind.trains_weights
    do = tokens * spec.wide * s.itemsize * whole
    dn1 = tokens * s.hidden * s.itemsize * kind.parallel
    until_the_end = {
        "dy": s.unit(tokens),
        "o's gradient": of_o * s.itemsize,
        "dk, dv": tokens * (2 - held) * spec.narrow * s.itemsize,
    }
    group = columns // groups * s.itemsize

    back = buffers_during("attention backward")
    last = buffers_during("projections backward")
    return (
        Buffer(name="a head group", nbytes=tokens * group, during="attention forward"),
        # The MLP's backward fills these tile by tile.
        Buffer(name="do", nbytes=do, during="backward"),
        Buffer(name="dn1", nbytes=dn1, during="backward"),
        back("o's gradient, fp32", 4 * of_o, span="before"),
        *(row(name, nbytes) for name, nbytes in until_the_end.items() for row in (back, last)),
        back("a head group", tokens * (made // groups + adapter_bytes(s, kind))),
        back("a head group", tokens * group, spared_by="q k v"),
        # Exchanges of the previous and the next group are under way (attention/sharded.py).
        back("exchanges", tokens * shared),
        last("the projections' weights and gradients", s.hidden * projected * stacked),
        last("a tile", tile),
    )
