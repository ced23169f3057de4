"""The decoder layer's schedule: one autograd.Function with a hand-written backward.

For the T tokens of a batch, x (T, D), weights as Hugging Face holds them (out, in):

    n1 = rms_norm(x)              q, k, v = rope(n1 Wq', n1 Wk'), n1 Wv'      (T, H d), (T, K d)
    o, lse = attention(q, k, v)   h = x + o Wo'                               (T, H d), (T, D)
    n2 = rms_norm(h)              y = h + (silu(n2 Wg') * (n2 Wu')) Wd'       (T, F), (T, D)

That is Llama's. Of other families (families.py) come, as data (`Traits`, `Weights`): a window or
another scale of attention, layers without rope, a factor r of both sums (h = x + r o Wo'), norms of
q and k before rope, and parameters that hold several of these weights.

Kept from forward to backward, as far up the ladder (memory/ladder.py) as there is memory for: x, o
with lse, h, q k v, gate and up. x and o are 2 units of T*D*2 bytes; plain checkpointing keeps one
and runs attention forward twice, 70% of a layer's time at 131072 tokens. What is not kept is
computed again, from the same tiles by the same kernels, so that no bit depends on it; n1 and n2
always, the down projection never. n1 is not kept between head groups: with G of them it is computed
G times in forward and G + 1 times in backward (once, where q, k, v are kept), 2 units of memory
traffic each (at 131072 tokens of Llama-3.1-8B and 8 groups 17 times 0.5 ms, 0.7% of the layer).

Token-wise work runs in tiles of the sequence, attention in head groups (some kv heads with their
query heads), so that gate, up and q, k, v exist for one tile or one group only. Backward:

    1. per tile:   [h, n2, gate, up again]; dWd, dgate, dup, dWg, dWu; dh = dy + rms_norm'; dWo
    2. per group:  [q, k, v again]; do = dh Wo; dq, dk, dv = attention'; dq takes o's place
                   (with norms of q, k: copies of both, normed and rotated; dq, dk through them)
    3. per tile:   dn1 = [dq dk dv] [Wq; Wk; Wv] in one product; dWq, dWk, dWv; dx = dh + rms_norm'

dh, then dx, take dy's place. Peak over weights and gradients: three units (x, o|dq, dy|dh|dx),
dk|dv (2 K/H of a unit), a group's q, k, v, do, dq, and one tile of the MLP. Weight gradients add up
over tiles in fp32 and are rounded once. Each tile and group is a function of its own, so that what
one works with is gone when the next begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.annotate import annotate, annotated, each
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention
from longctx.kernels.launch import once_differentiable
from longctx.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from longctx.kernels.rope import rope_
from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.memory.ladder import Rung
from longctx.memory.store import ActivationStore, Saved
from longctx.model.projection import WeightGradient, linear, linear_add, scaled_mm

ALL = slice(None)


class Weights(NamedTuple):
    """A layer's parameters, in the order in which the Function takes and returns them.

    One parameter may hold several: q those of q, k, v, one below the other, if k and v are None;
    gate those of gate and up, if up is. `apart` has views of each.
    """

    norm1: Tensor  # (D,)
    q: Tensor  # (H d, D)
    k: Tensor  # (K d, D)
    v: Tensor  # (K d, D)
    o: Tensor  # (D, H d)
    norm2: Tensor  # (D,)
    gate: Tensor  # (F, D)
    up: Tensor  # (F, D)
    down: Tensor  # (D, F)
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # (d,)
    k_norm: Tensor | None = None  # (d,)

    @property
    def qkv_in_one(self) -> bool:
        return self.k is None

    @property
    def gate_up_in_one(self) -> bool:
        return self.up is None

    def apart(self) -> Weights:
        w = self
        if self.qkv_in_one:
            Hd = self.o.shape[1]
            Kd = (self.q.shape[0] - Hd) // 2
            q, k, v = self.q.split([Hd, Kd, Kd])
            w = w._replace(q=q, k=k, v=v)
        if self.gate_up_in_one:
            gate, up = self.gate.chunk(2)
            w = w._replace(gate=gate, up=up)
        return w

    def cast(self, dtype: torch.dtype) -> Weights:
        """Matrices and biases in `dtype`; norms stay, as in autocast."""
        norms = ("norm1", "norm2", "q_norm", "k_norm")
        named = self._asdict().items()
        return Weights(**{n: x if n in norms or x is None else x.to(dtype) for n, x in named})


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a layer does besides products with its weights. Defaults: as in Llama."""

    scale: float
    """Of attention's scores."""
    window: int | None = None
    """A token attends to itself and the window - 1 before it; None: to all before it."""
    rope: bool = True
    residual: float = 1.0
    """What attention's and the MLP's outputs are multiplied by before they are added."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a batch's layers share: its documents and positions, and how the work is cut."""

    traits: tuple[Traits, ...]
    """Of each layer."""

    documents: Documents
    position_ids: Tensor  # (T,)
    inv_freq: Tensor  # (d/2,) fp32, or less: then only the first numbers of a head are rotated
    attention_scaling: float
    """What RoPE multiplies cosine and sine by (YaRN's factor; 1 for plain RoPE)."""
    head_dim: int
    eps: float
    attention: Attention
    store: ActivationStore
    tile_tokens: int
    head_groups: int
    dtype: torch.dtype
    """Of products and attention; x and h may be fp32 where it has 16 bits, as in autocast."""

    def window(self, t: Traits) -> int | None:
        """None where no document is longer."""
        longer = t.window is not None and t.window < max(self.documents.lengths)
        return t.window if longer else None

    def rotate_(
        self, q: Tensor, k: Tensor, t: Traits, tile: slice = ALL, inverse: bool = False
    ) -> None:
        """(T, h, d), (T, k, d), in place; those of a tile"""
        if t.rope:
            q, k = (x[..., : 2 * len(self.inv_freq)] for x in (q, k))
            positions = self.position_ids[tile]
            rope_(q, k, positions, self.inv_freq, self.attention_scaling, inverse=inverse)

    def tiles(self, tokens: int) -> list[slice]:
        return [
            slice(start, min(start + self.tile_tokens, tokens))
            for start in range(0, tokens, self.tile_tokens)
        ]


