"""An exact AdamW's states by parameter: `optimizer.state`, as torch's optimizers have it.

`optimizer.state[parameter]` holds `step`, `exp_avg`, `exp_avg_sq` and, for weights in 16 bits,
`remainder` and `checksums`. They are the states themselves where they live: what is written into
them is what the next update reads, and whoever keeps one sees every update. Other tensors cannot
take their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torch import Tensor, nn

from longctx.errors import UserError


class Owner(Protocol):
    """The optimizer that has the states (optimizer.py)."""

    counts: dict[nn.Parameter, Tensor]

    def lend_states(self, parameter: nn.Parameter) -> dict[str, Tensor]: ...

    def load_states(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None: ...


class StatesByParameter(MutableMapping[nn.Parameter, "StatesOf"]):
    """An optimizer's states of the parameters that were updated, as views of where they live."""

    def __init__(self, optimizer: Owner) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Owner:
        found = self._optimizer()
        assert found is not None, "its optimizer is gone"
        return found

    def __getitem__(self, parameter: nn.Parameter) -> StatesOf:
        optimizer = self.optimizer
        if parameter not in optimizer.counts:
            return StatesOf({})  # torch's is a defaultdict
        return StatesOf({"step": optimizer.counts[parameter]} | optimizer.lend_states(parameter))

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        self.optimizer.load_states(parameter, states)

    def __delitem__(self, parameter: nn.Parameter) -> None:
        if parameter not in self.optimizer.counts:
            raise KeyError(parameter)
        self.optimizer.load_states(parameter, {})

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.optimizer.counts

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([*self.optimizer.counts])

    def __len__(self) -> int:
        return len(self.optimizer.counts)


class StatesOf(MutableMapping[str, Tensor]):
    """One parameter's states by name. Their values may be written, the mapping may not."""

    def __init__(self, states: dict[str, Tensor]) -> None:
        self._states = states

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not None and value is self._states.get(name):
            return  # states["exp_avg"] *= 0.5 has written into it
        raise UserError(
            f"exact AdamW's state {name!r} of a parameter lives in a place of its own, which no "
            "other tensor takes: write into it (state['exp_avg'].copy_(x)), or give all of a "
            "parameter's states to optimizer.load_states(parameter, states)"
        )

    def __delitem__(self, name: str) -> None:
        self[name] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return repr(self._states)
