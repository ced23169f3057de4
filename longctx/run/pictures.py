"""Rows with pictures in a run: the processor is read where there are some, pixels are made batch by
batch, by the workers that load data, and tokens get the positions that the model gives them.

    a row      input_ids with as many tokens a picture as it needs, and the numbers of its documents
    a batch    input_ids, labels (B, S), position_ids (B, S) or (4, B, S), pixel_values and others

Qwen's models have three positions for a token of an image, of time, height and width, which go on
within a document alone: they are made document by document, after one row that tells documents
apart (model/positions.py). Hugging Face's layers read that row in some models only, so that under
other class types rows with pictures hold one document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.cost.images import Images
from longctx.data.reading.picture_sources import Source
from longctx.data.rows import Sight, collate
from longctx.errors import UserError
from longctx.model.adapters import inside_peft
from longctx.model.classes import without_storage
from longctx.model.image_sizes import image_of, tower_sizes
from longctx.model.tower import patches_of, tower_of, trains
from longctx.model.vision import PREFIXES, joint_of
from longctx.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.options.pixels import pixels_of
from longctx.safety.processes import make_room_for_workers
from longctx.safety.system import installed

USUAL = (448, 448)
"""Pixels of an image by which those of other sizes are counted."""
MOST_WORKERS = 4
"""Processes that open pictures, unless --dataloader_num_workers says otherwise."""


class Eyes:
    """The processor of a run, read once it is asked for."""

    def __init__(
        self,
        model_args: ModelArguments,
        data_args: DataArguments,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._asked = model_args, data_args, config, tokenizer
        self.pictures: Any = None
        """The processor (data/pictures/processor.py), once there was a picture."""

    def read(self) -> Any:
        """Raises UserError where the model has no processor, or a package is missing."""
        if self.pictures is None:
            model_args, data_args, config, tokenizer = self._asked
            if model_args.model_name_or_path is None:
                raise UserError(
                    f"the data have pictures, and --preset {model_args.preset} has no processor "
                    "for them: give --model_name_or_path"
                )
            if not installed("PIL"):
                raise UserError("the data have pictures, which Pillow reads: pip install pillow")
            from longctx.data.pictures.processor import Pictures

            most = None
            if data_args.image_pixels:
                width, height = pixels_of(data_args.image_pixels)
                most = width * height
            self.pictures = Pictures.read(
                *(model_args.model_name_or_path, config, tokenizer, most),
                trust_remote_code=model_args.trust_remote_code,
            )
        return self.pictures

    def sight(self) -> Sight:
        return Sight(self.read, one_document=not self._asked[0].schedules)


def eyes_of(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainArguments,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Eyes | None:
    """Returns what reads pictures in this run; None where nothing would see them. Raises UserError
    for options of pictures then."""
    if config.model_type in PREFIXES and args.task == "sft" and not data_args.streaming:
        return Eyes(model_args, data_args, config, tokenizer)
    for name, options in (("train_vision", model_args), ("image_pixels", data_args)):
        if getattr(options, name):
            raise UserError(
                f"--{name} is for --task sft of a vision-language model, without --streaming: "
                "leave it out"
            )
    return None


def check_no_vision(model_args: ModelArguments, data_args: DataArguments) -> None:
    """Raises UserError for options of pictures in a run of text alone."""
    if model_args.train_vision:
        raise UserError(
            "--train_vision trains what sees images, and no record has any: leave it out"
        )
    if data_args.image_pixels:
        raise UserError("--image_pixels limits images, and no record has any: leave it out")


def use_workers(args: TrainArguments) -> None:
    """Has other processes open pictures while the model computes, unless options say how many.
    Raises UserError where none would reach them."""
    if args.remove_unused_columns:
        raise UserError("--remove_unused_columns would remove pictures from rows: leave it out")
    if "dataloader_num_workers" not in args.named:
        args.dataloader_num_workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
        make_room_for_workers(args.dataloader_num_workers, args.dataloader_prefetch_factor)


class SeenTokens(NamedTuple):
    """The tokens of rows that stand for parts of pictures."""

    most: int
    """Of a row."""
    mean: float

    @classmethod
    def of(cls, rows: Dataset, pictures: Any) -> SeenTokens:
        found: list[int] = []
        for chunk in rows.data.column("input_ids").chunks:
            seen = pictures.seen(chunk.flatten().to_numpy())
            ends = np.cumsum(chunk.value_lengths().to_numpy())
            counts = np.concatenate([[0], np.cumsum(seen)])[ends]
            found += np.diff(counts, prepend=0).tolist()
        return cls(max(found), sum(found) / len(found))


def image_bytes(
    config: PretrainedConfig,
    dtype: torch.dtype,
    rows: Sequence[SeenTokens],
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


def prepare(model: Any, runtime: Any, rows: Sequence[SeenTokens], rows_a_batch: int) -> None:
    """Has the runtime of a patched model leave room for images, and none for CUDA graphs where the
    layers of batches with images run eagerly."""
    inner = inside_peft(model)
    config, tower = inner.config, tower_of(inner)
    group = patches_of(tower) if tower is not None and trains(tower) else 0
    runtime.beside_bytes = image_bytes(
        config, runtime.dtype, rows, rows_a_batch, trained_group=group
    )
    if getattr(config.vision_config, "deepstack_visual_indexes", None):
        runtime.eager_images = "images are added in several layers"
    elif config.model_type == "gemma3":
        runtime.eager_images = "images are seen both ways"


class Pictured(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows, each with the sources of its documents' pictures, one list a document."""

    def __init__(self, rows: Dataset, sources: Callable[[Iterable[int]], list[Source]]) -> None:
        self.rows, self.sources = rows.with_format("numpy"), sources

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[int(number)]
        return {**row, "pictures": [self.sources([n]) for n in row["documents"].tolist()]}


