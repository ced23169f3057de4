"""The activation store: layers' saved activations between forward and backward, on the GPU or host.

The ladder says which are saved, and where (ladder.py). Backward reads them in the reverse order, so
host memory is ONE pinned slab used as a stack, whatever the lengths of the rows:

    slab   | x0 o0 lse0 | x1 o1 lse1 | ... |  free              layer 0 is pushed first, popped last
    GPU    x, o, lse of the layer whose backward runs; filled tile by tile, and refilled with the
           layer below's when a tensor's tile is not needed any more. A buffer goes on to the tensor
           of the same name, or to another of its size, also between layers of different kinds

Forward copies out on one stream: x while attention computes, the rest while the MLP does. Backward
copies in on another stream, in tiles, so that computation starts when the first tile has arrived.
What the MLP reads is copied while attention computes; x and o of the first half of a layer's tiles
at the end of the layer above, those of the other half when the layer begins. So the link is idle
between two layers: otherwise a few bytes of other code would wait behind these copies (FSDP2's list
of gradients, 37 ms). Streams wait for each other's events; the device is never synchronised, and no
buffer is reused before its event. At 131072 tokens a layer moves 4 GiB in 80 ms while it computes
for 1.1 s.

A layer may keep no input: then the layers below it run forward again before its backward, from the
nearest that has its input. This gives each its input, and the keepables of AGAIN, on the GPU until
its own backward. x of the lowest is copied up first, and stays in its buffer.

The slab (slab.py) has exactly the size that the longest batch needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from longctx.constants import GIB
from longctx.cost.kept import Keep, Ladder, lowest
from longctx.cost.table import AGAIN, INPUT
from longctx.errors import UserError
from longctx.kernels.annotate import annotate
from longctx.memory.machine import host_budget, host_share_bytes
from longctx.memory.slab import PinnedSlab, whole_lines


@dataclass(eq=False)
class Entry:
    """A kept tensor."""

    tensor: Tensor | None
    """The tensor on the GPU; None if it is in the slab only."""
    shape: torch.Size
    dtype: torch.dtype
    offset: int | None = None
    """Its first byte in the slab; None if it stays on the GPU."""
    of_tiles: bool = False
    """Whether forward writes and sends it tile by tile."""
    whole: bool = False
    """Whether its first dimension is not tokens, so that it is copied up whole, with the first
    tile."""
    sent: int = 0
    """The number of its rows that were sent to the slab."""

    @property
    def size_class(self) -> tuple[torch.Size, torch.dtype, bool]:
        """Tensors with equal values of it can be copied up through one buffer."""
        return self.shape, self.dtype, self.whole

    @property
    def stop(self) -> int:
        """The first byte of the slab after it."""
        assert self.offset is not None
        return self.offset + _nbytes(self.shape, self.dtype)


class Again(Protocol):
    """Runs a layer's forward once more, before its backward."""

    def bring(self, above: int) -> None:
        """Brings the layer's weights to the GPU. `above` layers follow; the last of them runs
        backward."""

    def forward(self, x: Tensor, saved: Saved) -> Tensor:
        """Returns the layer's output, and adds to `saved` the tensors that `saved.keep` names."""


@dataclass(eq=False)
class Saved:
    """One layer's kept tensors, by name. When the autograd graph drops it, its memory is free."""

    keep: Keep
    """The keepables that the layer keeps."""
    layers_above: int = 0
    """The number of layers that follow."""
    below: Saved | None = None
    """The layer below, if it has to recompute this layer's input."""
    again: Again | None = None
    """Runs the layer forward again, if a layer above may need it."""
    output: Callable[[], Tensor | None] = field(default=lambda: None)
    """Returns the layer's output while other code holds it."""
    version: int = 0
    """The version counter of the output when forward returned it."""
    entries: dict[str, Entry] = field(default_factory=dict)
    graph: Any = None
    """Autograd's graph of a mixer, if it is kept (layer/parts/mixer.py)."""
    used: bool = False
    """Whether a backward has read the tensors."""

    def keeps(self, name: str) -> bool:
        """Whether the layer keeps the keepable of this name (cost/kept.py)."""
        return name in self.keep.kept

    @property
    def of_tiles(self) -> list[str]:
        """The names of the tensors that forward writes tile by tile."""
        return [name for name, entry in self.entries.items() if entry.of_tiles]

    @property
    def hosted(self) -> dict[str, Entry]:
        """The tensors in the slab, by name."""
        return {name: e for name, e in self.entries.items() if e.offset is not None}


