"""Other parameters in the place of experts' packed weights, for as long as somebody reads them.

The schedule computes with packed bytes and the state beside them (layer/packed_weights.py). Code of
others reads a parameter for what it is, and packed bytes have another shape and other numbers:

    dense_experts     Hugging Face's layers: a layer's weights, made dense for one forward
    shaped_experts    PEFT makes adapters by shapes alone: a tensor of that shape without storage
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longctx.families.matrices import stack_names
from longctx.layer.packed_weights import dense, packed_state


@contextmanager
def dense_experts(layer: nn.Module) -> Iterator[None]:
    """Has the experts' weights of a layer dense, (E, O, K) each. Autograd keeps those that backward
    needs, for as long as it does."""
    with _in_place_of_packed(layer, dense):
        yield


@contextmanager
def shaped_experts(model: nn.Module) -> Iterator[None]:
    """Has parameters of the shape (E, O, K) and the dtype of the experts' dense weights, all
    elements of which are one."""

    def shaped(weight: Any) -> Tensor:
        state = packed_state(weight)
        assert state is not None
        one = torch.empty((), dtype=state.dtype, device=weight.device)
        return one.expand(state.shape)

    with _in_place_of_packed(model, shaped):
        yield


def has_packed_experts(model: nn.Module) -> bool:
    """Whether weights of experts are packed."""
    return bool(_packed(model))


def _packed(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Returns the experts' weights that are packed, each after its owner and its name there."""
    return [
        (owner, name, weight)
        for owner in module.modules()
        for name in stack_names(owner)
        if packed_state(weight := owner._parameters[name]) is not None
    ]


@contextmanager
def _in_place_of_packed(module: nn.Module, stand_in: Callable[[Any], Tensor]) -> Iterator[None]:
    found = _packed(module)
    try:
        for owner, name, weight in found:
            owner._parameters[name] = nn.Parameter(stand_in(weight), requires_grad=False)
        yield
    finally:
        for owner, name, weight in found:
            owner._parameters[name] = weight
