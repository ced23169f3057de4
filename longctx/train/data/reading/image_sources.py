"""Where a record's image is: whatever describes it, checked before anything is opened.

    "heron.jpg"                                    a file beside the data, or below its folder
    "data:image/png;base64,iVBORw0..."             the file itself, as OpenAI's API takes it
    {"bytes": b"...", "path": "heron.jpg"}         as datasets keeps a column of images
    an Image of Pillow                             what datasets decodes

Nothing is fetched, and no path leads out of the folder, by `..` or by a link.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pyarrow
import pyarrow.compute
from datasets import Audio, Dataset, Image, IterableDataset, List, Video

from longctx.errors import UserError
from longctx.train.data.reading.media import IMAGE_COLUMNS
from longctx.train.data.reading.values import kind

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from PIL.Image import Image as Decoded

Source: TypeAlias = "Path | bytes | Decoded"
DATA_URL = "data:"
_Records = TypeVar("_Records", Dataset, IterableDataset)


def named_source(given: Any, folder: Path, at: str) -> str | bytes | Decoded:
    """Returns what `source_of` finds as a record keeps it: the path of a file or a data URL, and
    from a dataset a file's bytes or an image. Raises UserError starting with `at`."""
    source = source_of(given, folder, at)
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, bytes) and not _holds_bytes(given):
        return f"{DATA_URL}image;base64,{base64.b64encode(source).decode()}"
    return source


def source_named(named: str | bytes | Decoded, at: str) -> Source:
    """Returns what `named_source` has named."""
    if not isinstance(named, str):
        return named
    return _decoded(named, at) if named.startswith(DATA_URL) else Path(named)


def undecoded(records: _Records) -> _Records:
    """Returns a dataset whose columns of images, videos and sounds hold their files: decoding
    images is ours, and nothing decodes the others."""
    for name, feature in (records.features or {}).items():
        bare = _undecoded(feature)
        if bare is not None:
            records = records.cast_column(name, bare)
    return records


def _undecoded(feature: Any) -> Any | None:
    """Returns a column's type that decodes nothing; None for one that decodes nothing now."""
    if isinstance(feature, (Image, Audio, Video)):
        return type(feature)(decode=False) if feature.decode else None
    inner = getattr(feature, "feature", None)
    bare = None if inner is None else _undecoded(inner)
    return None if bare is None else List(bare)


def trusted(value: Any, feature: Any) -> Any:
    """Returns a column's value of `undecoded` records: a file that datasets has found itself may
    lie anywhere."""
    if isinstance(value, list):
        return [trusted(one, getattr(feature, "feature", None)) for one in value]
    if isinstance(feature, Image) and isinstance(value, Mapping) and value.get("bytes") is None:
        return Path(value["path"]) if value.get("path") else None
    return value


def linked_files(records: Dataset, folder: Path) -> Iterator[Path]:
    """Yields the files that the columns of images of `undecoded` records name, of which some may
    be missing. Bytes that records hold are not read."""
    for name in {*IMAGE_COLUMNS} & {*records.column_names}:
        for values in records.data.column(name).chunks:
            while pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type):
                values = values.flatten()
            if pyarrow.types.is_struct(values.type):
                path, held = (pyarrow.compute.struct_field(values, x) for x in ("path", "bytes"))
                values = path.filter(held.is_null())
            for named in values.drop_null().to_pylist():
                if isinstance(named, str) and not named.startswith(DATA_URL):
                    yield folder / named


def _holds_bytes(given: Any) -> bool:
    return isinstance(given.get("bytes") if isinstance(given, Mapping) else given, bytes)


def _is_image(given: Any) -> bool:
    return type(given).__module__.startswith("PIL.")


def source_of(given: Any, folder: Path, at: str) -> Source:
    """Returns the file, its bytes or the image that a record's value describes. Paths are below
    `folder`. Raises UserError starting with `at` for anything else."""
    if isinstance(given, (bytes, Path)) or _is_image(given):
        return given
    if isinstance(given, Mapping):
        return _of_mapping(given, folder, at)
    if not isinstance(given, str) or not given:
        raise UserError(f"{at} must be a path, found {kind(given)}")
    if given.startswith(DATA_URL):
        return _decoded(given, at)
    if "://" in given:
        raise UserError(f"{at} is a URL, and nothing is fetched: download it and give its path")
    return _inside(given, folder, at)


def _of_mapping(given: Mapping[str, Any], folder: Path, at: str) -> Source:
    for key in ("bytes", "image", "path", "url"):
        if given.get(key) is not None:
            return source_of(given[key], folder, at)
    raise UserError(f"{at} has none of `bytes`, `path` and `url`")


def _decoded(url: str, at: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise UserError(f"{at} is no data URL in base64: data:image/png;base64,... is expected")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UserError(f"{at} is no base64 ({error})") from None


def _inside(name: str, folder: Path, at: str) -> Path:
    path = folder.absolute() / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        there = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise UserError(f"{at} is no path: {error}") from None
    if not inside:
        raise UserError(f"{at}, {name}, leads out of {folder}: put images below that folder")
    if not there:
        raise UserError(f"{at}, {name}, is no file in {folder}")
    return path
