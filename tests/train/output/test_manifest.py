"""A flipped bit in any file of a published folder is found: before resuming, and by a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_run import prepare, run

from longctx.errors import UserError
from longctx.train.options.config import TrainArguments
from longctx.train.output import manifest, resume, verify
from longctx.train.output.manifest import Damaged, check_files, read_manifest, write_manifest


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    run([*prepare(folder), "--max_steps", "2"], folder / "run")
    return folder / "run"


def flip(path: Path, at: float = 0.7) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


def test_every_file_is_covered_and_every_flipped_bit_found(output: Path, capsys) -> None:
    verify.main([str(output)])
    assert capsys.readouterr().out.count("files are whole") == 2  # checkpoint-2 and final
    for folder in (output / "checkpoint-2", output / "final"):
        names = {path.name for path in folder.iterdir()}
        assert names - {"manifest.json"} == set(read_manifest(folder)["files"])  # type: ignore[index]
        for name in sorted(names):
            flip(folder / name)
            with pytest.raises(SystemExit):
                verify.main([str(folder)])
            line = capsys.readouterr().out
            assert f"{folder}: DAMAGED: {name}" in line and line.count("\n") == 1
            flip(folder / name)
        verify.main([str(folder)])
        assert "whole" in capsys.readouterr().out


def test_a_flipped_bit_is_not_resumed_from(output: Path, capsys) -> None:
    args = TrainArguments(output_dir=str(output), use_cpu=True, resume_from_checkpoint="last")
    optimizer = output / "checkpoint-2" / "optimizer.pt"
    flip(optimizer)
    with pytest.raises(UserError, match="holds no whole checkpoint-N"):
        resume.resolve_resume(args)
    assert "not resuming from" in (said := capsys.readouterr().out) and "its checksum is" in said
    flip(optimizer)
    assert resume.resolve_resume(args) == output / "checkpoint-2"


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("abc")
    (tmp_path / "b").write_text("")
    assert check_files(tmp_path) is None
    assert write_manifest(tmp_path, {"seed": 1}) == 3
    assert check_files(tmp_path) == 2
    (tmp_path / "inner" / "a").write_text("abcd")
    with pytest.raises(Damaged, match="inner/a has 4 of 3 bytes"):
        check_files(tmp_path)
    (tmp_path / "inner" / "a").unlink()
    with pytest.raises(Damaged, match="inner/a is missing"):
        check_files(tmp_path)
    for text in (
        "[]",
        "{}",
        "",
        '{"format": 1, "run": null, "files": {}, "xxh3": "0"}',
        "[" * 10**5,
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(Damaged, match="manifest.json is (damaged|unreadable)"):
            read_manifest(tmp_path)


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a").write_text("abc")
    write_manifest(tmp_path)

    def broken(paths, what):
        raise OSError(5, os.strerror(5), str(tmp_path / "a"))

    monkeypatch.setattr(manifest, "checksums", broken)
    with pytest.raises(Damaged, match="a cannot be read: Input/output error"):
        check_files(tmp_path)


@pytest.mark.parametrize("name", ["none", "file", "empty"])
def test_verify_needs_something_published(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{name} (is no folder|holds no checkpoint-N)"):
        verify.main([str(tmp_path / name)])
