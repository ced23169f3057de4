"""A model's states by block: weights, AdamW's moments and gradients, on the GPU or on the host.

A *block* is the input embedding, a decoder layer or lm_head: what forward uses as a whole. Bytes a
parameter, of a model in bfloat16:

    weight      2    bf16, what the GPU computes with
    remainder   2    int16: the low half of the fp32 master weight (kernels/adamw.py)
    exp_avg     4    fp32, as
    exp_avg_sq  4    AdamW keeps them
    grad        2    bf16; 4 (fp32) where several batches add up

An fp32 model needs no remainder. Each block has its `Place`: which of weight, states (the three in
the middle) and grad wait on the host between uses. There they are flat parts of one pinned slab,
and the parameters' `data` are views of them; on the GPU weights and gradients stay the tensors that
they are. Norms and biases, 0.003% of an 8B model, and adapters are one block that never leaves the
GPU.

A frozen weight has neither states nor gradient. Where it waits on the host it comes up for forward
and for backward, and nothing goes down. It may be quantised: packed bytes, and beside them the
scales that they are made dense with, which come and go with it (`Part`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.memory.plan import BlockSizes, Place

ALIGN = 64
"""Tensors begin at multiples of so many elements: 128 bytes of bf16."""
Take = Callable[[int, torch.dtype], Tensor]
"""A flat tensor of zeros, of so many elements."""


class Part(NamedTuple):
    """A tensor that is read with a block's weights: an attribute of its owner."""

    owner: Any
    name: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.name)
        return found

    @property
    def nbytes(self) -> int:
        """Of a flat tensor that holds it."""
        return _aligned(self.tensor.numel()) * self.tensor.element_size()


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """What the model says of a block."""

    name: str
    parameters: Mapping[str, nn.Parameter]
    """By their names in the model."""
    modules: Sequence[nn.Module] = ()
    """Whose forward reads the weights; several in turn, or none known."""
    layer: int | None = None
    """Of a decoder layer its number: backward uses its weights once more."""
    movable: bool = False
    """The weights may wait on the host."""
    beside: Sequence[Part] = ()
    """What else belongs to the weights: the scales of quantised ones."""

    @property
    def parts(self) -> list[Part]:
        """All weights, trained ones first."""
        ordered = sorted(self.parameters.values(), key=lambda p: not p.requires_grad)
        return [*(Part(parameter, "data") for parameter in ordered), *self.beside]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters.values() if p.requires_grad]

    def sizes(self, *, accumulates: bool) -> BlockSizes:
        trained = sum(_aligned(p.numel()) for p in self.trained)
        narrow = any(p.element_size() == 2 for p in self.trained)
        itemsize = max((p.element_size() for p in self.trained), default=0)
        return BlockSizes(
            weight=sum(part.nbytes for part in self.parts),
            states=trained * (10 if narrow else 8),
            grad=trained * (4 if accumulates else itemsize),
            movable=self.movable,
            fixed=not self.modules,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One parameter's outstanding AdamW step."""

    grad: Tensor | None
    """On the GPU; None for one in the block's `host_grad`."""
    options: Mapping[str, Any]
    """What `adamw_` takes: lr, betas, eps, weight_decay, step, scale."""


@dataclass(eq=False)
class Block:
    """A block's tensors. Flat ones hold its parameters one after the other, trained ones first;
    those of weights are bytes, for weights of several dtypes."""

    spec: BlockSpec
    place: Place
    parameters: list[nn.Parameter] = field(init=False)
    ranges: list[slice] = field(init=False)
    """Each trained parameter's elements in the flat tensors."""
    parts: list[Part] = field(init=False)
    weight: Tensor | None = None
    """Weights of a block that streams, as bytes, while they are on the GPU."""
    host_weight: Tensor | None = None
    host_grad: Tensor | None = None
    grad_is_on_host: bool = False
    """Nothing may be written over `host_grad`, until the update that"""
    reads_host_grad: bool = False
    """is on its way and was waited for."""
    has_room: Callable[[], bool] = field(default_factory=lambda: _always)
    """Whether a gradient may be written there."""
    exp_avg: Tensor = field(init=False)
    exp_avg_sq: Tensor = field(init=False)
    remainder: Tensor | None = None
    update: dict[int, Step] | None = None
    """Outstanding steps by the parameters' places in the block."""
    moving: list[Tensor] = field(default_factory=list)
    """Gradients, and their scale, that the update on its way still reads."""
    ready: Any = None
    """Marks when the weights may be read, and"""
    written: Any = None
    """when everything that belongs on the host is there again."""

    def __post_init__(self) -> None:
        self.parts = self.spec.parts
        self.parameters = [part.owner for part in self.parts if part.name == "data"]
        self.ranges, start = [], 0
        for parameter in self.spec.trained:
            self.ranges.append(slice(start, start + parameter.numel()))
            start += _aligned(parameter.numel())
        self.trained_numel = start

    @property
    def dtype(self) -> torch.dtype:
        """Of trained weights that move, which have one."""
        return self.parameters[0].dtype

    @property
    def nbytes(self) -> int:
        """Of the flat weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def frozen(self) -> slice:
        """Their bytes that are never updated: the last ones."""
        return slice(sum(part.nbytes for part in self.parts[: len(self.ranges)]), self.nbytes)

    @property
    def streams(self) -> bool:
        return not self.place.weight

    @property
    def is_away(self) -> bool:
        return self.streams and self.weight is None

    # --- placing -----------------------------------------------------------------------------

    def settle(self, device: torch.device, take: Take, grad: Tensor | None) -> None:
        """Makes the states, zero, and moves the weights to their place. `take` gives host memory;
        `grad` is the host's room for the gradient."""

        def on_gpu(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        make = on_gpu if self.place.states else take
        numel = self.trained_numel
        self.exp_avg, self.exp_avg_sq = make(numel, torch.float32), make(numel, torch.float32)
        if any(p.element_size() == 2 for p in self.spec.trained):
            self.remainder = make(numel, torch.int16)
        self.host_grad = grad
        if not self.streams:
            for part in self.parts:
                setattr(*part, part.tensor.to(device).contiguous())
            return
        self.host_weight = take(self.nbytes, torch.uint8)
        for part, home in zip(self.parts, self._views(self.host_weight), strict=True):
            home.copy_(part.tensor)
        self._point(self.host_weight)

    def arrive(self, weight: Tensor) -> None:
        """The block's weights are, or will be, in the flat `weight`."""
        self.weight = weight
        self._point(weight)

    def leave(self) -> None:
        """The block's weights are those on the host."""
        assert self.host_weight is not None
        self.weight = None
        self._point(self.host_weight)

    def _point(self, flat: Tensor) -> None:
        for part, view in zip(self.parts, self._views(flat), strict=True):
            setattr(*part, view)

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, start = [], 0
        for part in self.parts:
            x = part.tensor
            view = flat[start : start + x.nbytes].view(x.dtype).view(x.shape)
            views.append(view)
            start += part.nbytes
        return views

    # --- parts -------------------------------------------------------------------------------

    def pieces(self, i: int, numel: int) -> list[slice]:
        """The i-th trained parameter's part of the flat tensors, in pieces of at most `numel`
        elements."""
        start, stop = self.ranges[i].start, self.ranges[i].stop
        return [slice(at, min(at + numel, stop)) for at in range(start, stop, numel)]

    def weight_at(self, i: int, piece: slice) -> Tensor:
        """On the GPU, if the block is not away."""
        if self.weight is not None:
            return self.weight.view(self.dtype)[piece]
        start = self.ranges[i].start
        return self.parameters[i].data.view(-1)[piece.start - start : piece.stop - start]

    def home_at(self, piece: slice) -> Tensor:
        """The same of weights whose home is the host, there."""
        assert self.host_weight is not None
        return self.host_weight.view(self.dtype)[piece]

    def grad_at(self, i: int, piece: slice, grad: Tensor) -> Tensor:
        """That piece of the i-th parameter's gradient."""
        start = self.ranges[i].start
        return grad.view(-1)[piece.start - start : piece.stop - start]

    def states_at(self, i: int, piece: slice) -> list[Tensor]:
        """exp_avg, exp_avg_sq and, of a parameter in 16 bits, remainder: where they live."""
        states = [self.exp_avg[piece], self.exp_avg_sq[piece]]
        if self.parameters[i].element_size() == 2:
            assert self.remainder is not None
            states.append(self.remainder[piece])
        return states

    def tensors(self) -> list[Tensor]:
        """The states, and what an update on its way still reads."""
        states = [self.exp_avg, self.exp_avg_sq, self.remainder, *self.moving]
        return [tensor for tensor in states if tensor is not None]


def _always() -> bool:
    return True


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
