"""The vision tower by groups of images, so that its memory does not grow with their number.

    pixels of all images, or frames of a video -> groups of patches -> the tower, in turn
                                               -> features of all, one after the other

An image attends to itself alone, and so does each frame of Qwen's videos, so that groups give what
all at once give. Of a tower that trains a group's activations are recomputed in backward (torch's
checkpoint), and only one group has them at a time; one that is frozen keeps none. What is merged or
projected after it, which trains beside a frozen tower, is no part of that. A call that has one
group, or tensors that are not of images alone, keeps what it needs, and every call has the two
products that Hugging Face's code leaves slow (pixels.py). The layers' own checkpoints, which would
be a second recomputation inside the first, and without these products, are off meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from longctx.calls.parents import PARENTS
from longctx.families.vision import joint_of, named
from longctx.images.pixels import fast_tower
from longctx.memory.store import gpu_share_bytes

PATCHES = 4096
"""Patches of a group of a tower that trains, unless an image or a frame has more, on a CPU. Each
has about 1 MiB of activations (Qwen3-VL-8B, counted)."""
SHARE = 8
"""On a GPU a group's activations, of 1 MiB a patch, take one part in so many of its memory: the
language model's are gone when they come, and few groups have few launches."""
FROZEN_PATCHES = 8192
"""Those of a group where nothing is kept: a layer's activations, 56 KiB a patch, are 0.4 GiB."""
OF_TEXT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", PARENTS)
"""Arguments of the language model, which some joints hand to their tower as well."""
AFTER = ("merger", "projector")
"""Words in the names of modules that stand after a tower's layers."""


def tower_of(model: Any) -> nn.Module | None:
    """Returns the vision tower of a vision-language model, in Hugging Face's code; None for another
    model."""
    joint = joint_of(model)
    inner = () if joint is None else joint.named_children()
    towers = [m for name, m in inner if isinstance(m, PreTrainedModel) and name != "language_model"]
    own = [m for m in towers if type(m).forward.__module__.startswith("transformers.models.")]
    return own[0] if len(towers) == len(own) == 1 else None


def tower_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs Hugging Face's forward of a tower over each group, and joins what it returns."""
    inputs = {k: v for k, v in (named(self, args) | kwargs).items() if k not in OF_TEXT}
    frozen = not any(map(_has_gradient, (*self.parameters(), *inputs.values())))
    keeps = torch.is_grad_enabled() and trains(self)
    groups = [*_groups(self, inputs, patches_of(self) if keeps else FROZEN_PATCHES)]
    # Hooks that have embeddings require gradients (Trainer's checkpoints with adapters) would have
    # a frozen tower save activations, and weights that may wait on the host.
    run = torch.no_grad()(partial(_run, self)) if frozen else partial(_run, self)
    if len(groups) < 2:
        return run(**inputs)
    if keeps:
        run = partial(checkpoint, run, use_reentrant=False)
    along = 1 if self.config.model_type == "pixtral" else 0  # it returns all images as one row
    return _joined((run(**group) for group in groups), along)


def trained_patches(gpu_bytes: int) -> int:
    """Returns the patches of a group of a tower that trains, where a process may take so many bytes
    of a GPU. What is free does not count: a run has the same groups each time."""
    return max(1, gpu_bytes // SHARE >> 20)


def patches_of(tower: Any) -> int:
    """Returns the patches of a group of a tower that trains."""
    device = tower.device
    return trained_patches(gpu_share_bytes(device)) if device.type == "cuda" else PATCHES


def _run(tower: Any, **inputs: Any) -> Any:
    with fast_tower(tower), _without_checkpoints(tower):
        return type(tower).forward(tower, **inputs)


@contextmanager
def _without_checkpoints(tower: nn.Module) -> Iterator[None]:
    """Has no layer of a tower recompute by itself, within: groups do."""
    layers = [m for m in tower.modules() if isinstance(m, GradientCheckpointingLayer)]
    asked = [layer.gradient_checkpointing for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, was in zip(layers, asked, strict=True):
            layer.gradient_checkpointing = was


def trains(tower: nn.Module) -> bool:
    """Whether backward goes into a tower's layers."""
    names = (name for name, p in tower.named_parameters() if p.requires_grad)
    return any(not any(after in name for after in AFTER) for name in names)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _groups(tower: Any, inputs: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """Yields the arguments of a call, group by group."""
    _, pixels, *_ = inspect.signature(type(tower).forward).parameters
    sizes = next((name for name in ("grid_thw", "image_sizes") if name in inputs), None)
    others = [x for name, x in inputs.items() if name not in (pixels, sizes)]
    if not isinstance(inputs.get(pixels), Tensor) or any(isinstance(x, Tensor) for x in others):
        yield inputs
    elif sizes == "grid_thw":
        yield from _by_grid(inputs, pixels, most)
    else:
        yield from _by_image(inputs, pixels, sizes, most * tower.config.patch_size**2)


def _by_grid(inputs: dict[str, Any], pixels: str, most: int) -> Iterator[dict[str, Any]]:
    """Groups of Qwen's towers, which get all patches in one row, and a grid of frames, height and
    width for each image or video."""
    given, grid = inputs[pixels], inputs["grid_thw"]
    frames = [(n, h, w) for t, h, w in grid.tolist() for n in _cut(t, max(1, most // (h * w)))]
    start = 0
    for group in _packed(frames, [n * h * w for n, h, w in frames], most):
        stop = start + sum(n * h * w for n, h, w in group)
        yield inputs | {pixels: given[start:stop], "grid_thw": grid.new_tensor(group)}
        start = stop


def _by_image(
    inputs: dict[str, Any], pixels: str, sizes: str | None, most_pixels: int
) -> Iterator[dict[str, Any]]:
    """Groups of towers that get images of one size, (images, channels, height, width)."""
    given = inputs[pixels]
    height, width = given.shape[-2:]
    count, start = max(1, most_pixels // (height * width)), 0
    for n in _cut(len(given), count):
        group = slice(start, start + n)
        more = {} if sizes is None or inputs[sizes] is None else {sizes: inputs[sizes][group]}
        yield inputs | {pixels: given[group]} | more
        start += n


def _cut(whole: int, most: int) -> list[int]:
    """Cuts a number into parts of at most `most`."""
    return [min(most, whole - start) for start in range(0, whole, most)]


def _packed(items: Sequence[Any], patches: Sequence[int], most: int) -> Iterator[list[Any]]:
    """Yields consecutive items that have no more than `most` patches, unless one has."""
    group: list[Any] = []
    held = 0
    for item, count in zip(items, patches, strict=True):
        if group and held + count > most:
            yield group
            group, held = [], 0
        group, held = [*group, item], held + count
    if group:
        yield group


def _joined(found: Iterable[Any], along: int) -> Any:
    """Joins the outputs of groups: tensors along a dimension, within whatever holds them. Those of
    the groups go as theirs are joined, so that no two copies of all stand side by side."""
    pieces, forms = zip(*(tree_flatten(one) for one in found), strict=True)
    leaves = [_one([piece.pop(0) for piece in pieces], along) for _ in range(len(pieces[0]))]
    return tree_unflatten(leaves, forms[0])


def _one(leaves: list[Any], along: int) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat(leaves, dim=along if first.dim() > along else 0)
