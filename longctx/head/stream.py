"""The streaming head: functions of rows of logits, of which only a piece exists at a time.

    logits = hidden @ weight.T + bias              (T, V), never held whole
    values = objective(logits), one a row, and the gradient of the logits in the same place

An `Objective` turns fp32 logits into values and gradients: cross-entropy (loss.py),
log-probabilities (log_probs.py), divergences from a second head (distillation.py). The pieces, the
rows that are left out and the sums of gradients are those of pieces.py.

FLOPs per remaining row, in units of 2 V D; a second head (a teacher's) adds one wherever logits are
computed:

                                              forward  backward
    values alone                                 1         -
    their sum or mean                            3         0      2 of them only where needed
    each by itself, all of the head trains       1         3
    each by itself, frozen weight and bias       2         0      1 and 2 for two gradients a row

In a sum all rows have one weight, so forward computes the gradients and backward scales them. Where
the caller weighs the rows by a gradient of each, d_weight = sum_i g_i d_logits_i' hidden_i is known
in backward only, and logits are computed again. A row of d_hidden however is g_i times what it is
for g_i = 1, which forward computes if nothing else is wanted and there is one gradient a row.

Precision. The logits are fp32 even for 16-bit operands, because rounding a logit of 10 to bf16
moves its probability by 2%; the logits' gradient is rounded once, to the operands' dtype, for the
two products. d_weight is summed in fp32 over groups of rows. Gradients are computed with weights of
rows below 1, and multiplied by a power of two at the end, so that no gradient is rounded twice and
fp16 does not underflow. (Only the d_hidden that forward computes for a weight of one is rounded
again, when backward applies the row's.) Operands in fp64 compute all in fp64, by plain torch, for
tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.cost.sizes import default_logits_bytes
from longctx.head.pieces import Head, HeadGradients, LogitsPiece, Rows, stream, wide_dtype
from longctx.kernels.annotate import annotated
from longctx.kernels.launch import check_float, check_shape, once_differentiable
from longctx.kernels.scale import scale_into

Reduction = Literal["mean", "sum", "none"]


class Objective:
    """A function of rows of logits. One object serves one call and its backward."""

    in_place = False
    """Whether a 16-bit gradient may be written from the first byte of its fp32 logits on."""
    divisor = 1.0
    """The number by which the objective's gradients still have to be divided, such as a
    temperature: rows' weights are divided by it before anything is rounded, so that a small one
    does not overflow in fp16."""
    gradients = 1
    """The number of `values`, from the first on, that have a gradient."""
    values: tuple[Tensor, ...]
    """The values of each computed row, each (n,)."""

    def prepare(self, rows: Rows, dtype: torch.dtype) -> None:
        """Makes room for the values; `dtype` is that of logits."""
        raise NotImplementedError

    def forward(self, piece: LogitsPiece, scale: Tensor) -> None:
        """Writes the values and, if it is wanted, scale () * divisor * the first one's gradient."""
        raise NotImplementedError

    def backward(self, piece: LogitsPiece, d_values: Sequence[Tensor | None]) -> None:
        """Writes divisor * the gradient of sum d_values * values, with d_values (rows,) of the
        piece, 0 where the label is ignored."""
        raise NotImplementedError


class KeptObjective(Objective):
    """An objective whose gradient is computed from values of each row that were found with it. All
    are kept, and those that `outputs` names are its values."""

    outputs: Sequence[str]
    kind: Any
    """The NamedTuple of what is found, a tensor (rows,) each, which `kind.empty` makes room for."""

    def find(self, piece: LogitsPiece, labels: Tensor) -> Iterable[Tensor]:
        """Returns what is found of the piece's rows."""
        raise NotImplementedError

    def write_gradient(
        self, piece: LogitsPiece, labels: Tensor, found: Any, d_values: Sequence[Tensor | None]
    ) -> None:
        """Does what `backward` does, from what was found of the piece's rows."""
        raise NotImplementedError

    def prepare(self, rows: Rows, dtype: torch.dtype) -> None:
        self._rows = rows
        self._found = self.kind.empty(len(rows), dtype, rows.labels.device)
        self.values = tuple(getattr(self._found, name) for name in self.outputs)

    def forward(self, piece: LogitsPiece, scale: Tensor) -> None:
        found = self.find(piece, self._rows.labels[piece.part])
        for kept, new in zip(self._found, found, strict=True):
            kept[piece.part] = new
        if piece.d_logits is not None:
            self.backward(piece, [self._rows.weights(scale, piece.part)])

    def backward(self, piece: LogitsPiece, d_values: Sequence[Tensor | None]) -> None:
        found = self.kind(*(x[piece.part] for x in self._found))
        self.write_gradient(piece, self._rows.labels[piece.part], found, d_values)


