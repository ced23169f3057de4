"""Norms of q and k over all heads together, as in OLMo 2.

    q = rms_norm(n1 Wq') over H d numbers, k = rms_norm(n1 Wk') over K d        before RoPE

Head groups are not independent then: each number is divided by a sum over all heads. So rstd of q
and k, 8 bytes a token, is made before the first group, by one more matmul of q and k, and kept with
o. In backward each group gives the gradients of the normed q and k; the norms' own backward follows
where a tile's dq and dk of all heads stand, from q and k that one more matmul makes.

With one group nothing is made twice in forward. Ranks that share a row have all heads of their
tokens here, so nothing is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.layer.parts.norms import Norm
from longctx.layer.passes import Pass


class WideNorms:
    """The norms of q and k in one pass, for a layer that has such."""

    def __init__(self, p: Pass, rstd: Tensor | None = None) -> None:  # (T, 2) fp32
        self._pass = p
        self._norms = Norm(p, "q_norm"), Norm(p, "k_norm")
        self.rstd = rstd

    def measure(self, q: Tensor, k: Tensor, tile: slice) -> None:
        """Computes rstd of a tile, from its q (t, H d) and k (t, K d)."""
        if self.rstd is None:
            T = self._pass.schedule.position_ids.shape[-1]
            self.rstd = q.new_empty(T, 2, dtype=torch.float32)
        for i, x in enumerate((q, k)):
            norm = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
            squares = norm.square() / x.shape[1]
            self.rstd[tile, i] = (squares + self._norms[i].spec.eps).rsqrt()

    def apply_(self, q: Tensor, k: Tensor, columns: tuple[slice, slice]) -> None:
        """Norms one group's q (T, h d) and k (T, k d) in place. `columns` are those of the group in
        the q and k of all heads."""
        assert self.rstd is not None
        for i, (norm, x) in enumerate(zip(self._norms, (q, k), strict=True)):
            assert norm.weight is not None
            weight = norm.weight[columns[i]]
            norm.spec.forward(x, weight, out=x, rstd=self.rstd[:, i].contiguous())

    def backward_(self, dq: Tensor, dk: Tensor, q: Tensor, k: Tensor) -> None:
        """Turns a tile's gradients of the normed q (t, H d) and k (t, K d) into those of the
        projections' outputs, in place, from q and k as projected. Adds to the weights'."""
        for norm, dx, x in zip(self._norms, (dq, dk), (q, k), strict=True):
            norm.backward(dx, x, out=dx)

    def finish(self) -> None:
        for norm in self._norms:
            norm.finish()
