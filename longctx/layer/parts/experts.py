"""The residual block of a mixture of experts. Each token goes to k of E experts:

    n2 = rms_norm(h)        ids, w = router(n2 Wr')               (T, k), in fp32
    y = h + r sum_j w_j z_j        z_j = (silu(n2 Wg') * (n2 Wu')) Wd'       of expert ids_j

The router and the experts may have biases, and gpt-oss's have another activation of gate and up
(`ExpertLayout`).
The (token, choice) pairs of a tile are its *slots*. They are sorted by expert once, and each
expert's slots stand side by side in grouped matmuls (kernels/grouped_mm.py), whose first operand is
gathered as it is read. The k products of a token are added in the order of its choices in fp32, and
rounded once with h. Backward, with dz = dy, never weighted and never copied:

    [recompute gate, up]                a = dy Wd,  dw = <a, product> (+ <dy, bd>)
    dWd += dy' (w product)              dgate, dup from w a;  dWg, dWu += dgate' n2, dup' n2
    dn2 = sum_j (dgate Wg + dup Wu)_j + dlogits Wr,  dWr += dlogits' n2;  dh = dy + rms_norm'

The down projection is not recomputed: its product is needed in no gradient. Forward keeps the ids
(T, k), so that backward has the same experts whatever rounds otherwise, and computes the logits
again from n2. A shared expert (shared.py) adds one more product of each token. The letters are
those of layer/__init__.py; I are the features of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.clamped_swiglu import clamped_swiglu_backward_, clamped_swiglu_forward
from longctx.kernels.grouped_mm import combine, slot_dots
from longctx.kernels.sort_slots import Sorted, sort_slots
from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.layer.dense_experts import STACKS
from longctx.layer.linear import WeightGradient, wide_mm
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.protocol import NOTHING, Kept, OverTiles
from longctx.layer.parts.shared import SharedExpert
from longctx.layer.passes import Pass
from longctx.layer.projection import plus_product
from longctx.layer.router import IDS, logits_grad, route
from longctx.layer.specs.experts_spec import ExpertsSpec


@dataclass(frozen=True)
class Routed:
    """The slots of a tile."""

    logits: Tensor  # (t, E) fp32
    ids: Tensor  # (t, k)
    weights: Tensor  # (t, k) fp32
    slots: Sorted


class Experts(OverTiles):
    """The block in one pass. `kept` has ids (T, k), and gate and up, (T, k, 2 I), in the order of
    the slots of each tile, if forward keeps them."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        given, dtype = p.weights.given, p.schedule.dtype
        self._spec = spec = p.spec.one(ExpertsSpec)
        self._pass, self._router, self._kept = p, spec.router, dict(kept)
        self._balance = p.schedule.balance
        self._norm, self._shared = Norm(p, "norm2"), SharedExpert.of(p, kept)
        self._gate = given["router"].to(torch.float32 if self._router.in_fp32 else dtype)  # (E, D)
        self._gate_bias = given.get("router.bias")  # (E,)
        bias = given.get("choice_bias")
        self._choice_bias = None if bias is None else bias.float().flatten()  # (E,)
        self._in, self._out = (p.weights.stacks[name] for name in STACKS)
        if p.gradients is not None:
            grads = p.gradients
            self._d_gate = WeightGradient(grads.wants("router"), grads.wants("router.bias"))
            self._d_in, self._d_out = (grads.stack(n, spec.layout) for n in STACKS)

    def keep(self, x: Tensor) -> None:
        """Allocates ids (T, k), and gate and up (T, k, 2 I) if they are kept."""
        T, k = len(x), self._router.chosen
        if self._pass.keeps("routing"):
            self._kept["ids"] = torch.empty(T, k, dtype=IDS, device=x.device)
            self._pass.keep("routing", {"ids": self._kept["ids"]}, of_tiles=True)
        if self._pass.keeps("gate up"):
            width, dtype = self._in.weight.shape[1], self._in.weight.dtype
            self._kept["gate up"] = x.new_empty(T, k, width, dtype=dtype)
            self._pass.keep("gate up", {"gate up": self._kept["gate up"]}, of_tiles=True)
        if self._shared is not None:
            self._shared.keep(x)

    def forward(self, h: Tensor, tile: slice, *, onto: Tensor, out: Tensor) -> None:
        """Adds the experts' outputs of a tile, from what they read, h (t, D), to `onto` (t, D), and
        writes the sum into `out`."""
        n2 = self._normed(h)
        routed = self._routed(n2, self._given(tile))
        if self._balance is not None:
            self._balance.add(routed.logits, tile)
        if (said := self._pass.schedule.router_logits) is not None:
            said.add(self._pass.layer, routed.logits)
        if "ids" in self._kept:
            self._kept["ids"][tile] = routed.ids
        z, places, weights = self._with_shared(n2, routed, tile)
        product = self._activated(self._made(n2, routed, tile))
        self._out(product, routed.slots.ends, out=z[: len(product)])
        scale = self._spec.factor
        combine(z, places, weights=weights, onto=onto, scale=scale, out=out)

    def backward(
        self, dy: Tensor, h: Tensor, tile: slice, *, onto: Tensor | None = None, out: Tensor
    ) -> None:
        """Writes a tile's dh, added to `onto` if given, into `out` (t, D), which may be dy. Adds to
        the gradients of the router and of the experts."""
        r, n2 = self._spec.factor, self._normed(h)
        narrow, ids = dy.to(self._pass.schedule.dtype), self._kept.get("ids")
        routed = self._routed(n2, self._given(tile) if ids is None else ids[tile])
        order, rows, places, ends = routed.slots
        made = self._made(n2, routed, tile, again="gate up" not in self._kept)
        product = self._activated(made)
        v = self._out.inner_grad(narrow, ends, rows)
        a = self._out.input_grad(narrow, v, ends, rows)
        d_weights = r * self._plus_bias(slot_dots(a, product)[places], narrow, routed)
        weights = (r * routed.weights).flatten()[order]
        factor = weights[:, None].to(a.dtype)
        self._d_out.add(narrow, product.mul_(factor), v, ends, rows, None, weights)
        self._activated_backward_(a.mul_(factor), made)
        del product, a
        v = self._in.inner_grad(made, ends)
        self._d_in.add(made, n2, v, ends, None, rows)
        dn2 = combine(self._in.input_grad(made, v, ends), places)
        del made
        if self._shared is not None:
            dn2 = self._shared.input_grad_(dn2, narrow, n2, tile)
        d_logits = self._logits_grad(routed, d_weights, tile).to(self._gate.dtype)
        self._d_gate.add(d_logits, n2.to(d_logits.dtype))
        dn2 = dn2.to(d_logits.dtype)
        dn2 = plus_product(dn2, d_logits, self._gate, out=dn2)
        self._norm.backward(dn2.to(h.dtype), h, onto=onto, out=out)

    def finish(self) -> None:
        grads = self._pass.grads
        for end, grad in zip(("", ".bias"), self._d_gate.round(torch.float32), strict=True):
            grads.put(f"router{end}", grad)
        for name, sums in zip(STACKS, (self._d_in, self._d_out), strict=True):
            for end, grad in sums.finish().items():
                grads.put(f"{name}{end}", grad)
        self._norm.finish()
        if self._shared is not None:
            self._shared.finish()

    # --- routing, and gate and up ---------------------------------------------------------------

    def _given(self, tile: slice) -> Tensor | None:  # (t, k)
        """Returns the experts of a tile's tokens that the batch's caller chose, if it did."""
        given = self._pass.schedule.expert_ids
        ids = given[self._pass.layer] if given else None
        return None if ids is None else ids[tile]

    def _routed(self, n2: Tensor, ids: Tensor | None) -> Routed:
        """Chooses the experts of a tile's tokens, unless they are given."""
        logits = wide_mm(n2.to(self._gate.dtype), self._gate.t())
        if self._gate_bias is not None:
            logits += self._gate_bias
        ids, weights = route(logits, self._router, self._choice_bias, ids)
        return Routed(logits, ids, weights, sort_slots(ids, self._router.experts))

    def _with_shared(
        self, n2: Tensor, routed: Routed, tile: slice
    ) -> tuple[Tensor, Tensor, Tensor]:  # (t k, D) or (t k + t, D); (t, k) or (t, k + 1) twice
        """Returns where the slots' products are written, with the shared expert's behind them, and
        the places and weights of each token."""
        (t, k), places, weights = routed.ids.shape, routed.slots.places, routed.weights
        if self._shared is None:
            return n2.new_empty(t * k, n2.shape[1]), places, weights
        z = n2.new_empty(t * k + t, n2.shape[1])
        own = self._shared.output(n2, tile, out=z[t * k :])
        behind = torch.arange(t * k, t * k + t, dtype=places.dtype, device=places.device)
        return z, torch.cat([places, behind[:, None]], 1), torch.cat([weights, own], 1)

    def _logits_grad(self, routed: Routed, d_weights: Tensor, tile: slice) -> Tensor:  # (t, E)
        balance = self._balance
        of_sums = (None, None) if balance is None else (balance.gradient, balance.of(tile))
        found = logits_grad(routed.logits, self._router, routed.ids, d_weights, *of_sums)
        if (said := self._pass.schedule.router_logits) is not None:
            found += said.gradient(self._pass.layer, tile)
        return found

    def _plus_bias(self, dots: Tensor, dy: Tensor, routed: Routed) -> Tensor:  # (t, k)
        """Adds to the gradients of routing weights what comes of the biases of down, <dy, bd>."""
        if self._out.bias is None:
            return dots
        return dots + wide_mm(dy, self._out.bias.t()).gather(1, routed.ids.long())

    def _made(self, n2: Tensor, routed: Routed, tile: slice, again: bool = True) -> Tensor:
        """Returns gate and up side by side, (t k, 2 I)."""
        kept = self._kept.get("gate up")
        made = None if kept is None else kept[tile].flatten(0, 1)
        if made is not None and not again:
            return made
        return self._in(n2, routed.slots.ends, routed.slots.rows, out=made)

    def _activated(self, made: Tensor) -> Tensor:  # (t k, 2 I) -> (t k, I)
        if (clamped := self._spec.layout.clamped) is not None:
            return clamped_swiglu_forward(made, clamped)
        how: Any = self._spec.activation
        return swiglu_forward(*made.chunk(2, dim=1), activation=how)

    def _activated_backward_(self, d_product: Tensor, made: Tensor) -> None:
        """Turns `made` (t k, 2 I) into its gradient."""
        if (clamped := self._spec.layout.clamped) is not None:
            clamped_swiglu_backward_(d_product, made, clamped)
            return
        how: Any = self._spec.activation
        swiglu_backward_(d_product, *made.chunk(2, dim=1), activation=how)

    def _normed(self, h: Tensor) -> Tensor:
        return self._norm.forward(h).to(self._pass.schedule.dtype)
