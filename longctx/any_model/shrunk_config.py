"""A configuration with less width, for a specimen (specimen.py) that a CPU runs in a second.

    cut      the features of MLPs and of experts, the vocabulary, and heads if the configuration
             names a head's size
    kept     the hidden size, from which models compute factors (MiniCPM's of logits), the size of a
             head, the ratio of query heads to key/value heads, layers, experts and their choice

By count, the projections of DeepSeek-V3's attention go from 0.37 to 0.036 GFLOP per token and
layer, and the MLP of Llama-3.1-8B from 0.35 to 0.006.
"""

from __future__ import annotations

from copy import deepcopy
from math import gcd
from typing import Any

FEATURES = 256
"""The most features of an MLP or an expert that are kept. Kernels of grouped matmuls need multiples
of smaller numbers."""
VOCABULARY = 4096
_FEATURES = ("intermediate", "ffn_dim", "ffn_hidden", "n_inner", "inner_dim")
"""Parts of the names under which a configuration gives the features of an MLP."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
_SIZES_OF_HEADS = ("head_dim", "qk_nope_head_dim")
"""Names under which a configuration gives the size of a head. With one of them the number of heads
can be changed without changing their size."""


def narrowed(config: Any) -> Any:
    """Returns a copy of a configuration with less width, of which not every class can be made."""
    config = deepcopy(config)
    text = config.get_text_config()
    # From transformers 5.23 on, sizes of Gemma 4's layers with and without windows are here.
    of_layers = text.to_dict().get("per_layer_config") or {}
    settings = [vars(text), *of_layers.values()]
    for each in settings:
        _narrow_(each)
    if any(each.get(name) for each in settings for name in _SIZES_OF_HEADS):
        _share_heads_(settings)
    if of_layers:
        text.per_layer_config = of_layers
    return config


def _narrow_(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if any(part in name for part in _FEATURES):
            settings[name] = _at_most(value, FEATURES)
        elif name.startswith("vocab_size"):
            settings[name] = _at_most(value, VOCABULARY)
    if (settings.get("pad_token_id") or 0) >= VOCABULARY:
        settings["pad_token_id"] = None


def _share_heads_(settings: list[dict[str, Any]]) -> None:
    """Divides all numbers of heads by one number, the largest that leaves two key/value heads: a
    single one is broadcast to all query heads, so that errors in their grouping would not show."""
    found = [(each, name) for each in settings for name in _HEADS if type(each.get(name)) is int]
    counts = [each[name] for each, name in found]
    shared, most = gcd(*counts), min(counts, default=1) // 2
    by = max((n for n in range(1, most + 1) if shared % n == 0), default=1)
    for each, name in found:
        each[name] //= by


def _at_most(value: Any, most: int) -> Any:
    """Returns a number, or each number of a list, cut to `most`."""
    if isinstance(value, list):
        return [_at_most(each, most) for each in value]
    return min(value, most) if type(value) is int else value
