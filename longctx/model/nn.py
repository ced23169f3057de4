"""The kernels as modules, with the names and argument order of torch.nn.

    RMSNorm(normalized_shape, eps)              as torch.nn.RMSNorm
    LayerNorm(normalized_shape, eps)            as torch.nn.LayerNorm
    RotaryEmbedding(dim, base)                  rotates q and k by their positions
    SwiGLU(in_features, hidden_features)        down(silu(gate(x)) * up(x)), Llama's MLP
    GeGLU(in_features, hidden_features)         the same with gelu by tanh, Gemma's MLP
    LinearCrossEntropyLoss(in_features, num_classes)     as torch.nn.LinearCrossEntropyLoss

On CUDA they run the Triton kernels of kernels/, elsewhere plain torch. T is the number of tokens, D
of features, H of query heads and K of key/value heads; d is the head size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from longctx.constants import IGNORE_INDEX
from longctx.kernels.layer_norm import layer_norm
from longctx.kernels.rms_norm import rms_norm
from longctx.kernels.rope import rope
from longctx.kernels.swiglu import geglu, swiglu
from longctx.model.loss import linear_cross_entropy


class RMSNorm(nn.Module):
    """Divides x (..., D) by its root mean square and multiplies it by a weight (D,)."""

    def __init__(
        self, normalized_shape: int, eps: float = 1e-6, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Subtracts the mean of x (..., D), divides by the standard deviation, multiplies by
    weight (D,) + `offset` and adds a bias (D,).

    Cohere's has no bias, Nemotron's has `offset=1.0`.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        offset: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        ones = torch.ones(normalized_shape, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones - offset)
        self.bias = nn.Parameter(torch.zeros_like(ones)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.eps, bias=self.bias, offset=self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class RotaryEmbedding(nn.Module):
    """Rotates q (T, H, d) and k (T, K, d), d = `dim`, by position_ids * base^(-2 i / dim)."""

    inv_freq: Tensor  # (dim / 2,) fp32

    def __init__(
        self, dim: int, base: float = 10000.0, attention_scaling: float = 1.0, device: Any = None
    ) -> None:
        super().__init__()
        self.attention_scaling = attention_scaling
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        self.register_buffer("inv_freq", (base**-exponents).float(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, position_ids, self.inv_freq, self.attention_scaling)


class SwiGLU(nn.Module):
    """Llama's MLP: x (..., in_features) -> (..., out_features), by default in_features."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        how = dict(bias=bias, device=device, dtype=dtype)
        self.gate_proj = nn.Linear(in_features, hidden_features, **how)
        self.up_proj = nn.Linear(in_features, hidden_features, **how)
        self.down_proj = nn.Linear(hidden_features, out_features or in_features, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLU(SwiGLU):
    """Gemma's MLP: `SwiGLU` with gelu by tanh in the place of silu."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of a linear layer's outputs, which are never held as a whole.

    forward(input, target) takes input (..., in_features) and target (...), which holds class
    indices or `ignore_index`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing = label_smoothing
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # () fp32
        if self.ignore_index != IGNORE_INDEX:
            target = target.masked_fill(target == self.ignore_index, IGNORE_INDEX)
        return linear_cross_entropy(
            input.flatten(0, -2),
            self.linear.weight,
            target.flatten(),
            bias=self.linear.bias,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
