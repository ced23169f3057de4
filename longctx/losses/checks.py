"""Checks and dtypes that all losses of this room share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from longctx.head.stream import check_between, check_number, check_positive

__all__ = ["check_between", "check_name", "check_number", "check_positive", "widened"]


def check_name(what: str, name: Any, allowed: Iterable[str]) -> None:
    """Raises ValueError unless `name` is one of `allowed`, and suggests the nearest of them."""
    names = list(allowed)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"{what} must be one of {', '.join(names)}, got {name!r}{hint}")


def widened(**tensors: Tensor | None) -> list[Any]:
    """Returns the tensors, each (n,), in fp64 if one of them is, else in fp32; None stays None.

    Raises ValueError unless all have the shape (n,) of the first and lie on its device.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    first, like = next(iter(given.items()))
    if like.dim() != 1:
        raise ValueError(f"{first} must have shape (n,), got {tuple(like.shape)}")
    for name, x in given.items():
        if x.shape != like.shape:
            shape = tuple(like.shape)
            raise ValueError(f"{name} must have shape {shape} as {first}, got {tuple(x.shape)}")
        if x.device != like.device:
            raise ValueError(f"{name} must be on {like.device} as {first}, got {x.device}")
    double = any(x.dtype == torch.float64 for x in given.values())
    dtype = torch.float64 if double else torch.float32
    return [None if x is None else x.to(dtype) for x in tensors.values()]
