"""The bytes of tensors that are alive, counted on a CPU, where kernels need not run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveBytes(TorchDispatchMode):
    """A context that counts what is allocated in it: `now`, and `most` at a time. Storages of
    `others` count nothing."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {x.untyped_storage()._cdata for x in others}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, made)
        return made

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        place, nbytes = storage._cdata, storage.nbytes()
        if place not in self._seen:
            self._seen.add(place)
            weakref.finalize(storage, self._gone, place, nbytes)
            self.now += nbytes
            self.most = max(self.most, self.now)

    def _gone(self, place: int, nbytes: int) -> None:
        self._seen.discard(place)
        self.now -= nbytes


def no_kernel_runs(patch: pytest.MonkeyPatch) -> None:
    """Leaves the results of Triton's kernels as they were allocated, of any package."""
    from triton.runtime import autotuner, interpreter

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    for kind, name in (
        (interpreter.GridExecutor, "__call__"),
        (autotuner.Autotuner, "run"),
        (autotuner.Heuristics, "run"),
    ):
        patch.setattr(kind, name, nothing)
