"""Files that a person names for us to write: what may stand there before, and how it is replaced.

A command looks before it works (`check_writable`) and replaces the file as a whole when it is done
(`replace_file`). What stands there already is replaced only where this tool wrote it: what a
mistyped name means (a recipe, weights, a user's notes) stays. No link is followed, and no pipe or
device is opened, also where one was put there in between.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from longctx.errors import UserError

MARK = b"made with longctx"
"""Every page and picture that we write contains this mark."""
_BEGINNINGS = (b"<!DOCTYPE html>", b"\x89PNG", b"%PDF", b"<?xml")
"""Beginnings of longctx's own files: such a file has the mark and one of these, so that a note that
quotes the mark is not taken for one."""
_LARGEST_BYTES = 1 << 28
"""A larger file is taken for no page or picture of ours, and is not searched."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a file's folder; a full disk or a place that may not be written is a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def is_marked(path: Path) -> bool:
    """Whether a file is a page or a picture that this tool wrote. Raises OSError."""
    if path.stat().st_size > _LARGEST_BYTES:
        return False
    data = path.read_bytes()
    return data.startswith(_BEGINNINGS) and MARK in data


def check_writable(path: Path, *inputs: Path, ours: Callable[[Path], bool] = is_marked) -> None:
    """Raises UserError where a file could not be written after hours of work, or would be lost:
    where it is one of the `inputs`, also through links, is a link, a pipe or a device, is in a
    folder that takes no files, or holds what is not `ours`."""
    for read in inputs:
        if _same(path, read):
            raise UserError(f"{path} would overwrite {read}, which is read: give another file")
    with writing(path):
        if path.is_symlink():
            raise UserError(f"cannot write {path}: it is a link: name the file that it leads to")
        if path.exists() and not path.is_file():
            raise UserError(f"cannot write {path}: it is no regular file")
        TemporaryFile(dir=path.parent).close()
        if path.exists():
            path.open("ab").close()
            if not ours(path):
                raise UserError(
                    f"cannot write {path}: it is there already and longctx did not write it: "
                    "give another file, or delete it"
                )


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file as a whole or not at all. Raises UserError."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with writing(path):
        try:
            with temporary.open("xb") as file:  # which follows no link
                file.write(data)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _same(a: Path, b: Path) -> bool:
    """Whether two names are one file, or would be if they existed."""
    if os.path.exists(a) and os.path.exists(b):
        return os.path.samefile(a, b)
    return os.path.realpath(a) == os.path.realpath(b)
