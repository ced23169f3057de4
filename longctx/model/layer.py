"""The decoder layer's schedule: one autograd.Function with a hand-written backward.

For the T tokens of a batch, x (T, D), weights as Hugging Face holds them (out, in):

    n1 = rms_norm(x)              q, k, v = rope(n1 Wq', n1 Wk'), n1 Wv'      (T, H d), (T, K d)
    o, lse = attention(q, k, v)   h = x + o Wo'                               (T, H d), (T, D)
    n2 = rms_norm(h)              y = h + (silu(n2 Wg') * (n2 Wu')) Wd'       (T, F), (T, D)

That is Llama's. Of other families (families.py) come, as data (`Traits`, `Weights`): a window or
another scale of attention, layers without rope, a factor r of both sums (h = x + r o Wo'), norms of
q and k before rope, and parameters that hold several of these weights. Any of the seven may have an
adapter of low rank (projection.py); for what is frozen nothing is computed, and dx only where
something below is trained.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.annotate import annotate, annotated, each
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, take_turns
from longctx.kernels.launch import once_differentiable
from longctx.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from longctx.kernels.rope import rope_
from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.memory.store import ActivationStore, Saved
from longctx.model.projection import (
    ALL,
    Adapter,
    Lora,
    Projection,
    ProjectionGradient,
    WeightGradient,
    added_up,
    dense,
    inners,
    linear,
    scaled_mm,
    sum_dtype,
)

Retire = Callable[..., None]
"""Tells the store that backward is done with a tile of what was kept under some names."""
NORMS = ("norm1", "norm2", "q_norm", "k_norm")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class Weights(NamedTuple):
    """A layer's parameters, in the order in which the Function takes and returns them.

    One parameter may hold several: q those of q, k, v, one below the other, if k and v are None;
    gate those of gate and up, if up is. `apart` has views of each. An adapter of one that holds
    several has one A (r, I) for them.
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
    q_a: Tensor | None = None  # (r, D), as of all adapters that are there
    q_b: Tensor | None = None  # (H d, r)
    k_a: Tensor | None = None
    k_b: Tensor | None = None
    v_a: Tensor | None = None
    v_b: Tensor | None = None
    o_a: Tensor | None = None
    o_b: Tensor | None = None
    gate_a: Tensor | None = None
    gate_b: Tensor | None = None
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None

    @property
    def qkv_in_one(self) -> bool:
        return self.k is None

    @property
    def gate_up_in_one(self) -> bool:
        return self.up is None

    @property
    def in_one(self) -> dict[str, str]:
        """Weights that another one's parameter holds -> that one."""
        found = {"k": "q", "v": "q"} if self.qkv_in_one else {}
        return found | ({"up": "gate"} if self.gate_up_in_one else {})

    def dense(self) -> Weights:
        """Without quantised weights, for a pass."""
        return Weights(*map(dense, self))

    def apart(self) -> Weights:
        w = self
        if self.qkv_in_one:
            Hd = self.o.shape[1]
            Kd = (self.q.shape[0] - Hd) // 2
            w = w._divided("qkv", [Hd, Kd, Kd])
        if self.gate_up_in_one:
            w = w._divided(("gate", "up"), [len(self.gate) // 2] * 2)
        return w

    def _divided(self, names: Any, sizes: list[int]) -> Weights:
        """The first one's rows are those of all."""
        of = f"{names[0]}%s"
        parts = dict(zip(names, getattr(self, of % "").split(sizes), strict=True))
        if (b := getattr(self, of % "_b")) is not None:
            parts |= {f"{n}_b": x for n, x in zip(names, b.split(sizes), strict=True)}
            parts |= {f"{n}_a": getattr(self, of % "_a") for n in names}
        return self._replace(**parts)

    def layer(self, loras: Mapping[str, Lora], dtype: torch.dtype) -> Layer:
        """For products in `dtype`, to which norms stay as they are, as in autocast. `loras` are
        what adapters have besides their tensors, by the names of projections."""
        w, held = self.apart(), self.in_one

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        def projection(name: str) -> Projection:
            a, b = (getattr(w, f"{name}_{factor}") for factor in "ab")
            lora = loras[held.get(name, name)] if a is not None else None
            adapter = None if lora is None else Adapter.of(a, b, lora, dtype)
            return Projection(getattr(w, name).to(dtype), cast(getattr(w, f"{name}_bias")), adapter)

        parts: dict[str, Any] = {name: projection(name) for name in PROJECTIONS}
        return Layer(**parts, **{name: getattr(w, name) for name in NORMS})


class Layer(NamedTuple):
    """What a pass through a layer computes with."""

    norm1: Tensor  # (D,)
    q: Projection  # (H d, D)
    k: Projection  # (K d, D)
    v: Projection  # (K d, D)
    o: Projection  # (D, H d)
    norm2: Tensor  # (D,)
    gate: Projection  # (F, D)
    up: Projection  # (F, D)
    down: Projection  # (D, F)
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None  # (d,)

    @property
    def qkv(self) -> tuple[Projection, Projection, Projection]:
        return self.q, self.k, self.v


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

    @cached_property
    def seed(self) -> int:
        """Of masks of dropout: drawn from torch's CPU generator by the first who asks."""
        return int(torch.randint(2**63 - 1, ()))

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


def split_heads(w: Layer, s: Schedule) -> Iterator[Group]:
    H, K = len(w.q.weight) // s.head_dim, len(w.k.weight) // s.head_dim
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
    return rms_norm_forward(x, weight, s.eps).to(s.dtype)


class InnerQKV:
    """u of q, k and v (projection.py), (T, r) or (T, 3 r) each: made once for all head groups."""

    def __init__(self, w: Layer) -> None:
        self._qkv = w.qkv
        self._found: dict[int, list[Tensor | None]] = {}

    def of(self, n1: Tensor, tile: slice) -> list[Tensor | None]:
        if tile.start not in self._found:
            self._found[tile.start] = inners(n1, self._qkv, tile)
        return self._found[tile.start]


@annotated("projections")
def project_qkv(
    x: Tensor,  # (T, D)
    w: Layer,
    t: Traits,
    s: Schedule,
    group: Group,
    inner: InnerQKV,
) -> Tensor:  # (T, (h + 2 k) d)
    """q, k, v of one head group, side by side: norm, one fused product, rotation. q and k that have
    a norm of their own stay as they are: its gradient needs them so."""
    parts = list(zip(w.qkv, (group.q, group.kv, group.kv), strict=True))
    weight = torch.cat([p.weight[rows] for p, rows in parts])
    bias = None
    if w.q.bias is not None:
        bias = torch.cat([p.bias[rows] for p, rows in parts if p.bias is not None])
    qkv = weight.new_empty(x.shape[0], weight.shape[0])
    outs = qkv.split([rows.stop - rows.start for _, rows in parts], dim=1)
    adapters = [None if p.adapter is None else p.adapter.rows(rows) for p, rows in parts]
    for tile in each("tile", s.tiles(x.shape[0])):
        n1 = normed(x[tile], w.norm1, s)
        linear(n1, weight, bias, out=qkv[tile])
        for adapter, out, u in zip(adapters, outs, inner.of(n1, tile), strict=True):
            if adapter is not None and u is not None:
                adapter.add_(out[tile], u)
    if w.q_norm is None:
        q, k, _ = heads(qkv, group, s)
        s.rotate_(q, k, t)
    return qkv


def attended(
    qkv: Tensor,  # (T, (h + 2 k) d), as projected
    w: Layer,
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
            rms_norm_forward(x[tile], norm, s.eps, out=out)
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
    qkv: Tensor | None,  # (T, (h + 2 k) d), as projected; needed where q and k have norms
    w: Layer,
    t: Traits,
    s: Schedule,
    group: Group,
    d_norms: tuple[Tensor | None, Tensor | None],  # (d,)
) -> None:
    """The way back, in place: gradients of what attention took become those of what was projected.
    Adds to those of the norms."""
    if w.q_norm is None or w.k_norm is None or qkv is None:
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


def is_wide(w: Layer) -> bool:
    """In autocast q is projected in 16 bits, and its norm returns the weight's fp32. So it stays, a
    tile at a time, until it is rotated."""
    return w.q_norm is not None and w.q_norm.dtype != w.q.weight.dtype


def heads(qkv: Tensor, group: Group, s: Schedule) -> QKV:  # (T, h, d), (T, k, d), (T, k, d): views
    h, k = (group.q.stop - group.q.start), (group.kv.stop - group.kv.start)
    return QKV(*(part.unflatten(1, (-1, s.head_dim)) for part in qkv.split([h, k, k], dim=1)))


def attention_forward(
    x: Tensor,  # (T, D)
    w: Layer,
    t: Traits,
    s: Schedule,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # o (T, H d), lse (H, T)
    """Adds each group's q, k, v to `kept`."""
    T, Hd = x.shape[0], len(w.q.weight)
    o = w.q.weight.new_empty(T, Hd)
    lse = torch.empty(Hd // s.head_dim, T, dtype=torch.float32, device=x.device)
    inner = InnerQKV(w)

    def projected(group: Group) -> QKV:
        qkv = project_qkv(x, w, t, s, group, inner)
        if kept is not None:
            kept.append(qkv)
        return attended(qkv, w, t, s, group, in_place=kept is None)

    def attend(group: Group) -> Iterator[None]:
        qkv = projected(group)
        o_group = o[:, group.q].unflatten(1, (-1, s.head_dim))
        pauses = s.attention.forward_in_turns(
            qkv, s.documents, t.scale, o_group, lse[group.lse], s.window(t)
        )
        del qkv  # while it pauses, it may go
        yield from pauses

    take_turns(attend(group) for group in each("head group", split_heads(w, s)))
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
    w: Layer,
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
            h = w.o.added(x[tile], o[tile], tile, scale=t.residual, out=out.h)
        n2 = normed(h, w.norm2, s)
        u_gate, u_up = inners(n2, (w.gate, w.up), tile)
        gate = w.gate(n2, tile, out=out.gate, u=u_gate)
        up = w.up(n2, tile, out=out.up, u=u_up)
        product = swiglu_forward(gate, up, out=gate if out.gate is None else None)
        w.down.added(h, product, tile, scale=t.residual, out=y[tile])
        if saved is not None:
            s.store.send(saved, *Residuals._fields, tile=tile)

    for tile in each("tile", s.tiles(x.shape[0])):
        run(tile)
    return y


# --- backward --------------------------------------------------------------------------------


class Gradients:
    """What the layer's parameters get: `wants` says which, each is rounded when it is complete."""

    def __init__(self, given: Weights, w: Layer, wants: Weights, sums: int) -> None:
        """Each is a sum over so many tiles; what is multiplied in the end counts as one more."""
        self.given, self.w, self.wants, self.sums = given, w, wants, sums
        self.done: dict[str, Tensor | None] = {}
        self._gate_up: Tensor | None = None

    def wanted(self, *names: str) -> bool:
        """Whether anything of these projections or norms is trained."""
        suffixes = ("", "_bias", "_a", "_b")
        return any(getattr(self.wants, n + s, False) for n in names for s in suffixes)

    def projection(self, name: str, base: WeightGradient | None = None) -> ProjectionGradient:
        wants, held = self.wants, self.given.in_one.get(name, name)
        if base is None:
            dtype = sum_dtype(getattr(self.given, name), self.sums)
            base = WeightGradient(getattr(wants, name), getattr(wants, f"{name}_bias"), dtype=dtype)
        a, b = (getattr(wants, f"{held}_{factor}") for factor in "ab")
        return ProjectionGradient(getattr(self.w, name), base, a=a, b=b)

    def gate_up(self) -> tuple[ProjectionGradient, ProjectionGradient]:
        if not self.given.gate_up_in_one:
            return self.projection("gate"), self.projection("up")
        halves = [WeightGradient(False), WeightGradient(False)]
        if self.wants.gate:
            dtype = sum_dtype(self.given.gate, self.sums)
            self._gate_up = torch.empty_like(self.given.gate, dtype=dtype)
            halves = [WeightGradient(True, into=half) for half in self._gate_up.chunk(2)]
        return self.projection("gate", halves[0]), self.projection("up", halves[1])

    def norm(self, name: str) -> Tensor | None:
        weight = getattr(self.w, name)
        wanted = getattr(self.wants, name)
        return torch.zeros_like(weight, dtype=torch.float32) if wanted else None

    def finish_norm(self, name: str, grad: Tensor | None) -> None:
        self._put(name, grad)

    def finish(self, name: str, grad: ProjectionGradient, scale: float = 1.0) -> None:
        """The gradient is `scale` times `grad`."""
        dtype = self.given.q.dtype
        self.done[name], self.done[f"{name}_bias"] = grad.base.round(dtype, scale)
        self._finish_adapters({name: grad}, scale)

    def finish_gate_up(self, gate: ProjectionGradient, up: ProjectionGradient) -> None:
        if self.given.gate_up_in_one:
            self._put("gate", self._gate_up)
            self._gate_up = None
            self._finish_adapters({"gate": gate, "up": up})
        else:
            self.finish("gate", gate)
            self.finish("up", up)

    def finish_qkv(self, base: WeightGradient, grads: list[ProjectionGradient]) -> None:
        for suffix, whole in zip(("", "_bias"), base.round(self.given.q.dtype), strict=True):
            parts: list[Tensor | None] | Any = [whole, None, None]
            if whole is not None and not self.given.qkv_in_one:
                parts = whole.split([len(p.weight) for p in self.w.qkv])
            self.done |= {f"{n}{suffix}": part for n, part in zip("qkv", parts, strict=True)}
        named = dict(zip("qkv", grads, strict=True))
        for group in [named] if self.given.qkv_in_one else [{n: g} for n, g in named.items()]:
            self._finish_adapters(group)

    def _finish_adapters(self, grads: dict[str, ProjectionGradient], scale: float = 1.0) -> None:
        """Of one parameter: what its parts did to their one A adds up, to B lies side by side."""
        found = [grad.adapters(scale) for grad in grads.values()]
        name = next(iter(grads))
        self._put(f"{name}_a", added_up(a for a, _ in found))
        parts = [b for _, b in found if b is not None]
        self._put(f"{name}_b", torch.cat(parts) if parts else None)

    def _put(self, name: str, grad: Tensor | None) -> None:
        dtype = self.given.q.dtype
        if name[-2:] in ("_a", "_b") and grad is not None:
            dtype = getattr(self.given, name).dtype
        self.done[name] = None if grad is None else grad.to(dtype)


@annotated("mlp")
def mlp_backward_(
    dy: Tensor,  # (T, D), overwritten by dh
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    kept: Residuals,
    w: Layer,
    t: Traits,
    s: Schedule,
    grads: Gradients,
    retire: Retire,
) -> None:
    """Step 1: from dy to dh = dy + rms_norm'(h, dn2), and the gradients of down, gate, up, o."""
    d_o, d_down = grads.projection("o"), grads.projection("down")
    d_gate, d_up = grads.gate_up()
    d_norm2 = grads.norm("norm2")

    def run(tile: slice) -> None:
        dy_t, o_t = dy[tile], o[tile]
        h, gate, up = kept.of(tile)
        if h is None:
            with annotate("projections"):
                h = w.o.added(x[tile], o_t, tile, scale=t.residual)
        n2 = normed(h, w.norm2, s)
        u_gate, u_up = inners(n2, (w.gate, w.up), tile)
        if gate is None or up is None:
            gate, up = w.gate(n2, tile, u=u_gate), w.up(n2, tile, u=u_up)
        # d_product, until the next line writes the product over it.
        narrow = dy_t.to(s.dtype)
        v = w.down.inner_grad(narrow)
        product = w.down.input_grad(narrow, v, tile, scale=t.residual)
        swiglu_backward_(product, gate, up, product=product)  # gate, up become their gradients
        d_down.add(narrow, product, v, tile)
        v_gate, v_up = w.gate.inner_grad(gate), w.up.inner_grad(up)
        d_gate.add(gate, n2, v_gate, tile, u_gate)
        d_up.add(up, n2, v_up, tile, u_up)
        dn2 = w.gate.input_grad(gate, v_gate, tile)
        dn2 = w.up.input_grad(up, v_up, tile, onto=dn2).to(h.dtype)
        rms_norm_backward(dn2, h, w.norm2, s.eps, d_residual=dy_t, dw=d_norm2, out=dy_t)
        with annotate("projections"):
            narrow = dy_t.to(s.dtype)
            d_o.add(narrow, o_t, w.o.inner_grad(narrow), tile)

    for tile in each("tile", s.tiles(x.shape[0])):
        s.store.wait(tile)
        run(tile)
        retire(tile, *Residuals._fields)
    grads.finish("o", d_o, t.residual)
    grads.finish("down", d_down, t.residual)
    grads.finish_gate_up(d_gate, d_up)
    grads.finish_norm("norm2", d_norm2)


@annotated("projections")
def attention_backward_(
    dh: Tensor,  # (T, D)
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d), overwritten by dq
    lse: Tensor,  # (H, T)
    kept: list[Tensor],  # (T, (h + 2 k) d) of each group, or empty
    w: Layer,
    t: Traits,
    s: Schedule,
    grads: Gradients,
    retire: Retire,
    inner: InnerQKV,
) -> Tensor:  # (T, 2 K d): dk | dv
    """Step 2: dq, dk, dv of the plain projections, one head group at a time, and the gradients of
    the norms of q and k."""
    Kd = len(w.k.weight)
    d_norms = grads.norm("q_norm"), grads.norm("k_norm")
    dkv = w.q.weight.new_empty(x.shape[0], 2 * Kd)
    narrow = dh.to(s.dtype)
    v = w.o.inner_grad(narrow)

    def run(i: int, group: Group) -> Iterator[None]:
        qkv = kept[i] if kept else project_qkv(x, w, t, s, group, inner)
        ready = attended(qkv, w, t, s, group, in_place=False)
        do = scaled_mm(narrow, w.o.weight[:, group.q], t.residual)
        if w.o.adapter is not None and v is not None:
            for tile in s.tiles(len(do)):
                w.o.adapter.add_input_grad_(do[tile], v[tile], tile, t.residual, group.q)
        dk, dv = dkv[:, group.kv], dkv[:, Kd:][:, group.kv]
        do, dq, dk, dv = (x.unflatten(1, (-1, s.head_dim)) for x in (do, o[:, group.q], dk, dv))
        pauses = s.attention.backward_in_turns(
            *(do, ready, s.documents, t.scale, dq, lse[group.lse], s.window(t)),
            out=QKV(dq, dk, dv),
        )
        unnormed = None if w.q_norm is None else qkv
        del qkv, ready, do
        yield from pauses
        unattended_(dq, dk, unnormed, w, t, s, group, d_norms)
        for tile in s.tiles(len(dq)):
            retire(tile, _part(i))

    groups = enumerate(each("head group", split_heads(w, s)))
    take_turns(run(i, group) for i, group in groups)
    for name, d_norm in zip(("q_norm", "k_norm"), d_norms, strict=True):
        grads.finish_norm(name, d_norm)
    return dkv


@annotated("projections")
def input_backward_(
    dh: Tensor,  # (T, D), overwritten by dx
    x: Tensor,  # (T, D)
    dq: Tensor,  # (T, H d)
    dkv: Tensor,  # (T, 2 K d)
    w: Layer,
    s: Schedule,
    grads: Gradients,
    wants_dx: bool,
    retire: Retire,
    inner: InnerQKV,
) -> None:
    """Step 3: from dh to dx = dh + rms_norm'(x, dn1), if it is wanted, and the gradients of q, k,
    v."""
    given, wants = grads.given, grads.wants
    whole = given.q.to(s.dtype) if given.qkv_in_one else torch.cat([p.weight for p in w.qkv])
    d_qkv = WeightGradient(
        bool(wants.q or wants.k or wants.v),
        bool(wants.q_bias or wants.k_bias or wants.v_bias),
        dtype=sum_dtype(whole, grads.sums) if given.q.dtype == s.dtype else torch.float32,
    )
    d_adapters = [grads.projection(name, WeightGradient(False)) for name in "qkv"]
    d_norm1 = grads.norm("norm1")
    rows = [len(p.weight) for p in w.qkv]

    def run(tile: slice) -> None:
        n1 = normed(x[tile], w.norm1, s)
        dqkv = torch.cat([dq[tile], dkv[tile]], dim=1)
        d_qkv.add(dqkv, n1)
        dn1 = dqkv @ whole if wants_dx or d_norm1 is not None else None
        us = inner.of(n1, tile)
        for p, grad, dy, u in zip(w.qkv, d_adapters, dqkv.split(rows, dim=1), us, strict=True):
            v = p.inner_grad(dy)
            grad.add(dy, n1, v, tile, u)
            if dn1 is not None and p.adapter is not None and v is not None:
                p.adapter.add_input_grad_(dn1, v, tile)
        if dn1 is not None:
            dn1, dh_t = dn1.to(x.dtype), dh[tile]
            rms_norm_backward(dn1, x[tile], w.norm1, s.eps, d_residual=dh_t, dw=d_norm1, out=dh_t)

    tiles = s.tiles(x.shape[0])
    for i, tile in enumerate(each("tile", tiles)):
        run(tile)
        if i < len(tiles) // 2:
            retire(tile, "lse", "x", "o")
    grads.finish_norm("norm1", d_norm1)
    grads.finish_qkv(d_qkv, d_adapters)


# --- the layer -------------------------------------------------------------------------------


def keep(
    saved: Saved,
    x: Tensor,  # (T, D)
    o: Tensor,  # (T, H d)
    lse: Tensor,  # (H, T)
    qkv: list[Tensor],  # (T, (h + 2 k) d) of each group
    w: Layer,
    s: Schedule,
) -> Residuals:
    """Keeps what attention left beside x, and returns room for what the MLP will leave."""
    T, F = x.shape[0], len(w.gate.weight)
    if saved.keeps("o"):
        s.store.add(saved, "o", o=o, lse=lse)
    if saved.keeps("q k v"):
        s.store.add(saved, "q k v", **{_part(i): part for i, part in enumerate(qkv)})
    s.store.send(saved, *(name for name in saved.entries if name != "x"))
    if not saved.keeps("h"):
        return NOTHING
    h = torch.empty_like(x)
    s.store.add(saved, "h", h=h)
    if not saved.keeps("gate up"):
        return Residuals(h)
    gate, up = o.new_empty(T, F), o.new_empty(T, F)
    s.store.add(saved, "gate up", gate=gate, up=up)
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
        loras: Mapping[str, Lora],
        *weights: Tensor | None,
    ) -> Tensor:  # (T, D)
        w = Weights(*weights).dense().layer(loras, s.dtype)  # type: ignore[arg-type]
        saved = None
        if layers_above is not None and any(ctx.needs_input_grad):
            saved = s.store.open(layers_above)
            s.store.add(saved, "x", x=x)
            s.store.send(saved, "x")  # beside attention, the rest beside the MLP
        qkv: list[Tensor] = []
        keeps_qkv = saved is not None and saved.keeps("q k v")
        o, lse = attention_forward(x, w, t, s, qkv if keeps_qkv else None)
        kept = NOTHING if saved is None else keep(saved, x, o, lse, qkv, w, s)
        y = mlp_forward(x, o, w, t, s, kept, saved)
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
        wants_dx = ctx.needs_input_grad[0]
        tiles = s.tiles(dy.shape[0])
        sums = len(tiles) + (t.residual != 1.0)
        grads = Gradients(given, w, Weights(*ctx.needs_input_grad[5:]), sums)
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
        retire = partial(s.store.retire, ctx.saved)
        mlp_backward_(dx, x, o, residuals, w, t, s, grads, retire)
        if wants_dx or grads.wanted("norm1", "q", "k", "v", "q_norm", "k_norm"):
            groups = [kept[_part(i)] for i in range(s.head_groups) if _part(i) in kept]
            inner = InnerQKV(w)
            dkv = attention_backward_(dx, x, o, lse, groups, w, t, s, grads, retire, inner)
            input_backward_(dx, x, o, dkv, w, s, grads, wants_dx, retire, inner)
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
    """The decoder layer of the module's equations, differentiable in x and every weight.

    `layers_above` is how many layers follow this one: the store keeps the last ones on the GPU.
    `loras` are of the projections that have an adapter in `w`.
    """
    above = layers_above if torch.is_grad_enabled() else None  # no backward: nothing is kept
    return _ScheduledLayer.apply(x, s.traits[-1 - layers_above], s, above, loras, *w)


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, owned: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.owned = eps, owned
        return rms_norm_forward(x, weight, eps)

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
