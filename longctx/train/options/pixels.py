"""The size of an image on a command line: `--image_pixels 448x448`."""

from __future__ import annotations

import re

from longctx.errors import UserError

MOST_PIXELS = 16384
"""The most pixels of a side."""


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
