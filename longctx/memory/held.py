"""A gradient that is not where its parameter is, as `parameter.grad`.

A gradient that waits in host memory has no tensor on the GPU. A `HeldGradient` stands for it in
`parameter.grad`: a tensor without storage that behaves as the gradient does.

    the next backward adds to it      the sum is made where the gradient is, piece by piece
    its norm                          is known: it was measured before the gradient left
    multiplication by a number        is remembered, and applied by the update
    any other operation               runs on a copy on the GPU; what it changes goes back

So clipping by torch, accelerate or Trainer, a GradScaler, logging, and both kinds of zero_grad do
with it what they do with any gradient. Only the operations of the last line move it.
`parameter.grad = None` forgets it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Holder(Protocol):
    """The owner of held gradients (gradients.py)."""

    def add(self, held: HeldGradient, grad: Tensor) -> None: ...

    def multiply(self, held: HeldGradient, factor: Any) -> None: ...

    def norm_of(self, held: HeldGradient) -> Tensor: ...

    def whole(self, held: HeldGradient) -> Tensor: ...

    def replace(self, held: HeldGradient, grad: Tensor) -> None: ...


class HeldGradient(Tensor):
    """Stands for a gradient. Its dtype and device are the parameter's, as torch requires of
    `.grad`; its values may be fp32, and live elsewhere."""

    here: Tensor | None
    """The values on the GPU; None if they are in the block's room on the host."""
    factor: Tensor | None
    """The factor by which the values are multiplied, fp32, (), on the GPU; None is 1."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, gradients: Holder, slot: Any) -> HeldGradient:
        held: HeldGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return held

    def __init__(self, parameter: nn.Parameter, gradients: Holder, slot: Any) -> None:
        # Weak, since garbage collection does not see through `parameter.grad`.
        self._gradients = weakref.ref(gradients)
        self.slot, self.here, self.factor = slot, None, None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def gradients(self) -> Holder:
        found = self._gradients()
        if found is None:
            raise RuntimeError("this gradient's optimizer is gone, and the gradient with it")
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        held = args[0]
        if func is aten.detach.default:
            return held
        if isinstance(held, list | tuple) and "foreach" in func.__name__:
            return _one_by_one(func, args, kwargs)
        if isinstance(held, HeldGradient):
            if func is aten.add_.Tensor and _is_plain_sum(*args, **kwargs):
                held.gradients.add(held, args[1])
                return held
            if func is aten.mul_.Tensor and _is_number(args[1]):
                held.gradients.multiply(held, args[1])
                return held
            if func is aten.linalg_vector_norm.default and _is_plain_norm(*args, **kwargs):
                return held.gradients.norm_of(held).to(kwargs.get("dtype") or torch.float32)
        return _on_copies(func, args, kwargs)

    def whole(self) -> Tensor:
        """Returns a copy of the gradient on the GPU, in the parameter's shape."""
        return self.gradients.whole(self)

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def item(self) -> Any:
        return self.whole().item()

    def data_ptr(self) -> int:
        raise RuntimeError(
            "this gradient waits in host memory and has no address: take gradient.clone()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.whole()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())


def _on_copies(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on copies of gradients, and takes back what it changed."""
    copies: dict[int, tuple[HeldGradient, Tensor]] = {}

    def copy(held: HeldGradient) -> Tensor:
        if id(held) not in copies:
            copies[id(held)] = held, held.whole()
        return copies[id(held)][1]

    found = func(
        *tree_map_only(HeldGradient, copy, tuple(args)),
        **tree_map_only(HeldGradient, copy, kwargs),
    )
    written = [
        given
        for argument, given in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for held, whole in copies.values():
        if any(given is held for given in written):
            held.gradients.replace(held, whole)
            found = held if found is whole else found
    return found


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on a list of gradients, of which one at a time is brought to the GPU."""
    many, *rest = args
    found = []
    for i, given in enumerate(many):
        others = [
            y[i : i + 1] if isinstance(y, list | tuple) and len(y) == len(many) else y for y in rest
        ]
        x, *others = tree_map_only(HeldGradient, HeldGradient.whole, [given, *others])
        found.append(func([x], *others, **kwargs))
        if isinstance(given, HeldGradient) and func._schema.is_mutable:
            given.gradients.replace(given, x)
    return [y for part in found if part is not None for y in part] or None


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.dim() == 0 and not isinstance(x, HeldGradient))


def _is_plain_sum(held: Any, other: Any, *, alpha: Any = 1) -> bool:
    return isinstance(other, Tensor) and other.shape == held.shape and alpha == 1


def _is_plain_norm(
    held: Any, order: Any = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> bool:
    return order == 2 and dims is None and not keepdim
