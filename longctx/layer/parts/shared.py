"""The shared expert of a mixture: an MLP that every token goes to, beside its k experts.

    s = (silu(n2 Wg') * (n2 Wu')) Wd'            it is added with the weight 1, as in GLM-4.5, or
    w = sigmoid(n2 g')        g (1, D)           with a weight of each token, as in Qwen2-MoE

It reads what the experts read, so it has no norm of its own. Its rows stand behind those of the
slots: `combine` adds w s to the experts' sum in fp32, and all is rounded once with h. Backward has
dz = w dy and a = dz Wd. The gradient of n2 g' is (1 - w) <a, product>, for which s is not computed
again. dn2 is added to that of the experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longctx.layer.parts.mlp import MLP
from longctx.layer.parts.protocol import NOTHING, Kept
from longctx.layer.passes import Pass
from longctx.layer.projection import input_grads
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mlp_spec import MlpSpec


class SharedExpert(MLP):
    """The MLP in one pass. `kept` has gate and up, under their names, if forward keeps them."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        super().__init__(p, kept)
        self._share = p.weights.all_of("share").get("share")
        if self._share is not None and p.gradients is not None:
            self._d_share = p.gradients.projection("share")

    @classmethod
    def of(cls, p: Pass, kept: Kept) -> SharedExpert | None:
        """Returns that of a layer; None if it has none."""
        return cls(p, kept) if p.spec.one(ExpertsSpec).shared else None

    @staticmethod
    def _spec_of(p: Pass) -> MlpSpec:
        """Returns the spec of the shared expert, whose output has the factor of the experts'."""
        experts = p.spec.one(ExpertsSpec)
        assert experts.shared is not None
        return replace(experts.shared, factor=experts.factor)

    def output(self, n2: Tensor, tile: slice, out: Tensor) -> Tensor:  # (t, 1) fp32
        """Writes s of a tile into `out` (t, D), and returns its weights."""
        made = self._made(n2, self._us(n2, tile), tile)
        product = self._activated(made, out=None if self._kept else made[0])
        self._down(product, tile, out=out)
        return self._weights(n2, tile)

    def input_grad_(self, dn2: Tensor, dy: Tensor, n2: Tensor, tile: slice) -> Tensor:  # (t, D)
        """Adds to dn2 (t, D), and returns it; adds to the gradients of the parameters."""
        us, made = self._made_again(n2, tile)
        if self._share is None:
            return self._input_grad(dy, n2, us, made, tile, onto=dn2)
        weights, dots = self._weights(n2, tile), dn2.new_empty(len(dn2), dtype=torch.float32)
        dn2 = self._input_grad((weights * dy).to(dy.dtype), n2, us, made, tile, dn2, dots)
        d_share = ((1 - weights) * dots[:, None]).to(n2.dtype)
        v = self._share.inner_grad(d_share)
        self._d_share.add(d_share, n2, v, tile)
        return input_grads([self._share], [d_share], [v], tile, onto=dn2)

    def _weights(self, n2: Tensor, tile: slice) -> Tensor:
        if self._share is None:
            return torch.ones(len(n2), 1, dtype=torch.float32, device=n2.device)
        return self._share(n2, tile).float().sigmoid()

    def finish(self) -> None:
        super().finish()
        if self._share is not None:
            self._pass.grads.finish("share", self._d_share)
