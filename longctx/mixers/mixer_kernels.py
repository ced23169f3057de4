"""Puts our kernels into transformers' mixers while the schedule runs them. They replace:

convolution    causal-conv1d, which is built with nvcc, or torch's convolution; with the SiLU behind
               it, if a function of that name computes both
scan           of Mamba 2: mamba-ssm, which is built with nvcc, too, or torch's code, which
               allocates up to 6 MB per token
gated norm     some ten passes over fp32 tensors in torch
LoRA           PEFT's code, which converts an adapter's input to fp32, and adds its output in
               further passes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from longctx.kernels.conv_heads import Part, conv_heads
from longctx.kernels.gated_norm import gated_norm
from longctx.kernels.launch import runs_kernel
from longctx.kernels.state_space import has_kernels, scan
from longctx.layer.adapted import Linear, linears
from longctx.layer.packed_weights import packed_state
from longctx.layer.row_documents import RowDocuments


def _tensors(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


_as_one = wrap_torch_function(_tensors)
"""Makes a function one of torch's for `OurConvolution`, which would otherwise intercept each
attribute of a tensor that the function reads: hundreds in a call of a mixer, 3 us of Python
each."""


CONVOLUTION, RECURRENCE = "convolution", "recurrence"
"""The two operations of a mixer in which a token reads others."""


@dataclass
class MixerCall:
    """One call of a mixer, as the kernels in it see it."""

    begins: bool
    """Whether its rows begin with a state."""
    packed: RowDocuments | None = None
    """The documents of its row, if it has several."""
    read: set[str] = field(default_factory=set)
    """The operations, CONVOLUTION or RECURRENCE, that have read where documents begin so far."""

    def check(self, crosses: Collection[str]) -> None:
        """Raises RuntimeError unless all that crosses tokens in it has seen the documents of a
        packed row apart."""
        if self.packed is not None and (lacking := {*crosses} - self.read):
            raise RuntimeError(
                f"the {' and the '.join(sorted(lacking))} of a mixer did not read where packed "
                "documents begin, which would see each other: its module calls another function "
                "than the one that longctx replaces"
            )


class OurConvolution(TorchFunctionMode):
    """A context in which our kernel replaces torch's convolution of channels with one filter each,
    padded so that it is causal. The result has the row's tokens alone: torch's also has the K - 1
    behind them, which a causal model cuts off. If the call begins with a state, that is the first
    K - 1 tokens of the input, and their results, which a model cuts off, too, are left out. Of a
    packed row no token sees another document, in any dtype.

    Such a cut then takes the whole tensor. It is skipped as well: in backward torch would write its
    gradient to a tensor with channels as rows, and all that follows would be transposed.
    """

    def __init__(self, call: MixerCall) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv1d and (y := _convolved(self._call, *args, **kwargs)) is not None:
            return y
        if func is torch.Tensor.__getitem__ and _takes_all(*args):
            return args[0]
        return func(*args, **kwargs)


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
    call: MixerCall,
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
    if call.packed is None and (autocasts or input.dtype != weight.dtype):
        return None
    rows = input.mT
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = torch.get_autocast_dtype(input.device.type) if autocasts else input.dtype
    filters, bias = weight[:, 0].to(dtype), None if bias is None else bias.to(dtype)
    positions = None
    if call.packed is not None:
        positions = call.packed.positions
        call.read.add(CONVOLUTION)
    y = causal_conv(rows.to(dtype), filters, bias, positions)
    return (y[:, taps - 1 :] if call.begins else y).mT


@contextmanager
def our_functions(module: nn.Module, call: MixerCall) -> Iterator[None]:
    """Returns a context in which FUNCTIONS replace those of these names in a mixer's file."""
    home = vars(sys.modules[type(module).__module__])
    theirs = {name: home[name] for name in FUNCTIONS if name in home}
    home.update({name: partial(FUNCTIONS[name], call, given) for name, given in theirs.items()})
    try:
        yield
    finally:
        home.update(theirs)


