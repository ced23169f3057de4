"""Measures the seconds and bytes of layers as checkpoints, one of each kind at two lengths.

A specimen of the model (any_model/specimen.py) runs with the attention of the run and in its dtype.
The first layer of each kind gets dense weights, and runs as seam.py runs it, with the second
forward, on an input of noise. The curves

    seconds    T (a + b L)     for a row of T tokens, in documents of L tokens
    bytes      a + b T         the peak without weights and input, with the tensors that the model
                               passes to all layers (positions, masks)
               T (b + c L)     if a would be negative: bytes that grow faster than the row, such as
                               those of attention which holds its scores

go through the measurements at both lengths. Extrapolated to other rows, they are wrong

    for windows        longer than the two lengths: seconds stop growing as L^2 beyond a window
    for experts        if tokens of text choose others than noise does, which spreads evenly
    for packed rows    of a model that keeps its own attention: no mask of (T, T) bytes was there
    for shared keys    and values (Gemma 4, 3n): those that a layer keeps for others do not count

A few steps of one layer take tenths of a second on a GPU. The numbers are remembered, so that a
plan and the run that follows it decide by the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from longctx.any_model.probe import remembered
from longctx.any_model.runtime import AnyRuntime
from longctx.any_model.seam import Seam, ask_for, layer_of, with_input_first
from longctx.any_model.specimen import Specimen, kind_of, of_specimen, outline
from longctx.cost.dims import MeasuredLayer, Spent
from longctx.errors import UserError, one_line
from longctx.families.blocks import decoder_layers
from longctx.settings import PatchOptions

LENGTHS = {"cuda": (2048, 8192), "cpu": (32, 128)}
"""Tokens of the two rows, by kind of device."""
SHORTER = (1, 2, 4, 8)
"""Divisors of the lengths, tried until a layer fits into free memory."""

Out = TypeVar("Out")
Kind = tuple[Any, ...]
"""A kind of layer: its modules, their parameters' shapes and their settings (`kind_of`)."""


class Point(NamedTuple):
    """The cost of one direction of a layer at one length."""

    seconds: float
    nbytes: int

    def plus_bytes(self, nbytes: int) -> Point:
        """Returns the point with other bytes added."""
        return self._replace(nbytes=self.nbytes + nbytes)


