"""A file of text as it is read: decompressed, decoded, its undecodable bytes counted.

A file is read by lines or by blocks of BLOCK_BYTES, so that it need not fit in memory. A compressed
one may grow to GROWTH times its size (ordinary text grows 3 to 10 times): beyond that it is refused
as a bomb while it is read, before it has filled a memory or a disk.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from longctx.errors import UserError
from longctx.train.data.reading.encodings import byte_order_mark, decode
from longctx.train.data.reading.kinds import compression

BLOCK_BYTES = 1 << 20
GROWTH = 200
"""The size to which a compressed file may unpack, as a multiple of its own."""
GROWTH_FREE_BYTES = 64 << 20
"""Bytes to which a compressed file of any size may unpack: a small file whose lines repeat may
shrink to less than one part in GROWTH."""
DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda file: pa.CompressedInputStream(file, "zstd"),
}


def check_growth(path: Path, read_bytes: int, cure: str) -> None:
    """Raises UserError for a file that unpacks to so many bytes that it is a bomb."""
    if read_bytes > GROWTH_FREE_BYTES + GROWTH * path.stat().st_size:
        raise UserError(f"{path} unpacks to more than {GROWTH} times its size: {cure}")


class Text:
    """A file's text, read once from its beginning, by `lines` or by `blocks`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced_bytes = 0
        """Undecodable bytes that became U+FFFD, of what was read so far."""
        self._unpacked: _Unpacked | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, or those read so far where it is compressed."""
        return self._unpacked.read_bytes if self._unpacked else self.path.stat().st_size

    def lines(self) -> Iterator[tuple[str, int]]:
        """Yields the lines with their ends, and how many bytes of each were replaced."""
        with closing(self._open()) as file:
            encoding = byte_order_mark(file.peek(4)[:4]) or "utf-8-sig"
            for line, replaced in _lines(file, encoding):
                self.replaced_bytes += replaced
                yield line, replaced

    def blocks(self) -> Iterator[str]:
        """Yields the text in pieces of about BLOCK_BYTES, none of which ends within a character."""
        with closing(self._open()) as file:
            encoding = byte_order_mark(file.peek(4)[:4]) or "utf-8-sig"
            for text, replaced in _blocks(file, encoding):
                self.replaced_bytes += replaced
                yield text

    def _open(self) -> io.BufferedReader:
        if packed := compression(self.path):
            self._unpacked = _Unpacked(self.path, DECOMPRESSORS[packed])
            return io.BufferedReader(self._unpacked, BLOCK_BYTES)
        file = self.path.open("rb")
        assert isinstance(file, io.BufferedReader)
        return file


def _lines(file: IO[bytes], encoding: str) -> Iterator[tuple[str, int]]:
    if encoding == "utf-8-sig":
        yield from (decode(line, encoding) for line in file)
        return
    for line in io.TextIOWrapper(file, encoding, errors="replace", newline="\n"):
        yield line, _replaced(line, encoding)


def _blocks(file: IO[bytes], encoding: str) -> Iterator[tuple[str, int]]:
    if encoding != "utf-8-sig":
        text = io.TextIOWrapper(file, encoding, errors="replace", newline="")
        while block := text.read(BLOCK_BYTES):
            yield block, _replaced(block, encoding)
        return
    rest = b""
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        end = len(data)
        while end and len(data) - end < 4 and data[end - 1] & 0xC0 == 0x80:  # within a character
            end -= 1
        end -= end > 0 and data[end - 1] >= 0xC0
        if end:
            yield decode(data[:end], encoding)
            encoding = "utf-8"
        rest = data[end:]
    if rest:
        yield decode(rest, encoding)


def _replaced(text: str, encoding: str) -> int:
    return text.count("\ufffd") * (int(encoding[-2:]) // 8)


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file. Raises OSError for a broken one, and UserError for one that
    grows beyond all measure."""

    def __init__(self, path: Path, decompressor: Callable[[Any], Any]) -> None:
        self.path = path
        self.file = path.open("rb")
        self.source = decompressor(self.file)
        self.read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.source.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise OSError(f"its compressed data are broken ({error})") from error
        self.read_bytes += len(data)
        check_growth(self.path, self.read_bytes, "unpack it yourself, if that is meant")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.source.close()
            self.file.close()
        super().close()
