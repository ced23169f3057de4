"""Moves model states over the link to the host while the GPU computes.

A block (states.py) of which something waits on the host is brought to the GPU before it is used. An
outstanding update is made on the way, piece by piece through a ring of three buffers (w weight,
m v r states, g gradient; only what is on the host moves):

    up       w m v r g | w m v r g | w m v r g | ...      host -> GPU, PIECE elements at a time
    update             | adamw     | adamw     | ...      kernels/adamw.py
    down                           | w m v r   | ...      GPU -> host

So both directions of the link and the computation are busy at once, and a block takes no more GPU
memory than its weights. Frozen weights are copied up and dropped, since those on the host have not
changed. Weights that live on the host are on the GPU for the block that computes and the next AHEAD
blocks; those of a finished block are dropped.

Lanes wait for each other's marks. The process itself waits only in `flush`, and for gradients that
are read on the host. A tensor is dropped only after the computation has waited for the last copy
out of it, so that its memory may be reused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longctx.errors import UserError
from longctx.kernels.adamw import CHECKED, adamw_
from longctx.kernels.annotate import annotate
from longctx.memory.lanes import Compute, Lane, RingSlot
from longctx.memory.place import AHEAD, MOVING, PIECE, RING
from longctx.memory.states import Block, UpdateStep


class StateStream:
    """Moves and updates the blocks of one model, in the order in which forward uses them."""

    def __init__(self, blocks: Sequence[Block], device: torch.device, piece: int = PIECE) -> None:
        self.blocks, self.device, self.piece = list(blocks), device, piece
        self.compute = Compute(device)
        self.up, self.update, self.down = Lane(device), Lane(device), Lane(device)
        self._order = [block for block in blocks if block.spec.modules]
        self._layers = [block for block in self._order if block.spec.layer is not None]
        self._ring: list[RingSlot] = []
        self._in_backward = False
        self._begun: Any = None
        """The mark at which the gradients of the outstanding updates are finished."""
        if piece % CHECKED:
            raise ValueError(f"a piece must be a multiple of {CHECKED} elements, got {piece}")
        self.settle = _weakly(self.flush)
        """Guarded tensors call it before an operation on them (guard.py)."""
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
        # The last layer's backward ends the loss's use of lm_head, and drops its weights from the
        # GPU. It needs the hook even if lm_head is the one block that streams.
        ends_loss = block in self._layers[-1:] and any(other.streams for other in self._order)
        if block.streams or ends_loss:
            hooks.append(module.register_forward_hook(Hook(self, block, after_forward)))
        weakref.finalize(self, _remove, hooks)

    def _close(self) -> None:
        """Ends the use of the block that computed. Other code that reads or writes its weights then
        first sends them home."""
        block, self._opened = self._opened, None
        if block is None or not block.streams:
            return
        if block.weights_are_seen():  # views have no guard
            self.drop(block)
        else:
            block.close(self.settle)

    def _end_backward(self) -> None:
        """Sends all weights home, so that each parameter is on the device of its gradient."""
        self._in_backward = False
        self._close()
        for block in self._order:
            if block.streams and not block.is_away:
                self.drop(block)

    def need_in_backward(self, block: Block, above: int = 0) -> None:
        """Lets a layer's backward read its weights, or its second forward, after which `above`
        layers follow up to the one whose backward is next."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore
                _weakly(self._end_backward)
            )
        at = self._layers.index(block)
        top = at + above
        # If layer 4 runs forward again for the backward of layer 6, layers 5 and 6 come next, and
        # then 5, 4, 3, ... run backward.
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
        """Makes the block's weights ready, and starts the copies of the next blocks in `order`."""
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
        """Has the computation wait for the block's update and for its weights."""
        self.compute.wait(block.ready)
        block.ready = None
        block.moving = []
        block.reads_host_grad = False

    # --- moving --------------------------------------------------------------------------------

    def begin_updates(self) -> None:
        """Starts the first outstanding updates; forward starts the others as it proceeds."""
        self._begun = self.compute.mark()
        started = 0
        for block in self.blocks:
            at_once = not block.spec.modules
            if block.update is not None and (at_once or started <= AHEAD):
                started += not at_once
                self.bring(block)

    def bring(self, block: Block) -> None:
        """Starts the block's copies to the GPU and its outstanding update."""
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
        """Copies frozen weights up in pieces, so that copies of activations can run in between."""
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
        step: UpdateStep | None,
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

    def next_slot(self) -> RingSlot:
        """Returns the buffer of the ring that was used longest ago."""
        if len(self._ring) < RING:
            self._ring.append(RingSlot(self.piece, self.compute))
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
    """Returns the next blocks in this order that move or are moving. The vision tower's block is
    left out, since a batch of text does not need it."""
    others = dict.fromkeys(b for b in order if b is not block and not b.spec.tower)
    moving = [b for b in others if b.streams or b.update or b.ready][:MOVING]
    full = [b for b in moving if b.streams][AHEAD:]
    return moving[: moving.index(full[0])] if full else moving


def bring_again(layer: nn.Module, above: int) -> None:
    """Brings a layer's weights to the GPU for backward, if a stream moves them
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
    step: UpdateStep,
    grad: Tensor,
) -> None:
    """Updates a piece of the block's i-th parameter; `states` and `grad` are on the GPU."""
    exp_avg, exp_avg_sq, *remainder = states
    weight, low = block.weight_at(i, piece), remainder[0] if remainder else None
    given = weight, low, exp_avg, exp_avg_sq, grad, step.options
    adamw_(*given, scale=step.scale, checksums=block.checksums_at(i, piece))


class Hook:
    """A hook of a module or tensor that does not keep the stream alive. Copies of the module, and
    files, hold a hook that does nothing."""

    def __init__(self, stream: StateStream, block: Block, do: Callable[..., None]) -> None:
        self._stream, self._block, self._do = weakref.ref(stream), weakref.ref(block), do

    def __call__(self, *args: Any) -> None:
        stream, block = self._stream(), self._block()
        if stream is not None and block is not None:
            self._do(stream, block, *args)

    def again(self, above: int) -> None:
        """Brings the weights of its block, a layer, for another forward in backward."""
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
    """Returns a function that calls a method if its object still exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
