"""LoRA adapters as shapes, for plans: PEFT may be missing, and takes six times as long.

Each adapted linear map becomes a module with the attributes of PEFT's `LoraLayer` that
families/adapters.py reads. tests/train/plan/test_changes.py compares plans with those of PEFT's own
layers (peft_adapters.with_lora), which are still made where a part is trained as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longctx.errors import UserError
from longctx.families.adapters import within
from longctx.families.families import base_of
from longctx.families.family import part_of
from longctx.families.look import whole_shape
from longctx.packages import pip_install
from longctx.train.lora.peft_adapters import adapted_linears, adapted_stacks
from longctx.train.options.config import ModelArguments

_NAME = "default"


class LoraShape(nn.Module):
    """A linear map (O, I) with factors (r, I) and (O, r) in fp32, and a magnitude (O,) of DoRA."""

    def __init__(self, base_layer: nn.Linear, r: int, dropout: float, dora: bool = False) -> None:
        super().__init__()
        inputs, outputs = base_layer.in_features, base_layer.out_features
        self.base_layer = base_layer
        self.lora_A = _only(nn.Linear(inputs, r, bias=False, dtype=torch.float32))
        self.lora_B = _only(nn.Linear(r, outputs, bias=False, dtype=torch.float32))
        self.lora_dropout = _only(nn.Dropout(dropout) if dropout else nn.Identity())
        if dora:
            magnitude = nn.Module()
            magnitude.weight = nn.Parameter(torch.empty(outputs, dtype=torch.float32))
            self.lora_magnitude_vector = _only(magnitude)
        self.scaling = {_NAME: 1.0}
        self.active_adapters = [_NAME]
        self.disable_adapters = self.merged = False

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias


class StackShape(nn.Module):
    """A module, one parameter of which, (E, O, K) or (E, K, O), has an adapter for each expert."""

    def __init__(self, base_layer: nn.Module, name: str, parameter: Tensor, r: int) -> None:
        super().__init__()
        experts, outputs, inputs = whole_shape(parameter)
        if getattr(within(base_layer), "is_transposed", False):  # where PEFT looks, too
            outputs, inputs = inputs, outputs
        self.base_layer, self.parameter_name, self.num_experts = base_layer, name, experts
        self.lora_A = _only(nn.Linear(inputs, r * experts, bias=False, dtype=torch.float32))
        self.lora_B = _only(nn.Linear(r * experts, outputs, bias=False, dtype=torch.float32))
        self.lora_dropout = _only(nn.Identity())
        self.scaling = {_NAME: 1.0}
        self.active_adapters = [_NAME]
        self.disable_adapters = self.merged = False


def _only(module: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({_NAME: module})


def with_lora_shapes(model: Any, args: ModelArguments) -> Any:
    """Puts adapters on a model without storage, in place, and returns it. Raises UserError for
    parts that are trained as a whole, which PEFT copies."""
    if args.lora_modules_to_save:
        raise UserError(f"--lora_modules_to_save needs PEFT: {pip_install('peft')}")
    assert args.lora_r is not None
    model.requires_grad_(False)
    how = args.lora_r, args.lora_dropout, args.use_dora
    for path, linear in adapted_linears(model, args).items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, LoraShape(linear, *how))
    base = base_of(model)
    for path, stack in adapted_stacks(model, args).items():
        owner, _, own = path.rpartition(".")
        parent, _, name = owner.rpartition(".")
        inside = part_of(base, owner)
        setattr(part_of(base, parent), name, StackShape(inside, own, stack, args.lora_r))
    return model