class ActivationStore:
    """A stack of `Saved`, in the pinned slab or on the GPU. Each model has one.

    In forward, `open` begins the kept tensors of a layer, `add` keeps a tensor, `send` starts its
    copy out and `release` ends the layer's use of its memory. In backward, `load` starts the copies
    in, `wait` makes a tile readable and `retire` returns a tile's buffers.
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
        """The tensors that `_reader` reads, by name."""
        self._next: dict[str, Tensor] = {}
        """The buffers that fill for `_filled`, by its names; some are still read as `_buffers`."""
        self._homes: dict[str, str] = {}
        """Maps names of `_filled` to the reader's tensors whose buffers they get."""
        # The layer whose backward reads the buffers, and the one for which they are filled. Only
        # autograd's graph holds them: after a step that ran out of memory, all goes with the graph.
        self._reader: weakref.ref[Saved] | None = None
        self._filled: weakref.ref[Saved] | None = None
        self._coming: set[tuple[str, int]] = set()
        """The parts of `_filled` whose copies have begun: names, and first tokens of tiles."""
        self._coming_ready: dict[int, Any] = {}
        """Maps these first tokens to the events after which the tiles may be read."""
        self._ready: dict[int, Any] = {}
        """The events of tiles for which `_reader` has not waited yet."""
        on_gpu = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if on_gpu else None
        self._in: Any = torch.cuda.Stream(device) if on_gpu else None

    # --- before the first step -------------------------------------------------------------

    def reserve(self, ladder: Ladder, nbytes: int, host_bytes: int | None = None) -> None:
        """Keeps activations by this ladder, which needs `nbytes` of the host, of which `host_bytes`
        may be taken (default: what may be taken now). A slab that is large enough stays. Raises
        UserError if host memory is short."""
        # Kept tensors that are alive lie in the slab: it stays until their backward is over.
        if nbytes > self._slab.numel() and not self._alive():
            _check_host(nbytes, self.host_bytes() if host_bytes is None else host_bytes)
            self._lent = None
            self._pinned = PinnedSlab(0, self.device)  # gives the old one back first
            self._pinned = PinnedSlab(nbytes, self.device)
        self.ladder = ladder

    def lend(self, slab: Tensor, ladder: Ladder, is_free: Callable[[int, int], bool]) -> None:
        """Uses a part of another slab, as planned. `is_free` says whether its bytes [start, stop)
        may be written."""
        self._lent, self._is_free, self.ladder = slab, is_free, ladder

    def used_bytes(self) -> int:
        """Returns the end of the part of a lent slab that kept activations use."""
        return 0 if self._lent is None else _top(self._alive())

    def host_bytes(self) -> int:
        """Returns the bytes that the slab may take, the present slab included."""
        return host_budget(host_share_bytes() + self.locked_bytes, self.host_limit_gib)

    # --- forward ---------------------------------------------------------------------------

    def open(self, layers_above: int, x: Tensor | None = None) -> Saved:
        """Begins the kept tensors of a layer whose input is x. `layers_above` layers follow it.
        Raises UserError if layers below have to recompute x, and x is not what they returned."""
        # The ladder may be shorter than the model: its first entry also serves all earlier layers.
        at, alive = max(0, len(self.ladder) - 1 - layers_above), self._alive()
        saved = Saved(self.ladder[at], layers_above)
        if not saved.keeps(INPUT):
            saved.below = _maker(x, layers_above, alive)
            if saved.below is None:  # all layers below are frozen, and keep nothing
                saved.keep = lowest(self.ladder, at)
        # Weak references: a graph that is dropped without a backward frees its place in the slab.
        self._stack = [weakref.ref(s) for s in [*alive, saved]]
        return saved

    def add(
        self,
        saved: Saved,
        kept: str,
        tensors: Mapping[str, Tensor],
        *,
        of_tiles: bool = False,
        whole: Collection[str] = (),
    ) -> None:
        """Keeps the tensors of the keepable `kept` until `load`. They are (T, ...), except those
        that `whole` names. Those that the ladder wants on the host go there if the slab has room;
        it may have none after more forwards than backwards."""
        for name, tensor in tensors.items():
            how = dict(of_tiles=of_tiles, whole=name in whole)
            entry = Entry(tensor, tensor.shape, tensor.dtype, **how)
            if kept in saved.keep.hosted:
                # The top of the living entries, not a running offset: dropped layers leave no hole.
                entry.offset = _top(self._alive())
                fits = entry.stop <= self._slab.numel()
                # The owner of a lent slab may use these bytes for a gradient (settle.py).
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
                self._out.wait_stream(self._in)  # these bytes may still be on their way in
            for entry in entries:
                host, tensor = self._host(entry), entry.tensor
                assert tensor is not None
                rows = slice(None) if tile is None else tile
                host[rows].copy_(tensor[rows], non_blocking=True)
                entry.sent += len(tensor[rows])

    def release(self, saved: Saved, output: Tensor | None = None) -> None:
        """Ends forward's use of the tensors: their memory may be reused once the copies have ended.
        `output` is the layer's output. Raises RuntimeError for a tensor that waits on the host but
        was not sent: backward would read what the slab held before."""
        hosted = saved.hosted
        for name, entry in hosted.items():
            if entry.sent < entry.shape[0]:
                raise RuntimeError(
                    f"{entry.shape[0] - entry.sent} of {entry.shape[0]} rows of {name!r} wait on "
                    "the host and were never sent there"
                )
        if hosted and self._out is not None:
            # The allocator reuses freed memory in the order of the compute stream. Without this
            # wait the next layer could overwrite what the other stream still copies.
            torch.cuda.current_stream(self.device).wait_stream(self._out)
        for entry in hosted.values():
            entry.tensor = None
        if output is not None:
            saved.output, saved.version = weakref.ref(output), output._version

    # --- backward --------------------------------------------------------------------------

    def load(self, saved: Saved, tiles: list[slice]) -> dict[str, Tensor]:
        """Returns the kept tensors, on the GPU. A tile's tokens may be read after `wait(tile)`.
        They may be overwritten: no other code holds them. Raises RuntimeError on a second
        backward."""
        if saved.used:
            raise RuntimeError(
                "backward ran twice through a longctx layer: its kept activations are overwritten "
                "as they are used (retain_graph is not supported)"
            )
        saved.used = True
        if INPUT not in saved.entries:
            self._run_again(saved, tiles)
        return self._raised(saved, tiles)

    def _run_again(self, saved: Saved, tiles: list[slice]) -> None:
        """Runs the layers below forward again, which gives each of them, and this layer, its
        input."""
        layers = [saved]
        while INPUT not in layers[-1].entries:
            assert (below := layers[-1].below) is not None
            layers.append(below)
        layers.reverse()
        x = self._raised(layers[0], tiles)[INPUT]
        for tile in tiles:  # attention reads the whole row
            self.wait(tile)
        for i, (layer, above) in enumerate(pairwise(layers)):
            assert layer.again is not None
            layer.again.bring(len(layers) - 1 - i)
            made = Saved(Keep(AGAIN.difference(layer.entries)))
            x = layer.again.forward(x, made)
            layer.entries |= made.entries
            above.entries[INPUT] = Entry(x, x.shape, x.dtype)
        assert saved.again is not None
        saved.again.bring(0)

    def _raised(self, saved: Saved, tiles: list[slice]) -> dict[str, Tensor]:
        """Returns the kept tensors on the GPU, and starts the copies that have not begun."""
        # The buffers were filled for another layer, whose graph was dropped since.
        if self._filled is not None and self._filled() is not saved:
            self._abandon()
        hosted = saved.hosted
        if hosted and not (self._reader is not None and self._reader() is saved):
            if self._filled is None:
                self._fill_begin(saved, homes={})
            for name, entry in hosted.items():
                if name not in self._next:
                    made = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
                    self._next[name] = made
            for tile in tiles:
                self._fill(saved, tile, hosted)
            # Some of these copies began while the layer above ran (`retire`).
            self._buffers, self._next = self._next, {}
            self._reader, self._filled = self._watched(saved), None
            self._ready, self._coming_ready = self._coming_ready, {}
        on_gpu = {n: e.tensor for n, e in saved.entries.items() if e.tensor is not None}
        return on_gpu | (self._buffers if hosted else {})

    def wait(self, tile: slice) -> None:
        # Popped: a tile is waited for once, and later reads of it cost no event.
        """Has the computation wait for the copies of a tile."""
        ready = self._ready.pop(tile.start, None)
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def retire(self, saved: Saved, tile: slice, *names: str) -> None:
        """Ends the layer's use of a tile of these tensors. Their buffers fill with the layer
        below's."""
        if not any(name in saved.hosted for name in names):
            return
        below = self._filled() if self._filled is not None else None
        if below is None:
            alive = self._alive()
            below = _read_next(alive[-1]) if alive else None
            homes = _new_homes(saved, below) if below is not None else {}
            if below is None or not homes:
                return
            self._fill_begin(below, homes)
        self._fill(below, tile, [name for name, home in self._homes.items() if home in names])

    def finish(self, saved: Saved) -> None:
        """Ends a layer's backward. After that of the first layer the buffers are dropped."""
        if saved.hosted:
            self._reader, self._buffers = None, {}
        saved.entries, saved.graph = {}, None

    def fetch(self, saved: Saved) -> Tensor:
        """Returns a layer's input where nothing else of the layer is kept. The caller holds it
        through the layer's backward. Meanwhile the input of the layer below is copied into another
        buffer."""
        whole = slice(0, None)
        x = self.load(saved, [whole])[INPUT]
        self.wait(whole)
        self.finish(saved)
        alive = self._alive()
        below = alive[-1] if alive and self._filled is None else None
        if below is not None and below.hosted:
            self._fill_begin(below, homes={})
            for name, entry in below.hosted.items():
                made = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
                self._next[name] = made
            self._fill(below, whole, below.hosted)
        return x

    def _watched(self, saved: Saved) -> weakref.ref[Saved]:
        """Returns a reference that tells the store when a graph was dropped before its backward
        ended: memory ran out, or another layer came next than the one below."""

        def gone(reference: weakref.ref[Saved]) -> None:
            if reference is self._reader or reference is self._filled:
                self._abandon()

        return weakref.ref(saved, gone)

    def _abandon(self) -> None:
        """Drops the buffers. Their memory may be reused when the copies into them have ended."""
        if self._in is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._in)
        self._reader, self._filled = None, None
        self._buffers, self._next, self._homes, self._ready = {}, {}, {}, {}
        self._coming, self._coming_ready = set(), {}

    def _fill_begin(self, saved: Saved, homes: dict[str, str]) -> None:
        self._filled, self._coming, self._coming_ready = self._watched(saved), set(), {}
        self._homes, self._next = homes, {n: self._buffers[home] for n, home in homes.items()}
        if self._in is not None:
            self._in.wait_stream(self._out)

    def _fill(self, saved: Saved, tile: slice, names: Iterable[str]) -> None:
        """Starts the copies of a tile of these tensors, except those that have begun."""
        entries = saved.hosted
        missing = [name for name in names if (name, tile.start) not in self._coming]
        # Tensors that are not (T, ...), such as lse (H, T), have no tiles.
        missing = [name for name in missing if not entries[name].whole or tile.start == 0]
        if not missing:
            return
        with annotate("offload in"), _after_compute(self._in):
            for name in missing:
                rows = slice(None) if entries[name].whole else tile
                host = self._host(entries[name])
                self._next[name][rows].copy_(host[rows], non_blocking=True)
                self._coming.add((name, tile.start))
            if self._in is not None:
                self._coming_ready[tile.start] = self._in.record_event()

    def tensors_on_gpu(self) -> list[Tensor]:
        """Returns what layers keep on the GPU now, with the buffers of backward."""
        kept = [saved for ref in self._stack if (saved := ref()) is not None]
        tensors = [entry.tensor for saved in kept for entry in saved.entries.values()]
        buffers = [*self._buffers.values(), *self._next.values()]
        return [*buffers, *(t for t in tensors if t is not None)]

    # --- the slab --------------------------------------------------------------------------

    @property
    def locked_bytes(self) -> int:
        """Host bytes that the store has locked in a slab that it owns."""
        return self._pinned.data.numel()

    @property
    def _slab(self) -> Tensor:
        return self._pinned.data if self._lent is None else self._lent

    def _alive(self) -> list[Saved]:
        """Returns the layers whose tensors a backward may still read."""
        return [s for ref in self._stack if (s := ref()) is not None and not s.used]

    def _host(self, entry: Entry) -> Tensor:
        assert entry.offset is not None
        size = entry.shape.numel() * entry.dtype.itemsize
        flat = self._slab[entry.offset : entry.offset + size]
        return flat.view(entry.dtype).view(entry.shape)


