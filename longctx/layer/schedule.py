"""The decoder layer's schedule: one autograd.Function with a hand-written backward.

For the T tokens of a batch, x (T, D), and weights (out, in) as Hugging Face stores them:

    n1 = rms_norm(x)              q, k, v = rope(n1 Wq', n1 Wk'), n1 Wv'      (T, H d), (T, K d)
    o, lse = attention(q, k, v)   h = x + o Wo'                               (T, H d), (T, D)
    n2 = rms_norm(h)              y = h + (silu(n2 Wg') * (n2 Wu')) Wd'       (T, F), (T, D)

This is Llama's layer: two residual blocks, each a part of its own (parts/). A layer's spec has the
specs of its parts (specs/), and one part may be missing. Other families (families/families.py)
differ by data in these specs: a window or another scale of attention, layers without rope, a factor
r of both sums (h = x + r o Wo'), norms of q and k, a gate of o, norms after the parts, an MLP
without a gate or beside attention (it reads n1, and y = h + its output), and parameters that hold
several of these weights. Any of the seven weights may have an adapter. In hybrid models a module of
the model's own, as Gated DeltaNet, stands instead of attention (parts/mixer.py), or beside it
(parts/beside.py). No gradient is computed for frozen weights, and dx only where a parameter below
is trained.

Token-wise work runs in tiles of the sequence and attention in head groups, so that gate, up and q,
k, v exist for one tile or one group only. h and n2, which link the two blocks, also exist for one
tile only, because one loop runs the end of the first block and all of the second:

    forward     attention, per group:  o, lse
                per tile:              h, n2, gate, up, y
    backward    per tile:              [h, n2, gate, up again]; dh in dy's place; all weights' but
                                       q, k and v's gradients
                per group:             [q, k, v again]; dq in o's place, dk, dv
                per tile:              dx in dh's place; q, k and v's gradients

The saved activations are chosen (memory/ladder.py) from x, o with lse, h, q k v, gate and up.
x and o are 2 units of T*D*2 bytes; plain checkpointing keeps one and runs attention forward twice,
70% of a layer's time at 131072 tokens. What is not saved is recomputed from the same tiles by the
same kernels, so that the choice changes no bit; n1 and n2 always, the down projection only where
the layer above saves no x, so that this one runs forward again (memory/store.py).

Peak memory beside weights and gradients: three units (x, o|dq, dy|dh|dx), dk|dv (2 K/H of a unit),
a group's q, k, v, do, dq, and one tile of the MLP. Where a norm follows attention, do of all heads
stands beside them, in which dk and dv find room (parts/key_gradients.py); with a gate of o also
the gate's gradient, as large (parts/output_gate.py). Weight gradients are
summed over tiles in fp32 and rounded once. Each tile and each group runs in a function of its own,
so that its temporaries are freed before the next begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.annotate import annotate, annotated, each
from longctx.kernels.launch import once_differentiable
from longctx.layer.adapters.protocol import Settings
from longctx.layer.gradients import Gradients
from longctx.layer.parts.mixer import Mixes
from longctx.layer.parts.protocol import Kept, OverRow, OverTiles
from longctx.layer.parts.table import parts_of
from longctx.layer.passes import Added, Pass, Schedule
from longctx.layer.weights import Parameters, Weights
from longctx.memory.store import Saved


def layer_forward(p: Pass, x: Tensor) -> Tensor:  # (T, D) -> (T, D)
    """Returns y, and keeps what backward needs in `p.saved`."""
    row_part, tiles_part = parts_of(p.spec)
    over_row, over_tiles = row_part(p), tiles_part(p)
    over_row.begin(x)
    over_tiles.keep(x)
    y = torch.empty_like(x)

    def run(tile: slice) -> None:
        h = over_row.output(x, tile)
        read = over_row.normed(x[tile]) if p.spec.parallel else h
        over_tiles.forward(read, tile, onto=h, out=y[tile])
        p.send(tile)

    with annotate("mlp"):
        for tile in each("tile", p.schedule.tiles(len(x))):
            run(tile)
    return y


def layer_backward_(
    p: Pass,
    dy: Tensor,  # (T, D), overwritten by dx
    x: Tensor,  # (T, D)
    kept: Kept,
    wants_dx: bool,
) -> None:
    row_part, tiles_part = parts_of(p.spec)
    over_row = row_part(p, kept)
    over_row.again(x)
    goes_on = over_row.reaches(wants_dx)
    dn = _tiles_backward_(p, dy, x, over_row, tiles_part(p, kept), goes_on)
    if goes_on:
        over_row.backward_(dy, x, dn, wants_dx)


@annotated("mlp")
def _tiles_backward_(
    p: Pass,
    dy: Tensor,  # (T, D), overwritten by dh
    x: Tensor,  # (T, D)
    over_row: OverRow,
    over_tiles: OverTiles,
    goes_on: bool,
) -> Tensor | None:  # (T, D)
    """Runs backward of the part over tiles and of the end of the part over the row, tile by tile.
    Returns the gradient of n1 that comes from a part beside the latter; dy is dh there. The sums of
    the former's gradients are freed with it."""
    dn1 = torch.empty_like(x, dtype=p.schedule.dtype) if p.spec.parallel else None

    def run(tile: slice) -> None:
        held = None
        if dn1 is not None:
            over_tiles.backward(dy[tile], over_row.normed(x[tile]), tile, out=dn1[tile])
        elif type(over_tiles) is not OverTiles:  # else nobody reads h
            h, held = over_row.output_again(x, tile)
            over_tiles.backward(dy[tile], h, tile, onto=dy[tile], out=dy[tile])
        over_row.output_backward(dy[tile], held, tile, goes_on=goes_on)

    for tile in each("tile", p.schedule.tiles(len(x))):
        p.schedule.store.wait(tile)
        run(tile)
        p.retire_tile(tile)
    over_row.finish_output()
    over_tiles.finish()
    return dn1


