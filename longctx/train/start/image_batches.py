"""Batches of rows with images: pixels are made batch by batch, by the workers that load data, and
tokens get the positions that the model gives them.

    a row      input_ids with as many tokens an image as it needs, and the numbers of its documents
    a batch    what the task's collator makes of rows, position_ids (B, S) or (4, B, S),
               pixel_values and others

An image's pixels stand in a batch as often as its tokens: once for a document or a shared prompt,
and once for each copy of a prompt (train/data/pack/batches.py).

Qwen's models have three positions for a token of an image, of time, height and width, which go on
within a document alone: they are made document by document, after one row that tells documents
apart (calls/positions.py). Hugging Face's layers read that row in some models only, so that under
other class types rows with images hold one document, or one prompt with one answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig

from longctx.errors import UserError
from longctx.families.classes import without_storage
from longctx.families.vision import joint_of
from longctx.train.data.reading.image_sources import Source
from longctx.train.data.rows import as_arrays
from longctx.train.data.rows import collate as collate_text

Rows = Sequence[dict[str, Any]]


class Batches(NamedTuple):
    """How a run makes batches of its packed rows."""

    collate: Callable[[Rows], dict[str, Tensor]]
    read: Callable[[str, Any], Any]
    """Makes what `collate` gets rows from of a dataset, given what it is for, train or eval."""
    with_images: bool
    """Whether there are images in the rows."""


class RowsWithImages(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows, each with the sources of its documents' images, one list a document."""

    def __init__(self, rows: Dataset, sources: Callable[[Iterable[int]], list[Source]]) -> None:
        self.rows, self.sources = as_arrays(rows), sources

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[int(number)]
        return {**row, "images": [self.sources([n]) for n in row["documents"].tolist()]}


class ImageCollator:
    """Makes batches of `RowsWithImages`."""

    def __init__(
        self,
        processor: Any,
        config: PretrainedConfig,
        dtype: torch.dtype,
        collate: Callable[[Rows], dict[str, Tensor]] = collate_text,
    ) -> None:
        """`dtype` is the tower's, to which its code would round pixels; `collate` makes a batch of
        the rows' tokens."""
        self.processor, self.dtype, self.collate = processor, dtype, collate
        model = without_storage(config)
        joint = None if model is None else joint_of(model)
        self._rope_index: Any = getattr(joint, "get_rope_index", None)

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        """Returns the batch of `collate` with the model's arguments for images."""
        if torch.utils.data.get_worker_info():  # tokenizers' threads did not survive the fork
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        batch = self.collate(rows)
        types = torch.from_numpy(self.processor.marks(batch["input_ids"].numpy())).long()
        apart = "parents" in rows[0] and "parents" not in batch
        shown = [_shown(row, self._opened(row), apart) for row in rows]
        images = [image for row in shown for one in row for image in one]
        made = self.processor.tensors(images) if images else {}
        made = {k: x.to(self.dtype) if x.is_floating_point() else x for k, x in made.items()}
        if self.processor.types is not None:
            batch[self.processor.types] = types
        if self._rope_index is not None and images:
            counts = [len(one) for row in shown for one in row if one]
            batch["position_ids"] = self._positions(batch, types, made["image_grid_thw"], counts)
        return {**batch, **made}

    def _opened(self, row: dict[str, Any]) -> list[list[Any]]:
        """Returns the images of each of a row's documents. Raises UserError if the row has not
        as many tokens as they need."""
        opened, needed = [], 0
        for sources in row["images"]:
            names = [*map(_name, sources)]
            opened.append([*map(self.processor.opened, sources, names)])
            sizes = (image.size for image in opened[-1])
            needed += sum(map(self.processor.tokens_of, sizes, names))
        if needed != int(self.processor.marks(np.asarray(row["input_ids"])).sum()):
            names = [_name(source) for sources in row["images"] for source in sources]
            raise UserError(
                f"{', '.join(names)}: images have changed since they were counted: begin again, "
                "so that rows are made of them as they are"
            )
        return opened

    def _positions(
        self, batch: dict[str, Tensor], types: Tensor, grids: Tensor, counts: Sequence[int]
    ) -> Tensor:  # (4, B, S)
        """Positions of text, then the three of RoPE. `counts` are the images of each document
        that has some; with the answers that share it, a prompt is one."""
        ids, apart = batch["input_ids"], batch["position_ids"]  # (B, S)
        found, given = apart.expand(4, *apart.shape).clone(), iter(grids.split([*counts]))
        for number, row in enumerate(apart):
            starts = (row == 0).nonzero().flatten().tolist()
            for start, end in pairwise([*starts, len(row)]):
                here = slice(start, end)
                if types[number, here].any():
                    of_text = ids[number, here], types[number, here], row[here]
                    found[1:, number, here] = self._of_document(*of_text, next(given))
        return found

    def _of_document(
        self, ids: Tensor, types: Tensor, apart: Tensor, grids: Tensor
    ) -> Tensor:  # (n,), (n,), (n,), (images, 3) -> (3, n)
        """The later answers to a prompt go on from it as the first one does, whose last token is
        text: the distance of its positions from those of text is theirs."""
        first = int((apart == torch.arange(len(apart))).sum())  # tokens to the first answer's end
        rope, _ = self._rope_index(
            input_ids=ids[None, :first],
            mm_token_type_ids=types[None, :first],
            image_grid_thw=grids,
        )
        rope = rope[:, 0]
        return torch.cat([rope, apart[first:] + (rope[:, -1:] - apart[first - 1])], dim=1)


def _shown(row: dict[str, Any], opened: list[list[Any]], apart: bool) -> list[list[Any]]:
    """Returns the images of each of a row's documents, or, where answers stand apart, of each
    copy of a prompt."""
    if not apart:
        return opened
    parents = np.asarray(row["parents"])
    answers = np.unique(parents[parents >= 0], return_counts=True)[1]
    return [one for one, count in zip(opened, answers, strict=True) for _ in range(count)]


def _name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else "an image"
