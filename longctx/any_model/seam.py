"""Runs each layer of a model as a checkpoint: forward keeps the layer's input alone, backward runs
the layer forward again, and then backward.

    y     = layer(x)                       nothing of the layer is kept but x
    dx    = the layer's own backward       after a second forward, with the same random numbers

Every layer class of transformers 5 derives from GradientCheckpointingLayer and calls the function
that `_set_gradient_checkpointing` gave it. Ours is torch's non-reentrant checkpoint under hooks of
saved tensors, which pass the layer's input to our ActivationStore and fetch it back. A hand-written
autograd.Function would be silently wrong where layers share keys and values through their keyword
arguments (Gemma 4, Gemma 3n): the loss stays exact, and gradients are off by half.

Saved per layer: x, 2 D bytes per token in 16 bits, on the GPU or on the host. Copies out run while
the layer computes. When a layer's backward begins, the copy in of the layer below's x starts, into
another buffer: 2 units of x are on the GPU then. FLOPs are those of transformers' checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longctx.any_model.runtime import AnyRuntime
from longctx.cost.table import INPUT
from longctx.errors import UserError
from longctx.families.blocks import decoder_layers
from longctx.memory.store import ActivationStore, Saved

ABOVE = "_longctx_layers_above"
"""The attribute of a decoder layer with the number of layers that follow it: a number, so that
copies of the model have it, too."""
HIDDEN = "hidden_states"
"""The name of a layer's input in models that pass it by keyword."""


class Seam:
    """The function that a model's layers call for a checkpoint."""

    def __init__(self, runtime: AnyRuntime) -> None:
        self.runtime = runtime
        self._inside = False
        """Whether a layer is running: a layer inside it belongs to its checkpoint."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `function` with `args`, the first of which is the layer's input. transformers up to
        5.17 passes `partial(layer.__call__, **kwargs)`, later versions `partial(forward, layer,
        **kwargs)`. Raises UserError for a layer that writes into its input."""
        if self._inside or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.runtime.checkpoints += 1
        layer = layer_of(function)
        above = vars(layer).get(ABOVE) if layer is not None else None
        function, args = with_input_first(function, args, kwargs)

        def run(*args: Any) -> Any:
            with self._running():
                return function(*args)

        x = args[0] if args else None
        if above is None or not isinstance(x, Tensor) or not x.is_contiguous():
            return checkpoint(run, *args, use_reentrant=False)
        kept = _Input(self.runtime.store, x, above)
        with saved_tensors_hooks(kept.pack, unpack):
            found = checkpoint(run, *args, use_reentrant=False)
        kept.release(layer)
        return found

    @contextmanager
    def _running(self) -> Any:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class _Input:
    """The input of a layer whose forward runs. The hooks also see other tensors, such as positions,
    which all layers share."""

    def __init__(self, store: ActivationStore, x: Tensor, above: int) -> None:
        self._store, self._above = store, above
        self._x: Tensor | None = x
        self._version = x._version
        self._saved: Saved | None = None

    def pack(self, tensor: Tensor) -> Any:
        x = self._x
        assert x is not None
        if tensor.data_ptr() != x.data_ptr() or tensor.shape != x.shape:
            return tensor
        self._saved = self._store.open(self._above)
        self._store.add(self._saved, INPUT, {INPUT: tensor.detach()})
        self._store.send(self._saved, INPUT)
        return _Kept(self._store, self._saved, self._version)

    def release(self, layer: Any) -> None:
        """Ends the layer's forward. The store holds x until then, so that its copy out has ended
        before its memory is reused. Hooks of saved tensors keep this object alive, so it drops
        x."""
        x, self._x = self._x, None
        assert x is not None
        if x._version != self._version:
            raise UserError(
                f"{type(layer).__name__} writes into its input, which is to be kept for backward: "
                "this model trains with --class_type vanilla --gradient_checkpointing false alone"
            )
        if self._saved is not None:
            self._store.release(self._saved)


class _Kept:
    """Stands in autograd's graph for a layer's input."""

    def __init__(self, store: ActivationStore, saved: Saved, version: int) -> None:
        self._store, self._saved, self._version = store, saved, version

    def fetch(self) -> Tensor:
        """Returns the layer's input. Raises RuntimeError, as autograd does, if it was kept on the
        GPU and has been written to since."""
        entry = self._saved.entries.get(INPUT)
        if entry and entry.tensor is not None and entry.tensor._version != self._version:
            raise RuntimeError("a layer's input was written to between its forward and backward")
        return self._store.fetch(self._saved)


def unpack(kept: Any) -> Tensor:
    """Returns a saved tensor: a layer's input, on the GPU, or any other as it is."""
    return kept.fetch() if isinstance(kept, _Kept) else kept


def layer_of(function: Any) -> nn.Module | None:
    """Returns the module whose forward a function of transformers runs; None for another one."""
    first: Any = None
    while isinstance(function, partial):
        first = function.args[0] if function.args else first
        function = function.func
    owner = getattr(function, "__self__", first)
    return owner if isinstance(owner, nn.Module) else None


def with_input_first(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function and its arguments with the layer's input as the first of them, if it came
    by keyword: bound to the function it would stay on the GPU."""
    function = partial(function, **kwargs) if kwargs else function
    given = function.keywords if isinstance(function, partial) else {}
    if args or not isinstance(given.get(HIDDEN), Tensor):
        return function, args
    rest = {name: value for name, value in given.items() if name != HIDDEN}
    inner, before = function.func, function.args
    return (lambda x: inner(*before, **{HIDDEN: x}, **rest)), (given[HIDDEN],)


def ask_for(model: Any, function: Callable[..., Any]) -> list[nn.Module]:
    """Makes every layer of a model call `function` for its checkpoint, and returns the decoder's
    layers. Raises UserError for a model without any."""
    layers = list(decoder_layers(model))
    try:
        type(model)._set_gradient_checkpointing(
            model, enable=True, gradient_checkpointing_func=function
        )
    except (ValueError, TypeError):
        layers = []
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers that transformers could checkpoint: it trains "
            "with --class_type vanilla --gradient_checkpointing false alone"
        )
    return layers


def attach_seam(model: Any, runtime: AnyRuntime) -> int:
    """Makes every layer of a model call our checkpoint, whichever code switches checkpointing on
    later, and returns the number of decoder layers. Raises UserError for a model without any."""
    seam = Seam(runtime)
    layers = ask_for(model, seam)
    for i, layer in enumerate(layers):
        vars(layer)[ABOVE] = len(layers) - 1 - i
    vars(model)["_set_gradient_checkpointing"] = partial(_set, model, seam)
    return len(layers)


def _set(model: Any, seam: Seam, enable: bool = True, *args: Any, **kwargs: Any) -> None:
    """Replaces the method with which trainers switch checkpointing on, with their function, or
    off."""
    type(model)._set_gradient_checkpointing(model, enable, gradient_checkpointing_func=seam)
    seam.runtime.checkpointing = enable


def detach_seam(model: Any) -> None:
    """Gives the layers transformers' own checkpoint again, switched off."""
    vars(model).pop("_set_gradient_checkpointing", None)
    model._set_gradient_checkpointing(enable=False)
    for module in model.modules():
        vars(module).pop(ABOVE, None)
