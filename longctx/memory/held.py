"""Tensors that stand in `parameter.grad` for gradients whose values wait on the host.

Such a gradient has no tensor on the GPU. A `HeldGradient` is a tensor without storage that behaves
as the gradient does:

    the next backward adds to it      the sum is made where the gradient is, piece by piece
    its norm                          is known: it was measured before the gradient left
    multiplication by a number        is remembered, and applied by the update
    an operation that makes a view    brings the gradient to its parameter, where it stays
    any other operation               runs on a copy there; what it changes goes back

So clipping by torch, accelerate or Trainer, a GradScaler, logging, and both kinds of zero_grad work
as with any gradient. Only the operations of the last two lines move it. A view is anything that
shares memory with the gradient: rows, numpy arrays, DLPack, storages. From the first view on, all
operations run in place on the tensor that it shows. `parameter.grad = None` drops the gradient.

torch requires that the gradient's device is the parameter's at any time: the host for weights that
wait there, but the GPU while their block computes. An operation with other tensors that are on the
GPU runs there.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from longctx.memory.guard import settle, share_memory, unguarded

aten, device_of = torch.ops.aten, torch.ops.prim.device.default


class Holder(Protocol):
    """The owner of held gradients (gradients.py)."""

    @property
    def device(self) -> torch.device: ...

    def add(self, held: Held, grad: Tensor) -> None: ...

    def multiply(self, held: Held, factor: Any) -> None: ...

    def norm_of(self, held: Held) -> Tensor: ...

    def squares_of(self, held: Held) -> Tensor: ...

    def whole(self, held: Held, device: torch.device) -> Tensor: ...

    def replace(self, held: Held, grad: Tensor) -> None: ...

    def keep(self, held: Held, grad: Tensor) -> None: ...

    def put(self, held: Held, grad: Tensor) -> None: ...


class Held:
    """The values of a held gradient. All tensors that stand for it (`parameter.grad`, its `detach`)
    share them."""

    def __init__(self, gradients: Holder, slot: Any) -> None:
        # Weak, since garbage collection does not see through `parameter.grad`.
        self._gradients = weakref.ref(gradients)
        self.slot = slot
        self.here: Tensor | None = None
        """The values, on the GPU or the host; None if they are in the block's room on the host."""
        self.factor: Tensor | None = None
        """The factor by which the update multiplies the values, fp32, (), on the GPU; None is 1. It
        is None while other code has views of `here`."""
        self.squares: Tensor | None = None
        """The square sum of each chunk, as last measured, without the factor."""
        self.exposed: Tensor | None = None
        """A view of `here` that stands for code which has its address: `is_seen` counts it."""

    @property
    def gradients(self) -> Holder:
        found = self._gradients()
        if found is None:
            raise RuntimeError("this gradient's optimizer is gone, and the gradient with it")
        return found

    @property
    def device(self) -> torch.device:
        """The device on which other code sees the gradient: that of its parameter now."""
        block, i = self.slot
        with unguarded():
            found: torch.device = block.parameters[i].device
            return found

    def settle(self) -> None:
        """Sends the parameter to its home, as any operation on the parameter does (guard.py)."""
        block, i = self.slot
        settle(block.parameters[i])

    def whole(self, device: torch.device | None = None) -> Tensor:
        """Returns the gradient in its parameter's shape, by default on its parameter's device:
        `here` itself, or a copy."""
        self.settle()
        return self.gradients.whole(self, device or self.device)

    def show(self) -> Tensor:
        """Brings the gradient to its parameter's device, where it stays, and returns the tensor."""
        whole = self.whole()
        self.gradients.keep(self, whole)
        return whole


