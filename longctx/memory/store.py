"""The activation store: what a layer keeps from forward to backward, in host memory or on the GPU.

A layer keeps its input x and its attention output o (one *unit* of T*D*2 bytes each) and the
log-sum-exp. Backward wants them in the reverse order, so host memory is ONE pinned slab used as a
stack, whatever the lengths of the rows:

    slab   | x0 o0 lse0 | x1 o1 lse1 | ... |  free              layer 0 is pushed first, popped last
    GPU    x, o, lse of the layer whose backward runs; filled tile by tile, and refilled with the
           layer below's as soon as a tile is not needed any more

Forward copies out on a stream of its own while the MLP computes; backward copies in on another,
in tiles, so that the first tile's computation starts when the first tile is there. Streams wait
for each other's events; the device is never synchronised, and no buffer is reused before its event.
At 131072 tokens a layer moves 4 GiB in 80 ms while it computes for 1.1 s.

The slab (slab.py) has exactly the size that plan.py says the longest batch needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longctx.annotate import annotate
from longctx.errors import UserError
from longctx.memory.machine import host_share_bytes
from longctx.memory.plan import GIB, Offload, layers_on_gpu
from longctx.memory.slab import PinnedSlab, whole_lines


class Saved:
    """One layer's kept tensors. Dropped with the autograd graph, which frees its place."""

    def __init__(self, rows: list[Tensor], lse: Tensor | None) -> None:
        tensors = rows if lse is None else [*rows, lse]
        self.rows = len(rows)
        """How many of the tensors are (T, ...) and move in tiles."""
        self.specs = [(t.shape, t.dtype) for t in tensors]
        self.offset: int | None = None
        """Where the tensors start in the slab, in bytes; None if they live on the GPU."""
        self.on_gpu: list[Tensor] | None = tensors
        self.used = False

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(shape, dtype) for shape, dtype in self.specs)


