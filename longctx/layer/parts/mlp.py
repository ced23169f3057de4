"""The MLP's residual block:

    n2 = rms_norm(h)              y = h + r (silu(n2 Wg') * (n2 Wu')) Wd'     (T, F), (T, D)

Where a norm follows, z is what the down projection gives and y = h + rms_norm(z). Another
activation than silu may stand in its place, whose input may have a factor; an MLP without a gate is
act(n2 Wu') Wd'. The whole
block works on one tile of tokens, so that gate and up exist for one tile only. Backward:

    [recompute gate, up; z, where a norm follows, and dz = rms_norm'(z, dy)]
    dWd, dgate, dup, dWg, dWu; dh = dy + rms_norm'

dh overwrites dy. The down projection is recomputed for z alone. Where the MLP stands beside
attention (schedule.py), it reads n1 and has no norm of its own. The shared expert of a mixture
(shared.py) is an MLP with other names. The letters are those of layer/__init__.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.grouped_mm import slot_dots
from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.protocol import NOTHING, Kept, OverTiles
from longctx.layer.passes import Pass
from longctx.layer.projection import inners, input_grads
from longctx.layer.specs.mlp_spec import MlpSpec


class MLP(OverTiles):
    """The block in one pass. `kept` has gate and up (T, F) and z (T, D), which is called "down", if
    forward keeps them."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        self._spec = spec = self._spec_of(p)
        gate, up, self._name = (f"{spec.start}{name}" for name in ("gate", "up", "down"))
        self._pass, self._down, self._scale = p, p.weights[self._name], spec.factor
        self._inner = p.weights.all_of(gate, up)
        norms = (name if name in spec.norms else "" for name in ("norm2", "post2"))
        self._norm, self._post = (Norm(p, name) for name in norms)
        self._kept = [kept[name] for name in self._inner if name in kept]
        self._z = kept.get("down")
        if p.gradients is not None:
            self._d_down = p.gradients.projection(self._name)
            self._d_inner = p.gradients.projections(list(self._inner))

    @staticmethod
    def _spec_of(p: Pass) -> MlpSpec:
        return p.spec.one(MlpSpec)

    def keep(self, x: Tensor) -> None:
        """Allocates gate and up (T, F) and z (T, D) if they are kept."""
        T, weight = len(x), self._down.weight
        if self._pass.keeps("gate up"):
            self._kept = [weight.new_empty(T, weight.shape[1]) for _ in self._inner]
            made = dict(zip(self._inner, self._kept, strict=True))
            self._pass.keep("gate up", made, of_tiles=True)
        if self._pass.keeps("down") and self._post.weight is not None:
            self._z = weight.new_empty(T, len(weight))
            self._pass.keep("down", {"down": self._z}, of_tiles=True)

    def forward(self, h: Tensor, tile: slice, *, onto: Tensor, out: Tensor) -> None:
        """Adds the MLP's output of a tile, from what it reads, h (t, D), to `onto` (t, D), and
        writes the sum into `out`."""
        n2 = self._normed(h)
        made = self._made(n2, self._us(n2, tile), tile)
        product = self._activated(made, out=None if self._kept else made[0])
        if self._post.weight is None:
            self._down.added(onto, product, tile, scale=self._scale, out=out)
        else:
            z = self._down(product, tile, out=None if self._z is None else self._z[tile])
            torch.add(onto, self._post.forward(z), out=out)

    def backward(
        self, dy: Tensor, h: Tensor, tile: slice, *, onto: Tensor | None = None, out: Tensor
    ) -> None:
        """Writes a tile's dh, added to `onto` if given, into `out` (t, D), which may be dy. Adds to
        the gradients of down, gate and up."""
        n2 = self._normed(h)
        us, made = self._made_again(n2, tile)
        narrow = self._output_grad(dy, made, tile)
        dn2 = self._input_grad(narrow, n2, us, made, tile)
        self._norm.backward(dn2.to(h.dtype), h, onto=onto, out=out)

    def _input_grad(
        self,
        narrow: Tensor,  # (t, D)
        n2: Tensor,  # (t, D)
        us: list[Tensor | None],
        made: list[Tensor],  # overwritten by their gradients
        tile: slice,
        onto: Tensor | None = None,  # (t, D)
        dots: Tensor | None = None,  # (t,) fp32
    ) -> Tensor:  # (t, D)
        """Returns the gradient of n2, added to `onto` if given, from that of what the down
        projection gives. Writes r <narrow, what it gives> of each token into `dots` if given."""
        v = self._down.inner_grad(narrow)
        # `product` is the activated one only after `_activated_backward_`; until then its gradient.
        product = self._down.input_grad(narrow, v, tile, scale=self._scale)
        if dots is not None:
            dots.copy_(slot_dots(product, self._activated(made)))
        self._activated_backward_(product, made)
        self._d_down.add(narrow, product, v, tile)
        layers = self._inner.values()
        vs = [layer.inner_grad(dx) for layer, dx in zip(layers, made, strict=True)]
        for grad, dx, v, u in zip(self._d_inner.values(), made, vs, us, strict=True):
            grad.add(dx, n2, v, tile, u)
        return input_grads([*layers], made, vs, tile, onto=onto)

    def _output_grad(self, dy: Tensor, made: list[Tensor], tile: slice) -> Tensor:
        """Returns the gradient of what the down projection gives, (t, D)."""
        if self._post.weight is None:
            return dy.to(self._pass.schedule.dtype)
        z = self._down(self._activated(made), tile) if self._z is None else self._z[tile]
        return self._post.backward(dy, z)

    def finish(self) -> None:
        grads = self._pass.grads
        grads.finish(self._name, self._d_down, self._scale)
        grads.finish_all(self._d_inner)
        self._norm.finish()
        self._post.finish()

    # --- gate and up, or up alone ----------------------------------------------------------

    def _us(self, n2: Tensor, tile: slice) -> list[Tensor | None]:
        return inners(n2, list(self._inner.values()), tile)

    def _made_again(self, n2: Tensor, tile: slice) -> tuple[list[Tensor | None], list[Tensor]]:
        """Returns u of gate and up, and both, in backward."""
        us = self._us(n2, tile)
        return us, [x[tile] for x in self._kept] or self._made(n2, us, tile)

    def _made(self, n2: Tensor, us: list[Tensor | None], tile: slice) -> list[Tensor]:
        # Where gate and up are kept, they are written straight to their place.
        rooms: list[Tensor | None] = [x[tile] for x in self._kept]
        layers = zip(self._inner.values(), rooms or [None] * len(us), us, strict=True)
        return [layer(n2, tile, out=room, u=u) for layer, room, u in layers]

    def _activated(self, made: list[Tensor], out: Tensor | None = None) -> Tensor:
        return swiglu_forward(*made, out=out, **self._how)

    def _activated_backward_(self, product: Tensor, made: list[Tensor]) -> None:
        """Turns `made` into gradients, and `product`, its own gradient, into itself."""
        swiglu_backward_(product, *made, product=product, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return dict(activation=self._spec.activation, gate_scale=self._spec.gate_scale)

    def _normed(self, h: Tensor) -> Tensor:
        return self._norm.forward(h).to(self._pass.schedule.dtype)
