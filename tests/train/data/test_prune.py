"""`longctx cache`: what it counts, what it deletes, and what it never touches."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import Features, List, Value

from longctx.train import cli
from longctx.train.data.pack import cache, prune
from longctx.train.data.pack.cache import (
    cache_path,
    digest,
    open_arrow,
    scratch_folder,
    write_arrow,
)

FEATURES = Features({"ids": List(Value("int32"))})
KEY = digest("a corpus")
DAY_S = 24 * 3600


def age(path: Path, days: float) -> Path:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def finished(folder: Path, kind: str, key: str = KEY, days: float = 0.0) -> Path:
    """A file with its checksum, last opened `days` ago."""
    path = cache_path(folder, kind, key)
    write_arrow(path, FEATURES, ({"ids": np.arange(9, dtype=np.int32)} for _ in range(3)))
    age(path, days + 50)  # only the checksum says when it was used
    age(path.with_name(path.name + ".xxh3"), days)
    return path


def empty(path: Path, days: float = 0.0) -> Path:
    path.touch()
    return age(path, days)


def run(capsys, folder: Path, *words: str) -> list[str]:
    cli.main(["cache", "--cache_dir", str(folder), *words])
    return capsys.readouterr().out.splitlines()


def line(lines: list[str], group: str) -> list[str]:
    (found,) = [line for line in lines if line.startswith(f"{group} ")]
    return found.removeprefix(group).split(maxsplit=2)


def test_the_table_counts_every_kind(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prune, "GIB", 1000)
    finished(tmp_path, "documents", days=3)
    rows = [finished(tmp_path, "rows", key, days=1.5) for key in (KEY, digest(2))]
    empty(cache_path(tmp_path, "rows", KEY, ".json"), 70)
    empty(cache_path(tmp_path, "tokenizer", KEY, ".json"), 0.5)
    empty(cache_path(tmp_path, "tokens", KEY), 2)
    empty(tmp_path / f"tokens-{KEY}_00000_of_00002.arrow", 9)
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.iterdir())
    lines = run(capsys, tmp_path)
    assert line(lines, "documents")[::2] == ["2", "3 days ago"]
    size_bytes = 2 * (rows[0].stat().st_size + 16)
    assert line(lines, "rows") == ["5", f"{size_bytes / 1000:.2f}", "1 day ago"]
    assert line(lines, "tokenizers") == ["1", "0.00", "today"]
    assert line(lines, "tokens") == ["0", "0.00", "-"]
    assert line(lines, "killed runs' leftovers") == ["1", "0.00", "2 days ago"]
    assert line(lines, "other formats") == ["1", "0.00", "9 days ago"]
    assert line(lines, "all")[0] == "10"
    assert lines[-1] == (
        "--prune would free 0.00 GiB, 1 file: not used for 30 days, or left half done"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_prune_deletes_what_was_not_used_for_days(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prune, "GIB", 1000)
    old = finished(tmp_path, "rows", days=31)
    empty(cache_path(tmp_path, "rows", KEY, ".json"))
    empty(tmp_path / f"tokens-{KEY}_00001_of_00002.arrow", 31)
    empty(cache_path(tmp_path, "tokenizer", KEY, ".json"), 31)
    used = [finished(tmp_path, "rows", digest(2), days=29), finished(tmp_path, "tokens", days=29)]
    used.append(empty(tmp_path / f"rows-v{cache.FORMAT + 1}-{KEY}.arrow", 29))  # a later version's
    size_bytes = old.stat().st_size + 16
    lines = run(capsys, tmp_path, "--prune")
    assert lines[-1] == f"freed {size_bytes / 1000:.2f} GiB, 5 files"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in used} | {f"{path.name}.xxh3" for path in used[:2]}
    assert run(capsys, tmp_path, "--prune", "--days", "28")[-1].endswith(", 5 files")
    assert list(tmp_path.iterdir()) == []


def test_opening_a_file_keeps_it(tmp_path, capsys):
    path = finished(tmp_path, "rows", days=31)
    open_arrow(path)
    assert run(capsys, tmp_path, "--prune")[-1] == "freed 0.00 GiB, 0 files"
    assert path.exists()


def test_a_run_keeps_the_file_that_it_has_open(tmp_path, capsys):
    dataset = open_arrow(finished(tmp_path, "rows", days=31))
    age(next(tmp_path.glob("*.xxh3")), 31)
    run(capsys, tmp_path, "--prune")
    assert list(tmp_path.iterdir()) == []
    assert dataset[2] == {"ids": list(range(9))}


def test_what_a_killed_run_leaves_is_deleted_after_a_day(tmp_path, capsys):
    path = cache_path(tmp_path, "tokens", KEY)
    for name in (path.name, path.name + ".xxh3"):
        os.close(tempfile.mkstemp(cache.TEMPORARY, cache._prefix(tmp_path / name), tmp_path)[0])
    run_to_kill = scratch_folder(path)
    folder = run_to_kill.__enter__()
    (folder / "tmpabcdefgh").write_text("what datasets.map was writing")
    leftovers = list(tmp_path.iterdir())
    assert len(leftovers) == 3
    assert line(run(capsys, tmp_path, "--prune"), "killed runs' leftovers")[::2] == ["3", "today"]
    assert sorted(tmp_path.iterdir()) == sorted(leftovers)
    for leftover in leftovers:
        age(leftover, 2)
    assert run(capsys, tmp_path, "--prune")[-1].endswith(", 2 files")  # one is still written to
    age(folder / "tmpabcdefgh", 2)
    age(folder, 2)
    assert run(capsys, tmp_path, "--prune")[-1].endswith(", 1 file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        f"rows-{KEY}.csv",
        f"rows-v1-{KEY}.arrow.bak",
        f"my-rows-v1-{KEY}.arrow",
        f"rows-v1-{KEY[:-1]}.arrow",
        f"rows-v1-{KEY.upper()}x.arrow",
        "tmpabcdefgh",
        "cache-0123456789abcdef.arrow",
        f"rows-v1-{KEY}.tmp",
        "model.safetensors.tmp",
    ],
)
def test_other_files_stay(tmp_path, capsys, name):
    empty(tmp_path / name, 400)
    assert run(capsys, tmp_path, "--prune", "--days", "1")[-1] == "freed 0.00 GiB, 0 files"
    assert (tmp_path / name).exists()


def test_links_and_folders_stay(tmp_path, capsys):
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir()
    target = empty(elsewhere / "corpus.arrow", 400)
    links = [
        cache_path(folder, "rows", KEY),
        folder / f"tokens-v1-{KEY}.arrow-abcdefgh.tmp",
        folder / f"tokens-v1-{KEY}.arrow-hgfedcba.tmp" / "link",
    ]
    links[2].parent.mkdir()  # a leftover: this one goes, with the link in it
    for link, to in zip(links, (target, elsewhere, elsewhere), strict=True):
        link.symlink_to(to)
        age(link, 400)
    named_as_a_file = cache_path(folder, "tokens", KEY)
    named_as_a_file.mkdir()
    for path in (named_as_a_file, links[2].parent, elsewhere):
        age(path, 400)
    assert run(capsys, folder, "--prune")[-1] == "freed 0.00 GiB, 0 files"  # a link is none
    assert target.exists()
    assert sorted(folder.iterdir()) == sorted([*links[:2], named_as_a_file])


def test_a_file_that_another_process_deletes_meanwhile(tmp_path, capsys, monkeypatch):
    finished(tmp_path, "rows", days=31)
    entries = prune.read_cache(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    prune.prune(tmp_path, entries)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    missing = tmp_path / "none"
    for folder, words, message in (
        (missing, [], rf"cannot read the cache folder {missing} \(No such .*--cache_dir$"),
        (empty(tmp_path / "file"), [], r"cannot read the cache folder .*file \(Not a directory\)"),
        (tmp_path, ["--days", "0"], "--days must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}") as error:
            cli.main(["cache", "--cache_dir", str(folder), *words])
        assert "\n" not in str(error.value)
    finished(tmp_path, "rows", days=31)
    monkeypatch.setattr(Path, "unlink", refuse)  # root deletes everything, so chmod proves nothing
    with pytest.raises(SystemExit, match=rf"^error: cannot delete from {tmp_path} \(Permission de"):
        cli.main(["cache", "--cache_dir", str(tmp_path), "--prune"])