@remembered
def measured_layers(
    config: Any,
    kind: Any,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    trained: bool,
) -> tuple[MeasuredLayer, ...] | str:
    """Returns the cost of each decoder layer of a model of the class `kind`, in order; `attention`
    is transformers' name of its attention (None: transformers' choice), and `trained` says whether
    its weights have gradients. If nothing can be measured, returns a short reason. On a GPU this
    resets the peaks that torch has counted."""

    def make() -> Any:
        return outline(config, kind, attention, dtype)

    try:
        kinds = [kind_of(layer) for layer in decoder_layers(make())]
        for by in SHORTER:
            lengths = [max(i, n // by) for i, n in enumerate(_lengths(config, device), 1)]
            look = partial(_each_kind, kinds=kinds, lengths=lengths, trained=trained)
            try:
                found = of_specimen(make, device, look, draws=True)
                return tuple(found[kind] for kind in kinds)
            except torch.OutOfMemoryError:
                continue
        return "a layer does not fit beside what is on the GPU"
    except UserError as error:
        return one_line(error, 160)
    except Exception as error:  # the model's own code may raise anything
        return f"a layer cannot be tried: {type(error).__name__}: {one_line(error, 120)}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _lengths(config: Any, device: torch.device) -> tuple[int, int]:
    """Returns the lengths of the two rows, at most half of the model's positions. Some models'
    positions begin after those of padding (RoBERTa's), and one too many ends the process on a
    GPU."""
    short, long = LENGTHS[device.type]
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or most >= 2 * long:
        return short, long
    return max(1, most // 8), max(2, most // 2)


def _each_kind(
    specimen: Specimen, kinds: Sequence[Kind], lengths: Sequence[int], trained: bool
) -> dict[Kind, MeasuredLayer]:
    """Returns the cost of a layer of each kind. `kinds` are those of all layers of the model, of
    which the specimen has the first ones."""
    model = specimen.model.train().requires_grad_(False)
    of_layer = dict(zip(decoder_layers(model), kinds, strict=False))
    vocab = model.config.get_text_config().vocab_size
    points = []
    for length in lengths:
        asked = _Measuring(of_layer, Allocator(specimen.device), trained)
        ask_for(model, asked)
        ids = torch.arange(length, device=specimen.device)[None] % vocab
        with torch.random.fork_rng([specimen.device] if specimen.device.type == "cuda" else []):
            specimen.hidden(input_ids=ids)
        points.append(asked.found)
    return {
        kind: MeasuredLayer(*(_fitted(lengths, pair) for pair in zip(*both, strict=True)))
        for kind, both in ((kind, [of[kind] for of in points]) for kind in points[0])
    }


class Allocator:
    """Counts the bytes that are allocated on a GPU; 0 without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._counts = device, device.type == "cuda"

    def now(self) -> int:
        if not self._counts:
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def begin(self) -> None:
        """Resets the peak that `most` returns."""
        if self._counts:
            torch.cuda.reset_peak_memory_stats(self.device)

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self._counts else 0


class _Measuring:
    """The function that a specimen's layers ask for a checkpoint: it measures the first layer of
    each kind, and only runs all others. The specimen's forward must follow at once."""

    def __init__(self, kinds: dict[nn.Module, Kind], memory: Allocator, trained: bool) -> None:
        self._kinds, self._memory, self._trained = kinds, memory, trained
        self._start = memory.now()
        self._shared: int | None = None
        self.found: dict[Kind, tuple[Point, Point]] = {}
        """The cost of forward and backward of a layer of each kind."""
        store: Any = None  # this seam stores nothing: its layers have no number (`ABOVE`)
        options = PatchOptions(class_type="any")
        self._seam = Seam(AnyRuntime(args=options, store=store, loss=None))

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = layer_of(function)
        kind = self._kinds.get(layer) if layer is not None else None
        if layer is None or kind is None or kind in self.found:
            return function(*args, **kwargs)
        function, args = with_input_first(function, args, kwargs)
        if self._shared is None:
            self._shared = max(0, self._memory.now() - self._start - args[0].nbytes)

        def run(x: Tensor) -> Any:
            return self._seam(function, x, *args[1:])

        with torch.enable_grad(), own_weights(layer, self._trained):
            self._passed(layer, run, args[0])  # a first run compiles, and chooses kernels
            forward, backward, out = self._passed(layer, run, args[0])
        self.found[kind] = forward.plus_bytes(self._shared), backward.plus_bytes(self._shared)
        return out

    def _passed(
        self, layer: nn.Module, run: Callable[[Tensor], Any], x: Tensor
    ) -> tuple[Point, Point, Any]:
        """Returns the cost of a layer's forward and of its backward, and its output without a
        graph."""
        x = torch.randn_like(x).requires_grad_()
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        before = self._memory.now()
        forward, out = self._spent(lambda: run(x))
        first = out if isinstance(out, Tensor) else out[0]
        # A model holds further outputs of a layer (BLOOM's scores) while the next one runs.
        forward = forward.plus_bytes(max(0, self._memory.now() - before - first.nbytes))

        def back() -> None:
            # Not to all leaves: keys and values that layers share have graphs that were freed.
            first.backward(torch.ones_like(first), inputs=leaves)

        backward, _ = self._spent(back)
        for leaf in leaves:
            leaf.grad = None
        return forward, backward, tree_map_only(Tensor, Tensor.detach, out)

    def _spent(self, work: Callable[[], Out]) -> tuple[Point, Out]:
        """Runs a work, and returns its seconds and its peak beyond the bytes that were there
        before."""
        before = self._memory.now()
        self._memory.begin()
        start = time.perf_counter()
        out = work()
        self._memory.now()  # waits for the GPU
        return Point(time.perf_counter() - start, self._memory.most() - before), out


@contextmanager
def own_weights(layer: nn.Module, trained: bool) -> Iterator[None]:
    """Returns a context in which a layer of a specimen has dense weights, as a model's, instead of
    views of the specimen's noise."""
    before = {
        (module, name): parameter
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    made: dict[nn.Parameter, nn.Parameter] = {}
    for (module, name), parameter in before.items():
        if parameter not in made:
            dense = parameter.detach().clone(memory_format=torch.contiguous_format)
            made[parameter] = nn.Parameter(dense, requires_grad=trained)
        module._parameters[name] = made[parameter]
    try:
        yield
    finally:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter


def _fitted(lengths: Sequence[int], points: Sequence[Point]) -> Spent:
    """Returns the curves through the points at two lengths."""
    (short, long), (first, last) = lengths, points
    a, b = _line(lengths, [p.seconds / n for n, p in zip(lengths, points, strict=True)])
    seconds = (a, b) if b > 0 else (last.seconds / long, 0.0)
    constant, slope = _line(lengths, [first.nbytes, last.nbytes])
    if constant >= 0:
        return Spent(seconds, (constant, max(0.0, slope), 0.0))
    return Spent(seconds, (0.0, *_line(lengths, [first.nbytes / short, last.nbytes / long])))


def _line(at: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Returns a and b of the line a + b x through two points."""
    slope = (values[1] - values[0]) / (at[1] - at[0])
    return values[0] - slope * at[0], slope
