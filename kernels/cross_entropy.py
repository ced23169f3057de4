"""Softmax cross-entropy over rows of logits, one row a token: the loss of each row and, in the same
launch, its gradient.

For logits x (T, V) and labels y (T,), with z = softcap * tanh(x / softcap) if a softcap is given,
else z = x:

    lse    = log sum_j exp(z_j)                                        p_j = exp(z_j - lse)
    loss   = lse - (1 - eps) z_y - eps mean_j(z_j) + s lse^2
    dx_j   = scale ((1 + 2 s lse) p_j - (1 - eps) [j = y] - eps / V) (1 - (z_j / softcap)^2)

with eps the label smoothing and s the `lse_square_scale`, 0 unless given.

Nothing is saved. The gradient may be written over the logits: in their own dtype, or, rounded once,
as packed 16-bit rows that begin at the address of the fp32 logits and take half their space. A row
whose label is IGNORE_INDEX has loss 0 and gradient 0; a label outside [0, V) gives loss NaN.

Bytes: each logit is read once and its gradient is written once (fp32 to bf16: 6 bytes a logit). A
row of 128256 is more than a multiprocessor can hold beside other rows, so several programs, the
row's *parts*, hold one slice each in registers. A part publishes the pair of its slice, maximum and
sum of exponentials, and waits for the pairs of the other parts. Then it can compute lse, which its
slice of the gradient needs.

Deadlock: a waiting part must not keep the parts it waits for from starting. A ticket counter
therefore hands out parts, row by row, in the order in which programs really start. So all parts of
the first unfinished row are held by running programs, whatever the order in which the device starts
programs, as long as it can run one row's parts at the same time (`_parts` checks that).

Memory order: a published pair is one 64-bit word that is zero before. A part that reads a non-zero
word has the complete pair, and no other memory access has to be ordered against it.

Overwriting: a part computes its pair from everything it reads of the logits, so once its pair is
visible, its logits may be overwritten. Row i of a 16-bit gradient lies over one half of row i // 2
of the fp32 logits. Each of its parts first waits for the pairs of row i // 2, which is an earlier
row (or, for i = 0, the same one).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longctx.constants import IGNORE_INDEX
from longctx.kernels.launch import (
    INTERPRETED,
    Config,
    check_float,
    check_rows,
    check_shape,
    on_device,
    round_to,
    runs_kernel,
    sm_count,
    tl,
    triton,
)

_IGNORED = tl.constexpr(IGNORE_INDEX)


def cross_entropy_reference(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,) int64
    *,
    d_logits: Tensor | None = None,  # (T, V), may be logits itself
    scale: Tensor | None = None,  # () or (T,), fp32
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> Tensor:  # (T,) fp32, or fp64 for fp64 logits
    """Returns the equations above in plain torch."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    ignored, outside = labels == IGNORE_INDEX, (labels < 0) | (labels >= z.shape[1])
    y = labels.masked_fill(outside, 0)[:, None]  # (T, 1)
    lse = z.logsumexp(dim=1)
    z_y = z.gather(1, y).squeeze(1).masked_fill_(outside, float("nan"))
    loss = lse - (1 - label_smoothing) * z_y
    if label_smoothing:
        loss -= label_smoothing * z.mean(dim=1)
    if lse_square_scale:
        loss += lse_square_scale * lse**2
    if d_logits is not None:
        grad = torch.exp(z - lse[:, None])
        if lse_square_scale:
            grad *= 1 + 2 * lse_square_scale * lse[:, None]
        grad -= label_smoothing / z.shape[1]
        grad.scatter_add_(1, y, torch.full_like(grad[:, :1], label_smoothing - 1))
        if softcap is not None:
            grad *= 1 - (z / softcap) ** 2
        if scale is not None:
            grad *= scale[:, None] if scale.dim() else scale
        d_logits.copy_(grad.masked_fill_(ignored[:, None], 0))
    return loss.masked_fill(ignored, 0)


@triton.jit
def cap(x, softcap):
    """Returns softcap * tanh(x / softcap), with an error of at most 2e-7 of the softcap."""
    return softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)


