"""CUDA graphs of the layers: short batches without Python and launches between kernels.

A layer of Llama-3.1-8B over NF4 with adapters has hundreds of kernels, forward and backward. Python
takes 16 ms to launch them; at 2048 tokens their work takes 5 ms of an H100. So where a batch has
the shape of the one before, the layers and the final norm are recorded, forward and backward, and
from then on replayed. Kernels, their arguments and their order are those of the eager pass, and so
are the bits.

    x, positions, bounds  -> copied to fixed places -> replay -> hidden states, copied
    their gradient        -> copied to its place    -> replay -> gradients of x and weights, copied

What surrounds them stays as it is: embedding, lm_head and loss, autograd's accumulation of
gradients with all hooks, the optimizer. Nobody sees a tensor that the next replay overwrites.

Where documents begin is data: bounds fill a place for so many documents, the rest of which are
empty. Windows that are longer than every document are left out, as the schedule does, so that a
batch in which other windows count has another key. Attention that loops over documents on the host
has a graph for given lengths, and so have mixers in rows that packed documents need much room for
(layer/row_documents.py). Where documents continue others, there is room for so many copies of keys
(attention/copied.py); what does not copy them runs eagerly, and so do mixers.

A mixer is recorded as it runs: its module's own forward, and in backward once more with a graph of
autograd's, whose nodes are recorded as all others.

A replay starts before anybody has looked whether the model is still what was recorded (its
modules, adapters, weights, settings): that takes Python, and the GPU computes meanwhile.
If something has changed, the result is dropped, and the batch runs eagerly. Weights that were
recorded are held, so that what is read there is memory of theirs at any time.

A graph has its activations, at most those of an eager pass, in a pool of its own, which all graphs
of a model share; beside them there is one more copy of the layers' gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.copied import MOST_BYTES
from longctx.attention.documents import Documents, Keys
from longctx.constants import GIB
from longctx.errors import print_rank0
from longctx.families.families import final_norm_of, final_norm_spec, mixes
from longctx.families.strangers import why_not_scheduled
from longctx.kernels.launch import once_differentiable
from longctx.layer import segments as cutting
from longctx.layer.parts.norms import final_norm
from longctx.layer.passes import Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.layer.segments import Segment
from longctx.memory.store import free_gpu_bytes
from longctx.mixers.mixers import all_pack
from longctx.runtime.recorded import GraphKey, Read, hooks_of_others, room_for
from longctx.runtime.runtime import Runtime, follows_positions, make_schedule

MOST_GRAPHS = 4
"""Graphs of a model; the one that was used longest ago goes first."""
PATIENCE = 10
"""After as many recordings each must have served as many batches."""
TWICE = (
    "backward ran twice through longctx's layers: what they keep is overwritten as it is used "
    "(retain_graph is not supported)"
)


_APART = (
    f"no CUDA graphs for batches in which copies of prompts' keys would have more than "
    f"{MOST_BYTES >> 20} MiB, or a window counts"
)


_OTHER_DOCUMENTS = (
    "no CUDA graphs for batches whose documents have other lengths than those of the batch before: "
    "attention with some backends is called document by document, and so are mixers of rows with "
    "many short documents or more than 16384 tokens"
)


class Recording:
    """Forward and backward on the GPU, recorded as CUDA graphs."""

    def __init__(
        self,
        forward: Callable[[], Tensor],
        backward: Callable[[Tensor], list[Tensor | None]],
        pool: Any,
    ) -> None:
        # The threads that load data may allocate meanwhile: their calls are none of ours.
        how = dict(pool=pool, capture_error_mode="thread_local")
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, **how):
            hidden = forward()
        with torch.cuda.graph(self._backward, **how):
            self.grads = backward(hidden)
        self.hidden = hidden.detach()

    def replay_forward(self) -> None:
        self._forward.replay()

    def replay_backward(self) -> None:
        self._backward.replay()


class Room(NamedTuple):
    """What a graph has room for, so that it serves batches of other documents and prompts."""

    documents: int
    keys: int
    """Copied keys, a multiple of the batch's tokens."""

    @classmethod
    def of(cls, documents: Documents) -> Room:
        keys = documents.keys
        return cls(
            room_for(documents), 0 if keys is None else _rounded(len(keys.tokens), len(keys.places))
        )

    def with_that_of(self, others: Iterable[Graph]) -> Room:
        """Returns room for what this and others have room for: else graphs for many documents and
        for many keys would replace each other for ever."""
        rooms = [self, *(graph.room for graph in others)]
        return Room(*map(max, *rooms)) if len(rooms) > 1 else self

    def holds(self, documents: Documents) -> bool:
        keys = documents.keys
        copies = 0 if keys is None else len(keys.tokens)
        return len(documents.lengths) <= self.documents and copies <= self.keys


