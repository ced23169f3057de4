"""What the experts of a decoder layer are, with their router and a shared expert, and what their
residual block costs (parts/experts.py).

T tokens, D hidden size, E experts of I features, of which each token goes to k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import EXPERT_LAUNCHES
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, buffers_during
from longctx.layer.dense_experts import STACKS
from longctx.layer.linear import weight_sums
from longctx.layer.router import Router
from longctx.layer.specs.mlp_spec import NORM2, MlpSpec
from longctx.layer.specs.part_spec import PartSpec, Paths, Shape, Spec, paths
from longctx.layer.stack import PLAIN, ExpertLayout

_OF_BOTH = ("modules", "activations")


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(PartSpec):
    """The experts of one layer. The defaults are Mixtral's."""

    over_tiles: ClassVar[bool] = True
    tile_launches: ClassVar[int] = EXPERT_LAUNCHES

    width: int  # I
    router: Router
    layout: ExpertLayout = PLAIN
    shared: MlpSpec | None = None
    """The expert that all tokens go to; its linear layers are among those of this spec."""
    norms: Paths = field(default_factory=lambda: NORM2, hash=False)
    stacks: Paths = paths()
    """The router's weight (E, D) and the weights of experts, (E, 2 I, D) and (E, D, I)."""
    parameters: Paths = paths()
    """The biases of what `stacks` names, and one that decides the choice alone (E,)."""
    activation: str = "silu"
    """The activation of gate, where `layout` has no other one."""
    fp32_weights: bool = False
    """Hugging Face's code has the weights of a token's experts in fp32."""

    @classmethod
    def of(cls: type[Spec], config: Any, layer: int, **fields: Any) -> Spec:
        """Returns the spec of a layer. What the shared expert declares of its modules is among what
        the experts declare."""
        made: Any = super().of(config, layer, **fields)  # type: ignore[misc]
        if (shared := made.shared) is None:
            return made
        both = {name: getattr(made, name) | getattr(shared, name) for name in _OF_BOTH}
        return replace(made, linears=shared.linears, **both)

    @property
    def experts(self) -> int:
        return self.router.experts

    @property
    def chosen(self) -> int:
        return self.router.chosen

    @property
    def shared_width(self) -> int:
        """The features of the shared expert; 0 without one."""
        return self.shared.width if self.shared else 0

    @property
    def biases(self) -> bool:
        """Whether experts have biases."""
        return "experts_out.bias" in self.parameters

    @property
    def owners(self) -> tuple[str, ...]:
        """The paths of the modules that hold experts' weights, around which PEFT puts wrappers."""
        owners = [path.rpartition(".")[0] for n, path in self.stacks.items() if n in STACKS]
        return tuple(dict.fromkeys(owners))

    @property
    def widest(self) -> int:
        return max(self.hidden, self.width)

    @property
    def tile_columns(self) -> int:
        """For each chosen expert its features, and half of the D numbers that its slot reads and
        gives. The shared expert runs before or after the others, so the wider of the two counts."""
        # Qwen3-30B-A3B: 8 experts of 768 features and D = 2048 count as 8 * (768 + 1024) = 14336
        # columns, as many as Llama-3.1-8B's MLP has.
        return max(self.chosen * (self.width + self.hidden // 2), self.shared_width)

    @property
    def side_by_side(self) -> dict[tuple[str, ...], Shape]:
        return self.shared.side_by_side if self.shared else {}

    def shapes(self) -> dict[str, Shape]:
        return super().shapes() | (self.shared.shapes() if self.shared else {})

    def held_shapes(self) -> dict[str, Shape]:
        E, D, wide = self.experts, self.hidden, 2 * self.width
        shapes: dict[str, Shape] = {"router": (E, D), "router.bias": (E,), "choice_bias": (E,)}
        for name, rows, columns in (("experts_in", wide, D), ("experts_out", D, self.width)):
            lies = (columns, rows) if self.layout.transposed else (rows, columns)
            shapes |= {name: (E, *lies), f"{name}.bias": (E, rows)}
        held = {**self.stacks, **self.parameters}
        return {path: shapes[name] for name, path in held.items()}

    def differs(self, modules: Mapping[str, Any], config: Any) -> Iterator[str]:
        clamped = self.layout.clamped
        for path in self.owners if clamped else ():
            if (modules[path].alpha, modules[path].limit) != clamped:
                yield "another activation of experts than the configuration's"

    # --- what it costs ----------------------------------------------------------------------

    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        tokens, unit = batch.tokens, s.unit(batch.tokens)
        slots, matrix = tokens * self.chosen, s.hidden * self.width
        made = slots * s.itemsize * self.width  # gate, or up, or their product
        gathered = slots * s.itemsize * s.hidden
        gate_up, down = 4 * slots * matrix, 2 * slots * matrix
        routed = 2 * tokens * s.hidden * self.experts
        logits = Work(name="router", flops=routed, nbytes=unit)
        inner = Work(name="gate up", flops=gate_up, rate="grouped", nbytes=gathered + 2 * made)
        sums = weight_sums(s, kind, tokens, 3 * matrix * self.experts)
        biases = self.biases * tokens * s.hidden * self.experts
        summed = self.biases * kind.trains_weights * (gathered + 2 * made)
        ids = Keepable(name="routing", nbytes=2 * slots, always=True, of_tiles=True)
        shared = _shared_cost(s, self.shared, kind, batch) if self.shared else Table()
        also = shared.by_name.get("gate up")
        return Table(
            forward=(
                logits,
                inner,
                Work(name="down", flops=down, rate="grouped", nbytes=3 * made + 2 * gathered),
                *shared.forward,
            ),
            backward=(
                Work(name="router", flops=(2 + kind.trains_weights) * routed, nbytes=3 * unit),
                Work(name="biases", flops=2 * biases, nbytes=summed),
                Work(name="down", flops=down, rate="grouped", nbytes=gathered + 6 * made),
                Work(name="gate up", flops=gate_up, rate="grouped", nbytes=2 * gathered + 2 * made),
                Work(
                    name="gradients",
                    flops=kind.trains_weights * (gate_up + down),
                    rate="grouped",
                    nbytes=4 * unit + sums,
                ),
                *shared.backward,
            ),
            keepables=(
                ids,
                Keepable(
                    name="gate up",
                    nbytes=2 * made + (also.nbytes if also else 0),
                    tensors=1 + (also.tensors if also else 0),
                    spares=(replace(inner, nbytes=0.0), *(also.spares if also else ())),
                    needs=frozenset({"o", "h"}),
                    of_tiles=True,
                ),
            ),
            buffers=_buffers(s, self, kind, tokens),
        )


def _shared_cost(s: Sizes, spec: MlpSpec, kind: LayerKind, batch: Batch) -> Table:
    """The cost of the shared expert in one layer, as that of an MLP of its width."""
    table = spec.cost(s, kind, batch)
    product = 2 * batch.tokens * s.hidden * spec.weighed
    share = Work(name="share", flops=product, nbytes=s.unit(batch.tokens))
    back = replace(share, flops=(2 + kind.trains_weights) * product, nbytes=3 * share.nbytes)
    return replace(
        table,
        forward=(*table.forward, *[share] * spec.weighed),
        backward=(*table.backward, *[back] * spec.weighed),
    )


def _buffers(s: Sizes, spec: ExpertsSpec, kind: LayerKind, tokens: int) -> tuple[Buffer, ...]:
    """Buffers of experts. A tile has h, n2 and their gradients, and of each slot gate, up, their
    product and its gradient, and what the slot gives or its gradient. The shared expert's gate, up
    and product are there before the experts' in forward, and after them in backward. Backward also
    has the fp32 sums of the weights' gradients, which are rounded one after the other and then stay
    until the layer's backward ends."""
    rows = min(tokens, s.cut(tokens).tile_tokens)
    narrow = rows * s.hidden * s.itemsize
    wide = rows * max(spec.chosen * spec.width, spec.shared_width) * s.itemsize
    slots = rows * (spec.chosen + (spec.shared_width > 0)) * s.hidden * s.itemsize
    logits = 3 * 4 * rows * spec.experts
    features = spec.width * spec.experts + spec.shared_width
    weights = 3 * s.hidden * features * kind.trains_weights

    back = buffers_during("mlp backward")
    forward = buffers_during("mlp forward")
    return (
        forward("its output", s.unit(tokens)),
        forward("a tile", wide + slots + 2 * narrow + logits),
        forward("a tile", 2 * wide, spared_by="gate up"),
        back("dy", s.unit(tokens)),
        back("the experts' gradients, fp32", 4 * weights + s.itemsize * weights),
        back("the experts' gradients", s.itemsize * weights, span="after"),
        back("a tile", 2 * wide + slots + 4 * narrow + 2 * logits),
        back("a tile", 2 * wide, spared_by="gate up"),
    )