_WAIT = tl.constexpr("""{
    .reg .pred absent;
again:
    ld.relaxed.gpu.global.b64 $0, [$1];
    setp.eq.b64 absent, $0, 0;
    @absent bra again;
}""")


@triton.jit
def _wait(words_ptr, PARTS: tl.constexpr, LANES: tl.constexpr):
    """Waits until all parts of a row have published their words, and returns them as LANES words;
    those past PARTS repeat the last one.
    """
    address = (words_ptr + tl.minimum(tl.arange(0, LANES), PARTS - 1)).to(tl.int64)
    # Triton could place a barrier inside a loop around a load, and threads that leave the loop at
    # different times would hang there. In assembly each thread waits by itself. "&" keeps $0 and $1
    # in different registers: the address is needed again after the first load.
    return tl.inline_asm_elementwise(
        _WAIT, "=&l,l", [address], dtype=tl.uint64, is_pure=False, pack=1
    )


@triton.jit
def _exchange(words_ptr, part, a, b, PARTS: tl.constexpr, LANES: tl.constexpr):
    """Publishes this part's pair (a, b) and returns the pairs of all parts of the row, as two
    vectors of LANES >= PARTS elements; b is 0 past PARTS.

    A pair of two zeros would look like one not yet published: the caller never publishes it.
    """
    word = a.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | b.to(tl.uint32, bitcast=True)
    tl.atomic_xchg(words_ptr + part, word.to(tl.int64, bitcast=True), sem="relaxed")
    words = _wait(words_ptr, PARTS, LANES)
    a = (words >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    b = words.to(tl.uint32).to(tl.float32, bitcast=True)
    return a, tl.where(tl.arange(0, LANES) < PARTS, b, 0.0)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (T, V)
    d_logits_ptr,  # (T, V), may be logits or, if OVERLAPS, begin there
    labels_ptr,  # (T,)
    loss_ptr,  # (T,) fp32
    scale_ptr,  # () fp32
    ticket_ptr,  # () int64, 0; None if no part waits
    words_ptr,  # (T, 2 if HAS_SMOOTHING else 1, PARTS) int64, all 0; None if no part waits
    V,
    stride_logits,
    stride_d_logits,
    label_smoothing,
    softcap,
    lse_square_scale,
    HAS_GRAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE_SQUARE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,  # PARTS * BLOCK >= V
    LANES: tl.constexpr,  # the next power of two
    OVERLAPS: tl.constexpr,  # the gradients of rows 2 i and 2 i + 1 lie over the logits of row i
):
    WORDS: tl.constexpr = 2 * PARTS if HAS_SMOOTHING else PARTS
    if PARTS > 1 or OVERLAPS:
        # Parts are numbered as they start, not by program_id: a part that waits for others must
        # know that they have started, or waiting parts could fill the GPU and keep them out.
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        row, part = ticket // PARTS, (ticket % PARTS).to(tl.int32)
    else:
        row, part = tl.program_id(0).to(tl.int64), 0
    logits_ptr += row * stride_logits
    offs = part * BLOCK + tl.arange(0, BLOCK)
    mask = offs < V
    z = tl.load(
        logits_ptr + offs, mask=mask, other=float("-inf"), eviction_policy="evict_first"
    ).to(tl.float32)
    label = tl.load(labels_ptr + row)
    # Neither a class nor ignored: -1, whose loss becomes NaN instead of another row's logit.
    label = tl.where((label >= 0) & (label < V) | (label == _IGNORED), label, -1).to(tl.int32)
    # Only the part that holds the label reads its logit. For the other parts that logit may already
    # be overwritten.
    holds_label = part == tl.maximum(label, 0) // BLOCK
    x_y = tl.load(logits_ptr + label, mask=(label >= 0) & holds_label, other=float("-inf"))
    z_y = x_y.to(tl.float32)
    if OVERLAPS:  # waits here because this row's logits are being loaded meanwhile
        if row > 0:
            _wait(words_ptr + row // 2 * WORDS, PARTS, LANES)
    if HAS_SOFTCAP:
        z_y = cap(z_y, softcap)
        z = tl.where(mask, cap(z, softcap), float("-inf"))

    # The maximum is kept finite because (-inf) - (-inf) would be NaN. For a slice of nothing but
    # -inf it is -1e30 and the sum is 0; for any other slice the sum is at least 1. So a pair is
    # never two zeros. z_y is one of z and changes nothing, but makes the pair depend on its load.
    top = tl.maximum(tl.maximum(tl.max(z, axis=0), z_y), -1e30)
    weights, own_top = tl.exp(z - top), top
    total = tl.sum(weights, axis=0)
    if HAS_SMOOTHING:
        z_sum = tl.sum(tl.where(mask, z, 0.0), axis=0)
    if PARTS > 1 or OVERLAPS:
        words_ptr += row * WORDS
        tops, totals = _exchange(words_ptr, part, top, total, PARTS, LANES)
        top = tl.max(tops, axis=0)
        total = tl.sum(totals * tl.exp(tops - top), axis=0)
    lse = top + tl.log(total)

    z_y = tl.where(label >= 0, z_y, float("nan"))
    loss = lse - (1 - label_smoothing) * z_y
    if HAS_SMOOTHING:
        if PARTS > 1:
            one = tl.full((), 1.0, tl.float32)  # marks the pair: z_sum may be 0
            _, z_sums = _exchange(words_ptr + PARTS, part, one, z_sum, PARTS, LANES)
            z_sum = tl.sum(z_sums, axis=0)
        loss -= label_smoothing * z_sum / V
    if HAS_LSE_SQUARE:
        loss += lse_square_scale * lse * lse
    tl.store(loss_ptr + row, tl.where(label == _IGNORED, 0.0, loss), mask=holds_label)

    if HAS_GRAD:
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr)
        scale = tl.where(label == _IGNORED, 0.0, scale)
        y_scale = scale * (1 - label_smoothing)
        p_scale = scale
        if HAS_LSE_SQUARE:
            p_scale *= 1 + 2 * lse_square_scale * lse
        if HAS_SOFTCAP:  # z stays in registers for its derivative: so not its exponential
            grad = p_scale * tl.exp(z - lse)
        else:
            grad = weights * (p_scale * tl.exp(own_top - lse))
        grad -= tl.where(offs == label, y_scale, 0.0)
        if HAS_SMOOTHING:
            grad -= scale * label_smoothing / V
        if HAS_SOFTCAP:
            grad *= 1 - (z / softcap) * (z / softcap)
        grad = round_to(grad, d_logits_ptr.dtype.element_ty)
        d_logits_ptr += row * stride_d_logits
        tl.store(d_logits_ptr + offs, grad, mask=mask, eviction_policy="evict_first")


