"""How a run reads images: it loads the model's processor once a record has some, checks options
about images, and has other processes open them."""

from __future__ import annotations

import os
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.errors import UserError
from longctx.families.vision import PREFIXES, sees_both_ways
from longctx.images.image_fit import misfit, token_of
from longctx.system import installed
from longctx.train.data.reading.groups import IMAGE_TASKS
from longctx.train.data.rows import ImageReading
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.options.pixels import pixels_of
from longctx.train.safety.processes import make_room_for_workers
from longctx.train.tasks.protocol import Task

MOST_WORKERS = 4
"""Processes that open images, unless --dataloader_num_workers says otherwise."""


class LazyProcessor:
    """The processor of a run, read once it is asked for."""

    def __init__(
        self,
        model_args: ModelArguments,
        data_args: DataArguments,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._asked = model_args, data_args, config, tokenizer
        self.processor: Any = None
        """The processor (train/data/images/processor.py), once there was an image."""

    def read(self) -> Any:
        """Raises UserError where the model has no processor, or a package is missing."""
        if self.processor is None:
            model_args, data_args, config, tokenizer = self._asked
            if model_args.model_name_or_path is None:
                raise UserError(
                    f"the data have images, and --preset {model_args.preset} has no processor "
                    "for them: give --model_name_or_path"
                )
            if not installed("PIL"):
                raise UserError("the data have images, which Pillow reads: pip install pillow")
            self.processor = _fitting(*self._asked)
        return self.processor

    def image_reading(self) -> ImageReading:
        return ImageReading(self.read, one_document=not self._asked[0].schedules)


def _fitting(
    model_args: ModelArguments,
    data_args: DataArguments,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """Returns the model's processor. Raises UserError for one that cannot be read, that has no
    bounds, or that does not fit the model."""
    from longctx.train.data.images.processor import ImageProcessor
    from longctx.train.data.images.trial import try_processor

    name, most = str(model_args.model_name_or_path), None
    if data_args.image_pixels:
        width, height = pixels_of(data_args.image_pixels)
        most = width * height

    def read() -> ImageProcessor:
        trusted = model_args.trust_remote_code
        return ImageProcessor.read(name, config, tokenizer, most, trust_remote_code=trusted)

    remedy = "put the model's own processor files beside its weights"
    tried = try_processor(read, name, remedy)
    processor, token = read(), token_of(config)
    word = str(processor.token if token is None else tokenizer.convert_ids_to_tokens(token))
    if token is not None and token not in processor.ids:
        raise UserError(
            f"the processor of {name} marks images with {processor.token!r}, and the model's "
            f"config.json says {word!r} (image_token_id {token}): {remedy}"
        )
    for made in tried:
        if why := misfit(config, made.shapes, made.numbers, made.text.count(word)):
            width, height = made.size
            raise UserError(
                f"the processor of {name} does not fit the model: of {width} x {height} pixels it "
                f"{why}: {remedy}"
            )
    return processor


def processor_of(
    model_args: ModelArguments,
    data_args: DataArguments,
    task: Task,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> LazyProcessor | None:
    """Returns what reads images in this run; None where nothing would see them. Raises UserError
    for options of images then."""
    if config.model_type in PREFIXES and task.with_images and not data_args.streaming:
        return LazyProcessor(model_args, data_args, config, tokenizer)
    for name, options in (("train_vision", model_args), ("image_pixels", data_args)):
        if getattr(options, name):
            raise UserError(
                f"--{name} is for {IMAGE_TASKS} of a vision-language model, without --streaming: "
                "leave it out"
            )
    return None


def check_no_vision(model_args: ModelArguments, data_args: DataArguments) -> None:
    """Raises UserError for options of images in a run of text alone."""
    if model_args.train_vision:
        raise UserError(
            "--train_vision trains the vision tower, and no record has any: leave it out"
        )
    if data_args.image_pixels:
        raise UserError("--image_pixels limits images, and no record has any: leave it out")


def check_shared_rows(args: TrainArguments, task: Task, config: PretrainedConfig) -> None:
    """Raises UserError where ranks cannot share rows with images."""
    if args.sequence_parallel_size == 1:
        return
    why = None
    if task.scores:
        why = f"prompts of --task {args.task} have images"
    elif sees_both_ways(config):
        why = "images are seen both ways"
    if why:
        raise UserError(
            f"--sequence_parallel_size {args.sequence_parallel_size} with rows whose {why}: leave "
            "it out, and each process has rows of its own"
        )


def use_workers(args: TrainArguments) -> None:
    """Has other processes open images while the model computes, unless options say how many.
    Raises UserError where none would reach them."""
    if args.remove_unused_columns:
        raise UserError("--remove_unused_columns would remove images from rows: leave it out")
    if "dataloader_num_workers" not in args.named:
        args.dataloader_num_workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
        make_room_for_workers(args.dataloader_num_workers, args.dataloader_prefetch_factor)
