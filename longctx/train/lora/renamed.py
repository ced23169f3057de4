"""Names of an adapter's tensors as earlier versions of transformers had them.

    model.layers.0...            model.language_model.layers.0...    vision models before 4.52
    language_model.model...      model.language_model...
    visual.blocks.0...           model.visual.blocks.0...
    mlp.experts.3.gate_proj...   mlp.experts...                      experts one by one, before 5.0

PEFT has a conversion of its own, which folds the adapters of single experts into one of all of
them: A's stand behind each other, and B of gate and up are the blocks of one matrix. It leaves the
names of some vision models, for which it takes a mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
PREFIX = "base_model.model."
_VISION = {
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(?=(layers|norm|embed_tokens)\.)": "model.language_model.",
    r"^(?=(visual|vision_tower|vision_model|multi_modal_projector)\.)": "model.",
}
"""Beginnings of names before transformers 4.52 -> those of today."""
_SINGLE = re.compile(r"\.experts\.\d+\.")


def renaming(modules: Iterable[str]) -> dict[str, str]:
    """Returns the patterns of old names, and what stands there today, for a model with modules of
    these paths; PEFT takes it as `key_mapping`."""
    return dict(_VISION) if "model.language_model" in {*modules} else {}


def renamed(found: Shapes, names: Mapping[str, str]) -> Shapes:
    """Returns an adapter's shapes under today's names, as PEFT renames them."""

    def today(name: str) -> str:
        short = name.removeprefix(PREFIX)
        matching = (old for old in names if re.search(old, short))
        old = next(matching, None)
        return name if old is None else PREFIX + re.sub(old, names[old], short)

    return {today(name): shape for name, shape in found.items()}


def of_single_experts(found: Iterable[str]) -> list[str]:
    """Returns the paths of the modules of single experts that an adapter has tensors for."""
    paths = (name.removeprefix(PREFIX).split(".lora_")[0] for name in found)
    return sorted({path for path in paths if _SINGLE.search(path + ".")})


def unfoldable(config: Any, experts: Iterable[str]) -> str | None:
    """Returns as a short reason why adapters of single experts cannot be folded into one; None
    where they can. PEFT gives the folded one rank 2 r and alpha 2 a for gate and up, so that a / r
    stays, and a / sqrt(r) does not; it looks at no pattern of the configuration."""
    if config.use_rslora:
        return "rsLoRA's scale is another one when the adapters of single experts are folded"
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name) or ():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", path) for path in experts):
                return f"its {name} has {pattern!r} for single experts, which PEFT folds into one"
    return None


def as_loaded(found: Shapes, adapted: Any, config: Any) -> Shapes:
    """Returns the shapes that PEFT makes of an adapter's as it loads them into `adapted`, a model
    without storage."""
    import torch
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as convert,
    )

    tensors = {name: torch.empty(shape, device="meta") for name, shape in found.items()}
    return {name: tuple(x.shape) for name, x in convert(adapted, config, tensors).items()}
