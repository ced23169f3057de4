"""One pass of a head over its rows: logits of a piece at a time, and the sums of gradients.

Rows whose label is ignored are dropped before the first product, where they are more than a few
(DROPPED).

Memory: fp32 logits and 16-bit gradients share one workspace of `logits_bytes`, as much as d_weight
takes but 1 GiB at least, at any length (see `_pieces`). Each product into the fp32 d_weight reads
and writes 8 V D bytes, so gradients of as many rows as fit are gathered for it, a group of pieces:
those of all pieces so far fill the first lines of the workspace, and the next piece's logits follow
them.

T tokens, D features, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.layer.linear import addmm_, mm

DROPPED = 0.01
"""Rows that do not count are dropped if they are more than this share of all rows. Gathering the
other rows costs as much as the loss of 375 / V of them. In packed documents only the first token of
each does not count."""


class Head(NamedTuple):
    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)


# --- rows ------------------------------------------------------------------------------------


class RowCount:
    """The number of labels that count, and whether all are in the vocabulary. The GPU counts at
    once; the host waits for it when the number is read."""

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
        """Returns the number of labels that count. Raises ValueError for a label outside [0,
        vocab)."""
        if self._copied is not None:
            self._copied.synchronize()
        n, low, high = self._numbers.tolist()
        if low < 0 or high >= vocab:
            raise ValueError(
                f"labels must be in [0, {vocab}) or {IGNORE_INDEX}, got values in [{low}, {high}]"
            )
        return int(n)


class Rows:
    """The rows that are computed: all T, or those whose label counts."""

    def __init__(self, labels: Tensor, vocab: int, counted: RowCount | None = None) -> None:
        self.total = len(labels)
        self.counting = (counted or RowCount(labels)).read(vocab)
        self.kept: Tensor | None = None
        self._ignored: Tensor | None = None  # among the rows that are computed
        self.labels = labels
        if self.total - self.counting > DROPPED * self.total:
            self.kept = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            self.labels = labels[self.kept]
        elif self.counting < self.total:
            self._ignored = labels == IGNORE_INDEX

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, start: int, stop: int) -> slice | Tensor:
        """Returns the indices of the computed rows `start` to `stop` among all rows."""
        return slice(start, stop) if self.kept is None else self.kept[start:stop]

    def masked(self, x: Tensor) -> Tensor:
        """Returns x, which has one value per computed row, with 0 where the label is ignored."""
        return x if self._ignored is None else x.masked_fill(self._ignored, 0)

    def weights(self, scale: Tensor, part: slice) -> Tensor:
        """Returns scale () for each of the computed rows `part`, 0 where the label is ignored."""
        return self.masked(scale.expand(len(self)))[part]

    def pick(self, x: Tensor) -> Tensor:
        """Returns the values of the computed rows of x (T,), 0 where the label is ignored."""
        return self.masked(x) if self.kept is None else x[self.kept]

    def spread(self, x: Tensor) -> Tensor:
        """Returns a copy of x, which has one value per computed row, as (T,), 0 where the label is
        ignored."""
        if self.kept is None:
            return self.masked(x.clone())
        return x.new_zeros(self.total).index_copy_(0, self.kept, x)


# --- the workspace ---------------------------------------------------------------------------


def _pieces(lines: int, lines_per_row: int = 2) -> list[int]:
    """Returns the rows of each piece of a group in a workspace of `lines` lines in 16 bits.

    A piece takes `lines_per_row` for each of its rows while its logits are there, and leaves one of
    them with the gradient, so each piece is smaller than the one before. With two of them, at a
    vocabulary of 128256 and 2 GiB (8192 lines): 4096 + 2048 + 1024 rows.
    """
    pieces: list[int] = []
    while True:
        rows = (lines - sum(pieces)) // lines_per_row
        rows = rows // 128 * 128 or rows  # whole tiles of the matrix product
        if rows < max(1, lines // (4 * lines_per_row)):  # too few to keep the tensor cores busy
            return pieces
        pieces.append(rows)


class Workspace:
    """One buffer for the fp32 logits of a piece, of all heads, and for the gradients of the pieces
    before it."""

    def __init__(
        self,
        n: int,
        vocab: int,
        hidden: Tensor,
        grad: bool,
        size_bytes: int,
        heads: int = 1,
        in_place: bool = False,  # 16-bit gradients begin where their logits do
    ) -> None:
        self.vocab = vocab
        self.wide = wide_dtype(hidden.dtype)
        self.compacts = grad and hidden.dtype != self.wide
        self._lines = self.wide.itemsize // 2  # of a row of logits
        self._apart = self.compacts and not in_place
        stride = -(-vocab // 64) * 64  # rows of whole 128-byte lines, which the tensor cores want
        per_row = heads * self._lines + self._apart
        lines = max(per_row, size_bytes // (2 * stride))
        self.pieces = _pieces(lines, per_row)
        if not self.compacts:
            del self.pieces[1:]
        used = done = 0
        for rows in self.pieces:
            rows = min(rows, n - done)
            used = max(used, done + per_row * rows)
            done += rows
        dtype = hidden.dtype if self.compacts else torch.bfloat16
        self.buffer = torch.empty(used, stride, dtype=dtype, device=hidden.device)

    def parts(self, rows: int) -> list[slice]:
        """Returns the pieces of a group of `rows` rows."""
        parts, done = [], 0
        for piece in self.pieces:
            if done < rows:
                parts.append(slice(done, min(done + piece, rows)))
                done = parts[-1].stop
        return parts

    def _wide(self, first: int, rows: int) -> Tensor:
        """Returns rows of logits, from the line `first` on."""
        lines = self.buffer[first : first + self._lines * rows]
        return lines.view(-1).view(self.wide).view(rows, -1)

    def logits(self, part: slice, head: int = 0) -> Tensor:
        """Returns the logits (rows, V) of one head for the rows `part`."""
        rows = part.stop - part.start
        first = part.start + self._apart * rows + head * self._lines * rows
        return self._wide(first, rows)[:, : self.vocab]

    def gradient(self, part: slice) -> Tensor:
        """Returns the gradient (rows, V) of the first head's logits for the rows `part`; where it
        is as wide as they are, it lies over them."""
        return self.buffer[part, : self.vocab] if self.compacts else self.logits(part)

    def gradients(self, rows: int) -> Tensor:
        """Returns the gradients of all pieces, once they are finished."""
        g = self.buffer[:rows] if self.compacts else self._wide(0, rows)
        g[:, self.vocab :] = 0  # torch's bf16 product on the CPU multiplies what follows a row by 0
        return g[:, : self.vocab]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits and sums: fp32, or fp64 for operands in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- one pass over all rows ------------------------------------------------------------------


class HeadGradients:
    """The gradients of a head, summed over groups of rows."""

    def __init__(self, head: Head, rows: Rows, needs: Sequence[bool]) -> None:
        (hidden, weight, _), wide = head, wide_dtype(head.hidden.dtype)
        new = torch.empty if rows.kept is None else torch.zeros  # dropped rows have no gradient
        self._rows, self._operand, self._begun = rows, weight, False
        self.hidden: Tensor | None = None
        if needs[0]:
            self.hidden = new(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self.weight = weight.new_empty(weight.shape, dtype=wide) if needs[1] else None
        self.bias = weight.new_zeros(len(weight), dtype=wide) if needs[2] else None

    def add(self, g: Tensor, h: Tensor, start: int) -> None:
        """Adds a group's gradients: g (rows, V) of the logits, h (rows, D) the hidden states."""
        if self.hidden is not None:
            where = self._rows.of(start, start + len(g))
            if isinstance(where, slice):
                mm(g, self._operand, self.hidden[where])
            else:
                self.hidden[where] = g @ self._operand
        if self.weight is not None:
            if self._begun:
                addmm_(self.weight, g.t(), h)
            else:
                mm(g.t(), h, self.weight)
        if self.bias is not None:
            self.bias += g.sum(0, dtype=self.bias.dtype)
        self._begun = True

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the sums of hidden states, weight and bias."""
        if not self._begun and self.weight is not None:
            self.weight.zero_()
        return self.hidden, self.weight, self.bias


class LogitsPiece(NamedTuple):
    """The logits of some rows, which may be overwritten, and where their gradient goes."""

    logits: list[Tensor]  # of each head: (rows, V)
    part: slice  # of the computed rows
    d_logits: Tensor | None  # (rows, V), of the first head; None: it is not wanted


def stream(
    heads: Sequence[Head],
    rows: Rows,
    compute: Callable[[LogitsPiece], None],
    gradients: HeadGradients | None,
    logits_bytes: int,
    in_place: bool = False,
) -> None:
    """Calls `compute` for piece after piece, and adds the logits' gradients to `gradients`."""
    hidden, weight, _ = heads[0]
    grad = gradients is not None
    work = Workspace(len(rows), len(weight), hidden, grad, logits_bytes, len(heads), in_place)
    wide, on_cpu = work.wide, hidden.device.type == "cpu"
    transposed = [h.weight.t().to(wide) if on_cpu else h.weight.t() for h in heads]
    for start in range(0, len(rows), sum(work.pieces)):
        stop = min(start + sum(work.pieces), len(rows))
        where = rows.of(start, stop)
        hs = [head.hidden[where] for head in heads]
        for part in work.parts(stop - start):
            logits = [work.logits(part, i) for i in range(len(heads))]
            for head, h, weight_t, z in zip(heads, hs, transposed, logits, strict=True):
                mm(h[part], weight_t, z)
                if head.bias is not None:
                    z += head.bias
            g = work.gradient(part) if grad else None
            compute(LogitsPiece(logits, slice(start + part.start, start + part.stop), g))
        if gradients is not None:
            gradients.add(work.gradients(stop - start), hs[0], start)
