"""Models of transformers in fp64, also where their code asks for fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFp64(TorchFunctionMode):
    """A context in which torch computes in fp64 what it is told to compute in fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        kwargs = {name: _wide(x) for name, x in (kwargs or {}).items()}
        return func(*map(_wide, args), **kwargs)


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def in_fp64(model: Any) -> Iterator[None]:
    """A context in which a model in fp32 is one in fp64: its weights are the same numbers."""
    model.double()
    try:
        with InFp64():
            yield
    finally:
        model.float()
