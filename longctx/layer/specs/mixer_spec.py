"""What a mixer of a decoder layer is: the module that runs as it is (parts/mixer.py), how
transformers calls it, what it holds and computes, and what its residual block costs, alone or
beside attention.

A new kind of mixer is a spec in a family (families/hybrids.py), its seconds in MIXERS
(cost/fitted.py) and its kernels (mixers/mixer_kernels.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from longctx.cost.dims import LayerKind, Mixed, MixerMemory
from longctx.cost.fitted import MIXER_LAUNCHES, MIXERS
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, buffers_during
from longctx.layer import segments as cutting
from longctx.layer.row_documents import most_places
from longctx.layer.specs.attention_spec import NORM1
from longctx.layer.specs.part_spec import PartSpec, Paths, kept_input
from longctx.system import installed

WITH_KERNELS = {"fla": MixerMemory(1.9, 3.3, 4.9)}
"""Maps packages of kernels to the memory of a mixer that runs them: counted on a CPU, where no
kernel runs, for a Gated DeltaNet with the dimensions of Qwen3.5-9B and adapters
(tests/layer/test_mixer_memory.py)."""
IN_TORCH = {"fla": MixerMemory(8.1, 7.9, 11.3), "": MixerMemory(1.75, 1.8, 2.7)}
"""Maps packages to the memory of a mixer that runs transformers' code in torch for want of them:
Qwen3.5-9B's, and that of LFM2's convolutions, which have no recurrence and want no package. (That
of Mamba 2, whose scan is ours, stands in its specs: `MixerSpec.memory`.)"""


@dataclass(frozen=True, kw_only=True)
class MixerSpec(PartSpec):
    """A mixer, which stands in the place of attention or beside it."""

    segment_launches: ClassVar[int] = MIXER_LAUNCHES

    path: str
    """The path of the module in a layer."""
    module: str
    """The name of the module's class, without the family's prefix."""
    kind: str
    """The kind by which its seconds are planned: "delta rule", "mamba" or "convolution", the names
    of MIXERS in cost/fitted.py."""
    state: tuple[int, int]
    """Elements of its state: those of the recurrence, in fp32, and those of the convolution's last
    inputs."""
    norms: Paths = field(default_factory=lambda: NORM1, hash=False)
    """norm1 before the mixer."""
    cache: str = "cache_params"
    """The name under which its forward takes transformers' cache."""
    package: str = ""
    """The package whose kernels transformers takes for it, if it is there; empty where it needs
    none."""
    memory: MixerMemory | None = None
    """The memory of its tensors; None: that of all mixers with this package (IN_TORCH)."""
    inner_linears: Paths = field(default_factory=dict, hash=False)
    """The linear layers in a Gated DeltaNet that our functions run (mixers/gated_delta_net.py), by
    the names there; none of a module that runs as transformers has it."""
    gated_norm: str = ""
    """The path in it of an RMSNorm with the SiLU of a gate (kernels/gated_norm.py)."""
    gate_first: bool = False
    """Whether the gated norm is of the product with the gate, not of the input."""

    @property
    def holds(self) -> MixerMemory:
        """Returns the memory of its tensors with the kernels that are installed here."""
        if self.package and installed(self.package):
            return WITH_KERNELS[self.package]
        return self.memory or IN_TORCH[self.package]

    def sizes(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        trained: Collection[str],
        itemsize: int,
    ) -> Mixed:
        """Returns the sizes of a mixer with parameters of these shapes, PEFT's among them, of which
        those named in `trained` are trained. An adapter adds to what its linear layer gives, and
        makes no column."""
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        recurrent, convolved = self.state
        return Mixed(
            columns=sum(rows for name, (rows, _) in matrices.items() if ".lora_" not in name),
            parameters=sum(rows * columns for rows, columns in matrices.values()),
            trained=sum(math.prod(shapes[name]) for name in trained),
            state_bytes=4 * recurrent + itemsize * convolved,
            memory=self.holds,
            besides=MIXERS[self.kind],
        )

    def cost(self, s: Sizes, kind: LayerKind, batch: Batch) -> Table:
        assert kind.mixed is not None
        tokens, unit = batch.tokens, s.unit(batch.tokens)
        mixed, itemsize = kind.mixed, s.itemsize
        flops, made = 2 * tokens * mixed.parameters, tokens * mixed.columns
        besides, besides_back = (
            Work(name="besides a mixer's matmuls", flops=made * each, rate="mixer")
            for each in mixed.besides
        )
        forward = (Work(name="mixer", flops=flops, nbytes=3 * unit), besides)
        z = tokens * s.hidden * itemsize
        segment = min(tokens, cutting.SEGMENT_TOKENS)
        one_segment = tokens == segment
        # However long the documents are: one of L tokens keeps ceil(L / segment) - 1 states.
        states = (tokens - 1) // cutting.SEGMENT_TOKENS
        kept = Keepable(
            name="o",
            nbytes=z * kind.between + states * mixed.state_bytes,
            tensors=kind.between + 2 * (states > 0),
            spares=forward,
            word="o",
            read_first=True,
            buffered=True,
        )
        again = Keepable(
            name="graph",
            nbytes=_held(s, mixed, mixed.memory.graph, self._places(batch, segment)) + z,
            tensors=24,
            spares=(Work(name="mixer", flops=flops), besides),
            needs=frozenset({"o"}),
            recorded=True,
        )
        trained = 2 * tokens * min(mixed.trained, mixed.parameters)
        return Table(
            forward=forward,
            backward=(
                # Of the graph of a segment: the gradients of inputs and of weights.
                *(() if one_segment else again.spares),
                besides_back,
                Work(
                    name="mixer's gradients",
                    flops=flops + trained,
                    nbytes=4 * unit,
                    finishing=True,
                ),
            ),
            keepables=(
                kept_input(s, batch),
                *([kept] if kept.nbytes else []),
                *([again] if one_segment else []),
            ),
            buffers=_buffers(s, mixed, tokens, self._most_places(segment)),
        )

    def _places(self, batch: Batch, tokens: int) -> int:
        """Returns the tokens of a segment, with the places between packed documents that a
        recurrence has (layer/row_documents.py)."""
        is_packed = batch.document < batch.tokens
        return self._most_places(tokens) if is_packed else tokens

    def _most_places(self, tokens: int) -> int:
        """Returns the places that a segment of these tokens may have: a row that is planned as one
        document has several as soon as documents are packed."""
        return most_places(tokens) if self.kind != "convolution" else tokens