def _rounded(count: int, unit: int) -> int:
    return -(-count // max(1, unit)) * max(1, unit)


class Replay:
    """One replay of a forward, until its backward. The autograd graph alone holds it."""

    over = False


class Graph:
    """The layers of a model for batches of one key."""

    recording: type[Recording] = Recording

    def __init__(
        self,
        base: Any,
        runtime: Runtime,
        key: GraphKey,
        x: Tensor,  # (T, D)
        rope: Tensor,  # (T,) or (3, T)
        documents: Documents,
        pool: Any,
        room: Room,
    ) -> None:
        self.key, self.read, self.room = key, Read.of(base), room
        self._x, self._rope = torch.empty_like(x), torch.empty_like(rope)
        self._bounds = documents.cu_seqlens.new_empty(room.documents + 1)
        self._keys = documents.keys and self._empty_keys(documents.keys)
        self._dy = torch.empty_like(x, dtype=self._hidden_dtype(base, x))
        self._fill(x.detach(), rope, documents)
        tensors, self._facts = [*self.read.tensors()], self.read.facts()
        self._pointers = [(x, x.data_ptr()) for x in tensors]
        self.trained = [*{id(x): x for x in tensors if x.requires_grad}.values()]
        # Detached: hooks of the weights are for gradients that arrive, not for those recorded.
        self._aliases = {id(x): x.detach().requires_grad_() for x in self.trained}
        self._inputs = [self._x.requires_grad_(key.needs_dx), *self._aliases.values()]

        # Made before the recording, in which nothing may be copied from the host, and held: its
        # kernels read the places of tokens at each replay.
        self._segments = self._given_segments(documents, packs=all_pack(base))

        def forward() -> Tensor:
            lengths = key.lengths or (key.longest,)
            whole = Documents(lengths=lengths, cu_seqlens=self._bounds, keys=self._keys)
            how = (base, runtime, self._rope, whole, 1)
            cut = self._segments or self._segment_of_any()
            return self._layers(base, make_schedule(*how, given_segments=cut))

        def backward(hidden: Tensor) -> list[Tensor | None]:
            inputs = self._inputs if key.needs_dx else self._inputs[1:]
            found = torch.autograd.grad([hidden], inputs, [self._dy], allow_unused=True)
            return [*found] if key.needs_dx else [None, *found]

        with torch.enable_grad():
            self._recorded = self.recording(forward, backward, pool)

    def _given_segments(self, documents: Documents, *, packs: bool) -> tuple[Segment, ...]:
        """Returns how mixers run over a batch whose documents have these lengths."""
        if not any(self.read.mixers) or self.key.lengths is None:
            return ()
        return cutting.segments(documents, cutting.SEGMENT_TOKENS, packs=packs)

    def _segment_of_any(self) -> tuple[Segment, ...]:
        """Returns how mixers run over any documents that there is room for."""
        if not any(self.read.mixers):
            return ()
        whole = slice(0, self.key.tokens)
        if self.room.documents == 1:
            return (Segment(rows=(whole,), length=self.key.tokens),)
        return (Segment.of_packed(self._bounds, whole),)

    def _empty_keys(self, keys: Keys) -> Keys:
        """The places for those of a batch. Behind its copies are others, which nobody reads."""
        return Keys(
            keys.tokens.new_zeros(self.room.keys),
            torch.empty_like(self._bounds),
            torch.empty_like(keys.places),
            self.key.longest,
        )

    def _hidden_dtype(self, base: Any, x: Tensor) -> torch.dtype:
        return final_norm_spec(base).dtype(x.dtype, final_norm_of(base).weight.dtype)

    def _layers(self, base: Any, schedule: Schedule) -> Tensor:
        x, layers = self._x, zip(self.read.layers, self.read.mixers, strict=True)
        for i, ((parameters, adapters), mixer) in enumerate(layers):
            given = self._recorded_of(parameters)
            above = len(self.read.layers) - 1 - i
            x = scheduled_layer(x, schedule, above, given, adapters, mixes=mixer)
        norm = self._recorded_of(self.read.norm)
        return final_norm(x, norm["weight"], norm.get("bias"), final_norm_spec(base), owned=True)

    def _recorded_of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._aliases.get(id(x), x) for name, x in parameters.items()}

    # --- serving ---------------------------------------------------------------------------

    def serves(self, key: GraphKey, documents: Documents) -> bool:
        return (
            key == self.key
            and self.room.holds(documents)
            and all(x.data_ptr() == pointer for x, pointer in self._pointers)
        )

    def still_holds(self, read: Read) -> bool:
        """Whether the model computes with what it did when the graph was recorded."""
        return self._facts == read.facts()

    def replay(self, x: Tensor, rope: Tensor, documents: Documents) -> None:
        with torch.no_grad():
            self._fill(x, rope, documents)
            self._recorded.replay_forward()

    def _fill(self, x: Tensor, rope: Tensor, documents: Documents) -> None:
        self._x.copy_(x)
        self._rope.copy_(rope)
        _fill_bounds(self._bounds, documents.cu_seqlens, len(x))
        if self._keys is not None:
            assert documents.keys is not None
            tokens, bounds, places, _ = documents.keys
            self._keys.tokens[: len(tokens)].copy_(tokens)
            _fill_bounds(self._keys.bounds, bounds, len(tokens))
            self._keys.places.copy_(places)

    def output(self) -> Tensor:  # (T, D)
        return self._recorded.hidden.clone()

    def backward(self, run: Replay, dy: Tensor) -> list[Tensor | None]:
        """Returns copies of the gradients of x and the trained weights."""
        if run.over:
            raise RuntimeError(TWICE)
        run.over = True
        self._dy.copy_(dy)
        self._recorded.replay_backward()
        recorded = self._recorded.grads
        there = [x for x in recorded if x is not None]
        copies = [torch.empty_like(x) for x in there]
        torch._foreach_copy_(copies, there)
        found = iter(copies)
        return [None if x is None else next(found) for x in recorded]


