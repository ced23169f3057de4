"""lm_head and cross-entropy as one operation, in chunks of tokens whose logits never exceed a byte
budget.

    logits = hidden @ weight.T + bias              (T, V), never held whole
    loss   = sum_i cross_entropy(logits_i, labels_i) / count

The gradients are computed in forward, chunk by chunk, and backward only scales them:

    d_logits = softmax(logits) - onehot(labels)    written by the kernel that computes the loss
    d_hidden = d_logits @ weight
    d_weight = sum over chunks of d_logits.T @ hidden, accumulated in fp32

Rows whose label is ignored are dropped before the first product, where they are more than a few
(DROPPED). FLOPs per remaining token: 6 V D (2 V D without gradients). Saved for backward: d_hidden
(T, D) and the fp32 d_weight (V, D), which is rounded once, in backward, together with the scale.

Precision. The logits are fp32 even for 16-bit operands, because rounding a logit of 10 to bf16
moves its probability by 2%; the softmax gradient is rounded once, to the operands' dtype, for the
two products. The scale 1 / count is split into a mantissa, applied before that rounding, and a
power of two, applied in backward, so that no gradient is rounded twice and fp16 does not underflow.

Memory: fp32 logits and 16-bit gradients share one workspace of `logits_bytes`, as much as d_weight
takes but 1 GiB at least, at any length (see `_pieces`). Each product into the fp32 d_weight reads
and writes 8 V D bytes, so gradients of as many rows as fit are gathered for it, a group of pieces:
those of a piece are compacted into the first half of its own logits, and the next piece's logits
follow them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from longctx.annotate import annotated
from longctx.cost.sizes import Batch, Sizes, default_logits_bytes
from longctx.cost.table import Buffer, Table, Work
from longctx.kernels.cross_entropy import IGNORE_INDEX, cross_entropy
from longctx.kernels.launch import check_float, check_shape, once_differentiable
from longctx.kernels.scale import scale_into
from longctx.layer.linear import addmm_, mm


def linear_cross_entropy_reference(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S)
    *,
    bias: Tensor | None = None,
    num_items: int | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logits_scaling: float = 1.0,
) -> Tensor:  # scalar
    """The same loss by ordinary autograd with all logits held, for tests and for readers."""
    logits = torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2)  # (T, V)
    z = (logits if logits.dtype == torch.float64 else logits.float()) / logits_scaling
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    y = labels.flatten()
    loss = torch.nn.functional.cross_entropy(
        z, y, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )
    if num_items is not None:
        return loss / num_items
    return loss / max(1, int((y != IGNORE_INDEX).sum())) if reduction == "mean" else loss


def _pieces(lines: int) -> list[int]:
    """Returns the rows of each piece of a group in a workspace of `lines` lines in 16 bits.

    A row of fp32 logits takes two lines and leaves one of them with its gradient, so a piece can
    have half as many rows as there are lines left. At a vocabulary of 128256 and 2 GiB (8192
    lines): 4096 + 2048 + 1024 rows.
    """
    pieces: list[int] = []
    while True:
        rows = (lines - sum(pieces)) // 2
        rows = rows // 128 * 128 or rows  # whole tiles of the matrix product
        if rows < max(1, lines // 8):  # too few to keep the tensor cores busy
            return pieces
        pieces.append(rows)


class _Workspace:
    """One buffer for the fp32 logits of a piece and the gradients of all pieces before it."""

    def __init__(self, n: int, vocab: int, hidden: Tensor, grad: bool, size_bytes: int):
        self.vocab = vocab
        self.compacts = grad and hidden.dtype != torch.float32
        stride = -(-vocab // 64) * 64  # rows of whole 128-byte lines, which the tensor cores want
        lines = max(2, size_bytes // (2 * stride))
        self.pieces = _pieces(lines) if self.compacts else _pieces(lines)[:1]
        used = done = 0
        for rows in self.pieces:
            rows = min(rows, n - done)
            used = max(used, done + 2 * rows)
            done += rows
        dtype = hidden.dtype if self.compacts else torch.bfloat16
        self.buffer = torch.empty(used, stride, dtype=dtype, device=hidden.device)

    def _wide(self, part: slice) -> Tensor:
        """Returns rows of fp32, of two lines each, from the first line of `part` on."""
        rows = part.stop - part.start
        lines = self.buffer[part.start : part.start + 2 * rows]
        return lines.view(-1).view(torch.float32).view(rows, -1)

    def logits_and_gradients(self, part: slice) -> tuple[Tensor, Tensor]:
        """Returns (logits, gradients) of the rows `part`, which begin at the same address."""
        z = self._wide(part)[:, : self.vocab]
        return z, self.buffer[part, : self.vocab] if self.compacts else z

    def gradients(self, rows: int) -> Tensor:
        """Returns the gradients of all pieces, once they are finished."""
        g = self.buffer[:rows] if self.compacts else self._wide(slice(0, rows))
        g[:, self.vocab :] = 0  # torch's bf16 product on the CPU multiplies what follows a row by 0
        return g[:, : self.vocab]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @annotated("loss")
    def forward(
        ctx: Any,
        hidden: Tensor,  # (T, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        labels: Tensor,  # (T,)
        counted: RowCount,
        count: int | Tensor | None,  # None: the number of rows that count
        grad: bool,
        logits_bytes: int,
        logits_scaling: float,
        options: dict[str, Any],
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (grad and n for n in ctx.needs_input_grad[:3])
        grad = needs_hidden or needs_weight or needs_bias
        (T, D), V, device = hidden.shape, weight.shape[0], hidden.device
        kept, n = None, counted.read(V)
        count = max(1, n) if count is None else count
        if T - n > DROPPED * T:
            kept = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        else:
            n = T
        if not isinstance(count, Tensor):
            count = torch.full(
                (), count, device=device
            )  # written there: a copy would be waited for
        scale = count.to(device, torch.float32).reciprocal()
        # fp16 gradients get 8 more bits above the smallest number: |d_logits| <= 256, far from
        # 65504.
        boost = 256.0 if hidden.dtype == torch.float16 else 1.0
        mantissa, exponent = torch.frexp(scale / logits_scaling)
        ctx.rescale = torch.ldexp(torch.full_like(scale, 1 / boost), exponent)

        work = _Workspace(n, V, hidden, grad, logits_bytes)
        group = sum(work.pieces)
        d_hidden = None
        if needs_hidden:
            d_hidden = torch.empty_like(hidden) if kept is None else torch.zeros_like(hidden)
        d_weight = torch.empty(V, D, dtype=torch.float32, device=device) if needs_weight else None
        d_bias = torch.zeros(V, dtype=torch.float32, device=device) if needs_bias else None
        losses = torch.empty(n, dtype=torch.float32, device=device)
        kernel_scale = mantissa * boost
        weight_t = weight.t().float() if device.type == "cpu" else weight.t()

        for start in range(0, n, group):
            stop = min(start + group, n)
            where = slice(start, stop) if kept is None else kept[start:stop]
            h, y = hidden[where], labels[where]
            done = 0
            for rows in work.pieces:
                part = slice(done, min(done + rows, stop - start))
                if part.start >= part.stop:
                    break
                z, g = work.logits_and_gradients(part)
                mm(h[part], weight_t, z)
                if bias is not None:
                    z += bias
                if logits_scaling != 1.0:
                    z /= logits_scaling
                losses[start + part.start : start + part.stop] = cross_entropy(
                    z, y[part], d_logits=g if grad else None, scale=kernel_scale, **options
                )
                done = part.stop
            if not grad:
                continue
            g = work.gradients(stop - start)
            if d_hidden is not None:
                if kept is None:
                    mm(g, weight, d_hidden[where])
                else:
                    d_hidden[where] = g @ weight
            if d_weight is not None:
                if start == 0:
                    mm(g.t(), h, d_weight)
                else:
                    addmm_(d_weight, g.t(), h)
            if d_bias is not None:
                d_bias += g.sum(0, dtype=torch.float32)
        if n == 0 and d_weight is not None:
            d_weight.zero_()

        ctx.grads = (d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    @annotated("loss")
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy: backward overwrites what it saved, so it runs once"
            )
        scale = d_loss.float() * ctx.rescale
        grads = tuple(
            None
            if g is None
            else scale_into(g, scale, g if g.dtype == t else g.new_empty(g.shape, dtype=t))
            for g, t in zip(ctx.grads, ctx.dtypes, strict=True)
        )
        ctx.grads = None
        return *grads, None, None, None, None, None, None, None


DROPPED = 0.01
"""Rows that do not count are dropped if they are more than this share of all rows. Gathering the
others costs as much as the loss of 375 / V of them. In packed documents only the first token of
each does not count."""


class RowCount:
    """How many labels count, and whether all are in the vocabulary. The GPU is asked at once, and
    waited for when the answer is read."""

    def __init__(self, labels: Tensor) -> None:
        self._numbers, self._copied = torch.zeros(3, dtype=torch.int64), None
        if not labels.numel():
            return
        counts = labels != IGNORE_INDEX
        inside = labels.masked_fill(~counts, 0)
        found = torch.stack([counts.sum(), inside.amin(), inside.amax()])
        self._numbers = found
        if labels.is_cuda:
            self._numbers = torch.empty(3, dtype=torch.int64, pin_memory=True)
            self._numbers.copy_(found, non_blocking=True)
            self._copied = torch.cuda.current_stream(labels.device).record_event()

    def read(self, vocab: int) -> int:
        """Returns how many labels count. Raises ValueError for a label outside [0, vocab)."""
        if self._copied is not None:
            self._copied.synchronize()
        n, low, high = self._numbers.tolist()
        if low < 0 or high >= vocab:
            raise ValueError(
                f"labels must be in [0, {vocab}) or {IGNORE_INDEX}, got values in [{low}, {high}]"
            )
        return int(n)


def linear_cross_entropy(
    hidden: Tensor,  # (T, D) or (B, S, D)
    weight: Tensor,  # (V, D)
    labels: Tensor,  # (T,) or (B, S), already aligned with hidden: nothing is shifted here
    *,
    bias: Tensor | None = None,  # (V,)
    num_items: int | Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logits_scaling: float = 1.0,
    logits_bytes: int | None = None,
    counted: RowCount | None = None,
) -> Tensor:  # () fp32
    """Cross-entropy of hidden @ weight.T + bias, differentiable in hidden, weight and bias.

    Labels of -100 are ignored. The sum over the others is divided by `num_items` if given (the
    count over a whole gradient accumulation, HF's `num_items_in_batch`), else by their number
    (`reduction="mean"`), else by nothing. Without any label that counts the loss is 0. `softcap`
    bounds the logits by softcap * tanh(logits / softcap), `logits_scaling` divides them before
    that, `logits_bytes` bounds the logits held at a time (default: `default_logits_bytes`).
    `counted` is of these labels, from whoever had them earlier: the host does not wait for the GPU
    then.

    Without gradients (torch.no_grad, or nothing that requires them) none are computed. Backward may
    run once. Raises ValueError for a wrong shape, dtype or value.
    """
    if hidden.dim() not in (2, 3):
        raise ValueError(f"hidden must have shape (T, D) or (B, S, D), got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have shape (V, {hidden.shape[-1]}), got {tuple(weight.shape)}"
        )
    check_shape("labels", labels, hidden.shape[:-1])
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1])
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if logits_scaling <= 0:
        raise ValueError(f"logits_scaling must be positive, got {logits_scaling}")
    if logits_bytes is None:
        vocab, hidden_size = weight.shape
        logits_bytes = default_logits_bytes(vocab, hidden_size, weight.requires_grad)
    if logits_bytes <= 0:
        raise ValueError(f"logits_bytes must be positive, got {logits_bytes}")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as torch.nn.functional.linear would
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    check_float("hidden", hidden)
    check_float("weight", weight, hidden.dtype)

    labels = labels.flatten()
    options = {"label_smoothing": label_smoothing, "softcap": softcap}
    with torch.autocast(kind, enabled=False):
        count = 1 if num_items is None and reduction == "sum" else num_items
        return _LinearCrossEntropy.apply(
            hidden.flatten(0, -2),
            weight,
            bias,
            labels,
            counted or RowCount(labels),
            count,
            torch.is_grad_enabled(),
            logits_bytes,
            logits_scaling,
            options,
        )


# --- what it costs ---------------------------------------------------------------------------


def loss_cost(s: Sizes, batch: Batch) -> Table:
    """The cost of the loss. Logits are written and read twice in fp32, their gradient is written
    and read twice in 16 bits, and lm_head's gradient is summed in fp32 over groups of rows.
    Backward rounds that gradient when what forward read is gone."""
    tokens, unit = batch.tokens, s.unit(batch.tokens)
    rows = loss_rows(s, tokens)
    head = s.hidden * s.vocab * s.trains_head
    forward = {
        "the same, normed": unit,
        "logits": min(s.cut(tokens).logits_bytes, 4 * tokens * s.vocab),
        # hidden and its gradient, where labels that do not count are left out
        "rows of the loss": 2 * min(tokens, rows) * s.hidden * s.itemsize,
    }
    backward = {"the same, rounded": s.itemsize * head}
    buffers = {
        "last layer's output": unit,
        "its gradient": unit,
        "lm_head's gradient, fp32": 4 * head,
        **max(forward, backward, key=lambda alive: sum(alive.values())),
    }
    return Table(
        forward=(
            Work(
                name="loss",
                flops=(6 if s.trains_head else 4) * tokens * s.vocab * s.hidden,
                nbytes=18.0 * tokens * s.vocab + 8 * -(-tokens // rows) * head,
            ),
        ),
        buffers=tuple(Buffer(name=k, nbytes=n, during="loss") for k, n in buffers.items()),
    )


def loss_rows(s: Sizes, tokens: int) -> int:
    """Returns the rows of a group of pieces."""
    lines = s.cut(tokens).logits_bytes // (2 * s.vocab)
    return max(1, lines * 7 // 8 if s.itemsize < 4 else lines // 2)
