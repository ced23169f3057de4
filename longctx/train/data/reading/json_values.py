"""JSON files of records, read value by value: lines, one list, or an object that holds the list.

    {"text": "a"}                     .jsonl, .ndjson: one value a line, named file:line
    {"text": "b"}

    [{"text": "a"},                   .json: one list. A record is named by the line on which it
     {"text": "b"}]                   begins, and by its number: file:2 (record 2)

    {"data": [{"text": "a"}, ...]}    .json: one object with one list of objects in it

A .json file may hold lines, or objects of several lines, as well. Lists are read in blocks: memory
holds the largest record and a block, never the file, while the `json` builder of datasets holds six
times the file. It would also turn null into absent keys, and a number among texts into text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.errors import UserError, printable
from longctx.train.data.reading.opened import BLOCK_BYTES, Text
from longctx.train.data.reading.values import check_depth, fault, parse_json

MOST_CHARS = 1 << 30
"""Longest value, other than a list of records, of a .json file: it is held in memory."""
FORMS = (
    {"text"},
    {"messages"},
    {"conversations"},
    {"prompt", "completion"},
    {"instruction", "output"},
    {"chosen", "rejected"},
)
"""Keys that make an object a record (records.py, preferences.py)."""
_DECODER = json.JSONDecoder()
_LIST = "a list of records is read from a .json file"
_BLANKS = re.compile(r"[ \t\n\r]*")
_LONGEST_WORD = len("-Infinity")


@dataclass(frozen=True)
class Found:
    """A value that should be a record."""

    where: str
    value: Any
    replaced_bytes: int = 0


def has_form(keys: Any) -> bool:
    """Whether an object with these keys, or a table with these columns, is one of records."""
    return any(form <= set(keys) for form in FORMS)


def read_json_lines(text: Text) -> Iterator[Found]:
    """Raises UserError, with the line, for one that is not JSON."""
    for number, (line, replaced) in enumerate(text.lines(), 1):
        if not line.strip():
            continue
        where = printable(f"{text.path}:{number}")
        try:
            value = parse_json(line, where)
        except UserError as error:
            if number == 1 and line.startswith("["):
                raise UserError(f"{error}; {_LIST}") from error
            raise
        if number == 1 and isinstance(value, list):
            raise UserError(f"{where} is a list, where one object a line is expected; {_LIST}")
        yield Found(where, *_whole(value, line, replaced))


def read_json_file(text: Text) -> Iterator[Found]:
    """Raises UserError, with line and column, for what is not JSON, and for an object that is no
    record and does not hold exactly one list of objects."""
    cursor = _Cursor(text)
    if cursor.peek() == "[":
        yield from cursor.elements()
        return
    first = None
    while cursor.peek():
        where = cursor.where()
        found = Found(where, *cursor.value())
        if first is None:
            first = found
            if not cursor.peek():
                yield from _held(first, text)
                return
            yield first
        else:
            yield found


def _held(found: Found, text: Text) -> Iterator[Found]:
    """Yields the records of the only value of a file."""
    value = found.value
    if not isinstance(value, Mapping) or has_form(value):
        yield found
        return
    lists = {
        key: items
        for key, items in value.items()
        if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items)
    }
    if len(lists) > 1:
        names = ", ".join(f"`{key}`" for key in lists)
        raise UserError(f"{text.path} holds several lists of records, {names}: leave one of them")
    if not lists:
        yield found
        return
    ((key, items),) = lists.items()
    for number, item in enumerate(items, 1):
        where = printable(f"{text.path} (record {number} of `{key}`)")
        yield Found(where, item, found.replaced_bytes if number == 1 else 0)


class _Cursor:
    """A place in a JSON text of which only a piece is in memory."""

    def __init__(self, text: Text) -> None:
        self.source = text
        self.blocks = text.blocks()
        self.text, self.at = "", 0
        self.line, self.counted = 1, 0
        """The line of `counted`, a place in `text` that is not behind `at`."""
        self.column = 0
        """The characters that stand before `text` on its first line."""
        self.counted_bytes = 0

    def peek(self) -> str:
        """Returns the next character that is no blank; empty at the end."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            assert blanks
            self.at = blanks.end()
            if self.at < len(self.text) or not self._more():
                return self.text[self.at : self.at + 1]

    def where(self, number: int | None = None) -> str:
        record = f" (record {number})" if number else ""
        return printable(f"{self.source.path}:{self._line()}{record}")

    def elements(self) -> Iterator[Found]:
        """Yields a list's elements; anything after the list is an error."""
        self.at += 1
        number = 0
        while self.peek() != "]" or number:
            number += 1
            where = self.where(number)
            yield Found(where, *self.value())
            sign = self.peek()
            if sign == "]":
                break
            if sign != ",":
                raise self._error("Expecting ',' delimiter" if sign else "the list has no end")
            self.at += 1
        self.at += 1
        if self.peek():
            raise self._error("Extra data behind the list")

    def value(self) -> tuple[Any, int]:
        """Returns the next value, and how many bytes of it, or before it, were replaced."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                # A number at the end of what is in memory may go on.
                if end < len(self.text) or not self._more():
                    break
            except json.JSONDecodeError as error:
                behind = error.pos - self.at
                cut = len(self.text) - error.pos <= _LONGEST_WORD
                if not (cut or error.msg.startswith("Unterminated")) or not self._more():
                    reason = error.msg.removesuffix(" starting at")
                    raise self._error(reason, self.at + behind) from error
            except (ValueError, RecursionError) as error:
                raise self._error(fault(error)) from error
        check_depth(value, self.where())
        replaced = self.source.replaced_bytes - self.counted_bytes
        self.counted_bytes += replaced
        text, self.at = self.text[self.at : end], end
        return _whole(value, text, replaced)

    def _line(self) -> int:
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.line

    def _more(self) -> bool:
        """Reads on until there is twice as much text, so that a long value is not tried for each
        block; False at the end."""
        self._line()
        line_start = self.text.rfind("\n", 0, self.at) + 1
        self.column = self.at - line_start + (0 if line_start else self.column)
        parts, chars = [self.text[self.at :]], 0
        while chars <= len(parts[0]) and (block := next(self.blocks, "")):
            parts.append(block)
            chars += len(block)
        self.text, self.at, self.counted = "".join(parts), 0, 0
        if len(self.text) > MOST_CHARS + BLOCK_BYTES:
            raise UserError(
                f"{self.where()}: a value of more than {MOST_CHARS >> 20} MiB: write one object a "
                "line as .jsonl"
            )
        return chars > 0

    def _error(self, reason: str, at: int | None = None) -> UserError:
        at = self.at if at is None else at
        line = self._line() + self.text.count("\n", self.at, at)
        line_start = self.text.rfind("\n", 0, at) + 1
        column = at - line_start + 1 + (0 if line_start else self.column)
        return UserError(
            f"{self.source.path}:{line} is not JSON ({reason} at column {column}): a list of "
            "objects, or one object a line, is expected"
        )


def _whole(value: Any, text: str, replaced: int) -> tuple[Any, int]:
    """Returns a value without halves of surrogate pairs, which JSON can spell and which cannot be
    encoded, and how many bytes were replaced."""
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            clean = json.dumps(value, ensure_ascii=False).encode(errors="replace")
            return json.loads(clean), replaced + 1
    return value, replaced
