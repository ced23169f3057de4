"""What a step of Trainer does again, and need not where nobody can have changed anything.

Between two steps of a run run transformers, longctx, and callbacks. If no callback is of others,
but for those that say `reads_weights = False`, and nothing was evaluated, saved or loaded since the
last step, then the model is what it was. In a step of short rows, for which the GPU waits, three
walks over some thousand modules are left out then: setting them to training, dropping gradients,
and looking whether the schedule still covers the model (model/graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from longctx.run.callbacks import is_known


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
        """Within, a settled model stays as it is when it is set to training, and is not looked at
        again."""
        holds = self._holds and all(map(_leaves_alone, self._handler.callbacks))
        if not holds:
            self._parameters = [*model.parameters()]
        if runtime is not None:
            runtime.settled = holds
        own = vars(model)
        own |= {"train": lambda mode=True: model} if holds else {}
        try:
            yield
            self._holds = True
        finally:
            if holds:
                del own["train"]
            if runtime is not None:
                runtime.settled = False

    @contextmanager
    def training(self, model: Any) -> Iterator[None]:
        """Within, gradients are dropped without a walk over the modules."""

        def zero_grad(set_to_none: bool = True) -> None:
            if self._holds and set_to_none:
                for parameter in self._parameters:
                    parameter.grad = None
            else:
                type(model).zero_grad(model, set_to_none)

        vars(model)["zero_grad"] = zero_grad
        try:
            yield
        finally:
            del vars(model)["zero_grad"]


def _leaves_alone(callback: Any) -> bool:
    return is_known(callback) or not getattr(callback, "reads_weights", True)
