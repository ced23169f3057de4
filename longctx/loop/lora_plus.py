"""LoRA+: each adapter's B learns faster than its A, by a constant ratio.

    A -= lr step(A)                         B -= ratio lr step(B)

At one rate for both, either A or B of a wide model learns too slowly. As in PEFT, DoRA's magnitudes
learn at B's rate, and parameters that are no adapters at A's. The rate belongs to a group of the
optimizer, so a schedule scales both rates by one factor.

Source: Hayou, Ghosh and Yu 2024, arXiv 2402.12354; PEFT's create_loraplus_optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Group = dict[str, Any]
_FAST = ("lora_B", "lora_magnitude_vector")
"""Parts of the names of parameters that learn at B's rate."""


def has_adapters(model: nn.Module) -> bool:
    """Whether any parameter of the model would learn at B's rate."""
    return bool(_fast(model))


def with_rates(
    groups: Sequence[Group], model: nn.Module, *, lr: float, ratio: float
) -> list[Group]:
    """Returns the optimizer's groups, each in two: first the parameters that learn at `lr`, then
    those that learn at `ratio` times `lr`. Trainers log the rate of the first group, which is
    A's."""
    fast = _fast(model)
    split = [
        {**group, "params": [p for p in group["params"] if (p in fast) is faster], "lr": rate}
        for faster, rate in ((False, lr), (True, ratio * lr))
        for group in groups
    ]
    return [group for group in split if group["params"]]


def _fast(model: nn.Module) -> set[nn.Parameter]:
    named = model.named_parameters()
    return {p for name, p in named if p.requires_grad and any(part in name for part in _FAST)}
