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
slab, and the parameters' `data` are views of them; on the GPU weights and gradients stay the
tensors that they are. Norms and biases, 0.003% of an 8B model, and adapters of linear layers form
one block that never leaves the GPU. Adapters of experts are in their layer's block, in fp32 over
weights of another dtype, since they may have 16 bytes of each of a billion parameters.

A frozen weight has neither states nor gradient. If it waits on the host, it is copied up for
forward and for backward, and nothing is copied down. It may be quantised: packed bytes, and the
scales with which they are made dense, which move with it (`Part`).
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
from longctx.memory.aliases import is_seen, sharers
from longctx.memory.guard import Settle, guard, release, unguarded
from longctx.memory.held import Held
from longctx.memory.place import BlockSizes, Place

ALIGN = 64
"""Tensors begin at multiples of so many elements, which are 128 bytes of bf16."""
Take = Callable[[int, torch.dtype], Tensor]
"""Returns a flat tensor of so many zeros."""


class Part(NamedTuple):
    """A tensor that is read with a block's weights: an attribute of its owner."""

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
        """The bytes of a flat tensor that holds it."""
        return _aligned(self.tensor.numel()) * self.tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block as the model describes it."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    """The block's parameters, by their names in the model."""
    modules: Sequence[nn.Module] = ()
    """The modules whose forward reads the weights, one after the other. Empty if none is known."""
    ends: Sequence[nn.Module] = ()
    """Those of `modules` after which no other block follows in forward."""
    layer: int | None = None
    """The number of a decoder layer, whose weights backward uses again; None for other blocks."""
    movable: bool = False
    """Whether the weights may wait on the host."""
    first: bool = False
    """Whether it computes before all layers, so that its gradient comes after theirs."""
    tower: bool = False
    """Whether it is all that sees images, frozen: forward reads its weights before all layers, and
    in batches with images alone."""
    beside: Sequence[Part] = ()
    """Other tensors that belong to the weights: the scales of quantised ones."""

    @property
    def parts(self) -> list[Part]:
        """The block's weights, trained ones first."""
        ordered = sorted(self.parameters.values(), key=lambda p: not p.requires_grad)
        return [*(Part(parameter, "data") for parameter in ordered), *self.beside]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters.values() if p.requires_grad]

    def sizes(self, *, accumulates: bool) -> BlockSizes:
        trained = sum(_aligned(p.numel()) for p in self.trained)
        narrow = any(p.element_size() == 2 for p in self.trained)
        itemsize = max((p.element_size() for p in self.trained), default=0)
        parts = [part.nbytes for part in self.parts]
        return BlockSizes(
            weight=sum(parts),
            frozen=sum(parts[len(self.trained) :]),
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
class Step:
    """One parameter's outstanding AdamW step."""

    grad: Tensor | None
    """The gradient, contiguous, wherever it is; None if it is in the block's `host_grad`."""
    options: Options
    scale: Tensor | None
    """The factor of the gradient, fp32, (); None is 1."""


@dataclass(eq=False)
class Block:
    """A block's tensors. Flat tensors hold its parameters one after the other, trained ones first.
    Flat weights are bytes, since weights may have several dtypes."""

    spec: BlockSpec
    place: Place
    sums: bool = False
    """Whether a step was planned for several batches, so that gradients have fp32."""
    parameters: list[nn.Parameter] = field(init=False)
    ranges: list[slice] = field(init=False)
    """Each trained parameter's elements in the flat tensors."""
    counts: Tensor = field(init=False)
    """The number of updates of each trained parameter, fp32, on the CPU."""
    parts: list[Part] = field(init=False)
    weight: Tensor | None = None
    """The weights of a block that streams, as bytes, while they are on the GPU."""
    host_weight: Tensor | None = None
    host_grad: Tensor | None = None
    """Room for the gradient on the host."""
    reads_host_grad: bool = False
    """Whether an update that reads `host_grad` has begun, and nobody has waited for it yet."""
    has_room: Callable[[], bool] = field(default_factory=lambda: _always)
    """Returns whether a gradient may be written to `host_grad`."""
    exp_avg: Tensor = field(init=False)
    exp_avg_sq: Tensor = field(init=False)
    remainder: Tensor | None = None
    checksums: Tensor | None = None
    """Checksums, on the GPU, of the weights that the remainders belong to (kernels/adamw.py)."""
    update: dict[int, Step] | None = None
    """Outstanding steps, by the parameters' numbers in the block."""
    shown: list[Tensor] = field(default_factory=list)
    """The `parameter.grad` that an update will read; nobody may change them before."""
    moving: list[Tensor] = field(default_factory=list)
    """Gradients and their scale that an update on its way still reads."""
    ready: Any = None
    """Marks when the weights may be read."""
    written: Any = None
    """Marks when everything that belongs on the host is there again."""

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
        """The one dtype of trained weights that move."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the flat weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def frozen(self) -> slice:
        """The bytes of the flat weights that are never updated: the last ones."""
        return slice(sum(part.nbytes for part in self.parts[: len(self.ranges)]), self.nbytes)

    @property
    def streams(self) -> bool:
        return not self.place.weight

    @property
    def is_away(self) -> bool:
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
            if part.tensor.data_ptr() != home.data_ptr():  # others have put a tensor of theirs
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
            # Detached, since a view holds its base, which would count as somebody's (aliases.py).
            views.append(view.view(x.dtype).view(x.shape).detach())
            start += part.nbytes
        return views

    def close(self, settle: Settle) -> None:
        """Has whoever touches the weights call `settle` first, until the block is opened."""
        for tensor in [*self.parameters, *self.shown]:
            guard(tensor, settle)

    def open(self) -> None:
        """Makes weights and the gradients of updates ordinary tensors again."""
        for tensor in [*self.parameters, *self.shown]:
            release(tensor)
        self.shown = []

    @property
    def grad_is_on_host(self) -> bool:
        """Whether nothing may be written over `host_grad`: a gradient is there, or an update reads
        one."""
        if self.host_grad is None:
            return False
        if self.reads_host_grad or any(s.grad is None for s in (self.update or {}).values()):
            return True
        return any(self.waiting(i) is not None for i in range(len(self.ranges)))

    def wait_on_host(self, i: int, held: Held) -> None:
        """Notes whose values `host_grad` has for the i-th parameter."""
        self._waiting[i] = weakref.ref(held)

    def waiting(self, i: int) -> Held | None:
        """Returns the gradient whose values `host_grad` has for the i-th parameter. Somebody may
        keep it who has taken it out of `parameter.grad`."""
        held = self._waiting[i]() if i in self._waiting else None
        return held if held is not None and held.here is None else None

    # --- parts -------------------------------------------------------------------------------

    def pieces(self, i: int, numel: int) -> list[slice]:
        """Returns the i-th trained parameter's part of the flat tensors, in pieces of at most
        `numel` elements."""
        start, stop = self.ranges[i].start, self.ranges[i].stop
        return [slice(at, min(at + numel, stop)) for at in range(start, stop, numel)]

    def weight_at(self, i: int, piece: slice) -> Tensor:
        """Returns a piece of the i-th parameter's weights, on the GPU if the block is not away."""
        if self.weight is not None:
            return self.weight.view(self.dtype)[piece]
        start = self.ranges[i].start
        return self.parts[i].tensor.view(-1)[piece.start - start : piece.stop - start]

    def home_at(self, piece: slice) -> Tensor:
        """Returns a piece of weights whose home is the host, there."""
        assert self.host_weight is not None
        return self.host_weight.view(self.dtype)[piece]

    def grad_at(self, i: int, piece: slice, grad: Tensor) -> Tensor:
        """Returns a piece of the i-th parameter's gradient."""
        start = self.ranges[i].start
        return grad.view(-1)[piece.start - start : piece.stop - start]

    def grad_of(self, i: int, piece: slice, step: Step) -> Tensor:
        """Returns a piece of the gradient of the i-th parameter's step, where it is."""
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
        """Returns all states of the i-th parameter of a block that is on the GPU for good."""
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
        """Returns the checksums of a piece of the i-th parameter; None if it has not 16 bits."""
        if self.checksums is None or self.dtypes[i].itemsize != 2:
            return None
        first = self._first_checksum[i] + (piece.start - self.ranges[i].start) // CHECKED
        return self.checksums[first : first - (piece.start - piece.stop) // CHECKED]

    def renew(self, i: int, numel: int) -> None:
        """Drops the i-th parameter's remainders where others have written its weights. Reads the
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
        """Returns a view of the block's moments or remainders for somebody who may keep it. On the
        host it has a storage of its own, whose holders can be counted."""
        if self.place.states:
            return state
        state = torch.from_numpy(state.numpy())
        self._lent.append(state)
        return state.detach()

    def is_lent(self) -> bool:
        """Whether somebody has kept views of weights or states that are updated late."""
        if self.place.all_on_gpu:
            return False
        self._lent = [state for state in self._lent if is_seen(state)]
        own = [self.exp_avg, self.exp_avg_sq, self.remainder] if self.place.states else []
        states = (x for x in [*own, self.checksums] if x is not None)
        return bool(self._lent) or self.weights_are_seen() or any(map(is_seen, states))

    def weights_are_seen(self) -> bool:
        """Whether somebody has kept views of trained weights where they live."""
        trained = self.parameters[: len(self.ranges)]
        if self.streams:  # `parameter.data` shares the home's storage while it is there
            homes = self._home_views[: len(trained)]
            return any(sharers(home) > 1 + (self.weight is None) for home in homes)
        with unguarded():
            return any(sharers(parameter) > 1 for parameter in trained)

    def tensors(self) -> list[Tensor]:
        """The states, and what an update on its way still reads."""
        states = [self.exp_avg, self.exp_avg_sq, self.remainder, *self.moving]
        return [tensor for tensor in states if tensor is not None]


def _always() -> bool:
    return True


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
