"""Whether anybody else sees a tensor's memory: views, numpy arrays, DLPack.

The optimizer postpones updates, sums 16-bit gradients in fp32 and remembers factors. None of it
shows through `parameter.grad` (guard.py, held.py), but a view of a gradient is an ordinary tensor,
which would show it. So whoever postpones or moves something asks here first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same storage."""
    if x.layout != torch.strided or y.layout != torch.strided:
        return False
    return _storage(x) == _storage(y)


def is_seen(x: Tensor, holders: int = 1, *, owners: int = 1) -> bool:
    """Whether others see the memory of a tensor that `holders` references in C++ hold, its Python
    object included; `owners` tensors share its storage by right."""
    return x._use_count() > holders or sharers(x) > owners  # type: ignore[attr-defined]


def any_is_seen(tensors: Iterable[tuple[Tensor, int]], beside: Iterable[Tensor] = ()) -> bool:
    """`is_seen` of any of (tensor, holders), where they may share storages among themselves and
    with those `beside` them."""
    tensors = [(x, holders) for x, holders in tensors if x.layout == torch.strided]
    owners = Counter(_storage(x) for x in [*(x for x, _ in tensors), *beside])
    return any(is_seen(x, holders, owners=owners[_storage(x)]) for x, holders in tensors)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def sharers(x: Tensor) -> int:
    """The number of tensors that share the storage."""
    storage = x.untyped_storage()  # which holds it too
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count - 1
