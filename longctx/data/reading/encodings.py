"""Encodings of text: by the byte order mark, else UTF-8. Another one is guessed for advice alone.

Text that is not UTF-8 is never read by a guess: charset-normalizer proposes an encoding in the
line that refuses the file, with a piece of the text as it would read and the command that converts
the file, so that a person decides.
"""

from __future__ import annotations

import codecs
import shlex
from dataclasses import dataclass
from pathlib import Path

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins with that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
SAMPLE_BYTES = 1 << 16
PREFERRED = ("cp1252", "iso8859_15", "mac_roman")
"""Western encodings, taken where charset-normalizer likes another one no better: to it a French
text in cp1252 reads equally well as cp1250 or cp1257, with other letters."""
ICONV = {"mac_roman": "MACINTOSH", "utf_16_le": "UTF-16LE", "utf_16_be": "UTF-16BE"}
"""Python's name of an encoding -> iconv's, where it is another word."""


@dataclass(frozen=True)
class Guess:
    """An encoding in which bytes read as text."""

    name: str
    """Python's name."""
    excerpt: str
    """Some of the text around the first bytes that are not ASCII."""


def byte_order_mark(data: bytes) -> str | None:
    """The encoding that the first bytes of a text state, or None."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), None)


def decode(data: bytes, encoding: str) -> tuple[str, int]:
    """Text without byte order mark, and the bytes replaced by U+FFFD."""
    try:
        return data.decode(encoding), 0
    except UnicodeDecodeError:
        # Bytes that survive a round trip were text; the rest were replaced.
        with_mark = encoding.removesuffix("-sig")
        kept = len(data.decode(with_mark, errors="ignore").encode(with_mark))
        return data.decode(encoding, errors="replace"), len(data) - kept


def guess(data: bytes) -> Guess | None:
    """The encoding in which bytes that are not UTF-8 read best; None where they are no text in
    any."""
    from charset_normalizer import from_bytes  # needed for this message alone

    matches = [*from_bytes(data[:SAMPLE_BYTES])]
    if not matches:
        return None
    best = matches[0]
    equal = {
        match.encoding: match
        for match in matches
        if (match.chaos, -match.coherence) <= (best.chaos, -best.coherence)
    }
    found = next((equal[name] for name in PREFERRED if name in equal), best)
    text = str(found)
    first = next((i for i, letter in enumerate(text) if not letter.isascii()), 0)
    excerpt = " ".join(text[max(0, first - 15) : first + 25].split())
    return Guess(found.encoding, excerpt)


def guess_file(path: Path) -> Guess | None:
    """The guess for the first piece of a file that is not UTF-8; None where all of it is."""
    with path.open("rb") as file:
        while data := file.read(SAMPLE_BYTES):
            try:
                data[:-3].decode()  # the last character may be cut
            except UnicodeDecodeError as error:
                return guess(data[max(0, error.start - SAMPLE_BYTES // 2) :])
    return None


def advice(path: Path, found: Guess | None) -> str:
    """Returns advice for a file that is not UTF-8: the command that converts it to UTF-8 from the
    encoding that was guessed."""
    if found is None:
        return "save it as UTF-8, remove it"
    name = ICONV.get(found.name, found.name.replace("_", "-").upper())
    old, new = (
        shlex.quote(str(name)) for name in (path, path.with_name(f"{path.stem}.utf8{path.suffix}"))
    )
    return f"it reads as {name} ({found.excerpt!r}): iconv -f {name} -t UTF-8 {old} > {new}"
