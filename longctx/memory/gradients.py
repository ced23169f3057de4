"""What backward delivers: each parameter's gradient, taken as soon as it is finished.

Gradients of several batches add up in fp32; that of a single one stays in the dtype in which it
arrives, on the GPU as the tensor that autograd made. Where a block's place says so it leaves for
the host at once, and later batches are added to it there: up, add, down, piece by piece.

The norm is known when backward ends: the square sum of every piece of PIECE elements is taken while
the gradient is on the GPU, always of the same pieces, so that it has the same bits wherever the
gradient goes, and the pieces are added up in fp64. (torch.nn.utils.clip_grad_norm_ would round each
bf16 gradient's norm to 8 bits.)

Several processes: the mean over them is taken of the finished gradient, in fp32, while backward
goes on; it is rounded once. No DDP is needed, which would keep a second copy of every gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.annotate import annotate
from longctx.memory.states import Block
from longctx.memory.stream import StateStream

IN_FLIGHT_BYTES = 2**28
"""What may be on its way to the host, or to other processes, before backward waits for it: more
would hold back memory that the next layer needs."""
Place = tuple[Block, int]
"""A block, and a parameter's number in it."""


class Gradients:
    """The gradients of one step, until `take` hands them to the update."""

    def __init__(
        self,
        stream: StateStream,
        *,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_last` says whether the batch whose backward runs is the step's last one."""
        self._stream, self._is_last = stream, is_last
        self._blocks: Sequence[Block] = stream.blocks
        self._on_gpu: dict[Place, Tensor] = {}
        self._on_host: dict[Place, None] = {}
        self._arrived: dict[Place, None] = {}
        """All of them, in the order of backward."""
        self._leaving: deque[tuple[object, int, Tensor]] = deque()
        self._reducing: deque[tuple[Place, Tensor, dist.Work]] = deque()
        self._first_piece: dict[Place, int] = {}
        count = 0
        for block in self._blocks:
            for i in range(len(block.ranges)):
                self._first_piece[block, i] = count
                count += len(block.pieces(i, stream.piece))
        self._norms = torch.zeros(count, dtype=_norm_dtype(stream.device), device=stream.device)
        self._processes = dist.get_world_size() if dist.is_initialized() else 1

    def __len__(self) -> int:
        return len(self._arrived)

    # --- from backward -------------------------------------------------------------------------

    def add(self, block: Block, i: int, grad: Tensor) -> None:
        """Takes the gradient of the block's i-th parameter over one more batch."""
        place = (block, i)
        grad = grad.contiguous()
        if block.host_grad is not None:
            if place in self._on_host and block.host_grad.dtype == torch.float32:
                self._add_on_host(place, grad)
                return
            if place not in self._arrived and self._leave(place, grad):
                self._arrived[place] = None
                return
        self._arrived[place] = None
        earlier = self._back(place) if place in self._on_host else self._on_gpu.pop(place, None)
        if earlier is not None:
            grad = (earlier if earlier.dtype == torch.float32 else earlier.float()).add_(grad)
        self._on_gpu[place] = grad
        if self._processes > 1:
            if self._is_last():
                self._reduce(place)
            return
        self._measure(place, grad)

    def _measure(self, place: Place, grad: Tensor) -> None:
        block, i = place
        for n, piece in enumerate(block.pieces(i, self._stream.piece)):
            self._measure_piece(place, n, block.grad_at(i, piece, grad))

    def _measure_piece(self, place: Place, n: int, grad: Tensor) -> None:
        norm = self._norms[self._first_piece[place] + n]
        torch.linalg.vector_norm(grad, dtype=self._norms.dtype, out=norm)

    # --- to the host ---------------------------------------------------------------------------

    def _leave(self, place: Place, grad: Tensor) -> bool:
        """Sends the step's first gradient to the host; False if its room there is in use."""
        block, i = place
        room = block.host_grad
        if room is None or not block.has_room():
            return False
        self._measure(place, grad)
        grad = grad.to(room.dtype)
        with annotate("gradient out"), self._stream.down.after(self._stream.compute.mark()):
            room[block.ranges[i]].copy_(grad.view(-1), non_blocking=True)
        self._on_host[place] = None
        block.grad_is_on_host = True
        self._hold(grad)
        return True

    def _hold(self, grad: Tensor) -> None:
        """Keeps a gradient until it has left."""
        self._leaving.append((self._stream.down.mark(), grad.nbytes, grad))
        while sum(nbytes for _, nbytes, _ in self._leaving) > IN_FLIGHT_BYTES:
            self._stream.compute.wait(self._leaving.popleft()[0])

    def _add_on_host(self, place: Place, grad: Tensor) -> None:
        block, i = place
        assert block.host_grad is not None
        stream = self._stream
        begin = stream.compute.mark()
        with annotate("gradient out"):
            for n, piece in enumerate(block.pieces(i, stream.piece)):
                home, slot = block.host_grad[piece], stream.next_slot()
                total = slot.part(3, home)
                # What is added to may still be on its way down.
                with stream.up.after(begin, slot.free, stream.down.mark()):
                    total.copy_(home, non_blocking=True)
                    arrived = stream.up.mark()
                with stream.update.after(arrived):
                    total.add_(block.grad_at(i, piece, grad))
                    self._measure_piece(place, n, total)
                    added = stream.update.mark()
                with stream.down.after(added):
                    home.copy_(total, non_blocking=True)
                    slot.free = stream.down.mark()
        self._hold(grad)

    def _back(self, place: Place) -> Tensor:
        """A gradient in 16 bits that left for the host before another batch came."""
        block, i = place
        assert block.host_grad is not None
        self._stream.compute.wait(self._stream.down.mark())
        grad = block.host_grad[block.ranges[i]].to(self._stream.device)
        del self._on_host[place]
        block.grad_is_on_host = any(other is block for other, _ in self._on_host)
        return grad.view(block.parameters[i].shape)

    # --- over processes ------------------------------------------------------------------------

    def _reduce(self, place: Place) -> None:
        total = self._on_gpu[place].float()
        self._reducing.append((place, total, dist.all_reduce(total, async_op=True)))
        while sum(total.nbytes for _, total, _ in self._reducing) > 2 * IN_FLIGHT_BYTES:
            self._end_reduce()

    def _end_reduce(self) -> None:
        place, total, work = self._reducing.popleft()
        work.wait()
        mean = total.div_(self._processes).to(self._on_gpu[place].dtype)
        self._on_gpu[place] = mean
        self._measure(place, mean)

    # --- to the update -------------------------------------------------------------------------

    def norm(self) -> Tensor:
        """The norm of all gradients, fp32, (). All that backward delivered has arrived after it."""
        while self._reducing:
            self._end_reduce()
        self._stream.compute.wait(self._stream.update.mark())
        return self._norms.double().square().sum().sqrt().float()

    def broken(self) -> Place | None:
        """Where the first gradient is that is not finite, in the order of backward."""
        finite = self._norms.isfinite().tolist()
        for block, i in self._arrived:
            first = self._first_piece[block, i]
            if not all(finite[first : first + len(block.pieces(i, self._stream.piece))]):
                return block, i
        return None

    def tensors(self) -> list[Tensor]:
        """Those on the GPU."""
        return [*self._on_gpu.values(), *(grad for *_, grad in self._leaving)]

    def take(self) -> dict[Place, Tensor | None]:
        """All gradients, None for those on the host; a new step begins."""
        taken: dict[Place, Tensor | None] = {**self._on_gpu, **self._on_host}
        self._stream.compute.wait(self._stream.down.mark())
        self._on_gpu, self._on_host, self._arrived = {}, {}, {}
        self._leaving.clear()
        self._norms.zero_()
        return taken

    def clear(self) -> None:
        """Forgets them."""
        if not self._arrived:
            return
        while self._reducing:
            self._end_reduce()
        for block, _ in self._on_host:
            block.grad_is_on_host = False
        self.take()


def _norm_dtype(device: torch.device) -> torch.dtype:
    """Torch adds up a row on the CPU one after the other: in fp32 9% of the squares of 5e8 numbers
    would be missing."""
    return torch.float32 if device.type == "cuda" else torch.float64
