"""Hugging Face's layers at their best: the settings with which peers stand in our tables.

    attention       `fa4`: flash-attn-4 by documents. Their bounds are read from position_ids once a
                    step, and the longest is an int: transformers 5.17 would read them in every
                    layer and hand a tensor over. Other backends are transformers' own.
    checkpointing   none       a layer keeps all that its backward needs
                    layers     it keeps its input and runs again in backward
                    selective  it keeps its input and attention's output; the rest runs again
    offload         what layers keep waits in page-locked host memory: copied out beside the
                    computation, back while the layer above runs backward

Kept per layer, in units of T*D*2 bytes (bf16): `layers` 1, `selective` 2 (and lse, 4*T*H bytes).
`selective` is TRL 1.16's and axolotl's: a policy for torch's `create_selective_checkpoint_contexts`
that saves what attention returns. Such policies see operators of torch, which flash-attn-4's
functions are not, so it is wrapped into one here.

Offloading is TRL's and torchtune's `OffloadActivations` (its own stream; GPU tensors held until
their copies are done), by layers: the copies back begin one layer ahead, what the last two layers
keep stays on the GPU, and a tensor that a layer saves twice is copied once. With `selective`, what
attention returns lives in torch's cache of saved outputs, which hooks of saved tensors never see:
`Keep` and `Take` are that cache with the host in between.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, AttentionCall
from longctx.families.adapters import inside_peft

OURS = ("custom", "any")
"""Class types that are no peers."""
CHECKPOINTING = ("none", "layers", "selective")
FA4_BY_DOCUMENTS = "fa4_by_documents"
"""transformers' name of the attention here."""
LEAST_BYTES = 1024
"""Of a tensor that is offloaded, as in TRL: a smaller one is not worth a copy."""


def settled(case: dict[str, Any]) -> dict[str, Any]:
    """The case with a peer's settings spelled out, for its row: Hugging Face's checkpointing is
    the default. Exits with a line for an unknown one, and for `custom` and `any` with any."""
    checkpointing = case["checkpointing"]
    if case["class_type"] in OURS:
        if checkpointing is not None:
            sys.exit(f"error: checkpointing= is for peers: {case['class_type']} has its own")
        return case
    checkpointing = checkpointing or "layers"
    if checkpointing not in CHECKPOINTING:
        sys.exit(f"error: checkpointing={checkpointing}: one of {', '.join(CHECKPOINTING)}")
    return {**case, "checkpointing": checkpointing}


def prepare_peer(model: PreTrainedModel, case: dict[str, Any]) -> None:
    """Gives a model of Hugging Face's layers the settings of its `settled` case, under adapters
    too."""
    if case["class_type"] in OURS:
        return
    model = inside_peft(model)
    model.config.use_cache = False  # a cache would copy every layer's keys and values
    if case["backend"] == "fa4":
        attend_by_documents(model)
    keep(model, case["checkpointing"], case["offload"] != "none")


# --- attention -------------------------------------------------------------------------------


@torch.library.custom_op("peers::flash_attn", mutates_args=(), device_types="cuda")
def flash_attn(
    q: Tensor,  # (T, H, d)
    k: Tensor,  # (T, K, d)
    v: Tensor,  # (T, K, d)
    bounds: Tensor,  # (documents + 1,) int32
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # o (T, H, d), lse
    """flash-attn-4, causal by documents, to the `window` tokens before. TRL's policy finds it by
    its name, too."""
    from flash_attn.cute.interface import _flash_attn_fwd

    where = _options(bounds, longest, window)
    o, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **where)
    return o, lse


@torch.library.custom_op("peers::flash_attn_backward", mutates_args=(), device_types="cuda")
def flash_attn_backward(
    do: Tensor,  # (T, H, d)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # dq, dk, dv
    from flash_attn.cute.interface import _flash_attn_bwd

    options = dict(softmax_scale=scale, **_options(bounds, longest, window))
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, o, do, lse, **options)
    return dq, dk, dv


