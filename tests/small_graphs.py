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
from torch.multiprocessing.reductions import StorageWeakRef
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


class _Outside:
    """A tensor that a pass reads and did not make. A graph knows its address alone, so whoever
    recorded the graph must hold it."""

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._dtype, self._view = x.dtype, (x.storage_offset(), x.shape, x.stride())

    def read(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "a graph reads memory that nobody holds"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class _Operations(TorchDispatchMode):
    """Lists the operations of a pass, with the tensors that they read and made. `inside` knows the
    memory that this graph's passes made, which belongs to the graph."""

    def __init__(self, inside: set[int]) -> None:
        super().__init__()
        self._done: list[Any] = []
        self._inside, self._is_read = inside, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"a capture cannot read the host's {func}")
        if func is torch.ops.aten.lift_fresh.default:  # a number of the code becomes a tensor
            self._inside.add(_memory(args[0]))
        outside: set[int] = set()
        given = _each((args, kwargs or {}), lambda x: self._given(x, outside))
        made = func(*args, **(kwargs or {}))
        _each(made, lambda x: _memory(x) in outside or self._inside.add(_memory(x)))
        self._done.append((func, *given, _each(made, lambda x: self._given(x, outside))))
        return made

    def _given(self, x: Tensor, outside: set[int]) -> Tensor | _Outside:
        if _memory(x) in self._inside:
            return x.detach()  # autograd's graph, which holds other tensors, is gone by a replay
        outside.add(_memory(x))
        return _Outside(x)

    @torch.no_grad()
    def again(self) -> None:
        """Runs the operations on the same memory, as the replay of a CUDA graph does. Memory that
        is there at the first replay is held from then on."""
        if not self._is_read:
            self._is_read, self._done = True, _each(self._done, _Outside.read, _Outside)
        for func, args, kwargs, made in self._done:
            found = func(*args, **kwargs)
            for new, place in zip(tree_leaves(found), tree_leaves(made), strict=True):
                if isinstance(new, Tensor) and new.numel() and new.data_ptr() != place.data_ptr():
                    place.copy_(new)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _each(given: Any, change: Any, kind: type = Tensor) -> Any:
    """Returns lists, tuples and dictionaries with what is of a kind changed."""
    if isinstance(given, kind):
        return change(given)
    if isinstance(given, list | tuple):
        return [_each(x, change, kind) for x in given]
    if isinstance(given, dict):
        return {name: _each(x, change, kind) for name, x in given.items()}
    return given


class Operations(graphs.Recording):
    """Records the operations of one pass, and runs them without Python of the layers. So it shows
    what `MadeAgain` cannot: a read by the host, Python that has to run each time, and memory that
    was given back since."""

    def __init__(self, forward: Any, backward: Any, pool: Any) -> None:
        inside: set[int] = set()
        with _Operations(inside) as self._first:
            hidden = forward()
        with _Operations(inside) as self._second:
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
    with bits_repeat():
        yield


@contextmanager
def bits_repeat() -> Iterator[None]:
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


def make(
    family: str = "llama",
    lora: bool = False,
    attention: type[ByBounds] = ByBounds,
    **options: Any,
) -> Any:
    """Returns a patched model. On a CPU this attention runs in it."""
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
        compute_by(model, attention())
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
