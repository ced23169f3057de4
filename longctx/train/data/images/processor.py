"""A model's processor: how many tokens stand for an image, and the pixels that the model gets.

    <|vision_start|><|image_pad|><|vision_end|>            as the chat template renders a place
    <|vision_start|><|image_pad|> x 196 <|vision_end|>     as an image of 448 x 448 needs it

Everything is the processor's own (transformers' AutoProcessor). What stands for an image depends
on its size alone, so that text is prepared without its pixels, which are made batch by batch.
Processors of Qwen's models ask for torchvision, for videos: without it their images are read by
Pillow's backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from longctx.constants import TOKEN_TYPES
from longctx.errors import UserError, one_line
from longctx.system import expanded
from longctx.train.data.images.image import open_image
from longctx.train.data.reading.image_sources import Source
from longctx.train.safety.files import read_json

TEXT = ("input_ids", "attention_mask", *TOKEN_TYPES, "num_crops")
"""Names in a processor's output that are of text, or that no model takes as an argument."""
FILES = ("preprocessor_config.json", "processor_config.json")


class ImageProcessor:
    """A processor, and the most pixels that an image may have."""

    def __init__(
        self, processor: Any, tokenizer: Any, most_pixels: int | None = None, settings: Any = None
    ) -> None:
        self._processor, self._tokenizer, self.most_pixels = processor, tokenizer, most_pixels
        self.settings = settings
        """What the processor's files say: pixels are made from it."""
        self.token: str = processor.image_token
        """The text that marks a place."""
        self._texts: dict[tuple[int, int], str] = {}

    @classmethod
    def read(
        cls,
        name: str,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        most_pixels: int | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> ImageProcessor:
        """Reads the processor of a folder or of the hub. A tokenizer without a chat template gets
        the processor's. Raises UserError for one that cannot be read."""
        folder = expanded(name)
        path = str(folder) if folder.is_dir() else name
        try:
            try:
                found = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
            except ImportError:
                if not config.model_type.startswith("qwen"):
                    raise
                found = _QwensProcessor(path, config, tokenizer)
            if getattr(found, "image_processor", None) is None:
                raise ValueError("it has no image processor")
            if not isinstance(found.image_token, str):
                raise ValueError("it names no token of images")
        except ImportError as error:
            missing = "torchvision" if "orchvision" in str(error) else "pillow"
            raise UserError(
                f"the processor of {name} needs {missing}: pip install {missing}"
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # a stranger's files
            raise UserError(
                f"{name} has no processor that reads images ({one_line(error, 160)}): it needs "
                "preprocessor_config.json or processor_config.json beside the weights"
            ) from error
        template = getattr(found, "chat_template", None)
        if not tokenizer.chat_template and template:
            tokenizer.chat_template = template
        return cls(found, tokenizer, most_pixels, _settings(path))

    def identity(self) -> list[Any]:
        """All of it that decides which tokens stand for an image."""
        kind, settings = type(self._processor).__name__, self._processor.to_json_string()
        return [kind, settings, self.token, self.most_pixels]

    def opened(self, source: Source, at: str) -> Image.Image:
        """Returns an image of no more pixels than are allowed. Raises UserError starting with `at`
        for what is none."""
        image = open_image(source, at)
        width, height = self._allowed(*image.size)
        return image if image.size == (width, height) else image.resize((width, height))

    def _allowed(self, width: int, height: int) -> tuple[int, int]:
        if self.most_pixels is None or width * height <= self.most_pixels:
            return width, height
        by = math.sqrt(self.most_pixels / (width * height))
        return max(1, int(width * by)), max(1, int(height * by))

    def text_of(self, size: tuple[int, int], at: str) -> str:
        """Returns the text that stands for an image of this width and height. Raises UserError
        starting with `at` for a size that the processor refuses."""
        if size not in self._texts:
            blank = Image.new("RGB", size)
            try:
                options = dict(return_text_replacement_offsets=True, add_special_tokens=False)
                found = self._processor(text=[self.token], images=[blank], **options)
                ((offsets,),) = found["text_replacement_offsets"]
            except MemoryError:
                raise
            except Exception as error:  # as for an image that is too narrow
                raise UserError(f"{at}: the processor refuses it: {one_line(error)}") from error
            self._texts[size] = offsets["replacement"]
        return self._texts[size]

    def tokens_of(self, size: tuple[int, int], at: str) -> int:
        """Returns how many tokens stand for parts of such an image. Raises as `text_of` does."""
        text = self.text_of(size, at)
        return sum(text.count(word) for word in self.words)

    @property
    def ids(self) -> list[Any]:
        """The ids of the tokens that stand for parts of an image, as the processor has them."""
        found: list[Any] = [*self._processor.image_token_ids]
        return found

    @cached_property
    def words(self) -> list[str]:
        """The texts of the tokens that stand for parts of an image: no other text may have one."""
        found: list[str] = self._tokenizer.convert_ids_to_tokens(self._ids.tolist())
        return found

    @cached_property
    def types(self) -> str | None:
        """The argument of the model that tells tokens of images from those of text; None if it has
        none."""
        found = self._processor(text=[self.token], images=[Image.new("RGB", (64, 64))])
        return next((name for name in TOKEN_TYPES if name in found), None)

    @cached_property
    def _ids(self) -> np.ndarray:
        """The ids of the tokens whose embeddings are features."""
        return np.array(self.ids)

    def marks(self, ids: np.ndarray) -> np.ndarray:  # any shape, bool
        """Returns which tokens stand for a part of an image."""
        found: np.ndarray = np.isin(ids, self._ids)
        return found

    def tensors(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Returns the model's arguments for the images of a batch, such as `pixel_values`."""
        found = self._processor(images=[*images], return_tensors="pt")
        return {name: x for name, x in found.items() if name not in TEXT}


def _settings(path: str) -> list[Any]:
    """Returns the content of a processor's files, but for the version that wrote them."""
    found: list[Any] = []
    for name in FILES:
        with suppress(OSError, ValueError, TypeError, AttributeError):  # not there, or no object
            file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
            content = {} if file is None else read_json(Path(file))
            content.pop("transformers_version", None)
            found.append(content)
    return found


class _QwensProcessor:
    """The processor of a model of Qwen's without videos, for which it asks for torchvision."""

    def __init__(self, path: str, config: PretrainedConfig, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pillows

        self.image_processor = pillows.Qwen2VLImageProcessorPil.from_pretrained(path)
        self._kind = config.model_type
        self.image_token = tokenizer.convert_ids_to_tokens(config.image_token_id)
        self.image_token_ids = [config.image_token_id]

    def to_json_string(self) -> str:
        return self._kind + str(self.image_processor.to_json_string())

    def __call__(self, images: Any, text: Any = None, **options: Any) -> dict[str, Any]:
        found = self.image_processor(images, return_tensors="pt")
        if text is None:
            return {**found}
        side = self.image_processor.merge_size
        tokens = [int(grid.prod()) // side**2 for grid in found["image_grid_thw"]]
        offsets = [{"replacement": self.image_token * count} for count in tokens]
        return {**found, "mm_token_type_ids": None, "text_replacement_offsets": [offsets]}