class _Reduced(torch.autograd.Function):
    """The sum of an objective's first value over all rows, divided by a count."""

    @staticmethod
    @annotated("loss")
    def forward(
        ctx: Any,
        objective: Objective,
        rows: Rows,
        count: int | Tensor | None,  # None: the number of rows that count
        logits_bytes: int,
        grad: bool,
        *tensors: Any,  # of each head: hidden, weight, bias
    ) -> Tensor:
        heads, device = _heads(tensors), tensors[0].device
        needs = [grad and n for n in ctx.needs_input_grad[5:8]]
        gradients = HeadGradients(heads[0], rows, needs) if any(needs) else None
        count = max(1, rows.counting) if count is None else count
        if not isinstance(count, Tensor):
            count = torch.full((), count, device=device)  # written there: a copy is waited for
        dtype = tensors[0].dtype
        scale = count.to(device, wide_dtype(dtype)).reciprocal()
        boost = _boost(dtype)
        mantissa, exponent = torch.frexp(scale / objective.divisor)
        ctx.rescale = torch.ldexp(torch.full_like(scale, 1 / boost), exponent)
        kernel_scale = mantissa * boost

        def compute(piece: LogitsPiece) -> None:
            objective.forward(piece, kernel_scale)

        objective.prepare(rows, wide_dtype(tensors[0].dtype))
        stream(heads, rows, compute, gradients, logits_bytes, objective.in_place)
        ctx.grads = gradients.finished() if gradients else (None, None, None)
        ctx.dtypes = [None if x is None else x.dtype for x in tensors[:3]]
        ctx.heads = len(heads)
        return rows.masked(objective.values[0]).sum() * scale

    @staticmethod
    @once_differentiable
    @annotated("loss")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("backward of this loss overwrites what it saved, so it runs once")
        scale = d_loss.to(ctx.rescale.dtype) * ctx.rescale
        grads = _rounded(ctx.grads, scale, ctx.dtypes)
        ctx.grads = None
        return *[None] * 5, *grads, *[None] * 3 * (ctx.heads - 1)


