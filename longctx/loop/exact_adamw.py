"""Exact AdamW for a training loop of one's own.

    model = longctx.patch(model)
    optimizer = longctx.exact_adamw(model, lr=1e-5, tokens=131072)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

It keeps the contract of torch.optim.AdamW, wherever its states are (docs/states.md): schedulers,
clipping by others, moving averages, `state_dict` and `load_state_dict` of model and optimizer.
`optimizer.clip` is exact; `torch.nn.utils.clip_grad_norm_` rounds gradients in 16 bits once more.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from longctx.errors import UserError
from longctx.families.adapters import inside_peft
from longctx.images.room_for_images import ImageTokens, prepare
from longctx.images.tower import tower_of
from longctx.loop.lora_plus import has_adapters, with_rates
from longctx.loop.states import place_states
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Placement
from longctx.ranges import COUNT, NOT_NEGATIVE, POSITIVE, check_argument
from longctx.runtime.runtime import patched_part


@dataclass(kw_only=True)
class _Placing:
    place: Placement
    gpu_memory_gib: float | None
    gradient_accumulation_steps: int
    device: torch.device
    world_size: int


def exact_adamw(
    model: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    tokens: int,
    place: Placement = "auto",
    gpu_memory_gib: float | None = None,
    image_tokens: int = 0,
    batches: int = 1,
    is_last: Callable[[], bool] = lambda: True,
    loraplus_lr_ratio: float | None = None,
) -> ExactAdamW:
    """AdamW with fp32 states and masters, over bf16 or fp32 weights; moves the model to its places.

    `tokens` are those of the largest batch, and `image_tokens` as many of them as stand for parts
    of images, for whose pixels and features a patched vision-language model is left room.
    `batches` is how many add up in a step, `is_last` whether the one whose backward runs is the
    step's last (several processes average then). `place` and `gpu_memory_gib` as train.py's.
    Matrices decay, norms and biases do not. With `loraplus_lr_ratio` each adapter's B learns at so
    many times `lr` (LoRA+).

    `model` may be any module. The weights of one transformers model, patched by longctx, can wait
    on the host, except lm_head's, which losses read; what several in one module need besides is
    estimated, and nothing of other modules.
    Parameters that are thawed later are trained from `optimizer.add_param_group` on.

    Raises UserError where GPU or host have too little memory, where nothing is trained, and where
    another exact AdamW has the model's states, and for an argument that is none of its values.

    Example:
        >>> import longctx, torch
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = longctx.exact_adamw(model, lr=0.5, tokens=3)
        states: exact fp32 AdamW, fp32 weights; in memory: weights 0.00, states 0.00, ... GiB
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> norm = optimizer.clip(1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> round(norm.item(), 3)
        8.485
    """
    _check_arguments(model, tokens, place, gpu_memory_gib, batches, loraplus_lr_ratio)
    _check_images(model, image_tokens, tokens)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UserError("exact_adamw: no parameter of the model requires gradients")
    _check_free(trained)
    if patched := patched_part(model):
        patched.longctx.surround(passes=batches)
        if image_tokens:
            prepare(model, patched.longctx, [ImageTokens(image_tokens, image_tokens)], 1)
    on_gpu = torch.cuda.is_available()
    request = _Placing(
        place=place,
        gpu_memory_gib=gpu_memory_gib,
        gradient_accumulation_steps=batches,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
    )
    stream = place_states(model, request, tokens, head_movable=False)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if loraplus_lr_ratio is not None:
        groups = with_rates(groups, model, lr=lr, ratio=loraplus_lr_ratio)
    optimizer = ExactAdamW(groups, lr, betas, eps, weight_decay, stream=stream, is_last=is_last)
    _alive.add(optimizer)
    return optimizer


def _check_arguments(
    model: Any, tokens: Any, place: Any, gpu_memory_gib: Any, batches: Any, ratio: Any
) -> None:
    """Raises UserError for a wrong one. ExactAdamW checks those that are torch's."""
    check = partial(check_argument, "exact_adamw")
    if not isinstance(model, nn.Module):
        raise UserError(f"exact_adamw: model must be a torch module, got {type(model).__name__}")
    check("tokens", tokens, COUNT, whole=True)
    check("batches", batches, COUNT, whole=True)
    if place not in get_args(Placement):
        known = ", ".join(get_args(Placement))
        raise UserError(f"exact_adamw: place must be one of {known}, got {place!r}")
    if gpu_memory_gib is not None:
        check("gpu_memory_gib", gpu_memory_gib, POSITIVE)
    if ratio is not None:
        check("loraplus_lr_ratio", ratio, POSITIVE)
        if not has_adapters(model):
            raise UserError("exact_adamw: loraplus_lr_ratio is of LoRA adapters, which model lacks")


def _check_images(model: nn.Module, image_tokens: Any, tokens: int) -> None:
    """Raises UserError for tokens of images that the largest batch or the model cannot have."""
    check_argument("exact_adamw", "image_tokens", image_tokens, NOT_NEGATIVE, whole=True)
    if image_tokens > tokens:
        raise UserError(f"exact_adamw: image_tokens={image_tokens} of tokens={tokens} are too many")
    if image_tokens and tower_of(inside_peft(model)) is None:
        raise UserError("exact_adamw: image_tokens are of a patched model that sees images")


_alive: weakref.WeakSet[ExactAdamW] = weakref.WeakSet()


def _check_free(parameters: list[nn.Parameter]) -> None:
    """Raises UserError where an optimizer that is alive has states of one of the parameters."""

    def is_taken() -> bool:
        return any(optimizer.has(p) for optimizer in _alive for p in parameters)

    if is_taken():
        gc.collect()  # schedulers and their optimizers hold each other
        if is_taken():
            raise UserError(
                "exact_adamw: the model has an exact AdamW already, and two would move the same "
                "weights: delete the first (and its scheduler) before another is made"
            )
