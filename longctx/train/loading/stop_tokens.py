"""The tokens at which generation stops, as a model's configurations name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ids_of(named: Any) -> list[int]:
    """Returns the token ids of an `eos_token_id`, which is one, several or none."""
    several = named if isinstance(named, list | tuple) else [named]
    return [token_id for token_id in several if isinstance(token_id, int)]


def add_ends(config: Any, ends: Sequence[int]) -> list[int]:
    """Adds end tokens to those of a config or generation config. Returns the new ones."""
    before = ids_of(getattr(config, "eos_token_id", None))
    new = [token_id for token_id in ends if token_id not in before]
    if new:
        together = [*before, *new]
        config.eos_token_id = together if len(together) > 1 else together[0]
    return new


def name_ends(model: Any, ends: Sequence[int]) -> list[int]:
    """Makes the configs of a model name these end tokens too. Returns those that were new to what
    `generate` reads: the generation config, or the config where there is none."""
    text = model.config.get_text_config()
    new = add_ends(text, ends)
    if model.config is not text and hasattr(model.config, "eos_token_id"):
        add_ends(model.config, ends)
    generation = getattr(model, "generation_config", None)
    return new if generation is None else add_ends(generation, ends)
