"""A model's parameters in blocks, as longctx/memory moves them: embedding, decoder layers, lm_head.

This works for every transformers model with a decoder, and for modules that hold such models. All
other parameters (norms, biases, adapters of linear layers, parameters of another dtype, towers of
other modalities) form a last block, which stays on the GPU. The vision tower is a block of its own,
which stays there where something of it trains, and in no block where it is at rest (vision.py).

Adapters of experts are in the block of their layer, though they have fp32 where weights have 16
bits: an expert has an adapter of its own, and those of rank 16 in Qwen3-30B-A3B have 0.6 billion
parameters, 9 GiB with their gradients and moments. Those of its attention have 0.01 billion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.families.adapters import expert_adapters, inside_peft
from longctx.families.look import look
from longctx.families.vision import at_rest, towers
from longctx.layer.packed_weights import packed_state
from longctx.memory.states import BlockSpec, Part

TOWER = "vision tower"
"""The name of its block."""


def state_blocks(model: Any, *, movable: bool, head_movable: bool = True) -> list[BlockSpec]:
    """Returns the blocks in the order in which forward uses them. With `movable` the weights of a
    single model may wait on the host, lm_head's only with `head_movable`: a loss that is not ours
    reads `lm_head.weight` without calling lm_head, and nothing would bring it.

    A tied lm_head is in the embedding's block and stays on the GPU: forward needs it at both ends.
    """
    models, taken = language_models(model), set[nn.Parameter]()
    names = {p: name for name, p in model.named_parameters()}
    blocks = [
        block
        for i, one in enumerate(models)
        for block in _blocks(
            *(one, names, taken),
            movable=movable and len(models) == 1,
            head_movable=head_movable,
            prefix=f"model {i}, " if len(models) > 1 else "",
        )
    ]
    resting = {p for module in at_rest(model) for p in module.parameters()}
    of_towers = {p for one in models for _, tower in towers(one) for p in tower.parameters()}
    of_towers = {p for p in of_towers - resting - taken if p.requires_grad}
    rest = {name: p for p, name in names.items() if p not in taken | resting | of_towers}
    tower = {name: p for p, name in names.items() if p in of_towers}
    blocks.append(BlockSpec(name="norms and the rest", parameters=rest))
    blocks.append(BlockSpec(name=TOWER, parameters=tower, first=True))
    return [block for block in blocks if block.parameters]


def tower_block(
    model: Any, names: Mapping[nn.Parameter, str], *, movable: bool, prefix: str = ""
) -> BlockSpec | None:
    """Returns the block of all that sees images in a model where nothing of it trains; None for
    another model."""
    modules = [tower for _, tower in towers(inside_peft(model))]
    found = {names[p]: p for module in modules for p in module.parameters()}
    if not found or any(p.requires_grad for p in found.values()):
        return None
    return BlockSpec(
        name=prefix + TOWER,
        parameters=found,
        modules=modules,
        movable=movable,
        first=True,
        tower=True,
    )


def language_models(module: Any) -> list[Any]:
    """Returns the module if it is a model, also with adapters; else the outermost models in it."""
    if hasattr(module, "get_input_embeddings"):
        return [module]
    return [one for child in module.children() for one in language_models(child)]


def _blocks(
    model: Any,
    names: Mapping[nn.Parameter, str],
    taken: set[nn.Parameter],
    *,
    movable: bool,
    head_movable: bool,
    prefix: str,
) -> list[BlockSpec]:
    """Returns the blocks of one model, and adds their parameters to `taken`."""
    dtype = look(model.get_input_embeddings(), "weight").dtype

    def block(
        name: str,
        modules: Iterable[nn.Module],
        layer: int | None,
        movable: bool,
        ends: Iterable[nn.Module] = (),
    ) -> Any:
        modules, ends = list(modules), list(ends)
        mine = {names[p]: p for p in _large(modules, dtype) if p not in taken}
        taken.update(mine.values())
        return BlockSpec(
            name=prefix + name,
            parameters=mine,
            modules=modules,
            ends=ends,
            layer=layer,
            movable=movable,
            beside=[part for parameter in mine.values() for part in scales(parameter)],
        )

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and look(head, "weight") is look(embedding, "weight")
    first, last = _owners(embedding), [] if head is None else _owners(head)
    blocks = [
        block("embedding", first + last, None, False, last)
        if tied
        else block("embedding", first, None, movable)
    ]
    tower = tower_block(model, names, movable=movable, prefix=prefix)
    if tower is not None and at_rest(model).isdisjoint(tower.modules):
        taken.update(tower.parameters.values())
        blocks.append(tower)
    for i, layer in enumerate(decoder_layers(model)):
        blocks.append(block(f"layer {i}", [layer], i, movable))
    if head is not None and not tied:
        blocks.append(block("lm_head", last, None, movable and head_movable, last))
    return blocks


def _owners(module: nn.Module) -> list[nn.Module]:
    """Returns the inner modules that hold weights. An adapter's wrapper has several, and one of
    them may be called without the wrapper."""
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]


def decoder_layers(model: Any) -> Iterable[nn.Module]:
    """Returns the decoder's `layers`, or else the modules that transformers would checkpoint, under
    whatever name (GPT-2's `h`, MPT's `blocks`); empty for a model that has neither."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if found := getattr(decoder, "layers", None):
        return found
    inside = [] if decoder is None else _checkpointed(decoder)
    return nn.ModuleList(inside or _checkpointed(model))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """RoPE's frequencies and the like, which are in no block."""
    resting = at_rest(model)
    for module in (module for module in model.modules() if module not in resting):
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def move_scales(model: nn.Module) -> None:
    """Packed weights' scales, which are no parameters, go where the bytes are."""
    for weight in model.parameters():
        for part in scales(weight):
            part.put(part.tensor.to(weight.device))


def _checkpointed(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost layers that transformers would checkpoint, in their order."""
    if isinstance(module, GradientCheckpointingLayer):
        return [module]
    return [layer for child in module.children() for layer in _checkpointed(child)]


def scales(parameter: Any) -> list[Part]:
    """Returns the tensors that move with the bytes of a packed weight: its scales, and the scales
    of these if they are quantised too. The rest of its state is only a few numbers."""
    state = packed_state(parameter)
    return [] if state is None else [Part(*place) for place in state.beside]


def _large(modules: Iterable[nn.Module], dtype: Any) -> list[nn.Parameter]:
    """Returns the parameters of a block's modules that move with it. Trained ones have one dtype,
    since flat gradients do, so adapters of experts are among them if the weights are frozen."""
    modules = list(modules)
    inside = [p for module in modules for p in module.parameters()]
    large = {p for p in inside if _is_large(p, dtype)}
    if not any(p.requires_grad for p in large):
        large.update(p for module in modules for p in expert_adapters(module))
    return [p for p in inside if p in large]


def _is_large(parameter: nn.Parameter, dtype: Any) -> bool:
    return parameter.dim() > 1 and (parameter.dtype == dtype or bool(scales(parameter)))
