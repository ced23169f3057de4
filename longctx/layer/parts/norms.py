"""Norms: inside a pass, where their gradients are summed over tiles, and after the last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.launch import once_differentiable
from longctx.layer.norm_spec import NormSpec
from longctx.layer.passes import Pass


class Norm:
    """One of a layer's norms in one pass, named as in `Weights`. A layer that has no norm of this
    name passes its input on."""

    def __init__(self, p: Pass, name: str) -> None:
        self._pass, self._name, self.spec = p, name, p.schedule.norm
        self.weight: Tensor | None = p.weights.given.get(name)
        self.bias: Tensor | None = p.weights.given.get(f"{name}.bias")
        self._sums = (None, None) if p.gradients is None else p.gradients.norm(name)

    @property
    def trained(self) -> bool:
        return any(x is not None for x in self._sums)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # (T, n) -> (T, n)
        """Returns the norm of x, in the dtype that its spec says; x itself if there is no norm."""
        return x if self.weight is None else self.spec.forward(x, self.weight, self.bias, out=out)

    def backward(
        self,
        dy: Tensor,  # (T, n)
        x: Tensor,  # (T, n)
        *,
        onto: Tensor | None = None,  # (T, n): added to dx
        out: Tensor | None = None,  # (T, n), written
    ) -> Tensor:  # (T, n)
        """Returns dx, written into `out` if given, and adds to the parameters' gradients."""
        if self.weight is not None:
            dw, db = self._sums
            return self.spec.backward(dy, x, self.weight, onto=onto, dw=dw, db=db, out=out)
        dx = dy if onto is None else onto + dy
        return dx if out is None else out.copy_(dx)

    def finish(self) -> None:
        self._pass.grads.finish_norm(self._name, self._sums)


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, owned: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spec, ctx.owned = spec, owned
        return spec.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sums = [
            torch.zeros_like(weight, dtype=torch.float32) if needed else None
            for needed in ctx.needs_input_grad[1:3]
        ]
        dy = dy.contiguous()
        out = dy if ctx.owned else None
        dx = ctx.spec.backward(dy, x, weight, dw=sums[0], db=sums[1], out=out)
        return dx, *(None if x is None else x.to(weight.dtype) for x in sums), None, None


def final_norm(
    x: Tensor,  # (T, D)
    weight: Tensor,  # (D,)
    bias: Tensor | None,  # (D,)
    spec: NormSpec,
    owned: bool = True,
) -> Tensor:  # (T, D)
    """The norm between the last layer and the loss. If `owned`, backward overwrites the incoming
    gradient with dx. The caller must own that gradient: autograd gives both terms of a sum the
    same tensor.

    At this point the last layer's x, o and output and the loss's gradient are all alive, and a
    fifth unit for dx would be the peak of the whole backward pass.
    """
    return _FinalNorm.apply(x, weight, bias, spec, owned)
