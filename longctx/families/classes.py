"""Which class of transformers a run's model is: a language model, one that also sees images, or a
classifier whose one number is a reward. The configuration says so (`architectures`), in memory and
in what a run saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import set_zero3_state

from longctx.errors import UserError
from longctx.families.vision import PREFIXES

CLASSIFIER = "ForSequenceClassification"


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that loads models of this configuration."""
    if takes_images(config):
        return AutoModelForImageTextToText
    return AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM


def class_of(config: Any) -> Any | None:
    """Returns the class of a configuration's models; None if it is not transformers' own."""
    if takes_images(config):
        known: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    elif is_classifier(config):
        known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    else:
        known = MODEL_FOR_CAUSAL_LM_MAPPING
    return known.get(type(config), None)


def takes_images(config: Any) -> bool:
    """Whether a model is read as a vision-language one: the schedule knows it as such, or its
    configuration says so and no causal class can read its files. That of `qwen4_exp` leaves the
    tower out; that of Llama 3.2 Vision would find weights which it does not know."""
    if config.model_type in PREFIXES:
        return True
    of_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    whole, text = (mapping.get(type(config), None) for mapping in (of_images, causal))
    if whole is None or whole.__name__ not in (config.architectures or ()):
        return False
    return text is None or not (text is whole or text._keys_to_ignore_on_load_unexpected)


def taken_by(kind: Any, config: Any) -> Any:
    """Returns the part of a configuration of which models of a class are made: the text's of one
    that also sees images, if the class is that of its language model alone."""
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text and kind.config_class is text else config


def own_class_of(config: Any) -> Any | None:
    """Returns the class of a configuration's models in code that came with it, if it names one.
    That code runs: call it where it may."""
    name = (getattr(config, "auto_map", None) or {}).get(auto_class(config).__name__)
    return name and get_class_from_dynamic_module(name, config._name_or_path)


def without_storage(config: Any, dtype: torch.dtype = torch.float32) -> nn.Module | None:
    """Returns a model whose parameters have shapes and no storage (`meta`); None if its class is
    not transformers' own. Raises whatever that class raises for values it cannot take."""
    kind = class_of(config)
    return None if kind is None else on_meta(kind, config, dtype)


def on_meta(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Returns a model of the class `kind` on the meta device.

    Under ZeRO-3, transformers shards models while it makes them, the inner ones of classifiers and
    vision-language models too, and what has no data cannot be sharded ("Cannot copy out of meta
    tensor"). `set_zero3_state` tells it that this was done."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_zero3_state(), torch.device("meta"):
            return kind(taken_by(kind, config))
    finally:
        torch.set_default_dtype(before)


def is_classifier(config: Any) -> bool:
    """Whether a configuration is that of a model with a head of classes, or of one reward."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def as_reward_model(config: Any) -> None:
    """Makes the configuration of a language model that of a model of rewards, with a head of one
    number. Raises UserError for a classifier of several classes, for a model that sees images, and
    for a model type of which transformers has none."""
    if config.model_type in PREFIXES:
        raise UserError(
            f"models of type {config.model_type!r} see images, and --task reward trains language "
            "models alone: start from one"
        )
    if is_classifier(config) and config.num_labels != 1:
        raise UserError(
            f"a model of rewards has a head of one number, and this one of {config.num_labels} "
            "classes: start from the base model"
        )
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    kind = known.get(type(config), None)
    if kind is None:
        raise UserError(f"transformers has no classifier of type {config.model_type!r}")
    config.architectures, config.num_labels = [kind.__name__], 1


def as_language_model(config: Any) -> None:
    """Makes the configuration of a model of rewards that of a language model again."""
    if is_classifier(config):
        config.architectures = None
