"""Says from a configuration alone whether --class_type custom would run Hugging Face's layers, and
whether dropout is why.

forwards/base.py asks strangers.py at each call. A run and its plan ask here, before weights are
read, with a model without storage. Hooks and modules of other libraries are not in a configuration:
they are found at the first call.
"""

from __future__ import annotations

import copy
from numbers import Real
from typing import Any

from longctx.families.classes import without_storage
from longctx.families.families import base_of
from longctx.families.strangers import why_not_scheduled


def why_declined(config: Any) -> str | None:
    """Returns a short reason why training of such a model would run Hugging Face's layers; None if
    the schedule runs, and for a class that is not transformers' own."""
    try:
        model = without_storage(copy.deepcopy(config))  # a model writes its settings there
    except Exception:  # loading the model will raise the same error, with its message
        return None
    base = None if model is None else base_of(model)
    return None if base is None else why_not_scheduled(base, training=True)


def set_dropout_(config: Any, share: float | None) -> None:
    """Sets all dropouts of a configuration, also of its language model's; None leaves them."""
    if share is None:
        return
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(part, name, share)


def is_dropout(config: Any, reason: str) -> bool:
    """Whether the schedule would run if the configuration had no dropout."""
    if "dropout" not in reason:
        return False
    without = copy.deepcopy(config)
    set_dropout_(without, 0.0)
    return why_declined(without) is None
