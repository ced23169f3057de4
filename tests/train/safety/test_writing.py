"""A file that a person names is written as a whole, and only over what this tool wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx.errors import UserError
from longctx.train.safety.writing import MARK, check_writable, replace_file

PAGE = b"<!DOCTYPE html>\n<meta content='" + MARK + b"'>"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.write_text("preset: tiny"), "longctx did not write it"),
        (lambda p: p.write_text("# a recipe " + MARK.decode()), "longctx did not write it"),
        (lambda p: p.write_text("<!DOCTYPE html><p>mine</p>"), "longctx did not write it"),
        (lambda p: p.write_bytes(b"\x89PNG\r\n" + bytes(99)), "longctx did not write it"),
        (lambda p: p.write_bytes(b""), "longctx did not write it"),
        (lambda p: p.mkdir(), "it is no regular file"),
        (os.mkfifo, "it is no regular file"),
        (lambda p: p.symlink_to("nowhere"), "it is a link"),
        (lambda p: p.symlink_to(p.name), "it is a link"),
        (lambda p: p.symlink_to("/dev/null"), "it is a link"),
        (lambda p: p.with_name("a").write_bytes(PAGE) and p.symlink_to("a"), "it is a link"),
        (lambda p: p.symlink_to("input"), "would overwrite .*input"),
        (lambda p: p.hardlink_to(p.with_name("input")), "would overwrite .*input"),
    ],
)
def test_what_is_not_ours_stays(make: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    source, path = tmp_path / "input", tmp_path / "page.html"
    source.write_text("text")
    make(path)
    before = sorted(os.listdir(tmp_path)), path.lstat()
    with pytest.raises(UserError, match=says):
        check_writable(path, source)
    assert (sorted(os.listdir(tmp_path)), path.lstat()) == before
    assert source.read_text() == "text"


@pytest.mark.parametrize("name", ["x" * 300, "input/page.html", "", "/dev/null", "/dev/full"])
def test_what_cannot_be_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("text")
    with pytest.raises(UserError, match="cannot write "):
        check_writable(tmp_path / name)


def test_ours_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    for data in (PAGE, PAGE + b"more"):
        check_writable(path)
        replace_file(path, data)
        assert path.read_bytes() == data and os.listdir(path.parent) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("plant", [os.mkfifo, lambda p: p.symlink_to("other")])
def test_what_is_planted_after_the_look_is_not_followed(plant, tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "page.html"
    other.write_text("theirs")
    check_writable(path)
    plant(path)
    replace_file(path, PAGE)
    assert path.read_bytes() == PAGE and other.read_text() == "theirs"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "page.html"
    replace_file(path, PAGE)

    def fail(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="page.html: No space left"):
        replace_file(path, b"half")
    assert path.read_bytes() == PAGE and os.listdir(tmp_path) == ["page.html"]
