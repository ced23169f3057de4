"""The families whose layers mix tokens in several ways (families.py has the others).

    qwen3_5_text                           full attention with a gate of its output; layers of
                                           linear attention between, which are refused for now

What is refused until it can be computed is said by `is_yet_to_come` alone.
"""

from __future__ import annotations

from typing import Any

from longctx.model.family import NORMS, OF_Q_AND_K, ONE_PLUS, Family

HYBRIDS: tuple[Family, ...] = (
    Family(
        kind="qwen3_5_text",
        module="qwen3_5",
        prefix="Qwen3_5",
        base="TextModel",
        rotary="TextRotaryEmbedding",
        norm=ONE_PLUS,
        norms=NORMS | OF_Q_AND_K,
        output_gate=True,
        position_rows=4,
    ),
)


def is_yet_to_come(config: Any) -> bool:
    """Whether a model of one of these modules is of no family yet (`families.family_of`): because
    of layers of linear attention, which no part computes, or of the images of Qwen3.5's wrapper."""
    text = getattr(config, "text_config", None) or config
    mixes = "linear_attention" in (getattr(text, "layer_types", None) or ())
    return mixes or config.model_type == "qwen3_5"
