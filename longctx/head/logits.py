"""Logits that are computed when they are read.

With labels a patched model returns the loss, computed in chunks. Code that also reads the logits (a
metric, `predict`, `outputs[1]`) gets Hugging Face's. Other code never pays for them: they are 31
GiB in bf16 at 131072 tokens and a vocabulary of 128256.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from longctx.errors import UserError

LIMIT_BYTES = 8 * 2**30
"""Reading larger logits is an error that says what to do instead."""

_METADATA = {
    *(getattr(Tensor, name).__get__ for name in "shape dtype device layout ndim".split()),
    *(getattr(Tensor, name).__get__ for name in "is_cuda is_cpu is_meta is_sparse".split()),
    *(getattr(Tensor, name).__get__ for name in "requires_grad grad_fn grad is_leaf".split()),
    *(getattr(Tensor, name) for name in "size dim numel nelement element_size".split()),
    *(getattr(Tensor, name) for name in "is_floating_point is_complex __len__".split()),
}
"""The attributes and methods that need no values."""


class _Source:
    """Holds the operands of the logits until backward begins."""

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        self.hidden: Tensor | None = hidden  # (..., D)
        self.head = head

    def forget(self) -> None:
        self.hidden = None


class LazyLogits(Tensor):
    """A tensor (..., V) that computes its values when anything but its metadata is read. Raises
    UserError if it would be larger than LIMIT_BYTES."""

    _source: _Source
    _logits: Tensor | None

    @staticmethod
    def __new__(cls, source: _Source, shape: Iterable[int], like: Tensor, dtype: Any) -> LazyLogits:
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=dtype, device=like.device
        )
        self._source, self._logits = source, None
        return self

    def forget(self) -> None:
        """Drops the operands of the logits."""
        self._source.forget()

    def read(self) -> Tensor:
        """Returns the logits. They are computed once, so that in-place changes stay."""
        hidden, known = self._source.hidden, self._logits
        if hidden is None:
            if known is None:
                raise RuntimeError("logits can be read until backward has begun")
            return known
        differentiable = torch.is_grad_enabled() and hidden.requires_grad
        if known is None or (differentiable and not known.requires_grad):
            nbytes = self.numel() * self.element_size()
            if nbytes > LIMIT_BYTES:
                raise UserError(
                    f"all logits of this batch are {nbytes / 2**30:.1f} GiB: read the loss alone, "
                    "pass logits_to_keep=N for those of the last N tokens, or call "
                    "longctx.linear_log_probs on the base model's output"
                )
            with torch.set_grad_enabled(differentiable):  # as where hidden was computed
                known = self._logits = self._source.head(hidden).to(self.dtype)
        return known

    def __repr__(self, **settings: Any) -> str:  # type: ignore[override]
        """Returns the values if they can be computed, else the metadata, and raises no error."""
        known, hidden = self._logits, self._source.hidden
        if known is not None:
            return repr(known)
        short = self.numel() * self.element_size() <= LIMIT_BYTES
        if hidden is not None and short:
            return repr(self.read())
        why = "computed when read" if hidden is not None else "not read before backward began"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {why})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if self._logits is None else format(self._logits, spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            lazy = args[0] if args else None
            if isinstance(lazy, LazyLogits) and (copy := lazy._unread_copy(func)) is not None:
                return copy
            args, kwargs = tree_map_only(LazyLogits, LazyLogits.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _unread_copy(self, func: Any) -> LazyLogits | None:
        """Returns unread logits for accelerate's autocast, which casts what a model returns, and
        for the autograd.Functions through which DistributedDataParallel and DeepSpeed send it
        (they alone have forward-mode gradients off)."""
        if func is Tensor.float:
            same = self.dtype == torch.float32
            return self if same else LazyLogits(self._source, self.shape, self, torch.float32)
        passes = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
        if passes and func in (Tensor.detach, Tensor.clone):
            return LazyLogits(self._source, self.shape, self, self.dtype)
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.read, (args, kwargs or {}))
        return func(*args, **kwargs)


def lazy_logits(
    hidden: Tensor,  # (..., D)
    head: Callable[[Tensor], Tensor],
    vocab: int,
    loss: Tensor,
) -> LazyLogits:
    """Returns a tensor that becomes `head(hidden)`, (..., vocab), when it is read, which is
    possible until the backward of `loss` begins."""
    source = _Source(hidden, head)
    if loss.grad_fn is not None:
        alive = weakref.ref(source)  # only as long as the caller holds the logits

        def forget(grads: Any) -> None:
            if (found := alive()) is not None:
                found.forget()

        loss.grad_fn.register_prehook(forget)
    dtype = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
    return LazyLogits(source, (*hidden.shape[:-1], vocab), hidden, dtype)


def _autocast(hidden: Tensor) -> bool:
    return torch.is_autocast_enabled(hidden.device.type)
