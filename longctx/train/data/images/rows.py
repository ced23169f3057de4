"""Conversations with images from a file, as trainers that take `messages` and `images` have them.

    from datasets import Dataset, Image, List
    from longctx.train.data.images.rows import conversations

    rows = Dataset.from_list(conversations("pictures.jsonl"))
    rows = rows.cast_column("images", List(Image()))           # decoded as they are read

Every image is opened before anything is trained, and the first that is none ends that with its
file, line and number. An image that readers may show otherwise than it is meant to be seen
(turned, transparent, CMYK, 16 bits) is written anew, as PNG.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from longctx.errors import UserError
from longctx.train.data.images.image import is_plain, open_image
from longctx.train.data.reading.image_sources import Source, source_named
from longctx.train.data.reading.places import in_parts
from longctx.train.data.reading.records import CHATS, as_document
from longctx.train.data.reading.values import parse_json


def conversations(file: str | Path, folder: str | Path | None = None) -> list[dict[str, Any]]:
    """Reads a JSONL file, one record a line (image_records.py has their forms).

    Args:
        file: the JSONL file.
        folder: where paths of images begin; default: beside the file.

    Returns:
        Rows with `messages`, whose contents are lists of parts, and `images`, each with `path` or
        `bytes`, as datasets keeps a column of images.

    Raises:
        UserError: starts with file and line, for a record that is not understood and for an image
            that cannot be read.

    Example:
        >>> import longctx, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "chats.jsonl")
        >>> turns = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]'
        >>> _ = file.write_text(f'{{"messages": {turns}}}')
        >>> (row,) = longctx.conversations(file)
        >>> row["messages"][1]["content"]
        [{'type': 'text', 'text': 'Ho'}]
    """
    file = Path(file)
    folder = file.parent if folder is None else Path(folder)
    lines = [*_lines(file)]
    shown = tqdm(lines, desc="images", unit=" records", leave=False, disable=None)
    return [_row(line, where, folder) for where, line in shown]


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", line


def _row(line: str, where: str, folder: Path) -> dict[str, Any]:
    found = as_document(parse_json(line, where), where, folder=folder, with_images=True)
    if found is None or found.kind not in CHATS:
        raise UserError(f"{where}: expected `messages` or `conversations`")
    content = dict(found.content)
    turns, named = content.pop("messages"), content.pop("pictures", [])
    if "untrained" in content:
        raise UserError(
            f"{where}: `train` and `weight` of single turns do not reach other trainers: leave "
            "them out"
        )
    for name in content:
        raise UserError(f"{where}: `{name}` does not reach other trainers from here: leave it out")
    images = []
    for number, given in enumerate(named, 1):
        at = f"{where}: image {number}"
        images.append(_kept(source_named(given, at), at))
    return {"messages": [*map(in_parts, turns)], "images": images}


def _kept(source: Source, at: str) -> dict[str, Any]:
    image = open_image(source, at)  # decoded: a header says nothing of what follows it
    if isinstance(source, Image.Image) or not is_plain(source, at):
        file = io.BytesIO()
        image.save(file, "PNG")
        source = file.getvalue()
    if isinstance(source, Path):
        return {"path": str(source), "bytes": None}
    return {"path": None, "bytes": source}