class ActivationStore:
    """Stack of `Saved`, in the pinned slab or on the GPU. One per model.

    In forward, `save` starts the copies out and `release` ends the layer's claim on its tensors.
    In backward, `load` starts the copies in, `wait` makes a tile usable and `retire` gives it back.
    """

    def __init__(
        self, device: torch.device, offload: Offload, host_limit_gib: float | None = None
    ) -> None:
        self.device = device
        self.offload = offload
        self.host_limit_gib = host_limit_gib
        self.layers_on_gpu = 1
        self._pinned = PinnedSlab(0, device)
        self._lent: Tensor | None = None
        self._is_free: Callable[[int, int], bool] = _always
        self._stack: list[weakref.ref[Saved]] = []
        self._buffers: list[Tensor] = []
        # Whose backward reads the buffers, and who they are filled for: held by autograd's graph
        # alone, so that what is left of a step that ran out of memory goes with its graph.
        self._reader: weakref.ref[Saved] | None = None
        self._filled: weakref.ref[Saved] | None = None
        self._tile_ready: dict[int, Any] = {}
        on_gpu = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if on_gpu else None
        self._in: Any = torch.cuda.Stream(device) if on_gpu else None

    # --- before the first step -------------------------------------------------------------

    def reserve(self, layers: int, layer_bytes: int, working_bytes: int) -> None:
        """Decides how many of the last layers stay on the GPU and sizes the slab for the others.

        `layer_bytes` is what one layer keeps, `working_bytes` what else will be on the GPU and is
        not yet. A slab that is large enough stays. Raises UserError if host memory is short.
        """
        free_bytes = 0
        if self.device.type == "cuda":
            free_bytes = free_gpu_bytes(self.device) - working_bytes
        self.layers_on_gpu = self.count_on_gpu(layers, layer_bytes, free_bytes)
        needed_bytes = (layers - self.layers_on_gpu) * layer_bytes
        if needed_bytes > self._slab.numel() and not self._alive():
            self._check_host(needed_bytes - self._pinned.data.numel())
            self._lent = None
            self._pinned = PinnedSlab(0, self.device)  # gives the old one back first
            self._pinned = PinnedSlab(needed_bytes, self.device)

    def count_on_gpu(self, layers: int, layer_bytes: int, free_bytes: int) -> int:
        """How many of the last layers stay on the GPU if `free_bytes` may hold them."""
        offload: Offload = self.offload
        if self.device.type != "cuda":
            offload = "all" if offload == "all" else "none"
        return layers_on_gpu(offload, layers, layer_bytes, free_bytes)

    def lend(self, slab: Tensor, layers_on_gpu: int, is_free: Callable[[int, int], bool]) -> None:
        """Uses part of another slab instead of one of its own, as planned beforehand. `is_free`
        says whether bytes [start, stop) of it may be written."""
        self._lent, self._is_free, self.layers_on_gpu = slab, is_free, layers_on_gpu

    def used_bytes(self) -> int:
        """Where the part of a lent slab ends that kept activations need."""
        return 0 if self._lent is None else _top(self._alive())

    def _check_host(self, more_bytes: int) -> None:
        free_gib = host_share_bytes() / GIB
        if self.host_limit_gib is not None:
            free_gib = self.host_limit_gib - self._slab.numel() / GIB
        missing_gib = more_bytes / GIB - free_gib
        if missing_gib > 0:
            raise UserError(
                f"host memory is {missing_gib:.1f} GiB short of the {more_bytes / GIB:.1f} GiB "
                "that offloaded activations need: set --keep_attention false (half of it), "
                "--offload_activations auto or none (GPU memory first), or a shorter --seq_len"
            )

    # --- forward ---------------------------------------------------------------------------

    def save(self, rows: list[Tensor], lse: Tensor | None, layers_above: int) -> Saved:
        """Keeps `rows`, (T, ...) each, and lse (H, T) until `load`.

        Layers of which fewer than `layers_on_gpu` follow stay on the GPU, and so does what the
        slab cannot take (more forwards than backwards).
        """
        alive = self._alive()
        saved = Saved(rows, lse)
        self._stack = [weakref.ref(s) for s in [*alive, saved]]
        if layers_above < self.layers_on_gpu:
            return saved
        offset = _top(alive)
        stop = offset + saved.nbytes
        if stop > self._slab.numel() or not (self._lent is None or self._is_free(offset, stop)):
            return saved
        saved.offset = offset
        with annotate("offload out"), _after_compute(self._out):
            if self._out is not None:
                self._out.wait_stream(self._in)  # what is overwritten may still be on its way in
            assert saved.on_gpu is not None
            for host, tensor in zip(self._host(saved), saved.on_gpu, strict=True):
                host.copy_(tensor, non_blocking=True)
        return saved

    def release(self, saved: Saved) -> None:
        """Ends forward's use of the tensors: their memory may be reused once the copies are out."""
        if saved.offset is not None:
            if self._out is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._out)
            saved.on_gpu = None

    # --- backward --------------------------------------------------------------------------

    def load(self, saved: Saved, tiles: list[slice]) -> list[Tensor]:
        """The tensors of `save`, on the GPU. A tile's tokens may be read after `wait(tile)`.

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
        if saved.on_gpu is not None:
            return saved.on_gpu
        if self._filled is None:
            self._buffers = [
                torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in saved.specs
            ]
            self._fill_begin(saved)
            for tile in tiles:
                self._fill(saved, tile)
        self._reader, self._filled = self._watched(saved), None
        return list(self._buffers)

    def wait(self, tile: slice) -> None:
        ready = self._tile_ready.pop(tile.start, None)
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def retire(self, saved: Saved, tile: slice) -> None:
        """The layer is done with this tile: the layer below's takes its place."""
        if saved.on_gpu is not None:
            return
        below = self._filled() if self._filled is not None else None
        if below is None:
            alive = self._alive()
            if not alive or alive[-1].on_gpu is not None or alive[-1].specs != saved.specs:
                return
            below = alive[-1]
            self._fill_begin(below)
        self._fill(below, tile)

    def finish(self, saved: Saved) -> None:
        """The layer's backward is over; with the last one go the buffers."""
        saved.on_gpu = self._reader = None
        if self._filled is None:
            self._buffers = []

    def _watched(self, saved: Saved) -> weakref.ref[Saved]:
        """A reference by which the store learns that a graph was dropped before its backward was
        over: memory ran out, or another layer came next than the one below."""

        def gone(reference: weakref.ref[Saved]) -> None:
            if reference is self._reader or reference is self._filled:
                self._abandon()

        return weakref.ref(saved, gone)

    def _abandon(self) -> None:
        """Lets go of the buffers. They may be reused when the copies into them are done."""
        if self._in is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._in)
        self._reader, self._filled = None, None
        self._buffers, self._tile_ready = [], {}

    def _fill_begin(self, saved: Saved) -> None:
        """Starts to fill the buffers; the log-sum-exp goes first and whole."""
        self._filled = self._watched(saved)
        self._tile_ready = {}
        with annotate("offload in"), _after_compute(self._in):
            if self._in is not None:
                self._in.wait_stream(self._out)
            for buffer, host in self._pairs(saved)[saved.rows :]:
                buffer.copy_(host, non_blocking=True)

    def _fill(self, saved: Saved, tile: slice) -> None:
        with annotate("offload in"), _after_compute(self._in):
            for buffer, host in self._pairs(saved)[: saved.rows]:
                buffer[tile].copy_(host[tile], non_blocking=True)
            if self._in is not None:
                self._tile_ready[tile.start] = self._in.record_event()

    def _pairs(self, saved: Saved) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._buffers, self._host(saved), strict=True))

    def tensors_on_gpu(self) -> list[Tensor]:
        """What layers keep on the GPU now, the buffers of backward included."""
        kept = [ref() for ref in self._stack]
        return [*self._buffers, *(t for saved in kept if saved for t in saved.on_gpu or ())]

    # --- the slab --------------------------------------------------------------------------

    @property
    def _slab(self) -> Tensor:
        return self._pinned.data if self._lent is None else self._lent

    def _alive(self) -> list[Saved]:
        return [s for ref in self._stack if (s := ref()) is not None and not s.used]

    def _host(self, saved: Saved) -> list[Tensor]:
        views, start = [], saved.offset
        assert start is not None
        for shape, dtype in saved.specs:
            stop = start + _nbytes(shape, dtype)
            size = shape.numel() * dtype.itemsize
            views.append(self._slab[start : start + size].view(dtype).view(shape))
            start = stop
        return views


def _always(start: int, stop: int) -> bool:
    return True


def _top(alive: list[Saved]) -> int:
    """The slab's first byte above all of them."""
    return max((s.offset + s.nbytes for s in alive if s.offset is not None), default=0)


@contextmanager
def _after_compute(stream: Any) -> Iterator[None]:
    """Work on `stream` that starts when everything given to the compute stream so far is done."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return whole_lines(shape.numel() * dtype.itemsize)


def free_gpu_bytes(device: torch.device) -> int:
    """What the driver has free and what torch's allocator holds without using it."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
