"""Whether what a processor makes of an image is what a vision-language model takes.

    qwen*       pixel_values (patches, channels * frames * patch^2), image_grid_thw (1, 3); a token
                for merge^2 patches
    gemma3      pixel_values (crops, 3, image_size, image_size); mm_tokens_per_image tokens a crop
    mistral3    pixel_values (1, 3, H, W), image_sizes (1, 2); a token for (patch * merge)^2 pixels
    llava       pixel_values (1, 3, image_size, image_size); a token a patch

Hugging Face's models end in an index or a shape where it is not, or train features of one patch on
another's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from longctx.images.image_sizes import image_of

Shape = tuple[int, ...]


class Fit(NamedTuple):
    """The arguments of a model for one image, and the tokens of text that stand for it."""

    arguments: dict[str, Shape]
    """Shapes by name; 0 where any length will do."""
    tokens: int


def token_of(config: Any) -> int | None:
    """Returns the id of the token that stands for a part of an image, by the configuration."""
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


def misfit(
    config: Any, shapes: Mapping[str, Shape], numbers: Mapping[str, Sequence[int]], tokens: int
) -> str | None:
    """Returns why a model of this configuration cannot take an image of which a processor has made
    arguments of these shapes and so many tokens, as the end of a sentence; None if it can.
    `numbers` are the values of small arguments."""
    find = _FITS.get(config.model_type)
    if find is None or (
        config.model_type == "llava" and config.vision_config.model_type == "pixtral"
    ):
        return None
    names = _NAMES[config.model_type]
    if others := sorted({*shapes} ^ {*names}):
        verb = "makes" if others[0] in shapes else "does not make"
        return f"{verb} `{others[0]}`, and the model takes {' and '.join(names)}"
    fit = find(config, shapes, numbers)
    for name, wanted in fit.arguments.items():
        found = shapes[name]
        if [w and f for f, w in zip(found, wanted, strict=False)] != [*wanted]:
            asked = " x ".join(str(w or "any") for w in wanted)
            return f"makes `{name}` of {' x '.join(map(str, found))}, and the model takes {asked}"
    if tokens != fit.tokens:
        return f"writes {tokens:,} tokens for an image, and the model makes {fit.tokens:,} of it"
    return None


def _qwen(config: Any, shapes: Mapping[str, Shape], numbers: Mapping[str, Sequence[int]]) -> Fit:
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    patches = prod(numbers["image_grid_thw"]) if "image_grid_thw" in numbers else 0
    features = patches // vision.spatial_merge_size**2
    return Fit({"pixel_values": (patches, width), "image_grid_thw": (1, 3)}, features)


def _gemma3(config: Any, shapes: Mapping[str, Shape], numbers: Mapping[str, Sequence[int]]) -> Fit:
    side = config.vision_config.image_size
    crops = shapes["pixel_values"][0]
    return Fit({"pixel_values": (0, 3, side, side)}, crops * config.mm_tokens_per_image)


def _llava(config: Any, shapes: Mapping[str, Shape], numbers: Mapping[str, Sequence[int]]) -> Fit:
    side = config.vision_config.image_size
    return Fit({"pixel_values": (1, 3, side, side)}, image_of(config, None).features)


def _mistral3(
    config: Any, shapes: Mapping[str, Shape], numbers: Mapping[str, Sequence[int]]
) -> Fit:
    side = config.vision_config.patch_size * config.spatial_merge_size
    pixels = numbers.get("image_sizes", ())
    arguments = {"pixel_values": (1, 3, 0, 0), "image_sizes": (1, 2)}
    return Fit(arguments, prod(n // side for n in pixels))


_QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_FITS = {"gemma3": _gemma3, "llava": _llava, "mistral3": _mistral3} | dict.fromkeys(_QWENS, _qwen)
_NAMES = {
    "gemma3": ("pixel_values",),
    "llava": ("pixel_values",),
    "mistral3": ("pixel_values", "image_sizes"),
} | dict.fromkeys(_QWENS, ("pixel_values", "image_grid_thw"))
