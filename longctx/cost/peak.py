"""The GPU memory of a step, by name, in each of its phases.

    forward      weights, states, the activations kept so far, the buffers of one layer, gradients
                 that wait for their block's update
    loss         all kept activations, the logits, lm_head's gradient in fp32
    backward     the activations of the layers below, the gradients of the layers above, the buffers
                 of one layer
    embedding    all gradients, and the sums of the embedding's gradient
    update       weights, states, gradients

A phase stands for its moment with the most memory. The peak of a step is that of its largest phase.
Where layers run forward again before the backward of one above them, they need less than that: what
they have kept so far, and the buffers of a forward instead of a backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from longctx.cost.kept import Keep, Ladder, run_again
from longctx.cost.sizes import Sizes
from longctx.cost.table import INPUT, Table

Buffers = dict[str, int]
"""Maps names to bytes."""
LIBRARY_BYTES = 2**26
"""cuBLAS's workspaces: 32 MiB for each thread that runs matmuls, forward's and backward's."""


GROUPS = {
    "weights": ("weights", "weights on their way", "gathered weights"),
    "gradients": (
        *("gradients", "whole gradients", "gradients to sum, fp32", "gradients, fp32"),
        *("the embedding's gradient", "lm_head's gradient, fp32"),
    ),
    "AdamW's states": ("AdamW's states", "buffers of the update", "buckets"),
    "saved activations": ("kept activations",),
    "images": ("vision tower", "pixels", "features of images", "a group of images"),
}
"""A few words for a step's buffers. All others are what computes: a layer, or lm_head."""


class Phase(NamedTuple):
    name: str
    buffers: Buffers

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())

    @property
    def groups(self) -> Buffers:
        """The buffers, summed by what they are for."""
        found = {
            group: sum(self.buffers.get(name, 0) for name in names)
            for group, names in GROUPS.items()
        }
        work = "lm_head and loss" if self.name == "loss" else "a layer's work"
        return {**found, work: self.nbytes - sum(found.values())}


def peak(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.nbytes)


class Standing(Protocol):
    """The weights, states and gradients on the GPU in the course of a step, placed by a run of its
    own or by an engine. Sizes are in bytes."""

    def forward(self) -> Buffers:
        """Weights and states during a layer's forward."""

    def loss(self) -> Buffers:
        """Weights and states during the loss."""

    def backward(self, layer: int) -> Buffers:
        """Weights and states during this layer's backward; -1 is the embedding's."""

    def update(self) -> Buffers:
        """Weights and states during the update."""

    def embedding(self, made: Buffers) -> Buffers:
        """All gradients while the embedding's is made, for which torch needs the buffers `made`."""

    def others(self, kept: int, unit: int) -> list[Phase]:
        """Phases that only an engine has. `kept` are the bytes of all kept activations, `unit`
        those of a (T, D) tensor."""

    def all_gradients(self) -> int: ...

    def old_gradients(self, layer: int) -> int:
        """Gradients of the previous step, or of its batches, when forward reaches this layer."""

    def loss_gradients(self) -> int:
        """Gradients before backward."""

    def new_gradients(self, layer: int) -> int:
        """Gradients when backward reaches this layer."""


class Tables(Protocol):
    """The tables of a model with one cut."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def kinds(self) -> tuple[Table, ...]:
        """The table of a layer of each kind, in the order of `Sizes.kinds`."""

    @property
    def layers(self) -> tuple[Table, ...]:
        """The table of each layer."""

    @property
    def loss(self) -> Table: ...

    @property
    def embedding(self) -> Table: ...

    @property
    def update(self) -> Table: ...

    @property
    def unit(self) -> int:
        """The bytes of a (T, D) tensor."""

    @property
    def tiles(self) -> int:
        """How many tiles a batch has."""

    @property
    def segments(self) -> int:
        """How many segments a batch has in a mixer."""


def made_bytes(layer: Table, keep: Keep) -> int:
    """Returns the bytes of the activations that a layer's forward has made, and those that its
    backward recomputes before it begins."""
    return layer.kept_bytes(keep.kept) + layer.again_bytes(keep.kept)


def raised_bytes(layer: Table, keep: Keep) -> int:
    """Returns the bytes that a layer adds on the GPU when it runs forward again."""
    return made_bytes(layer, keep) - layer.kept_bytes(keep.on_gpu)


def raised_below(layers: Sequence[tuple[Table, Keep]]) -> list[int]:
    """Returns for each layer the bytes that those below it have added when its backward begins."""
    found, nbytes = [], 0
    twice = run_again(tuple(keep for _, keep in layers))
    for (layer, keep), again in zip(layers, twice, strict=True):
        nbytes = 0 if INPUT in keep.kept else nbytes
        found.append(nbytes)
        nbytes += raised_bytes(layer, keep) if again else 0
    return found


def phases(tables: Tables, ladder: Ladder, standing: Standing) -> list[Phase]:
    """Returns the phases of a step, in their order."""
    layers = [*zip(tables.layers, ladder, strict=True)]
    raised = raised_below(layers)
    below = [*accumulate((layer.kept_bytes(keep.on_gpu) for layer, keep in layers), initial=0)]

    def forward(i: int) -> Phase:
        layer, keep = layers[i]
        buffers = {
            **standing.forward(),
            "gradients": standing.old_gradients(i),
            "kept activations": below[i],
            "this layer's": made_bytes(layer, keep),
            **layer.working("forward", keep.kept),
        }
        return Phase("forward", buffers)

    def backward(i: int) -> Phase:
        layer, keep = layers[i]
        buffers = {
            **standing.backward(i),
            "gradients": standing.new_gradients(i),
            "kept activations": below[i] + raised[i] + made_bytes(layer, keep),
            **layer.working("backward", keep.kept),
        }
        return Phase("backward", buffers)

    loss = {
        **standing.loss(),
        "gradients": standing.loss_gradients(),
        "kept activations": below[-1],
        **tables.loss.during("loss"),
    }
    made = standing.embedding(tables.embedding.during("embedding"))
    embedding = {**standing.backward(-1), **made}
    return [
        peak(forward(i) for i in range(len(ladder))),
        Phase("loss", loss),
        *standing.others(below[-1], tables.unit),
        peak(backward(i) for i in reversed(range(len(ladder)))),
        Phase("embedding", embedding),
        Phase("update", {**standing.update(), "gradients": standing.all_gradients()}),
    ]