def _conv_silu(
    call: MixerCall,
    theirs: Any,
    x: Tensor,  # (B, C, T)
    weight: Tensor,  # (C, K)
    bias: Tensor | None = None,  # (C,)
    activation: str | None = None,
    **more: Any,
) -> Tensor:  # (B, C, T), or (B, C, T - K + 1) if it begins with a state
    """Returns the SiLU of a convolution, for the arguments of causal_conv1d_fn."""
    one_dtype = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    casts = torch.is_autocast_enabled(x.device.type) or not one_dtype
    known = activation in ("silu", "swish") and not any(map(torch.is_tensor, more.values()))
    if casts or not known or weight.shape[1] > MOST_TAPS:
        given: Tensor = theirs(x, weight, bias, activation=activation, **more)
        return given
    return _silu_of_convolved(call, x, weight, bias)


@_as_one
def _silu_of_convolved(call: MixerCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, positions = x.mT, None
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if call.packed is not None:
        positions = call.packed.positions
        call.read.add(CONVOLUTION)
    (y,) = conv_heads(rows, weight, [Part(1, len(weight), normed=False)], positions, bias=bias)
    y = y.flatten(-2)
    return (y[:, weight.shape[1] - 1 :] if call.begins else y).mT


@_as_one
def _scanned(
    call: MixerCall,
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
    ours = runs_kernel(x) and x.element_size() == 2 and has_kernels(x.shape[-1], B.shape[-1])
    if not plain or not (ours or call.packed is not None):
        how = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, **more)
        how |= dict(initial_states=initial_states, return_final_states=return_final_states)
        return theirs(x, dt, A, B, C, chunk_size, **how)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = nn.functional.softplus(steps) if dt_softplus else steps
    least, most = dt_limit
    if least > 0 or most < float("inf"):
        steps = steps.clamp(least, most)
    B, C = B.to(x.dtype), C.to(x.dtype)
    if call.packed is None:
        y, end = scan(x, steps, A, B, C, D, initial_states)
    else:
        chunks = call.packed.chunks
        call.read.add(RECURRENCE)
        x, B, C = map(chunks.spread, (x, B, C))  # of a token whose step is 0 nothing is left
        steps = chunks.spread(steps, zeros=True)
        y, end = scan(x, steps, A, B, C, D, starts=chunks.begins)
        y = chunks.collect(y)
    return (y, end) if return_final_states else y


@_as_one
def _delta_rule(
    call: MixerCall,
    theirs: Any,
    query: Tensor,  # (rows, T, H, K)
    key: Tensor,  # (rows, T, H, K)
    value: Tensor,  # (rows, T, G, V)
    *,
    g: Tensor,  # (rows, T, G)
    beta: Tensor,  # (rows, T, G)
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns what Gated DeltaNet's own function returns. Its chunks have 64 tokens as ours have,
    so that a decay to 0 behind each packed document is enough."""
    if call.packed is None:
        found: tuple[Tensor, Tensor | None] = theirs(query, key, value, g=g, beta=beta, **more)
        return found
    chunks = call.packed.chunks
    call.read.add(RECURRENCE)
    moved = map(chunks.spread, (query, key, value))
    beta = chunks.spread(beta, zeros=True)  # nothing is written in the place of no token
    o, _ = theirs(*moved, g=chunks.decays(g), beta=beta, **more)
    return chunks.collect(o), None


DELTA_RULE = "torch_chunk_gated_delta_rule"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv_silu,
    "mamba2_chunk_scan": _scanned,
    DELTA_RULE: _delta_rule,
}
"""Maps functions that transformers' files call to their replacements, which get them as second
argument: our convolution with a SiLU, our scan of Mamba 2, where its kernels can compute it, and
Gated DeltaNet's own function, which flash-linear-attention has replaced already."""


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
    dtype = dense_dtype(base)
    if dtype is None or dtype.itemsize > 4:
        return False
    return not any((*why_not_applied(module, dtype, ""), *why_not_dense(base, dtype, "")))


def dense_dtype(base: nn.Module) -> torch.dtype | None:
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
    casts = torch.is_autocast_enabled(x.device.type) or x.dtype != dense_dtype(base)
    if args or kwargs or casts or adapter is None or not plain:
        theirs: Tensor = type(module).forward(module, x, *args, **kwargs)
        return theirs
    layer = Linear(base.weight, base.bias, adapter.a, adapter.b, adapter.scale)
    return linears(x, [layer])[0]