def _options(bounds: Tensor, longest: int, window: int | None) -> dict[str, Any]:
    return dict(
        causal=True,
        window_size_left=None if window is None else window - 1,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )


@flash_attn.register_kernel("cpu")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    documents, attention = _on_cpu(q, bounds)
    o, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    attention.forward(AttentionCall(QKV(q, k, v), documents, scale, o, lse, window))
    return o, lse


@flash_attn_backward.register_kernel("cpu")
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    documents, attention = _on_cpu(q, bounds)
    call = AttentionCall(QKV(q, k, v), documents, scale, o, lse, window)
    return tuple(attention.backward(do, call))


def _on_cpu(q: Tensor, bounds: Tensor) -> tuple[Documents, Any]:
    documents = Documents.of(bounds.diff().tolist(), device=q.device)
    return documents, choose_attention("auto", q.device, q.dtype)[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale, ctx.window = inputs  # q, k, v, bounds
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, o, lse = ctx.saved_tensors
    how = ctx.longest, ctx.scale, ctx.window
    return *flash_attn_backward(do, q, k, v, o, lse, bounds, *how), None, None, None, None


flash_attn.register_autograd(_differentiate, setup_context=_save)


def document_attention(
    module: Any,
    query: Tensor,  # (B, H, S, d)
    key: Tensor,  # (B, K, S, d)
    value: Tensor,  # (B, K, S, d)
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,  # (documents + 1,) of the B*S tokens
    max_length_q: int,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (B, S, H, d)
    """As transformers calls an attention; the names of the bounds are its own, TRL's collator
    gives them. Under autocast RoPE returns fp32."""
    batch = query.shape[0]
    longer = sliding_window is not None and sliding_window < max_length_q
    window = sliding_window if longer else None
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
    o, _ = flash_attn(q, k, v, cu_seq_lens_q, max_length_q, scaling, window)
    return o.unflatten(0, (batch, -1)), None


def attend_by_documents(model: PreTrainedModel) -> None:
    """flash-attn-4 in every layer, over bounds that the model reads once a forward pass, unless
    the collator made them."""

    def with_bounds(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "max_length_q" in kwargs:
            return args, kwargs
        documents = Documents.from_position_ids(kwargs["position_ids"])
        bounds, longest = documents.cu_seqlens, max(documents.lengths)
        return args, {**kwargs, "cu_seq_lens_q": bounds, "max_length_q": longest}

    AttentionInterface.register(FA4_BY_DOCUMENTS, document_attention)
    model.set_attn_implementation(FA4_BY_DOCUMENTS)
    model.base_model.register_forward_pre_hook(with_bounds, with_kwargs=True)


# --- what layers keep ------------------------------------------------------------------------


def keep(model: PreTrainedModel, checkpointing: str, offload: bool) -> None:
    """Sets what the decoder layers keep for backward, and where it waits."""
    host = Host(model) if offload else None

    def run_layer(function: Callable[..., Any], *args: Any) -> Any:
        kept = host.next_layer() if host else None
        hooks = saved_tensors_hooks(kept.pack, _unpack) if kept else nullcontext()
        with hooks:
            if checkpointing == "none":
                return function(*args)
            options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)
            if checkpointing == "selective":
                options["context_fn"] = partial(selective_contexts, kept)
            return checkpoint(function, *args, **options)

    for layer in model.base_model.layers:  # transformers' GradientCheckpointingLayer
        layer.gradient_checkpointing = checkpointing != "none" or offload
        layer._gradient_checkpointing_func = run_layer


def attention_ops() -> list[Any]:
    """The operators whose outputs `selective` keeps: ours, and those behind `sdpa`."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    return [
        torch.ops.peers.flash_attn.default,
        *(getattr(torch.ops.aten, name).default for name in names),
    ]


def selective_contexts(
    kept: Kept | None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a layer's forward pass and of its second one."""
    ops = attention_ops()
    if kept is None:
        return create_selective_checkpoint_contexts(ops)
    outputs: deque[Any] = deque()
    return Keep(ops, outputs, kept), Take(ops, outputs)


class Keep(TorchDispatchMode):
    """Puts what these operators return on the host."""

    def __init__(self, ops: list[Any], outputs: deque[Any], kept: Kept) -> None:
        super().__init__()
        self.ops, self.outputs, self.kept = ops, outputs, kept

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if op in self.ops:
            self.outputs.append(tree_map_only(Tensor, self.kept.pack, output))
        return output


class Take(TorchDispatchMode):
    """Returns it, in the same order, instead of running them again."""

    def __init__(self, ops: list[Any], outputs: deque[Any]) -> None:
        super().__init__()
        self.ops, self.outputs = ops, outputs

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in self.ops:
            return tree_map(_unpack, self.outputs.popleft())
        return op(*args, **(kwargs or {}))


def _unpack(packed: Any) -> Any:
    """A tensor that was packed; what is no tensor (an operator's integers) as it is."""
    return packed() if callable(packed) else packed


class Host:
    """The layers of a forward pass whose tensors wait in host memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stream = torch.cuda.Stream() if model.device.type == "cuda" else None
        self.newest: Kept | None = None
        self.weights: set[int] = set()
        self.copied_bytes = 0
        """Since the beginning."""

    def next_layer(self) -> Kept:
        if self.newest:
            if self.newest.before:
                self.newest.before.leave_gpu()
        else:  # of a forward pass the first; an engine may have moved the weights
            parameters = self.model.parameters()
            self.weights = {p.untyped_storage().data_ptr() for p in parameters}
        self.newest = Kept(self, before=self.newest)
        return self.newest


class Kept:
    """What one layer keeps. Its tensors are on the GPU until the next layer ends, then on the
    host, and again on the GPU from when the backward pass of the layer above begins: at most two
    layers' at any time.

    No copy waits for the host, and none overwrites what is in use: those out end before the
    computation's stream goes on to reuse their tensors' memory (`leave_gpu`), and those back lie
    in memory of the copying stream, which first waits for all that was computed so far (`load`).
    """

    def __init__(self, host: Host, before: Kept | None) -> None:
        self.host, self.before = host, before
        self.on_host: list[Tensor] = []
        self.on_gpu: list[Tensor] | None = []
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.copied: Any = None  # the event after the newest copy

    def pack(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts the copy of `x` to the host; what is returned brings it back."""
        x = x.detach()  # or an output that is saved would hold on to itself
        is_weight = x.untyped_storage().data_ptr() in self.host.weights
        if is_weight or x.nbytes < LEAST_BYTES:
            return lambda: x
        key = (x.data_ptr(), x.dtype, x.shape, x.stride())  # q, k and v projections share an input
        if key not in self.numbers:
            self.numbers[key] = len(self.on_host)
            self._copy_out(x)
        return partial(self._get, self.numbers[key])

    def _copy_out(self, x: Tensor) -> None:
        assert self.on_gpu is not None, "a layer keeps nothing more once the next one has begun"
        self.on_gpu.append(x)
        self.host.copied_bytes += x.nbytes
        if not x.is_cuda:
            self.on_host.append(x.clone())
            return
        stream = self.host.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            there = torch.empty_like(x, device="cpu", pin_memory=True)
            self.on_host.append(there.copy_(x, non_blocking=True))
            self.copied = stream.record_event()

    def leave_gpu(self) -> None:
        self._wait_for_copies()
        self.on_gpu = None

    def load(self) -> None:
        """Starts the copies back, after what is queued now."""
        if self.on_gpu is not None:
            return
        stream = self.host.stream
        if stream is None:
            self.on_gpu = [x.clone() for x in self.on_host]
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.on_gpu = [x.to("cuda", non_blocking=True) for x in self.on_host]
            self.copied = stream.record_event()

    def _get(self, number: int) -> Tensor:
        self.host.newest = None  # the forward pass is over
        self.load()
        self._wait_for_copies()
        before, self.before = self.before, None
        if before:
            before.load()
        assert self.on_gpu is not None
        return self.on_gpu[number]

    def _wait_for_copies(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
