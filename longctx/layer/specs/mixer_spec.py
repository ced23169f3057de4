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

from longctx.cost.dims import LayerKind, Mixed
from longctx.cost.fitted import MIXER_LAUNCHES, MIXERS
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import Buffer, Keepable, Table, Work, buffers_during
from longctx.layer import segments as cutting
from longctx.layer.row_documents import most_places
from longctx.layer.specs.attention_spec import NORM1
from longctx.layer.specs.part_spec import PartSpec, Paths, kept_input
from longctx.system import installed

WITH_KERNELS = {"fla": 3.3}
"""Maps packages of kernels to what autograd saves of a token in a mixer that runs them, in elements
for each column of the mixer's linear layers (`Mixed.columns`). That of a Gated DeltaNet with the
dimensions of Qwen3.5-9B was counted on a CPU, with a function in the place of the package's that
saves its inputs and a matrix of each chunk (tests/layer/test_mixer.py): 2.8 in transformers 5.23,
and 3.3 in 5.17, which repeats keys for the heads of values that share them."""
IN_TORCH = {"fla": 9.8, "": 1.75}
"""Maps packages to what autograd saves of a token in a mixer that runs transformers' code in torch
for want of them, in elements for each column of the mixer's linear layers. Counted for Qwen3.5-9B,
and for LFM2's convolutions, which have no recurrence and want no package. (That of Mamba 2, whose
scan is ours, stands in its specs: `MixerSpec.graph`.)"""


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
    graph: float = 0.0
    """The elements that autograd saves of a token in the mixer, for each column of its linear
    layers; 0: those of all mixers with this package (IN_TORCH)."""
    gated_norm: str = ""
    """The path in it of an RMSNorm with the SiLU of a gate (kernels/gated_norm.py)."""
    gate_first: bool = False
    """Whether the gated norm is of the product with the gate, not of the input."""

    @property
    def held(self) -> float:
        """What its graph holds with the kernels that are installed here, in elements of
        `Mixed.columns`."""
        if self.package and installed(self.package):
            return WITH_KERNELS[self.package]
        return max(IN_TORCH[self.package], self.graph)

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
            graph=self.held,
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
            nbytes=_graph_bytes(s, mixed, self._places(batch, segment)) + z,
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
            buffers=_buffers(s, mixed, tokens, self._places(batch, segment)),
        )

    def _places(self, batch: Batch, tokens: int) -> int:
        """Returns the tokens of a segment, with the places between packed documents that a
        recurrence has (layer/row_documents.py)."""
        is_packed = batch.document < batch.tokens and self.kind != "convolution"
        return most_places(tokens) if is_packed else tokens


def _graph_bytes(s: Sizes, mixed: Mixed, tokens: int) -> int:
    """Returns the bytes of autograd's graph of a segment of these tokens."""
    return tokens * int(mixed.graph * mixed.columns) * s.itemsize


def _buffers(s: Sizes, mixed: Mixed, tokens: int, places: int) -> tuple[Buffer, ...]:
    """Buffers of a mixer, whose segments have so many places. Forward has a segment's tensors, of
    which half as many are there at a time as its graph holds. Backward has a segment's graph, n1
    and its gradient, and the trained parameters' gradients: their sums in fp32, and one
    segment's."""
    rows = min(tokens, cutting.SEGMENT_TOKENS)
    graph, narrow = _graph_bytes(s, mixed, places), rows * s.hidden * s.itemsize
    segmented = tokens > rows

    back = buffers_during("mixer backward")
    return (
        Buffer(name="a mixer's segment", nbytes=graph // 2 + narrow, during="mixer forward"),
        back("dy", s.unit(tokens)),
        back("a mixer's graph", graph, spared_by="graph"),
        back("a mixer's inputs and their gradients", 3 * narrow),
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
