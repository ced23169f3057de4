"""The forward of a Gated DeltaNet from our functions of autograd, in the place of the module's own:

    q k v, z, b, a = linear layers of n, in one function          layer/adapted.py
    q, k, v        = heads of the convolution, SiLU, norms        kernels/conv_heads.py
    g, beta        = decay and strength                           kernels/delta_gates.py
    o              = delta_rule(q, k, v, g, beta)                 as transformers calls it
    output         = out(rms_norm(o) silu(z))                     kernels/gated_norm.py

The values are the module's. It passes over q, k and v once instead of four times, and over the
gradient of n inside matmuls alone; autograd saves little more than half. The module is called as
always, with its hooks and parameters, and so are linear layers that are not plain ones, such as
those with another adapter than LoRA, or with hooks of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longctx.families.adapters import applied
from longctx.kernels.causal_conv import MOST_TAPS
from longctx.kernels.conv_heads import WIDEST, Part, conv_heads
from longctx.kernels.delta_gates import delta_gates
from longctx.layer.adapted import Linear, linears
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers.mixer_kernels import CONVOLUTION, DELTA_RULE, MixerCall, dense_dtype
from longctx.system import installed

READ = "q", "k", "v", "qkv", "z", "b", "a", "qkvz", "ba"
"""The linear layers that read n, as `MixerSpec.inner_linears` names them. The one that reads the
normed o is "out". In qkvz and ba, which are Qwen3-Next's, each head has its own columns side by
side."""
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


class Carries(Protocol):
    """The state of earlier tokens, and of these (mixers.Carried)."""

    ends: bool
    """Whether the state of these is asked for."""

    def get_conv_state(self, layer_idx: int) -> Tensor | None: ...
    def get_recurrent_state(self, layer_idx: int) -> Tensor | None: ...
    def keep_inputs(self, last: Tensor) -> None: ...
    def update_recurrent_state(self, state: Tensor, layer_idx: int) -> Tensor: ...


@contextmanager
def our_delta_net(
    module: Any, spec: MixerSpec, call: MixerCall, adapted: Sequence[nn.Module]
) -> Iterator[None]:
    """Returns a context in which a module that `can_be_ours` runs from our functions. `adapted` are
    its linear layers whose LoRA is ours to run."""
    module.forward = partial(_forward, module, spec, call, adapted)
    try:
        yield
    finally:
        del module.forward


def _forward(
    module: Any,
    spec: MixerSpec,
    call: MixerCall,
    adapted: Sequence[nn.Module],
    *,
    hidden_states: Tensor,  # (rows, t, D)
    **others: Any,
) -> Tensor:  # (rows, t, D)
    n, carried, names = hidden_states, others[spec.cache], spec.inner_linears
    reads = [name for name in READ if name in names]
    found = _products(n, [getattr(module, names[name]) for name in reads], adapted)
    read = dict(zip(reads, found, strict=True))
    if "qkvz" in read:
        read = _by_head(module, read)
    q, k, v = _heads(module, [read[x] for x in ("q", "k", "v", "qkv") if x in read], call, carried)
    if not installed(spec.package):  # transformers' code in torch, which before 5.18 repeats none
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    g, beta = delta_gates(read["a"], read["b"], module.A_log, module.dt_bias, most=most)
    rule = vars(sys.modules[type(module).__module__])[DELTA_RULE]
    o, end = rule(
        *(q, k, v),
        g=g,
        beta=beta,
        initial_state=carried.get_recurrent_state(0),
        output_final_state=carried.ends,
        use_qk_l2norm_in_kernel=False,
    )
    carried.update_recurrent_state(end, 0)
    width = module.head_v_dim
    norm = module.get_submodule(spec.gated_norm)
    normed = norm(o.reshape(-1, width), read["z"].reshape(-1, width)).view(*n.shape[:2], -1)
    (output,) = _products(normed, [getattr(module, names["out"])], adapted)
    return output


def can_be_ours(module: Any, spec: MixerSpec, n: Tensor) -> bool:
    """Whether our functions compute what a module makes of n: its linear layers are named, all is
    in one dtype, without autocast, and in sizes that the kernels have."""
    if not spec.inner_linears or "forward" in vars(module):
        return False
    conv, dtype = module.conv1d, n.dtype
    return (
        not torch.is_autocast_enabled(n.device.type)
        and dtype.itemsize <= 4
        and conv.weight.dtype == dtype
        and conv.bias is None
        and conv.weight.shape[-1] <= MOST_TAPS
        and module.head_k_dim <= WIDEST
        and module.activation in ("silu", "swish")
    )


def _by_head(module: Any, read: Mapping[str, Tensor]) -> dict[str, Tensor]:  # (rows, t, ...) each
    """Returns q, k, v, z, b and a apart, each with its heads side by side."""
    apart = module.fix_query_key_value_ordering(read["qkvz"], read["ba"])
    found = zip(("q", "k", "v", "z", "b", "a"), apart, strict=True)
    return {name: x.flatten(2) for name, x in found}


def _heads(
    module: Any, sources: Sequence[Tensor], call: MixerCall, carried: Carries
) -> list[Tensor]:  # (rows, t, heads, width) each
    """Returns q, k and v, and keeps what the next tokens' convolution reads."""
    of_keys = Part(module.num_k_heads, module.head_k_dim, normed=True)
    parts = of_keys, of_keys, Part(module.num_v_heads, module.head_v_dim, normed=False)
    weight, begin = module.conv1d.weight[:, 0], carried.get_conv_state(0)
    positions = None
    if call.packed is not None:
        positions = call.packed.positions
        call.read.add(CONVOLUTION)
    cut = [parts] if len(sources) == 1 else [[part] for part in parts]
    first = 0
    found: list[Tensor] = []
    ends: list[Tensor] = []
    for x, own in zip(sources, cut, strict=True):
        channels = slice(first, first := first + x.shape[-1])
        before = None if begin is None else begin.mT[..., channels].to(x.dtype).contiguous()
        made = conv_heads(x, weight[channels], own, positions, before, ends=carried.ends)
        found += made[: len(own)]
        ends += made[len(own) :]
    if ends:
        carried.keep_inputs(torch.cat(ends, dim=-1) if len(ends) > 1 else ends[0])
    return found


def _products(
    x: Tensor,  # (..., I)
    modules: Sequence[Any],
    adapted: Sequence[nn.Module],
) -> list[Tensor]:  # (..., O) each
    """Returns what linear layers give: those that we can run in one function, and the others by
    themselves."""
    ours = [_plain(module, x.dtype, any(module is own for own in adapted)) for module in modules]
    together = [layer for layer in ours if layer is not None]
    made = iter(linears(x, together) if together else ())
    return [
        module(x) if layer is None else next(made)
        for module, layer in zip(modules, ours, strict=True)
    ]


def _plain(module: Any, dtype: torch.dtype, is_adapted: bool) -> Linear | None:
    """Returns a linear layer's tensors, with its LoRA; None if its own code has to run it."""
    if any(getattr(module, hooks) for hooks in HOOKS):
        return None
    if is_adapted:
        adapter = applied({"": module}).get("")
        module = module.base_layer
        if adapter is not None and (adapter.dropout or adapter.more):
            return None
        if adapter is not None and dense_dtype(module) == dtype:
            return Linear(module.weight, module.bias, adapter.a, adapter.b, adapter.scale)
    if "forward" in vars(module) or dense_dtype(module) != dtype:
        return None
    return Linear(module.weight, module.bias)
