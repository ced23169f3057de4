"""A specimen of a model: of its class and configuration, cut to a few layers, with random weights.

It shows what a model computes before the model is loaded, on one device and in little memory,
whatever size the model has and whichever engine will shard it:

    layers    the first ones, until each kind of layer has occurred
    weights   large ones are views of one stretch of noise, as long as the largest of them, up to
              POOL_NUMBERS numbers, or as one expert of the largest stack; small ones are
              initialised as transformers does, and then moved a little, so that no gate is shut
              and no recurrence forgets at once
    dropout   none, nor other noise of training, unless its cost is measured
    head      `hidden` returns the head's input
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longctx.errors import UserError
from longctx.families.classes import on_meta, taken_by

POOL_NUMBERS = 1 << 24
"""The most numbers of the noise that weights are views of. Rows of a weight that has more overlap,
so that each matmul copies it first."""
LARGE = 1 << 16
"""A weight with more numbers than this is a view of noise."""
ALIGNED = 64
"""Rows of such a weight begin at multiples of this many numbers: 128 bytes in 16 bits."""
_DECAYS = ("a_log", "dt_bias", "decay")
"""Parts of the names of parameters that decide how fast a recurrence forgets."""
_SLOWER = 3.0
"""The number that is subtracted from these parameters: with initial values a state is forgotten
within a token, and a leak across documents would not show."""


def outline(config: Any, kind: Any, attention: str | None, dtype: torch.dtype) -> Any:
    """Makes a model of the class `kind` without weights; `attention` is Hugging Face's name of its
    attention, or None for Hugging Face's choice. The configuration is not changed. Raises any error
    of the class."""
    config = copy.deepcopy(taken_by(kind, config))
    config.dtype, config.use_cache = dtype, False
    if attention is not None:
        config._attn_implementation = attention
    return on_meta(kind, config, dtype)


class Specimen:
    """Turns a model without weights into a specimen, and leaves the process's random numbers as
    they were. With `whole` it has all layers, with `draws` the noise of training."""

    def __init__(
        self, model: Any, device: torch.device, *, whole: bool = False, draws: bool = False
    ) -> None:
        self.model, self.device = model, device
        if not whole:
            _shorten(model)
        if not draws:
            _draw_nothing(model)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            _fill(model, device)

    @torch.no_grad()
    def hidden(self, **inputs: Tensor) -> Tensor:  # (B, S) each -> (B, S, D) fp32
        """Runs the model's own forward, and returns the input of its head, or the model's output if
        it has no head."""
        seen: list[Tensor] = []

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(hidden)
            return hidden[..., :1]

        head = getattr(self.model, "score", None) or self.model.get_output_embeddings()
        if head is None:
            states: Tensor = self.model(**inputs)[0]
            return states.float()
        head.forward = forward
        try:
            self.model(**inputs)
        finally:
            del head.forward
        return seen[0].float()


Found = TypeVar("Found")


def of_specimen(
    make: Callable[[], Any],
    device: torch.device,
    look: Callable[[Specimen], Found],
    *,
    draws: bool = False,
) -> Found:
    """Returns what `look` returns for a specimen of the model that `make` outlines: a cut one, or
    one with all layers if a cut one cannot run (Gemma 4 has inputs by layer). Raises any error of
    the model."""
    try:
        return look(Specimen(make(), device, draws=draws))
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception:
        return look(Specimen(make(), device, whole=True, draws=draws))


def _shorten(model: Any) -> None:
    """Keeps the layers up to the last one that is the first of its kind."""
    config = model.config.get_text_config()
    depth = getattr(config, "num_hidden_layers", None)
    lists = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    kept = 0
    for _, _, layers in lists:
        kinds = [kind_of(layer) for layer in layers]
        kept = max(kept, *(kinds.index(kind) + 1 for kind in {*kinds}))
    for owner, name, layers in lists:
        setattr(owner, name, layers[:kept])
    if lists:
        config.num_hidden_layers = kept


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Returns a key by which kinds of layers differ: its modules, the shapes of their parameters,
    and their settings that are not numbers."""
    return tuple((path, type(module), *_settings(module)) for path, module in layer.named_modules())


def _settings(module: nn.Module) -> Iterator[Any]:
    yield from (p.shape for p in module.parameters(recurse=False))
    for name, value in vars(module).items():
        if isinstance(value, (bool, str)):
            yield name, value
        elif value is None:
            yield name


def _draw_nothing(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            draws = name == "p" or any(part in name for part in ("drop", "jitter", "noise"))
            if draws and isinstance(value, float):
                setattr(module, name, 0.0)


def _fill(model: Any, device: torch.device) -> None:
    """Gives a model weights and buffers. A parameter with two names stays one."""
    scale = getattr(model.config.get_text_config(), "hidden_size", 64) ** -0.5
    made: dict[nn.Parameter, nn.Parameter] = {}

    # With LARGE more numbers, two weights that fill the pool begin at different places in it.
    wanted = ((min(p.numel(), POOL_NUMBERS) + LARGE, _least(p.shape)) for p in model.parameters())
    numbers = max(map(max, wanted))

    @cache
    def pool(dtype: torch.dtype) -> Tensor:
        return torch.randn(numbers, device=device, dtype=dtype) * scale

    for module in model.modules():
        for name, empty in module._parameters.items():
            if empty is None:
                continue
            if empty not in made and empty.numel() > LARGE:
                made[empty] = _marked(_view(pool(empty.dtype), empty.shape, 7919 * len(made)))
            elif empty not in made:
                made[empty] = nn.Parameter(torch.empty_like(empty, device=device))
            module._parameters[name] = made[empty]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    model.initialize_weights()
    for name, parameter in model.named_parameters():
        if parameter.numel() <= LARGE:
            parameter += torch.randn_like(parameter) * 0.1
            if any(word in name.lower() for word in _DECAYS):
                parameter -= _SLOWER


def _marked(values: Tensor) -> nn.Parameter:
    """Returns a parameter that `initialize_weights` leaves as it is."""
    parameter = nn.Parameter(values)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _least(shape: torch.Size) -> int:
    """Returns the numbers that the pool needs for a weight. For a stack of experts these are one
    expert's, since grouped matmuls take no rows that overlap, and some more by which experts
    differ."""
    if len(shape) != 3 or shape.numel() <= LARGE:
        return 0
    return shape[1] * shape[2] + 2 * ALIGNED * shape[0]


def _view(pool: Tensor, shape: torch.Size, at: int) -> Tensor:
    """Returns a view of this shape. The rows of a matrix that is larger than the pool overlap, and
    so do the experts of a stack. All rows are aligned as in a dense weight, which grouped matmuls
    of GPUs require."""
    if len(shape) == 3 and len(pool) >= _least(shape):
        at %= len(pool) - _least(shape) + 1
        return pool.as_strided(shape, (2 * ALIGNED, shape[2], 1), at - at % ALIGNED)
    rows, columns = shape[:-1].numel(), shape[-1]
    step = (len(pool) - columns) // max(1, rows - 1)
    step = columns if step >= columns else step - step % ALIGNED
    at %= len(pool) - (rows - 1) * step - columns + 1
    return pool.as_strided((rows, columns), (step, 1), at - at % ALIGNED).view(shape)