def _fill_bounds(place: Tensor, bounds: Tensor, end: int) -> None:
    """Behind a batch's documents there are empty ones."""
    place.fill_(end)
    place[: len(bounds)].copy_(bounds)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, run: Replay, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.graph, ctx.run = graph, run
        ctx.save_for_backward(*trained)  # torch sees whether they are written before backward
        return graph.output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, *ctx.graph.backward(ctx.run, dy)


class Graphs:
    """The graphs of one model."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        """The one that was used last is the last."""
        self._pool: Any = None
        self.held_bytes = 0
        """Bytes of the GPU in their pool."""
        self._earlier: GraphKey | None = None
        self._run: weakref.ref[Replay] | None = None
        self._recorded = self._replayed = 0
        """How often, in all."""
        self.given_up = False

    def __len__(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Forgets all graphs, and gives their memory back."""
        self._graphs, self._pool, self.held_bytes = [], None, 0

    def give_up(self, runtime: Runtime, reason: str) -> None:
        """Has everything run eagerly from here on, and says why."""
        self.given_up = True
        self.drop()
        _say(runtime, f"no CUDA graphs: {reason}")

    @property
    def is_busy(self) -> bool:
        """Whether a batch waits for its backward: graphs share their memory."""
        run = self._run() if self._run is not None else None
        return run is not None and not run.over

    def find(self, key: GraphKey, documents: Documents) -> Graph | None:
        found = next((g for g in self._graphs if g.serves(key, documents)), None)
        if found is not None:
            self._graphs.remove(found)
            self._graphs.append(found)
        return found

    def is_repeated(self, key: GraphKey) -> bool:
        """Whether the batch before had this key."""
        earlier, self._earlier = self._earlier, key
        return earlier == key

    def differs_in_documents(self, key: GraphKey) -> bool:
        """Whether the batch before had this key but for the lengths of its documents."""
        earlier = self._earlier
        return earlier not in (None, key) and earlier._replace(lengths=key.lengths) == key

    def begin(self) -> Replay:
        run = Replay()
        self._run, self._replayed = weakref.ref(run), self._replayed + 1
        return run

    def record(
        self,
        base: Any,
        runtime: Runtime,
        key: GraphKey,
        x: Tensor,  # (T, D)
        rope: Tensor,  # (T,)
        documents: Documents,
    ) -> Graph | None:
        """Records a batch, and says so once. Gives up, and returns None, where that fails."""
        if self._recorded >= PATIENCE and self._replayed < PATIENCE * self._recorded:
            self.give_up(runtime, "the model, or what memory is left, changes too often")
            return None
        self._recorded += 1
        replaced = [graph for graph in self._graphs if graph.key == key]
        room = Room.of(documents).with_that_of(replaced)
        del replaced
        self._graphs = [graph for graph in self._graphs if graph.key != key][1 - MOST_GRAPHS :]
        if not self._graphs:
            self.drop()  # torch takes no pool again that nothing uses
        try:
            with _memory(runtime.store.device) as held:
                if self._pool is None and runtime.store.device.type == "cuda":
                    self._pool = torch.cuda.graph_pool_handle()
                graph = Graph(base, runtime, key, x, rope, documents, self._pool, room)
        except RuntimeError as error:
            short = isinstance(error, torch.OutOfMemoryError)
            self.give_up(runtime, "they have no room" if short else str(error).splitlines()[0])
            return None
        self._graphs.append(graph)
        self.held_bytes += held[0]
        _say(
            runtime,
            f"layers run as CUDA graphs from here on where batches are alike, as of {key.tokens} "
            f"tokens, in {self.held_bytes / GIB:.2f} GiB of their own (--cuda_graphs off: none)",
        )
        return graph

    def make_room(self, device: torch.device) -> None:
        """Gives graphs up where an eager pass may need their memory."""
        if self._graphs and self.held_bytes and free_gpu_bytes(device) < self.held_bytes:
            self.drop()


