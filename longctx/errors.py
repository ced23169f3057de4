"""Errors of one line, and lines that a run prints once for all its processes. Imports nothing
heavy, so that commands can use it without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TextIO

MOST_CHARACTERS = 800
"""The longest line of an error, which may quote a path or other foreign text."""


def printable(line: str) -> str:
    """Returns the line with invisible characters escaped: names may hold line ends, terminal codes,
    or bytes that are not text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def shortened(text: str, width: int = MOST_CHARACTERS) -> str:
    """Cuts a text to `width` characters, in its middle."""
    tail = width // 3
    return text if len(text) <= width else f"{text[: width - tail - 5]} ... {text[-tail:]}"


def one_line(error: BaseException, width: int = 300) -> str:
    """Shortens an error of another library to one line of at most `width` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= width else text[: width - 3] + "..."


def counted(number: float) -> str:
    """Returns a count in three digits: 135M, 8.03B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return str(int(number))


def many(count: int, noun: str) -> str:
    """Returns a count with its noun, which takes an s: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def did_you_mean(word: str, known: Iterable[str], before: str = "", cutoff: float = 0.6) -> str:
    """Returns a question with the known word that is nearest to `word`, with `before` in front of
    it: `did you mean lora? `; empty if none is near (difflib's `cutoff`)."""
    near = get_close_matches(word, [*known], n=1, cutoff=cutoff)
    return f"did you mean {before}{near[0]}? " if near else ""


class UserError(Exception):
    """Bad input. The message is one line that names what is wrong and what to do."""

    def __str__(self) -> str:
        return "\n".join(shortened(printable(line)) for line in self.args)


class _Surviving:
    """A standard stream that drops its output once writing fails, instead of ending the run: a
    closed pipe (`| head`), a full disk, a terminal that is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return self._silence(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._silence()

    def _silence(self, written: int = 0) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_lost_output() -> None:
    """Makes printing safe from now on: no failed write, of progress bars either, ends the program,
    and characters that the terminal's encoding lacks are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Surviving):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Surviving(stream))


def on_terminal() -> bool:
    """Whether a person may be watching: both standard streams are a terminal."""
    streams = (sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Prints lines that may hold foreign names, without their terminal codes."""
    for line in lines:
        print(printable(line), file=file, flush=True)


def print_rank0(line: str) -> None:
    """Prints a line, in the first process only."""
    if os.environ.get("RANK", "0") == "0":
        say(line)
