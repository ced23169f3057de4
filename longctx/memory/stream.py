"""The stream of model states over the link to the host, beside the computation.

If something of a block (states.py) waits on the host, the block is brought to the GPU before it is
used. If an update of it is outstanding, it is made on the way, piece by piece through a ring of
three buffers (w weight, m v r states, g gradient; only what is on the host moves):

    up       w m v r g | w m v r g | w m v r g | ...      host -> GPU, PIECE elements at a time
    update             | adamw     | adamw     | ...      kernels/adamw.py
    down                           | w m v r   | ...      GPU -> host

So both directions of the link and the computation are busy at once, and no block takes more of the
GPU than its weights. Frozen weights are copied up and dropped, since those on the host have not
changed. Weights that live on the host are on the GPU for the block that computes and the next AHEAD
blocks; those of a finished block are dropped.

Lanes wait for each other's marks. The process itself waits only in `flush`, and for gradients that
somebody reads on the host. A tensor is dropped only when the computation has waited for the last
copy out of it, so that its memory may be reused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longctx.errors import UserError
from longctx.kernels.adamw import CHECKED, adamw_
from longctx.kernels.annotate import annotate
from longctx.memory.place import AHEAD, MOVING, PIECE, RING
from longctx.memory.states import Block, Step


class Lane:
    """A CUDA stream. On the CPU its work is done at once, and there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, *marks: Any) -> Iterator[None]:
        """A context whose work starts when all the marks are reached."""
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


class Slot:
    """A buffer of the ring: room on the GPU for what a piece has on the host."""

    def __init__(self, numel: int, compute: Compute) -> None:
        self._words = torch.empty(4, numel, dtype=torch.float32, device=compute.device)
        self.free: Any = compute.mark()
        """Marks when the previous piece, or the previous owner of the memory, is done."""

    def part(self, row: int, like: Tensor) -> Tensor:
        return self._words[row].view(like.dtype)[: like.numel()]


