"""The formats in which models are published packed: their tensors in files and in memory.

A run under adapters keeps such weights as they are (packed_reading.py). Its plan makes the same
weights without storage. Which formats there are, and what each run asks of them, says quantised.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longctx.errors import UserError, shortened
from longctx.families.blocks import decoder_layers
from longctx.families.matrices import linears, stack_names, stacks
from longctx.layer.packed_linear import PackedLinear
from longctx.layer.packed_weights import Fp8, Mxfp4, PackedState, packed_weight


class Stored(NamedTuple):
    """A tensor that a file holds in the place of a weight, or beside it."""

    suffix: str
    """The ending that its name has behind the weight's name."""
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
    """Weights (O, I), also of experts, in e4m3, with a scale for each block of a weight."""

    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all that a weight has."""
    skipped: frozenset[str] = frozenset()
    """Modules and weights in 16 bits: `0.mlp.gate` of layer 0, or a name in all layers."""
    suffix: str = "_scale_inv"
    only: tuple[int, ...] = ()
    """The shape of a scale that is the only one of its weight."""
    lists: str = "modules_to_not_convert"
    """The key of a configuration's list of modules in 16 bits."""

    def holds(self, weight: Tensor, path: str) -> bool:
        names = path.split(".")
        ends = range(len(names) + 1)
        return self.skipped.isdisjoint(".".join(names[i:j]) for j in ends for i in range(j))

    def stored(self, name: str, shape: torch.Size) -> tuple[Stored, Stored]:
        *experts, rows, columns = shape
        high, wide = self._block(shape)
        if experts and self.block == (0, 0):
            raise ValueError("its experts have a scale a matrix: give a copy in bfloat16")
        if _TWO in name and rows // 2 % high:
            raise ValueError(
                f"{rows // 2} rows of an expert's gate are no multiple of {high}, so that it "
                "shares no block with up: give a copy in bfloat16"
            )
        grid = (-(-rows // high), -(-columns // wide)) if any(self.block) else self.only
        scales = Stored(self.suffix, (*experts, *grid), torch.float32)
        return Stored("", tuple(shape), torch.float8_e4m3fn), scales

    def state(self, shape: torch.Size, dtype: torch.dtype, scale: Tensor) -> PackedState:
        if not scale.is_meta and not scale.isfinite().all():
            raise ValueError("a scale is no number")
        return Fp8(shape, dtype, scale if scale.dim() > 1 else scale.view(1, 1), self._block(shape))

    def drawn(self, name: str, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        bytes_, scales = self.stored(name, shape)
        codes = torch.randn(bytes_.shape, device=device).to(bytes_.dtype).view(torch.uint8)
        return codes, torch.full(scales.shape, 0.02, dtype=scales.dtype, device=device)

    def _block(self, shape: torch.Size) -> tuple[int, int]:
        return self.block[0] or shape[-2], self.block[1] or shape[-1]


_TWO = "gate_up"
"""In the name of a weight that transformers puts together of two."""


def format_of(
    settings: Mapping[str, Any], *, dense: Iterable[str] = (), packed: Iterable[str] = ()
) -> Mxfp4Files | Fp8Files | None:
    """Returns the format of a configuration's `quantization_config`; None for one that no weights
    stay in. Of files that are here, tensors are named that are `dense`, of which not every
    configuration says all, and those that are `packed`."""
    if settings.get("quant_method") == "mxfp4":
        return Mxfp4Files()
    if (form := _fp8(settings)) is None:
        return None
    named = settings.get(form.lists) or []
    if not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise UserError(f"config.json has {form.lists} {_shown(named)}: a list of names is needed")
    skipped = _in_layer([*named, *dense])
    for name in _in_layer(packed):  # files are right where the configuration says otherwise
        words = name.split(".")
        skipped -= {".".join(words[:n]) for n in range(1, len(words) + 1)}
    return replace(form, skipped=skipped)


def is_compressed(settings: Mapping[str, Any]) -> bool:
    """Whether files are as the package compressed-tensors writes them."""
    return settings.get("quant_method") == "compressed-tensors"


def _fp8(settings: Mapping[str, Any]) -> Fp8Files | None:
    """Returns the format of weights in FP8: transformers' own, or one of compressed-tensors'."""
    if settings.get("quant_method") == "fp8":
        sizes = settings.get("weight_block_size")
        return Fp8Files((0, 0) if sizes is None else _two(sizes, "weight_block_size"))
    if (weights := _compressed_weights(settings)) is None:
        return None
    strategy, blocks = weights.get("strategy"), {"tensor": (0, 0), "channel": (1, 0)}
    if strategy == "block":
        block = _two(weights.get("block_structure"), "block_structure")
    elif (found := blocks.get(str(strategy))) is None:
        return None
    else:
        block = found
    return Fp8Files(block, suffix="_scale", only=(1,), lists="ignore")


def _compressed_weights(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns what compressed-tensors says of weights, if all linear layers are in FP8 alike."""
    groups = settings.get("config_groups") if is_compressed(settings) else None
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"]:
        return None
    known = {"num_bits": 8, "type": "float", "symmetric": True}
    return weights if known == {name: weights.get(name) for name in known} else None


def _two(sizes: Any, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a block. Raises UserError for what is none."""
    if isinstance(sizes, list | tuple) and len(sizes) == 2:
        rows, columns = sizes
        if all(type(x) is int and 0 < x < 2**31 for x in (rows, columns)):
            return rows, columns
    raise UserError(f"config.json has {name} {_shown(sizes)}: two positive numbers are needed")


def _shown(found: Any) -> str:
    return shortened(repr(found), 40)


def _in_layer(names: Iterable[str]) -> frozenset[str]:
    """Returns names as decoder layers have them, whatever is around these; none of a tower's."""
    literal = (_PATTERN.sub(r"\1", name).replace("\\.", ".") for name in names)
    ours = (name for name in literal if not _OF_TOWER.search(name))
    return frozenset(name.rpartition("layers.")[2] for name in ours)


_OF_TOWER = re.compile(r"(^|\.)(vision|visual|multi_modal)")
_PATTERN = re.compile(r"^re:\.\*\.?(.*?)\$?$")
"""compressed-tensors' pattern of all names with an ending. Others are not followed, since one of a
stranger's may take for ever: files tell what is packed, too."""


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


@contextmanager
def named(held: Packable) -> Iterator[None]:
    """Has a ValueError name the weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layers.{held.path}.{held.name}: {error}") from None


def pack_shapes_(model: Any, form: Format) -> None:
    """Packs the weights of a model without storage, for arithmetic. Raises ValueError, which names
    a weight that the format's blocks do not cover."""
    for held in list(held_by(form, model)):
        shape, dtype = held.weight.shape, held.weight.dtype
        with named(held):
            bytes_, scales = map(empty, form.stored(held.name, shape))
        put_(model, held, bytes_.view(torch.uint8), form.state(shape, dtype, scales))
