from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from longctx.errors import UserError
from longctx.train.data.reading.files import find_files, stdlib_files
from longctx.train.data.reading.sources import read_documents


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, content in {
        "b.md": b"# title",
        "a.txt": b"text",
        "sub/c.py": b"x = 1",
        "sub/d.jsonl": b'{"text": "line"}',
        "sub/empty.py": b"",
        "sub/image.png": b"\x89PNG\0",
        "sub/settings.json": b"{}",
        ".git/e.txt": b"hidden",
        "__pycache__/f.py": b"cached",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def names(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def test_folders_files_and_globs(tree, monkeypatch):
    assert names(find_files([str(tree)])) == ["d.jsonl"]
    (tree / "sub" / "d.jsonl").unlink()
    assert names(find_files([str(tree)])) == ["a.txt", "b.md", "c.py"]
    assert names(find_files([str(tree / "b.md")])) == ["b.md"]
    assert names(find_files([str(tree / "**" / "*.py")])) == ["f.py", "c.py"]
    assert names(find_files([str(tree / "b.md"), str(tree)])) == [
        "b.md",
        "a.txt",
        "c.py",
    ]
    monkeypatch.setenv("HOME", str(tree))
    assert names(find_files(["~/a.txt"])) == ["a.txt"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert names(find_files([str(tmp_path / "a[1].txt")])) == ["a[1].txt"]


def test_links(tree):
    (tree / "sub" / "loop").symlink_to(tree)  # a loop of folders
    (tree / "sub" / "dead.txt").symlink_to(tree / "nowhere")
    (tree / "sub" / "self.txt").symlink_to(tree / "sub" / "self.txt")
    (tree / "sub" / "same.txt").symlink_to(tree / "a.txt")
    (tree / "sub" / "d.jsonl").unlink()
    assert names(find_files([str(tree)])) == ["a.txt", "b.md", "c.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "none.txt does not exist"),
        ("empty.txt", "empty.txt is empty"),
        ("folder", "no readable text in the folder .*folder"),
        ("*.nothing", r"\*.nothing matches no non-empty file"),
        ("binary.txt", "binary.txt is binary or UTF-16"),
        ("utf16.txt", "utf16.txt is binary or UTF-16"),
        ("fifo", "fifo is not a regular file"),
        ("self", "cannot read .*self"),
        ("dead", "dead does not exist"),
        ("x" * 300, "cannot read"),
        ("nul\0.txt", "does not exist"),
    ],
)
def test_a_bad_path_says_what_is_wrong(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.png").write_bytes(b"\0")
    (tmp_path / "folder" / "x.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"ab\0\1")
    (tmp_path / "utf16.txt").write_text("hello", encoding="utf-16-le")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=message) as error:
        find_files([str(tmp_path / name)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("address", ["https://host/book.txt", "s3://bucket/*.txt"])
def test_an_address_is_no_file(address):
    with pytest.raises(UserError, match=rf"^{re.escape(address)} is an address: download it"):
        find_files([address])


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("x")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root reads everything, so chmod proves nothing
    with pytest.raises(UserError) as error:
        find_files([str(path)])
    assert str(error.value) == (
        f"cannot read {path}: Permission denied; check it and its permissions"
    )


def read(path: Path):
    return list(read_documents([path]))


def test_text_is_normalised(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [document.content for document in read(path)] == ["one\ntwo\n"]
    path.write_bytes(b" \n\t\n")
    assert read(path) == []


def test_undecodable_bytes_are_counted_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("é".encode() + b"\xff\xfe ok \xe9")
    (document,) = read_documents([path], allow_undecodable=True)
    assert document.replaced_bytes == 3
    assert document.content == "é\ufffd\ufffd ok \ufffd"


def test_jsonl_lines_know_their_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": " "}\n{"text": "\xff"}\n{"text": "\\ud800!"}'
    )
    documents = list(read_documents([path], allow_undecodable=True))
    assert [d.content for d in documents] == ["one", "\ufffd", "?!"]
    assert [d.where for d in documents] == [f"{path}:{n}" for n in (1, 4, 5)]
    assert [d.replaced_bytes for d in documents] == [0, 1, 1]


UTF = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", UTF)
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_says_how_to_read(tmp_path, encoding, suffix):
    """The \u0a0a is a line break in every other byte."""
    texts = ["one é \U0001f600", "two \u0a0a"]
    path = tmp_path / f"a.{suffix}"
    lines = (
        texts if suffix == "txt" else [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    )
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode(encoding))
    found = [document.content for document in read(find_files([str(path)])[0])]
    assert found == (["\n".join(texts)] if suffix == "txt" else texts)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_is_broken_in_utf16_is_counted(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    text = '{"text": "' + "x" * 200 + '"}'
    path.write_bytes(
        ("\ufeff" + text).encode("utf-16-le")[:-4] + b"\0\xd8" + '"}'.encode("utf-16-le")
    )
    (document,) = read(path)
    assert document.replaced_bytes == 2 and document.content.count("\ufffd") == 1


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize(("broken", "refused"), [(19, False), (21, True)])
def test_a_file_that_is_mostly_not_text_is_refused(tmp_path, suffix, broken, refused):
    path = tmp_path / f"a.{suffix}"
    line = b'{"text": "' + b"y" * 86 + b'"}\n'
    path.write_bytes((line * 10).replace(b"y", b"\xe9", broken))
    assert path.stat().st_size == 990
    if refused:
        message = r"a\.\w+: 2% of its bytes are not UTF-8 text: .* --allow_undecodable"
        with pytest.raises(UserError, match=message):
            read(path)
    else:
        assert sum(document.replaced_bytes for document in read(path)) == broken
    assert list(read_documents([path], allow_undecodable=True))


FILES = {
    "gzip-compressed: unpack it": gzip.compress(b"text"),
    "bzip2-compressed: unpack it": bz2.compress(b"text"),
    "xz-compressed: unpack it": lzma.compress(b"text"),
    "zstd-compressed: unpack it": b"\x28\xb5\x2f\xfd\x04\x00text",
    "a PDF: convert it": b"%PDF-1.7\n%\xb5\xb5\n1 0 obj",
    "a PNG image": b"\x89PNG\r\n\x1a\nIHDR",
    "a Parquet file: rename it": b"PAR1\x15\x04\x15",
    **{f"a Python pickle(?#{n})": pickle.dumps({"a": [1, "b"]}, n) for n in (2, 3, 4, 5)},
}


@pytest.mark.parametrize(("what", "content"), FILES.items(), ids=range(len(FILES)))
def test_a_file_of_another_kind_is_told(tmp_path, what, content):
    for name in ("a.txt", "a.jsonl", "a.bin"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is no text but {what}"):
            find_files([str(tmp_path / name)])


def test_archives_are_told(tmp_path):
    for kind, what in (("zip", "a zip archive"), ("tar", "a tar archive")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "a.txt").write_text("text")
        made = Path(shutil.make_archive(str(tmp_path / "made"), kind, tmp_path / kind))
        with pytest.raises(UserError, match=f"is no text but {what}: unpack it"):
            find_files([str(made.rename(tmp_path / f"{kind}.txt"))])


def test_text_that_begins_like_another_kind(tmp_path):
    for text in ("BZh is a header", "PAR1 is a format", "GIF8 or not", "PK means public key"):
        (tmp_path / "a.txt").write_text(text)
        assert find_files([str(tmp_path / "a.txt")])


def test_a_surrogate_pair_is_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "\U0001f600"}))
    assert "\\ud83d" in path.read_text()
    assert read(path)[0].content == "\U0001f600" and read(path)[0].replaced_bytes == 0


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"body": 1}', '{"messages": []}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:3\b"):
        read(path)


STRANGE = {
    "not UTF-8": (b"caf\xe9", r"caf\udce9"),
    "half a character": (b"a\xe2\x82", r"a\udce2\udc82"),
    "two lines": (b"a\nb", r"a\nb"),
    "terminal codes": (b"\x1b[31mred", r"\x1b[31mred"),
    "right to left": ("\u202eabc".encode(), r"\u202eabc"),
    "ordinary letters": ("caf\u00e9 \u65e5\u672c".encode(), "caf\u00e9 \u65e5\u672c"),
}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize(("name", "shown"), STRANGE.values(), ids=STRANGE)
def test_names_that_are_no_text_are_said_in_printable_words(tmp_path, name, shown, suffix):
    """Arrow, terminals and JSON take no half characters; a cache's key still tells names apart."""
    folder = os.fsencode(tmp_path) + b"/" + name
    os.mkdir(folder)
    with open(folder + b"/" + name + suffix.encode(), "w") as file:
        file.write('{"text": "words"}\n')
    for patterns in ([str(tmp_path)], [f"{tmp_path}/**/*{suffix}"]):
        (document,) = read_documents(find_files(patterns))
        number = ":1" if suffix == ".jsonl" else ""
        assert document.where == f"{tmp_path}/{shown}/{shown}{suffix}{number}"
        document.where.encode()


def test_a_bad_line_of_a_file_without_a_name_that_is_text(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.jsonl", "w") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"\\udcff\.jsonl:1 is not JSON"):
        list(read_documents(find_files([str(tmp_path)])))


def test_the_standard_library_has_long_documents_and_no_tests():
    files = stdlib_files()
    assert len(files) > 300
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert max(path.stat().st_size for path in files) > 200_000
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    assert files == stdlib_files()
