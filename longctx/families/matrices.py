"""Which modules of a model hold the matrices that its tokens are multiplied by.

    linear maps   one matrix (O, I) a module: has 4 bits under --quantize, and gets adapters
    stacks        matrices of E experts in one parameter (E, O, I): has 4 bits, too, and each token
                  meets some of them

Whoever asks for "the weights" asks here, so that a model whose weights are mostly stacks is counted
or refused, and not taken for its linear maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from longctx.families.look import whole_shape


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear maps of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules with parameters that hold several matrices, by path."""
    return {path: m for path, m in model.named_modules() if _stacked(m)}


def stack_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's own parameters that hold several matrices."""
    if isinstance(module, _ConvNd):
        return []
    found = module._parameters.items()
    return [name for name, p in found if p is not None and len(whole_shape(p)) == 3]


def matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the weights of the linear maps of a model, and its stacks."""
    for linear in linears(model).values():
        yield linear.get_parameter("weight")
    for module in stacks(model).values():
        yield from (module.get_parameter(name) for name in stack_names(module))


def _stacked(module: nn.Module) -> int:
    """Returns how many matrices a parameter of this module holds; 0 if none holds several."""
    names = stack_names(module)
    return max((whole_shape(module._parameters[name])[0] for name in names), default=0)


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
