"""The activation store: what a layer keeps from forward to backward, in host memory or on the GPU.

The ladder says how much that is, and where (ladder.py). Backward needs it in the reverse order, so
host memory is ONE pinned slab used as a stack, whatever the lengths of the rows:

    slab   | x0 o0 lse0 | x1 o1 lse1 | ... |  free              layer 0 is pushed first, popped last
    GPU    x, o, lse of the layer whose backward runs; filled tile by tile, and refilled with the
           layer below's when a tensor's tile is not needed any more

Forward copies out on a stream of its own: x while attention computes, the rest while the MLP does.
Backward copies in on another stream, in tiles, so that the first tile's computation starts when the
first tile is there. What the MLP reads is copied while attention computes; x and o of the first
half of a layer's tiles at the end of the layer above, those of the other half when the layer
begins. So nothing is on its way between two layers, where a few bytes of others would wait behind
it (FSDP2's list of gradients, 37 ms). Streams wait for each other's events; the device is never
synchronised, and no buffer is reused before its event.
At 131072 tokens a layer moves 4 GiB in 80 ms while it computes for 1.1 s.

The slab (slab.py) has exactly the size that the longest batch needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longctx.annotate import annotate
from longctx.constants import GIB
from longctx.cost.kept import Keep, Ladder
from longctx.errors import UserError
from longctx.memory.machine import host_budget, host_share_bytes
from longctx.memory.slab import PinnedSlab, whole_lines

WHOLE = "lse"
"""The tensor that is not (T, ...). It is copied up as a whole, with the first tile."""


@dataclass(eq=False)
class Entry:
    """A kept tensor."""

    tensor: Tensor | None
    """The tensor on the GPU; None if it waits in the slab only."""
    shape: torch.Size
    dtype: torch.dtype
    offset: int | None = None
    """Where it starts in the slab, in bytes; None if it lives on the GPU."""

    @property
    def stop(self) -> int:
        assert self.offset is not None
        return self.offset + _nbytes(self.shape, self.dtype)


@dataclass(eq=False)
class Saved:
    """One layer's kept tensors, by name. Dropped with the autograd graph, it frees its place."""

    keep: Keep
    entries: dict[str, Entry] = field(default_factory=dict)
    used: bool = False

    def keeps(self, name: str) -> bool:
        """Whether the layer keeps the keepable of this name (cost/kept.py)."""
        return name in self.keep.kept

    @property
    def hosted(self) -> dict[str, Entry]:
        """The tensors in the slab."""
        return {name: e for name, e in self.entries.items() if e.offset is not None}

    @property
    def specs(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Names, shapes and dtypes of the buffers through which the tensors come back."""
        return [(name, entry.shape, entry.dtype) for name, entry in self.hosted.items()]


class ActivationStore:
    """A stack of `Saved`, in the pinned slab or on the GPU. Each model has one.

    In forward, `open` begins a layer's, `add` keeps a tensor, `send` starts its copy out and
    `release` ends the layer's claim on its memory. In backward, `load` starts the copies in, `wait`
    makes a tile usable and `retire` gives tensors of it back.
    """

    def __init__(self, device: torch.device, host_limit_gib: float | None = None) -> None:
        self.device = device
        self.host_limit_gib = host_limit_gib
        self.ladder: Ladder = ()
        self._pinned = PinnedSlab(0, device)
        self._lent: Tensor | None = None
        self._is_free: Callable[[int, int], bool] = _always
        self._stack: list[weakref.ref[Saved]] = []
        self._buffers: dict[str, Tensor] = {}
        # Whose backward reads the buffers, and who they are filled for: held by autograd's graph
        # alone, so that what is left of a step that ran out of memory goes with its graph.
        self._reader: weakref.ref[Saved] | None = None
        self._filled: weakref.ref[Saved] | None = None
        self._coming: set[tuple[str, int]] = set()
        """The part of `_filled` that is on its way: names, and first tokens of tiles."""
        self._coming_ready: dict[int, Any] = {}
        """Marks when it is there, by these tokens."""
        self._ready: dict[int, Any] = {}
        """The same marks of what `_reader` has not waited for."""
        on_gpu = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if on_gpu else None
        self._in: Any = torch.cuda.Stream(device) if on_gpu else None

    # --- before the first step -------------------------------------------------------------

    def reserve(self, ladder: Ladder, nbytes: int, host_bytes: int | None = None) -> None:
        """Keeps activations by this ladder, which needs `nbytes` of the host, of which `host_bytes`
        may be taken (default: what may be taken now). A slab that is large enough stays. Raises
        UserError if host memory is short."""
        if nbytes > self._slab.numel() and not self._alive():
            _check_host(nbytes, self.host_bytes() if host_bytes is None else host_bytes)
            self._lent = None
            self._pinned = PinnedSlab(0, self.device)  # gives the old one back first
            self._pinned = PinnedSlab(nbytes, self.device)
        self.ladder = ladder

    def lend(self, slab: Tensor, ladder: Ladder, is_free: Callable[[int, int], bool]) -> None:
        """Uses a part of another slab instead of one of its own, as planned. `is_free` says whether
        its bytes [start, stop) may be written."""
        self._lent, self._is_free, self.ladder = slab, is_free, ladder

    def used_bytes(self) -> int:
        """The end of the part of a lent slab that kept activations need."""
        return 0 if self._lent is None else _top(self._alive())

    def host_bytes(self) -> int:
        """The bytes that the slab may take, the present slab included."""
        return host_budget(host_share_bytes() + self.locked_bytes, self.host_limit_gib)

    # --- forward ---------------------------------------------------------------------------

    def open(self, layers_above: int) -> Saved:
        """Begins a layer's kept tensors. `layers_above` layers follow it."""
        saved = Saved(self.ladder[max(0, len(self.ladder) - 1 - layers_above)])
        self._stack = [weakref.ref(s) for s in [*self._alive(), saved]]
        return saved

    def add(self, saved: Saved, kept: str, **tensors: Tensor) -> None:
        """Keeps the tensors of the keepable `kept`, (T, ...) each and lse (H, T), until `load`.
        Those that the ladder wants on the host get a place there, if the slab has room: it may not
        after more forwards than backwards."""
        for name, tensor in tensors.items():
            entry = Entry(tensor, tensor.shape, tensor.dtype)
            if kept in saved.keep.hosted:
                entry.offset = _top(self._alive())
                fits = entry.stop <= self._slab.numel()
                if not fits or not (self._lent is None or self._is_free(entry.offset, entry.stop)):
                    entry.offset = None
            saved.entries[name] = entry

    def send(self, saved: Saved, *names: str, tile: slice | None = None) -> None:
        """Starts the copies of these tensors to the host, or of their tokens in `tile`."""
        entries = [saved.entries[n] for n in names if n in saved.entries]
        entries = [entry for entry in entries if entry.offset is not None]
        if not entries:
            return
        with annotate("offload out"), _after_compute(self._out):
            if self._out is not None:
                self._out.wait_stream(self._in)  # what is overwritten may still be on its way in
            for entry in entries:
                host, tensor = self._host(entry), entry.tensor
                assert tensor is not None
                rows = slice(None) if tile is None else tile
                host[rows].copy_(tensor[rows], non_blocking=True)

    def release(self, saved: Saved) -> None:
        """Ends forward's use of the tensors: their memory may be reused once the copies are out."""
        hosted = saved.hosted
        if hosted and self._out is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._out)
        for entry in hosted.values():
            entry.tensor = None

    # --- backward --------------------------------------------------------------------------

    def load(self, saved: Saved, tiles: list[slice]) -> dict[str, Tensor]:
        """Returns the kept tensors, on the GPU. A tile's tokens may be read after `wait(tile)`.

        They may be overwritten: nobody else holds them. Raises RuntimeError on a second backward.
        """
        if saved.used:
            raise RuntimeError(
                "backward ran twice through a longctx layer: its kept activations are overwritten "
                "as they are used (retain_graph is not supported)"
            )
        saved.used = True
        if self._filled is not None and self._filled() is not saved:
            self._abandon()
        if saved.specs:
            if self._filled is None:
                self._buffers = {
                    name: torch.empty(shape, dtype=dtype, device=self.device)
                    for name, shape, dtype in saved.specs
                }
                self._fill_begin(saved)
            for tile in tiles:
                self._fill(saved, tile, saved.hosted)
            self._reader, self._filled = self._watched(saved), None
            self._ready, self._coming_ready = self._coming_ready, {}
        on_gpu = {n: e.tensor for n, e in saved.entries.items() if e.tensor is not None}
        return on_gpu | (self._buffers if saved.specs else {})

    def wait(self, tile: slice) -> None:
        ready = self._ready.pop(tile.start, None)
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def retire(self, saved: Saved, tile: slice, *names: str) -> None:
        """Ends the layer's use of a tile of these tensors. The layer below's take their place."""
        names = tuple(name for name in names if name in saved.hosted)
        if not names:
            return
        below = self._filled() if self._filled is not None else None
        if below is None:
            alive = self._alive()
            if not alive or alive[-1].specs != saved.specs:
                return
            below = alive[-1]
            self._fill_begin(below)
        self._fill(below, tile, names)

    def finish(self, saved: Saved) -> None:
        """Ends a layer's backward. After that of the first layer the buffers are dropped."""
        if saved.specs:
            self._reader = None
        saved.entries = {}
        if self._filled is None:
            self._buffers = {}

    def _watched(self, saved: Saved) -> weakref.ref[Saved]:
        """A reference by which the store learns that a graph was dropped before its backward was
        over: memory ran out, or another layer came next than the one below."""

        def gone(reference: weakref.ref[Saved]) -> None:
            if reference is self._reader or reference is self._filled:
                self._abandon()

        return weakref.ref(saved, gone)

    def _abandon(self) -> None:
        """Drops the buffers. Their memory may be reused when the copies into them are done."""
        if self._in is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._in)
        self._reader, self._filled = None, None
        self._buffers, self._ready = {}, {}
        self._coming, self._coming_ready = set(), {}

    def _fill_begin(self, saved: Saved) -> None:
        self._filled, self._coming, self._coming_ready = self._watched(saved), set(), {}
        if self._in is not None:
            self._in.wait_stream(self._out)

    def _fill(self, saved: Saved, tile: slice, names: Iterable[str]) -> None:
        """Starts the copies of these tensors' tiles, except those that are on their way."""
        entries = saved.hosted
        missing = [name for name in names if (name, tile.start) not in self._coming]
        missing = [name for name in missing if name != WHOLE or tile.start == 0]
        if not missing:
            return
        with annotate("offload in"), _after_compute(self._in):
            for name in missing:
                rows = slice(None) if name == WHOLE else tile
                host = self._host(entries[name])
                self._buffers[name][rows].copy_(host[rows], non_blocking=True)
                self._coming.add((name, tile.start))
            if self._in is not None:
                self._coming_ready[tile.start] = self._in.record_event()

    def tensors_on_gpu(self) -> list[Tensor]:
        """Returns what layers keep on the GPU now, the buffers of backward included."""
        kept = [saved for ref in self._stack if (saved := ref()) is not None]
        tensors = [entry.tensor for saved in kept for entry in saved.entries.values()]
        return [*self._buffers.values(), *(t for t in tensors if t is not None)]

    # --- the slab --------------------------------------------------------------------------

    @property
    def locked_bytes(self) -> int:
        """Bytes of the host that the store has locked in a slab of its own."""
        return self._pinned.data.numel()

    @property
    def _slab(self) -> Tensor:
        return self._pinned.data if self._lent is None else self._lent

    def _alive(self) -> list[Saved]:
        return [s for ref in self._stack if (s := ref()) is not None and not s.used]

    def _host(self, entry: Entry) -> Tensor:
        assert entry.offset is not None
        size = entry.shape.numel() * entry.dtype.itemsize
        flat = self._slab[entry.offset : entry.offset + size]
        return flat.view(entry.dtype).view(entry.shape)