def with_features_(y: Tensor, where: Tensor | None, features: Tensor | None) -> Tensor:
    """Adds features (n, D) to the rows `where` (n,) of y (T, D), in place, and returns y."""
    if where is not None and features is not None:
        y.index_add_(0, where, features.to(y.dtype))
    return y


Bring = Callable[[int], None]
"""Has a layer's weights on the GPU in backward, as `Again.bring` asks (memory/store.py)."""


def _are_here(above: int) -> None:
    pass


class _ScheduledLayer(torch.autograd.Function):
    @staticmethod
    @annotated("layer forward")
    def forward(
        ctx: Any,
        x: Tensor,  # (T, D)
        features: Tensor | None,  # (n, D)
        where: Tensor | None,  # (n,)
        layer: int,
        s: Schedule,
        layers_above: int | None,
        adapters: Mapping[str, Settings],
        bring: Bring,
        mixes: Mixes | None,
        names: tuple[str, ...],
        *parameters: Tensor,
    ) -> Tensor:  # (T, D)
        ctx.layer, ctx.schedule, ctx.adapters, ctx.names = layer, s, adapters, names
        ctx.mixes = mixes
        w = _weights(ctx, parameters)
        saved = None
        if layers_above is not None and any(ctx.needs_input_grad):
            saved = s.store.open(layers_above, x)
            saved.again = _Again(ctx)
        p = Pass(schedule=s, layer=layer, weights=w, saved=saved, mixes=mixes)
        if p.keeps("x"):
            p.keep("x", {"x": x})  # copied while attention runs, the rest while the MLP runs
        y = with_features_(layer_forward(p, x), where, features)
        if saved is not None:
            s.store.release(saved, y)
        ctx.saved, ctx.bring = saved, bring
        ctx.x, ctx.version = weakref.ref(x), 0 if saved is None else x._version
        ctx.save_for_backward(where, features, *parameters)
        return y

    @staticmethod
    @once_differentiable
    @annotated("layer backward")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        s: Schedule = ctx.schedule
        names: tuple[str, ...] = ctx.names
        tiles = s.tiles(dy.shape[0])
        kept = s.store.load(ctx.saved, tiles)  # first: weights may move meanwhile
        x = _unchanged(ctx, kept["x"])
        where, features, *parameters = ctx.saved_tensors
        w = _weights(ctx, parameters)
        wants_dx, wants_features, *_ = needs = ctx.needs_input_grad
        d_features = dy[where].to(features.dtype) if wants_features else None  # dy changes below
        wanted = [name for name, needed in zip(names, needs[-len(names) :], strict=True) if needed]
        scaled = s.layers[ctx.layer].scales
        grads = Gradients(w, wanted, len(tiles) + scaled)
        dx = dy.contiguous()  # overwritten: the layer above made dy for this layer only
        given: Any = dict(weights=w, saved=ctx.saved, mixes=ctx.mixes)
        p = Pass(schedule=s, layer=ctx.layer, gradients=grads, **given)
        layer_backward_(p, dx, x, kept, wants_dx)
        s.store.finish(ctx.saved)
        found = (grads.done.get(name) for name in names)
        return dx if wants_dx else None, d_features, *[None] * 8, *found


