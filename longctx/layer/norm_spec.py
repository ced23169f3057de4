"""How a family's norms compute: which norm, its epsilon, what its weight is, how it rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.norm import norm_backward, norm_forward


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """RMSNorm or LayerNorm of x (..., n) with a weight (n,). The equations are in
    kernels/norm.py."""

    eps: float
    centred: bool = False
    """LayerNorm: the mean is subtracted, and there may be a bias."""
    offset: float = 0.0
    """Added to the weight in fp32: Gemma stores w and multiplies by 1 + w."""
    llama_rounding: bool = True
    """The normalised x is rounded before it is multiplied by the weight, and the result has the
    wider of both dtypes. Else the result alone is rounded, and has the dtype of x."""

    def dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Returns the result's dtype for x and a weight of these dtypes."""
        return torch.promote_types(x, weight) if self.llama_rounding else x

    def forward(
        self,
        x: Tensor,  # (..., n)
        weight: Tensor,  # (n,)
        bias: Tensor | None = None,  # (n,), of a LayerNorm
        *,
        out: Tensor | None = None,  # (..., n), written
        rstd: Tensor | None = None,  # (...) fp32, of wider rows that x is a part of, in RMSNorm
    ) -> Tensor:  # (..., n)
        if out is None:
            out = torch.empty_like(x, dtype=self.dtype(x.dtype, weight.dtype))
        return norm_forward(x, weight, self.eps, bias=bias, out=out, rstd=rstd, **self._how)

    def backward(
        self,
        dy: Tensor,  # (..., n)
        x: Tensor,  # (..., n)
        weight: Tensor,  # (n,)
        *,
        onto: Tensor | None = None,  # (..., n): added to dx
        dw: Tensor | None = None,  # (n,) fp32: added to
        db: Tensor | None = None,  # (n,) fp32: added to
        out: Tensor | None = None,  # (..., n), may be dy or onto
    ) -> Tensor:  # (..., n)
        dy = dy.to(self.dtype(x.dtype, weight.dtype))
        how: dict[str, Any] = dict(d_residual=onto, dw=dw, db=db, out=out)
        return norm_backward(dy, x, weight, self.eps, **how, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        names = ("centred", "llama_rounding", "offset")
        return {name: getattr(self, name) for name in names}
