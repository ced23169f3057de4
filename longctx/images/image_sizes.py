"""What a vision-language model makes of an image of W x H pixels, by its configuration: patches,
features, and tokens of a row; and the sizes of its tower, as longctx/cost/images.py counts them.

    qwen*       W and H to the nearest multiples of a token's side (patch * merge); a token is
                merge^2 patches, and two more mark the ends. An image is one frame twice, a video
                two frames of its own: it has half as many patches as its frames would as images.
    gemma3      always image_size^2, pooled to mm_tokens_per_image, with a mark and a line's end on
                either side
    mistral3    no side longer than image_size, then up to multiples of a token's side; a token more
                ends each line
    llava       always image_size^2, a token a patch

A processor may make an image smaller or larger before that: its settings are in no config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from longctx.cost.images import Image, Tower
from longctx.errors import UserError
from longctx.families.vision import towers
from longctx.images.tower import AFTER, FROZEN_PATCHES, PATCHES, tower_of

Size = tuple[int, int]
"""Width and height, in pixels."""


class TowerKind(NamedTuple):
    """What a kind of tower does that its sizes do not say."""

    image: Callable[[Any, Size], Image]
    """Returns what a configuration's model makes of an image."""
    saved: tuple[int, int]
    """Elements of a patch that a layer saves for backward, as multiples of the hidden size and of
    the MLP's: counted by torch's profiler."""
    any_size: bool = True
    """Whether the size of an image matters."""
    states: int = 1
    """Hidden states that the output holds."""
    masks: bool = False


def image_of(config: Any, size: Size | None) -> Image:
    """Returns what a vision-language model of this configuration makes of an image. `size` may be
    None where all images get one size. Raises UserError where it may not."""
    kind = KINDS[config.model_type]
    if size is None and kind.any_size:
        raise UserError(
            f"--images: a model of type {config.model_type!r} sees images in their own size: say "
            "which with --image_pixels, as 448x448"
        )
    return kind.image(config, size or (0, 0))


def tower_sizes(model: Any) -> Tower | None:
    """Returns the sizes of the vision tower in a vision-language model without adapters; None for
    another model, and for a tower whose code is not Hugging Face's. Groups
    where it trains are those of a CPU."""
    tower: Any = tower_of(model)
    if tower is None:
        return None
    config, kind = model.config, KINDS[model.config.model_type]
    patches = next(m for m in tower.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    hidden, vision = patches.out_channels, tower.config
    around = [(name, module) for name, module in towers(model)]
    each_feature = sum(
        p.numel()
        for top, module in around
        for name, p in module.named_parameters(prefix=top)
        if p.dim() > 1 and any(word in name for word in AFTER)
    )
    each_patch = sum(
        m.weight.numel()
        for name, m in tower.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d, nn.Conv3d))
        and not any(word in name for word in (*AFTER, "head"))  # a head pools to one vector
    )
    wide = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    return Tower(
        parameters=sum(p.numel() for _, module in around for p in module.parameters()),
        patch_parameters=each_patch,
        feature_parameters=each_feature,
        hidden=hidden,
        features=config.get_text_config().hidden_size,
        layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
        saved=kind.saved[0] * hidden + kind.saved[1] * wide,
        numbers=patches.weight[0].numel(),
        states=kind.states,
        deepstack=len(getattr(vision, "deepstack_visual_indexes", ())),
        masks=kind.masks,
        itemsize=patches.weight.dtype.itemsize,
        frozen_group=FROZEN_PATCHES,
        trained_group=PATCHES,
    )


# --- the kinds -------------------------------------------------------------------------------


def _qwen(config: Any, size: Size) -> Image:
    vision = config.vision_config
    merge, patch = vision.spatial_merge_size, vision.patch_size
    side = merge * patch
    columns, lines = (max(1, round(pixels / side)) for pixels in size)
    features = columns * lines
    patches = features * merge**2
    whole = len(getattr(vision, "fullatt_block_indexes", range(vision.depth)))
    pairs = whole * patches**2
    if whole < vision.depth:
        most = vision.window_size // side
        in_windows = merge**4 * _squares(columns, most) * _squares(lines, most)
        pairs += (vision.depth - whole) * in_windows
    return Image(
        width=columns * side,
        height=lines * side,
        patches=patches,
        features=features,
        tokens=features + 2,
        pairs=pairs,
    )


def _squares(whole: int, most: int) -> int:
    """Returns the sum of squares of the parts of a number that is cut into `most` and a rest."""
    return whole // most * most**2 + (whole % most) ** 2


def _gemma3(config: Any, size: Size) -> Image:
    features = config.mm_tokens_per_image
    return _square(config, features=features, tokens=features + 4)


def _llava(config: Any, size: Size) -> Image:
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    more = vision.model_type == "clip_vision_model"  # a token of the whole image's class
    features = patches + (more and config.vision_feature_select_strategy == "full")
    return _square(config, features=features, tokens=features, more=more)


def _square(config: Any, *, features: int, tokens: int, more: int = 0) -> Image:
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2 + more
    return Image(
        width=vision.image_size,
        height=vision.image_size,
        patches=patches,
        features=features,
        tokens=tokens,
        pairs=vision.num_hidden_layers * patches**2,
    )


def _mistral3(config: Any, size: Size) -> Image:
    vision = config.vision_config
    side = vision.patch_size * config.spatial_merge_size
    ratio = max(1.0, max(size) / vision.image_size)
    columns, lines = (max(1, math.ceil(math.floor(p / ratio) / side)) for p in size)
    features = columns * lines
    patches = features * config.spatial_merge_size**2
    return Image(
        width=columns * side,
        height=lines * side,
        patches=patches,
        features=features,
        tokens=features + lines,
        pairs=vision.num_hidden_layers * patches**2,
    )


KINDS: dict[str, TowerKind] = {
    "gemma3": TowerKind(_gemma3, saved=(8, 2), any_size=False),
    "llava": TowerKind(_llava, saved=(8, 2), any_size=False, states=2),
    "mistral3": TowerKind(_mistral3, saved=(12, 4), states=2, masks=True),
    "qwen2_vl": TowerKind(_qwen, saved=(10, 2)),
    "qwen2_5_vl": TowerKind(_qwen, saved=(15, 4)),
    "qwen3_vl": TowerKind(_qwen, saved=(10, 2)),
    "qwen3_vl_moe": TowerKind(_qwen, saved=(10, 2)),
    "qwen3_5": TowerKind(_qwen, saved=(10, 2)),
    "qwen3_5_moe": TowerKind(_qwen, saved=(10, 2)),
}
"""By `model_type`."""
