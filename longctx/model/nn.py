"""The kernels as modules, with the names and argument order of torch.nn.

    RMSNorm(normalized_shape, eps)              as torch.nn.RMSNorm
    LayerNorm(normalized_shape, eps)            as torch.nn.LayerNorm
    RotaryEmbedding(dim, base)                  rotates q and k by their positions
    SwiGLU(in_features, hidden_features)        down(silu(gate(x)) * up(x)), Llama's MLP
    GeGLU(in_features, hidden_features)         the same with gelu by tanh, Gemma's MLP
    LinearCrossEntropyLoss(in_features, num_classes)     as torch.nn.LinearCrossEntropyLoss
    LinearLogProbs(in_features, num_classes)             log-probabilities of targets, entropies
    LinearJSDLoss(in_features, num_classes)              divergences from a teacher's linear layer
    LinearKLLoss(in_features, num_classes)

On CUDA they run the Triton kernels of kernels/, elsewhere plain torch. T is the number of tokens, D
of features, H of query heads and K of key/value heads; d is the head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longctx.constants import IGNORE_INDEX
from longctx.kernels.layer_norm import layer_norm
from longctx.kernels.rms_norm import rms_norm
from longctx.kernels.rope import rope
from longctx.kernels.swiglu import geglu, swiglu
from longctx.model.distillation import Reduction, linear_jsd
from longctx.model.log_probs import OUTPUTS, TokenLogProbs, linear_log_probs
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


class _LinearHead(nn.Module):
    """A linear layer whose outputs are never held as a whole."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool,
        device: Any,
        dtype: Any,
        ignore_index: int,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def _target(self, target: Tensor) -> Tensor:
        if self.ignore_index == IGNORE_INDEX:
            return target
        return target.masked_fill(target == self.ignore_index, IGNORE_INDEX)


class LinearCrossEntropyLoss(_LinearHead):
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
        super().__init__(in_features, num_classes, bias, device, dtype, ignore_index)
        self.reduction, self.label_smoothing = reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # () fp32
        return linear_cross_entropy(
            input.flatten(0, -2),
            self.linear.weight,
            self._target(target).flatten(),
            bias=self.linear.bias,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class LinearLogProbs(_LinearHead):
    """Log-probabilities of targets under the softmax of a linear layer's outputs, as
    `longctx.linear_log_probs` computes them.

    forward(input, target) takes input (..., in_features) and target (...), which holds class
    indices or `ignore_index`, and returns `outputs` in target's shape.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        ignore_index: int = IGNORE_INDEX,
        temperature: float = 1.0,
        softcap: float | None = None,
        outputs: Sequence[str] = OUTPUTS,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype, ignore_index)
        self.temperature, self.softcap, self.outputs = temperature, softcap, outputs

    def forward(self, input: Tensor, target: Tensor) -> TokenLogProbs:
        found = linear_log_probs(
            input.flatten(0, -2),
            self.linear.weight,
            self._target(target).flatten(),
            bias=self.linear.bias,
            temperature=self.temperature,
            softcap=self.softcap,
            outputs=self.outputs,
        )
        return TokenLogProbs(*(x if x is None else x.view(target.shape) for x in found))


class LinearJSDLoss(_LinearHead):
    """Generalised Jensen-Shannon divergence of a linear layer's softmax from a teacher's, as
    `longctx.linear_jsd` computes it.

    forward(input, teacher_input, teacher_linear, target) takes input (..., in_features), the
    teacher's features and its torch.nn.Linear, and target (...): where it is `ignore_index`, and
    nowhere without a target, the divergence is left out.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        beta: float = 0.5,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype, ignore_index)
        self.beta, self.reduction, self.temperature = beta, reduction, temperature

    def forward(
        self,
        input: Tensor,
        teacher_input: Tensor,
        teacher_linear: nn.Linear,
        target: Tensor | None = None,
    ) -> Tensor:  # () fp32, or (...) for reduction="none"
        loss = linear_jsd(
            input.flatten(0, -2),
            self.linear.weight,
            teacher_input.flatten(0, -2),
            teacher_linear.weight,
            None if target is None else self._target(target).flatten(),
            beta=self.beta,
            bias=self.linear.bias,
            teacher_bias=teacher_linear.bias,
            temperature=self.temperature,
            reduction=self.reduction,
        )
        return loss.view(input.shape[:-1]) if self.reduction == "none" else loss


class LinearKLLoss(LinearJSDLoss):
    """Kullback-Leibler divergence of a linear layer's softmax p from a teacher's q, KL(q | p), or
    with `reverse` KL(p | q); otherwise `LinearJSDLoss`."""

    def __init__(
        self, in_features: int, num_classes: int, *, reverse: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, num_classes, **options, beta=float(reverse))