@contextmanager
def _memory(device: torch.device) -> Iterator[list[int]]:
    """Gives a list that has the bytes, at the end, which torch has reserved on the GPU within."""
    found = [0]
    if device.type != "cuda":
        yield found
        return
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    with torch.cuda.device(device):
        yield found
    found[0] = torch.cuda.memory_reserved(device) - before


def graphed(
    base: Any,
    runtime: Runtime,
    x: Tensor,  # (T, D)
    rope: Tensor,  # (T,)
    documents: Documents,
) -> Tensor | None:  # (T, D)
    """Returns what the final norm returns, from a graph; None where none serves this batch. Whether
    the schedule covers the model is asked before anything is recorded, and by the caller after a
    replay."""
    graphs = graphs_of(runtime)
    if runtime.adopted.no_graphs and torch.is_grad_enabled():
        _say(runtime, f"no CUDA graphs: {runtime.adopted.no_graphs}")
    if runtime.adopted.graphed and documents.parents and documents.keys is None:
        _say(runtime, _APART)
    if graphs.given_up or not _is_asked(base, runtime, x, documents):
        graphs.make_room(x.device)
        return None
    key = GraphKey.of(base, runtime, x, rope, documents)
    if graphs.differs_in_documents(key):
        _say(runtime, _OTHER_DOCUMENTS)
    again, graph = graphs.is_repeated(key), None
    if not graphs.is_busy:
        graph = graphs.find(key, documents)
        if graph is None and again and _is_recordable(base, runtime, graphs):
            graph = graphs.record(base, runtime, key, x, rope, documents)
    if graph is None:
        graphs.make_room(x.device)
        return None
    graph.replay(x, rope, documents)
    if not runtime.settled and not _is_unchanged(graph, base):
        graphs.drop()
        return None
    return _Replayed.apply(graph, graphs.begin(), x, *graph.trained)


def graphs_of(runtime: Runtime) -> Graphs:
    if runtime.graphs is None:
        runtime.graphs = Graphs()
    return runtime.graphs


def _is_asked(base: Any, runtime: Runtime, x: Tensor, documents: Documents) -> bool:
    """Whether a call may have a graph at all, as far as it differs between calls."""
    return (
        runtime.adopted.graphed
        and torch.is_grad_enabled()
        and can_record(x)
        and len(x) <= runtime.adopted.tokens
        and not (documents.padding or documents.images)
        and (documents.keys is not None or not documents.parents)
        and not (documents.parents and mixes(base.config))
        and not follows_positions(base)
        and not torch.is_anomaly_enabled()
        and not torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore
    )


def can_record(x: Tensor) -> bool:
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


def _is_recordable(base: Any, runtime: Runtime, graphs: Graphs) -> bool:
    """Whether the model has nothing that a replay would leave out. Gives up where it has."""
    if why_not_scheduled(base):
        return False
    reason = hooks_of_others(base) or Read.of(base).why_not_recorded()
    if reason is not None:
        graphs.give_up(runtime, reason)
    return reason is None


def _is_unchanged(graph: Graph, base: Any) -> bool:
    try:
        return not hooks_of_others(base) and graph.still_holds(Read.of(base))
    except (AttributeError, KeyError):  # a module that is not whole, which is said elsewhere
        return False


def _say(runtime: Runtime, line: str) -> None:
    if line not in runtime.warned:
        runtime.warned.add(line)
        print_rank0(f"custom: {line}")
