"""Vision-language models whose language model the schedule knows: what is around it.

    Gemma3ForConditionalGeneration     the whole model: labels, lm_head, loss
      model: Gemma3Model               the joint: puts the features of images among embedded tokens
        vision_tower, multi_modal_projector
        language_model                 a base model of a family (families.py)
      lm_head

A batch of text alone goes from the joint directly to the language model. One with images goes
through Hugging Face's joint, which calls the tower (tower.py) and then the language model: both run
our forwards. Where `longctx train` reads text alone, `rest_` keeps the towers where they are, so
that they take no memory on a GPU, get no gradient and are saved as they came.

Not here: Llama 3.2 Vision (mllama), whose language model has layers that attend to the image alone.
`families.not_known` says so, and `--class_type any` trains the model.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from longctx.constants import TOKEN_TYPES

PREFIXES = {
    "gemma3": "Gemma3",
    "llava": "Llava",
    "mistral3": "Mistral3",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}
"""Maps `model_type`, which names transformers' module, to the prefix of its classes."""


def is_whole(model: Any) -> bool:
    """Whether this is a vision-language model with its lm_head."""
    return _is(model, "ForConditionalGeneration")


def is_joint(model: Any) -> bool:
    """Whether this is a vision-language model without lm_head."""
    return _is(model, "Model")


def joint_of(model: Any) -> Any | None:
    """Returns the joint of a vision-language model, the model itself or inside; else None."""
    inner = getattr(model, "model", None) if is_whole(model) else model
    return inner if is_joint(inner) else None


def forward_names() -> tuple[str, ...]:
    """Returns the names of the forwards of all whole models and joints."""
    ends = ("ForConditionalGeneration", "Model")
    return tuple(f"{_home(kind)}.{p}{end}" for kind, p in PREFIXES.items() for end in ends)


_OF_PROCESSORS = tuple(
    f"{name}_config.json" for name in ("processor", "preprocessor", "video_preprocessor")
)


def copy_processor(model: Any, folder: Path) -> None:
    """Copies the settings that prepare images from where a vision-language model was read, so that
    the model saved in `folder` is whole. Nothing happens to another model, and where there are no
    such settings."""
    with_images = isinstance(model, PreTrainedModel) and hasattr(model.config, "vision_config")
    for name in _OF_PROCESSORS if with_images else ():
        try:
            found = cached_file(model.config._name_or_path, name, local_files_only=True)
        except (OSError, ValueError):  # no such file; a model that was read from nowhere
            continue
        if found is not None:
            shutil.copyfile(found, folder / name)


BOTH_WAYS = {"gemma3"}
"""The `model_type`s whose tokens of an image attend to later ones of the same image, too."""


def sees_both_ways(config: Any) -> bool:
    """Whether tokens of an image attend to later ones of the same image, too."""
    return config.model_type in BOTH_WAYS


class SeenBothWays(dict[str, Any]):
    """Stands for the masks of (S, S) that Gemma 3's joint makes where it gets no mapping of masks,
    and hands on: it has what they would be made of."""

    def __init__(self, attention_mask: Any, token_type_ids: Any) -> None:
        super().__init__()
        self.attention_mask, self.token_type_ids = attention_mask, token_type_ids


class NotScheduled(Exception):
    """A call with `SeenBothWays` cannot run the schedule, for the reason that it holds: Hugging
    Face's layers need masks."""


_NAMES_OF_IMAGES = ("pixel_", "image_", "video_", "second_per_grid", "mm_encoder_outputs")


def image_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a call or a batch has for a model that sees images beside its text: pixels,
    their sizes, and which tokens are of images."""
    names = (*_NAMES_OF_IMAGES, *TOKEN_TYPES)
    return {k: v for k, v in inputs.items() if v is not None and k.startswith(names)}


def of_images(inputs: Mapping[str, Any]) -> str | None:
    """Returns the arguments of a call that come with images, in a few words; None if none do."""
    found = {k for k, v in inputs.items() if v is not None and k.startswith(_NAMES_OF_IMAGES)}
    for name in TOKEN_TYPES:
        if inputs.get(name) is not None and bool(inputs[name].any()):
            found.add(name)
    return ", ".join(sorted(found)) or None


def named(module: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Returns positional arguments of a forward by the names that the module's class gives them."""
    _, *names = inspect.signature(type(module).forward).parameters
    return dict(zip(names, args, strict=False))


def towers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields all of a vision-language model that is not its language model, with its path: the
    vision tower, and what projects features of images. Nothing for another model."""
    joint = joint_of(model)
    if joint is None:
        return
    where = "" if joint is model else "model."
    for name, module in joint.named_children():
        if name != "language_model":
            yield where + name, module


def rest_(model: Any) -> None:
    """Freezes the towers of a vision-language model and keeps them where they are, in memory and
    in dtype, whatever moves the model. Nothing happens to another model."""
    for _, tower in towers(model):
        tower.requires_grad_(False)
        tower._apply = partial(_stay, tower)  # type: ignore[method-assign]


def tower_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of all towers inside `model`, in whatever wrapper."""
    return {p for module in tower_modules(model) for p in module.parameters(recurse=False)}


def tower_modules(model: nn.Module) -> set[nn.Module]:
    """Returns the modules of all towers inside `model`, in whatever wrapper."""
    joints = (module for module in model.modules() if is_joint(module))
    return {part for joint in joints for _, tower in towers(joint) for part in tower.modules()}


def at_rest(model: nn.Module) -> set[nn.Module]:
    """Returns the modules inside `model` that `rest_` keeps where they are."""
    found = [module for module in model.modules() if "_apply" in vars(module)]
    return {inner for module in found for inner in module.modules()}


def _stay(tower: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Stands in for nn.Module._apply, through which `to`, `cuda`, `float` and others go."""
    return tower


def _is(model: Any, end: str) -> bool:
    return _is_one(model.__class__, end)


def is_whole_class(kind: type) -> bool:
    """Whether this is a class of vision-language models with an lm_head."""
    return _is_one(kind, "ForConditionalGeneration")


def is_joint_class(kind: type) -> bool:
    """Whether this is a class of vision-language models without lm_head."""
    return _is_one(kind, "Model")


@cache
def _is_one(of: Any, end: str) -> bool:
    names = [(kind.__module__, kind.__name__) for kind in of.__mro__]
    return any((_home(kind), prefix + end) in names for kind, prefix in PREFIXES.items())


def _home(kind: str) -> str:
    return f"transformers.models.{kind}.modeling_{kind}"
