"""Weights that stay packed: bytes, what stands beside them, and the dense weight that they are.

A packed weight is a frozen parameter of bytes whose attribute `quant_state` says the rest, as
bitsandbytes has it. Whoever asks for the shape of such a weight, for the tensors that move with it,
or for its dense numbers asks `packed_state`, which returns one kind of object for all formats:

    Nf4      bitsandbytes' own state, nested or not: 4.13 or 4.5 bits a weight (kernels/nf4.py)
    Mxfp4    as gpt-oss is published: 4.25 bits a weight (kernels/mxfp4.py)
    Fp8      as DeepSeek and Qwen publish models: 8.002 bits a weight (kernels/fp8.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from longctx.kernels.fp8 import dense_fp8
from longctx.kernels.mxfp4 import dense_mxfp4
from longctx.kernels.nf4 import dense_nf4

PIECE = 2**26
"""Bytes that are looked at at a time."""


class PackedState(Protocol):
    """A packed weight (O, I), or experts' (E, O, I), without its bytes: what makes numbers of
    them."""

    name: ClassVar[str]
    """The format's name in messages and files."""
    by_expert: ClassVar[bool]
    """Whether some of the experts can be made dense alone (`of_experts`)."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the dense weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense weight."""

    @property
    def beside(self) -> list[tuple[Any, str]]:
        """The owners and names of the tensors that have to be where the bytes are: the scales."""

    def dense(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the dense weight, which it writes to `out` if given. Not differentiable."""

    def of_experts(self, packed: Tensor, some: slice) -> Tensor:
        """Returns the dense weight of some of the experts, in the bits of `dense`."""

    def is_finite(self, packed: Tensor) -> bool:
        """Whether the dense weight, which is not made for that, has no NaN and no infinity."""


@dataclass(frozen=True, eq=False)
class Nf4:
    """bitsandbytes' QuantState. Where its scales are quantised they have a state of their own."""

    name: ClassVar[str] = "NF4"
    by_expert: ClassVar[bool] = False  # a block of scales may have numbers of two experts
    state: Any

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.state.shape
        return shape

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.state.dtype
        return dtype

    @property
    def beside(self) -> list[tuple[Any, str]]:
        states = (self.state, getattr(self.state, "state2", None))
        return [(state, "absmax") for state in states if state is not None]

    def dense(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        return dense_nf4(packed, self.state, out=out)

    def of_experts(self, packed: Tensor, some: slice) -> Tensor:
        return self.dense(packed)[some]

    def is_finite(self, packed: Tensor) -> bool:
        return all(getattr(owner, name).isfinite().all() for owner, name in self.beside)


@dataclass(eq=False)
class Mxfp4:
    """Experts whose numbers lie as (E, O, K), in which 32 columns share a scale."""

    name: ClassVar[str] = "MXFP4"
    by_expert: ClassVar[bool] = True
    shape: torch.Size
    """(E, O, K), or (E, K, O) if the model has them `transposed`."""
    dtype: torch.dtype
    scale: Tensor  # (E, O, K / 32) uint8
    transposed: bool = False

    @property
    def beside(self) -> list[tuple[Any, str]]:
        return [(self, "scale")]

    def dense(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        lying = packed.view(*self.scale.shape[:-1], -1)
        if self.transposed:
            made = dense_mxfp4(lying, self.scale, self.dtype).transpose(-1, -2)
            return made if out is None else out.copy_(made)
        return dense_mxfp4(lying, self.scale, self.dtype, out)

    def of_experts(self, packed: Tensor, some: slice) -> Tensor:
        lying = packed.view(*self.scale.shape[:-1], -1)
        made = dense_mxfp4(lying[some], self.scale[some], self.dtype)
        return made.transpose(-1, -2) if self.transposed else made

    def is_finite(self, packed: Tensor) -> bool:
        return not (self.scale == 255).any()


@dataclass(eq=False)
class Fp8:
    """A weight (O, I), or experts', in e4m3, in which a block of rows and columns shares a scale:
    128 of each, all of a matrix, or one row."""

    name: ClassVar[str] = "FP8"
    by_expert: ClassVar[bool] = True
    shape: torch.Size
    dtype: torch.dtype
    scale: Tensor  # (..., blocks of O, blocks of I) fp32
    block: tuple[int, int] = (128, 128)

    @property
    def beside(self) -> list[tuple[Any, str]]:
        return [(self, "scale")]

    def dense(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        return dense_fp8(packed.view(self.shape), self.scale, self.block, self.dtype, out)

    def of_experts(self, packed: Tensor, some: slice) -> Tensor:
        lying = packed.view(self.shape)
        return dense_fp8(lying[some], self.scale[some], self.block, self.dtype)

    def is_finite(self, packed: Tensor) -> bool:
        if not self.scale.isfinite().all():
            return False
        codes = packed.flatten().view(torch.uint8).split(PIECE)
        return not any(((some & 127) == 127).any() for some in codes)


def packed_weight(data: Tensor, state: PackedState) -> nn.Parameter:
    """Returns the frozen parameter whose bytes, uint8, are `data`."""
    made: Any = nn.Parameter(data, requires_grad=False)
    made.quant_state = state
    return made


def packed_state(weight: Any) -> PackedState | None:
    """Returns what a packed weight is beside its bytes; None of any other weight."""
    state = getattr(weight, "quant_state", None)
    return state if state is None or isinstance(state, Mxfp4 | Fp8) else Nf4(state)


def packed_names(weights: Iterable[Any]) -> list[str]:
    """Returns the names of the formats that packed ones among the weights are in."""
    return sorted({state.name for w in weights if (state := packed_state(w)) is not None})


def dense(weight: Any, out: Tensor | None = None) -> Any:
    """Returns the dense weight (O, I), or experts' (E, O, I), of a packed one, which it writes to
    `out` if given; any other weight unchanged."""
    state = packed_state(weight)
    return weight if state is None else state.dense(weight.detach(), out)
