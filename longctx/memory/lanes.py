"""Lanes of work on a GPU, which wait for each other's marks: CUDA streams and events.

On the CPU all work is done at once, and marks are None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Lane:
    """A CUDA stream for copies or updates."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, *marks: Any) -> Iterator[None]:
        """Returns a context whose work starts when all the marks are reached."""
        if self.stream is None:
            yield
            return
        for mark in marks:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """Returns a mark at the end of the work that the lane was given so far."""
        return None if self.stream is None else self.stream.record_event()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


class Compute:
    """The lane of forward and backward: the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).record_event() if on_gpu else None

    def wait(self, mark: Any) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class RingSlot:
    """A buffer of the ring: room on the GPU for the parts of a piece that wait on the host."""

    def __init__(self, numel: int, compute: Compute) -> None:
        self._words = torch.empty(4, numel, dtype=torch.float32, device=compute.device)
        self.free: Any = compute.mark()
        """The mark after which the buffer may be written: that of the previous piece or owner."""

    def part(self, row: int, like: Tensor) -> Tensor:
        """Returns the room of a row of the slot for a tensor of this size and dtype."""
        return self._words[row].view(like.dtype)[: like.numel()]
