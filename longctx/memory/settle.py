"""Gives everything that waits on the host its place in one slab: exactly sized, locked once.

    slab   | weights, moments, remainders of each block | gradients | activations of a step     |
                                                                    | or gradients of layers    |

A layer's activations live from its forward to its backward, its gradient from its backward to the
next step's forward. So if a step is one batch, they share memory. Layer i's gradient begins where
its activations begin, or where the gradient below ends. It overwrites activations that its own
backward has just read: below it are activations of lower layers, above it none are left. Some loops
run several forwards before a backward, so both sides check before they write (`has_room`,
`is_free`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from longctx.cost.kept import Ladder
from longctx.memory.machine import own_bytes
from longctx.memory.place import BlockSizes, Place
from longctx.memory.slab import LINE, PinnedSlab, whole_lines
from longctx.memory.states import Block, BlockSpec
from longctx.memory.store import ActivationStore


class HostRoom:
    """The host memory that a model's states and activations need, and its slab."""

    def __init__(
        self,
        specs: Sequence[BlockSpec],
        places: Sequence[Place],
        *,
        accumulates: bool,
        kept_bytes: Sequence[int] = (),
        sizes: Sequence[BlockSizes] | None = None,
    ) -> None:
        """`kept_bytes` are the bytes that each layer keeps on the host. `accumulates` says that a
        step has several batches, so that gradients outlive a forward. `sizes` are those of the
        specs, if they were counted before."""
        if sizes is None:
            sizes = [spec.sizes(accumulates=accumulates) for spec in specs]
        self.blocks = [
            Block(spec, place, sums=accumulates) for spec, place in zip(specs, places, strict=True)
        ]
        self._grad_dtype = torch.float32 if accumulates else None  # the weights'
        layers = {
            block: (block.spec.layer, size.grad)
            for block, size in zip(self.blocks, sizes, strict=True)
            if block.spec.layer is not None and not block.place.grad and not accumulates
        }
        below = [*accumulate(kept_bytes, initial=0)]
        self._starts: dict[Block, int] = {}
        """The first byte of a layer's gradient in the shared part."""
        end = 0
        for block, (layer, grad) in layers.items():
            self._starts[block] = whole_lines(max(end, below[min(layer, len(kept_bytes))]))
            end = self._starts[block] + grad
        self.shared_bytes = max(end, below[-1])
        self.states_bytes = sum(
            whole_lines(size.on_host(block.place) - (size.grad if block in layers else 0))
            # A block has up to five tensors, and each is rounded up.
            + 4 * LINE
            for block, size in zip(self.blocks, sizes, strict=True)
            if not block.place.all_on_gpu
        )

    @property
    def nbytes(self) -> int:
        return self.states_bytes + self.shared_bytes

    def settle(
        self, device: torch.device, store: ActivationStore | None, ladder: Ladder = ()
    ) -> None:
        """Locks the slab and moves every block to its place. Weights that are in host memory of
        their own move before it is locked, so that only one block at a time exists twice. Raises
        UserError if the host has too little memory."""
        late = leaving_bytes([block.spec for block in self.blocks], device) > 0
        self._slab = PinnedSlab(self.nbytes, device, locked=not late)
        self._used = 0
        shared = self._slab.data[self.states_bytes :]
        for block in self.blocks:
            block.settle(device, self._take, self._gradient(block, shared))
        if late:  # otherwise it was locked first: copies from the GPU are faster into locked memory
            self._slab.lock()
        if store is not None:
            store.lend(shared, ladder, self._is_free)
            for block, start in self._starts.items():
                block.has_room = partial(_ends_below, store, start)

    def _gradient(self, block: Block, shared: Tensor) -> Tensor | None:
        """Returns the room for a gradient that waits on the host; None if it stays on the GPU."""
        if block.place.grad:
            return None
        dtype = self._grad_dtype or block.dtype
        if block not in self._starts:
            return self._take(block.trained_numel, dtype)
        start = self._starts[block]
        return shared[start : start + block.trained_numel * dtype.itemsize].view(dtype)

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        start, nbytes = self._used, numel * dtype.itemsize
        self._used += whole_lines(nbytes)
        assert self._used <= self.states_bytes, "the slab was sized too small"
        return self._slab.data[start : start + nbytes].view(dtype)

    def _is_free(self, start: int, stop: int) -> bool:
        """Whether activations may be written to these bytes of the shared part."""
        for block, begin in self._starts.items():
            if block.grad_is_on_host and block.host_grad is not None:
                if start < begin + block.host_grad.nbytes and begin < stop:
                    return False
        return True


def leaving_bytes(specs: Sequence[BlockSpec], device: torch.device) -> int:
    """Returns the bytes of host memory that a model's weights hold now and that are free once they
    have moved, block by block: all but those of the largest block, which exists twice for a
    moment."""
    if device.type != "cuda":
        return 0
    held = [own_bytes(part.tensor for part in spec.parts) for spec in specs]
    return sum(held) - max(held, default=0)


def _ends_below(store: ActivationStore, start: int) -> bool:
    return store.used_bytes() <= start
