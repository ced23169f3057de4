"""Names for the parts of a step, as a profiler shows them: `with annotate("attention"): ...`.

A name becomes a `record_function` range while torch's profiler records, and costs one comparison
otherwise (about 0.2 microseconds). profiling/phases.py adds up a trace by these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
Item = TypeVar("Item")

_NOTHING: AbstractContextManager[Any] = nullcontext()


def annotate(name: str) -> AbstractContextManager[Any]:
    """A range of the trace called `name`; nothing while no profiler records."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def annotated(name: str) -> Callable[[Callable[P, Item]], Callable[P, Item]]:
    """Decorator: every call of the function is a range called `name`."""

    def wrap(function: Callable[P, Item]) -> Callable[P, Item]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Item:
            with annotate(name):
                return function(*args, **kwargs)

        return call

    return wrap


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; what the loop does with one is a range called `name`."""
    for item in items:
        with annotate(name):
            yield item