class HeldGradient(Tensor):
    """Stands for a gradient whose values live elsewhere. The values are fp32 if more batches were
    added than planned."""

    held: Held

    @staticmethod
    def __new__(cls, like: Tensor, held: Held, dtype: torch.dtype | None = None) -> HeldGradient:
        self: HeldGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=dtype or like.dtype, device=held.device, dispatch_device=True
        )
        # Code in C++ that asks for the address gets an error instead of a segmentation fault.
        torch._C._set_throw_on_mutable_data_ptr(self)  # type: ignore[attr-defined]
        return self

    def __init__(self, like: Tensor, held: Held, dtype: torch.dtype | None = None) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is device_of:
            return args[0].held.device
        if func is aten.detach.default:
            return HeldGradient(args[0], args[0].held)
        if isinstance(first, list | tuple) and "foreach" in func.__name__:
            return _one_by_one(func, args, kwargs)
        if isinstance(first, HeldGradient):
            held = first.held
            if func is aten.add_.Tensor and _is_plain_sum(*args, **kwargs):
                held.gradients.add(held, args[1])
                return first
            if func is aten.mul_.Tensor and _is_number(args[1]):
                held.gradients.multiply(held, args[1])
                return first
            if func is aten.linalg_vector_norm.default and _is_plain_norm(*args, **kwargs):
                norm = held.gradients.norm_of(held)
                return norm.to(held.device, kwargs.get("dtype") or torch.float32)
        return _on_values(func, args, kwargs)

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        values = values.held.show() if isinstance(values, HeldGradient) else values
        self.held.gradients.put(self.held, values)

    # --- what torch reads without an operation that is dispatched ------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        return self.held.show().numpy(force=force)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        # A detached tensor keeps the storage in use as long as the consumer has it (`is_seen`).
        return self.held.show().detach().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.held.show().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._exposed().__cuda_array_interface__

    def data_ptr(self) -> int:
        return self._exposed().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._exposed().untyped_storage()

    def _typed_storage(self) -> Any:
        return self._exposed()._typed_storage()

    def _exposed(self) -> Tensor:
        """Returns the tensor with the values to code whose hold on it cannot be counted."""
        shown = self.held.show()
        self.held.exposed = shown.detach()
        return shown

    def tolist(self) -> Any:
        return self.held.whole().tolist()

    def item(self) -> Any:
        return self.held.whole().item()

    def __copy__(self) -> Tensor:
        return copy.copy(self.held.show())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.held.whole().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.held.whole())


def _on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the values of gradients, and takes back what it changed. Values that
    share memory with a result then stay where they are."""
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func.__name__.split('.')[0]} would change the shape or memory of a gradient that "
            "waits on the host: assign parameter.grad instead"
        )
    device = _device(args, kwargs)
    values: dict[Held, Tensor] = {}
    stands: dict[int, HeldGradient] = {}

    def value(stand: HeldGradient) -> Tensor:
        if stand.held not in values:
            values[stand.held] = whole = stand.held.whole(device)
            stands[id(whole)] = stand
        return values[stand.held]

    given, given_by_name = tree_map_only(HeldGradient, value, (tuple(args), kwargs))
    found = func(*given, **given_by_name)
    results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    written = {x.held for x in _written(func, args, kwargs)}
    for held, whole in values.items():
        if any(x is not whole and share_memory(x, whole) for x in results):
            held.gradients.keep(held, whole)
        elif held in written:
            held.gradients.replace(held, whole)
    return tree_map_only(Tensor, lambda x: stands.get(id(x), x), found)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """Returns where an operation runs: on the GPU if other operands are there, else where the first
    gradient is. None without a held gradient, as for one tensor of a list in which others are
    held."""
    tensors = [x for x in tree_leaves((tuple(args), kwargs)) if isinstance(x, Tensor)]
    stands = [x.held for x in tensors if isinstance(x, HeldGradient)]
    others = [x.device for x in tensors if x.dim() and not isinstance(x, HeldGradient)]
    for held in stands:
        held.settle()
    if not stands:
        return None
    gpu = stands[0].gradients.device
    return gpu if gpu in others else stands[0].device


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[HeldGradient]:
    """Yields the gradients that an operation writes, in place or as `out`."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, HeldGradient))


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a foreach operation one gradient at a time, so that a single one is on the GPU as a
    whole."""
    many, *rest = args
    found = []
    for i, given in enumerate(many):
        others = [
            y[i : i + 1] if isinstance(y, list | tuple) and len(y) == len(many) else y for y in rest
        ]
        found.append(_on_values(func, ([given], *others), kwargs))
    return [y for part in found if part is not None for y in part] or None


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.dim() == 0 and not isinstance(x, HeldGradient))


def _is_plain_sum(stand: Any, other: Any, *, alpha: Any = 1) -> bool:
    plain = isinstance(other, Tensor) and not isinstance(other, HeldGradient)
    return plain and other.shape == stand.shape and alpha == 1


def _is_plain_norm(
    stand: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> bool:
    return order == 2 and dims is None and not keepdim
