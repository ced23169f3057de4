"""The decoder layer's schedule: one autograd.Function with a hand-written backward.

For the T tokens of a batch, x (T, D), and weights (out, in) as Hugging Face stores them:

    n1 = rms_norm(x)              q, k, v = rope(n1 Wq', n1 Wk'), n1 Wv'      (T, H d), (T, K d)
    o, lse = attention(q, k, v)   h = x + o Wo'                               (T, H d), (T, D)
    n2 = rms_norm(h)              y = h + (silu(n2 Wg') * (n2 Wu')) Wd'       (T, F), (T, D)

This is Llama's layer: two residual blocks, each a part of its own (parts/). Other families
(model/families.py) differ by data (`Traits`, `Weights`): a window or another scale of attention,
layers without rope, a factor r of both sums (h = x + r o Wo'), norms of q and k, norms after the
parts, an MLP without a gate or beside attention (it reads n1, and y = h + its output), and
parameters that hold several of these weights. Any of the seven weights may have a low-rank adapter.
No gradient is computed for frozen weights, and dx only where a parameter below is trained.

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
same kernels, so that the choice changes no bit; n1 and n2 always, the down projection never.

Peak memory beside weights and gradients: three units (x, o|dq, dy|dh|dx), dk|dv (2 K/H of a unit),
a group's q, k, v, do, dq, and one tile of the MLP. Where a norm follows attention, do of all heads
stands beside them, in which dk and dv find room (parts/key_gradients.py). Weight gradients are
summed over tiles in fp32 and rounded once. Each tile and each group runs in a function of its own,
so that its temporaries are freed before the next begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from longctx.annotate import annotate, annotated, each
from longctx.kernels.launch import once_differentiable
from longctx.layer.gradients import Gradients
from longctx.layer.lora import Lora
from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.mlp import MLP
from longctx.layer.passes import Pass, Schedule, Traits
from longctx.layer.weights import Weights


def layer_forward(p: Pass, x: Tensor) -> Tensor:  # (T, D) -> (T, D)
    """Returns y, and keeps what backward needs in `p.saved`."""
    attention, mlp = SelfAttention(p), MLP(p)
    o = attention.begin(x)
    mlp.keep(o)
    y = torch.empty_like(x)

    def run(tile: slice) -> None:
        h = attention.output(x, o, tile)
        read = attention.normed(x[tile]) if p.traits.parallel else h
        mlp.forward(read, tile, onto=h, out=y[tile])
        p.send(tile)

    with annotate("mlp"):
        for tile in each("tile", p.schedule.tiles(len(x))):
            run(tile)
    return y


def layer_backward_(
    p: Pass,
    dy: Tensor,  # (T, D), overwritten by dx
    x: Tensor,  # (T, D)
    kept: dict[str, Tensor],
    wants_dx: bool,
) -> None:
    attention = SelfAttention(p, kept)
    o, lse = attention.again(x)
    wants_do = wants_dx or p.grads.wanted("norm1", "q", "k", "v", "q_norm", "k_norm")
    dn1 = _tiles_backward_(p, dy, x, o, attention, MLP(p, kept), wants_do)
    if wants_do:
        dkv = attention.backward_(dy, x, o, lse)
        attention.input_backward_(dy, x, o, dkv, dn1, wants_dx)


@annotated("mlp")
def _tiles_backward_(
    p: Pass,
    dy: Tensor,  # (T, D), overwritten by dh
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    attention: SelfAttention,
    mlp: MLP,
    wants_do: bool,
) -> Tensor | None:  # (T, D)
    """Runs backward of the MLP's block and of attention's output projection, tile by tile. Returns
    the gradient of n1 that comes from an MLP beside attention; dy is dh there. The sums of the
    MLP's gradients are freed with `mlp`."""
    dn1 = torch.empty_like(x, dtype=p.schedule.dtype) if p.traits.parallel else None

    def run(tile: slice) -> None:
        if dn1 is not None:
            mlp.backward(dy[tile], attention.normed(x[tile]), tile, out=dn1[tile])
            z = None
        else:
            h, z = attention.output_again(x, o, tile)
            mlp.backward(dy[tile], h, tile, onto=dy[tile], out=dy[tile])
        attention.output_backward(dy[tile], o, z, tile, wants_do=wants_do)

    for tile in each("tile", p.schedule.tiles(len(x))):
        p.schedule.store.wait(tile)
        run(tile)
        p.retire_tile(tile)
    attention.finish_output()
    mlp.finish()
    return dn1


class _ScheduledLayer(torch.autograd.Function):
    @staticmethod
    @annotated("layer forward")
    def forward(
        ctx: Any,
        x: Tensor,  # (T, D)
        t: Traits,
        s: Schedule,
        layers_above: int | None,
        loras: Mapping[str, Lora],
        *weights: Tensor | None,
    ) -> Tensor:  # (T, D)
        w = Weights(*weights).dense().layer(loras, s.dtype)  # type: ignore[arg-type]
        saved = None
        if layers_above is not None and any(ctx.needs_input_grad):
            saved = s.store.open(layers_above)
        p = Pass(schedule=s, traits=t, weights=w, saved=saved)
        p.keep("x", {"x": x})  # copied while attention runs, the rest while the MLP runs
        y = layer_forward(p, x)
        if saved is not None:
            s.store.release(saved)
        ctx.traits, ctx.schedule, ctx.loras, ctx.saved = t, s, loras, saved
        ctx.x, ctx.version = weakref.ref(x), 0 if saved is None else x._version
        ctx.save_for_backward(*weights)
        return y

    @staticmethod
    @once_differentiable
    @annotated("layer backward")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        t: Traits = ctx.traits
        s: Schedule = ctx.schedule
        given = Weights(*ctx.saved_tensors).dense()
        w = given.layer(ctx.loras, s.dtype)
        wants_dx, wants = ctx.needs_input_grad[0], Weights(*ctx.needs_input_grad[5:])
        tiles = s.tiles(dy.shape[0])
        grads = Gradients(given, w, wants, len(tiles) + (t.residual != 1.0))
        kept = s.store.load(ctx.saved, tiles)
        x = kept["x"]
        if x is ctx.x() and x._version != ctx.version:  # may be the user's own: inputs_embeds
            raise RuntimeError("a layer's input was modified in place before its backward")
        dx = dy.contiguous()  # overwritten: the layer above made dy for this layer only
        p = Pass(schedule=s, traits=t, weights=w, saved=ctx.saved, gradients=grads)
        layer_backward_(p, dx, x, kept, wants_dx)
        s.store.finish(ctx.saved)
        found = (grads.done.get(name) for name in Weights._fields)
        return dx if wants_dx else None, None, None, None, None, *found


def scheduled_layer(
    x: Tensor,  # (T, D)
    s: Schedule,
    layers_above: int,
    w: Weights,
    loras: Mapping[str, Lora] = MappingProxyType({}),
) -> Tensor:  # (T, D)
    """Runs the decoder layer of the module's equations, differentiable in x and every weight.

    `layers_above` is how many layers follow this one: the store keeps the last ones on the GPU.
    `loras` has the settings of each adapter in `w`, by projection name. Backward raises
    RuntimeError if x was modified in place after forward.
    """
    above = layers_above if torch.is_grad_enabled() else None  # without backward nothing is kept
    return _ScheduledLayer.apply(x, s.traits[-1 - layers_above], s, above, loras, *w)
