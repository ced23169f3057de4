"""Puts our kernels into transformers' mixers while the schedule runs them. They replace:

convolution    causal-conv1d, which is built with nvcc, or torch's convolution
scan           of Mamba 2: mamba-ssm, which is built with nvcc, too, or torch's code, which
               allocates up to 6 MB per token
gated norm     some ten passes over fp32 tensors in torch
LoRA           PEFT's code, which converts an adapter's input to fp32, and adds its output in
               further passes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from longctx.families.adapters import (
    QUANTISED,
    applied,
    is_adapted,
    is_wrapped,
    why_not_applied,
    why_not_dense,
)
from longctx.kernels.causal_conv import MOST_TAPS, causal_conv
from longctx.kernels.gated_norm import gated_norm
from longctx.kernels.launch import runs_kernel
from longctx.kernels.state_space import WIDEST, scan
from longctx.layer.adapted import adapted_linear
from longctx.layer.linear import packed_state


def _tensors(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


_as_one = wrap_torch_function(_tensors)
"""Makes a function one of torch's for `OurConvolution`, which would otherwise intercept each
attribute of a tensor that the function reads: hundreds in a call of a mixer, 3 us of Python
each."""


class OurConvolution(TorchFunctionMode):
    """A context in which our kernel replaces torch's convolution of channels with one filter each,
    padded so that it is causal. The result has the row's tokens alone: torch's also has the K - 1
    behind them, which a causal model cuts off. With `begins` the first K - 1 tokens of the input
    are a state, and their results, which a model cuts off, too, are left out. With the `positions`
    (T,) of tokens in their documents no token sees another document, in any dtype; `check` raises
    RuntimeError where nothing was convolved so.

    Such a cut then takes the whole tensor. It is skipped as well: in backward torch would write its
    gradient to a tensor with channels as rows, and all that follows would be transposed.
    """

    def __init__(self, *, begins: bool, positions: Tensor | None = None) -> None:
        super().__init__()
        self._begins, self._positions = begins, positions
        self._has_read = positions is None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv1d:
            y = _convolved(self._begins, self._positions, *args, **kwargs)
            if y is not None:
                self._has_read = True
                return y
        if func is torch.Tensor.__getitem__ and _takes_all(*args):
            return args[0]
        return func(*args, **kwargs)

    def check(self) -> None:
        if not self._has_read:
            raise RuntimeError(
                "a mixer did not read where documents begin: its convolution is none of torch's "
                "with a filter for each channel, so packed documents would see each other"
            )


def _takes_all(x: Tensor, index: Any) -> bool:
    """Whether slices of a tensor take all of it."""
    if not isinstance(index, tuple) or not all(type(part) is slice for part in index):
        return False
    sizes = x.shape[: len(index)]
    return all(
        part.step is None and part.indices(size)[:2] == (0, size)
        for part, size in zip(index, sizes, strict=False)
    )


def _convolved(
    begins: bool,
    positions: Tensor | None,  # (T,)
    input: Tensor,  # (B, C, T)
    weight: Tensor,  # (C, 1, K)
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:  # (B, C, T), or (B, C, T - K + 1) if it begins with a state
    """Returns our convolution for the arguments of torch.conv1d; None if it cannot compute it."""
    channels, of_group, taps = weight.shape
    how = [x[0] if isinstance(x, (tuple, list)) else x for x in (stride, padding, dilation)]
    by_channel = of_group == 1 and groups == channels == input.shape[1]
    if not by_channel or how != [1, taps - 1, 1] or taps > MOST_TAPS:
        return None
    autocasts = torch.is_autocast_enabled(input.device.type)
    if positions is None and (autocasts or input.dtype != weight.dtype):
        return None
    rows = input.mT
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = torch.get_autocast_dtype(input.device.type) if autocasts else input.dtype
    filters, bias = weight[:, 0].to(dtype), None if bias is None else bias.to(dtype)
    y = causal_conv(rows.to(dtype), filters, bias, positions)
    return (y[:, taps - 1 :] if begins else y).mT


@contextmanager
def our_recurrence(module: nn.Module) -> Iterator[None]:
    """Returns a context in which RECURRENCES replace the functions of these names in a mixer's
    file."""
    home = vars(sys.modules[type(module).__module__])
    theirs = {name: home[name] for name in RECURRENCES if name in home}
    home.update({name: partial(RECURRENCES[name], given) for name, given in theirs.items()})
    try:
        yield
    finally:
        home.update(theirs)


@_as_one
def _scanned(
    theirs: Any,
    hidden_states: Tensor,  # (rows, T, H, P)
    dt: Tensor,  # (rows, T, H)
    A: Tensor,  # (H,)
    B: Tensor,  # (rows, T, G, N)
    C: Tensor,  # (rows, T, G, N)
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """Returns the scan of Mamba 2, for the arguments that transformers passes to its own
    function."""
    x = hidden_states
    plain = not any(isinstance(given, Tensor) for given in more.values())
    if not (plain and runs_kernel(x) and x.element_size() == 2 and x.shape[-1] <= WIDEST):
        how = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, **more)
        how |= dict(initial_states=initial_states, return_final_states=return_final_states)
        return theirs(x, dt, A, B, C, chunk_size, **how)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = nn.functional.softplus(steps) if dt_softplus else steps
    least, most = dt_limit
    if least > 0 or most < float("inf"):
        steps = steps.clamp(least, most)
    y, end = scan(x, steps, A, B.to(x.dtype), C.to(x.dtype), D, initial_states)
    return (y, end) if return_final_states else y


@_as_one
def _called(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    return theirs(*args, **kwargs)


RECURRENCES = {"mamba2_chunk_scan": _scanned, "torch_chunk_gated_delta_rule": _called}
"""Maps functions that transformers' files call to their replacements, which get them as first
argument: our scan of Mamba 2, where its kernels can compute it, and Gated DeltaNet's own function,
which flash-linear-attention has replaced already."""


@contextmanager
def our_gated_norm(norm: nn.Module | None, *, gate_first: bool = False) -> Iterator[None]:
    """Returns a context in which our kernel replaces a mixer's gated RMSNorm, unless other code has
    replaced its forward. `gate_first`: the norm is of the product with the gate."""
    if norm is None or "forward" in vars(norm):
        yield
        return

    norm.forward = partial(_normed, norm, gate_first=gate_first)
    try:
        yield
    finally:
        del norm.forward


@_as_one
def _normed(norm: nn.Module, x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
    weight, eps = norm.weight, norm.variance_epsilon
    assert isinstance(weight, Tensor) and isinstance(eps, float)
    groups = len(weight) // getattr(norm, "group_size", len(weight))
    gate = gate.to(x.dtype)
    return gated_norm(x, gate, weight, eps, gate_first=gate_first, groups=groups)


@contextmanager
def our_adapters(found: Sequence[nn.Module]) -> Iterator[None]:
    """Returns a context in which the schedule's LoRA (layer/adapted.py) runs these linear layers
    (`ours_in`)."""
    for inner in found:
        inner.forward = partial(_adapted, inner)
    try:
        yield
    finally:
        for inner in found:
            del inner.forward


def ours_in(module: nn.Module) -> list[nn.Module]:
    """Returns the linear layers with an adapter inside a module that `our_adapters` can run. PEFT's
    own code runs those with dropout, with a trained weight, or with a forward that other code has
    changed."""
    return [inner for inner in module.modules() if _is_ours(inner)]


def _is_ours(module: Any) -> bool:
    if not is_adapted(module) or is_wrapped(module) or "forward" in vars(module):
        return False
    base = module.base_layer
    if base._forward_hooks or base._forward_pre_hooks or base.weight.requires_grad:
        return False
    dtype = _dense_dtype(base)
    if dtype is None or dtype.itemsize > 4:
        return False
    return not any((*why_not_applied(module, dtype, ""), *why_not_dense(base, dtype, "")))


def _dense_dtype(base: nn.Module) -> torch.dtype | None:
    """Returns the dtype of a linear layer's dequantised weight; None for a layer of another
    class."""
    if type(base) is nn.Linear:
        return base.weight.dtype
    known = f"{type(base).__module__}.{type(base).__qualname__}" in QUANTISED
    state = packed_state(base.weight) if known else None
    return None if state is None else state.dtype


@_as_one
def _adapted(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base, adapter = module.base_layer, applied({"": module}).get("")
    plain = adapter is not None and not adapter.dropout and not adapter.more
    casts = torch.is_autocast_enabled(x.device.type) or x.dtype != _dense_dtype(base)
    if args or kwargs or casts or adapter is None or not plain:
        theirs: Tensor = type(module).forward(module, x, *args, **kwargs)
        return theirs
    return adapted_linear(x, base.weight, base.bias, adapter.a, adapter.b, adapter.scale)
