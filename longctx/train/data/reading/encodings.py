"""Encodings of text: by the byte order mark, else UTF-8. Another one is guessed for advice alone.

Text that is not UTF-8 is never read by a guess: charset-normalizer proposes an encoding in the
line that refuses the file, with a piece of the text as it would read and the command that converts
the file, so that a person decides.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections import Counter
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
"""The piece of a file by which its encoding is guessed: charset-normalizer reads it in every
encoding that it knows."""
WESTERN = ("cp1252", "mac_roman", "cp850")
"""Encodings of Western Europe: of the web, of old Macs and of DOS. An earlier one goes first."""
ALPHABETS = (
    "àâæçéèêëîïôœùûüÿ",  # French
    "äöüßé",  # German
    "áéíñóúü",  # Spanish
    "àáâãçéêíóôõúü",  # Portuguese
    "àèéìîòù",  # Italian
    "åäöæøéü",  # Danish, Finnish, Norwegian, Swedish
    "áèéëêïíöóü",  # Dutch
    "àçèéíïòóúü",  # Catalan
)
"""Letters outside ASCII by language. To charset-normalizer a French text in cp1252 reads as well as
cp1250 or cp1257, with letters that no French word has."""
OWN_LETTERS = 0.97
"""The share of such letters in a text that one alphabet must have; names may have others."""
TYPOGRAPHY = frozenset("“”‘’«»–—…•€£©®°§\xa0")
"""Signs of texts without other letters than ASCII's."""
WEB = (
    "cp1251 koi8_r cp866 cp1250 iso8859_2 cp1253 cp1254 cp1255 cp1256 cp1257 gb18030 big5 cp932 "
    "euc_jp cp949"
).split()
"""Other encodings of the web, of which the first is taken that charset-normalizer likes best, or as
well as one that is rarer."""
ICONV = {"mac_roman": "MACINTOSH", "utf_16_le": "UTF-16LE", "utf_16_be": "UTF-16BE"}
"""Python's name of an encoding -> iconv's, where it is another word."""


@dataclass(frozen=True)
class Guess:
    """An encoding in which bytes read as text."""

    name: str
    """Python's name."""
    excerpt: str
    """A part of the text, around the first bytes that are not ASCII."""


def byte_order_mark(data: bytes) -> str | None:
    """Returns the encoding that the first bytes of a text state, or None."""
    return next((name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)), None)


def decode(data: bytes, encoding: str) -> tuple[str, int]:
    """Returns the text without byte order mark, and the bytes replaced by U+FFFD."""
    try:
        return data.decode(encoding), 0
    except UnicodeDecodeError:
        # Bytes that survive a round trip were text; the rest were replaced.
        with_mark = encoding.removesuffix("-sig")
        kept = len(data.decode(with_mark, errors="ignore").encode(with_mark))
        return data.decode(encoding, errors="replace"), len(data) - kept


def guess(data: bytes) -> Guess | None:
    """Returns the encoding in which bytes that are not UTF-8 read best; None where they are no text
    in any."""
    from charset_normalizer import from_bytes  # needed for this message alone

    data = data[:SAMPLE_BYTES]
    for name in WESTERN:
        text = data.decode(name, errors="ignore")
        if len(text) == len(data) and _is_western(text):
            return Guess(name, _excerpt(text))
    matches = [*from_bytes(data)]
    if not matches:
        return None
    best = matches[0]
    equal = {
        name: match
        for match in matches
        if (match.chaos, -match.coherence) <= (best.chaos, -best.coherence)
        for name in match.could_be_from_charset
    }
    liked = [best.encoding] if best.encoding in WEB else [name for name in WEB if name in equal]
    name = liked[0] if liked else best.encoding
    return Guess(name, _excerpt(str(equal.get(name, best))))


def _is_western(text: str) -> bool:
    """Whether the letters outside ASCII are those of one Western language, and more than the other
    signs, none of which stands within a word."""
    strange = Counter(letter for letter in text.lower() if not letter.isascii())
    letters = {letter: count for letter, count in strange.items() if letter.isalpha()}
    total = sum(letters.values())
    if not letters:
        return bool(strange) and strange.keys() <= TYPOGRAPHY
    if "\0" in text or 2 * total <= strange.total() or _WITHIN_A_WORD.search(text):
        return False
    known = (sum(letters.get(letter, 0) for letter in alphabet) for alphabet in ALPHABETS)
    return max(known) >= OWN_LETTERS * total


_WITHIN_A_WORD = re.compile(r"[^\W\d_](?![’·])[^\x00-\x7f\w\s][^\W\d_]|[^\W\d_][²³¹]")
"""A sign within a word, as another encoding's letters make; apostrophes and the dot of Catalan
stand there."""


def _excerpt(text: str) -> str:
    """Returns a piece of text around its first letter that is not ASCII."""
    first = next((i for i, letter in enumerate(text) if not letter.isascii()), 0)
    return " ".join(text[max(0, first - 15) : first + 25].split())


def guess_file(path: Path) -> Guess | None:
    """Returns the guess for the first piece of a file that is not UTF-8; None where all of it
    is."""
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