def cross_entropy_forward(
    logits: Tensor,  # (T, V) bf16, fp16 or fp32
    labels: Tensor,  # (T,) int64
    *,
    d_logits: Tensor | None = None,  # (T, V), may be logits itself or begin there (see below)
    scale: Tensor | None = None,  # () fp32
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> Tensor:  # (T,) fp32
    """The loss of each row. `d_logits`, if given, receives `scale` times the gradient of their sum.

    A 16-bit `d_logits` may begin at the address of fp32 logits, at the same stride in elements. Not
    differentiable by autograd: `longctx.head.loss` calls it chunk by chunk. Raises ValueError for a
    wrong shape, dtype, device or layout.
    """
    check_logits(logits, labels)
    check_float("logits", logits)
    T, V = logits.shape
    if d_logits is not None:
        check_shape("d_logits", d_logits, (T, V))
        check_float("d_logits", d_logits)
        check_rows("d_logits", d_logits)
    overlaps = d_logits is not None and _overlaps(logits, d_logits)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if scale is not None:
        check_shape("scale", scale, ())
    terms: dict[str, Any] = {"label_smoothing": label_smoothing, "softcap": softcap}
    terms["lse_square_scale"] = lse_square_scale
    if not runs_kernel(logits, labels, d_logits, scale):
        return cross_entropy_reference(logits, labels, d_logits=d_logits, scale=scale, **terms)
    loss = torch.empty(T, dtype=torch.float32, device=logits.device)
    if T:
        # The kernel reads labels at a stride of 1.
        _launch(logits, labels.contiguous(), loss, d_logits, scale, overlaps, **terms)
    return loss


def _launch(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,)
    loss: Tensor,  # (T,), written
    d_logits: Tensor | None,  # (T, V), written
    scale: Tensor | None,  # ()
    overlaps: bool,
    label_smoothing: float,
    softcap: float | None,
    lse_square_scale: float,
) -> None:
    T, V = logits.shape
    simple = not label_smoothing and softcap is None and not lse_square_scale
    simple &= d_logits is None or d_logits.element_size() == 2
    config = default_config(V, simple)
    with on_device(logits):
        parts = _parts(logits, config)
        ticket = words = None
        if parts > 1 or overlaps:
            pairs = 2 if label_smoothing else 1
            # One allocation and one memset for both.
            zeros = logits.new_zeros(16 + T * parts * pairs, dtype=torch.int64)
            ticket, words = zeros, zeros[16:]  # on different 128-byte lines
        written = logits if d_logits is None else d_logits
        _cross_entropy_kernel[(T * parts,)](
            *(logits, written, labels, loss, scale, ticket, words),
            *(V, logits.stride(0), written.stride(0)),
            *(label_smoothing, 1.0 if softcap is None else softcap, lse_square_scale),
            HAS_GRAD=d_logits is not None,
            HAS_SCALE=scale is not None,
            HAS_SMOOTHING=label_smoothing != 0,
            HAS_SOFTCAP=softcap is not None,
            HAS_LSE_SQUARE=lse_square_scale != 0,
            BLOCK=config.block,
            PARTS=parts,
            LANES=triton.next_power_of_2(parts),
            # Triton's interpreter runs one program after the other: none has to wait.
            OVERLAPS=overlaps and not INTERPRETED,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.maxnreg,
        )


