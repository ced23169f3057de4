"""A gate of attention's output, as in Qwen3.5 and Qwen3-Next, where o's projection reads it:

    [q g] = n1 Wqg'               Wqg (H, 2, d, D): each head's rows of q, then those of its gate
    p = o * sigmoid(g)            h = x + p Wo'                               (T, H d), (T, D)

    do = dp * sigmoid(g)          dg = dp * o * sigmoid(g) (1 - sigmoid(g))

A head's rows of q and of its gate alternate in one parameter, so that neither is a matrix at one
stride. A pass copies the rows of the gate, and each head group those of its q (together 64 MiB in a
layer of Qwen3.5-9B, read and written in 0.05 ms by count). In backward dq and dg alternate instead,
in the tile's buffer that has dk and dv beside them: one matmul with the whole parameter gives dn1,
another gives its gradient, and an adapter meets its rows in PEFT's order.

g is not kept: it is computed from n1 where a tile of p is needed, once in forward and once in
backward. o is kept as attention gave it, since attention's backward reads it so. From a tile's end
of the block on, backward holds do and dg of all heads, T H d elements each, until attention and the
projections read them. What dk and dv take is found in do (key_gradients.py).

Source: Qiu et al., Gated Attention for Large Language Models (arXiv 2505.06708). The letters are
those of layer/__init__.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.layer.parts.heads import HeadGroups
from longctx.layer.passes import Pass


class OutputGate:
    """The gate in one pass, for a layer that has one."""

    def __init__(self, p: Pass, heads: HeadGroups) -> None:
        assert heads.wide_norms is None, "norms over all heads would read the gate's columns"
        self._pass, self._normed = p, heads.normed
        self._projection = p.weights["q"].rows(heads.rows_of_q(1))
        self._grad: Tensor | None = None  # (T, H d): g of a tile, then dg
        self._held: slice | None = None
        """The tile of which `_grad` has g."""

    def forward(self, x: Tensor, o: Tensor, tile: slice) -> Tensor:  # (T, D), (T, H d)
        """Returns p of a tile, (t, H d). In backward g is held until `backward` of the tile."""
        if self._pass.gradients is not None:
            return swiglu_forward(self._again(x, o, tile), o[tile], activation="sigmoid")
        g = self._projection(self._normed(x[tile]), tile)
        return swiglu_forward(g, o[tile], out=g, activation="sigmoid")

    def _again(self, x: Tensor, o: Tensor, tile: slice) -> Tensor:
        if self._grad is None:
            self._grad = torch.empty_like(o)
        if self._held != tile:
            self._projection(self._normed(x[tile]), tile, out=self._grad[tile])
            self._held = tile
        return self._grad[tile]

    def backward(
        self,
        x: Tensor,  # (T, D)
        dp: Tensor,  # (t, H d), overwritten by p
        o: Tensor,  # (T, H d)
        tile: slice,
        do: Tensor,  # (t, H d), written
    ) -> Tensor:  # (t, H d)
        """Turns g of a tile into dg, writes do, and returns p in dp's place."""
        g = self._again(x, o, tile)
        do.copy_(o[tile])
        swiglu_backward_(dp, g, do, product=dp, activation="sigmoid")
        self._held = None
        return dp

    def beside(self, dq: Tensor, dkv: Sequence[Tensor], tile: slice) -> Tensor:
        """Returns a tile's dq and dg, as the parameter's rows alternate, then the columns of dk and
        dv, (t, 2 H d + 2 K d)."""
        assert self._grad is not None
        d, columns = self._pass.schedule.head_dim, [x.shape[1] for x in dkv]
        made = dq.new_empty(len(dq), 2 * dq.shape[1] + sum(columns))
        both, *rest = made.split([2 * dq.shape[1], *columns], dim=1)
        for i, grad in enumerate((dq, self._grad[tile])):
            both.unflatten(1, (-1, 2, d))[:, :, i] = grad.unflatten(1, (-1, d))
        for room, grad in zip(rest, dkv, strict=True):
            room.copy_(grad)
        return made
