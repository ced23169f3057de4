"""The attention backends, and the devices on which `auto` chooses each of them:

    fa4     flash-attn-4 (optional package), all documents in one launch     sm_90, sm_100, sm_103
    cudnn   torch's cuDNN op, a launch per document              there, if the package is missing;
                                                                 short documents in flash then
    flash   torch's FlashAttention-2 op, all documents in one launch         other GPUs from sm_80
            torch's own flash op for CPUs, one document at a time            CPUs
    efficient   torch's memory-efficient op, a launch per document           heads over 256
    math    plain torch in tiles of queries, the reference     float32 on GPUs, float16 on CPUs

The order of cuDNN and flash is torch's own (`check_prefer_cudnn_attention` in its sdp_utils.cpp),
and by_length.py says why short documents are left to flash. Only Hopper, sm_90, was measured.
cuDNN's op has no sliding windows: for models that have them `auto` chooses flash there. Neither it
nor flash caps scores: for models that do `auto` chooses fa4 or math. torch's op for CPUs has
neither; such layers run in `math`. Heads over 256, which Gemma 4 has in some layers, only torch's
memory-efficient op takes: it has neither, too, and has no name to choose it by.

A new backend is a class with `forward` and `backward`, with the two methods of `AddsSinks`, or with
those of `PerDocument`, which take one document; a line in `choose_attention`, and a row in
tests/attention/test_attention.py.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.attention import flash4
from longctx.attention.by_length import LONG, ByLength
from longctx.attention.protocol import QKV, AddsSinks, Attention, AttentionCall
from longctx.attention.sinks import Sinks, add_grad_, merge_sinks_
from longctx.errors import UserError, print_rank0

aten = torch.ops.aten


def choose_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    windows: bool = False,
    softcap: float | None = None,
) -> tuple[str, Attention]:
    """Returns the name and the backend for `name`; for `auto` the fastest that runs here. Raises
    UserError if the backend cannot run on this device, with this dtype or with heads of this size,
    or lacks the sliding windows or the cap of scores of the model."""
    if name in ("fa2", "sdpa", "eager"):
        raise UserError(
            f"--attn_backend {name} is for --class_type vanilla and liger; "
            "custom takes fa4, cudnn, flash, math or auto"
        )
    if device.type == "cpu":
        return _on_cpu(name, dtype, softcap)
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"--class_type custom needs an Ampere or newer GPU and this is {_sm(device)}: "
            "use --class_type vanilla --dtype float32"
        )
    # fp32 has plain torch alone: no fused kernel here takes it.
    half = dtype in (torch.bfloat16, torch.float16)
    if chosen := name == "auto":
        name = _fastest(device, head_dim, windows, softcap is not None) if half else "math"
    if name == "efficient":
        return name, Efficient()
    if name != "math":
        _check_kernel(name, device, dtype, head_dim, windows, softcap is not None)
    if chosen and name == "cudnn":
        _print_once(
            f"attention: cudnn for documents of {LONG} tokens and more, flash for shorter ones"
        )
        return name, ByLength(short=Flash(), long=Cudnn())
    return name, BACKENDS[name](softcap)


def _on_cpu(name: str, dtype: torch.dtype, softcap: float | None) -> tuple[str, Attention]:
    if name == "auto":
        name = "flash" if dtype in (torch.float32, torch.float64, torch.bfloat16) else "math"
    if name not in ("flash", "math"):
        raise UserError(f"--attn_backend {name} needs a GPU; on this machine use flash or math")
    return name, (FlashOnCpu if name == "flash" else Math)(softcap)


def _check_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    windows: bool,
    softcap: bool,
) -> None:
    """Raises UserError if the kernels of a backend for GPUs cannot compute this model."""
    if head_dim > WIDEST:
        raise UserError(f"--attn_backend {name} takes heads of at most {WIDEST}: use auto or math")
    if dtype not in (torch.bfloat16, torch.float16):
        raise UserError(f"--attn_backend {name} needs --dtype bfloat16 or float16, got {dtype}")
    if reason := lacks(name, windows=windows, softcap=softcap):
        raise UserError(reason)
    if name == "fa4" and (reason := flash4.why_not(device, head_dim, softcap)):
        others = "math" if softcap else "flash or cudnn"
        raise UserError(f"--attn_backend fa4: flash-attn-4 {reason}; use {others}")


def lacks(name: str, *, windows: bool, softcap: bool) -> str | None:
    """Returns which of the features that a model needs a backend for GPUs lacks; None if it has
    all."""
    if softcap and name in ("cudnn", "flash"):
        return (
            f"--attn_backend {name} has no cap of attention's scores, which this model has: use "
            "fa4, math or auto"
        )
    if windows and name == "cudnn":
        return NO_WINDOWS
    return None


NO_WINDOWS = (
    "--attn_backend cudnn has no sliding windows, which this model has: use flash, fa4 or auto"
)


WIDEST = 256
"""The widest heads that flash-attn-4, cuDNN's op and torch's FlashAttention-2 op take."""


def _fastest(device: torch.device, head_dim: int, windows: bool, softcap: bool) -> str:
    if head_dim > WIDEST:
        return "math" if windows or softcap else "efficient"
    major, _ = torch.cuda.get_device_capability(device)
    if major in flash4.CHOSEN:
        reason = flash4.why_not(device, head_dim, softcap)
        if reason is None:
            return "fa4"
        _print_once(f"flash-attn-4 {reason}")
    if softcap:
        _print_once("the model caps attention's scores: plain torch computes them (math), slowly")
        return "math"
    # Before 9.15.1 cuDNN was wrong for lengths not divisible by 128 (pytorch#169849).
    cudnn = major in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500
    return "cudnn" if cudnn and not windows else "flash"


_print_once = functools.cache(print_rank0)


def _sm(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


class FlashAttention4(Attention):
    """The variable-length form of flash-attn-4 (Tri Dao and others, PyPI `flash-attn-4`)."""

    writes_gradients = fuses_sinks = True

    def __init__(self, softcap: float | None = None) -> None:
        super().__init__(softcap)
        interface = flash4.load()
        self.run_forward, self.run_backward = interface._flash_attn_fwd, interface._flash_attn_bwd
        # Its first versions have sinks in forward alone.
        self._knows_sinks = "learnable_sink" in inspect.signature(self.run_backward).parameters

    def reads_bounds(self, longest: int) -> bool:
        return True

    def forward(self, call: AttentionCall) -> None:
        inside = call.sinks is not None and self._has_sinks(call.o)
        options = self._options(call, call.sinks if inside else None)
        self.run_forward(*call.qkv, out=call.o, lse=call.lse, **options)
        if not inside:
            merge_sinks_(call.o, call.lse, call.sinks)

    def backward(self, do: Tensor, call: AttentionCall, out: QKV | None = None) -> QKV:
        # Unless deterministic, dq is summed with atomics, whose order changes from run to run.
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and torch.cuda.get_device_capability(do.device)[0] == 12:
            raise UserError(
                f"flash-attn-4 has no deterministic backward for this GPU ({_sm(do.device)}): "
                "use --attn_backend flash"
            )
        # The gradients of q, k and v need o and lse with sinks, but not these (kernels/sinks.py).
        total = None if call.sinks is None else call.sinks.grad
        inside = total is not None and self._has_sinks(do)
        if not inside:
            add_grad_(call.sinks, do, call.o, call.lse)
        dq, dk, dv = out or (None, None, None)
        grads = self.run_backward(  # dq may overwrite o: it is written after o was read
            *(*call.qkv, call.o, do, call.lse),
            deterministic=deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
            **self._options(call, call.sinks if inside else None),
        )
        if total is not None and inside:
            total.add_(grads[3])
        return out or QKV(*grads[:3])

    def _has_sinks(self, x: Tensor) -> bool:  # (T, H, d)
        return self._knows_sinks and flash4.takes_sinks(x.device, x.shape[-1])

    def _options(self, call: AttentionCall, sinks: Sinks | None) -> dict[str, Any]:
        of_queries, of_keys, most_queries, most_keys = call.documents.bounds
        # fp32, so that their gradients are not rounded.
        more = {} if sinks is None else dict(learnable_sink=sinks.logits.float())
        return more | dict(
            softmax_scale=call.scale,
            causal=True,
            # flash-attn counts the tokens to the left of a query, Hugging Face's window the query
            # too.
            window_size_left=None if call.window is None else call.window - 1,
            softcap=self.softcap or 0.0,
            cu_seqlens_q=of_queries,
            cu_seqlens_k=of_keys,
            max_seqlen_q=most_queries,
            max_seqlen_k=most_keys,
        )


class Flash(AddsSinks):
    """The variable-length form of torch's FlashAttention-2 op on CUDA."""

    def reads_bounds(self, longest: int) -> bool:
        return True

    def plain_forward(self, call: AttentionCall) -> None:
        o, lse, *_ = aten._flash_attention_forward(
            *(*call.qkv, *call.documents.bounds, 0.0, True, False),
            scale=call.scale,
            **self._sides(call.window),
        )
        # torch's op has no `out`: the copy puts o where the caller keeps it.
        call.o.copy_(o)
        call.lse.copy_(lse)

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=do.device)
        grads = aten._flash_attention_backward(
            *(do, *call.qkv, call.o, call.lse, *call.documents.bounds, 0.0, True),
            *(no_dropout, no_dropout[:0]),
            scale=call.scale,
            **self._sides(call.window),
        )
        return QKV(*grads).copied(out)

    @staticmethod
    def _sides(window: int | None) -> dict[str, int]:
        return {} if window is None else dict(window_size_left=window - 1, window_size_right=0)


