"""The formats in which models are published packed: their tensors in files and in memory.

A run under adapters keeps such weights as they are (packed_reading.py). Its plan makes the same
weights without storage. Which formats there are, and what each run asks of them, says quantised.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longctx.families.blocks import decoder_layers
from longctx.families.matrices import linears, stack_names, stacks
from longctx.layer.packed_linear import PackedLinear
from longctx.layer.packed_weights import Fp8, Mxfp4, PackedState, packed_weight


class Stored(NamedTuple):
    """A tensor that a file holds in the place of a weight, or beside it."""

    suffix: str
    """What its name has behind the weight's."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def empty(stored: Stored) -> Tensor:
    """Returns the tensor without storage."""
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


class Format(Protocol):
    """A way to pack weights, as the configuration of a checkpoint describes it."""

    def holds(self, weight: Tensor, path: str) -> bool:
        """Whether the weight of a decoder layer at `path`, as `0.mlp.up_proj.weight`, is packed."""

    def stored(self, name: str, shape: torch.Size) -> tuple[Stored, Stored]:
        """Returns the bytes and the scales of a weight of this name and shape. Raises ValueError
        for a shape that its blocks do not cover."""

    def state(self, shape: torch.Size, dtype: torch.dtype, scale: Tensor) -> PackedState:
        """Returns what makes numbers of the bytes, in `dtype`. Raises ValueError for scales that
        are no numbers."""

    def drawn(self, name: str, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns bytes, uint8, and scales of random weights of about the size at which training
        begins, which no file holds."""


@dataclass(frozen=True)
class Mxfp4Files:
    """Weights of experts (E, K, O), as gpt-oss has them: their columns of O in blocks of 32."""

    block: ClassVar[int] = 32
    nan: ClassVar[int] = 255
    """The scale that is no number (OCP Microscaling Formats 1.0, E8M0)."""

    def holds(self, weight: Tensor, path: str) -> bool:
        return weight.dim() == 3

    def stored(self, name: str, shape: torch.Size) -> tuple[Stored, Stored]:
        experts, columns, rows = shape
        if columns % self.block:
            raise ValueError(f"{columns} columns are no multiple of {self.block}")
        grid = experts, rows, columns // self.block
        bytes_ = Stored("_blocks", (*grid, self.block // 2), torch.uint8)
        return bytes_, Stored("_scales", grid, torch.uint8)

    def state(self, shape: torch.Size, dtype: torch.dtype, scale: Tensor) -> PackedState:
        if not scale.is_meta and (scale == self.nan).any():
            raise ValueError("a scale is no number")
        return Mxfp4(shape, dtype, scale, transposed=True)

    def drawn(self, name: str, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        bytes_, scales = self.stored(name, shape)
        codes = torch.randint(256, bytes_.shape, dtype=torch.uint8, device=device)
        # Numbers of FP4 are about 3 large.
        return codes, torch.full(scales.shape, 127 - 7, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Fp8Files:
    """Weights (O, I), also of experts, in e4m3, with a scale in fp32 for each block."""

    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: all of a weight do."""
    skipped: frozenset[str] = frozenset()
    """Modules and weights in 16 bits: `0.mlp.gate` of layer 0, or a name in all layers."""

    def holds(self, weight: Tensor, path: str) -> bool:
        names = path.split(".")
        ends = range(len(names) + 1)
        return self.skipped.isdisjoint(".".join(names[i:j]) for j in ends for i in range(j))

    def stored(self, name: str, shape: torch.Size) -> tuple[Stored, Stored]:
        *experts, rows, columns = shape
        grid: tuple[int, ...] = ()
        if self.block:
            if _TWO in name and rows // 2 % self.block[0]:
                raise ValueError(
                    f"{rows // 2} rows of an expert's gate are no multiple of {self.block[0]}, so "
                    "that it shares no block with up: give a copy in bfloat16"
                )
            grid = -(-rows // self.block[0]), -(-columns // self.block[1])
        scales = Stored("_scale_inv", (*experts, *grid), torch.float32)
        return Stored("", tuple(shape), torch.float8_e4m3fn), scales

    def state(self, shape: torch.Size, dtype: torch.dtype, scale: Tensor) -> PackedState:
        if not scale.is_meta and not scale.isfinite().all():
            raise ValueError("a scale is no number")
        rows, columns = shape[-2:]
        if self.block is None:
            scale = scale[..., None, None]
        return Fp8(shape, dtype, scale, self.block or (rows, columns))

    def drawn(self, name: str, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        bytes_, scales = self.stored(name, shape)
        codes = torch.randn(bytes_.shape, device=device).to(bytes_.dtype).view(torch.uint8)
        return codes, torch.full(scales.shape, 0.02, dtype=scales.dtype, device=device)


_TWO = "gate_up"
"""In the name of a weight that transformers puts together of two."""


def format_of(
    settings: dict[str, Any], *, dense: Iterable[str] = (), packed: Iterable[str] = ()
) -> Format | None:
    """Returns the format of a configuration's `quantization_config`; None for one that no weights
    stay in. Of files that are here, tensors are named that are `dense`, of which not every
    configuration says all, and those that are `packed`."""
    if settings.get("quant_method") == "mxfp4":
        return Mxfp4Files()
    if settings.get("quant_method") != "fp8":
        return None
    block = settings.get("weight_block_size")
    skipped = _in_layer([*(settings.get("modules_to_not_convert") or ()), *dense])
    for name in _in_layer(packed):  # files are right where the configuration says otherwise
        words = name.split(".")
        skipped -= {".".join(words[:n]) for n in range(1, len(words) + 1)}
    return Fp8Files(None if block is None else (block[0], block[1]), skipped)


def _in_layer(names: Iterable[str]) -> frozenset[str]:
    """Returns names as decoder layers have them, whatever is around these; none of a tower's."""
    return frozenset(name.rpartition("layers.")[2] for name in names if not _OF_TOWER.search(name))


_OF_TOWER = re.compile(r"(^|\.)(vision|visual|multi_modal)")


class Packable(NamedTuple):
    """A parameter of a decoder layer that a format packs."""

    owner: nn.Module
    name: str
    path: str
    """The owner's, in the decoder layers."""
    weight: nn.Parameter


def held_by(form: Format, model: Any) -> Iterator[Packable]:
    """Yields the weights of a model that is not packed yet that the format packs."""
    layers: Any = decoder_layers(model)
    named = {path: ["weight"] for path in linears(layers)}
    named |= {path: stack_names(owner) for path, owner in stacks(layers).items()}
    for path, names in named.items():
        owner = layers.get_submodule(path)
        for name in names:
            weight = owner.get_parameter(name)
            if form.holds(weight, f"{path}.{name}"):
                yield Packable(owner, name, path, weight)


def put_(model: Any, held: Packable, data: Tensor, state: PackedState) -> None:
    """Gives the model a packed weight, and a linear layer that computes with it."""
    weight, owner = packed_weight(data, state), held.owner
    if isinstance(owner, nn.Linear):
        owner = PackedLinear.like(owner)
        layers: Any = decoder_layers(model)
        layers.set_submodule(held.path, owner)
    setattr(owner, held.name, weight)


def pack_shapes_(model: Any, form: Format) -> None:
    """Packs the weights of a model without storage, for arithmetic."""
    for held in list(held_by(form, model)):
        shape, dtype = held.weight.shape, held.weight.dtype
        bytes_, scales = map(empty, form.stored(held.name, shape))
        put_(model, held, bytes_.view(torch.uint8), form.state(shape, dtype, scales))
