"""Which modules of a model hold the matrices that its tokens are multiplied by.

    linear maps   one matrix (O, I) a module: has 4 bits under --quantize, and gets adapters
    stacks        matrices of E experts in one parameter (E, O, I): each token meets some of them

Whoever asks for "the weights" asks here, so that a model whose weights are mostly stacks is counted
or refused, and not taken for its linear maps.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear maps of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules with parameters that hold several matrices, by path."""
    return {path: m for path, m in model.named_modules() if _stacked(m)}


def _stacked(module: nn.Module) -> int:
    """Returns how many matrices a parameter of this module holds; 0 if none holds several."""
    if isinstance(module, _ConvNd):
        return 0
    found = [p for p in module._parameters.values() if p is not None]
    shapes = [getattr(p, "ds_shape", p.shape) for p in found]  # ZeRO-3 empties the shape itself
    return max((shape[0] for shape in shapes if len(shape) == 3), default=0)


def active_shares(model: nn.Module, config: Any) -> dict[nn.Parameter, float]:
    """Returns the share of the tokens that a parameter is multiplied by, for those that not all
    tokens meet: k of E experts, with their biases."""
    chosen = getattr(config, "num_experts_per_tok", None)
    return {
        parameter: min(1.0, chosen / _stacked(module))
        for module in stacks(model).values()
        for parameter in module.parameters(recurse=False)
        if chosen
    }
