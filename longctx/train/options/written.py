"""Values as people write them: lengths (128k), dtypes (bf16), names of presets (Llama-3.1-8B) and
sizes of images (448x448).

An option's parser turns them into the one form that the rest of longctx knows. What it does not
understand it returns as it is, for the option's own check, or refuses with an `ArgumentTypeError`.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from longctx.errors import UserError
from longctx.train.options.source import PRESETS

LENGTH = "as 131072, 128k or 1M"
"""Examples of lengths as they may be written, for the help."""
MOST_PIXELS = 16384
"""The most pixels of a side."""
_UNITS = {"k": 1024, "m": 1024**2}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}


def token_count(text: str) -> int:
    """Returns a length in tokens: `131072`, `128k` (K is 1024 tokens), `1M` (1024 K) or `1e5`.
    Raises ArgumentTypeError for anything that is no whole number of tokens."""
    word = text.strip()
    unit = _UNITS.get(word[-1:].lower(), 1)
    try:
        number = float(word[:-1] if unit > 1 else word) * unit
    except ValueError:
        number = float("nan")
    if not number.is_integer():
        raise ArgumentTypeError(f"a length is expected, {LENGTH}, got {text!r}")
    return int(number)


def dtype_named(text: str) -> str:
    """Returns torch's name of a dtype."""
    return _DTYPES.get(text.lower(), text)


def preset_named(text: str) -> str:
    """Returns the preset of this name, whose case, separators and owner do not count:
    `meta-llama/Llama-3.1-8B` and `llama3.1-8b` are `llama-3.1-8b`."""
    return _BY_LETTERS.get(_letters(text.rpartition("/")[2]), text)


def _letters(name: str) -> str:
    """Letters and digits alone. A full stop counts between digits: 1.7B is not 17B."""
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^a-z0-9.]", "", name.lower())


def pixels_of(text: str) -> tuple[int, int]:
    """Returns the width and the height, in pixels, of `448x336`; `448` is a square. Raises
    UserError for anything else, and for a side of no pixel or of more than `MOST_PIXELS`."""
    found = re.fullmatch(r"(\d{1,9})(?:[xX](\d{1,9}))?", text.strip(), re.ASCII)
    if found is None:
        raise UserError(
            f"--image_pixels {text}: width and height in pixels are expected, as 448x448, or 448 "
            "for a square"
        )
    width, height = int(found[1]), int(found[2] or found[1])
    if not 1 <= min(width, height) <= max(width, height) <= MOST_PIXELS:
        raise UserError(
            f"--image_pixels {text}: a side has 1 to {MOST_PIXELS} pixels, as in 448x448"
        )
    return width, height


_BY_LETTERS = {_letters(name): name for name in PRESETS}

PARSERS: dict[str, Callable[[str], Any]] = {
    "seq_len": token_count,
    "tile_tokens": token_count,
    "dtype": dtype_named,
    "preset": preset_named,
}
"""Option of a run -> its parser."""
