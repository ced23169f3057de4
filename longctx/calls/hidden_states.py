"""The hidden states that the schedule returns: the last one.

`output_hidden_states=True` asks for the input of the first layer and the output of every layer, the
last of them after the final norm. The schedule drops all but the last, and most callers read
`outputs.hidden_states[-1]` alone, for a loss or a head of their own. So in training the tuple has
its length and its last element; the elements before it are placeholders, and any operation on one
is an error. In evaluation, where callers read states of single layers, Hugging Face's layers run
and keep all.

transformers also takes indices of single states. If the last one alone is asked for, the tuple is
that of Hugging Face's model: None before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from longctx.errors import UserError

NAME = "output_hidden_states"


def asked(config: Any, given: Mapping[str, Any]) -> Any:
    """Returns the states that a call with the arguments `given` asks for: a flag, an index,
    indices; None for no states. As in transformers, the configuration counts if the argument is
    absent."""
    return (given[NAME] if NAME in given else getattr(config, NAME, None)) or None


def is_served(config: Any, wanted: Any, *, trains: bool) -> bool:
    """Whether the schedule has the states that `asked` returned: none, or in training the last
    one."""
    if wanted is None:
        return True
    if not trains or getattr(config, "tie_last_hidden_states", None) is False:
        return False  # untied, the last state is that before the final norm
    last = config.num_hidden_layers
    return wanted is True or set([wanted] if isinstance(wanted, int) else wanted) <= {-1, last}


def last_alone(
    wanted: Any,
    hidden: Tensor,  # (B, S, D), after the final norm
    layers: int,
) -> tuple[Any, ...] | None:
    """Returns the tuple of layers + 1 states, of which the last one can be read."""
    if wanted is None:
        return None
    return (*(NotKept(i) if wanted is True else None for i in range(layers)), hidden)


class _NotKeptError(UserError, AttributeError):
    """The error of a placeholder. It is an AttributeError, so that `hasattr`, by which accelerate
    looks for tensors, returns False."""


def _refuse(self: NotKept, *args: Any, **kwargs: Any) -> NoReturn:
    raise _NotKeptError(
        f"hidden_states[{vars(self).get('index')}] was not kept: in training the schedule gives "
        "hidden_states[-1] alone; for the others call model.eval() or longctx.unpatch(model) first"
    )


class NotKept:
    """A placeholder for a hidden state that was not kept. Any operation on it but `repr` is a
    UserError."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<hidden_states[{self.index}], which the schedule does not keep>"

    __getattr__ = __getitem__ = __iter__ = __len__ = __float__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = __neg__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(_first([*args, *(kwargs or {}).values()]))


def _first(values: Any) -> NotKept:
    """Returns the placeholder among the arguments of a function of torch."""
    for value in values:
        if isinstance(value, NotKept):
            return value
        if isinstance(value, list | tuple) and any(isinstance(x, NotKept) for x in value):
            return _first(value)
    return NotKept(0)
