"""A tiny Llama or another model, or any module, whose AdamW states lie where a test wants them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cost_sizes import keep_of
from small_cost import tables_of
from small_model import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx.cost.kept import Ladder
from longctx.families.blocks import state_blocks
from longctx.memory.ladder import hosted_bytes
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Place
from longctx.memory.settle import HostRoom
from longctx.memory.states import BlockSpec
from longctx.memory.stream import StateStream
from longctx.patching.patch import patch_as
from longctx.runtime.runtime import Adopted, patched_part
from longctx.settings import PatchOptions

TOKENS = 48
"""Of the longest batch."""
PIECE = 5120
"""Elements that move at a time: a weight takes several pieces, the last one ragged."""
Where = Callable[[BlockSpec], Place]
HOST = Place(weight=False, states=False, grad=False)


def everything_on_gpu(spec: BlockSpec) -> Place:
    return Place()


def nothing_on_gpu(spec: BlockSpec) -> Place:
    if not spec.modules:
        return Place()
    return HOST if spec.movable else Place(weight=True, states=False, grad=False)


def anywhere(draw: random.Random) -> Where:
    """A random place for every block."""

    def where(spec: BlockSpec) -> Place:
        if not spec.modules:
            return Place()
        kept = {kind: draw.random() < 0.5 for kind in ("states", "grad")}
        return Place(weight=not spec.movable or draw.random() < 0.5, **kept)

    return where


def hosted(on_gpu: int, keep: str = "o", layers: int = 3) -> Ladder:
    """Of all but the last layers what they keep waits on the host."""
    return (layers - on_gpu) * (keep_of(keep, keep),) + on_gpu * (keep_of(keep),)


@cache
def _llama(dtype: torch.dtype, tied: bool, layers: int, family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    config = tiny_config(family, tie_word_embeddings=tied, num_hidden_layers=layers, **heads)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def llama(
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    *,
    tied: bool = False,
    layers: int = 3,
    family: str = "llama",
    class_type: str = "custom",
    **settings: Any,
) -> PreTrainedModel:
    """Every call gives the same weights. On a GPU attention is the one that repeats
    itself bit by bit."""
    model = copy.deepcopy(_llama(dtype, tied, layers, family)).to(device).train()
    if class_type == "custom":
        backend = "auto" if torch.device(device).type == "cpu" else "math"
        settings = dict(attn_backend=backend, tile_tokens=40) | settings
        patch_as(model, PatchOptions(class_type=class_type, **settings), torch.device(device))
    return model


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A module with its states in their places."""

    module: Any
    room: HostRoom
    stream: StateStream

    @property
    def blocks(self) -> dict[str, Any]:
        return {block.spec.name: block for block in self.stream.blocks}

    def optimizer(self, lr: float = 1e-3, weight_decay: float = 0.1, **options: Any) -> ExactAdamW:
        """Matrices decay, norms and biases do not."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
        return ExactAdamW(groups, lr=lr, stream=self.stream, **options)


def place(
    module: nn.Module,
    where: Where = everything_on_gpu,
    *,
    specs: Sequence[BlockSpec] | None = None,
    accumulates: bool = False,
    ladder: Ladder | None = None,
    tokens: int = TOKENS,
    piece: int = PIECE,
) -> Placed:
    """`specs` are a Llama's own unless given. A patched one keeps x and o of all layers on the GPU
    unless `ladder` says otherwise; the longest batch has `tokens`."""
    patched, device = patched_part(module), next(module.parameters()).device
    runtime = patched.longctx if patched else None
    specs = state_blocks(module, movable=runtime is not None) if specs is None else specs
    layers = sum(spec.layer is not None for spec in specs)
    ladder = layers * (keep_of("o"),) if ladder is None else ladder
    kept_bytes: list[int] = []
    if runtime:
        kept_bytes = [*hosted_bytes(tables_of(patched, tokens), ladder)]
    room = HostRoom(
        specs,
        [where(spec) for spec in specs],
        accumulates=accumulates,
        kept_bytes=kept_bytes,
    )
    if runtime:
        runtime.adopted = Adopted(tokens=tokens)
    room.settle(device, runtime.store if runtime else None, ladder)
    return Placed(module=module, room=room, stream=StateStream(room.blocks, device, piece))


def batch(step: int, device: str | torch.device = "cpu", rows: int = 1) -> dict[str, Tensor]:
    """Rows of two documents; the longest have TOKENS tokens."""
    tokens = TOKENS - 7 * (step % 3)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(331, (rows, tokens), generator=generator)
    positions = torch.cat([torch.arange(n) for n in (20, tokens - 20)]).repeat(rows, 1)
    labels = ids.masked_fill(positions < 5, -100)
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: x.to(device) for name, x in inputs.items()} | {"use_cache": False}
