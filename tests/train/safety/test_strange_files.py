"""Files that are none, sizes that are lies, and tensors that would fill the memory."""

from __future__ import annotations

import io
import os
import socket
import time
import zipfile
from pathlib import Path

import pytest
import torch

from longctx.errors import UserError, say
from longctx.train.safety import strange_files as files
from longctx.train.safety.checksum import checksum
from longctx.train.safety.processes import Unbounded, in_child
from longctx.train.safety.strange_files import (
    odd_entry,
    open_regular,
    read_json,
    refuse_odd,
    tensor_problem,
)

MANY = 3 * 10**9


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


ODD = {
    "a pipe": pipe,
    "a socket": listener,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (pipe(path.with_name("p")), path.symlink_to("p")),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_never_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "inner").mkdir()
    assert odd_entry(tmp_path) is None
    ODD[kind](tmp_path / "inner" / "x")
    assert odd_entry(tmp_path) in ("inner/x", "inner/p")
    with pytest.raises(UserError, match="inner/[xp] is not a regular file"):
        refuse_odd(tmp_path)
    for read in (open_regular, checksum):
        with pytest.raises(OSError):
            read(tmp_path / "inner" / "x")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "chat_template.jinja"])
def test_a_description_of_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 2**33)
    refuse_odd(tmp_path)
    os.truncate(tmp_path / name, 2**33)
    with pytest.raises(UserError, match=f"{name} has 8192 MiB"):
        refuse_odd(tmp_path)


def test_links_to_files_and_to_nothing_are_not_odd(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    for name, to in (("b", "a"), ("gone", "nowhere"), ("loop", "loop"), ("up", ".")):
        (tmp_path / name).symlink_to(to)
    assert odd_entry(tmp_path) is None
    assert checksum(tmp_path / "a") == checksum(tmp_path / "b")


def test_a_file_larger_than_its_disk_is_not_read(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"abc"
    monkeypatch.setattr(files, "MOST_BYTES", 2)
    with pytest.raises(OSError, match="larger than its disk"):
        open_regular(tmp_path / "a")


def test_a_kernels_file_without_an_end_is_read_to_its_size() -> None:
    assert checksum(Path("/proc/self/pagemap")) == checksum(Path("/proc/self/environ"))


JSONS = {
    "a key twice": '{"a": 1, "a": 2}',
    "too deep": "[" * 101 + "]" * 101,
    "much too deep": "[" * 10**5,
    "not UTF-8": "\udcff",
    "nothing": "",
    "endless digits": "1" * 5000,
}


@pytest.mark.parametrize("what", JSONS)
def test_json_that_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "x").write_text(JSONS[what], errors="surrogateescape")
    with pytest.raises(ValueError):
        read_json(tmp_path / "x")


def test_json_is_bounded_in_bytes_and_values(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x").write_text('{"a": [1, 2, {"b": 3}], "c": NaN}')
    assert read_json(tmp_path / "x")["a"] == [1, 2, {"b": 3}]
    monkeypatch.setattr(files, "MOST_JSON_VALUES", 5)
    with pytest.raises(ValueError, match="too many values"):
        read_json(tmp_path / "x")
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 5)
    with pytest.raises(ValueError, match="MiB"):
        read_json(tmp_path / "x")


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


def inflated(path: Path) -> None:
    """A zip of a tenth of a megabyte whose pickle has a hundred."""
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(4)}, saved)
    with (
        zipfile.ZipFile(saved) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zip,
    ):
        for name in source.namelist():
            with zip.open(name, "w", force_zip64=True) as out:
                out.write(source.read(name))
                if name.endswith("data.pkl"):
                    for _ in range(300):  # more than earlier tests have left free
                        out.write(bytes(2**20))


BOMBS = {
    "a call for memory": lambda path: torch.save(Calls(bytearray, MANY), path),
    "an expanded tensor": lambda path: torch.save({"a": [torch.zeros(1).expand(MANY)]}, path),
    "a sparse tensor": lambda path: torch.save(
        torch.sparse_coo_tensor([[0]], [1.0], (MANY,)), path
    ),
    "a zip that inflates": inflated,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_much_memory_is_seen(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(files, "VET_BYTES", 64 << 20)
    torch.save({"a": torch.zeros(4), "b": [1]}, tmp_path / "fine.pt")
    (tmp_path / "text.bin").write_text("hello")
    assert tensor_problem(tmp_path) is None
    BOMBS[name](tmp_path / "optimizer.pt")
    assert (tmp_path / "optimizer.pt").stat().st_size < 3 << 20
    problem = tensor_problem(tmp_path)
    assert problem and "optimizer.pt" in problem


def test_a_header_of_many_megabytes_is_seen(tmp_path: Path) -> None:
    """One that is longer than its file is for the reader to refuse, which it does at once."""
    path = tmp_path / "m.safetensors"
    path.write_bytes((2**26).to_bytes(8, "little") + b"{}")
    assert tensor_problem(tmp_path) is None
    os.truncate(path, 2**27)
    assert tensor_problem(tmp_path) == "m.safetensors says that its header has 67108864 bytes"


def test_a_child_answers_or_says_what_it_took() -> None:
    limits = dict(seconds=20.0, more_bytes=1 << 28)
    assert in_child(lambda: [1, "a"], **limits) == [1, "a"]
    with pytest.raises(UserError, match="^mine$"):
        in_child(lambda: (_ for _ in ()).throw(UserError("mine")), **limits)
    with pytest.raises(RuntimeError, match="division by zero"):
        in_child(lambda: 1 / 0, **limits)
    with pytest.raises(Unbounded, match="takes more than 0.2 GiB of memory"):
        in_child(lambda: bytearray(1 << 30), **limits)
    with pytest.raises(Unbounded, match="does not end within 0 s"):
        in_child(lambda: time.sleep(60), seconds=0.2, more_bytes=1 << 28)
    with pytest.raises(Unbounded, match="was killed"):
        in_child(lambda: os.kill(os.getpid(), 9), **limits)


def test_a_strangers_name_moves_no_cursor(capsys) -> None:
    say("a\x1b[31mb\rc\n", "\u202ed")
    assert capsys.readouterr().out == "a\\x1b[31mb\\rc\\n\n\\u202ed\n"