class StateStream:
    """Moves and updates the blocks of one model, in the order in which forward uses them."""

    def __init__(self, blocks: Sequence[Block], device: torch.device, piece: int = PIECE) -> None:
        self.blocks, self.device, self.piece = list(blocks), device, piece
        self.compute = Compute(device)
        self.up, self.update, self.down = Lane(device), Lane(device), Lane(device)
        self._order = [block for block in blocks if block.spec.modules]
        self._layers = [block for block in self._order if block.spec.layer is not None]
        self._ring: list[Slot] = []
        self._in_backward = False
        self._begun: Any = None
        """Marks when the gradients of the outstanding updates were there."""
        if piece % CHECKED:
            raise ValueError(f"a piece must be a multiple of {CHECKED} elements, got {piece}")
        self.settle = _weakly(self.flush)
        """Called by whoever touches what is on its way (guard.py)."""
        self._opened: Block | None = None
        for block in self._order:
            for module in block.spec.modules:
                self._attach(block, module)

    # --- what forward and backward ask for -----------------------------------------------------

    def _attach(self, block: Block, module: nn.Module) -> None:
        last = any(module is end for end in block.spec.ends)

        def before_forward(self: StateStream, block: Block, *_: Any) -> None:
            self.need(block, last=last)

        def before_backward(self: StateStream, block: Block, grad: Tensor) -> None:
            self.need_in_backward(block)

        def after_forward(self: StateStream, block: Block, _: Any, __: Any, output: Any) -> None:
            self._close()
            if block.spec.tower and any(
                isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output)
            ):
                raise UserError(
                    "gradients of pixels go through the vision tower, whose weights wait on the "
                    "host when backward comes: keep them on the GPU (place gpu)"
                )
            is_layer = block.spec.layer is not None
            if is_layer and torch.is_grad_enabled() and output.requires_grad:
                output.register_hook(Hook(self, block, before_backward))

        hooks = [module.register_forward_pre_hook(Hook(self, block, before_forward))]
        # Backward of the last layer ends the loss's use of lm_head, which may be all that streams.
        ends_loss = block in self._layers[-1:] and any(other.streams for other in self._order)
        if block.streams or ends_loss:
            hooks.append(module.register_forward_hook(Hook(self, block, after_forward)))
        weakref.finalize(self, _remove, hooks)

    def _close(self) -> None:
        """Ends the use of the block that computed. Others may then read and write its weights where
        they live, which is not where they are."""
        block, self._opened = self._opened, None
        if block is None or not block.streams:
            return
        if block.weights_are_seen():  # by views, which nobody can close
            self.drop(block)
        else:
            block.close(self.settle)

    def _end_backward(self) -> None:
        """Sends all weights home, so that each parameter is where its gradient is looked at."""
        self._in_backward = False
        self._close()
        for block in self._order:
            if block.streams and not block.is_away:
                self.drop(block)

    def need_in_backward(self, block: Block, above: int = 0) -> None:
        """Lets a layer's backward read its weights, or its forward, if that runs once more. Then
        `above` layers follow, of which the last one's backward is next."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore
                _weakly(self._end_backward)
            )
        at = self._layers.index(block)
        top = at + above
        self._need(block, self._layers[at + 1 : top + 1] + self._layers[:top][::-1])

    def need(self, block: Block, *, last: bool = False) -> None:
        """Lets forward, from here on, read the block's updated weights. `last` says that no other
        block follows."""
        self._in_backward = False  # a backward that failed has not ended
        following = [] if last else self._order[self._order.index(block) + 1 :]
        if torch.is_grad_enabled():  # backward begins with the last layer
            following = following + self._layers[::-1]
        self._need(block, following)

    def _need(self, block: Block, order: Sequence[Block]) -> None:
        """Has the block's weights ready, and those of the next blocks in `order` on their way."""
        following = _moving(block, order)
        self._close()
        for other in self._order:  # first, since they may have to make room
            if other.streams and not other.is_away and other not in (block, *following):
                self.drop(other)
        if block.update is not None or block.is_away:
            self.bring(block)
        self.wait(block)
        block.open()
        self._opened = block
        for other in following:
            if other.update is not None or other.is_away:
                self.bring(other)

    def wait(self, block: Block) -> None:
        """Has the computation wait for the block's update and arrival."""
        self.compute.wait(block.ready)
        block.ready = None
        block.moving = []
        block.reads_host_grad = False

    # --- moving --------------------------------------------------------------------------------

    def begin_updates(self) -> None:
        """Starts the first outstanding updates; forward starts the others as it goes on."""
        self._begun = self.compute.mark()
        started = 0
        for block in self.blocks:
            at_once = not block.spec.modules
            if block.update is not None and (at_once or started <= AHEAD):
                started += not at_once
                self.bring(block)

    def bring(self, block: Block) -> None:
        """Starts the block's way to the GPU and its outstanding update."""
        steps, block.update = block.update or {}, None
        begin, arrives = self._begun, block.is_away
        if arrives:
            block.arrive(torch.empty(block.nbytes, dtype=torch.uint8, device=self.device))
            # The computation may have used that memory until now, and torch fills it where
            # `torch.use_deterministic_algorithms` is on.
            begin = self.compute.mark()
        with annotate("optimizer"):
            for i in range(len(block.ranges)):
                if arrives or i in steps:
                    for piece in block.pieces(i, self.piece):
                        self._move(block, i, piece, steps.get(i), arrives, (begin, block.written))
            if arrives:
                self._raise_frozen(block, begin)
        read = [t for step in steps.values() for t in (step.grad, step.scale)]
        block.moving = [tensor for tensor in read if tensor is not None]
        with self.update.after(self.up.mark()):
            block.ready = self.update.mark()
        if steps:
            block.written = self.down.mark()
            block.reads_host_grad = any(step.grad is None for step in steps.values())

    def _raise_frozen(self, block: Block, begin: Any) -> None:
        """Copies frozen weights up in pieces, so that copies of activations come between them."""
        assert block.weight is not None and block.host_weight is not None
        here, home = (flat[block.frozen] for flat in (block.weight, block.host_weight))
        nbytes = self.piece * 2
        with self.up.after(begin):
            _copy([*zip(home.split(nbytes), here.split(nbytes), strict=True)])

    def _move(
        self,
        block: Block,
        i: int,
        piece: slice,
        step: Step | None,
        arrives: bool,
        begin: tuple[Any, ...],
    ) -> None:
        """Moves one piece of the i-th trained parameter: up, update, down."""
        weight, grad, states = block.weight_at(i, piece), None, []
        rising: list[tuple[Tensor, Tensor]] = []  # (from, to)
        falling: list[tuple[Tensor, Tensor]] = []
        slot = None
        if block.host_weight is not None:
            home = block.home_at(piece)
            rising += [(home, weight)] if arrives else []
            falling += [(weight, home)]
        if step is not None:
            states = block.states_at(i, piece)
            waits = step.grad is None or step.grad.device != self.device
            if not block.place.states or waits:
                slot = self.next_slot()
            if slot is not None and not block.place.states:
                here = [slot.part(row, state) for row, state in enumerate(states)]
                rising += zip(states, here, strict=True)
                falling += zip(here, states, strict=True)
                states = here
            grad = block.grad_of(i, piece, step)
            if slot is not None and waits:
                risen = slot.part(3, grad)
                rising.append((grad, risen))
                grad = risen
        with self.up.after(*begin, slot and slot.free):
            _copy(rising)
            arrived = self.up.mark()
        if step is None or grad is None:
            return
        with self.update.after(arrived):
            _adamw(block, i, piece, states, step, grad)
            updated = self.update.mark()
        with self.down.after(updated):
            _copy(falling)
            if slot is not None:
                slot.free = self.down.mark()

    def next_slot(self) -> Slot:
        if len(self._ring) < RING:
            self._ring.append(Slot(self.piece, self.compute))
        else:
            self._ring.append(self._ring.pop(0))
        return self._ring[-1]

    def drop(self, block: Block) -> None:
        """Drops the GPU's copy of weights whose home is the host."""
        self.wait(block)
        self.compute.wait(block.written)
        block.leave()

    def flush(self) -> None:
        """Ends all that is outstanding, so that weights and states may be read, on the host too."""
        # Also within a step that has noted some updates and begun none: their gradients are there
        # when the computation has come here, which an earlier mark does not say.
        self._begun = self.compute.mark()
        for block in self.blocks:
            if block.update is not None:
                self.bring(block)
            if block.streams and not block.is_away:
                self.drop(block)
            self.wait(block)
            block.open()
        self.down.synchronize()