def _weights(ctx: Any, parameters: Sequence[Tensor]) -> Weights:
    named = dict(zip(ctx.names, parameters, strict=True))
    s: Schedule = ctx.schedule
    return Weights.of(named, s.layers[ctx.layer], ctx.adapters, s.dtype)


def _unchanged(ctx: Any, x: Tensor) -> Tensor:
    if x is ctx.x() and x._version != ctx.version:  # may be the user's own: inputs_embeds
        raise RuntimeError("a layer's input was modified in place before its backward")
    return x


class _Again:
    """Runs a layer forward again from its autograd node, which holds it through what is saved."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = weakref.ref(ctx)  # no cycle, so that a dropped graph frees its memory at once

    def bring(self, above: int) -> None:
        self._node.bring(above)

    @annotated("layer forward")
    def forward(self, x: Tensor, saved: Saved) -> Tensor:  # (T, D) -> (T, D)
        ctx = self._node
        where, features, *parameters = ctx.saved_tensors
        w = _weights(ctx, parameters)
        how: Any = dict(schedule=ctx.schedule, layer=ctx.layer, mixes=ctx.mixes)
        p = Pass(weights=w, saved=saved, **how)
        return with_features_(layer_forward(p, _unchanged(ctx, x)), where, features)

    @property
    def _node(self) -> Any:
        node = self._ctx()
        assert node is not None, "the graph above holds it"
        return node


def scheduled_layer(
    x: Tensor,  # (T, D)
    s: Schedule,
    layers_above: int,
    parameters: Parameters,
    adapters: Mapping[str, Settings] = MappingProxyType({}),
    bring: Bring = _are_here,
    added: Added | None = None,
    mixes: Mixes | None = None,
) -> Tensor:  # (T, D)
    """Runs the decoder layer of the module's equations, differentiable in x and every parameter.

    `layers_above` is how many layers follow this one: the store keeps the last ones on the GPU.
    `adapters` has the settings of each adapter in `parameters`, by the name of what it adapts.
    `bring` is called in backward before the layer runs forward again, if the weights may be away.
    `added` is added to what the layer returns, and its features get a gradient.
    `mixes` is the module that the layer has in the place of attention or beside it, if it has one.
    Backward raises RuntimeError if x was modified in place after forward.
    """
    above = layers_above if torch.is_grad_enabled() else None  # without backward nothing is kept
    layer, names = len(s.layers) - 1 - layers_above, tuple(parameters)
    where, features = added or (None, None)
    how = layer, s, above, adapters, bring, mixes, names
    return _ScheduledLayer.apply(x, features, where, *how, *parameters.values())
