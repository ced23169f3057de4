"""A CUDA graph of the layers (graphs.py) depends on the key of its batch and on all that the model
computes with, which this file collects. It also finds the hooks and the code of other programs that
a replay would leave out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.attention.documents import Documents
from longctx.families.adapters import with_adapters
from longctx.families.families import (
    final_norm_of,
    final_norm_spec,
    layer_adapters,
    layer_norm_spec,
    layer_specs,
    layer_weights,
    layers_of,
    mixes,
    rotary_embeddings,
    windows,
)
from longctx.kernels.state_space import CHUNK
from longctx.layer import segments as cutting
from longctx.layer.adapters.protocol import Settings
from longctx.layer.row_documents import most_places
from longctx.memory.ladder import DROPS
from longctx.memory.stream import Hook
from longctx.mixers.mixers import ModelsMixer, all_pack, mixer_of
from longctx.runtime.runtime import Runtime

LEAST_DOCUMENTS = 16
"""Room for documents, where there are several."""


class GraphKey(NamedTuple):
    """The properties that all batches share which one graph can replay."""

    tokens: int
    position_rows: int
    dtype: torch.dtype
    needs_dx: bool
    longest: int
    """No document is longer; those windows count that are shorter."""
    lengths: tuple[int, ...] | None
    """Those of the documents, where attention or a mixer needs them on the host."""
    places: int
    """The most places that a copied key has; none where attention reads keys in their place."""
    precision: tuple[Any, ...]
    """Torch's settings by which it chooses kernels."""

    @classmethod
    def of(
        cls, base: Any, runtime: Runtime, x: Tensor, rope: Tensor, documents: Documents
    ) -> GraphKey:
        shorter = (window for window in windows(base.config) if window is not None)
        limits = (n for n in (*shorter, *runtime.attention.limits) if n >= documents.longest)
        longest = min([len(x), *limits])
        as_data = runtime.attention.reads_bounds(longest) and _mixers_read_bounds(base, documents)
        return cls(
            tokens=len(x),
            position_rows=rope.shape[:-1].numel(),
            dtype=x.dtype,
            needs_dx=x.requires_grad,
            longest=longest,
            lengths=None if as_data else documents.lengths,
            places=0 if documents.keys is None else documents.keys.places.shape[1],
            precision=(
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            ),
        )


def room_for(documents: Documents) -> int:
    """Returns the number of documents that a graph has room for, if it is recorded with these."""
    count = len(documents.lengths)
    return 1 if count == 1 else max(LEAST_DOCUMENTS, 1 << (count - 1).bit_length())


def _mixers_read_bounds(base: Any, documents: Documents) -> bool:
    """Whether no mixer needs the lengths of documents on the host: each is called once, with memory
    for as many documents as there is room for."""
    if not mixes(base.config):
        return True
    tokens, room = documents.tokens, room_for(documents) * CHUNK
    is_short = tokens <= cutting.SEGMENT_TOKENS and room <= most_places(tokens) - tokens
    return is_short and all_pack(base)


class Read(NamedTuple):
    """The weights, adapters, mixers and settings that a model's layers compute with now."""

    layers: list[tuple[dict[str, Tensor], dict[str, Settings]]]
    """The parameters of each, and the settings of its adapters."""
    mixers: list[ModelsMixer | None]
    """The mixer of each layer."""
    norm: dict[str, Tensor]
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, base: Any) -> Read:
        layers = layers_of(base)
        last = final_norm_of(base)
        found = {name: getattr(last, name, None) for name in ("weight", "bias")}
        ropes = rotary_embeddings(base).items()
        return cls(
            layers=[
                with_adapters(layer_weights(layer, spec), layer_adapters(layer, spec), 0, int)
                for layer, spec in layers
            ],
            mixers=[mixer_of(layer, spec) for layer, spec in layers],
            norm={name: x for name, x in found.items() if x is not None},
            settings=(
                layer_specs(base.config),
                layer_norm_spec(base),
                final_norm_spec(base),
                tuple((name, x.data_ptr(), scaling) for name, (x, scaling) in ropes),
            ),
        )

    def tensors(self) -> Iterator[Tensor]:
        for parameters, _ in self.layers:
            yield from parameters.values()
        yield from self.norm.values()

    def facts(self) -> list[Any]:
        """Returns all that a graph depends on, to be compared with what it was when the graph was
        recorded: names and settings, and the identity, place and training of each tensor."""
        settings = [(tuple(parameters), adapters) for parameters, adapters in self.layers]
        modules = [mixer and mixer.facts() for mixer in self.mixers]
        return [self.settings, *settings, *modules, *map(_key, self.tensors())]

    def why_not_recorded(self) -> str | None:
        """Returns why a recording would not compute what the layers do."""
        adapters = chain.from_iterable(of.values() for _, of in self.layers)
        drops = any(getattr(x, "dropout", 0.0) for x in adapters)
        if drops or any(mixer is not None and mixer.drops for mixer in self.mixers):
            return DROPS
        if any(x.requires_grad and not x.is_leaf for x in self.tensors()):
            return "weights are computed from others"
        if not any(x.requires_grad for x in self.tensors()):
            return "no weight of a layer is trained"
        return None


def _key(x: Tensor) -> tuple[Any, ...]:
    return id(x), x.data_ptr(), x.requires_grad, id(getattr(x, "quant_state", None))


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of_others(base: Any) -> str | None:
    """Returns where other code runs that a replay would leave out: hooks on layers, but for those
    that bring blocks which are always there, and hooks or another forward inside a mixer, whose
    modules the schedule calls."""
    mixers = [mixer_of(layer, spec) for layer, spec in layers_of(base)]
    inside = [*chain.from_iterable(mixer.module.modules() for mixer in mixers if mixer)]
    if any(map(_has_hooks, (*base.layers, final_norm_of(base)))):
        return "hooks on layers"
    if any(_has_hooks(module) or "forward" in vars(module) for module in inside):
        return "hooks or another forward inside a mixer"
    return None


def _has_hooks(module: nn.Module) -> bool:
    hooks = (hook for name in _HOOKS for hook in vars(module)[name].values())
    return any(not isinstance(hook, Hook) or hook.moves for hook in hooks)