def _moving(block: Block, order: Sequence[Block]) -> list[Block]:
    """Returns the next blocks in this order that move or are moving. The vision tower is none of
    them: a batch of text would bring it for nothing."""
    others = dict.fromkeys(b for b in order if b is not block and not b.spec.tower)
    moving = [b for b in others if b.streams or b.update or b.ready][:MOVING]
    full = [b for b in moving if b.streams][AHEAD:]
    return moving[: moving.index(full[0])] if full else moving


def bring_again(layer: nn.Module, above: int) -> None:
    """Has a layer's weights on the GPU in backward, if a stream moves them
    (`StateStream.need_in_backward`)."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, Hook):
            hook.again(above)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


def _adamw(
    block: Block,
    i: int,
    piece: slice,
    states: Sequence[Tensor],
    step: Step,
    grad: Tensor,
) -> None:
    """Updates a piece of the block's i-th parameter; `states` and `grad` are on the GPU."""
    exp_avg, exp_avg_sq, *remainder = states
    adamw_(
        block.weight_at(i, piece),
        remainder[0] if remainder else None,
        exp_avg,
        exp_avg_sq,
        grad,
        scale=step.scale,
        checksums=block.checksums_at(i, piece),
        **step.options._asdict(),
    )


class Hook:
    """A hook of a module or tensor. It does not keep the stream alive, and in a copy or a file of
    the module it is one that does nothing."""

    def __init__(self, stream: StateStream, block: Block, do: Callable[..., None]) -> None:
        self._stream, self._block, self._do = weakref.ref(stream), weakref.ref(block), do

    def __call__(self, *args: Any) -> None:
        stream, block = self._stream(), self._block()
        if stream is not None and block is not None:
            self._do(stream, block, *args)

    def again(self, above: int) -> None:
        """Has the weights of its block, a layer, ready for another forward in backward."""
        stream, block = self._stream(), self._block()
        if stream is not None and block is not None:
            stream.need_in_backward(block, above)

    @property
    def moves(self) -> bool:
        """Whether something of its block waits on the host, so that the hook must run."""
        block = self._block()
        return block is not None and not block.place.all_on_gpu

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls a method if its object is still there."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
