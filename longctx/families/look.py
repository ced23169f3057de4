"""Looks at weights without computing them.

torch computes a parametrised weight (`torch.nn.utils.parametrize`) whenever it is read, and some
change at that: spectral_norm takes a step of its iteration, noise is drawn anew. A step therefore
reads each weight once, as the module's own forward does, and whoever only asks for a dtype, a shape
or whether it is trained looks at what it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from longctx.layer.packed_weights import packed_state

Read = Callable[..., Any]
"""getattr, or `look`."""


def whole_shape(weight: Any) -> tuple[int, ...]:
    """Returns a weight's shape, also where ZeRO-3 has put it away and left an empty tensor, and
    where it is packed, as bytes."""
    state = packed_state(weight)
    shape = weight.shape if state is None else state.shape
    return tuple(getattr(weight, "ds_shape", shape))


def look(module: Any, name: str, *default: Any) -> Any:
    """Returns what getattr does, but in the place of a parametrised tensor the first one that it is
    computed from."""
    found: Any = module._modules.get("parametrizations") if isinstance(module, nn.Module) else None
    if found is not None and name in found:
        return next(found[name].parameters())
    return getattr(module, name, *default)