def _always(start: int, stop: int) -> bool:
    return True


def _top(alive: list[Saved]) -> int:
    """Returns the first byte of the slab above all of them."""
    return max((entry.stop for saved in alive for entry in saved.hosted.values()), default=0)


@contextmanager
def _after_compute(stream: Any) -> Iterator[None]:
    """A context whose work goes to `stream`, and starts when all work given to the compute stream
    so far is done."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _check_host(needed_bytes: int, host_bytes: int) -> None:
    missing_gib = (needed_bytes - host_bytes) / GIB
    if missing_gib > 0:
        raise UserError(
            f"host memory is {missing_gib:.1f} GiB short of the {needed_bytes / GIB:.1f} GiB that "
            "offloaded activations need: set --keep x or auto (less of it), --offload_activations "
            "auto or none (GPU memory first), or a shorter --seq_len"
        )


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return whole_lines(shape.numel() * dtype.itemsize)


def free_gpu_bytes(device: torch.device) -> int:
    """Returns the bytes that the driver has free and those that torch's allocator holds without
    using them, within this process's share of the GPU
    (torch.cuda.set_per_process_memory_fraction)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    limit_bytes = int(total_bytes * torch.cuda.get_per_process_memory_fraction(index))
    held_bytes = torch.cuda.memory_reserved(index)
    return min(free_bytes + held_bytes, limit_bytes) - torch.cuda.memory_allocated(index)
