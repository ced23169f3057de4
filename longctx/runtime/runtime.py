"""What a patched model carries besides its weights, and the schedule it makes of a batch."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longctx.attention.backends import choose_attention
from longctx.attention.copied import Copied, with_copies
from longctx.attention.cross import cross_of
from longctx.attention.documents import Documents
from longctx.attention.images import BothWays, turned
from longctx.attention.padding import Padded
from longctx.attention.prefixes import Prefixed
from longctx.attention.protocol import Attention
from longctx.attention.sharded import Sharded
from longctx.attention.shards import Shards
from longctx.calls.caller import Caller
from longctx.calls.positions import rows_of
from longctx.cost.dims import Adapted, LayerKind
from longctx.cost.fitted import GRAPHED_TOKENS
from longctx.cost.kept import describe, run_again, uniform
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.sizes import Batch, Cut, Sizes, default_head_groups, default_tile_tokens, kinds_of
from longctx.errors import UserError
from longctx.families.adapters import Applied
from longctx.families.families import (
    base_of,
    embedding_of,
    has_post_norms,
    has_windows,
    head_of,
    layer_adapters,
    layer_norm_spec,
    layer_specs,
    layer_weights,
    layers_of,
    mixes,
    query_scale,
    rotary_embeddings,
    rotary_of,
    score_cap,
    windows,
)
from longctx.families.family import Layer, mlp_width
from longctx.families.look import look, whole_shape
from longctx.families.strangers import gathers_weights, why_not_chunked
from longctx.layer.dense_experts import by_chunks
from longctx.layer.packed_weights import packed_state
from longctx.layer.passes import Rope, Schedule
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.layer.specs.part_spec import head_dim, kv_heads
from longctx.layer.weights import MIXER
from longctx.memory.ladder import Budget, Chosen, Step, choose, host_bytes
from longctx.memory.levels import pending_levels
from longctx.memory.place import usable_bytes
from longctx.memory.rates import gpu_rates
from longctx.memory.store import ActivationStore, free_gpu_bytes
from longctx.mixers.mixers import all_pack
from longctx.runtime.costs import StepTable
from longctx.runtime.surroundings import Surroundings
from longctx.settings import PatchOptions, scored_tokens

logger = logging.getLogger("longctx")
NO_RATES = Rates(1.0, 1.0, 1.0, AttentionRates(1.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What batches are computed with, until the model is moved or cast."""

    attention: Attention
    backend: str
    """The name of the attention."""
    store: ActivationStore
    dtype: torch.dtype
    """Dtype of the activations. FSDP2 later turns the weights, and `model.dtype`, into fp32."""
    stream_dtype: torch.dtype | None = None
    """Dtype of the residual stream, known after the first batch: fp32 in autocast."""

    @classmethod
    def of(
        cls, args: PatchOptions, config: Any, device: torch.device, dtype: torch.dtype
    ) -> Computation:
        """Chooses the attention for a model on a device. Raises UserError for a backend that cannot
        run there."""
        name, attention = choose_attention(
            args.attn_backend,
            device,
            dtype,
            head_dim=head_dim(config),
            windows=has_windows(config),
            softcap=score_cap(config),
        )
        store = ActivationStore(device, args.host_memory_gib)
        return cls(attention=attention, backend=name, store=store, dtype=dtype)

    @classmethod
    def later(cls, args: PatchOptions, backend: str) -> Computation:
        """Returns a placeholder whose dtype no model has, so that the first batch chooses."""
        cpu, dtype = torch.device("cpu"), torch.float64
        _, attention = choose_attention("math", cpu, dtype)
        store = ActivationStore(cpu, args.host_memory_gib)
        return cls(attention=attention, backend=backend, store=store, dtype=dtype)

    def follow(self, args: PatchOptions, config: Any, x: Tensor, dtype: torch.dtype) -> Computation:
        """Returns what computes a batch whose embedded tokens are x, with matmuls in `dtype`."""
        if dtype == self.dtype and _is_on(x, self.store.device):
            return self if x.dtype == self.stream_dtype else replace(self, stream_dtype=x.dtype)
        made = replace(self.of(args, config, x.device, dtype), stream_dtype=x.dtype)
        logger.info(f"the model is on {x.device} in {dtype} now: {made.backend} attention")
        return replace(made, store=self.store) if _is_on(x, self.store.device) else made


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What was decided for batches of up to so many tokens. The default decides nothing."""

    tokens: int = 0
    """Tokens of the longest batch that the store has room for."""
    cut: Cut | None = None
    """The cut of batches up to that length; None: the default cut of each length."""
    host_room: int = 0
    """Host bytes that the store may take."""
    graphed: bool = False
    """Whether layers may run as CUDA graphs: there is room for what these take."""
    no_graphs: str = ""
    """Why they may not, if short batches were to; reported with the first one."""


@dataclass(kw_only=True)
class Runtime:
    """The attribute `longctx` of a patched model: no module and no buffer, so that nothing of it
    reaches the state dict. Three parts of it are frozen, and exchanged as a whole by methods; the
    rest changes from batch to batch."""

    args: PatchOptions
    compute: Computation
    around: Surroundings = field(default_factory=Surroundings)
    adopted: Adopted = field(default_factory=Adopted)
    graphs: Any = None
    """The layers that were recorded (graphs.py), with what was adopted."""
    attach: Callable[[Any], None] = field(default_factory=lambda: _not_attached)
    """Puts our forwards into modules of a model that were exchanged since (forwards/attach.py)."""
    whole: weakref.ref[Any] | None = None
    """The model whose base model this is the runtime of."""
    warned: set[str] = field(default_factory=set)
    """Warnings already given about calls that Hugging Face's code runs."""
    caller: Caller | None = None
    """Who calls, of a call with images, which Hugging Face's code hands on."""
    images: str | None = None
    """Why Hugging Face's layers run the images of the call under way, as a short reason."""
    settled: bool = False
    """Whether nothing can have changed the model since its last batch, as a trainer knows."""
    waiting: list[Callable[[], bool]] = field(default_factory=list)
    """What waits for the model to be called (`at_next_pass`)."""

    @classmethod
    def make(
        cls, args: PatchOptions, config: Any, device: torch.device, dtype: torch.dtype
    ) -> Runtime:
        """Returns a model's runtime. On meta the first batch chooses the attention. Raises
        UserError for a backend that cannot run."""
        if device.type == "meta" or not args.schedules:
            return cls(args=args, compute=Computation.later(args, args.attn_backend))
        return cls(args=args, compute=Computation.of(args, config, device, dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Saved and copied with the model; memory, streams and an engine's word are made anew."""
        kept = ("label_smoothing", "passes", "strict")
        around = {name: getattr(self.around, name) for name in kept}
        return _remake, (self.args, around, self.attach)

    # --- what others tell ------------------------------------------------------------------

    def surround(self, **facts: Any) -> None:
        """Tells what an engine or a trainer knows, by the names of `Surroundings`."""
        self.around = replace(self.around, **facts)

    def attached(self, attach: Callable[[Any], None], whole: Any | None) -> None:
        """Tells how our forwards were put into the model, and into which one around it."""
        self.attach = attach
        if whole is not None:
            self.whole = weakref.ref(whole)

    @contextmanager
    def handing(self, caller: Caller | None, images: str | None = None) -> Iterator[None]:
        """Within, the base model hears what Hugging Face's code around it does not hand on: who
        calls, and why Hugging Face's layers are to run, if they are."""
        self.caller, self.images = caller, images
        try:
            yield
        finally:
            self.caller = self.images = None

    @contextmanager
    def settling(self, holds: bool) -> Iterator[None]:
        """Within, the model is what it was in its last batch, if that `holds`."""
        self.settled = holds
        try:
            yield
        finally:
            self.settled = False

    def at_next_pass(self, action: Callable[[], bool]) -> None:
        """Has `action` called in forward passes until it returns True; those that were given before
        wait for that."""
        self.waiting.insert(0, action)

    def begin_pass(self) -> None:
        """Calls what waits for the model to be called."""
        while self.waiting and self.waiting[0]():
            del self.waiting[0]

    # --- what a batch is computed with ---------------------------------------------------------

    @property
    def attention(self) -> Attention:
        return self.compute.attention

    @property
    def backend(self) -> str:
        return self.compute.backend

    @property
    def store(self) -> ActivationStore:
        return self.compute.store

    @property
    def dtype(self) -> torch.dtype:
        return self.compute.dtype

    @property
    def shards(self) -> Shards | None:
        return self.around.shards

    @property
    def ranks(self) -> int:
        """Returns how many ranks share each row."""
        return self.shards.ranks if self.shards else 1

    def follow(self, x: Tensor, dtype: torch.dtype, config: Any) -> None:
        """The model was moved or cast since it was patched, or runs in autocast: so do backend and
        store. `x` is the embedding's output, `dtype` that of products."""
        before, self.compute = self.compute, self.compute.follow(self.args, config, x, dtype)
        if self.compute.attention is not before.attention:
            self.forget()

    # --- what is decided -----------------------------------------------------------------------

    def forget(self) -> None:
        """Has the next batch decide anew."""
        self.adopted, self.graphs = Adopted(), None

    def reserve(self, model: Any, tokens: int, host_room: int | None = None) -> bool:
        """Makes room for the activations of `tokens` tokens, once per longest batch so far; whether
        it did. `host_room`: bytes that it may take of the host (default: its share of what is
        free)."""
        if tokens <= self.adopted.tokens:
            return False
        sizes, pending = self.sizes(model), self.around.pending_bytes(model)
        on_gpu = self.store.device.type == "cuda"
        free_bytes = usable_bytes(free_gpu_bytes(self.store.device)) if on_gpu else 0
        room = self.store.host_bytes() if host_room is None else host_room
        step = replace(self.step(sizes, tokens), again=self.can_run_again(model))
        levels = pending_levels(sizes.layers, *pending, accumulates=self.around.passes > 1)
        chosen = choose(step, [levels], Budget(free_bytes, room))
        self.adopt(chosen, tokens, room)
        self.store.reserve(chosen.ladder, host_bytes(step, chosen), room)
        return True

    def adopt(self, chosen: Chosen, tokens: int, host_room: int = 0) -> None:
        """Batches of up to `tokens` tokens run as chosen: their cut, and CUDA graphs or none."""
        no_graphs = chosen.no_graphs
        if self._are_short(tokens):
            no_graphs = self._why_not_recorded() or no_graphs
        self.graphs, self.adopted = (
            None,
            Adopted(
                tokens=tokens,
                cut=chosen.sizes.cut(tokens),
                host_room=host_room,
                graphed=chosen.graph_bytes > 0,
                no_graphs=no_graphs,
            ),
        )

    def _are_short(self, tokens: int) -> bool:
        """Whether batches of so many tokens are to run as CUDA graphs (graphs.py)."""
        on_gpu = self.store.device.type == "cuda"
        return on_gpu and self.args.cuda_graphs == "auto" and tokens <= GRAPHED_TOKENS

    def _why_not_recorded(self) -> str | None:
        """Returns why no layer of this process may be recorded."""
        if self.around.moves_weights:
            return "the engine moves each layer's weights"
        if dist.is_initialized() and dist.get_world_size() > 1:
            return "several processes train the model"
        return self.around.eager_images or None

    def can_run_again(self, model: Any) -> bool:
        """Whether layers may run forward again in backward: no other rank takes part in a layer,
        and no engine gathers its weights for a call."""
        if self.around.moves_weights or self.shards is not None:
            return False
        base: Any = base_of(model)
        return not any(map(gathers_weights, base.layers))

    def step(self, sizes: Sizes, tokens: int) -> Step:
        """What the ladder and the cut of batches of `tokens` tokens are chosen for. Where nothing
        is copied over a link there is nothing to weigh: it is all one memory."""
        device, document = self.store.device, min(tokens, self.args.seq_len or tokens)
        keep, offload = self.args.keep, self.args.offload_activations
        batch = Batch(tokens, document, self.around.passes, scored_tokens(self.around.task, tokens))
        given, rates = None, NO_RATES
        if device.type == "cuda":
            how = self.dtype, self.backend, document, *sizes.scores
            rates = gpu_rates(device, *how, link_bytes=self.around.link_bytes)
        else:
            cut = next(iter(sizes.cuts(tokens)))
            given = uniform(StepTable.of(cut, batch).layers, keep, offload), cut
        return Step(
            count=StepTable.of,
            sizes=sizes,
            batch=batch,
            rates=rates,
            keep=keep,
            offload=offload,
            given=given,
            beside_bytes=self.around.image_bytes,
            graphs=self._are_short(tokens) and self._why_not_recorded() is None,
        )

    def pieces(self, tokens: int, config: Any) -> tuple[int, int]:
        """Tokens of a tile, and head groups, of one batch."""
        tile_tokens = self.args.tile_tokens or default_tile_tokens(
            mlp_width(config), has_post_norms(config)
        )
        groups = self.args.head_groups or default_head_groups(tokens, kv_heads(config), self.ranks)
        cut = self.adopted.cut
        if cut is None or tokens > self.adopted.tokens:
            return tile_tokens, groups
        return cut.tile_tokens, min(cut.head_groups, groups)

    def describe(self, vocab: int) -> str:
        """Returns a line: what is kept for backward, and where; how the work on the longest batch
        is cut."""
        said = describe(self.store.ladder, on_gpu=self.store.device.type == "cuda")
        if self.adopted.cut is None:
            return said
        return f"{said}; {self.adopted.cut.of(self.adopted.tokens, vocab)}"

    def sizes(self, model: Any) -> Sizes:
        """The model's dimensions, in the dtype of the activations."""
        sizes = model_sizes(model, self.args, self.dtype, self.compute.stream_dtype)
        writes = self.attention.writes_gradients and self.shards is None
        fuses = self.attention.fuses_sinks
        return replace(sizes, ranks=self.ranks, writes_gradients=writes, fuses_sinks=fuses)


def model_sizes(
    model: Any,
    args: PatchOptions,
    dtype: torch.dtype,
    stream_dtype: torch.dtype | None = None,
) -> Sizes:
    """The dimensions of a model that the schedule knows, patched or not."""
    base, head = base_of(model), head_of(model)
    assert base is not None
    config = base.config
    return Sizes(
        **kinds_of(_kind(*layer, dtype.itemsize) for layer in layers_of(base)),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        itemsize=dtype.itemsize,
        stream_itemsize=(stream_dtype or dtype).itemsize,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        trains_head=head is None or any(p.requires_grad for p in head.parameters()),
        tied=look(head, "weight", None) is look(embedding_of(base), "weight"),
        tile_tokens=args.tile_tokens,
        head_groups=args.head_groups,
        chunks_loss=chunks_loss(model),
    )


def _kind(layer: Any, spec: Layer, itemsize: int) -> LayerKind:
    """Returns the kind of a layer, in the dtype of the activations."""
    named = layer_weights(layer, spec, look)
    inside = {name: x for name, x in named.items() if name.startswith(f"{MIXER}.")}
    shapes = {name: whole_shape(x) for name, x in inside.items()}
    trained = [name for name, x in inside.items() if x.requires_grad]
    weights = [x for name, x in named.items() if name not in inside]
    adapters = layer_adapters(layer, spec, look).values()
    packed = {n: state for n, w in named.items() if (state := packed_state(w)) is not None}
    apart = by_chunks(named)
    experts, mixes = spec.part(ExpertsSpec), spec.part(MixerSpec)

    def times(x: Applied) -> float:
        """Returns how often a token meets an adapter."""
        return experts.chosen if experts and x.experts > 1 else x.share

    return LayerKind(
        parts=spec.parts,
        mixed=mixes.sizes(shapes, trained, itemsize) if mixes else None,
        trains_weights=any(x.requires_grad and x.dim() > 1 for x in weights),
        dense_bytes=sum(math.prod(x.shape) * itemsize for n, x in packed.items() if n not in apart),
        dense_stacks=tuple(apart.values()),
        rank=max((x.rank for x in adapters), default=0),
        drops=any(x.dropout for x in adapters),
        adapted=Adapted(
            inputs=sum(times(x) * x.inputs for x in adapters),
            outputs=sum(times(x) * x.outputs for x in adapters),
            parameters=sum(times(x) * x.rank * (x.inputs + x.outputs) for x in adapters),
            rescaled=sum(times(x) * x.rescaled for x in adapters),
        ),
    )


def chunks_loss(model: Any) -> bool:
    """Whether our loss runs; else a step holds all logits. Other heads than lm_head are small."""
    if head_of(model) is None:
        return True
    runtime = runtime_of(model)
    asked = runtime is None or runtime.args.fuses_loss
    return asked and why_not_chunked(model) is None


def _remake(args: PatchOptions, around: dict[str, Any], attach: Callable[[Any], None]) -> Runtime:
    """Returns the runtime of a copy, which its first batch places."""
    compute = Computation.later(args, "math")
    return Runtime(args=args, compute=compute, around=Surroundings(**around), attach=attach)


def _is_on(x: Tensor, device: torch.device) -> bool:
    return x.device.type == device.type and device.index in (None, x.device.index)


def _not_attached(model: Any) -> None:
    """There are no forwards of ours yet."""


def runtime_of(model: Any) -> Runtime | None:
    """Returns what `patch` attached to this model; None if it runs as Hugging Face made it."""
    return vars(model).get("longctx")


def patched_part(model: nn.Module) -> Any | None:
    """The patched model, itself or inside what adapters or engines wrapped around it."""
    return next((part for part in model.modules() if runtime_of(part)), None)


def make_schedule(
    base: Any,
    runtime: Runtime,
    position_ids: Tensor,  # (T,) or (3, T)
    documents: Documents,
    rows: int,
    **more: Any,
) -> Schedule:
    """Returns what the layers share for this batch; `more` are further fields of `Schedule`, such
    as those of routers. Raises UserError for head groups that do not divide the key/value heads,
    and heads that the ranks of a row cannot share."""
    config, heads = base.config, kv_heads(base.config)
    tile_tokens, head_groups = runtime.pieces(position_ids.shape[-1], config)
    if heads % head_groups:
        raise UserError(
            f"--head_groups {head_groups} must divide the model's {heads} key/value heads"
        )
    if runtime.shards is not None and any(run_again(runtime.store.ladder)):
        raise UserError("ranks that share rows must keep every layer's input: set --keep x")
    attention = runtime.attention
    if documents.keys is not None:
        attention = Copied(attention)
    elif documents.parents:
        attention = Prefixed(attention, cross_of(attention))
    if documents.images:
        found = turned(documents.images, documents.cu_seqlens.device)
        attention = BothWays(attention, runtime.attention, tuple(found))
    if documents.padding:
        attention = Padded(attention, cross_of(attention))
    if runtime.shards is not None:
        if mixes(config):
            raise UserError(NO_SHARES)
        check_shares(config.num_attention_heads, heads, head_groups, runtime.shards.ranks)
        attention = Sharded(attention, runtime.shards, rows)
    return Schedule(
        layers=layer_specs(config),
        documents=documents,
        position_ids=position_ids,
        ropes=_ropes(base, by_rows=position_ids.dim() > 1),
        query_scale=query_scale(base, position_ids),
        head_dim=head_dim(config),
        norm=layer_norm_spec(base),
        attention=attention,
        store=runtime.store,
        tile_tokens=tile_tokens,
        packs=all_pack(base),
        **more,
        head_groups=head_groups,
        dtype=runtime.dtype,
    )


def copied_keys(base: Any, runtime: Runtime, documents: Documents) -> Documents:
    """Returns the documents with the places of their keys, if keys are to be copied."""
    groups = runtime.pieces(documents.tokens, base.config)[1]
    of_a_group = 2 * kv_heads(base.config) * head_dim(base.config) // groups
    return with_copies(
        documents,
        runtime.attention,
        windows=windows(base.config),
        key_bytes=of_a_group * runtime.dtype.itemsize,
    )


def _ropes(base: Any, by_rows: bool) -> dict[str, Rope]:
    """The rotary embeddings of a model, by the names in `AttentionSpec.rope`."""
    found = {}
    for name, (inv_freq, scaling) in rotary_embeddings(base).items():
        inv_freq = inv_freq.to(torch.float32, copy=follows_positions(base))
        rows = rows_of(base.rotary_emb, inv_freq) if by_rows else None
        found[name] = Rope(inv_freq, scaling, rows)
    return found


def follows_positions(base: Any) -> bool:
    """Whether RoPE's frequencies depend on the batch, and are overwritten by the next forward,
    which may come before this backward (transformers' dynamic_rope_update)."""
    kinds = getattr(rotary_of(base), "rope_type", "default")
    every = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in kind or kind == "longrope" for kind in every)


NO_SHARES = (
    "ranks cannot share rows of a model with mixers, which hand a state on from token to token: "
    "set --sequence_parallel_size 1"
)


def check_shares(heads: int, kv_heads: int, groups: int, ranks: int) -> None:
    kv_share = kv_heads // groups
    if heads // groups % ranks or kv_share % ranks and ranks % kv_share:
        raise UserError(
            f"{ranks} ranks cannot share a head group of {heads // groups} query and {kv_share} "
            f"key/value heads: the model has {heads} and {kv_heads}, --head_groups {groups}"
        )
