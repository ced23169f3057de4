"""Spares a step of Trainer its walks over the modules if nothing can have changed the model.

Only transformers, longctx and callbacks run between two steps. If every callback is transformers'
or longctx's, or says `reads_weights = False`, and nothing was evaluated, saved or loaded since the
last step, then the model is what it was. In a step of short rows, for which the GPU waits, three
walks over some thousand modules are left out then: setting them to training, dropping gradients,
and looking whether the schedule still covers the model (runtime/graphs.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from longctx.train.trainer.callbacks import is_known


class Settled:
    """Whether the model is what it was in the last step."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._parameters: list[nn.Parameter] = []
        self._holds = False

    def unsettle(self) -> None:
        """Says that something else than a step has happened."""
        self._holds = False

    @contextmanager
    def step(self, model: Any, runtime: Any) -> Iterator[None]:
        """Leaves a settled model as it is, within, when it is set to training, and does not look at
        it again."""
        holds = self._holds and all(map(_leaves_alone, self._handler.callbacks))
        if not holds:
            self._parameters = [*model.parameters()]
        own = vars(model)
        own |= {"train": lambda mode=True: model} if holds else {}
        try:
            with nullcontext() if runtime is None else runtime.settling(holds):
                yield
            self._holds = True
        finally:
            if holds:
                del own["train"]

    @contextmanager
    def training(self, model: Any) -> Iterator[None]:
        """Drops gradients, within, without a walk over the modules."""
        vars(model)["zero_grad"] = ZeroGrad(self, model)
        try:
            yield
        finally:
            del vars(model)["zero_grad"]

    def drop_gradients(self) -> bool:
        """Drops the gradients of a settled model; whether it did."""
        for parameter in self._parameters if self._holds else ():
            parameter.grad = None
        return self._holds


class ZeroGrad:
    """A model's `zero_grad`. In a copy or a file of the model it is the class's own."""

    def __init__(self, settled: Settled, model: Any) -> None:
        self._settled, self._model = settled, weakref.ref(model)

    def __call__(self, set_to_none: bool = True) -> None:
        model: Any = self._model()
        if not set_to_none or not self._settled.drop_gradients():
            type(model).zero_grad(model, set_to_none)

    def __reduce__(self) -> Any:
        return _own_zero_grad, (self._model(),)


def _own_zero_grad(model: Any) -> Any:
    return partial(type(model).zero_grad, model)


def _leaves_alone(callback: Any) -> bool:
    return is_known(callback) or not getattr(callback, "reads_weights", True)
