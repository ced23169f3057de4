"""How a family's RMSNorm is computed: its epsilon, what its weight stands for, and its rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.rms_norm import rms_norm_backward, rms_norm_forward


@dataclass(frozen=True, kw_only=True)
class RMS:
    """RMSNorm of x (..., n) with a weight (n,). The equations are in kernels/rms_norm.py."""

    eps: float
    offset: float = 0.0
    """Added to the weight in fp32: Gemma stores w and multiplies by 1 + w."""
    llama_rounding: bool = True
    """The normalised x is rounded before it is multiplied by the weight, and the result has the
    wider of both dtypes. Else the result alone is rounded, and has the dtype of x."""

    def dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Returns the result's dtype for x and a weight of these dtypes."""
        return torch.promote_types(x, weight) if self.llama_rounding else x

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the norm of x, written into `out` if given."""
        if weight.dtype == x.dtype or self.llama_rounding:
            return rms_norm_forward(x, weight, self.eps, out=out, **self._how)
        wide = rms_norm_forward(x, weight, self.eps, **self._how)
        return wide.to(x.dtype) if out is None else out.copy_(wide)

    def backward(
        self,
        dy: Tensor,  # (..., n)
        x: Tensor,  # (..., n)
        weight: Tensor,  # (n,)
        *,
        onto: Tensor | None = None,  # (..., n): added to dx
        dw: Tensor | None = None,  # (n,) fp32: added to
        out: Tensor | None = None,  # (..., n), may be dy or onto
    ) -> Tensor:  # (..., n)
        dy = dy.to(weight.dtype)
        return rms_norm_backward(
            dy, x, weight, self.eps, d_residual=onto, dw=dw, out=out, **self._how
        )

    @property
    def _how(self) -> dict[str, Any]:
        return {"llama_rounding": self.llama_rounding, "offset": self.offset}
