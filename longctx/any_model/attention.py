"""Our attention for the layers of any model that uses transformers' AttentionInterface.

    o, lse     = softmax(scale q k') v          of each document, in the backend's one call
    with sinks   o and lse of the same softmax with one more logit a head, by log-sum-exp

The backends (attention/backends.py) take documents by their bounds: no (S, S) mask exists, which is
17 GB in every layer of a packed or padded row of 131072 tokens with transformers' sdpa. Saved: q,
k, v, o (T, H d) and lse (H, T), while a layer runs; the layer is a checkpoint (seam.py).

Values smaller than keys (DeepSeek's 128 of 192) are padded with zeros. Other attention than causal
self-attention, such as that over images' features, over a cache of keys or in a vision tower, runs
in torch's sdpa as before, and with sinks or a cap of scores in the model's own function.
Importing this module registers the names of `NAMES` with transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from longctx.any_model.masks import Seen, longctx_mask
from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall
from longctx.attention.sinks import Sinks, add_grad_, merge_sinks_
from longctx.errors import UserError

NAMES = {
    "auto": "longctx",
    "fa4": "longctx_fa4",
    "cudnn": "longctx_cudnn",
    "flash": "longctx_fused",  # a name with "flash" means flash-attn's packages to transformers
    "math": "longctx_math",
}
"""Maps values of --attn_backend to transformers' names of our attention."""
_HARMLESS = frozenset(
    "is_causal position_ids use_cache cache_position output_attentions output_hidden_states "
    "output_router_logits num_items_in_batch return_dict layer_idx layer_head_mask head_mask "
    "past_key_values past_key_value cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "sliding_window token_type_ids position_embeddings seq_idx logits_to_keep labels".split()
)
"""Arguments that change nothing in causal self-attention; a window comes with the mask."""


def longctx_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, S, d)
    key: Tensor,  # (B, K, S, d)
    value: Tensor,  # (B, K, S, e)
    attention_mask: Seen | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # (H,)
    *,
    backend: str,
    **options: Any,
) -> tuple[Tensor, None]:  # (B, S, H, e)
    """Returns attention within the documents of a batch; padding gets zeros. Raises UserError for
    arguments that it would have to ignore: dropout, and unknown ones."""
    if not _is_for(attention_mask, query, key):
        given = dict(scaling=scaling, dropout=dropout, **options)
        given |= {n: x for n, x in (("softcap", softcap), ("s_aux", s_aux)) if x is not None}
        return _theirs(module, query, key, value, attention_mask, **given)
    unknown = {
        n for n, x in options.items() if n not in _HARMLESS and x is not None and x is not False
    }
    if dropout:
        unknown.add("dropout")
    if unknown:
        raise UserError(
            f"our attention does not take {', '.join(sorted(unknown))}, which "
            f"{type(module).__name__} asks for: use --attn_backend sdpa or eager"
        )
    rows, heads, length, size = query.shape
    widest = max(size, value.shape[-1])
    seen, scale = attention_mask, size**-0.5 if scaling is None else scaling
    q, k, v = (_flattened(x, widest, seen.kept) for x in (query, key, value))
    chosen = _chosen(backend, q.device, q.dtype, widest, seen.window is not None, softcap)
    o = _Attention.apply(q, k, v, s_aux, chosen, seen.documents, float(scale), seen.window)
    if seen.kept is not None:
        o = o.new_zeros(rows * length, heads, widest).index_copy(0, seen.kept, o)
    return o.view(rows, length, heads, widest)[..., : value.shape[-1]], None


def _is_for(mask: Seen | Tensor | None, query: Tensor, key: Tensor) -> TypeGuard[Seen]:
    """Whether the mask is one of causal self-attention between these queries and keys. transformers
    describes a mask by the cache of the first layer: if that layer keeps no keys (MiniMax), the
    mask of a generated token is that of a row of one token, whatever other layers keep."""
    return isinstance(mask, Seen) and mask.length == query.shape[2] == key.shape[2]


def _theirs(
    module: nn.Module,
    query: Tensor,  # (B, H, S, d)
    key: Tensor,  # (B, K, M, d)
    value: Tensor,  # (B, K, M, e)
    mask: Seen | Tensor | None,
    **given: Any,
) -> Any:
    """Runs torch's sdpa as transformers does, or a model's own function for sinks and caps, which
    sdpa lacks. Raises UserError for a model without one."""
    if not (isinstance(given.get("s_aux"), Tensor) or given.get("softcap")):
        mask = mask.theirs() if isinstance(mask, Seen) else mask
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **given)
    own = vars(inspect.getmodule(type(module))).get("eager_attention_forward")
    if own is None:
        raise UserError(
            f"{type(module).__name__} asks for sinks or a cap of scores beside a mask that is not "
            "causal, which torch's sdpa does not have: use --attn_backend eager"
        )
    mask = mask.dense() if isinstance(mask, Seen) else mask
    if mask is not None and mask.dtype == torch.bool:  # eager functions add the mask to scores
        least = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, least)
    return own(module, query, key, value, mask, **given)


@cache
def _chosen(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    windows: bool,
    softcap: float | None,
) -> Attention:
    options: dict[str, Any] = dict(head_dim=size, windows=windows, softcap=softcap)
    return choose_attention(backend, device, dtype, **options)[1]


def _flattened(x: Tensor, size: int, kept: Tensor | None) -> Tensor:
    """Returns (B, H, S, d) as (T, H, size), without padding."""
    x = x.transpose(1, 2).flatten(0, 1)
    if x.shape[-1] < size:
        x = nn.functional.pad(x, (0, size - x.shape[-1]))
    return x if kept is None else x[kept]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # (T, H, d)
        k: Tensor,  # (T, K, d)
        v: Tensor,  # (T, K, d)
        sinks: Tensor | None,  # (H,)
        attention: Attention,
        documents: Documents,
        scale: float,
        window: int | None,
    ) -> Tensor:  # (T, H, d)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
        attention.forward(AttentionCall(QKV(q, k, v), documents, scale, o, lse, window))
        if sinks is not None:
            merge_sinks_(o, lse, Sinks(sinks))
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.given = attention, documents, scale, window
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        attention, documents, scale, window = ctx.given
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            d_sinks = torch.zeros(sinks.shape, dtype=lse.dtype, device=q.device)
            add_grad_(Sinks(sinks, d_sinks), do, o, lse)
            d_sinks = d_sinks.to(sinks.dtype)
        call = AttentionCall(QKV(q, k, v), documents, scale, o, lse, window)
        grads = attention.backward(do.contiguous(), call)
        return *grads, d_sinks, None, None, None, None


@contextmanager
def counted_calls() -> Iterator[tuple[str, list[bool]]]:
    """Returns a context with transformers' name for our attention in plain torch, and a list that
    gets an entry with each call: whether it was one of causal self-attention."""
    name, calls = "longctx_counted", list[bool]()

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **given: Any
    ) -> Any:
        calls.append(isinstance(attention_mask, Seen))
        return longctx_attention(module, q, k, v, attention_mask, backend="math", **given)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, longctx_mask)
    yield name, calls


def _register() -> None:
    for backend, name in NAMES.items():
        AttentionInterface.register(name, partial(longctx_attention, backend=backend))
        AttentionMaskInterface.register(name, longctx_mask)


_register()
