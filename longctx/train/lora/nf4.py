"""One weight in NF4: packed by bitsandbytes, and the same as a shape.

Each number is the nearest of 16 values of a normal distribution, times a scale of its block of 64,
which has 8 bits itself and a scale for 256 of them (double quantisation): 4.13 bits a weight.
QLoRA: Dettmers et al. 2023, arXiv 2305.14314. The weights of all experts of a layer, (E, O, I), are
packed as one, so that blocks of two experts may share the scale of their scales.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from longctx.families.blocks import scales

BLOCK, SCALES = 64, 256
"""Weights that share a scale, and scales that share one."""


def in_nf4(weight: torch.Tensor, device: torch.device) -> Any:  # (O, I) or (E, O, I)
    """Returns a weight in 4 bits, a parameter whose `quant_state` has its shape and dtype."""
    from bitsandbytes.nn import Params4bit

    packed: Any = Params4bit(weight, requires_grad=False, quant_type="nf4")
    return packed.to(device)


def move_(packed: Any, device: torch.device) -> Any:
    """Moves a weight in 4 bits with its scales, and returns it. The few numbers of its codes stay:
    kernels read them, wherever the weight waits."""
    packed.data = packed.data.to(device)
    for part in scales(packed):
        part.put(part.tensor.to(device))
    return packed


def move_codes_(packed: Any, device: torch.device) -> None:
    """Moves these few numbers to where kernels run."""
    state = packed.quant_state
    for owner, names in ((state, ("code", "offset")), (state.state2, ("code",))):
        for name in names if owner is not None else ():
            if (found := getattr(owner, name)) is not None:
                setattr(owner, name, found.to(device))


def shape_in_nf4(weight: torch.Tensor, double: bool) -> Any:
    """Returns what `in_nf4` does, without storage; `double`: with scales of 8 bits."""

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    numel = weight.numel()
    scales = -(-numel // BLOCK)
    packed: Any = nn.Parameter(empty(-(-numel // 2), torch.uint8)[:, None], False)
    packed.quant_state = SimpleNamespace(
        shape=weight.shape,
        dtype=weight.dtype,
        absmax=empty(scales, torch.uint8 if double else torch.float32),
    )
    if double:
        of_scales = empty(-(-scales // SCALES), torch.float32)
        packed.quant_state.state2 = SimpleNamespace(absmax=of_scales)
    return packed
