"""The room on a GPU that the images of a run's batches take, counted from the tokens that stand for
them in its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig

from longctx.cost.images import Images
from longctx.families.adapters import inside_peft
from longctx.families.classes import without_storage
from longctx.families.vision import sees_both_ways
from longctx.images.image_sizes import image_of, tower_sizes
from longctx.images.tower import patches_of, tower_of, trains

USUAL = (448, 448)
"""Pixels of an image by which those of other sizes are counted."""


class ImageTokens(NamedTuple):
    """The tokens of rows that stand for parts of images."""

    most: int
    """The number in the row that has most."""
    mean: float

    @classmethod
    def of(cls, rows: Any, processor: Any) -> ImageTokens:
        """Counts them in a `datasets.Dataset` of rows; `processor.marks` tells which tokens they
        are."""
        found: list[int] = []
        for chunk in rows.data.column("input_ids").chunks:
            seen = processor.marks(chunk.flatten().to_numpy())
            ends = np.cumsum(chunk.value_lengths().to_numpy())
            counts = np.concatenate([[0], np.cumsum(seen)])[ends]
            found += np.diff(counts, prepend=0).tolist()
        return cls(max(found), sum(found) / len(found))


def image_bytes(
    config: PretrainedConfig,
    dtype: torch.dtype,
    rows: Sequence[ImageTokens],
    rows_a_batch: int,
    *,
    trained_group: int = 0,
) -> int:
    """Returns the most that a batch's images take of a GPU while the layers run. `trained_group`
    are the patches of a group of a tower that trains, if it does: a batch with one group keeps its
    activations, and a larger one none."""
    sizes = tower_sizes(without_storage(config, dtype))
    if sizes is None:
        return 0
    image = image_of(config, USUAL)
    tokens = rows_a_batch * max(one.most for one in rows)
    largest = Images(
        tower=replace(sizes, trained_group=trained_group),
        image=image,
        count=-(-tokens // image.features),
        trained=trained_group > 0,
    )
    return max(largest.batch_bytes, replace(largest, count=largest.group).batch_bytes)


def prepare(model: Any, runtime: Any, rows: Sequence[ImageTokens], rows_a_batch: int) -> None:
    """Has the runtime of a patched model leave room for images, and none for CUDA graphs where the
    layers of batches with images run eagerly."""
    inner = inside_peft(model)
    config, tower = inner.config, tower_of(inner)
    group = patches_of(tower) if tower is not None and trains(tower) else 0
    nbytes = image_bytes(config, runtime.dtype, rows, rows_a_batch, trained_group=group)
    runtime.surround(image_bytes=nbytes, eager_images=why_eager(config))


def why_eager(config: PretrainedConfig) -> str:
    """Returns why no layer of a batch with images may be recorded as a CUDA graph; "" if it may."""
    if getattr(config.vision_config, "deepstack_visual_indexes", None):
        return "images are added in several layers"
    return "images are seen both ways" if sees_both_ways(config) else ""
