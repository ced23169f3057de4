"""The MLP's residual block, and its cost:

    n2 = rms_norm(h)              y = h + r (silu(n2 Wg') * (n2 Wu')) Wd'     (T, F), (T, D)

Where a norm follows, z is what the down projection gives and y = h + rms_norm(z). Another
activation than silu may stand in its place. The whole block works on one tile of tokens, so that
gate and up exist for one tile only. Backward:

    [recompute gate, up; z, where a norm follows, and dz = rms_norm'(z, dy)]
    dWd, dgate, dup, dWg, dWu; dh = dy + rms_norm'

dh overwrites dy. The down projection is recomputed for z alone. The letters are those of
layer/__init__.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work
from longctx.kernels.swiglu import swiglu_backward_, swiglu_forward
from longctx.layer.linear import weight_sums
from longctx.layer.lora import adapter_bytes
from longctx.layer.parts.norms import Norm
from longctx.layer.passes import Pass
from longctx.layer.projection import ProjectionGradient, inners


class SwiGLU:
    """The block in one pass. gate and up (T, F) and z (T, D) are given if forward keeps them."""

    def __init__(
        self,
        p: Pass,
        gate: Tensor | None = None,
        up: Tensor | None = None,
        z: Tensor | None = None,
    ) -> None:
        self._pass, self._weights = p, p.weights
        self._norm, self._post = Norm(p, "norm2"), Norm(p, "post2")
        self.gate, self.up, self.z = gate, up, z
        self._grads: tuple[ProjectionGradient, ...] = ()
        if p.gradients is not None:
            self._grads = p.gradients.projection("down"), *p.gradients.gate_up()

    def keep(self, o: Tensor) -> None:
        """Allocates gate and up (T, F) and z (T, D) if they are kept, with o's number of tokens and
        dtype."""
        if self._pass.keeps("gate up"):
            T, F = o.shape[0], len(self._weights.gate.weight)
            self.gate, self.up = o.new_empty(T, F), o.new_empty(T, F)
            self._pass.keep("gate up", gate=self.gate, up=self.up)
        if self._pass.keeps("down") and self._post.weight is not None:
            self.z = o.new_empty(len(o), len(self._weights.down.weight))
            self._pass.keep("down", down=self.z)

    def forward(self, h: Tensor, tile: slice, out: Tensor) -> None:
        """Computes y of a tile, (t, D), from its h, (t, D), and writes it into `out`."""
        w, n2 = self._weights, self._normed(h)
        u_gate, u_up = inners(n2, (w.gate, w.up), tile)
        room_gate, room_up = self._room(tile)
        gate = w.gate(n2, tile, out=room_gate, u=u_gate)
        up = w.up(n2, tile, out=room_up, u=u_up)
        product = self._activated(gate, up, out=gate if room_gate is None else None)
        if self._post.weight is None:
            w.down.added(h, product, tile, scale=self._pass.traits.residual, out=out)
        else:
            z = w.down(product, tile, out=None if self.z is None else self.z[tile])
            torch.add(h, self._post.forward(z), out=out)

    def backward_(self, dy: Tensor, h: Tensor, tile: slice) -> None:
        """Overwrites a tile's dy (t, D) with dh, and adds to the gradients of down, gate and up."""
        w, r = self._weights, self._pass.traits.residual
        d_down, d_gate, d_up = self._grads
        n2 = self._normed(h)
        u_gate, u_up = inners(n2, (w.gate, w.up), tile)
        gate, up = self._room(tile)
        if gate is None or up is None:
            gate, up = w.gate(n2, tile, u=u_gate), w.up(n2, tile, u=u_up)
        # `product` is silu(gate) * up only after swiglu_backward_; until then it is the gradient.
        narrow = self._output_grad(dy, gate, up, tile)
        v = w.down.inner_grad(narrow)
        product = w.down.input_grad(narrow, v, tile, scale=r)
        how = self._pass.traits.activation
        swiglu_backward_(
            product, gate, up, product=product, activation=how
        )  # in gate's, up's place
        d_down.add(narrow, product, v, tile)
        v_gate, v_up = w.gate.inner_grad(gate), w.up.inner_grad(up)
        d_gate.add(gate, n2, v_gate, tile, u_gate)
        d_up.add(up, n2, v_up, tile, u_up)
        dn2 = w.gate.input_grad(gate, v_gate, tile)
        dn2 = w.up.input_grad(up, v_up, tile, onto=dn2).to(h.dtype)
        self._norm.backward(dn2, h, onto=dy, out=dy)

    def _output_grad(self, dy: Tensor, gate: Tensor, up: Tensor, tile: slice) -> Tensor:
        """Returns the gradient of what the down projection gives, (t, D)."""
        if self._post.weight is None:
            return dy.to(self._pass.schedule.dtype)
        z = self._weights.down(self._activated(gate, up), tile) if self.z is None else self.z[tile]
        return self._post.backward(dy, z)

    def finish(self) -> None:
        d_down, d_gate, d_up = self._grads
        grads = self._pass.grads
        grads.finish("down", d_down, self._pass.traits.residual)
        grads.finish_gate_up(d_gate, d_up)
        self._norm.finish()
        self._post.finish()

    def _activated(self, gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
        return swiglu_forward(gate, up, out=out, activation=self._pass.traits.activation)

    def _normed(self, h: Tensor) -> Tensor:
        return self._norm.forward(h).to(self._pass.schedule.dtype)

    def _room(self, tile: slice) -> tuple[Tensor | None, Tensor | None]:
        if self.gate is None or self.up is None:
            return None, None
        return self.gate[tile], self.up[tile]

    @staticmethod
    def cost(s: Sizes, batch: Batch) -> Table:
        """The cost of this block in one layer."""
        tokens, unit = batch.tokens, s.unit(batch.tokens)
        gate = tokens * s.itemsize * s.intermediate
        gate_up = 4 * tokens * s.hidden * s.intermediate
        sums = weight_sums(s, tokens, 3 * s.hidden * s.intermediate)
        matmuls = gate_up + gate_up // 2
        normed = (2 * unit + 2 * tokens * s.hidden * s.itemsize) * s.post_norms
        down = Work(name="down", flops=matmuls - gate_up, nbytes=3 * gate + unit)
        z = Keepable(
            name="down",
            nbytes=tokens * s.hidden * s.itemsize,
            spares=(down,),
            needs=frozenset({"o"}),
            of_tiles=True,
        )
        return Table(
            forward=(
                Work(name="gate up", flops=gate_up, nbytes=2 * unit),
                replace(down, nbytes=down.nbytes + normed),
            ),
            backward=(
                Work(
                    name="gate up, down",
                    flops=(1 + s.trains_weights) * matmuls,
                    nbytes=6 * unit + 6 * gate + sums + 2 * normed,
                ),
            ),
            keepables=(
                Keepable(
                    name="gate up",
                    nbytes=2 * gate,
                    tensors=2,
                    spares=(Work(name="gate up", flops=gate_up),),
                    needs=frozenset({"o", "h"}),
                    of_tiles=True,
                ),
                *([z] if s.post_norms else []),
            ),
            buffers=_mlp_buffers(s, tokens),
        )


def _mlp_buffers(s: Sizes, tokens: int) -> tuple[Buffer, ...]:
    """Buffers of the MLP. A tile has gate, up and their product, and h, n2 and their gradients.
    Backward also has the weight gradients of gate, up, down and o in fp32, one of them rounded."""
    rows = min(tokens, s.cut(tokens).tile_tokens)
    wide, narrow = (rows * size * s.itemsize for size in (s.intermediate, s.hidden))
    masked = 2 * wide if s.drops else 0  # the masked input of down and the dropout mask
    gradients = s.hidden * ((12 + s.itemsize) * s.intermediate + 4 * s.wide) * s.trains_weights

    def back(name: str, nbytes: int, spared_by: str | None = None) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="mlp backward", spared_by=spared_by)

    def forward(name: str, nbytes: int, spared_by: str | None = None) -> Buffer:
        return Buffer(name=name, nbytes=nbytes, during="mlp forward", spared_by=spared_by)

    return (
        forward("its output", s.unit(tokens)),
        forward("a tile", wide + 2 * narrow),
        forward("a tile", wide, spared_by="gate up"),
        forward("a tile", 2 * narrow * s.post_norms),
        back("dy", s.unit(tokens)),
        back("the MLP's gradients, fp32", gradients),
        back("a tile", wide + 2 * narrow + masked + rows * adapter_bytes(s)),
        back("a tile", 2 * wide + 2 * narrow, spared_by="gate up"),
        back("a tile", 3 * narrow * s.post_norms),
        back("a tile", wide * s.post_norms, spared_by="down"),
        back("a layer's dense weights", s.dense_bytes),
    )
