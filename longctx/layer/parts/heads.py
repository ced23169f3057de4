"""Head groups: from the layer's input to attention's q, k, v, and back to the projections' outputs.

A group is some key/value heads with their query heads. Its q, k, v lie side by side in one tensor
(T, (h + 2 k) d), written by one matmul per tile; n1 = rms_norm(x) is recomputed for each group.
With G groups n1 is computed G times in forward and G + 1 times in backward (once if q, k, v are
kept), at 2 units of memory traffic each. At 131072 tokens of Llama-3.1-8B with 8 groups this is 17
times 0.5 ms, 0.7% of the layer.

If each head of q and k has a norm, they are kept and passed on as they were projected, since the
norms' gradients need them in this form; attention takes copies, normed and rotated. Norms over all
heads together are in wide_norms.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.protocol import QKV
from longctx.kernels.annotate import annotated, each
from longctx.layer.adapters.protocol import ALL, Rows
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.wide_norms import WideNorms
from longctx.layer.passes import Pass
from longctx.layer.projection import Together, inners
from longctx.layer.specs.attention_spec import AttentionSpec


class HeadGroup(NamedTuple):
    """One head group's columns in q and o (`q`) and in k and v (`kv`), and its rows in lse."""

    q: slice
    kv: slice
    lse: slice