class Group(NamedTuple):
    """The columns of one head group: of q, o (all query heads) and of k, v (all kv heads)."""

    q: slice
    kv: slice
    lse: slice


def split_heads(w: Weights, s: Schedule) -> Iterator[Group]:
    H, K = w.q.shape[0] // s.head_dim, w.k.shape[0] // s.head_dim
    k = K // s.head_groups
    h = k * (H // K)
    for i in range(s.head_groups):
        columns = slice(i * h * s.head_dim, (i + 1) * h * s.head_dim)
        yield Group(
            columns,
            slice(i * k * s.head_dim, (i + 1) * k * s.head_dim),
            slice(i * h, (i + 1) * h),
        )


# --- forward ---------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor, s: Schedule) -> Tensor:  # (T, D), (D,) -> (T, D)
    """What products take."""
    return rms_norm_forward(x, weight, s.eps)[0].to(s.dtype)


@annotated("projections")
def project_qkv(
    x: Tensor,  # (T, D)
    w: Weights,
    t: Traits,
    s: Schedule,
    group: Group,
) -> Tensor:  # (T, (h + 2 k) d)
    """q, k, v of one head group, side by side: norm, one fused product, rotation. q and k that have
    a norm of their own stay as they are: its gradient needs them so."""
    weight = torch.cat([w.q[group.q], w.k[group.kv], w.v[group.kv]])
    biases = (w.q_bias, w.k_bias, w.v_bias)
    bias = None
    if w.q_bias is not None:
        columns = (group.q, group.kv, group.kv)
        bias = torch.cat([b[c] for b, c in zip(biases, columns, strict=True) if b is not None])
    qkv = weight.new_empty(x.shape[0], weight.shape[0])
    for tile in each("tile", s.tiles(x.shape[0])):
        linear(normed(x[tile], w.norm1, s), weight, bias, out=qkv[tile])
    if w.q_norm is None:
        q, k, _ = heads(qkv, group, s)
        s.rotate_(q, k, t)
    return qkv


def attended(
    qkv: Tensor,  # (T, (h + 2 k) d), as projected
    w: Weights,
    t: Traits,
    s: Schedule,
    group: Group,
    *,
    in_place: bool,
) -> QKV:
    """What attention takes: q and k normed, if they have a norm, and rotated."""
    q, k, v = heads(qkv, group, s)
    if w.q_norm is None or w.k_norm is None:
        return QKV(q, k, v)
    given, norms, wide = (q, k), (w.q_norm, w.k_norm), is_wide(w)
    outs = given if in_place else [torch.empty_like(x) for x in given]

    def run(tile: slice) -> None:
        into = [None if wide else out[tile] for out in outs]
        ready = [
            rms_norm_forward(x[tile], norm, s.eps, out=out)[0]
            for x, norm, out in zip(given, norms, into, strict=True)
        ]
        s.rotate_(ready[0], ready[1], t, tile)
        if wide:
            for out, x in zip(outs, ready, strict=True):
                out[tile] = x

    for tile in s.tiles(len(q)) if wide else [ALL]:
        run(tile)
    return QKV(outs[0], outs[1], v)


def unattended_(
    dq: Tensor,  # (T, h, d)
    dk: Tensor,  # (T, k, d)
    qkv: Tensor,  # (T, (h + 2 k) d), as projected
    w: Weights,
    t: Traits,
    s: Schedule,
    group: Group,
    d_norms: tuple[Tensor | None, Tensor | None],  # (d,)
) -> None:
    """The way back, in place: gradients of what attention took become those of what was projected.
    Adds to those of the norms."""
    if w.q_norm is None or w.k_norm is None:
        s.rotate_(dq, dk, t, inverse=True)
        return
    q, k, _ = heads(qkv, group, s)
    norms = (w.q_norm, w.k_norm)

    def run(tile: slice) -> None:
        given, outs = (q[tile], k[tile]), (dq[tile], dk[tile])
        grads = [out.to(norm.dtype) for out, norm in zip(outs, norms, strict=True)]
        s.rotate_(grads[0], grads[1], t, tile, inverse=True)
        for grad, x, norm, dw, out in zip(grads, given, norms, d_norms, outs, strict=True):
            rms_norm_backward(grad, x, norm, s.eps, dw=dw, out=out)

    for tile in s.tiles(len(q)) if is_wide(w) else [ALL]:
        run(tile)


def is_wide(w: Weights) -> bool:
    """In autocast q is projected in 16 bits, and its norm returns the weight's fp32. So it stays, a
    tile at a time, until it is rotated."""
    return w.q_norm is not None and w.q_norm.dtype != w.q.dtype


def heads(qkv: Tensor, group: Group, s: Schedule) -> QKV:  # (T, h, d), (T, k, d), (T, k, d): views
    h, k = (group.q.stop - group.q.start), (group.kv.stop - group.kv.start)
    return QKV(*(part.unflatten(1, (-1, s.head_dim)) for part in qkv.split([h, k, k], dim=1)))


def attention_forward(
    x: Tensor,  # (T, D)
    w: Weights,
    t: Traits,
    s: Schedule,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # o (T, H d), lse (H, T)
    """Adds each group's q, k, v to `kept`."""
    T, Hd = x.shape[0], w.q.shape[0]
    o = w.q.new_empty(T, Hd)
    lse = torch.empty(Hd // s.head_dim, T, dtype=torch.float32, device=x.device)

    def attend(group: Group) -> None:
        qkv = project_qkv(x, w, t, s, group)
        ready = attended(qkv, w, t, s, group, in_place=kept is None)
        o_group = o[:, group.q].unflatten(1, (-1, s.head_dim))
        with annotate("attention"):
            s.attention.forward(ready, s.documents, t.scale, o_group, lse[group.lse], s.window(t))
        if kept is not None:
            kept.append(qkv)

    for group in each("head group", split_heads(w, s)):
        attend(group)
    return o, lse


class Residuals(NamedTuple):
    """What the MLP's backward needs; None: computed again."""

    h: Tensor | None = None  # (T, D)
    gate: Tensor | None = None  # (T, F)
    up: Tensor | None = None  # (T, F)

    def of(self, tile: slice) -> Residuals:
        return Residuals(*(None if part is None else part[tile] for part in self))


NOTHING = Residuals()


@annotated("mlp")
def mlp_forward(
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    w: Weights,
    t: Traits,
    s: Schedule,
    kept: Residuals = NOTHING,
    saved: Saved | None = None,
) -> Tensor:  # (T, D)
    """y = h + r mlp(rms_norm(h)) with h = x + r o Wo', tile by tile; r is `t.residual`. Fills what
    is `kept`."""
    y = torch.empty_like(x)

    def run(tile: slice) -> None:
        out = kept.of(tile)
        with annotate("projections"):
            h = linear_add(x[tile], o[tile], w.o, w.o_bias, scale=t.residual, out=out.h)
        n2 = normed(h, w.norm2, s)
        gate = linear(n2, w.gate, w.gate_bias, out=out.gate)
        up = linear(n2, w.up, w.up_bias, out=out.up)
        product = swiglu_forward(gate, up, out=gate if out.gate is None else None)
        linear_add(h, product, w.down, w.down_bias, scale=t.residual, out=y[tile])
        if saved is not None:
            s.store.send(saved, *Residuals._fields, tile=tile)

    for tile in each("tile", s.tiles(x.shape[0])):
        run(tile)
    return y


# --- backward --------------------------------------------------------------------------------


class Gradients:
    """What the layer's parameters get: `wants` says which, each is rounded when it is complete."""

    def __init__(self, w: Weights, wants: Weights) -> None:
        self.w, self.wants = w, wants
        self.done: dict[str, Tensor | None] = {}
        self._gate_up: Tensor | None = None

    def linear(self, name: str) -> WeightGradient:
        return WeightGradient(getattr(self.wants, name), getattr(self.wants, f"{name}_bias"))

    def gate_up(self) -> tuple[WeightGradient, WeightGradient]:
        if not self.w.gate_up_in_one:
            return self.linear("gate"), self.linear("up")
        if not self.wants.gate:
            return WeightGradient(False), WeightGradient(False)
        self._gate_up = torch.empty_like(self.w.gate, dtype=torch.float32)
        gate, up = (WeightGradient(True, into=half) for half in self._gate_up.chunk(2))
        return gate, up

    def norm(self, name: str) -> Tensor | None:
        weight = getattr(self.w, name)
        wanted = getattr(self.wants, name)
        return torch.zeros_like(weight, dtype=torch.float32) if wanted else None

    def finish(self, name: str, grad: WeightGradient | Tensor | None, scale: float = 1.0) -> None:
        """The gradient is `scale` times `grad`."""
        dtype = self.w.q.dtype
        if isinstance(grad, WeightGradient):
            self.done[name], self.done[f"{name}_bias"] = grad.round(dtype, scale)
        else:
            self.done[name] = None if grad is None else grad.to(dtype)

    def finish_gate_up(self, gate: WeightGradient, up: WeightGradient) -> None:
        if self.w.gate_up_in_one:
            self.finish("gate", self._gate_up)
            self._gate_up = None
        else:
            self.finish("gate", gate)
            self.finish("up", up)

    def finish_qkv(self, grad: WeightGradient) -> None:
        for suffix, whole in zip(("", "_bias"), grad.round(self.w.q.dtype), strict=True):
            parts: list[Tensor | None] | Any = [whole, None, None]
            if whole is not None and not self.w.qkv_in_one:
                parts = whole.split([x.shape[0] for x in (self.w.q, self.w.k, self.w.v)])
            self.done |= {f"{n}{suffix}": part for n, part in zip("qkv", parts, strict=True)}


@annotated("mlp")
def mlp_backward_(
    dy: Tensor,  # (T, D), overwritten by dh
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    kept: Residuals,
    w: Weights,
    t: Traits,
    s: Schedule,
    grads: Gradients,
) -> None:
    """Step 1: from dy to dh = dy + rms_norm'(h, dn2), and the gradients of down, gate, up, o."""
    d_o, d_down = grads.linear("o"), grads.linear("down")
    d_gate, d_up = grads.gate_up()
    d_norm2 = grads.norm("norm2")

    def run(tile: slice) -> None:
        dy_t, o_t = dy[tile], o[tile]
        h, gate, up = kept.of(tile)
        if h is None:
            with annotate("projections"):
                h = linear_add(x[tile], o_t, w.o, w.o_bias, scale=t.residual)
        n2 = normed(h, w.norm2, s)
        if gate is None or up is None:
            gate, up = linear(n2, w.gate, w.gate_bias), linear(n2, w.up, w.up_bias)
        # d_product, until the next line writes the product over it.
        narrow = dy_t.to(s.dtype)
        product = scaled_mm(narrow, w.down, t.residual)
        swiglu_backward_(product, gate, up, product=product)  # gate, up become their gradients
        d_down.add(narrow, product)
        d_gate.add(gate, n2)
        d_up.add(up, n2)
        dn2 = torch.addmm(gate @ w.gate, up, w.up).to(h.dtype)
        rms_norm_backward(dn2, h, w.norm2, s.eps, d_residual=dy_t, dw=d_norm2, out=dy_t)
        with annotate("projections"):
            d_o.add(dy_t.to(s.dtype), o_t)

    for tile in each("tile", s.tiles(x.shape[0])):
        s.store.wait(tile)
        run(tile)
    grads.finish("o", d_o, t.residual)
    grads.finish("down", d_down, t.residual)
    grads.finish_gate_up(d_gate, d_up)
    grads.finish("norm2", d_norm2)


@annotated("projections")
def attention_backward_(
    dh: Tensor,  # (T, D)
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d), overwritten by dq
    lse: Tensor,  # (H, T)
    kept: list[Tensor],  # (T, (h + 2 k) d) of each group, or empty
    w: Weights,
    t: Traits,
    s: Schedule,
    grads: Gradients,
) -> Tensor:  # (T, 2 K d): dk | dv
    """Step 2: dq, dk, dv of the plain projections, one head group at a time, and the gradients of
    the norms of q and k."""
    Kd = w.k.shape[0]
    d_norms = grads.norm("q_norm"), grads.norm("k_norm")
    dkv = w.q.new_empty(x.shape[0], 2 * Kd)
    narrow = dh.to(s.dtype)

    def run(i: int, group: Group) -> None:
        qkv = kept[i] if kept else project_qkv(x, w, t, s, group)
        ready = attended(qkv, w, t, s, group, in_place=False)
        do = scaled_mm(narrow, w.o[:, group.q], t.residual).unflatten(1, (-1, s.head_dim))
        o_group = o[:, group.q].unflatten(1, (-1, s.head_dim))
        with annotate("attention"):
            dq, dk, dv = s.attention.backward(
                *(do, ready, s.documents, t.scale, o_group, lse[group.lse], s.window(t))
            )
        unattended_(dq, dk, qkv, w, t, s, group, d_norms)
        o[:, group.q] = dq.flatten(1)
        dkv[:, group.kv] = dk.flatten(1)
        dkv[:, Kd:][:, group.kv] = dv.flatten(1)

    for i, group in enumerate(each("head group", split_heads(w, s))):
        run(i, group)
    for name, d_norm in zip(("q_norm", "k_norm"), d_norms, strict=True):
        grads.finish(name, d_norm)
    return dkv


@annotated("projections")
def input_backward_(
    dh: Tensor,  # (T, D), overwritten by dx
    x: Tensor,  # (T, D)
    dq: Tensor,  # (T, H d)
    dkv: Tensor,  # (T, 2 K d)
    w: Weights,
    s: Schedule,
    grads: Gradients,
    retire: Any,
) -> None:
    """Step 3: from dh to dx = dh + rms_norm'(x, dn1), and the gradients of q, k, v."""
    given, wants = grads.w, grads.wants
    whole = given.q.to(s.dtype) if given.qkv_in_one else torch.cat([w.q, w.k, w.v])
    d_qkv = WeightGradient(
        bool(wants.q or wants.k or wants.v),
        bool(wants.q_bias or wants.k_bias or wants.v_bias),
    )
    d_norm1 = grads.norm("norm1")

    def run(tile: slice) -> None:
        n1 = normed(x[tile], w.norm1, s)
        dqkv = torch.cat([dq[tile], dkv[tile]], dim=1)
        d_qkv.add(dqkv, n1)
        dn1 = (dqkv @ whole).to(x.dtype)  # whole: (H d + 2 K d, D)
        rms_norm_backward(
            dn1, x[tile], w.norm1, s.eps, d_residual=dh[tile], dw=d_norm1, out=dh[tile]
        )

    for tile in each("tile", s.tiles(x.shape[0])):
        run(tile)
        retire(tile)
    grads.finish("norm1", d_norm1)
    grads.finish_qkv(d_qkv)


# --- the layer -------------------------------------------------------------------------------


def keep(
    saved: Saved,
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    lse: Tensor,  # (H, T)
    qkv: list[Tensor],  # (T, (h + 2 k) d) of each group
    w: Weights,
    s: Schedule,
) -> Residuals:
    """Keeps what is there already, and returns room for what the MLP will leave."""
    T, F = x.shape[0], w.gate.shape[0]
    s.store.add(saved, Rung.X, x=x)
    if saved.keeps(Rung.O):
        s.store.add(saved, Rung.O, o=o, lse=lse)
    if saved.keeps(Rung.QKV):
        s.store.add(saved, Rung.QKV, **{_part(i): part for i, part in enumerate(qkv)})
    s.store.send(saved, *saved.entries)
    if not saved.keeps(Rung.H):
        return NOTHING
    h = torch.empty_like(x)
    s.store.add(saved, Rung.H, h=h)
    if not saved.keeps(Rung.ALL):
        return Residuals(h)
    gate, up = o.new_empty(T, F), o.new_empty(T, F)
    s.store.add(saved, Rung.ALL, gate=gate, up=up)
    return Residuals(h, gate, up)


def _part(group: int) -> str:
    return f"qkv{group}"


class _ScheduledLayer(torch.autograd.Function):
    @staticmethod
    @annotated("layer forward")
    def forward(
        ctx: Any,
        x: Tensor,  # (T, D)
        t: Traits,
        s: Schedule,
        layers_above: int | None,
        *weights: Tensor | None,
    ) -> Tensor:  # (T, D)
        w = Weights(*weights).apart().cast(s.dtype)  # type: ignore[arg-type]
        saved = None
        if layers_above is not None and any(ctx.needs_input_grad):
            saved = s.store.open(layers_above)
        qkv: list[Tensor] = []
        keeps_qkv = saved is not None and saved.keeps(Rung.QKV)
        o, lse = attention_forward(x, w, t, s, qkv if keeps_qkv else None)
        kept = NOTHING if saved is None else keep(saved, x, o, lse, qkv, w, s)
        y = mlp_forward(x, o, w, t, s, kept, saved)
        if saved is not None:
            s.store.release(saved)
        ctx.traits, ctx.schedule, ctx.saved = t, s, saved
        ctx.x, ctx.version = weakref.ref(x), 0 if saved is None else x._version
        ctx.save_for_backward(*weights)
        return y

    @staticmethod
    @once_differentiable
    @annotated("layer backward")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        t: Traits = ctx.traits
        s: Schedule = ctx.schedule
        given = Weights(*ctx.saved_tensors)
        w = given.apart().cast(s.dtype)
        grads = Gradients(given, Weights(*ctx.needs_input_grad[4:]))
        tiles = s.tiles(dy.shape[0])
        kept = s.store.load(ctx.saved, tiles)
        x = kept["x"]
        if x is ctx.x() and x._version != ctx.version:  # a user's own, as inputs_embeds
            raise RuntimeError("a layer's input was modified in place before its backward")
        if "o" in kept:
            o, lse = kept["o"], kept["lse"]
        else:
            for tile in tiles:
                s.store.wait(tile)
            o, lse = attention_forward(x, w, t, s)
        dx = dy.contiguous()  # nobody else reads it: the layer above made it for this one
        residuals = Residuals(kept.get("h"), kept.get("gate"), kept.get("up"))
        mlp_backward_(dx, x, o, residuals, w, t, s, grads)
        groups = [kept[_part(i)] for i in range(s.head_groups) if _part(i) in kept]
        dkv = attention_backward_(dx, x, o, lse, groups, w, t, s, grads)
        input_backward_(dx, x, o, dkv, w, s, grads, lambda tile: s.store.retire(ctx.saved, tile))
        s.store.finish(ctx.saved)
        return dx, None, None, None, *(grads.done.get(name) for name in Weights._fields)


def scheduled_layer(x: Tensor, s: Schedule, layers_above: int, w: Weights) -> Tensor:
    """The decoder layer of the module's equations, differentiable in x (T, D) and every weight.

    `layers_above` is how many layers follow this one: the store keeps the last ones on the GPU.
    """
    above = layers_above if torch.is_grad_enabled() else None  # no backward: nothing is kept
    return _ScheduledLayer.apply(x, s.traits[-1 - layers_above], s, above, *w)


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, owned: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.owned = eps, owned
        return rms_norm_forward(x, weight, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        dy = dy.contiguous()
        out = dy if ctx.owned else None
        dx = rms_norm_backward(dy, x, weight, ctx.eps, dw=dw, out=out)
        return dx, None if dw is None else dw.to(weight.dtype), None, None


def final_norm(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (D,)
    eps: float,
    owned: bool = True,
) -> Tensor:  # (T, D)
    """RMSNorm between the last layer and the loss, whose gradient it overwrites with its own if
    that is `owned`: no one else may hold it, as autograd lets both terms of a sum.

    There the last layer's x, o and output and the loss's gradient are all alive: a fifth unit for
    dx would be the peak of the whole backward pass.
    """
    return _FinalNorm.apply(x, weight, eps, owned)
