"""What the MLP of a decoder layer is, or the shared expert of a mixture, and what its residual
block costs (parts/mlp.py, parts/shared.py).

T tokens, D hidden size, F features of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from longctx.cost.dims import LayerKind
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, buffers_during
from longctx.layer.adapters.lora import adapter_bytes
from longctx.layer.linear import weight_sums
from longctx.layer.specs.part_spec import PartSpec, Paths, Shape

MLP_WIDTH = "intermediate_size"
"""The name of F in a configuration."""
GATED = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NORM2 = {"norm2": "post_attention_layernorm"}
ACT_FN = "mlp.act_fn"


@dataclass(frozen=True, kw_only=True)
class MlpSpec(PartSpec):
    """The MLP of one layer. The defaults are Llama's."""

    over_tiles: ClassVar[bool] = True

    width: int  # F
    modules: Paths = field(default_factory=lambda: {"mlp": "MLP"}, hash=False)
    linears: Paths = field(default_factory=lambda: GATED, hash=False)
    """gate, up and down. Without up, gate holds both in one parameter, without a bias; without
    gate, the MLP has none. The names of a shared expert's begin with "shared_", and the linear
    layer that weighs it for each token is "share"."""
    norms: Paths = field(default_factory=lambda: NORM2, hash=False)
    """norm2 before the MLP and post2 after it."""
    activation: str = "silu"
    """The activation (kernels/swiglu.py) of the gate, or of `up` without a gate."""
    activations: Mapping[str, str] = field(default_factory=lambda: {ACT_FN: "silu"}, hash=False)
    gate_scale: float = 1.0
    """Multiplies the gate before its activation."""

    @classmethod
    def usual(cls, config: Any) -> dict[str, Any]:
        return super().usual(config) | {"width": getattr(config, MLP_WIDTH, None)}

    @property
    def start(self) -> str:
        """What the names of the linear layers begin with."""
        return "shared_" if "shared_down" in self.linears else ""

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return f"{self.start}gate" in self.linears

    @property
    def weighed(self) -> bool:
        """Whether each token has a weight of the shared expert, the sigmoid of a matmul."""
        return "share" in self.linears

    @property
    def widest(self) -> int:
        return max(self.hidden, self.width)

    @property
    def tile_columns(self) -> int:
        return self.width

    @property
    def side_by_side(self) -> dict[tuple[str, ...], Shape]:
        return {(f"{self.start}gate", f"{self.start}up"): (self.width, self.width)}

    def shapes(self) -> dict[str, Shape]:
        D, F, start = self.hidden, self.width, self.start
        rows = {f"{start}gate": F, f"{start}up": F, f"{start}down": D, "share": 1}
        rows |= {names[0]: sum(sizes) for names, sizes in self.in_one.items()}
        columns = {f"{start}down": F}
        own = {path: (rows[n], columns.get(n, D)) for n, path in self.linears.items()}
        return own | super().shapes()

    # --- what it costs ----------------------------------------------------------------------

    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        tokens, unit = batch.tokens, s.unit(batch.tokens)
        gate = tokens * s.itemsize * self.width
        width = 1 + self.gated  # of gate and up together, or of up alone
        gate_up = 2 * tokens * s.hidden * self.width * width
        matmuls = gate_up + 2 * tokens * s.hidden * self.width
        sums = weight_sums(s, kind, tokens, (1 + width) * s.hidden * self.width)
        normed = (2 * unit + 2 * tokens * s.hidden * s.itemsize) * self.post
        down = Work(name="down", flops=matmuls - gate_up, nbytes=(1 + width) * gate + unit)
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
                    flops=(1 + kind.trains_weights) * matmuls,
                    nbytes=6 * unit + (2 + 2 * width) * gate + sums + 2 * normed,
                ),
            ),
            keepables=(
                Keepable(
                    name="gate up",
                    nbytes=width * gate,
                    tensors=width,
                    spares=(Work(name="gate up", flops=gate_up),),
                    needs=frozenset({"o", "h"}),
                    of_tiles=True,
                ),
                *([z] if self.post else []),
            ),
            buffers=_buffers(s, self, kind, tokens),
        )


def _buffers(s: Sizes, spec: MlpSpec, kind: LayerKind, tokens: int) -> tuple[Buffer, ...]:
    """Buffers of the MLP. A tile has gate, up and their product, and h, n2 and their gradients; an
    MLP without a gate activates in place. Backward also has the weight gradients of gate, up and
    down in fp32, one of them rounded; all of them are there, rounded, until the layer's backward
    ends."""
    rows = min(tokens, s.cut(tokens).tile_tokens)
    wide, narrow = (rows * size * s.itemsize for size in (spec.width, s.hidden))
    masked = 2 * wide if kind.drops else 0  # the masked input of down and the dropout mask
    summed = 4 * (2 + spec.gated) + s.itemsize
    weights = s.hidden * spec.width * kind.trains_weights
    rounded = (2 + spec.gated) * weights * s.itemsize

    back = buffers_during("mlp backward")
    forward = buffers_during("mlp forward")
    return (
        forward("its output", s.unit(tokens)),
        forward("a tile", wide + 2 * narrow),
        forward("a tile", wide * spec.gated, spared_by="gate up"),
        forward("a tile", 2 * narrow * spec.post),
        back("dy", s.unit(tokens)),
        back("the MLP's gradients, fp32", summed * weights),
        back("the MLP's gradients", rounded, span="after"),
        back("a tile", wide + 2 * narrow + masked + rows * adapter_bytes(s, kind)),
        back("a tile", (1 + spec.gated) * wide + 2 * narrow, spared_by="gate up"),
        back("a tile", narrow * spec.post),
    )