class PictureCollator:
    """Makes batches of rows of `Pictured`."""

    def __init__(self, pictures: Any, config: PretrainedConfig, dtype: torch.dtype) -> None:
        """`dtype` is the tower's, to which its code would round pixels."""
        self.pictures, self.dtype = pictures, dtype
        model = without_storage(config)
        joint = None if model is None else joint_of(model)
        self._rope_index: Any = getattr(joint, "get_rope_index", None)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the model's arguments, and `documents` as `collate` does."""
        if torch.utils.data.get_worker_info():  # tokenizers' threads did not survive the fork
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        batch = collate(rows)
        types = torch.from_numpy(self.pictures.seen(batch["input_ids"].numpy())).long()
        images = []
        for row, seen in zip(rows, types.sum(1).tolist(), strict=True):
            images += self._opened([source for one in row["pictures"] for source in one], seen)
        made = self.pictures.tensors(images) if images else {}
        made = {k: x.to(self.dtype) if x.is_floating_point() else x for k, x in made.items()}
        if self.pictures.types is not None:
            batch[self.pictures.types] = types
        if self._rope_index is not None and images:
            grids = made["image_grid_thw"]
            batch["position_ids"] = self._positions(batch, types, grids, rows)
        return {**batch, **made}

    def _opened(self, sources: Sequence[Source], tokens: int) -> list[Any]:
        """Returns the pictures of a row that has so many tokens for them."""
        names = [*map(_name, sources)]
        images = [*map(self.pictures.opened, sources, names)]
        sizes = (image.size for image in images)
        if sum(map(self.pictures.tokens_of, sizes, names)) != tokens:
            raise UserError(
                f"{', '.join(names)}: pictures have changed since they were counted: begin again, "
                "so that rows are made of them as they are"
            )
        return images

    def _positions(
        self, batch: dict[str, Tensor], types: Tensor, grids: Tensor, rows: Sequence[dict[str, Any]]
    ) -> Tensor:  # (4, B, S)
        """Positions of text, then the three of RoPE."""
        apart = batch["position_ids"]  # (B, S)
        found, first = apart.expand(4, *apart.shape).clone(), 0
        for number, row in enumerate(rows):
            starts = (apart[number] == 0).nonzero().flatten().tolist()
            for start, end, seen in zip(
                starts, [*starts[1:], apart.shape[1]], _counts(row, len(starts)), strict=True
            ):
                if not seen:
                    continue
                here = slice(start, end)
                positions, _ = self._rope_index(
                    input_ids=batch["input_ids"][number : number + 1, here],
                    mm_token_type_ids=types[number : number + 1, here],
                    image_grid_thw=grids[first : first + seen],
                )
                found[1:, number, here] = positions[:, 0]
                first += seen
        return found


def _counts(row: dict[str, Any], documents: int) -> list[int]:
    """The pictures of each of a row's documents; padding, the last of them, has none."""
    counts = [len(one) for one in row["pictures"]]
    return counts + (documents - len(counts)) * [0]


def _name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else "a picture"