def check_logits(logits: Tensor, labels: Tensor | None = None) -> None:
    """Raises ValueError unless logits are (T, V) with contiguous rows and labels (T,) int64."""
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (T, V), got {tuple(logits.shape)}")
    if logits.dtype != torch.float64:
        check_float("logits", logits)
    check_rows("logits", logits)
    if labels is not None:
        check_shape("labels", labels, logits.shape[:1])
        if labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64, got {labels.dtype}")


@cache
def default_config(V: int, simple: bool = True) -> Config:
    """Slices of 32 KB in fp32. `simple` means no label smoothing, softcap or square of lse, and no
    fp32 gradient.
    Then 256 threads of 64 registers are enough, so that a multiprocessor holds four slices; the
    other cases would spill.
    """
    block = max(128, triton.next_power_of_2(V))
    if INTERPRETED:  # programs run one after the other: one that waited would wait for ever
        return Config(block=block, num_warps=4)
    if simple and block >= 8192:
        return Config(block=8192, num_warps=8, maxnreg=64)
    return Config(block=min(8192, block), num_warps=4)


def _overlaps(logits: Tensor, d_logits: Tensor) -> bool:
    """Whether gradients are written over the logits of other rows. Raises ValueError for an overlap
    that the kernel is not made for.
    """
    begin, d_begin = logits.data_ptr(), d_logits.data_ptr()
    end = begin + len(logits) * logits.stride(0) * logits.element_size()
    d_end = d_begin + len(logits) * d_logits.stride(0) * d_logits.element_size()
    if end <= d_begin or d_end <= begin:
        return False
    if (begin, logits.stride(0)) == (d_begin, d_logits.stride(0)):
        if d_logits.dtype == logits.dtype:
            return False
        if d_logits.element_size() < logits.element_size():
            return True
    raise ValueError(
        "d_logits must be logits, begin there in 16 bits at the stride of fp32 logits, or lie "
        f"elsewhere: got bytes {d_begin - begin} to {d_end - begin} of {end - begin}"
    )


def _parts(logits: Tensor, config: Config) -> int:
    """The number of programs that share a row. They all have to run at the same time. The device is
    sure to run as many as fit into its registers at 255 a thread; a row that needs more raises
    ValueError.
    """
    parts = -(-logits.shape[1] // config.block)
    limit = sm_count(logits) * max(1, 8 // config.num_warps)
    if 1 < parts > limit:
        raise ValueError(
            f"a row of {logits.shape[1]} logits needs {parts} programs of {config.block} at once, "
            f"but this device is only sure to run {limit}"
        )
    return parts