class Scores(NamedTuple):
    """How the queries of one document see its keys."""

    scale: float
    window: int | None = None
    after: int = 0
    """The position of the first query among the keys: 0, or behind all of them (cross.py)."""


class PerDocument(AddsSinks):
    """A backend without a variable-length form, which loops over the documents."""

    def plain_forward(self, call: AttentionCall) -> None:
        how = Scores(call.scale, call.window)
        for doc in call.documents.slices():
            found = self.document_forward(call.qkv.of(doc), how)
            call.o[doc], call.lse[:, doc] = found

    def plain_backward(self, do: Tensor, call: AttentionCall, out: QKV | None) -> QKV:
        whole, how = call.room(out), Scores(call.scale, call.window)
        for doc in call.documents.slices():
            given = do[doc], call.qkv.of(doc), call.o[doc], call.lse[:, doc], how
            QKV(*self.document_backward(*given)).copied(whole.of(doc))
        return whole

    @abstractmethod
    def document_forward(self, qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
        """Returns o (L, H, d) and lse (H, L) of one document of L tokens."""

    @abstractmethod
    def document_backward(
        self, do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq (L, H, d), dk and dv (L, K, d) of one document of L tokens."""


class Math(PerDocument):
    """Plain torch in tiles of queries, so that the scores are (H, TILE, L) at most, or
    (H, TILE, TILE + window) with a window."""

    fuses_sinks = True
    TILE = 1024

    def forward(self, call: AttentionCall) -> None:
        sinks = None if call.sinks is None else call.sinks.logits
        how = Scores(call.scale, call.window)
        for doc in call.documents.slices():
            found = self.document_forward(call.qkv.of(doc), how, sinks)
            call.o[doc], call.lse[:, doc] = found

    def document_forward(
        self, qkv: QKV, how: Scores, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        keys, values = (_heads_first(x, qkv.q) for x in qkv[1:])
        o, lse = [], []
        for tile, seen in self._tiles(qkv, how):
            offset = how.after + tile.start - seen.start
            scores = self._scores(qkv.q[tile], keys[:, seen], offset, how)
            lse.append(scores.logsumexp(-1))
            if sinks is not None:
                lse[-1] = torch.logaddexp(lse[-1], sinks[:, None].to(scores.dtype))
            p = torch.exp(scores - lse[-1][:, :, None])
            o.append((p @ values[:, seen].to(p.dtype)).transpose(0, 1))
        return torch.cat(o), torch.cat(lse, dim=1)

    def document_backward(
        self, do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of one document: p = exp(s - lse); dv = p.T do; ds = p (do v.T -
        rowsum(do o)); dq = ds k; dk = ds.T q. With a softcap c, ds is times 1 - (s / c)^2."""
        keys, values = (_heads_first(x, qkv.q).to(lse.dtype) for x in qkv[1:])
        dq, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)  # (H, L, d)
        for tile, seen in self._tiles(qkv, how):
            offset = how.after + tile.start - seen.start
            scores = self._scores(qkv.q[tile], keys[:, seen], offset, how)
            p = torch.exp(scores - lse[:, tile, None])
            q_HTd, do_HTd, o_HTd = (x[tile].transpose(0, 1).to(p.dtype) for x in (qkv.q, do, o))
            delta = (do_HTd * o_HTd).sum(-1, keepdim=True)
            ds = p * (do_HTd @ values[:, seen].mT - delta) * how.scale
            if self.softcap is not None:  # unseen scores are -inf, and their p is 0
                ds *= (1 - (scores / self.softcap) ** 2).clamp_(min=0)
            dq.append((ds @ keys[:, seen]).transpose(0, 1))
            dk[:, seen] += ds.mT @ q_HTd
            dv[:, seen] += p.mT @ do_HTd
        return torch.cat(dq), _sum_groups(dk, qkv.k), _sum_groups(dv, qkv.v)

    def _tiles(self, qkv: QKV, how: Scores) -> Iterator[tuple[slice, slice]]:
        """Yields each tile of queries with the keys that at least one of its queries attends to."""
        (_, window, after), n, m = how, len(qkv.q), len(qkv.k)
        for start in range(0, n, self.TILE):
            stop = min(start + self.TILE, n)
            first = 0 if window is None else max(0, after + start - window + 1)
            yield slice(start, stop), slice(first, m if window is None else min(after + stop, m))

    def _scores(self, q: Tensor, keys_HLd: Tensor, offset: int, how: Scores) -> Tensor:
        """Returns scores (H, T, L) in fp32 or fp64, with -inf above the diagonal and before the
        window. The tile's first query is at position `offset` of the keys."""
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = (q.transpose(0, 1).to(dtype) @ keys_HLd.to(dtype).mT) * how.scale
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh_() * self.softcap
        T, L = scores.shape[-2:]
        rows = torch.arange(offset, offset + T, device=scores.device)[:, None]
        columns = torch.arange(L, device=scores.device)
        unseen = columns > rows
        if how.window is not None:
            unseen |= columns <= rows - how.window
        return scores.masked_fill_(unseen, float("-inf"))


class FlashOnCpu(PerDocument):
    """torch's flash op for CPUs. It needs as many key/value heads as query heads. It supports
    windows only by a mask of (L, L), and no softcap, so layers with these run in `Math`."""

    def document_forward(self, qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        if how.window is not None or self.softcap is not None:
            return Math(self.softcap).document_forward(qkv, how)
        o_BHTd, lse_BHT = aten._scaled_dot_product_flash_attention_for_cpu(
            *_batched(q, _repeat(k, q), _repeat(v, q)), 0.0, not how.after, scale=how.scale
        )
        return o_BHTd[0].transpose(0, 1), lse_BHT[0]

    def document_backward(
        self, do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv
        if how.window is not None or self.softcap is not None:
            return Math(self.softcap).document_backward(do, qkv, o, lse, how)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_batched(do, q, _repeat(k, q), _repeat(v, q), o),
            lse[None],
            0.0,
            not how.after,
            scale=how.scale,
        )
        dk, dv = (_sum_groups(grad[0].to(lse.dtype), k) for grad in (dk, dv))
        return dq[0].transpose(0, 1), dk, dv


class Cudnn(PerDocument):
    """torch's cuDNN attention op. It refuses one query and one key, which run in `Math`, and has no
    windows."""

    def document_forward(self, qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
        if how.window is not None:  # reached only if a row is longer than the model's positions
            raise UserError(NO_WINDOWS)
        q, k, v = qkv
        if 1 in (len(q), len(k)):
            return Math().document_forward(qkv, how)
        o_BHTd, lse_BHT1, *_ = aten._scaled_dot_product_cudnn_attention(
            *_batched(q, k, v), None, True, 0.0, not how.after, scale=how.scale
        )
        return o_BHTd[0].transpose(0, 1), lse_BHT1[0].reshape(q.shape[1], -1)

    def document_backward(
        self, do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv
        n, m = len(q), len(k)
        if 1 in (n, m):
            return Math().document_backward(do, qkv, o, lse, how)
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *_batched(do, q, k, v, o),
            lse[None, :, :, None].contiguous(),
            *(no_dropout, no_dropout, None, None, None, n, m, 0.0, not how.after),
            scale=how.scale,
        )
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


class Efficient(PerDocument):
    """torch's memory-efficient op. It takes heads of any size, and needs as many key/value heads as
    query heads."""

    def document_forward(self, qkv: QKV, how: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        of_heads = _batched(q, _repeat(k, q), _repeat(v, q))
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *of_heads, None, True, is_causal=not how.after, scale=how.scale
        )
        return o[0].transpose(0, 1), lse[0, :, : len(q)]

    def document_backward(
        self, do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        filled = nn.functional.pad(lse, (0, -len(q) % self.ROWS), value=float("inf"))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *_batched(do, q, _repeat(k, q), _repeat(v, q)),
            # It reads o as if its rows were contiguous, whatever their strides.
            *(None, *_batched(o.contiguous()), filled[None].contiguous(), no_dropout, no_dropout),
            *(0.0, [True, True, True, False]),
            is_causal=not how.after,
            scale=how.scale,
        )
        return dq[0].transpose(0, 1), _sum_groups(dk[0], k), _sum_groups(dv[0], v)

    ROWS = 32
    """lse is padded to a multiple of this many rows with infinity."""


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views each (L, H, d) tensor as (1, H, L, d)."""
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _repeat(kv: Tensor, q: Tensor) -> Tensor:
    """Repeats each kv head for the H/K query heads that share it: (L, K, d) -> (L, H, d)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _heads_first(kv: Tensor, q: Tensor) -> Tensor:
    """Repeats kv heads for the query heads and puts heads first: (L, K, d) -> (H, L, d)."""
    return _repeat(kv, q).transpose(0, 1)


def _sum_groups(grad_HLd: Tensor, kv: Tensor) -> Tensor:
    """Sums a kv head's gradient over its query heads: (H, L, d) -> (L, K, d)."""
    K = kv.shape[1]
    return grad_HLd.unflatten(0, (K, -1)).sum(1).transpose(0, 1)


BACKENDS: dict[str, type[Attention]] = {
    "fa4": FlashAttention4,
    "cudnn": Cudnn,
    "flash": Flash,
    "math": Math,
}
