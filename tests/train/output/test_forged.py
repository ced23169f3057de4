"""Manifests and states that somebody wrote by hand: right checksums, wrong types, other folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.errors import MOST_CHARACTERS, UserError
from longctx.train.output import verify
from longctx.train.output.definition import check_same_run, define
from longctx.train.output.manifest import (
    Damaged,
    _digest,
    check_files,
    read_manifest,
    write_manifest,
)
from longctx.train.output.resume import best_checkpoint, integrity_problem, read_state

CHEAP = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
WORDS = st.text(max_size=5) | st.sampled_from(["/etc", "../x", "a\0b", "\x1b[2J", "\ud800", "a/b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def forge(folder: Path, **content: Any) -> None:
    """A manifest whose own checksum is right."""
    said = {"format": 1, "run": None, "files": {}} | content
    (folder / "manifest.json").write_text(json.dumps(said | {"xxh3": _digest(said)}))


def state(folder: Path, **content: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4} | content))


@CHEAP
@given(files=VALUES, run=VALUES)
def test_any_manifest_is_read_or_damaged(tmp_path: Path, files: Any, run: Any, capsys) -> None:
    forge(tmp_path, files=files, run=run)
    try:
        assert check_files(tmp_path) == 0
        check_same_run(tmp_path, RUN, [])
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) <= MOST_CHARACTERS
    capsys.readouterr()


RUN = define([], dtype="x", data="y", model={"layers": 2}, num_processes=1)


@CHEAP
@given(run=st.dictionaries(st.sampled_from([*RUN, "seq_len", "base"]), VALUES))
def test_any_definition_of_a_run_is_compared(tmp_path: Path, run: Any, capsys) -> None:
    forge(tmp_path, run=run)
    try:
        check_same_run(tmp_path, RUN | {"seq_len": 64, "base": "z"}, [])
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) <= MOST_CHARACTERS
    capsys.readouterr()


FIELDS = st.sampled_from(
    "global_step epoch log_history best_metric best_model_checkpoint best_global_step trial_params "
    "stateful_callbacks max_steps total_flos train_batch_size another".split()
)
LINES = st.lists(st.dictionaries(st.sampled_from(["step", "loss"]), VALUES, max_size=2), max_size=2)


@CHEAP
@given(content=st.dictionaries(FIELDS, VALUES | LINES, max_size=3))
def test_any_state_is_read_or_damaged(tmp_path: Path, content: Any, capsys) -> None:
    state(tmp_path / "checkpoint-4", **content)
    if integrity_problem(tmp_path / "checkpoint-4") is None:
        found = read_state(tmp_path / "checkpoint-4")
        assert found.global_step == 4
        assert all(f"{line.get('loss') or 0:.4f}" for line in found.log_history)
        assert best_checkpoint(tmp_path / "checkpoint-4", tmp_path) in (None, tmp_path / "4")
    assert capsys.readouterr().out.replace("\n", "").isprintable()


NAMES = ["/etc/passwd", "../a", "a/../../b", "./a", "a//b", "", ".", "a\0b", "manifest.json"]
ENTRIES = [
    [3],
    [3, 4],
    ["3", "x"],
    [True, "x"],
    [-1, "x"],
    [3.0, "x"],
    {"a": 1},
    "ab",
    None,
    [[], {}],
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_or_are_no_names(tmp_path: Path, name: str) -> None:
    forge(tmp_path, files={name: [3, "0"]})
    with pytest.raises(Damaged, match="manifest.json is forged: no file of the folder is"):
        check_files(tmp_path)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_entries_of_another_type(tmp_path: Path, entry: Any) -> None:
    (tmp_path / "a").write_text("abc")
    forge(tmp_path, files={"a": entry})
    with pytest.raises(Damaged, match="manifest.json is forged"):
        check_files(tmp_path)


def test_a_name_that_no_disk_takes_is_missing(tmp_path: Path) -> None:
    for name in ("\ud800", "x" * 300, "a/" * 3000 + "a"):
        forge(tmp_path, files={name: [3, "0"]})
        with pytest.raises(Damaged, match="is missing"):
            check_files(tmp_path)


def test_a_file_named_twice_is_no_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"run"', '"files": {}, "run"'))
    with pytest.raises(Damaged, match="unreadable"):
        read_manifest(tmp_path)


INSTEAD: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "randomness": lambda path: path.symlink_to("/dev/urandom"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a file of the kernel": lambda path: path.symlink_to("/proc/self/pagemap"),
}


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("name", ["a", "manifest.json", "trainer_state.json"])
def test_what_stands_in_a_files_place(tmp_path: Path, name: str, kind: str, capsys) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    state(checkpoint)
    (checkpoint / "a").write_text("abc")
    write_manifest(checkpoint)
    (checkpoint / name).unlink()
    INSTEAD[kind](checkpoint / name)
    assert integrity_problem(checkpoint) is not None
    with pytest.raises(SystemExit):
        verify.main([str(checkpoint)])
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "DAMAGED" in out


def test_a_pipe_that_no_manifest_names_is_seen_too(tmp_path: Path) -> None:
    state(tmp_path / "checkpoint-4")
    os.mkfifo(tmp_path / "checkpoint-4" / "scaler.pt")
    assert integrity_problem(tmp_path / "checkpoint-4") == "scaler.pt is not a regular file"


@pytest.mark.parametrize("place", ["folder", "listed", "unlisted"])
def test_verify_prints_no_terminal_code(tmp_path: Path, place: str, capsys) -> None:
    folder = tmp_path / ("a\x1b[31mb" if place == "folder" else "a")
    folder.mkdir()
    write_manifest(folder)
    if place == "listed":
        forge(folder, files={"\x1b]0;title\x07": [3, "0"]})
    elif place == "unlisted":
        (folder / "\x1b[2J\r").write_text("x")
    try:
        verify.main([str(folder)])
    except SystemExit:
        pass
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.strip("\n").isprintable() and "\\x1b" in out


BEST = {
    "its own path": ("{run}/checkpoint-2", True),
    "where the run was before": ("/gone/run/checkpoint-2", True),
    "a relative path": ("checkpoint-2", True),
    "an ending slash": ("/gone/checkpoint-2/", True),
    "another folder": ("/etc", False),
    "a folder above": ("{run}/../other", False),
    "dots": ("..", False),
    "nothing": ("", False),
    "one that is gone": ("{run}/checkpoint-3", False),
    "the final model": ("{run}/final", False),
    "a number of 5000 digits": ("checkpoint-" + "9" * 5000, False),
    "a terminal's code": ("\x1b[2J\n", False),
    "a NUL": ("a\0", False),
}


@pytest.mark.parametrize("what", BEST)
def test_the_best_checkpoint_is_one_of_the_runs_folder(tmp_path: Path, what: str, capsys) -> None:
    run = tmp_path / "run"
    for name in ("checkpoint-2", "checkpoint-4", "final", "../other"):
        (run / name).mkdir(parents=True)
    named, there = BEST[what]
    state(run / "checkpoint-4", best_model_checkpoint=named.format(run=run))
    found = best_checkpoint(run / "checkpoint-4", tmp_path / "new")
    assert found == (run / "checkpoint-2" if there else None)
    said = capsys.readouterr().out
    assert there or "which is not in" in said and said.count("\n") == 1
