"""A model's states by block: weights, AdamW's moments and gradients, on the GPU or on the host.

A *block* is the input embedding, a decoder layer or lm_head: what forward uses as a whole. Bytes a
parameter, of a model in bfloat16:

    weight      2    bf16, what the GPU computes with
    remainder   2    int16: the low half of the fp32 master weight (kernels/adamw.py)
    exp_avg     4    fp32, as
    exp_avg_sq  4    AdamW keeps them
    grad        2    bf16; 4 (fp32) where several batches add up

An fp32 model needs no remainder. Each block has a `Place`, which says whether weight, states (the
three in the middle) and grad wait on the host between uses. There they are flat parts of one pinned
slab, and the parameters' `data` are views of them; on the GPU weights and gradients remain the
tensors that they were. Norms and biases, 0.003% of an 8B model, and adapters of linear layers form
one block that never leaves the GPU. Adapters of experts are in their layer's block, since they may
have a billion parameters of 16 bytes each; they are fp32 over weights of another dtype.

A frozen weight has neither states nor gradient. If it waits on the host, it is copied up for
forward and for backward, and nothing is copied down. It may be quantised: packed bytes, and the
scales for dequantising them, which move with it (`Part`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.kernels.adamw import CHECKED, Options, drop_stale_, weight_checksums
from longctx.kernels.adamw_many import States
from longctx.memory.guard import Settle, guard, is_seen, release, sharers, unguarded
from longctx.memory.held import Held
from longctx.memory.place import BlockSizes, Place

ALIGN = 64
"""Tensors begin at multiples of this many elements, which are 128 bytes of bf16."""
Take = Callable[[int, torch.dtype], Tensor]
"""Returns a flat tensor of `numel` zeros of a dtype."""


class Part(NamedTuple):
    """A tensor that a block's forward reads: an attribute of its owner."""

    owner: Any
    name: str

    @property
    def tensor(self) -> Tensor:
        with unguarded():
            found: Tensor = getattr(self.owner, self.name)
            return found

    def put(self, tensor: Tensor) -> None:
        with unguarded():
            setattr(self.owner, self.name, tensor)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in a flat one."""
        return _aligned(self.tensor.numel()) * self.tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block as the model describes it."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    """The block's parameters, by their names in the model."""
    modules: Sequence[nn.Module] = ()
    """The modules whose forward reads the weights, in the order of forward; empty if unknown."""
    ends: Sequence[nn.Module] = ()
    """The `modules` after which no other block follows in forward."""
    layer: int | None = None
    """The number of a decoder layer, whose weights backward reads again; None for another block."""
    movable: bool = False
    """Whether the weights may wait on the host."""
    first: bool = False
    """Whether it computes before all layers, so that its gradient comes after theirs."""
    tower: bool = False
    """Whether it is a whole vision tower, frozen: forward reads its weights before all layers, and
    only in batches with images."""
    beside: Sequence[Part] = ()
    """Other tensors that move with the weights: the scales of quantised ones."""

    @property
    def parts(self) -> list[Part]:
        """The block's weights, trained ones first."""
        # The sort is stable and puts frozen weights last, so that one slice (`Block.frozen`) is
        # never copied down.
        ordered = sorted(self.parameters.values(), key=lambda p: not p.requires_grad)
        return [*(Part(parameter, "data") for parameter in ordered), *self.beside]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The block's trained parameters."""
        return [p for p in self.parameters.values() if p.requires_grad]

    def sizes(self, *, accumulates: bool) -> BlockSizes:
        """Returns the block's bytes. `accumulates` says that a step sums several batches."""
        trained = sum(_aligned(p.numel()) for p in self.trained)
        narrow = any(p.element_size() == 2 for p in self.trained)
        itemsize = max((p.element_size() for p in self.trained), default=0)
        parts = [part.nbytes for part in self.parts]
        return BlockSizes(
            weight=sum(parts),
            frozen=sum(parts[len(self.trained) :]),
            # Two moments in fp32, and for 16-bit weights a remainder.
            states=trained * (10 if narrow else 8),
            grad=trained * (4 if accumulates else itemsize),
            movable=self.movable,
            fixed=not self.modules,
            layer=self.layer,
            first=self.first,
            tied=len(self.modules) > 1 and not self.tower,
            tower=self.tower,
        )


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """A parameter's outstanding AdamW step."""

    grad: Tensor | None
    """The gradient, contiguous, on any device; None if it is in the block's `host_grad`."""
    options: Options
    scale: Tensor | None
    """The factor by which the gradient is multiplied, fp32, (); None is 1."""


