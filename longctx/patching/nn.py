"""The kernels as modules, with the names and argument order of torch.nn.

    RMSNorm(normalized_shape, eps)              as torch.nn.RMSNorm
    LayerNorm(normalized_shape, eps)            as torch.nn.LayerNorm
    RotaryEmbedding(dim, base)                  rotates q and k by their positions
    SwiGLU(in_features, hidden_features)        down(silu(gate(x)) * up(x)), Llama's MLP
    GeGLU(in_features, hidden_features)         the same with gelu by tanh, Gemma's MLP
    CrossEntropyLoss(weight)                    of logits (..., num_classes)
    LinearCrossEntropyLoss(in_features, num_classes)     as torch.nn.LinearCrossEntropyLoss
    LinearLogProbs(in_features, num_classes)             log-probabilities of targets, entropies
    LinearJSDLoss(in_features, num_classes)              divergences from a teacher's linear layer
    LinearKLLoss(in_features, num_classes)

On CUDA they run the Triton kernels of kernels/, elsewhere plain torch. T is the number of tokens, D
of features, H of query heads and K of key/value heads; d is the head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longctx.constants import IGNORE_INDEX
from longctx.head.distillation import linear_jsd
from longctx.head.log_probs import OUTPUTS, TokenLogProbs, linear_log_probs
from longctx.head.logits_loss import cross_entropy
from longctx.head.loss import linear_cross_entropy
from longctx.head.stream import Reduction, ignoring, refuse_others
from longctx.kernels.launch import check_eps, check_shape
from longctx.kernels.norm import layer_norm, rms_norm
from longctx.kernels.rope import rope
from longctx.kernels.swiglu import geglu, swiglu


class RMSNorm(nn.Module):
    """Divides x (..., D) by its root mean square and multiplies it by a weight (D,), D =
    `normalized_shape`. Replaces torch.nn.RMSNorm and of transformers' LlamaRMSNorm.

    forward(x) raises ValueError for an x of another last dimension or a dtype that differs from the
    weight's, unless the weight is fp32 and x has 16 bits.

    Example:
        >>> import longctx, torch
        >>> norm = longctx.RMSNorm(64)
        >>> norm(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self, normalized_shape: int, eps: float = 1e-6, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        _check_norm(normalized_shape, eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        _check_features("x", x, self.weight.shape[-1])
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Subtracts the mean of x (..., D), divides by the standard deviation, multiplies by
    weight (D,) + `offset` and adds a bias (D,).

    Cohere's has no bias, Nemotron's has `offset=1.0`. D is `normalized_shape`. forward(x) raises
    ValueError for an x of another last dimension or a dtype that differs from the weight's, unless
    the weight is fp32 and x has 16 bits.

    Example:
        >>> import longctx, torch
        >>> norm = longctx.LayerNorm(64, bias=False)
        >>> norm(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
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
        _check_norm(normalized_shape, eps)
        self.eps, self.offset = eps, offset
        ones = torch.ones(normalized_shape, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones - offset)
        self.bias = nn.Parameter(torch.zeros_like(ones)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        _check_features("x", x, self.weight.shape[-1])
        return layer_norm(x, self.weight, self.eps, bias=self.bias, offset=self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class RotaryEmbedding(nn.Module):
    """Rotates q (T, H, d) and k (T, K, d), d = `dim`, by position_ids * base^(-2 i / dim).

    forward(q, k, position_ids) takes position_ids (T,), int64 or int32, overwrites q and k and
    returns them; `attention_scaling` multiplies both. Raises ValueError for an odd `dim`, for a
    tensor of another shape, and for a q or k that is a leaf and requires a gradient.

    Example:
        >>> import longctx, torch
        >>> rope = longctx.RotaryEmbedding(16, base=500000.0)
        >>> q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)  # 5 tokens, 4 and 2 heads
        >>> q, k = rope(q, k, torch.tensor([0, 1, 2, 0, 1]))  # of two packed documents
        >>> q.shape, k.shape
        (torch.Size([5, 4, 16]), torch.Size([5, 2, 16]))
    """

    inv_freq: Tensor  # (dim / 2,) fp32

    def __init__(
        self, dim: int, base: float = 10000.0, attention_scaling: float = 1.0, device: Any = None
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim must be even and positive, got {dim}")
        self.attention_scaling = attention_scaling
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        self.register_buffer("inv_freq", (base**-exponents).float(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("q", q), ("k", k)):
            _check_features(name, x, 2 * len(self.inv_freq))
        return rope(q, k, position_ids, self.inv_freq, self.attention_scaling)


class SwiGLU(nn.Module):
    """Llama's MLP: x (..., in_features) -> (..., out_features), by default in_features.

    Its weights are those of gate_proj, up_proj and down_proj, as in transformers' LlamaMLP.
    Backward overwrites the outputs of gate_proj and up_proj. forward(x) raises ValueError for an x
    of another last dimension.

    Example:
        >>> import longctx, torch
        >>> mlp = longctx.SwiGLU(64, 256)
        >>> mlp(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

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
        _check_features("x", x, self.gate_proj.in_features)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLU(SwiGLU):
    """Gemma's MLP: `SwiGLU` with gelu by tanh instead of silu, x (..., in_features) ->
    (..., out_features). Weights and errors are those of `longctx.SwiGLU`.

    Example:
        >>> import longctx, torch
        >>> mlp = longctx.GeGLU(64, 256)
        >>> mlp(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def forward(self, x: Tensor) -> Tensor:
        _check_features("x", x, self.gate_proj.in_features)
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class CrossEntropyLoss(nn.Module):
    """Cross-entropy of logits, as `longctx.cross_entropy` computes it: backward writes their
    gradient over them. Replaces Liger's LigerCrossEntropyLoss, and of torch's where the
    classes are the last dimension.

    forward(input, target) takes input (T, V) or (B, S, V) and target (T,) or (B, S), int64, which
    holds class indices or `ignore_index`, and returns the fp32 loss, (), or for `reduction="none"`
    one of target's shape. `weight` (V,) has a factor for each class. Raises ValueError for a wrong
    shape, dtype or value.

    Example:
        >>> import longctx, torch
        >>> head, criterion = torch.nn.Linear(64, 1000), longctx.CrossEntropyLoss(ignore_index=0)
        >>> input, target = head(torch.randn(2, 5, 64)), torch.randint(1000, (2, 5))
        >>> loss = criterion(input, target)
        >>> loss.backward()
        >>> loss.shape, head.weight.grad.shape
        (torch.Size([]), torch.Size([1000, 64]))
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse_others("CrossEntropyLoss", others)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.softcap = label_smoothing, softcap
        self.lse_square_scale = lse_square_scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # () fp32, or target's shape
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
        )


@dataclass(eq=False, repr=False)
class _LinearHead(nn.Module):
    """A linear layer whose outputs are never held as a whole. Its options are a dataclass's fields:
    a module names those that it adds."""

    in_features: InitVar[int]
    num_classes: InitVar[int]
    _: KW_ONLY
    bias: InitVar[bool] = False
    device: InitVar[Any] = None
    dtype: InitVar[Any] = None
    ignore_index: int = IGNORE_INDEX

    def __post_init__(
        self, in_features: int, num_classes: int, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)

    def _rows(self, input: Tensor) -> Tensor:  # (..., in_features) -> (T, in_features)
        _check_features("input", input, self.linear.in_features)
        return input.reshape(-1, self.linear.in_features)

    def _target(self, target: Tensor, input: Tensor) -> Tensor:  # (...) -> (T,)
        check_shape("target", target, input.shape[:-1])
        target = target.reshape(-1)
        return ignoring(target, self.ignore_index)


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of a linear layer's outputs, which are never held as a whole.

    forward(input, target) takes input (..., in_features) and target (...), int64, which holds class
    indices or `ignore_index`, and returns the fp32 loss, (): the mean over the targets that are not
    ignored, for `reduction="sum"` the sum over them, for `"none"` each target's, (...). The options
    are those of `longctx.linear_cross_entropy`.

    Without sizes it has no layer of its own and takes Liger-Kernel's arguments:
    forward(weight, input, target, bias=None).

    Raises ValueError for a wrong shape, dtype or value, and TypeError for other arguments.

    Example:
        >>> import longctx, torch
        >>> head = longctx.LinearCrossEntropyLoss(64, 1000)  # its lm_head is head.linear
        >>> input, target = torch.randn(2, 5, 64), torch.randint(1000, (2, 5))
        >>> loss = head(input, target)
        >>> loss.backward()
        >>> loss.shape, head.linear.weight.grad.shape
        (torch.Size([]), torch.Size([1000, 64]))
        >>> loss_fn = longctx.LinearCrossEntropyLoss()
        >>> torch.equal(loss_fn(head.linear.weight, input, target), loss)
        True
    """

    linear: nn.Linear | None
    ce_weight: Tensor | None

    def __init__(
        self,
        in_features: int | None = None,
        num_classes: int | None = None,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        ce_weight: Tensor | None = None,
        **others: Any,
    ) -> None:
        refuse_others("LinearCrossEntropyLoss", others)
        super().__init__()
        self.linear = None
        if (in_features is None) != (num_classes is None):
            raise TypeError("LinearCrossEntropyLoss takes in_features and num_classes, or neither")
        if in_features is not None and num_classes is not None:
            self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.softcap = label_smoothing, softcap
        self.lse_square_scale = lse_square_scale

    def forward(self, *tensors: Tensor, **named: Any) -> Tensor:  # () fp32, or target's shape
        if self.linear is None:
            return self._loss(*tensors, **named)
        if len(tensors) > 2:
            raise TypeError(
                "this LinearCrossEntropyLoss has a linear layer of its own and takes (input, "
                "target): for (weight, input, target) make one without sizes, "
                "longctx.LinearCrossEntropyLoss()"
            )
        named = {**named, "bias": self.linear.bias}
        return self._loss(self.linear.weight, *tensors, **named)

    def _loss(
        self, weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        _check_features("input", input, weight.shape[-1])
        check_shape("target", target, input.shape[:-1])
        loss = linear_cross_entropy(
            input.reshape(-1, weight.shape[-1]),
            weight,
            target.reshape(-1),
            bias=bias,
            ce_weight=self.ce_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
        )
        return loss.view(target.shape) if self.reduction == "none" else loss


@dataclass(eq=False, repr=False, kw_only=True)
class LinearLogProbs(_LinearHead):
    """Log-probabilities of targets under the softmax of a linear layer's outputs, as
    `longctx.linear_log_probs` computes them.

    forward(input, target) takes input (..., in_features) and target (...), int64, which holds class
    indices or `ignore_index`, and returns a named tuple: those of `log_probs`, `entropy`,
    `mean_logits` and `is_top1` that `outputs` names, in target's shape, and None for the others.
    `softcap` bounds the outputs of the layer, `temperature` divides them then. Raises ValueError
    for a wrong shape, dtype or value.

    Example:
        >>> import longctx, torch
        >>> head = longctx.LinearLogProbs(64, 1000, outputs=("log_probs", "entropy"))
        >>> found = head(torch.randn(2, 5, 64), torch.randint(1000, (2, 5)))
        >>> found.log_probs.shape, found.entropy.shape, found.is_top1
        (torch.Size([2, 5]), torch.Size([2, 5]), None)
    """

    temperature: float = 1.0
    softcap: float | None = None
    outputs: Sequence[str] = OUTPUTS

    def forward(self, input: Tensor, target: Tensor) -> TokenLogProbs:
        found = linear_log_probs(
            self._rows(input),
            self.linear.weight,
            self._target(target, input),
            bias=self.linear.bias,
            temperature=self.temperature,
            softcap=self.softcap,
            outputs=self.outputs,
        )
        return TokenLogProbs(*(x if x is None else x.view(target.shape) for x in found))


@dataclass(eq=False, repr=False, kw_only=True)
class LinearJSDLoss(_LinearHead):
    """Generalised Jensen-Shannon divergence of a linear layer's softmax from a teacher's, as
    `longctx.linear_jsd` computes it.

    forward(input, teacher_input, teacher_linear, target) takes input (..., in_features), the
    teacher's features (..., E) and its torch.nn.Linear from E to num_classes, and target (...):
    where target is `ignore_index`, the divergence is left out; without a target all of it counts.
    Returns the fp32 loss, (), or for `reduction="none"` each token's, (...). `beta` in [0, 1] goes
    from forward KL to reverse KL. Raises ValueError for a wrong shape, dtype or value.

    Example:
        >>> import longctx, torch
        >>> head, teacher_linear = longctx.LinearJSDLoss(64, 1000), torch.nn.Linear(96, 1000)
        >>> input, teacher_input = torch.randn(2, 5, 64), torch.randn(2, 5, 96)
        >>> loss = head(input, teacher_input, teacher_linear)
        >>> loss.backward()  # the student alone gets gradients
        >>> head.linear.weight.grad is None, teacher_linear.weight.grad is None
        (False, True)
    """

    beta: float = 0.5
    reduction: Reduction = "mean"
    temperature: float = 1.0

    def forward(
        self,
        input: Tensor,
        teacher_input: Tensor,
        teacher_linear: nn.Linear,
        target: Tensor | None = None,
    ) -> Tensor:  # () fp32, or (...) for reduction="none"
        rows, width = self._rows(input), teacher_linear.in_features
        check_shape("teacher_input", teacher_input, (*input.shape[:-1], width))
        loss = linear_jsd(
            rows,
            self.linear.weight,
            teacher_input.reshape(-1, width),
            teacher_linear.weight,
            None if target is None else self._target(target, input),
            beta=self.beta,
            bias=self.linear.bias,
            teacher_bias=teacher_linear.bias,
            temperature=self.temperature,
            reduction=self.reduction,
        )
        return loss.view(input.shape[:-1]) if self.reduction == "none" else loss


@dataclass(eq=False, repr=False, kw_only=True)
class LinearKLLoss(LinearJSDLoss):
    """Kullback-Leibler divergence of a linear layer's softmax p from a teacher's q, KL(q | p), or
    with `reverse` KL(p | q).

    forward, its shapes and its errors are those of `longctx.LinearJSDLoss`: input
    (..., in_features), teacher_input (..., E), a torch.nn.Linear from E to num_classes, and target
    (...) or None.

    Example:
        >>> import longctx, torch
        >>> head, teacher_linear = longctx.LinearKLLoss(64, 1000), torch.nn.Linear(64, 1000)
        >>> _ = head.linear.load_state_dict({"weight": teacher_linear.weight})
        >>> _ = torch.nn.init.zeros_(teacher_linear.bias)
        >>> input = torch.randn(2, 5, 64)
        >>> abs(head(input, input, teacher_linear).item()) < 1e-6  # student and teacher agree
        True
    """

    beta: float = field(init=False)
    reverse: InitVar[bool] = False

    def __post_init__(self, *args: Any) -> None:
        *others, reverse = args
        super().__post_init__(*others)
        self.beta = float(reverse)


def _check_norm(features: int, eps: float) -> None:
    if not isinstance(features, int) or features < 1:
        raise ValueError(f"normalized_shape must be a number of elements, got {features!r}")
    check_eps(eps)


def _check_features(name: str, x: Tensor, features: int) -> None:
    """Raises ValueError unless x is (..., features)."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(f"{name} must have shape (..., {features}), got {tuple(x.shape)}")
