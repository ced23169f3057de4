"""Sizes in a config.json that no model can have, or none in any memory: refused by their names.

transformers looks at few of its values. A tower of 10^6 blocks is built for minutes, a chunk of 0
tokens is divided by, and numbers near 2^63 overflow, each elsewhere and long after reading. One
rule holds for every part of a configuration, however deep: a number has the limits of its name, the
first of `LIMITS` that fits. Numbers that are no sizes, as token ids and positions, have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from longctx.errors import UserError, shortened

MOST_LAYERS = 512
"""The most layers. Each takes 10 ms even on the meta device; the deepest language models have about
130."""
MOST_EXPERTS = 1 << 14
"""The most experts of a layer; Doge's single columns are the most of any published model."""
LONGEST_CHUNK = 1 << 12
"""Tokens of a chunk of a mixer's scan, which transformers' code fills up to a whole one, with
matrices of each two tokens of it: 16 times published ones."""
LARGEST_SIZE = 1 << 22
"""The largest size in a config.json: a product of three fits in 64 bits; no model comes near it."""
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
)
"""These sizes must be whole and positive, where a model has them."""
LIMITS: tuple[tuple[str, tuple[int, int] | None], ...] = (
    (r"_ids?$|token|theta|position|window|length|base$|seed|ctx$|indices$|indexes$", None),
    (r"((^|_)(n_layers?|layers|blocks|stages)$)", (0, MOST_LAYERS)),
    (r"(^|_)depths?$", (1, MOST_LAYERS)),
    (r"experts$", (0, MOST_EXPERTS)),
    (r"^(mamba_)?chunk_size$", (1, LONGEST_CHUNK)),
    (r"(^|_)(patch_size|d_conv|d_state|state_size|L_cache|conv_kernel|kernel_dim)$", (1, 1 << 16)),
    (r"^linear_.*(heads|head_dim)$|^mamba_(n_heads|num_heads|n_groups)$", (1, LARGEST_SIZE)),
    (r"", (-LARGEST_SIZE, LARGEST_SIZE)),
)
"""Maps what a name has in it to the least and the most that it may say."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The names of how many experts a token goes to, and of how many there are."""


def check_raw_sizes(model: str, found: Mapping[str, Any], path: str = "") -> None:
    """Raises UserError for numbers in a config.json that are beyond the limits of their names: some
    configurations make a list of so many layers while they are read."""
    for name, value in found.items():
        if isinstance(value, dict):
            if name not in _NO_PARTS:
                check_raw_sizes(model, value, f"{path}{name}.")
            continue
        for number in value if isinstance(value, list) else [value]:
            _check_number(model, path, name, number)


_NO_PARTS = ("quantization_config", "compression_config", "label2id", "task_specific_params")
"""Dictionaries in a config.json whose numbers are no sizes of a model."""


def _check_number(model: str, path: str, name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return
    if name in SIZES:
        if number > 1:  # what is none at all may be computed from others
            check_size(model, path + name, number, most_of(name))
        return
    limits = next(limits for pattern, limits in LIMITS if re.search(pattern, str(name)))
    if limits is None or isinstance(number, float) or number == -1:  # which often says that none is
        return
    least, most = limits
    if not least <= number <= most:
        raise _beyond(model, path + name, number, max(0, least), most)


def _check_experts(model: str, path: str, found: Mapping[str, Any]) -> None:
    """Raises UserError if a token goes to more experts than there are, or to none."""
    chosen, experts = (_first(found, names) for names in (CHOSEN, EXPERTS))
    if chosen is None or experts is None or type(experts[1]) is not int or experts[1] < 1:
        return
    (name, k), (of, count) = chosen, experts
    if type(k) is not int or not 1 <= k <= count:
        raise UserError(
            f"{model}: its config.json has {path}{name} {shortened(repr(k), 40)}: a token goes to "
            f"1 to {count} experts, of which {path}{of} says that there are {count}"
        )


def experts_of(config: PretrainedConfig) -> int | None:
    """Returns how many experts each layer has in a model's text; None where they are not told."""
    text = config.get_text_config()
    found = _first({name: _said(text, name) for name in EXPERTS}, EXPERTS)
    return found[1] if found is not None and type(found[1]) is int else None


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any] | None:
    return next(((name, found[name]) for name in names if found.get(name) is not None), None)


def parts_of(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields a configuration and those inside it, with their paths."""
    yield "", config
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig):
            for path, inner in parts_of(part):
                yield f"{name}.{path}", inner


def check_sizes(model: str, config: PretrainedConfig) -> None:
    """Raises UserError for sizes of a configuration that was read which are no whole numbers from 1
    on, or do not fit together: not every configuration looks at its values."""
    text = config.get_text_config()
    for path, part in parts_of(config):
        _check_experts(model, path, {name: _said(part, name) for name in CHOSEN + EXPERTS})
        for name in SIZES:
            found = _said(part, name)
            # Lists are of numbers for each layer, and towers have other forms of their own.
            is_one = part is config or part is text or isinstance(found, int)
            if found is not None and not isinstance(found, list) and is_one:
                check_size(model, path + name, found, most_of(name))


def _said(config: PretrainedConfig, name: str) -> Any:
    """Returns what a configuration says under a name; None for nothing, and where layers differ in
    it, of which transformers raises an error of its own (Gemma 4's heads)."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def most_of(name: str) -> int:
    return MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE


def check_size(model: str, name: str, found: Any, most: int) -> None:
    if type(found) is not int or not 1 <= found <= most:
        raise _beyond(model, name, found, 1, most)


def _beyond(model: str, name: str, found: Any, least: int, most: int) -> UserError:
    return UserError(
        f"{model}: its config.json has {name} {shortened(repr(found), 40)}: "
        f"a whole number from {least} to {most} is needed"
    )