@dataclass(eq=False)
class Block:
    """A block's tensors. Flat tensors hold its parameters one after the other, trained ones first.
    Flat weights are bytes, since weights may have several dtypes."""

    spec: BlockSpec
    place: Place
    sums: bool = False
    """Whether a step was planned for several batches, so that gradients are fp32."""
    parameters: list[nn.Parameter] = field(init=False)
    ranges: list[slice] = field(init=False)
    """The elements of each trained parameter in the flat tensors."""
    counts: Tensor = field(init=False)
    """The number of updates of each trained parameter, fp32, on the CPU."""
    parts: list[Part] = field(init=False)
    weight: Tensor | None = None
    """The flat weights on the GPU, as bytes, of a block that streams; None while they are not
    there."""
    host_weight: Tensor | None = None
    """The flat weights on the host, as bytes, of a block that streams."""
    host_grad: Tensor | None = None
    """Room for the flat gradient on the host; None if gradients stay on the GPU."""
    reads_host_grad: bool = False
    """Whether a started update may still read `host_grad`: the computation has not waited for
    it."""
    has_room: Callable[[], bool] = field(default_factory=lambda: _always)
    """Returns whether a gradient may be written to `host_grad`."""
    exp_avg: Tensor = field(init=False)
    exp_avg_sq: Tensor = field(init=False)
    remainder: Tensor | None = None
    checksums: Tensor | None = None
    """Checksums, on the GPU, of the weights that the remainders belong to (kernels/adamw.py)."""
    update: dict[int, UpdateStep] | None = None
    """Maps numbers of parameters in the block to their outstanding steps; None without any."""
    shown: list[Tensor] = field(default_factory=list)
    """The tensors in `parameter.grad` that an outstanding update will read; they are guarded."""
    moving: list[Tensor] = field(default_factory=list)
    """Gradients and factors that a started update still reads."""
    ready: Any = None
    """The mark after which the weights may be read."""
    written: Any = None
    """The mark after which everything whose home is the host is there again."""

    def __post_init__(self) -> None:
        self.parts = self.spec.parts
        self.parameters = [part.owner for part in self.parts if part.name == "data"]
        self.ranges, start = [], 0
        self._first_checksum, checksums = [], 0
        for parameter in self.spec.trained:
            self.ranges.append(slice(start, start + parameter.numel()))
            start += _aligned(parameter.numel())
            self._first_checksum.append(checksums)
            checksums += -(-parameter.numel() // CHECKED)
        self.trained_numel, self._checksums = start, checksums
        self.dtypes = [parameter.dtype for parameter in self.parameters]
        self.numels = [parameter.numel() for parameter in self.parameters]
        self.counts = torch.zeros(len(self.ranges))
        self._counts = self.counts.numpy()  # the same memory
        self._home_views: list[Tensor] = []
        self._lent: list[Tensor] = []
        self._waiting: dict[int, weakref.ref[Held]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trained weights, which is one where they move."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the flat weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def frozen(self) -> slice:
        """The bytes of the flat weights that are never updated: the last ones."""
        return slice(sum(part.nbytes for part in self.parts[: len(self.ranges)]), self.nbytes)

    @property
    def streams(self) -> bool:
        """Whether the weights wait on the host between uses."""
        return not self.place.weight

    @property
    def is_away(self) -> bool:
        """Whether the weights are on the host alone."""
        return self.streams and self.weight is None

    # --- placing -----------------------------------------------------------------------------

    def settle(self, device: torch.device, take: Take, grad: Tensor | None) -> None:
        """Makes the states, filled with zeros, and moves the weights to their place. `take` gives
        host memory; `grad` is the room on the host for the gradient."""

        def on_gpu(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        self._whole: dict[int, States] = {}
        make = on_gpu if self.place.states else take
        numel = self.trained_numel
        self.exp_avg, self.exp_avg_sq = make(numel, torch.float32), make(numel, torch.float32)
        if any(p.element_size() == 2 for p in self.spec.trained):
            self.remainder = make(numel, torch.int16)
            self.checksums = on_gpu(self._checksums, torch.int32)
        self.host_grad = grad
        if not self.streams:
            for part in self.parts:
                part.put(part.tensor.to(device).contiguous())
            return
        self.host_weight = take(self.nbytes, torch.uint8)
        self._home_views = self._views(self.host_weight)
        for part, home in zip(self.parts, self._home_views, strict=True):
            home.copy_(part.tensor)
            part.put(home)

    def arrive(self, weight: Tensor) -> None:
        """Points the parameters to the flat `weight`, where the weights are or will be."""
        for part, home in zip(self.parts, self._home_views, strict=True):
            if part.tensor.data_ptr() != home.data_ptr():  # a loop has assigned another tensor
                home.copy_(part.tensor)
        self.weight = weight
        for part, view in zip(self.parts, self._views(weight), strict=True):
            part.put(view)

    def leave(self) -> None:
        """Points the parameters to the weights on the host."""
        self.weight = None
        for part, home in zip(self.parts, self._home_views, strict=True):
            part.put(home)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the parts in flat bytes. On the host each has a storage of its own,
        since files of weights hold whole storages and refuse weights that share one."""
        views, start = [], 0
        for part in self.parts:
            x = part.tensor
            view = flat[start : start + x.nbytes]
            if flat is self.host_weight:
                view = torch.from_numpy(view.numpy())
            # Detached: a view holds its base, which would count as a holder (`is_seen`).
            views.append(view.view(x.dtype).view(x.shape).detach())
            start += part.nbytes
        return views

    def close(self, settle: Settle) -> None:
        """Has `settle` called before any operation on the weights, until the block is opened."""
        for tensor in [*self.parameters, *self.shown]:
            guard(tensor, settle)

    def open(self) -> None:
        """Makes the weights and the gradients of updates ordinary tensors again."""
        for tensor in [*self.parameters, *self.shown]:
            release(tensor)
        self.shown = []

    @property
    def grad_is_on_host(self) -> bool:
        """Whether `host_grad` must not be overwritten: it holds a gradient, or an update reads
        it."""
        if self.host_grad is None:
            return False
        if self.reads_host_grad or any(s.grad is None for s in (self.update or {}).values()):
            return True
        return any(self.waiting(i) is not None for i in range(len(self.ranges)))

    def wait_on_host(self, i: int, held: Held) -> None:
        """Notes that `host_grad` has the values of this gradient for the i-th parameter."""
        self._waiting[i] = weakref.ref(held)

    def waiting(self, i: int) -> Held | None:
        """Returns the gradient whose values `host_grad` has for the i-th parameter. A loop may hold
        it although it is no longer in `parameter.grad`."""
        held = self._waiting[i]() if i in self._waiting else None
        return held if held is not None and held.here is None else None

    # --- parts -------------------------------------------------------------------------------

    def pieces(self, i: int, numel: int) -> list[slice]:
        """Returns the elements of the i-th trained parameter in the flat tensors, in pieces of at
        most `numel`."""
        start, stop = self.ranges[i].start, self.ranges[i].stop
        return [slice(at, min(at + numel, stop)) for at in range(start, stop, numel)]

    def weight_at(self, i: int, piece: slice) -> Tensor:
        """Returns a piece of the i-th parameter's weights, on the GPU unless the block is away."""
        if self.weight is not None:
            return self.weight.view(self.dtype)[piece]
        start = self.ranges[i].start
        return self.parts[i].tensor.view(-1)[piece.start - start : piece.stop - start]

    def home_at(self, piece: slice) -> Tensor:
        """Returns a piece of the weights on the host, for a block that streams."""
        assert self.host_weight is not None
        return self.host_weight.view(self.dtype)[piece]

    def grad_at(self, i: int, piece: slice, grad: Tensor) -> Tensor:
        """Returns a piece of the i-th parameter's gradient."""
        start = self.ranges[i].start
        return grad.view(-1)[piece.start - start : piece.stop - start]

    def grad_of(self, i: int, piece: slice, step: UpdateStep) -> Tensor:
        """Returns a piece of the gradient of the i-th parameter's step, on the device where it
        is."""
        if step.grad is not None:
            return self.grad_at(i, piece, step.grad)
        assert self.host_grad is not None
        return self.host_grad[piece]

    def states_at(self, i: int, piece: slice) -> list[Tensor]:
        """Returns a piece of exp_avg, exp_avg_sq and, for a parameter in 16 bits, the remainder,
        where they live."""
        states = [self.exp_avg[piece], self.exp_avg_sq[piece]]
        if self.dtypes[i].itemsize == 2:
            assert self.remainder is not None
            states.append(self.remainder[piece])
        return states

    def next_count(self, i: int) -> int:
        """Returns the number of the i-th parameter's next update."""
        return int(self._counts[i]) + 1

    def count(self, i: int) -> int:
        """Counts an update of the i-th parameter, and returns its number."""
        self._counts[i] += 1
        return int(self._counts[i])

    def whole_states(self, i: int) -> States:
        """Returns all states of the i-th parameter of a block that always is on the GPU."""
        if i not in self._whole:
            whole = self.ranges[i]
            exp_avg, exp_avg_sq, *remainder = self.states_at(i, whole)
            self._whole[i] = States(
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                remainder=remainder[0] if remainder else None,
                checksums=self.checksums_at(i, whole),
            )
        return self._whole[i]

    def checksums_at(self, i: int, piece: slice) -> Tensor | None:
        """Returns the checksums of a piece of the i-th parameter; None if it has 32 bits."""
        if self.checksums is None or self.dtypes[i].itemsize != 2:
            return None
        first = self._first_checksum[i] + (piece.start - self.ranges[i].start) // CHECKED
        return self.checksums[first : first - (piece.start - piece.stop) // CHECKED]

    def renew(self, i: int, numel: int) -> None:
        """Drops the i-th parameter's remainders where other code has written its weights. Reads the
        weights on the GPU, `numel` elements at a time."""
        for piece in self.pieces(i, numel):
            saved = self.checksums_at(i, piece)
            if saved is None or self.remainder is None:
                return
            weight = self.weight_at(i, piece).to(saved.device)
            fits = weight_checksums(weight) == saved
            if not fits.all():
                drop_stale_(self.remainder[piece], fits.to(self.remainder.device))

    def lend(self, state: Tensor) -> Tensor:
        """Returns a view of the block's moments or remainders for code that may keep it. On the
        host it has its own storage, whose holders can be counted."""
        if self.place.states:
            return state
        state = torch.from_numpy(state.numpy())
        self._lent.append(state)
        return state.detach()

    def is_lent(self) -> bool:
        """Whether other code has kept views of weights or states that are updated late."""
        if self.place.all_on_gpu:
            return False
        self._lent = [state for state in self._lent if is_seen(state)]
        own = [self.exp_avg, self.exp_avg_sq, self.remainder] if self.place.states else []
        states = (x for x in [*own, self.checksums] if x is not None)
        return bool(self._lent) or self.weights_are_seen() or any(map(is_seen, states))

    def weights_are_seen(self) -> bool:
        """Whether other code has kept views of trained weights at their home."""
        trained = self.parameters[: len(self.ranges)]
        if self.streams:  # `parameter.data` shares the home's storage while it is there
            homes = self._home_views[: len(trained)]
            return any(sharers(home) > 1 + (self.weight is None) for home in homes)
        with unguarded():
            return any(sharers(parameter) > 1 for parameter in trained)

    def tensors(self) -> list[Tensor]:
        """Returns the states, and what a started update still reads."""
        states = [self.exp_avg, self.exp_avg_sq, self.remainder, *self.moving]
        return [tensor for tensor in states if tensor is not None]


Slot = tuple[Block, int]
"""A block, and the number of a parameter in it."""


def _always() -> bool:
    return True


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
