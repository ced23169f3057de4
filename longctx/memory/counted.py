"""The bytes, FLOPs and copies of the candidates of a search, an array entry for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from longctx.cost.kept import Keep
from longctx.cost.peak import Tables, made_bytes, raised_bytes
from longctx.cost.seconds import Falling, Hosted
from longctx.cost.table import INPUT, Keepable, Load, Phase, Table, load, stacked
from longctx.memory.candidates import Candidates, Choice
from longctx.memory.levels import Activity


class EachChoice:
    """The bytes and FLOPs of one layer, an entry for each choice of the candidates. They are
    counted once for a cut of the work: 40 placements of the states are scored with the same
    numbers."""

    def __init__(self, choices: Sequence[Choice], kinds: Sequence[Table]) -> None:
        self.kinds = np.eye(len(kinds), dtype=int)[[choice.kind for choice in choices]]
        self.choices = [(kinds[choice.kind], choice.keep) for choice in choices]
        self.twice = np.array([choice.twice for choice in choices])
        self.bare = np.array([INPUT not in choice.keep.kept for choice in choices])

    def count(self, of: Callable[[Table, Keep], float]) -> Any:  # (choices,)
        return np.array([of(layer, keep) for layer, keep in self.choices])

    @cached_property
    def on_gpu(self) -> Any:  # (choices,)
        """The bytes that the layer keeps on the GPU."""
        return self.count(lambda layer, keep: layer.kept_bytes(keep.on_gpu))

    @cached_property
    def on_host(self) -> Any:  # (choices,)
        """The bytes that the layer keeps on the host."""
        return self.count(lambda layer, keep: layer.kept_bytes(keep.hosted))

    @cached_property
    def forward(self) -> Any:  # (choices,)
        return self._working("forward")

    @cached_property
    def backward(self) -> Any:  # (choices,)
        return self._working("backward")

    def _working(self, phase: Phase) -> Any:
        """Returns the bytes that a layer adds while it computes, less those that it keeps on the
        GPU."""

        def added(layer: Table, keep: Keep) -> float:
            return sum(layer.working(phase, keep.kept).values()) + made_bytes(layer, keep)

        return self.count(added) - self.on_gpu

    @cached_property
    def again(self) -> Load:
        """The works that backward of the layer recomputes."""
        each = zip(self.choices, self.twice, strict=True)
        return stacked([load(layer.again(keep.kept, twice=twice)) for (layer, keep), twice in each])

    @cached_property
    def raised(self) -> Any:  # (choices,)
        """The bytes that a layer adds on the GPU if it runs forward again."""
        return self.count(raised_bytes) * self.twice

    @cached_property
    def hosted(self) -> Hosted:
        """The activations that the layer keeps on the host."""

        def total(which: Callable[[Keepable], bool]) -> Any:
            return self.count(
                lambda layer, keep: sum(
                    k.aligned for k in layer.keepables if k.name in keep.hosted and which(k)
                )
            )

        waits = self.count(lambda _, keep: bool(keep.hosted))
        falling = Falling(
            kinds=self.kinds.argmax(axis=1),
            early=total(lambda k: k.name == INPUT),
            middle=total(lambda k: k.name != INPUT and not k.of_tiles),
            late=total(lambda k: k.of_tiles),
        )
        return Hosted(
            nbytes=total(lambda _: True),
            layers=self.kinds * waits[:, None],
            first=total(lambda k: k.read_first),
            falling=falling,
            numbers=np.eye(len(self.choices), dtype=int),
        )


class Counted:
    """The bytes and FLOPs of candidates, for one model, batch and cut."""

    def __init__(self, found: Candidates, tables: Tables, each: EachChoice | None = None) -> None:
        self.found, self.tables = found, tables
        self.each = each or EachChoice(found.choices, tables.kinds)

    def some(self, which: Any) -> Counted:
        """Returns the count of some of the candidates."""
        if len(which) == len(self.found.layers):
            return self
        return Counted(self.found.some(which), self.tables, self.each)

    @cached_property
    def on_gpu(self) -> Any:  # (C,)
        """Saved activations of all layers on the GPU, when forward ends."""
        return self.found.numbers @ self.each.on_gpu

    @cached_property
    def loss_bytes(self) -> int:
        return sum(self.tables.loss.during("loss").values())

    @cached_property
    def activity(self) -> Activity:
        end = np.cumsum(self.each.on_gpu[self.found.layers], axis=1)
        backward = end + self.each.backward[self.found.layers]
        if self.each.twice.any():
            backward += self._raised_below
        return Activity(
            forward=end + self.each.forward[self.found.layers],
            backward=backward,
            loss=end[:, -1] + self.loss_bytes,
            embedding=sum(self.tables.embedding.during("embedding").values()),
        )

    @property
    def _raised_below(self) -> Any:  # (C, layers)
        """The bytes on the GPU that layers have added by running forward again when the backward of
        a layer above them begins, by that layer."""
        layers = self.found.layers
        raised = self.each.raised[layers]
        before = np.cumsum(raised, axis=1) - raised
        # Only layers from the nearest below that keeps its input count: those further down have
        # not run again yet.
        own = ~self.each.bare[layers]
        return before - np.maximum.accumulate(np.where(own, before, 0), axis=1)

    @cached_property
    def again_layers(self) -> Any:  # (C, layers)
        """Whether a layer's weights are copied up once more, since it or one below runs forward
        again. None if no layer does."""
        either = self.each.twice | self.each.bare
        return either[self.found.layers] if either.any() else None

    @cached_property
    def below(self) -> Any:  # (C, layers + 1)
        """Bytes that the layers below each layer keep on the host."""
        hosted = self.each.on_host
        found = np.zeros((len(self.found.layers), self.found.layers.shape[1] + 1), np.int64)
        np.cumsum(hosted[self.found.layers], axis=1, out=found[:, 1:])
        return found

    @cached_property
    def again(self) -> Load:
        """The works that backward of all layers recomputes."""
        return self.each.again.each(lambda numbers: self.found.numbers @ numbers)

    @cached_property
    def hosted(self) -> Hosted:
        """The activations that all layers keep on the host."""
        each, numbers = self.each.hosted, self.found.numbers
        summed = {name: numbers @ getattr(each, name) for name in ("nbytes", "layers", "first")}
        return each._replace(**summed, numbers=numbers)
