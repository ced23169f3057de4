"""The most pixels of an image, as `--image_pixels` has them."""

from __future__ import annotations

import re

from longctx.errors import UserError

MOST_SIDE = 16384


def pixels_of(text: str) -> tuple[int, int]:
    """Returns width and height of `448x448`, or of `448` for both. Raises UserError for anything
    else."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    sides = [int(side) for side in found.groups() if side] if found else []
    if not sides or not all(1 <= side <= MOST_SIDE for side in sides):
        raise UserError(
            f"--image_pixels must be WIDTHxHEIGHT, as 448x448, each from 1 to {MOST_SIDE}, got "
            f"{text!r}"
        )
    return sides[0], sides[-1]