class _PerRow(torch.autograd.Function):
    """An objective's values for each row, where each row's value may get a different gradient."""

    @staticmethod
    @annotated("loss")
    def forward(
        ctx: Any,
        objective: Objective,
        rows: Rows,
        logits_bytes: int,
        grad: bool,
        *tensors: Any,  # of each head: hidden, weight, bias
    ) -> tuple[Tensor, ...]:
        heads = _heads(tensors)
        needs = [grad and n for n in ctx.needs_input_grad[4:7]]
        ctx.at_once = needs == [True, False, False] and objective.gradients == 1
        gradients = HeadGradients(heads[0], rows, needs) if ctx.at_once else None
        boost = tensors[0].new_full((), _boost(tensors[0].dtype), dtype=torch.float32)

        def compute(piece: LogitsPiece) -> None:
            objective.forward(piece, boost)

        objective.prepare(rows, wide_dtype(tensors[0].dtype))
        stream(heads, rows, compute, gradients, logits_bytes, objective.in_place)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden)
        elif any(needs):
            ctx.save_for_backward(*tensors)
        ctx.objective, ctx.rows, ctx.logits_bytes, ctx.needs = objective, rows, logits_bytes, needs
        ctx.inputs = 4 + len(tensors)
        # copies: a caller that changes one in place changes nothing that backward reads
        values = tuple(rows.spread(x) for x in objective.values)
        ctx.mark_non_differentiable(*values[objective.gradients :])
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    @annotated("loss")
    def backward(ctx: Any, *d_values: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, rows = ctx.saved_tensors, ctx.rows
        nothing = [None] * ctx.inputs
        d_rows = [None if d is None else rows.pick(d) for d in d_values]
        if all(d is None for d in d_rows):
            return tuple(nothing)
        with torch.autocast(tensors[0].device.type, enabled=False):
            if ctx.at_once:
                grads = _weighted(ctx, tensors[0], d_rows[0])
            else:
                grads = _computed_again(ctx, _heads(tensors), d_rows)
        return *nothing[:4], *grads, *nothing[7:]


def _weighted(ctx: Any, unit: Tensor, weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients from unit (T, D), those of every row for a weight of one."""
    assert weights is not None
    factors = ctx.rows.spread(weights / (_boost(unit.dtype) * ctx.objective.divisor))
    return torch.mul(unit, factors[:, None], out=torch.empty_like(unit)), None, None


def _computed_again(
    ctx: Any, heads: list[Head], weights: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients from logits that are computed again. The weights of rows are divided by
    a power of two that none exceeds, and the gradients multiplied by it."""
    objective, rows, boost = ctx.objective, ctx.rows, _boost(heads[0].hidden.dtype)
    weights = [None if d is None else d / objective.divisor for d in weights]
    power = _power_above([d for d in weights if d is not None])
    d_rows = [None if d is None else d * (boost / power) for d in weights]
    gradients = HeadGradients(heads[0], rows, ctx.needs)

    def compute(piece: LogitsPiece) -> None:
        objective.backward(piece, [None if d is None else d[piece.part] for d in d_rows])

    stream(heads, rows, compute, gradients, ctx.logits_bytes, objective.in_place)
    dtypes = [None if x is None else x.dtype for x in heads[0]]
    return _rounded(gradients.finished(), power / boost, dtypes)


def _heads(tensors: Sequence[Any]) -> list[Head]:
    return [Head(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]


def _boost(dtype: torch.dtype) -> float:
    """Returns a factor that gives fp16 gradients 8 more bits above the smallest number: those of
    the logits are then below 256, far from 65504."""
    return 256.0 if dtype == torch.float16 else 1.0


def _power_above(values: Sequence[Tensor]) -> Tensor:
    """Returns the power of two above the largest magnitude, (), at least 2^-100; 1 if that is not
    finite."""
    top = torch.stack([x.abs().amax() if x.numel() else x.new_zeros(()) for x in values]).amax()
    exponent = torch.where(top.isfinite(), torch.frexp(top)[1], 0).clamp(min=-100)
    return torch.ldexp(torch.ones_like(top), exponent)


def _rounded(
    grads: Sequence[Tensor | None], scale: Tensor, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """Returns scale times each gradient in its dtype, in the gradient's memory if it fits."""

    def rounded(g: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
        if g is None or dtype is None:
            return None
        if g.dtype == torch.float64:
            return g.mul_(scale).to(dtype)
        return scale_into(g, scale, g if g.dtype == dtype else g.new_empty(g.shape, dtype=dtype))

    return tuple(rounded(g, dtype) for g, dtype in zip(grads, dtypes, strict=True))


def reduced(
    objective: Objective,
    head: Sequence[Tensor | None],  # hidden, weight, bias; then those of a second head
    rows: Rows,
    count: int | Tensor | None,
    logits_bytes: int,
) -> Tensor:  # ()
    """Returns the sum of the objective's values over `count`; None: over the rows that count."""
    with torch.autocast(rows.labels.device.type, enabled=False):
        grad = torch.is_grad_enabled()
        return _Reduced.apply(objective, rows, count, logits_bytes, grad, *head)


def per_row(
    objective: Objective,
    head: Sequence[Tensor | None],  # hidden, weight, bias; then those of a second head
    rows: Rows,
    logits_bytes: int,
) -> tuple[Tensor, ...]:  # each (T,)
    """Returns the objective's values for every row, 0 where the label is ignored."""
    with torch.autocast(rows.labels.device.type, enabled=False):
        grad = torch.is_grad_enabled() and objective.gradients > 0
        return _PerRow.apply(objective, rows, logits_bytes, grad, *head)


# --- what callers give -----------------------------------------------------------------------


def checked_head(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    *,
    of: str = "",  # put before the names, as in teacher_hidden
    float64: bool = False,
) -> Head:
    """Returns the head with hidden states as (T, D) and, under autocast, in its dtype, as
    torch.nn.functional.linear would. Raises ValueError for a wrong shape or dtype."""
    if hidden.dim() not in (2, 3):
        raise ValueError(
            f"{of}hidden must have shape (T, D) or (B, S, D), got {tuple(hidden.shape)}"
        )
    if not weight.numel() or hasattr(weight, "full_tensor"):
        raise ValueError(
            f"{of}weight is empty or sharded: gather it first (weight.full_tensor(), "
            "deepspeed.zero.GatheredParameters)"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{of}weight must have shape (V, {hidden.shape[-1]}), got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_shape(f"{of}bias", bias, weight.shape[:1])
    check_device(hidden, **{f"{of}weight": weight, f"{of}bias": bias})
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not (float64 and hidden.dtype == torch.float64):
        check_float(f"{of}hidden", hidden)
    if weight.dtype != hidden.dtype:
        raise ValueError(f"{of}weight must have dtype {hidden.dtype}, got {weight.dtype}")
    if bias is not None and bias.dtype != hidden.dtype:
        check_float(f"{of}bias", bias)
    return Head(hidden.flatten(0, -2), weight, bias)


def check_labels(labels: Tensor, hidden: Tensor) -> None:
    """Raises ValueError unless labels are int64, one for each of the hidden states (..., D)."""
    check_shape("labels", labels, hidden.shape[:-1])
    check_device(hidden, labels=labels)
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")


def check_device(hidden: Tensor, **tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor on another device than the hidden states; None passes."""
    for name, x in tensors.items():
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device}, got {x.device}")


def check_number(**values: Any) -> None:
    """Raises ValueError for anything but a number of Python's, such as a tensor; None passes."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {type(value).__name__}")


def check_count(num_items: int | Tensor | None) -> None:
    """Raises ValueError for anything but a number or a tensor of one number; None passes."""
    if not isinstance(num_items, Tensor):
        check_number(num_items=num_items)
    elif num_items.numel() != 1:
        raise ValueError(f"num_items must be one number, got shape {tuple(num_items.shape)}")


def check_positive(**values: float | None) -> None:
    """Raises ValueError for a number that is not above 0; None passes."""
    check_number(**values)
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")


def check_reduction(reduction: str) -> None:
    """Raises ValueError for an unknown reduction."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def check_between(what: str, value: float, interval: str) -> None:
    """Raises ValueError unless the number lies in an interval in the notation of mathematics:
    `[0, 0.5)` holds 0 and does not hold 0.5."""
    check_number(**{what: value})
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ValueError(f"{what} must be in {interval}, got {value}")


def check_class_weight(
    name: str,
    class_weight: Tensor | None,
    like: Tensor,  # on the device where it must be
    vocab: int,
    label_smoothing: float,
    lse_square_scale: float,
) -> None:
    """Raises ValueError for weights of classes of another shape or device, and together with terms
    of the loss that belong to no class; None passes."""
    if class_weight is None:
        return
    check_shape(name, class_weight, (vocab,))
    check_device(like, **{name: class_weight})
    if label_smoothing or lse_square_scale:
        raise ValueError(f"{name} goes with neither label_smoothing nor lse_square_scale")


def ignoring(labels: Tensor, ignore_index: int) -> Tensor:
    """Returns labels whose ignored rows have IGNORE_INDEX, which is no label if a caller ignores
    another number."""
    if ignore_index == IGNORE_INDEX:
        return labels
    labels, ignored = labels.masked_fill(labels == IGNORE_INDEX, -1), labels == ignore_index
    return labels.masked_fill(ignored, IGNORE_INDEX)


def weighted_mean(
    losses: Tensor,  # of each row, 0 where the label is ignored
    labels: Tensor,  # of losses' shape
    class_weight: Tensor | None,  # (V,)
    reduction: str,
) -> Tensor:  # (), or of losses' shape for reduction="none"
    """Returns losses times their labels' weights, or the sum or mean of these. The mean is divided
    by the sum of the weights, as in torch.nn.functional.cross_entropy."""
    counts = (labels != IGNORE_INDEX).to(losses.dtype)
    if class_weight is not None:
        known = labels.clamp(0, len(class_weight) - 1)
        counts = counts * class_weight.to(losses.dtype)[known]
        losses = losses * counts
    if reduction == "none":
        return losses
    count = counts.sum()
    return losses.sum() / torch.where(count > 0, count, 1) if reduction == "mean" else losses.sum()


_INSTEAD = {
    "return_z_loss": "the loss minus the one with lse_square_scale=0, under torch.no_grad(), is it",
    "return_token_accuracy": "longctx.linear_log_probs has it: the mean of its is_top1",
    "return_predicted_tokens": "longctx.linear_log_probs' is_top1 says which labels are predicted; "
    "for other tokens take the argmax of (hidden @ weight.T) in pieces",
    "return_lse": "longctx.linear_log_probs has the log-probabilities that it is needed for",
    "use_token_scaling": "multiply the losses of reduction='none' by what each token counts",
    "accum_dtype": "gradients are summed in fp32 anyway",
    "accum_e_fp32": "gradients are summed in fp32 anyway",
    "accum_c_fp32": "gradients are summed in fp32 anyway",
    "filter_eps": "no gradient is left out here",
    "filter_e_grad": "no gradient is left out here",
    "filter_c_grad": "no gradient is left out here",
    "shift": "pass hidden[:, :-1] and labels[:, 1:], which is what it does",
    "impl": "the kernels are chosen by the device",
    "vocab_parallel_options": "the weight is whole: gather it first",
}
"""Maps arguments of Liger-Kernel's losses and of Apple's cut-cross-entropy to what to do
instead."""


def refuse_others(function: str, others: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument of other libraries' losses that asks for something, with
    what to do instead, and TypeError for an unknown one, as Python does."""
    for name, value in others.items():
        if name not in _INSTEAD:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value not in (None, False):
            raise ValueError(f"{function} has no {name}: {_INSTEAD[name]}; leave it out")


def logits_budget(logits_bytes: int | None, weight: Tensor) -> int:
    """Returns the bytes of logits to hold at a time: as given, else `default_logits_bytes`."""
    check_positive(logits_bytes=logits_bytes)
    vocab, hidden_size = weight.shape
    return logits_bytes or default_logits_bytes(vocab, hidden_size, weight.requires_grad)
