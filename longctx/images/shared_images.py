"""Images in rows that ranks share: each rank puts the features of its own tokens in place.

A rank has consecutive tokens of each row, and all images. Its tower sees all of them, so that no
features are exchanged; Hugging Face's joint gets those that belong to the rank's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longctx.attention.shards import Shards
from longctx.errors import UserError

SOURCES = {"get_image_features": "image_token_id", "get_video_features": "video_token_id"}
"""A joint's method that makes features -> its configuration's name of the token that they are of.
Qwen3-VL's second calls its first, with nothing between."""


@contextmanager
def own_features(joint: Any, inputs: Mapping[str, Any], shards: Shards | None) -> Iterator[None]:
    """Has a joint get the features of this rank's tokens alone, within.

    Raises UserError for a call without positions: those of an image's tokens depend on the whole
    row.
    """
    if shards is None:
        yield
        return
    if inputs.get("input_ids") is None or inputs.get("position_ids") is None:
        raise UserError(
            "ranks that share rows with images need input_ids and position_ids: give both, as "
            "`longctx train` does"
        )
    given = {method for method in SOURCES if hasattr(joint, method)}
    held = {method: getattr(joint, method) for method in given}
    under_way: list[str] = []

    def replaced(method: str) -> Any:
        def features(*args: Any, **kwargs: Any) -> Any:
            if under_way:  # called by the other one, which takes its part
                return held[method](*args, **kwargs)
            under_way.append(method)
            try:
                found = held[method](*args, **kwargs)
            finally:
                under_way.pop()
            token = getattr(joint.config, SOURCES[method])
            return _part(found, own_places(inputs["input_ids"], token, shards))

        return features

    vars(joint).update({method: replaced(method) for method in given})
    try:
        yield
    finally:
        for method in given:
            del vars(joint)[method]


def own_places(ids: Tensor, token: int, shards: Shards) -> Tensor:  # (B, S / R) -> (F,)
    """Returns which of a batch's features, row by row, are of this rank's tokens."""
    seen = ids == token
    whole = shards.whole(seen.long())  # (B, S)
    order = whole.flatten().cumsum(0).view_as(whole) - 1
    return shards.own(order)[seen]


def _part(found: Any, places: Tensor) -> Any:
    """Returns what a joint's method found, of some features."""
    found.pooler_output = [_chosen(found.pooler_output, places)]
    levels = getattr(found, "deepstack_features", None)
    if levels is not None:  # whole in transformers 5.17, by image in 5.23, whose joint joins them
        parts = [_chosen(level, places) for level in levels]
        whole = all(isinstance(level, Tensor) for level in levels)
        found.deepstack_features = parts if whole else [[part] for part in parts]
    return found


def _chosen(features: Any, places: Tensor) -> Tensor:  # (F, D), or (f, D) an image -> (own, D)
    every = features if isinstance(features, Tensor) else torch.cat([*features])
    return every.flatten(0, -2).index_select(0, places)
