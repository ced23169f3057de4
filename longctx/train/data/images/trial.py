"""A processor is a stranger's program: it is tried in a process with limits before it sees data.

Its settings may ask for 10^8 tokens an image, which it writes down as it is read, or for 10^15
pixels, in one call that fills the memory. The trial reads it and prepares blank images of several
sizes, in at most TRIAL_S and TRIAL_BYTES more memory, and returns what came out, so that it can be
compared with what the model takes (images/image_fit.py). A size that a processor refuses is said
where an image has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from PIL import Image

from longctx.errors import UserError, one_line
from longctx.train.data.images.processor import ImageProcessor
from longctx.train.safety.processes import Unbounded, in_child

TRIAL_S, TRIAL_BYTES = 30.0, 1 << 30
SIZES = ((448, 448), (32, 32), (896, 112), (112, 896))
"""Width and height: usual, small, wide and high. Processors enlarge small images and cut wide
ones into several."""
MOST_NUMBERS = 64
"""The largest tensor of whole numbers whose values are told: sizes and grids."""


class Made(NamedTuple):
    """What a processor makes of one image."""

    size: tuple[int, int]
    text: str
    """The text that stands for the image."""
    shapes: dict[str, tuple[int, ...]]
    """The model's arguments, by name."""
    numbers: dict[str, list[int]]
    """The values of small arguments of whole numbers, flat."""


def try_processor(read: Callable[[], ImageProcessor], name: str, remedy: str) -> list[Made]:
    """Returns what the processor that `read` reads makes of images of SIZES, without those that
    it refuses. Raises the UserError that `read` does, and one for a processor that does not end,
    takes too much memory, or refuses all."""
    try:
        found: list[Made] = in_child(
            lambda: _trial(read, name, remedy), seconds=TRIAL_S, more_bytes=TRIAL_BYTES
        )
    except (Unbounded, RuntimeError) as error:
        raise UserError(f"the processor of {name} {error}: {remedy}") from error
    return found


def _trial(read: Callable[[], ImageProcessor], name: str, remedy: str) -> list[Made]:
    """Runs in the child."""
    torch.set_num_threads(1)  # the others did not survive the fork
    images = read()
    found, refused = [], ""
    for size in SIZES:
        try:
            found.append(_made(images, size))
        except MemoryError:
            raise
        except Exception as error:  # a processor raises what its libraries do
            if "allocate" in str(error):
                raise MemoryError from error
            refused = refused or one_line(error, 160)
    if not found:
        raise UserError(f"the processor of {name} makes nothing of an image ({refused}): {remedy}")
    return found


def _made(images: ImageProcessor, size: tuple[int, int]) -> Made:
    blank = Image.new("RGB", size)
    text = images.text_of(size, "an image")
    tensors = images.tensors([blank])
    _ = images.types, images.words
    numbers = {
        name: x.flatten().tolist()
        for name, x in tensors.items()
        if x.numel() <= MOST_NUMBERS and not x.is_floating_point()
    }
    return Made(size, text, {name: tuple(x.shape) for name, x in tensors.items()}, numbers)
