"""The MLP's residual block, and its cost:

    n2 = rms_norm(h)              y = h + r (silu(n2 Wg') * (n2 Wu')) Wd'     (T, F), (T, D)

The whole block works on one tile of tokens, so that gate and up exist for one tile only. Backward:

    [recompute gate, up]; dWd, dgate, dup, dWg, dWu; dh = dy + rms_norm'

dh overwrites dy. The down projection is never recomputed. The letters are those of
layer/__init__.py.
"""

from __future__ import annotations

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
    """The block in one pass. `gate` and `up` (T, F) are given if forward keeps them."""

    def __init__(self, p: Pass, gate: Tensor | None = None, up: Tensor | None = None) -> None:
        self._pass, self._weights = p, p.weights
        self._norm = Norm(p, "norm2")
        self.gate, self.up = gate, up
        self._grads: tuple[ProjectionGradient, ...] = ()
        if p.gradients is not None:
            self._grads = p.gradients.projection("down"), *p.gradients.gate_up()

    def keep(self, o: Tensor) -> None:
        """Allocates gate and up (T, F) if they are kept, with o's number of tokens and dtype."""
        if self._pass.keeps("gate up"):
            T, F = o.shape[0], len(self._weights.gate.weight)
            self.gate, self.up = o.new_empty(T, F), o.new_empty(T, F)
            self._pass.keep("gate up", gate=self.gate, up=self.up)

    def forward(self, h: Tensor, tile: slice, out: Tensor) -> None:
        """Computes y of a tile, (t, D), from its h, (t, D), and writes it into `out`."""
        w, n2 = self._weights, self._normed(h)
        u_gate, u_up = inners(n2, (w.gate, w.up), tile)
        room_gate, room_up = self._room(tile)
        gate = w.gate(n2, tile, out=room_gate, u=u_gate)
        up = w.up(n2, tile, out=room_up, u=u_up)
        product = swiglu_forward(gate, up, out=gate if room_gate is None else None)
        w.down.added(h, product, tile, scale=self._pass.traits.residual, out=out)

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
        narrow = dy.to(self._pass.schedule.dtype)
        v = w.down.inner_grad(narrow)
        product = w.down.input_grad(narrow, v, tile, scale=r)
        swiglu_backward_(product, gate, up, product=product)  # gate, up become their gradients
        d_down.add(narrow, product, v, tile)
        v_gate, v_up = w.gate.inner_grad(gate), w.up.inner_grad(up)
        d_gate.add(gate, n2, v_gate, tile, u_gate)
        d_up.add(up, n2, v_up, tile, u_up)
        dn2 = w.gate.input_grad(gate, v_gate, tile)
        dn2 = w.up.input_grad(up, v_up, tile, onto=dn2).to(h.dtype)
        self._norm.backward(dn2, h, onto=dy, out=dy)

    def finish(self) -> None:
        d_down, d_gate, d_up = self._grads
        grads = self._pass.grads
        grads.finish("down", d_down, self._pass.traits.residual)
        grads.finish_gate_up(d_gate, d_up)
        self._norm.finish()

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
        return Table(
            forward=(
                Work(name="gate up", flops=gate_up, nbytes=2 * unit),
                Work(name="down", flops=matmuls - gate_up, nbytes=3 * gate + unit),
            ),
            backward=(
                Work(
                    name="gate up, down",
                    flops=(1 + s.trains_weights) * matmuls,
                    nbytes=6 * unit + 6 * gate + sums,
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
        back("dy", s.unit(tokens)),
        back("the MLP's gradients, fp32", gradients),
        back("a tile", wide + 2 * narrow + masked + rows * adapter_bytes(s)),
        back("a tile", 2 * wide + 2 * narrow, spared_by="gate up"),
        back("a layer's dense weights", s.dense_bytes),
    )