def _always(start: int, stop: int) -> bool:
    return True


def _maker(x: Tensor | None, layers_above: int, alive: list[Saved]) -> Saved | None:
    """Returns the layer that computed x in this forward; None if no layer below keeps anything.
    Raises UserError if x was changed or replaced in between."""
    below = alive[-1] if alive else None
    if below is None or below.layers_above != layers_above + 1:
        return None
    if x is None or below.output() is not x or x._version != below.version:
        raise UserError(
            "the input of a layer is not what the layer below returned, which is to run forward "
            "again to make it: take the hook that changes it away, or set --keep x"
        )
    return below


def _read_next(saved: Saved) -> Saved:
    """Returns the layer whose kept tensors are read first in this layer's backward."""
    while INPUT not in saved.entries and saved.below is not None:
        saved = saved.below
    return saved


def _new_homes(reader: Saved, below: Saved) -> dict[str, str]:
    """Maps tensors of the layer below to the reader's tensors whose buffers they get: that of the
    same name, else one of their size class that no other tensor gets. All others wait for buffers
    until the reader's are dropped, so that a layer never holds more than it needs."""
    given, wanted = reader.hosted, below.hosted
    homes = {
        name: name
        for name, entry in wanted.items()
        if name in given and given[name].size_class == entry.size_class
    }
    free = [name for name in given if name not in homes]
    for name, entry in wanted.items():
        alike = (other for other in free if given[other].size_class == entry.size_class)
        if name not in homes and (home := next(alike, None)) is not None:
            homes[name] = home
            free.remove(home)
    return homes


def _top(alive: list[Saved]) -> int:
    """Returns the first byte of the slab above all entries of these layers."""
    return max((entry.stop for saved in alive for entry in saved.hosted.values()), default=0)


@contextmanager
def _after_compute(stream: Any) -> Iterator[None]:
    """Returns a context whose work runs on `stream`, after all work given to the compute stream so
    far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _check_host(needed_bytes: int, host_bytes: int) -> None:
    """Raises UserError if host memory is short."""
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
    free_bytes, _ = torch.cuda.mem_get_info(index)
    held_bytes = torch.cuda.memory_reserved(index)
    share_bytes = gpu_share_bytes(device)  # the driver's free bytes do not know of it
    return min(free_bytes + held_bytes, share_bytes) - torch.cuda.memory_allocated(index)


def gpu_share_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU that this process may take, which --gpu_memory_gib limits, whether
    they are free or not."""
    index = torch.cuda.current_device() if device.index is None else device.index
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(index))
