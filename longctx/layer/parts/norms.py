"""RMSNorm: inside a pass, where its gradient is summed over tiles, and after the last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from longctx.layer.passes import Pass


class Norm:
    """One of a layer's norms in one pass, named as in `Weights`."""

    def __init__(self, p: Pass, name: str) -> None:
        self._pass, self._name, self._eps = p, name, p.schedule.eps
        self.weight: Tensor = getattr(p.weights, name)
        self._dw = None if p.gradients is None else p.gradients.norm(name)

    @property
    def trained(self) -> bool:
        return self._dw is not None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # (T, n) -> (T, n)
        """Returns RMSNorm of x, in the wider of the dtypes of x and the weight."""
        return rms_norm_forward(x, self.weight, self._eps, out=out)

    def backward(
        self,
        dy: Tensor,  # (T, n)
        x: Tensor,  # (T, n)
        *,
        onto: Tensor | None = None,  # (T, n): added to dx
        out: Tensor,  # (T, n), written
    ) -> None:
        """Writes dx into `out`, and adds to the weight's gradient."""
        rms_norm_backward(dy, x, self.weight, self._eps, d_residual=onto, dw=self._dw, out=out)

    def finish(self) -> None:
        self._pass.grads.finish_norm(self._name, self._dw)


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
    """RMSNorm between the last layer and the loss. If `owned`, backward overwrites the incoming
    gradient with dx; nobody else may hold that gradient, as both terms of a sum do in autograd.

    At this point the last layer's x, o and output and the loss's gradient are all alive, and a
    fifth unit for dx would be the peak of the whole backward pass.
    """
    return _FinalNorm.apply(x, weight, eps, owned)
