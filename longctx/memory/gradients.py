"""The gradients that backward delivers, in `parameter.grad`, as torch's loops expect them.

On the GPU such a gradient is the tensor that autograd made. If its block's place is the host, it is
copied there as soon as it is finished, and a `HeldGradient` stands for it (held.py). In both cases
`parameter.grad` is the only record: code that sets it to None, replaces it or scales it changes the
gradient itself. docs/states.md draws the road of a gradient on the host.

Gradients of several batches are summed in fp32, those of 16-bit weights too. Where a step was
planned for several batches, gradients are fp32 from the first batch on, so that views of them show
every sum. Otherwise the gradient of a single batch stays in the dtype in which it arrives. On the
host later batches are added in pieces: each is copied up, added to, and copied down.

With several processes the finished gradient is averaged over them in fp32 while backward goes on,
rounded once, and ready when backward ends. This replaces DDP, which would keep a second copy of
every gradient.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longctx.constants import GIB
from longctx.errors import print_rank0
from longctx.kernels.annotate import annotate
from longctx.kernels.square_sums import CHUNK, square_sums
from longctx.memory.clipping import Clipping, norm_from
from longctx.memory.guard import any_is_seen, is_seen, share_memory, unguarded
from longctx.memory.held import Held, HeldGradient
from longctx.memory.place import IN_FLIGHT_BYTES
from longctx.memory.states import Block, Slot
from longctx.memory.stream import StateStream

SEEN = (
    "another batch adds to a gradient in 16 bits of which somebody keeps a view, and the view "
    "would not show the sum: say batches=2 or more to exact_adamw, or drop the view before backward"
)
_FLOATS = (torch.bfloat16, torch.float32)
LARGE_BYTES = 2**26
"""A line is printed if a view brings a gradient of at least this many bytes to the GPU."""


class WatchedGradients:
    """The gradients of the parameters that are watched."""

    def __init__(
        self,
        stream: StateStream,
        *,
        is_last: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_last` says whether the batch whose backward runs is the step's last one."""
        self._stream, self._is_last = stream, is_last
        self._slots: dict[nn.Parameter, Slot] = {}
        self._watched: list[Slot] = []
        self._order: dict[Slot, None] = {}
        """The slots, in the order in which backward delivered their gradients."""
        self._leaving: deque[tuple[object, int, Tensor]] = deque()
        """Gradients whose copy to the host may still run: its mark, their bytes, and the tensor."""
        self._reducing: deque[tuple[Slot, Tensor, dist.Work]] = deque()
        """Gradients that are being summed over processes, in fp32."""
        self._said_large = False
        self._clipping = Clipping(stream.device, math.gcd(CHUNK, stream.piece))
        self._processes = dist.get_world_size() if dist.is_initialized() else 1

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._stream.device

    def watch(self, parameter: nn.Parameter, slot: Slot) -> None:
        """Takes the gradients that backward delivers for the parameter of a slot."""
        self._slots[parameter] = slot
        self._watched.append(slot)
        parameter.grad_dtype = None  # type: ignore[attr-defined]  # sums have fp32
        # Hooks hold a weak reference: garbage collection does not see through those of parameters.
        me, number = weakref.ref(self), len(self._watched) - 1

        def before(grad: Tensor) -> None:
            if (alive := me()) is not None:
                alive._widen(alive._watched[number])

        def after(parameter: Tensor) -> None:
            if (alive := me()) is not None:
                alive._arrive(alive._watched[number])

        hooks = [
            parameter.register_hook(before),
            parameter.register_post_accumulate_grad_hook(after),
        ]
        weakref.finalize(self, _remove, hooks)

    def __len__(self) -> int:
        """Returns the number of gradients."""
        return sum(1 for _ in self._present())

    def _present(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yields the gradients that exist."""
        for parameter, slot in self._slots.items():
            if (grad := parameter.grad) is not None:
                yield slot, grad

    def _is_seen(self, grad: Tensor, holders: int) -> bool:
        """Whether other code has views of a gradient on the GPU, beyond `holders` references.
        Gradients may share a storage with each other: autograd hands out parts of a larger one."""
        if not is_seen(grad, holders):
            return False
        here = (found[0] for _, g in self._present() if (found := _here(g)) is not None)
        return is_seen(grad, holders, owners=sum(share_memory(x, grad) for x in here))

    def are_seen(self) -> bool:
        """Whether other code has views of a gradient that an update would read later."""
        if all(block.place.all_on_gpu for block in self._stream.blocks):
            return False
        later = (grad for slot, grad in self._present() if not slot[0].place.all_on_gpu)
        here = [found for grad in later if (found := _here(grad)) is not None]
        return any_is_seen(here, beside=[grad for *_, grad in self._leaving])

    # --- from backward -------------------------------------------------------------------------

    def _widen(self, slot: Slot) -> None:
        """Prepares a gradient for another batch: makes it fp32, and applies the factor of
        `clip`."""
        block, i = slot
        parameter = block.parameters[i]
        grad = parameter.grad
        if grad is None or isinstance(grad, HeldGradient):
            return
        self._settle_block(block)
        if block.streams:  # a tensor that a loop has assigned, maybe on the host
            held = Held(self, slot)
            held.here = grad.to(self.device).contiguous()
            _show(parameter, held, held.here.dtype)
        elif grad.dtype != torch.float32:
            factor = self._clipping.factor(slot, grad)
            if self._is_seen(grad, 2):
                raise RuntimeError(SEEN)
            _make_wide(grad)
            if factor is not None:
                grad.mul_(factor.to(grad.device))
                del self._clipping.clipped[slot]  # the sum that follows is no change by others

    def _arrive(self, slot: Slot) -> None:
        """Takes a gradient after autograd has written `parameter.grad` or added to it."""
        block, i = slot
        parameter = block.parameters[i]
        self._order.pop(slot, None)
        self._order[slot] = None
        grad = parameter.grad
        if grad is None or isinstance(grad, HeldGradient):  # `add` has summed it where it is
            return
        if grad.layout != torch.strided:
            raise RuntimeError("exact AdamW takes no sparse gradients: use sparse=False")
        self._settle_block(block)
        self._clipping.measured.pop(slot, None)
        leaves = self._leaves(block, grad)
        if block.sums and not leaves:
            _make_wide(grad)
        if leaves or block.streams:  # torch refuses a GPU's tensor as grad of a CPU parameter
            held = Held(self, slot)
            _show(parameter, held, torch.float32 if block.sums else grad.dtype)
            grad = grad.to(self.device).contiguous()  # a loop may have moved the weight
            if leaves:
                self._send(held, grad)
            else:
                held.here = grad
        elif self._processes > 1 and self._is_last():
            self._reduce(slot, grad)

    def _settle_block(self, block: Block) -> None:
        """Ends the updates that still read the block's gradients."""
        if block.update is not None:  # the loop's forward did not call the block's modules
            self._stream.flush()
        self._stream.wait(block)

    # --- on the host ---------------------------------------------------------------------------

    def _leaves(self, block: Block, grad: Tensor) -> bool:
        """Whether a gradient is copied to its block's room on the host."""
        room = block.host_grad
        fits = room is not None and (room.dtype in (torch.float32, grad.dtype))
        return fits and block.has_room()

    def _send(self, held: Held, grad: Tensor) -> None:
        """Copies a gradient to its room on the host, over what is there."""
        block, i = held.slot
        room = block.host_grad
        assert room is not None
        earlier = block.waiting(i)
        if earlier is not None and earlier is not held:  # other code has kept it: bring it up first
            earlier.here, earlier.factor = self.whole(earlier, self.device), None
        grad = grad.to(self.device)
        grad = grad.to(room.dtype)
        held.squares = square_sums(grad, self._clipping.chunk)
        with annotate("gradient out"), self._stream.down.after(self._stream.compute.mark()):
            room[block.ranges[i]].copy_(grad.view(-1), non_blocking=True)
        held.here, held.factor = None, None
        block.wait_on_host(i, held)
        self._hold(grad)

    def _hold(self, grad: Tensor) -> None:
        """Keeps a gradient alive until its copy has ended."""
        self._leaving.append((self._stream.down.mark(), grad.nbytes, grad))
        # Backward waits for the oldest copies: queued behind a slow link, they would hold memory
        # that the next layer needs.
        while sum(nbytes for _, nbytes, _ in self._leaving) > IN_FLIGHT_BYTES:
            self._stream.compute.wait(self._leaving.popleft()[0])

    def add(self, held: Held, grad: Tensor) -> None:
        """Adds another batch's gradient to one that is held, in fp32."""
        self._settle_block(held.slot[0])
        room = held.slot[0].host_grad
        if held.here is None and room is not None and room.dtype == torch.float32:
            self._add_on_host(held, grad.to(self.device).contiguous())
            return
        total = self.whole(held, self.device) if held.here is None else held.here
        if total.dtype != torch.float32:
            if held.here is not None and self._is_seen(held.here, 1):
                raise RuntimeError(SEEN)
            _make_wide(total)
        if held.here is not None and held.factor is not None:
            total.mul_(held.factor.to(total.device))
        held.here, held.factor = total.add_(grad.to(total.device)), None

    def _add_on_host(self, held: Held, grad: Tensor) -> None:
        """Adds a gradient to an fp32 sum in the block's room on the host, piece by piece."""
        block, i = held.slot
        assert block.host_grad is not None
        stream, factor = self._stream, held.factor
        begin = stream.compute.mark()
        assert held.squares is not None
        sums = held.squares.split(stream.piece // self._clipping.chunk)
        with annotate("gradient out"):
            for n, piece in enumerate(block.pieces(i, stream.piece)):
                home, slot = block.host_grad[piece], stream.next_slot()
                total = slot.part(3, home)
                # The sum so far may still be on its way down, from `_send` of the first batch.
                with stream.up.after(begin, slot.free, stream.down.mark()):
                    total.copy_(home, non_blocking=True)
                    arrived = stream.up.mark()
                with stream.update.after(arrived):
                    if factor is not None:
                        total.mul_(factor)
                    total.add_(block.grad_at(i, piece, grad))
                    sums[n].copy_(square_sums(total, self._clipping.chunk))
                    added = stream.update.mark()
                with stream.down.after(added):
                    home.copy_(total, non_blocking=True)
                    slot.free = stream.down.mark()
        held.factor = None
        self._hold(grad)
        if factor is not None:
            self._hold(factor)

    def whole(self, held: Held, device: torch.device) -> Tensor:
        """Returns a held gradient in its parameter's shape: `here` itself if it is on the device
        and has no factor, or if other code has views of it; otherwise a copy on the device."""
        block, i = held.slot
        self._settle_block(block)
        if held.here is not None:
            grad = held.here if self._is_seen(held.here, 1) else held.here.to(device)
        else:
            assert block.host_grad is not None
            self._stream.compute.wait(self._stream.down.mark())
            if device.type == "cpu":  # the process reads it next; a GradScaler has copied its scale
                self._stream.compute.synchronize()
            room = block.host_grad[block.ranges[i]].view(block.parameters[i].shape)
            grad = room.to(device, copy=True)
        return grad if held.factor is None else grad.float() * held.factor.to(grad.device)

    def replace(self, held: Held, grad: Tensor) -> None:
        """Takes the changed values of a held gradient, which `whole` returned."""
        if held.here is None:
            self._send(held, grad)
        else:
            held.here, held.factor = grad, None

    def keep(self, held: Held, grad: Tensor) -> None:
        """Keeps the tensor that `whole` returned where it is, since other code has views of it."""
        if held.here is None and grad.nbytes >= LARGE_BYTES and not self._said_large:
            self._said_large = True
            print_rank0(
                f"a gradient of {tuple(grad.shape)} takes {grad.nbytes / GIB:.2f} GiB more on "
                f"{grad.device}, where it stays: a view of it was made"
            )
        held.here, held.factor = grad, None

    def put(self, held: Held, grad: Tensor) -> None:
        """Makes a tensor of other code the values of a held gradient (`parameter.grad.data =
        x`)."""
        block, i = held.slot
        self._settle_block(block)
        if grad.shape != block.parameters[i].shape or not grad.is_floating_point():
            raise ValueError(
                f"parameter.grad.data got {tuple(grad.shape)} in {grad.dtype} for a parameter of "
                f"{tuple(block.parameters[i].shape)}"
            )
        held.here, held.factor = grad.detach(), None

    def multiply(self, held: Held, factor: Any) -> None:
        """Has the update multiply a held gradient by a factor; a gradient of which other code has
        views is multiplied at once."""
        self._settle_block(held.slot[0])
        factor = torch.as_tensor(factor, dtype=torch.float32).to(self.device)
        if held.here is not None and self._is_seen(held.here, 1):
            held.here.mul_(factor.to(held.here.device))
            return
        held.factor = factor.clone() if held.factor is None else held.factor * factor

    # --- over processes ------------------------------------------------------------------------

    def _reduce(self, slot: Slot, grad: Tensor) -> None:
        """Starts the sum of a gradient over all processes."""
        if not self._reducing:  # autograd calls `settle` when backward ends
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)  # type: ignore
        total = grad.float()
        self._reducing.append((slot, total, dist.all_reduce(total, async_op=True)))
        while sum(total.nbytes for _, total, _ in self._reducing) > 2 * IN_FLIGHT_BYTES:
            self._end_reduce()

    def _end_reduce(self) -> None:
        """Waits for the oldest sum over processes and writes the mean into its gradient."""
        (block, i), total, work = self._reducing.popleft()
        work.wait()
        grad = block.parameters[i].grad
        mean = total.div_(self._processes)
        if grad is not None and grad is not mean:
            grad.copy_(mean)

    # --- to the update -------------------------------------------------------------------------

    def settle(self) -> None:
        """Has the computation wait until all that backward delivered has arrived."""
        while self._reducing:
            self._end_reduce()
        self._stream.compute.wait(self._stream.update.mark())

    def norm(self) -> Tensor:
        """Returns the norm of all gradients, fp32, ()."""
        self.settle()
        return self._clipping.norm(dict(self._present()))

    def norm_of(self, held: Held) -> Tensor:
        """Returns the norm of a held gradient, fp32, ()."""
        self.settle()
        return norm_from([self.squares_of(held)])

    def squares_of(self, held: Held) -> Tensor:
        """Returns the square sums of a held gradient."""
        return self._clipping.squares_of_held(held)

    def clip(self, max_norm: float | None) -> Tensor:
        """Returns the norm of all gradients, fp32, (), and scales them down to `max_norm`. Those in
        16 bits are scaled when the update reads them, so that nothing is rounded, unless other code
        has views of them."""
        norm = self.norm()
        if not max_norm:
            return norm
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_
        self._clipping.scale(dict(self._present()), factor, lambda grad: self._is_seen(grad, 2))
        return norm

    def broken(self) -> Slot | None:
        """Returns the slot of the first gradient of the last backward that is not finite, in the
        order in which they came. Those that the model has dropped since are as `norm` measured
        them."""
        present = dict(self._present())
        for slot in self._order:
            squares = self._clipping.last_squares(slot, present.get(slot))
            if squares is not None and not squares.isfinite().all():
                return slot
        return None

    def forget_order(self) -> None:
        """Leaves `broken` no gradient until others come."""
        self._order.clear()

    def tensors(self) -> list[Tensor]:
        """Returns the gradients on the GPU that are in no `parameter.grad`."""
        held = [g.held.here for _, g in self._present() if isinstance(g, HeldGradient)]
        here = [x for x in held if x is not None and x.device == self.device]
        return [*here, *(grad for *_, grad in self._leaving)]

    def take(self, slot: Slot) -> tuple[Tensor | None, Tensor | None]:
        """Returns a gradient for its update, contiguous, or None if it is in its room on the host;
        and the factor by which the update multiplies it, fp32, (), or None for 1."""
        parameter = slot[0].parameters[slot[1]]
        grad = parameter.grad
        assert grad is not None
        factor = None
        if isinstance(grad, HeldGradient):
            held = grad.held
            if held is slot[0].waiting(slot[1]):
                return None, held.factor
            if held.slot == slot and held.here is not None:
                return held.here.contiguous(), held.factor
            grad = held.whole(self.device)  # the loop assigned another parameter's gradient
        else:
            factor = self._clipping.factor(slot, grad)
        if grad.shape != parameter.shape or grad.layout != torch.strided:
            raise RuntimeError(
                f"a gradient of {tuple(grad.shape)} ({grad.layout}) is not that of a parameter of "
                f"{tuple(parameter.shape)}"
            )
        if type(grad) is Tensor and grad.dtype in _FLOATS and grad.is_contiguous():
            return grad, factor
        with unguarded():
            return (grad if grad.dtype in _FLOATS else grad.float()).contiguous(), factor

    def end(self) -> None:
        """Ends the step: all gradients were given to the update, and none is on its way to the
        host."""
        self._stream.compute.wait(self._stream.down.mark())
        self._leaving.clear()


def _here(grad: Tensor) -> tuple[Tensor, int] | None:
    """Returns the gradient's tensor on the GPU, if there is one, and its holders (`is_seen`)."""
    if not isinstance(grad, HeldGradient):
        return grad, 2  # `parameter.grad` and its Python object
    return None if grad.held.here is None else (grad.held.here, 1)


def _show(parameter: nn.Parameter, held: Held, dtype: torch.dtype) -> None:
    """Makes a held gradient the `grad` of its parameter, wherever the parameter is now."""
    with unguarded():
        parameter.grad = HeldGradient(parameter, held, dtype)


def _make_wide(grad: Tensor) -> None:
    """Gives a gradient fp32 values in place: every holder of the tensor sees them."""
    with unguarded():
        grad.data = grad.float()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
