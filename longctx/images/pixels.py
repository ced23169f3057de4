"""Patches of images as products of matrices, and attention of all images in one launch.

Hugging Face's code for Qwen's towers embeds patches with a convolution over as many pixels as it
has, which cuDNN computes slowly in 16 bits and, in fp32, with TF32's 10 bits. It is a product of
matrices. And its attention (sdpa) waits for the host in each layer and launches a kernel for each
frame or window, some thousands for a minute of video, where one launch has bounds of its own.
Other towers, or other attention that a user asked for, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "longctx_flash_by_image"
"""Hugging Face's code hands bounds to functions whose names have `flash` in them."""
aten = torch.ops.aten


@contextmanager
def fast_tower(tower: nn.Module) -> Iterator[None]:
    """Has a tower of Qwen's compute both so, within."""
    with ExitStack() as stack:
        if getattr(tower.config, "_attn_implementation", None) == "sdpa" and _has_bounds(tower):
            stack.enter_context(_attention(tower.config))
        for module in tower.modules():
            if isinstance(module, nn.Conv3d) and _is_product(module):
                stack.enter_context(_forward(module, partial(embedded, module)))
        yield


def _has_bounds(tower: nn.Module) -> bool:
    """Whether attention's code has a case for functions that take bounds."""
    codes = {type(m).forward.__code__ for m in tower.modules() if hasattr(m, "is_causal")}
    return bool(codes) and all("cu_seqlens" in code.co_varnames for code in codes)


def _is_product(conv: nn.Conv3d) -> bool:
    return (
        type(conv).forward is nn.Conv3d.forward
        and "forward" not in vars(conv)
        and conv.stride == conv.kernel_size
        and conv.groups == 1
        and {*conv.padding} == {0}
        and {*conv.dilation} == {1}
    )


@contextmanager
def _attention(config: Any) -> Iterator[None]:
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@contextmanager
def _forward(module: nn.Module, forward: Any) -> Iterator[None]:
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def embedded(conv: nn.Conv3d, pixels: Tensor) -> Tensor:
    """Returns what the convolution gives, whose stride is its kernel's size.

    Args:
        pixels: (N, C, T, H, W).

    Returns:
        (N, D, 1, 1, 1) for patches of the kernel's size; others are convolved.
    """
    if pixels.dim() != 5 or pixels.shape[1:] != conv.weight.shape[1:]:
        return nn.Conv3d.forward(conv, pixels)
    found = F.linear(pixels.flatten(1), conv.weight.flatten(1), conv.bias)
    return found[:, :, None, None, None]


def by_image(
    module: nn.Module,
    query: Tensor,  # (1, H, T, d)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,  # (images + 1,) int32
    max_length_q: int,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention of each image, frame or window to itself, in Hugging Face's form of a function.

    Returns:
        (1, T, H, d), and None for weights, which nobody computes.
    """
    if _takes(query) and not dropout:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        o, *_ = aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, scale=scaling)
        return o[None], None
    each = []
    for image in (slice(*ends) for ends in pairwise(cu_seq_lens_q.tolist())):
        q, k, v = (x[:, :, image] for x in (query, key, value))
        each.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling))
    return torch.cat(each, dim=2).transpose(1, 2), None


def _takes(q: Tensor) -> bool:
    """Whether torch's FlashAttention-2 op for CUDA takes heads like these."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, by_image)
