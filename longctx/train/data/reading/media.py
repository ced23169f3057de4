"""What an image, a video and a sound look like in a record: by name, by value, and in a text.

    "clip.mp4", "https://.../clip.mp4?t=3"          a file's name, in a column of a medium's name
    "data:audio/wav;base64,..."                     a file itself, in a column of any name
    {"bytes": b"...", "path": "a.png"}              as datasets keeps one
    {"array": [...], "sampling_rate": 16000}        a sound that datasets has decoded
    "a.png" beside the data, b"\\x89PNG..."          a file that is there, and the bytes of one
    "iVBORw0KGgo...", "{'bytes': b'...'}"           bytes in base64, or as Python prints them

unread_media.py says what becomes of columns with media, places.py reads those with images.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from longctx.train.data.reading.kinds import IMAGE_SUFFIXES

Medium = Literal["image", "video", "audio"]
IMAGE_COLUMNS = ("images", "image")
"""The columns of images that are read."""
COLUMNS: dict[str, Medium] = {
    "images": "image",
    "image": "image",
    "videos": "video",
    "video": "video",
    "audios": "audio",
    "audio": "audio",
}
"""A column of a record, or a key of a turn, that trainers of such models read -> its medium."""
PARTS: dict[str, Medium] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""The type of a part of a turn, or a key of one without a type -> its medium."""
CURES: dict[Medium, str] = {
    "image": "write a conversation with its file in `images`, or leave it out",
    "video": "give frames of it as images, or leave the video out",
    "audio": "leave the sound out, or give its words as text",
}
NOUNS: dict[Medium, str] = {"image": "image", "video": "video", "audio": "sound"}
ONE = {"image": "an image", "video": "a video", "audio": "a sound"}
FILE_NAME = re.compile(r"(.+_)?file_names?")
"""The columns in which an imagefolder's metadata names files."""
_SUFFIXES: dict[str, Medium] = {
    **dict.fromkeys((*IMAGE_SUFFIXES, ".jfif", ".jxl"), "image"),
    **dict.fromkeys(
        ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .wmv .flv .3gp .ogv".split(), "video"
    ),
    **dict.fromkeys(
        ".mp3 .wav .flac .ogg .oga .opus .m4a .aac .wma .aif .aiff .amr".split(), "audio"
    ),
}
_BEGINNINGS: dict[bytes, Medium] = {
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|BM.{12}\(\0|RIFF....WEBP": "image",
    rb"....ftyp(hei|mif|avif)": "image",
    rb"ID3|OggS|fLaC|RIFF....WAVE|FORM....AIF|....ftypM4[AB]": "audio",
    rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI |\0\0\x01[\xb3\xba]|FLV\x01": "video",
}
"""Maps the beginning of a file (a regular expression) to its medium; the first that fits is
taken."""
_DATA_URL = re.compile(r"data:(image|video|audio)[/;]")
_BASE64 = r"[A-Za-z0-9+/]{32}"
_CONTENT = ("data:", "{'bytes'", "b'", 'b"')
_PRINTED = r"\{'bytes': b|b['\"]\\x89PNG|b['\"]\\xff\\xd8"
"""Bytes as Python prints them into a table's cell."""
_SIMPLE = frozenset((str, int, float, bool, type(None)))
_MOST_CHARS = 4096
"""The longest path of Linux."""


def words_of(medium: Medium) -> re.Pattern[str]:
    """Returns the words by which texts mark a place: <image>, <|image_pad|>, <image_1>, ..."""
    return re.compile(rf"<\|?{medium}(_pad|_placeholder|_soft_token|_?\d+)?\|?>", re.IGNORECASE)


def strings_of(value: Any) -> Iterator[str]:
    """Yields the strings that a value holds at any depth."""
    return (one for one in _values(value, whole=False) if isinstance(one, str))


def part_medium(part: Mapping[str, Any]) -> Medium | None:
    """Returns the medium of a part of a turn; None for a part of text."""
    kind = part.get("type")
    if kind is not None:
        return PARTS.get(kind) if isinstance(kind, str) else None
    return next((PARTS[key] for key in PARTS if part.get(key) is not None), None)


def medium_named(value: Any) -> Medium | None:
    """Returns the medium of a value in a column of a medium's name; None for a value that looks
    like no file."""
    return next((found for one in _values(value) if (found := _medium(one))), None)


def media_held(
    value: Any, folder: Path | None, placed: Callable[[Medium], bool]
) -> Iterator[tuple[Medium, Any]]:
    """Yields the media in a column of any name, each with its file's name or bytes: what the value
    holds, a file that is below `folder` (None: nothing is looked for), and a file's name of a
    medium that is `placed` in the text. All others are no media, such as a link's address."""
    for one in _values(value):
        medium = _medium(one)
        if medium is None:
            continue
        named = isinstance(one, str) and _of_content(one) is None
        there = named and folder is not None and os.path.isfile(folder / one)
        if not named or there or placed(medium):
            yield medium, one.get("path") if isinstance(one, Mapping) else one


def _values(value: Any, *, whole: bool = True) -> Iterator[Any]:
    """Yields what a value holds at any depth; `whole` are media that datasets keeps in objects."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) in _SIMPLE:  # most are, and asking for a Mapping takes a microsecond
            yield one
        elif isinstance(one, Mapping) and not (whole and _is_file(one)):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        else:
            yield one


def _is_file(value: Mapping[str, Any]) -> bool:
    keys = {*value}
    return {"array", "sampling_rate"} <= keys or (bool(keys) and keys <= {"bytes", "path"})


def _medium(value: Any) -> Medium | None:
    if isinstance(value, str):
        return _of_string(value)
    if type(value) in _SIMPLE:
        return None
    if isinstance(value, bytes):
        return _of_bytes(value) or ("audio" if re.match(rb"\xff[\xe3\xf3\xfb]", value) else None)
    if isinstance(value, Mapping):
        if "array" in value:
            return "audio"
        held = _medium(value.get("bytes")) or _medium(value.get("path"))
        return held or ("image" if isinstance(value.get("bytes"), bytes) else None)
    if isinstance(value, Path):  # which datasets has found itself
        return _of_string(str(value)) or "image"
    return "image" if type(value).__module__.startswith("PIL.") else None


def _of_string(value: str) -> Medium | None:
    if held := _of_content(value):
        return held
    if "." not in value[-12:] and "://" not in value:
        return None
    if len(value) > _MOST_CHARS or "\0" in value:
        return None
    name = re.split(r"[?#]", value)[0] if "://" in value else value
    return _SUFFIXES.get(os.path.splitext(name.rstrip())[1].lower())


def _of_content(value: str) -> Medium | None:
    """Returns the medium of a file that a string holds whole; None if it holds none."""
    if value.startswith(_CONTENT):
        if url := _DATA_URL.match(value):
            return url[1]  # type: ignore[return-value]
        return "image" if re.match(_PRINTED, value) else None
    if len(value) < 64 or not re.match(_BASE64, value):
        return None
    return _of_bytes(base64.b64decode(value[:32]))


def _of_bytes(value: bytes) -> Medium | None:
    found = (m for begin, m in _BEGINNINGS.items() if re.match(rb"(?s)" + begin, value))
    return next(found, None)
