"""What attention's residual block costs: rows of its work, of what it may keep and of its buffers.

T tokens, D hidden size, H query heads and K key/value heads of d columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import WINDOW_EDGES
from longctx.cost.flops import squared_length
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work
from longctx.layer.adapters.lora import adapter_bytes
from longctx.layer.linear import weight_sums
from longctx.layer.specs.part_spec import kept_input

if TYPE_CHECKING:
    from longctx.layer.specs.attention_spec import AttentionSpec


def attention_cost(s: Sizes, spec: AttentionSpec, kind: LayerKind, batch: Batch) -> Table:
    """Returns the rows of attention in one layer of that kind."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    tile_tokens, groups, _ = s.cut(tokens)
    n = tokens * s.itemsize
    columns = spec.wide + 2 * spec.narrow
    rotated = 2 * n * (spec.wide + spec.narrow)
    projected = Work(
        name="q k v",
        flops=2 * tokens * s.hidden * columns,
        nbytes=rotated + groups * 2 * unit,  # each head group reads x and writes n1
    )
    attended = Work(name="attention", flops=attention_flops(s, spec, batch), rate="attention")
    of_edges = [edge_flops(spec, batch, keys) for keys in WINDOW_EDGES]
    edges = Work(name="edges of windows", flops=of_edges[0], rate="attention")
    merged = spec.sinks and not s.fuses_sinks
    sinks = Work(name="sinks", nbytes=2 * n * spec.wide * merged)
    # Norms over all heads make q and k once more: before several groups, and in backward.
    again = 2 * tokens * s.hidden * (spec.wide + spec.narrow) * spec.of_all_heads
    measured = Work(
        name="q k, for their norms",
        flops=again * (groups > 1),
        nbytes=(unit + n * (spec.wide + spec.narrow)) * spec.of_all_heads,
    )
    normed = (2 * n * s.hidden + 2 * unit) * spec.post
    output = Work(
        name="o",
        flops=2 * tokens * spec.wide * s.hidden,
        nbytes=unit + normed,
        of_tiles=True,
    )
    in_q = spec.wide * (1 + spec.output_gate)
    sums = weight_sums(s, kind, tokens, s.hidden * (in_q + spec.wide + 2 * spec.narrow))
    gates = _gate_cost(s, spec, kind, tokens)
    twice = 1 + kind.trains_weights  # the gradients of inputs, and of weights
    h = Keepable(
        name="h",
        nbytes=n * s.hidden if spec.post else unit,
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
                nbytes=rotated + n * (4 * spec.wide + 6 * spec.narrow),
            ),
            replace(edges, flops=2.5 * of_edges[1], rate="attention backward"),
            replace(sinks, nbytes=sinks.nbytes * kind.trains_weights),
            Work(name="o", flops=twice * output.flops, nbytes=6 * unit + 2 * normed + sums),
            Work(name="q k v", flops=twice * projected.flops, finishing=True),
            replace(measured, flops=again, nbytes=2 * rotated * spec.of_all_heads),
            *gates.backward,
        ),
        keepables=(
            kept_input(s, batch),
            Keepable(
                name="o",
                nbytes=tokens * (spec.wide * s.itemsize + 4 * spec.heads + 8 * spec.of_all_heads),
                tensors=2 + spec.of_all_heads,
                spares=(projected, measured, attended, edges, sinks),
                word="o",
                read_first=True,
                buffered=True,
            ),
            *([h] if kind.between else []),
            Keepable(
                name="q k v",
                nbytes=n * columns,
                tensors=spec.kv_heads,
                spares=(projected,),
                word="qkv",
                needs=frozenset({"o"}),
            ),
        ),
        buffers=(*_buffers(s, spec, kind, tokens), *gates.buffers),
    )


def attention_flops(s: Sizes, spec: AttentionSpec, batch: Batch) -> float:
    """FLOPs of attention in a layer's forward on one rank. A document of L tokens without a window
    costs 2 H d L^2, since a token attends to half of the others."""
    tokens, document = batch.tokens * s.ranks, batch.document
    squared = squared_length(document, spec.window)
    pairs = tokens // document * squared + squared_length(tokens % document, spec.window)
    return 2.0 * spec.wide * pairs / s.ranks


def edge_flops(spec: AttentionSpec, batch: Batch, keys: int) -> float:
    """FLOPs of `keys` more keys for each query where a window is shorter than the documents:
    kernels compute whole tiles."""
    cut = spec.window is not None and spec.window < batch.document
    return 4.0 * spec.wide * batch.tokens * keys * cut


def _gate_cost(s: Sizes, spec: AttentionSpec, kind: LayerKind, tokens: int) -> Table:
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


def _buffers(s: Sizes, spec: AttentionSpec, kind: LayerKind, tokens: int) -> tuple[Buffer, ...]:
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

    def back(name: str, nbytes: int, **how: Any) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="attention backward", **how)

    def last(name: str, nbytes: int) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="projections backward")

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
