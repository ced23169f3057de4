"""Attention's residual block:

    n1 = rms_norm(x)              q, k, v = rope(n1 Wq', n1 Wk'), n1 Wv'      (T, H d), (T, K d)
    o, lse = attention(q, k, v)   h = x + r o Wo'                             (T, H d), (T, D)

Where a norm follows, z = o Wo' and h = x + rms_norm(z). A head may have a sink, a logit that takes
part in its softmax and has no value (attention/sinks.py); o and lse are those with sinks. o may
have a gate, by which it is multiplied where Wo reads it (output_gate.py).

Attention runs over the whole row, head group by head group (heads.py), so that q, k and v exist for
one group only. h is made tile by tile, where the MLP reads it. Backward runs after the MLP's:

    per tile     dWo; the MLP's block has turned dy into dh; with a norm dz = rms_norm'(z, dh)
                 and do = dz Wo; with a gate do and dg
    per group    [recompute q, k, v]; do = dh Wo; dq, dk, dv = attention'; dq takes o's place (with
                 norms of q, k: both are copied, normed and rotated; dq, dk pass back)
    per tile     dn1 = [dq dk dv] [Wq; Wk; Wv] in one matmul; dWq, dWk, dWv; dx = dh + rms_norm'
                 (with a gate dg beside dq)

The letters are those of layer/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from longctx.attention.protocol import QKV, AttentionCall, take_turns
from longctx.attention.sinks import Sinks
from longctx.kernels.annotate import annotated, each
from longctx.layer.adapters.protocol import ALL
from longctx.layer.linear import WeightGradient, stacked, sum_dtype
from longctx.layer.parts.heads import HeadGroup, HeadGroups
from longctx.layer.parts.key_gradients import KeyGradients
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.output_gate import OutputGate
from longctx.layer.parts.protocol import NOTHING, Kept, OverRow
from longctx.layer.passes import Pass
from longctx.layer.projection import (
    add_input_grads_,
    low_rank_grads,
    outputs_grad,
    plus_product,
)
from longctx.layer.specs.attention_spec import AttentionSpec


class SelfAttention(OverRow):
    """The block in one pass. `kept` has what forward kept: among it h (T, D), the block's result,
    or z where a norm follows."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        self._pass, self._schedule, self._o = p, p.schedule, p.weights["o"]
        self._spec = spec = p.spec.one(AttentionSpec)
        self._scale, self._score_scale = spec.factor, spec.scale * spec.score_factor
        self._kept = kept
        self._heads = HeadGroups(p, kept.get("rstd"))
        self._gate = OutputGate(p, self._heads) if spec.output_gate else None
        self._post = Norm(p, "post1")
        self.h = kept.get("h")
        self._x: Tensor | None = None  # (T, D), in backward
        self._do: Tensor | None = None
        self._attended: tuple[Tensor, Tensor] | None = None  # o (T, H d), lse (H, T)
        self._d_o = None if p.gradients is None else p.gradients.projection("o")
        self._sinks: Sinks | None = None
        if (logits := p.weights.given.get("sinks")) is not None:
            grad = None if p.gradients is None else p.gradients.zeros("sinks")
            self._sinks = Sinks(logits, grad)

    # --- forward ---------------------------------------------------------------------------

    def normed(self, x: Tensor) -> Tensor:  # (t, D) -> (t, D)
        """Returns n1, which an MLP beside attention reads, too."""
        return self._heads.normed(x)

    def begin(self, x: Tensor) -> None:  # (T, D)
        """Computes o, and keeps what forward keeps of the whole row."""
        qkv: list[Tensor] = []
        self._attended = self.forward(x, qkv if self._pass.keeps("q k v") else None)
        self._keep(x, *self._attended, qkv)

    def forward(
        self,
        x: Tensor,  # (T, D)
        kept: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # o (T, H d), lse (H, T)
        """Runs attention over the row, and appends each group's q, k, v to `kept` if given."""
        s, weight = self._schedule, self._heads.q.weight
        T, Hd = x.shape[0], self._heads.columns
        # In the weights' dtype: the residual stream x may be fp32, as in autocast.
        o = weight.new_empty(T, Hd)
        lse = torch.empty(Hd // s.head_dim, T, dtype=torch.float32, device=x.device)
        self._heads.measure(x)

        def projected(group: HeadGroup) -> QKV:
            qkv = self._heads.project(x, group)
            if kept is not None:
                kept.append(qkv)
            # What is kept must stay as projected, since the norms of q and k need it in backward.
            return self._heads.ready(qkv, group, in_place=kept is None)

        def attend(group: HeadGroup) -> Iterator[None]:
            qkv = projected(group)
            o_group = o[:, group.q].unflatten(1, (-1, s.head_dim))
            pauses = s.attention.forward_in_turns(self._call(group, qkv, o_group, lse))
            del qkv  # its memory may be freed while this group pauses
            yield from pauses

        take_turns(attend(group) for group in each("head group", self._heads))
        self._heads.forget_inner()
        return o, lse

    def _call(self, group: HeadGroup, qkv: QKV, o: Tensor, lse: Tensor) -> AttentionCall:
        """Returns the call of a group's heads: o (T, h, d) is theirs, lse (H, T) all heads'."""
        s = self._schedule
        sinks = None if self._sinks is None else self._sinks.of(group.lse)
        window = s.window(self._spec)
        given = qkv, s.documents, self._score_scale, o, lse[group.lse]
        return AttentionCall(*given, window, sinks)

    def _keep(self, x: Tensor, o: Tensor, lse: Tensor, qkv: Sequence[Tensor]) -> None:
        """Keeps the activations of the whole row, and allocates h where it is kept."""
        p = self._pass
        if p.keeps("o"):
            made = {"o": o, "lse": lse}
            if self._heads.wide_norms is not None and self._heads.wide_norms.rstd is not None:
                made["rstd"] = self._heads.wide_norms.rstd
            p.keep("o", made, whole=["lse"])
        if p.keeps("q k v"):
            p.keep("q k v", {_part(i): part for i, part in enumerate(qkv)})
        # Without an MLP, and beside one that reads norm(x) too, h is never read.
        if p.keeps("h") and p.spec.between:
            self.h = torch.empty_like(x, dtype=x.dtype if self._post.weight is None else o.dtype)
            p.keep("h", {"h": self.h}, of_tiles=True)

    @property
    def o(self) -> Tensor:  # (T, H d)
        assert self._attended is not None
        return self._attended[0]

    @annotated("projections")
    def output(self, x: Tensor, tile: slice, onto: Tensor | None = None) -> Tensor:
        """Returns h of a tile, (t, D), and writes what forward keeps of it. What attention gives is
        added to `onto` (t, D) if given, else to x."""
        out = None if self.h is None else self.h[tile]
        if self._post.weight is not None:
            return self._normed(x, self._o(self._read(x, tile), tile, out=out), tile)
        onto = x[tile] if onto is None else onto
        return self._o.added(onto, self._read(x, tile), tile, scale=self._scale, out=out)

    def _read(self, x: Tensor, tile: slice) -> Tensor:
        """Returns what o's projection reads of a tile, (t, H d)."""
        return self.o[tile] if self._gate is None else self._gate.forward(x, self.o, tile)

    def _normed(self, x: Tensor, z: Tensor, tile: slice) -> Tensor:
        return x[tile] + self._post.forward(z)

    # --- backward --------------------------------------------------------------------------

    def again(self, x: Tensor) -> None:
        """Makes ready o and lse, kept or else recomputed from all of x."""
        self._x = x
        if "o" in self._kept:
            self._attended = self._kept["o"], self._kept["lse"]
            return
        # Attention reads the whole row, so all of x must have come up from the host.
        for tile in self._schedule.tiles(len(x)):
            self._schedule.store.wait(tile)
        self._attended = self.forward(x)

    @annotated("projections")
    def output_again(self, x: Tensor, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Returns h of a tile, (t, D), kept or else recomputed, and z where a norm follows."""
        if self._post.weight is None:
            return (self.output(x, tile) if self.h is None else self.h[tile]), None
        z = self._o(self._read(x, tile), tile) if self.h is None else self.h[tile]
        return self._normed(x, z, tile), z

    @annotated("projections")
    def output_backward(
        self, dh: Tensor, held: Tensor | None, tile: slice, *, goes_on: bool
    ) -> None:
        """Adds a tile's part, from dh (t, D), to the gradients of o's projection and of the norm
        that follows, which read z, `held`. Such a norm makes dz another tensor than dh, and
        `backward_` is left do (T, H d) instead, if it follows; so it is with a gate."""
        z, o, scale = held, self.o, self._scale
        assert self._d_o is not None and self._x is not None
        assert z is not None or self._post.weight is None, "a layer of one block has no such norm"
        narrow = (dh if z is None else self._post.backward(dh, z)).to(self._schedule.dtype)
        v, read = self._o.inner_grad(narrow), o[tile]
        if self._gate is not None:
            dp = self._o.input_grad(narrow, v, tile, scale=scale)
            read = self._gate.backward(self._x, dp, o, tile, self._held_do(tile))
        elif z is not None and goes_on:
            self._o.input_grad(narrow, v, tile, scale=scale, out=self._held_do(tile))
        self._d_o.add(narrow, read, v, tile)

    def _held_do(self, tile: slice) -> Tensor:
        """Returns where do of a tile is held, (t, H d)."""
        if self._do is None:
            self._do = torch.empty_like(self.o)
        return self._do[tile]

    def finish_output(self) -> None:
        assert self._d_o is not None
        self._pass.grads.finish("o", self._d_o, self._scale)
        self._post.finish()

    def reaches(self, wants_dx: bool) -> bool:
        names = ("norm1", "q", "k", "v", "q_norm", "k_norm", "sinks")
        return wants_dx or self._pass.grads.wanted(*names)

    def backward_(self, dh: Tensor, x: Tensor, dn: Tensor | None, wants_dx: bool) -> None:
        assert self._attended is not None
        o, lse = self._attended
        self.input_backward_(dh, x, o, self.groups_backward_(dh, x, o, lse), dn, wants_dx)

    @annotated("projections")
    def groups_backward_(
        self,
        dh: Tensor,  # (T, D)
        x: Tensor,  # (T, D)
        o: Tensor,  # (T, H d), overwritten by dq
        lse: Tensor,  # (H, T)
    ) -> KeyGradients:
        """Computes dq, dk, dv as the projections' outputs need them, one head group at a time, and
        the gradients of the norms of q and k and of sinks."""
        s, heads = self._schedule, self._heads
        dkv = KeyGradients(list(heads), self._do, heads.q.weight, x.shape[0])
        output_grad, kept = self._output_grad(dh), self._kept_groups()

        def run(i: int, group: HeadGroup) -> Iterator[None]:
            qkv = kept[i] if kept else heads.project(x, group)
            ready = heads.ready(qkv, group, in_place=False)
            grads = output_grad(group), o[:, group.q], *dkv.rooms(i)
            do, dq, dk, dv = (x.unflatten(1, (-1, s.head_dim)) for x in grads)
            del grads
            call = self._call(group, ready, dq, lse)  # dq's memory still holds o
            pauses = s.attention.backward_in_turns(do, call, QKV(dq, dk, dv))
            # Held on over the pause, because the norms' gradients need it; else it is freed.
            unnormed = qkv if heads.qk_norms else None
            del qkv, ready, do, call
            yield from pauses
            heads.back_(dq, dk, unnormed, group)
            dkv.put(i, dk.flatten(1), dv.flatten(1))
            for tile in s.tiles(len(dq)):
                self._pass.retire(tile, _part(i))

        take_turns(run(i, group) for i, group in enumerate(each("head group", heads)))
        for norm in heads.qk_norms:
            norm.finish()
        if self._sinks is not None:
            self._pass.grads.put("sinks", self._sinks.grad)
        return dkv

    def _kept_groups(self) -> list[Tensor]:  # (T, (h + 2 k) d) each
        """Returns each group's kept q, k, v; an empty list if forward kept none."""
        kept = self._kept
        return [kept[_part(i)] for i in range(len(kept)) if _part(i) in kept]

    def _output_grad(self, dh: Tensor) -> Callable[[HeadGroup], Tensor]:
        """Returns what gives do (T, h d) of a group: of those that are held, or made from dh."""
        s, w_o, scale = self._schedule, self._o, self._scale
        # Given up here, so that it is freed with the function that is returned.
        held, self._do = self._do, None
        if held is not None:
            return lambda group: held[:, group.q]
        narrow = dh.to(s.dtype)
        v = w_o.inner_grad(narrow)
        tiles = [ALL] if v is None else s.tiles(len(narrow))  # by which masks differ

        def made(group: HeadGroup) -> Tensor:
            at = group.q
            do = narrow.new_empty(len(narrow), at.stop - at.start)
            for tile in tiles:
                of_tile = None if v is None else v[tile]
                w_o.input_grad(narrow[tile], of_tile, tile, scale=scale, columns=at, out=do[tile])
            return do

        return made

    @annotated("projections")
    def input_backward_(
        self,
        dh: Tensor,  # (T, D), overwritten by dx
        x: Tensor,  # (T, D)
        dq: Tensor,  # (T, H d)
        dkv: KeyGradients,
        dn: Tensor | None,  # (T, D)
        wants_dx: bool,
    ) -> None:
        """Turns dh into dx = dh + rms_norm'(x, dn1), if wanted; finishes q, k and v's gradients.
        `dn` is the part of dn1 that comes from an MLP beside attention."""
        s, heads, grads = self._schedule, self._heads, self._pass.grads
        norm, qkv, in_one = heads.norm, heads.qkv, "q" in grads.w.holders
        whole = grads.w.given["q"].to(s.dtype) if in_one else stacked([p.weight for p in qkv])
        d_qkv = self._d_qkv(whole)
        d_adapters = {name: grads.projection(name, WeightGradient(False)) for name in "qkv"}
        rows, gate = [len(p.weight) for p in qkv], self._gate

        def run(tile: slice) -> None:
            n1 = heads.normed(x[tile])
            us = heads.inner(n1, tile)
            # One matmul with the three stacked weights: n1 is read once, and dn1 is rounded once.
            if gate is None:
                dqkv = torch.cat([dq[tile], *dkv.of(tile)], dim=1)
            else:
                dqkv = gate.beside(dq[tile], dkv.of(tile), tile)
            if heads.wide_norms is not None:
                d_q, d_k, _ = dqkv.split(rows, dim=1)
                heads.wide_norms.backward_(d_q, d_k, *heads.unnormed(n1, us, tile))
            d_qkv.add(dqkv, n1)
            dys = dqkv.split(rows, dim=1)
            vs = [p.inner_grad(dy) for p, dy in zip(qkv, dys, strict=True)]
            for grad, dy, v, u in zip(d_adapters.values(), dys, vs, us, strict=True):
                grad.add(dy, n1, v, tile, u)
            if wants_dx or norm.trained:
                own = outputs_grad(qkv, dqkv)
                dn1 = low_rank_grads(qkv, vs, onto=None if dn is None else dn[tile])
                dn1 = plus_product(dn1, own, whole)
                add_input_grads_(dn1, qkv, dys, vs, tile)
                norm.backward(dn1.to(x.dtype), x[tile], onto=dh[tile], out=dh[tile])

        tiles = s.tiles(x.shape[0])
        for i, tile in enumerate(each("tile", tiles)):
            run(tile)
            # Only the first half: the link stays free between two layers (memory/store.py).
            if i < len(tiles) // 2:
                self._pass.retire_all(tile)
        norm.finish()
        if heads.wide_norms is not None:
            heads.wide_norms.finish()
        grads.finish_stacked(d_qkv, d_adapters)

    def _d_qkv(self, whole: Tensor) -> WeightGradient:
        """The gradient of the weights of q, k and v, stacked along the rows."""
        grads = self._pass.grads
        alike = grads.w.given["q"].dtype == self._schedule.dtype
        return WeightGradient(
            grads.wants("q", "k", "v"),
            grads.wants("q.bias", "k.bias", "v.bias"),
            # A weight of another dtype than the matmuls', as in autocast, has its gradient in fp32.
            dtype=sum_dtype(whole, grads.sums) if alike else torch.float32,
        )


def _part(group: int) -> str:
    return f"qkv{group}"
