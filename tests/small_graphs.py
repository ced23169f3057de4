"""Small models whose layers run as CUDA graphs, and what stands for CUDA's recording on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_bounds import ByBounds
from small_families import family_config
from small_model import tiny_config
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.runtime import graphs
from longctx.runtime.runtime import Runtime

ROWS = ([20, 27, 1], [40, 8], [48], [16, 16, 16], [5, 40, 3])
"""The documents of a row of 48 tokens."""
GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32


class MadeAgain(graphs.Recording):
    """Calls the functions again at each replay, on the fixed places that a graph reads and writes:
    everything but CUDA's own part is what runs on a GPU."""

    def __init__(self, forward: Any, backward: Any, pool: Any) -> None:
        self._functions = forward, backward
        self._live = forward()
        self.grads = [None if x is None else x.clone() for x in backward(self._live)]
        self.hidden = self._live.detach().clone()

    def replay_forward(self) -> None:
        with torch.enable_grad():
            self._live = self._functions[0]()
        self.hidden.copy_(self._live.detach())

    def replay_backward(self) -> None:
        for place, grad in zip(self.grads, self._functions[1](self._live), strict=True):
            if place is not None:
                place.copy_(grad)


READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal")
"""Operations of which the host reads the result, which no capture allows."""


class _Operations(TorchDispatchMode):
    """Lists the operations of a pass, with the tensors that they read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"a capture cannot read the host's {func}")
        made = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def again(self) -> None:
        """Runs the operations on the same memory, as the replay of a CUDA graph does."""
        for func, args, kwargs, made in self.done:
            found = func(*args, **kwargs)
            for new, place in zip(tree_leaves(found), tree_leaves(made), strict=True):
                if isinstance(new, Tensor) and new.numel() and new.data_ptr() != place.data_ptr():
                    place.copy_(new)


class Operations(graphs.Recording):
    """Records the operations of one pass, and runs them without Python of the layers. So it shows
    what `MadeAgain` cannot: a read by the host, and Python that has to run each time."""

    def __init__(self, forward: Any, backward: Any, pool: Any) -> None:
        with _Operations() as self._first:
            hidden = forward()
        with _Operations() as self._second:
            self.grads = backward(hidden)
        self.hidden = hidden.detach()

    def replay_forward(self) -> None:
        self._first.again()

    def replay_backward(self) -> None:
        self._second.again()


@contextmanager
def recorded_with(monkeypatch: Any, recording: type[graphs.Recording]) -> Iterator[None]:
    """A context in which layers are recorded, on a CPU with this class, and bits repeat."""
    if not GPU:
        monkeypatch.setattr(graphs.Graph, "recording", recording)
        monkeypatch.setattr(graphs, "can_record", lambda x: True)
        adopt = Runtime.adopt

        def always(runtime: Runtime, *given: Any) -> None:
            adopt(runtime, *given)
            graphed = runtime.args.cuda_graphs == "auto"
            runtime.adopted = replace(runtime.adopted, graphed=graphed)

        monkeypatch.setattr(Runtime, "adopt", always)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was)


def batch(i: int = 0, rows: int = 1, documents: list[int] | None = None) -> dict[str, Any]:
    lengths = ROWS[i % len(ROWS)] if documents is None else documents
    random = torch.Generator().manual_seed(i)
    ids = torch.randint(50, (rows, sum(lengths)), generator=random)
    positions = torch.cat([torch.arange(n) for n in lengths]).repeat(rows, 1)
    labels = ids.masked_fill(positions < 1, -100)
    found = dict(input_ids=ids, labels=labels, position_ids=positions)
    return {name: x.to(DEVICE) for name, x in found.items()}


def make(family: str = "llama", lora: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config() if family == "llama" else family_config(family)
    model: Any = AutoModelForCausalLM.from_config(config).to(DEVICE, DTYPE).train()
    if lora:
        peft = pytest.importorskip("peft")
        how = dict(r=4, target_modules="all-linear") | options.pop("peft", {})
        chosen = peft.LoraConfig(**how)
        model = peft.get_peft_model(model, chosen)
        for name, x in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(x, std=0.02)
    longctx.patch(model, **options)
    if not GPU:
        compute_by(model, ByBounds())
    return model


def compute_by(model: Any, attention: Any) -> None:
    runtime = runtime_of(model)
    runtime.compute = replace(runtime.compute, attention=attention)


def runtime_of(model: Any) -> Any:
    return next(m.longctx for m in model.modules() if "longctx" in vars(m))


def count(model: Any) -> int:
    return len(runtime_of(model).graphs or ())


def step(model: Any, given: dict[str, Any], optimizer: Any = None) -> list[Tensor]:
    loss = model(**given).loss
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    return found


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def trained(model: Any, steps: Any) -> list[list[Tensor]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return [step(model, given, optimizer) for given in steps]
