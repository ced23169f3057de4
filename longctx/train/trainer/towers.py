"""Frozen vision towers stay outside of engines and DDP: each process has all of their weights.

An engine gathers weights around a module's call, which all processes have to make in one order. A
tower is called for batches with images alone, in as many groups as these need. So one that is
frozen is no module of the model while something wraps it, and under an engine none from then on,
but while the model is saved. Its weights lie on each process' GPU, or in host memory where rows
have no images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longctx.families.adapters import inside_peft
from longctx.families.vision import at_rest, towers
from longctx.train.engines import Engine


class Towers:
    """The frozen towers of a model that is wrapped; none of None. They `stay_out` of one that an
    engine shards."""

    def __init__(self, model: Any, *, stay_out: bool = False) -> None:
        self._stay_out = stay_out
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        """Each tower with the module that holds it, and its name there."""
        self._paths: list[str] = []
        self._resting: set[nn.Module] = set()
        self._are_out = False
        if model is None:
            return
        inner = inside_peft(model)
        self._resting = at_rest(inner)
        for path, tower in towers(inner):
            parent, _, name = path.rpartition(".")
            if not any(p.requires_grad for p in tower.parameters()):
                self._places.append((inner.get_submodule(parent), name, tower))
                self._paths.append(path)

    def make_whole(self, engine: Engine, device: torch.device) -> None:
        """Gives this process all of their weights, on its device unless they rest on the host.
        Every process calls it."""
        for _, _, tower in self._places:
            home = torch.device("cpu") if tower in self._resting else device
            for module in tower.modules():
                for name, weight in [*module.named_parameters(recurse=False)]:
                    whole = engine.whole_weight(weight, device).to(home)
                    setattr(module, name, nn.Parameter(whole, requires_grad=False))
            tower.to(device)  # buffers, too

    def weights(self) -> dict[str, Tensor]:
        """Returns their part of the whole model's `state_dict`."""
        return {
            f"{path}.{name}": weight
            for path, (*_, tower) in zip(self._paths, self._places, strict=True)
            for name, weight in tower.state_dict().items()
        }

    def take_out(self) -> None:
        """Takes them out of the model, which goes on calling them."""
        for parent, name, tower in self._places:
            parent._modules[name] = None  # which keeps their place in the order of modules
            vars(parent)[name] = tower
        self._are_out = True

    def put_back(self) -> None:
        for parent, name, tower in self._places:
            del vars(parent)[name]
            parent._modules[name] = tower
        self._are_out = False

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Has the model without them while something wraps it."""
        self.take_out()
        yield
        if not self._stay_out:
            self.put_back()

    @contextmanager
    def outside(self) -> Iterator[None]:
        self.take_out()
        try:
            yield
        finally:
            self.put_back()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Has the model whole, within, as it is saved."""
        if not self._are_out:
            yield
            return
        self.put_back()
        try:
            yield
        finally:
            self.take_out()
