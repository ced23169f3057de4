"""What an engine that shards weights gathers of a model, in bytes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longctx.loop.collectives import whole_numel
from longctx.train.engines import layout


def gathered_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of a model that an engine that shards weights gathers (layout.py)."""
    parameters = [*layers_of(model)[:2].parameters()]
    adapters = not all(p.requires_grad for p in parameters)
    words = sum(whole_numel(p) * (1 + (adapters and p.requires_grad)) for p in parameters)
    head = model.get_output_embeddings()
    output = 0 if head is None else whole_numel(head.weight)
    return layout.gathered_bytes(words, output, trained_head_numel(model))


def layers_of(model: Any) -> Any:
    """Returns the decoder's `layers`; the longest list of modules where they are called otherwise,
    as GPT-2's `h`."""
    found = getattr(model.get_decoder(), "layers", None)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=len) if found is None else found


def trained_head_numel(model: PreTrainedModel) -> int:
    """Returns the elements of lm_head if it is trained; 0 for a model of rewards, which has
    none."""
    head = model.get_output_embeddings()
    return 0 if head is None or not head.weight.requires_grad else whole_numel(head.weight)