def _held(s: Sizes, mixed: Mixed, elements: float, tokens: int) -> int:
    """Returns the bytes of so many elements for each of these tokens and of a mixer's columns."""
    return tokens * int(elements * mixed.columns) * s.itemsize


def _buffers(s: Sizes, mixed: Mixed, tokens: int, places: int) -> tuple[Buffer, ...]:
    """Buffers of a mixer, whose segments have so many places: what one segment holds, and in
    backward its n1 and the gradient of its output, and the trained parameters' gradients: their
    sums in fp32, and one segment's."""
    rows = min(tokens, cutting.SEGMENT_TOKENS)
    forward, graph, most = (
        _held(s, mixed, elements, places)
        for elements in (mixed.memory.forward, mixed.memory.graph, mixed.memory.backward)
    )
    narrow, segmented = rows * s.hidden * s.itemsize, tokens > rows

    back = buffers_during("mixer backward")
    return (
        Buffer(name="a mixer's segment", nbytes=forward + narrow, during="mixer forward"),
        back("dy", s.unit(tokens)),
        back("a mixer's graph", graph, spared_by="graph"),
        back("what a mixer's backward adds", most - graph),
        back("a mixer's input and its output's gradient", 2 * narrow),
        back("a mixer's gradients", mixed.trained * (s.itemsize + 4 * segmented)),
        back("its gradients", mixed.trained * s.itemsize, span="after"),
    )


def beside_attention(
    attention: Table, mixer: Table, s: Sizes, kind: LayerKind, batch: Batch
) -> Table:
    """Returns the cost of attention and a mixer in one residual block (parts/beside.py), from that
    of each alone."""
    dn1 = batch.tokens * s.hidden * s.itemsize * (not kind.parallel)  # else attention has it
    moments = ("mixer backward", "attention backward", "projections backward")
    first = (replace(work, finishing=False) for work in mixer.backward)  # attention's ends it
    alone = (k for k in mixer.keepables if k.name not in attention.by_name)
    return Table(
        forward=attention.forward + mixer.forward,
        backward=(*first, *attention.backward),
        keepables=(*(_with(mixer, keepable) for keepable in attention.keepables), *alone),
        # Moments stand in the order of their buffers, and forward has one for each part.
        buffers=(
            *mixer.buffers,
            *attention.buffers,
            *(Buffer(name="dn1", nbytes=dn1, during=moment) for moment in moments),
        ),
    )


def _with(mixer: Table, keepable: Keepable) -> Keepable:
    """Returns what attention keeps together with what the mixer keeps under the same name."""
    other = mixer.by_name.get(keepable.name)
    if other is None or keepable.always:
        return keepable
    return replace(
        keepable,
        nbytes=keepable.nbytes + other.nbytes,
        tensors=keepable.tensors + other.tensors,
        spares=keepable.spares + other.spares,
    )
