"""Guards tensors whose values are on their way: an operation on one first waits for the values.

A lazy update (optimizer.py) has not reached its weights yet, and weights that live on the host may
have a copy on the GPU that is dropped after use. A forward knows this and waits block by block.
Other code does not: a moving average, best weights that are loaded back, `torch.save(model)`, a
loop that reads `parameter.data`. So meanwhile the tensor is of a subclass, and any operation on it
in Python first ends what is outstanding, except for a look at its shape and the like. This costs an
assignment when it begins and one when it ends, and nothing in between.

Views, numpy arrays and DLPack share a tensor's memory without its guard. So code that postpones an
update or moves values asks `is_seen` first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Settle = Callable[[], None]
"""Ends what is outstanding, and releases the guarded tensors."""
_settle: dict[int, Settle] = {}
"""Maps ids of guarded tensors to their function. A tensor's own dictionary would be saved with
it."""
_METADATA = frozenset(
    """
    shape dtype device layout ndim requires_grad is_leaf grad grad_fn grad_dtype retains_grad
    is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested nbytes itemsize names
    _version _backward_hooks _post_accumulate_grad_hooks output_nr
    size dim ndimension numel nelement element_size stride storage_offset get_device __len__
    is_floating_point is_complex is_signed is_contiguous is_inference is_same_size
    requires_grad_ register_hook register_post_accumulate_grad_hook
    """.split()
)
"""Attributes and methods that read and write no value of a tensor."""


class Guarded:
    """The base of guarded tensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if _name(func) not in _METADATA or _gives_a_gradient(func, args):
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Guarded):
                    settle(x)  # type: ignore[arg-type]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle(self)  # type: ignore[arg-type]
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle(self)  # type: ignore[arg-type]
        return self.__reduce_ex__(protocol)


class GuardedParameter(Guarded, nn.Parameter):
    """A parameter while its values are on their way."""


class GuardedTensor(Guarded, Tensor):
    """A tensor while its values must not change, such as a gradient that an update will read."""


_PLAIN: dict[type, type] = {GuardedParameter: nn.Parameter, GuardedTensor: Tensor}
_GUARDED = {plain: guarded for guarded, plain in _PLAIN.items()}


def guard(x: Tensor, settle: Settle) -> None:
    """Has `settle` called before any operation on the tensor. Tensors of other classes (such as
    quantised weights) are left alone."""
    kind = type(x)
    if kind in _GUARDED:
        x.__class__ = _GUARDED[kind]  # type: ignore[assignment]
    if kind in _GUARDED or kind in _PLAIN:
        _settle[id(x)] = settle


def release(x: Tensor) -> None:
    """Ends the tensor's guard, if it has one."""
    kind = type(x)
    if kind in _PLAIN:
        x.__class__ = _PLAIN[kind]  # type: ignore[assignment]
        _settle.pop(id(x), None)


def settle(x: Tensor) -> None:
    """Ends what is outstanding before an operation on a guarded tensor."""
    if waits := _settle.get(id(x)):
        waits()
    release(x)


def unguarded() -> Any:
    """Returns a context in which guarded tensors are ordinary ones, for the code that moves
    them."""
    return torch._C.DisableTorchFunctionSubclass()


def _gives_a_gradient(func: Any, args: Sequence[Any]) -> bool:
    """Whether the function assigns a tensor to `parameter.grad`, which has to lie on the device of
    the parameter's home."""
    return getattr(func, "__name__", "") == "__set__" and isinstance(args[1], Tensor)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # the descriptor has the name of the attribute
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


# --- who else sees a tensor's memory -------------------------------------------------------------


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same storage."""
    if x.layout != torch.strided or y.layout != torch.strided:
        return False
    return _storage(x) == _storage(y)


def is_seen(x: Tensor, holders: int = 1, *, owners: int = 1) -> bool:
    """Whether other code sees the memory of a tensor. `holders` is the number of references in C++
    that are known, with that of its Python object; `owners` that of tensors which rightly share its
    storage."""
    return x._use_count() > holders or sharers(x) > owners  # type: ignore[attr-defined]


def any_is_seen(tensors: Iterable[tuple[Tensor, int]], beside: Iterable[Tensor] = ()) -> bool:
    """Whether other code sees any of (tensor, holders). They may share storages with each other and
    with the tensors `beside`."""
    tensors = [(x, holders) for x, holders in tensors if x.layout == torch.strided]
    owners = Counter(_storage(x) for x in [*(x for x, _ in tensors), *beside])
    return any(is_seen(x, holders, owners=owners[_storage(x)]) for x, holders in tensors)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def sharers(x: Tensor) -> int:
    """Returns the number of tensors that share the storage."""
    storage = x.untyped_storage()  # this object counts, too
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count - 1
