"""Reads the layout of a run from DeepSpeed's settings, whose values may be of any type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError, shortened
from longctx.train.engines.layout import Zero

MOST_ELEMENTS = 10**15
"""Largest bucket or group: the bytes of a larger one would overflow 64 bits."""


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the settings under a key, or none. Raises UserError."""
    found = settings.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"--deepspeed: {key} must be an object {{...}}, got {_shown(found)}")
    return found


def _elements(zero: Mapping[str, Any], key: str, default: int | None) -> Any:
    """Returns a number of elements, or the default where DeepSpeed is to find one. Raises
    UserError."""
    found = zero.get(key, "auto")
    if found == "auto":
        return default
    if type(found) not in (int, float) or not 0 <= found <= MOST_ELEMENTS:
        raise UserError(
            f"--deepspeed: {key} must be a number from 0 to {MOST_ELEMENTS:.0e}, or "
            f'"auto", got {_shown(found)}'
        )
    return int(found)


def is_true(option: str, settings: Mapping[str, Any], key: str) -> bool:
    """Returns what a file says under a key, false without it. Raises UserError for what is neither
    true nor false: libraries take the word "false" for true."""
    found = settings.get(key)
    if found is not None and not isinstance(found, bool):
        raise UserError(f"--{option}: {key} must be true or false, got {_shown(found)}")
    return bool(found)


def _shown(value: Any) -> str:
    return shortened(repr(value), 40)


def zero_layout(settings: Mapping[str, Any], processes: int, passes: int) -> Zero:
    """Returns the layout of DeepSpeed's settings. Raises UserError for stages and places that no
    plan knows, and for values of the wrong kind."""
    zero = _object(settings, "zero_optimization")
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (1, 2, 3):
        raise UserError(
            f"--deepspeed: ZeRO stage {_shown(stage)} is not known to the plan: 1, 2 or 3"
        )
    for key in zero:
        if key.endswith("_bucket_size"):  # also of those that change no byte: a run would refuse it
            _elements(zero, key, None)
    offload = {part: _object(zero, f"offload_{part}") for part in ("param", "optimizer")}
    places = {part: found.get("device") or "none" for part, found in offload.items()}
    for place in places.values():
        if place not in ("none", "cpu"):
            shown = place if isinstance(place, str) else _shown(place)
            raise UserError(
                f"--deepspeed: offload to {shown} is not known to the plan: cpu, or none"
            )

    offloads = [word for word, place in places.items() if place == "cpu"]
    suffix = " with CPU offload" if len(offloads) == 2 else ""
    if len(offloads) == 1:
        suffix = f" with the {'weights' if offloads == ['param'] else 'optimizer'} on the CPU"
    return Zero(
        name=f"ZeRO-{stage}{suffix}",
        processes=processes,
        stage=stage,
        accumulates=passes > 1,
        reduce_bucket=_elements(zero, "reduce_bucket_size", None),
        max_live=_elements(zero, "stage3_max_live_parameters", 1_000_000_000),
        sub_group=_elements(zero, "sub_group_size", 1_000_000_000),
        offloads_weights=places["param"] == "cpu",
        offloads_states=places["optimizer"] == "cpu",
        pins=is_true("deepspeed", offload["optimizer"], "pin_memory"),
    )
