"""RMSNorm: inside a pass, where its gradient is summed over tiles, and after the last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.layer.passes import Pass
from longctx.layer.rms import RMS


class Norm:
    """One of a layer's norms in one pass, named as in `Weights`. A layer that has no norm of this
    name passes its input on."""

    def __init__(self, p: Pass, name: str) -> None:
        self._pass, self._name, self._rms = p, name, p.schedule.norm
        self.weight: Tensor | None = getattr(p.weights, name)
        self._dw = None if p.gradients is None else p.gradients.norm(name)

    @property
    def trained(self) -> bool:
        return self._dw is not None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # (T, n) -> (T, n)
        """Returns the norm of x, in the dtype that RMS says; x itself if there is no norm."""
        return x if self.weight is None else self._rms.forward(x, self.weight, out=out)

    def backward(
        self,
        dy: Tensor,  # (T, n)
        x: Tensor,  # (T, n)
        *,
        onto: Tensor | None = None,  # (T, n): added to dx
        out: Tensor | None = None,  # (T, n), written
    ) -> Tensor:  # (T, n)
        """Returns dx, written into `out` if given, and adds to the weight's gradient."""
        if self.weight is not None:
            return self._rms.backward(dy, x, self.weight, onto=onto, dw=self._dw, out=out)
        dx = dy if onto is None else onto + dy
        return dx if out is None else out.copy_(dx)

    def finish(self) -> None:
        self._pass.grads.finish_norm(self._name, self._dw)


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rms: RMS, owned: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rms, ctx.owned = rms, owned
        return rms.forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dw = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        dy = dy.contiguous()
        out = dy if ctx.owned else None
        dx = ctx.rms.backward(dy, x, weight, dw=dw, out=out)
        return dx, None if dw is None else dw.to(weight.dtype), None, None


def final_norm(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (D,)
    rms: RMS,
    owned: bool = True,
) -> Tensor:  # (T, D)
    """RMSNorm between the last layer and the loss. If `owned`, backward overwrites the incoming
    gradient with dx; nobody else may hold that gradient, as both terms of a sum do in autograd.

    At this point the last layer's x, o and output and the loss's gradient are all alive, and a
    fifth unit for dx would be the peak of the whole backward pass.
    """
    return _FinalNorm.apply(x, weight, rms, owned)
