"""Arithmetic of a step's memory: sizes in, decisions out. No tensor is made and no device asked.

T tokens of a batch, D hidden size, F intermediate size, H query heads of size d, V vocabulary. One
*unit* is T*D numbers of the activations' dtype: 1 GiB for Llama-3.1-8B at 131072 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

GIB = 2**30
Offload = Literal["none", "all", "auto"]


def default_head_groups(tokens: int, kv_heads: int) -> int:
    """One group is fastest; from 64K tokens on its q, k, v (up to 3 units) are worth splitting."""
    return kv_heads if tokens >= 65536 else 1


def default_tile_tokens(tokens: int) -> int:
    """8192 is 0.5% faster than 4096 at 131072 tokens of Llama-3.1-8B, for 0.3 GiB of the MLP's."""
    return 8192 if tokens >= 65536 else 4096


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions that decide how much memory a step takes."""

    layers: int
    hidden: int  # D
    intermediate: int  # F
    heads: int  # H
    head_dim: int  # d
    vocab: int  # V
    itemsize: int
    """Bytes of one activation."""
    keep_attention: bool

    def kept_bytes(self, tokens: int) -> int:
        """What one layer keeps from forward to backward: x, and o with its log-sum-exp."""
        per_token = self.hidden * self.itemsize
        if self.keep_attention:
            per_token += self.heads * (self.head_dim * self.itemsize + 4)
        return tokens * per_token + 2048  # every tensor starts at a multiple of 512 bytes

    def working_bytes(self, tokens: int, logits_bytes: int) -> int:
        """What backward holds besides: five units, the loss's workspace, and the fp32 gradient of
        an MLP or, before it, of lm_head."""
        widest = max(3 * self.intermediate, self.vocab)
        units_bytes = 5 * tokens * self.hidden * self.itemsize
        return units_bytes + 4 * self.hidden * widest + logits_bytes


def layers_on_gpu(offload: Offload, layers: int, layer_bytes: int, free_bytes: int) -> int:
    """How many of the last layers keep their activations on the GPU. `free_bytes` is what is left
    there for them; the layer whose backward runs is always there."""
    if offload == "none":
        return layers
    if offload == "all":
        return 1
    return min(layers, max(1, free_bytes // layer_bytes))


def trained_bytes_on_gpu(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.is_cuda)


def pending_bytes(parameters: Iterable[Tensor]) -> int:
    """What the first step adds on the GPU: gradients and Adam's two moments, in the weights'
    dtype."""
    return 3 * trained_bytes_on_gpu(parameters)
