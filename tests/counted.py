"""What a function costs, counted while it runs: FLOPs of its products, and bytes of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Found = TypeVar("Found")


def flops(function: Callable[[], Found]) -> tuple[Found, int]:
    """(what the function returns, FLOPs of its matrix products)."""
    with FlopCounterMode(display=False) as counter:
        found = function()
    return found, counter.get_total_flops()


class _Storages(TorchDispatchMode):
    """The storages that operations return, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs or {}))
            if isinstance(x, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._known or key in given:
                continue
            self._known.add(key)
            weakref.finalize(storage, self._gone, key, nbytes)
            self.now += nbytes
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, nbytes)
        return found


def allocated(function: Callable[[], Any]) -> tuple[int, int]:
    """(bytes of the largest tensor that the function makes, most bytes of them at a time).

    On the CPU an operation may make tensors of its own that nobody sees; those of plain torch that
    stand for a kernel count too.
    """
    with _Storages() as storages:
        function()
    return storages.largest, storages.peak