class HeadGroups:
    """Computes the q, k, v of one pass, one head group at a time."""

    def __init__(self, p: Pass, rstd: Tensor | None = None) -> None:
        self._pass, self._schedule = p, p.schedule
        self.q, self.k, self.v = self.qkv = tuple(p.weights[name] for name in "qkv")
        self._spec = spec = p.spec.one(AttentionSpec)
        self._in_q = 1 + spec.output_gate
        """The matrices in q's projection: that of q, and of a gate of o beside it."""
        self._q_norm = p.weights.given.get("q_norm")
        self.norm = Norm(p, "norm1")
        self.qk_norms: tuple[Norm, ...] = ()
        """The norms of each head of q and k; none if the layer has no such norms."""
        self.wide_norms: WideNorms | None = None
        """The norms of q and k over all their heads."""
        if (weight := self._q_norm) is not None:
            if len(weight) == p.schedule.head_dim:
                self.qk_norms = Norm(p, "q_norm"), Norm(p, "k_norm")
            else:
                self.wide_norms = WideNorms(p, rstd)
        self._inner: dict[int, list[Tensor | None]] = {}

    @property
    def columns(self) -> int:
        """The columns of q and of o, H d."""
        return len(self.q.weight) // self._in_q

    def rows_of_q(self, which: int = 0, columns: slice = ALL) -> Rows:
        """Returns the rows of q's projection that give q, or, if `which` is 1, the gate of o
        (output_gate.py), of some heads: their `columns` in o."""
        if self._in_q == 1:
            return columns
        rows = torch.arange(len(self.q.weight), device=self.q.weight.device)
        return rows.view(-1, self._in_q, self._schedule.head_dim)[:, which].flatten()[columns]

    def __iter__(self) -> Iterator[HeadGroup]:
        s = self._schedule
        H, K = self.columns // s.head_dim, len(self.k.weight) // s.head_dim
        k = K // s.head_groups
        h = k * (H // K)
        for i in range(s.head_groups):
            columns = slice(i * h * s.head_dim, (i + 1) * h * s.head_dim)
            kv = slice(i * k * s.head_dim, (i + 1) * k * s.head_dim)
            yield HeadGroup(columns, kv, slice(i * h, (i + 1) * h))

    def normed(self, x: Tensor) -> Tensor:  # (T, D) -> (T, D)
        """Returns n1 = rms_norm(x) in the matmuls' dtype."""
        return self.norm.forward(x).to(self._schedule.dtype)

    def inner(self, n1: Tensor, tile: slice) -> list[Tensor | None]:
        """Returns u of q, k, v (layer/adapters/), (T, r) or (T, 3 r), made once for all groups."""
        if tile.start not in self._inner:
            # x A' does not depend on the group: with 8 groups it would be computed 8 times.
            self._inner[tile.start] = inners(n1, self.qkv, tile)
        return self._inner[tile.start]

    def forget_inner(self) -> None:
        self._inner = {}

    @annotated("projections")
    def measure(self, x: Tensor) -> None:  # (T, D)
        """Prepares norms over all heads, if the layer has such and several head groups."""
        if self.wide_norms is None or self._schedule.head_groups == 1:
            return
        for tile in each("tile", self._schedule.tiles(len(x))):
            n1 = self.normed(x[tile])
            self.wide_norms.measure(*self.unnormed(n1, self.inner(n1, tile), tile), tile)

    def unnormed(self, n1: Tensor, us: list[Tensor | None], tile: slice) -> tuple[Tensor, Tensor]:
        """Returns q (t, H d) and k (t, K d) of a tile, of all heads, as projected."""
        return self.q(n1, tile, u=us[0]), self.k(n1, tile, u=us[1])

    @annotated("projections")
    def project(self, x: Tensor, group: HeadGroup) -> Tensor:  # (T, D) -> (T, (h + 2 k) d)
        """Computes q, k, v of one group: norm, one fused matmul, norms over all heads, rotation. If
        each head has a norm, q and k are returned as projected, without rotation."""
        s = self._schedule
        columns = (self.rows_of_q(0, group.q), group.kv, group.kv)
        parts = [p.rows(rows) for p, rows in zip(self.qkv, columns, strict=True)]
        # One matmul for q, k and v of the group: n1 (T, D) is read once instead of three times.
        together = Together(parts)
        qkv = together.weight.new_empty(x.shape[0], len(together.weight))
        outs = qkv.split([len(p.weight) for p in parts], dim=1)
        for tile in each("tile", s.tiles(x.shape[0])):
            n1 = self.normed(x[tile])
            together(n1, self.inner(n1, tile), tile, out=qkv[tile])
            # A single group has all heads: their squares are summed here, and `measure` is spared.
            if self.wide_norms is not None and s.head_groups == 1:
                self.wide_norms.measure(outs[0][tile], outs[1][tile], tile)
        if self.wide_norms is not None:
            self.wide_norms.apply_(outs[0], outs[1], (group.q, group.kv))
        if not self.qk_norms:
            q, k, _ = self._split(qkv, group)
            s.rotate_(q, k, self._spec)
        return qkv

    def ready(self, qkv: Tensor, group: HeadGroup, *, in_place: bool) -> QKV:
        """Turns the result of `project` into the q, k, v that attention takes: rotated, and normed
        if each head has a norm."""
        q, k, v = self._split(qkv, group)
        if not self.qk_norms:
            return QKV(q, k, v)
        s, t, wide = self._schedule, self._spec, self._is_wide
        # Where q, k, v are kept for backward, attention gets copies, and the originals stay.
        outs = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))

        def run(tile: slice) -> None:
            # fp32 norms do not fit into 16-bit q: they are made apart, a tile at a time.
            into = [None if wide else out[tile] for out in outs]
            made = [
                norm.forward(x, out=out)
                for x, norm, out in zip(self._read(q, k, tile), self.qk_norms, into, strict=True)
            ]
            if not t.norms_rotated:
                s.rotate_(made[0], made[1], t, tile)
            if wide:
                for out, x in zip(outs, made, strict=True):
                    out[tile] = x

        # Tiles bound the fp32 copies; without copies one launch does the whole row.
        for tile in s.tiles(len(q)) if wide or t.norms_rotated else [ALL]:
            run(tile)
        return QKV(outs[0], outs[1], v)

    def back_(
        self,
        dq: Tensor,  # (T, h, d)
        dk: Tensor,  # (T, k, d)
        qkv: Tensor | None,  # (T, (h + 2 k) d), as projected; needed where q and k have norms
        group: HeadGroup,
    ) -> None:
        """The backward of `ready`, in place: turns the gradients of attention's q and k into those
        of the projections' outputs, or of norms over all heads. Adds to the gradients of heads'
        norms."""
        s, t = self._schedule, self._spec
        if qkv is None:
            s.rotate_(dq, dk, t, inverse=True)
            return
        q, k, _ = self._split(qkv, group)

        def run(tile: slice) -> None:
            given, outs = self._read(q, k, tile), (dq[tile], dk[tile])
            grads = [x.to(self._normed_dtype) for x in outs]
            if not t.norms_rotated:
                s.rotate_(grads[0], grads[1], t, tile, inverse=True)
            for i, norm in enumerate(self.qk_norms):
                into = None if t.norms_rotated else outs[i]
                grads[i] = norm.backward(grads[i], given[i], out=into)
            if t.norms_rotated:
                s.rotate_(grads[0], grads[1], t, tile, inverse=True)
                for grad, out in zip(grads, outs, strict=True):
                    out.copy_(grad)

        for tile in s.tiles(len(q)) if self._is_wide or t.norms_rotated else [ALL]:
            run(tile)

    def _read(self, q: Tensor, k: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
        """Returns a tile of what the norms of q and k read, of what was projected."""
        q, k = q[tile], k[tile]
        if self._spec.norms_rotated:
            q, k = (x.to(self._normed_dtype, copy=True) for x in (q, k))
            self._schedule.rotate_(q, k, self._spec, tile)
        return q, k

    @property
    def _normed_dtype(self) -> torch.dtype:
        weight, given = self._q_norm, self.q.weight.dtype
        return self._schedule.norm.dtype(given, weight.dtype) if weight is not None else given

    @property
    def _is_wide(self) -> bool:
        """Whether the norms of q and k return another dtype than q's. In autocast q is projected in
        16 bits and Llama's norm returns fp32; q stays so, one tile at a time, until it is
        rotated."""
        return self._normed_dtype != self.q.weight.dtype

    def _split(self, qkv: Tensor, group: HeadGroup) -> QKV:
        """Returns views of q (T, h, d), k (T, k, d) and v (T, k, d)."""
        h, k = (group.q.stop - group.q.start), (group.kv.stop - group.kv.start)
        sides = qkv.split([h, k, k], dim=1)
        return QKV(*(x.unflatten(1, (-1, self._schedule.head_dim)) for x in sides))
