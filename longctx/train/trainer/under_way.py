"""Numbers of a step that a GPU will have computed: on their way to the host, and read when they are
needed.

Reading a tensor on the host waits for everything that the GPU was given before. These are copied at
a mark of their own, so that the host waits for what they depend on alone, while work that came
later goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class UnderWay:
    """Numbers by name, each of one tensor's elements."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Starts the copies, from the device of the first tensor. Later changes of the tensors are
        not seen."""
        self._sizes = {name: x.numel() for name, x in tensors.items()}
        device = next(iter(tensors.values())).device
        flat = [x.detach().to(device, torch.float64).flatten() for x in tensors.values()]
        wide = torch.cat(flat)
        self._arrived: torch.cuda.Event | None = None
        self._there = wide
        if wide.is_cuda:
            self._there = torch.empty(wide.shape, dtype=wide.dtype, pin_memory=True)
            self._there.copy_(wide, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(wide.device))
        self.guard = (wide * 0.0).sum().float()  # ()
        """A tensor on the device: 0 if all numbers are finite, else NaN."""

    def read(self) -> dict[str, list[float]]:
        """Waits until the numbers are here, and returns them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = self._there.split([*self._sizes.values()])
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}
