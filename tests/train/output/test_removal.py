"""Links to bigger disks, and files that may not be deleted, end no run and brick no later one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from small_run import logged, run

from longctx.errors import UserError
from longctx.train.output import removal
from longctx.train.output.manifest import check_files
from longctx.train.output.save import rotate


@pytest.fixture
def undeletable(monkeypatch) -> set[str]:
    """Names of files that may be neither deleted nor renamed, as an immutable file on any disk."""
    names: set[str] = set()

    def refusing(function):
        def call(path, *args, **kwargs):
            if Path(os.fspath(path)).name in names:
                raise PermissionError(1, "Operation not permitted", os.fspath(path))
            return function(path, *args, **kwargs)

        return call

    for name in ("unlink", "remove", "rename", "replace"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return names


def moved_away(path: Path) -> Path:
    """Moves a folder to a bigger disk and leaves a link."""
    target = path.parent.parent / f"bigger-{path.name}"
    shutil.move(path, target)
    path.symlink_to(target)
    return target


def test_checkpoints_and_final_that_are_links(flags, copy, capsys) -> None:
    """Resumed from, rotated and replaced; what they point to is not touched."""
    targets = [moved_away(copy / name) for name in ("checkpoint-2", "checkpoint-4", "final")]
    run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "8")
    assert sorted(p.name for p in copy.iterdir() if not p.name.startswith(".")) == [
        "checkpoint-6",
        "checkpoint-8",
        "final",
        "metrics.jsonl",
        "run.json",
    ]
    assert not (copy / "final").is_symlink() and check_files(copy / "final")
    assert all(check_files(target) for target in targets)
    said = capsys.readouterr().out
    assert "checkpoint-2 was a link: " in said and "final was a link to" in said
    assert not list(copy.glob(".incomplete*"))


def test_a_run_of_links_is_overwritten(flags, copy) -> None:
    targets = [moved_away(copy / name) for name in ("checkpoint-2", "checkpoint-4", "final")]
    run(flags, copy, "--overwrite_output_dir", "true", "--max_steps", "2")
    assert [line["step"] for line in logged(copy)] == [1, 2]
    assert not (copy / "checkpoint-4").is_symlink()
    assert all(check_files(target) for target in targets)


def test_an_undeletable_file_in_an_old_checkpoint(flags, copy, undeletable, capsys) -> None:
    """It is renamed and said; later starts go on, saves of the same step too."""
    (copy / "checkpoint-2" / "stuck").touch()
    undeletable.add("stuck")
    run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "6")
    assert "checkpoint-2 could not be deleted whole (Operation not permitted)" in (
        capsys.readouterr().out
    )
    assert [p.name for p in copy.glob(".inc*")] == [".incomplete-checkpoint-2"]
    for _ in range(2):
        run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "8")
    assert [line["step"] for line in logged(copy)] == [*range(1, 9)]
    undeletable.clear()
    run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "8")
    assert not list(copy.glob(".inc*"))


def test_what_a_killed_save_left_undeletable_is_no_part_of_the_next(
    flags, tmp_path, undeletable
) -> None:
    stale = tmp_path / "run" / ".incomplete-checkpoint-2" / "checkpoint-2"
    stale.mkdir(parents=True)
    (stale / "stuck").touch()
    undeletable.add("stuck")
    run(flags, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert check_files(checkpoint) and not (checkpoint / "stuck").exists()


@pytest.mark.parametrize("name", ["checkpoint-4/stuck", "final/stuck", "metrics.jsonl"])
def test_overwriting_deletes_nothing_before_it_can_delete_all(
    flags, copy, undeletable, name
) -> None:
    (copy / name).touch()
    undeletable.add(Path(name).name)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"{name} cannot be deleted .*; nothing was deleted"):
        run(flags, copy, "--overwrite_output_dir", "true")
    before.pop(copy / ".lock")
    assert before.items() <= {p: p.stat().st_mtime_ns for p in before}.items()


def test_a_checkpoint_that_cannot_even_be_renamed(tmp_path, undeletable, capsys) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    undeletable.add("checkpoint-2")
    rotate(tmp_path, 1, {tmp_path / "checkpoint-4"})
    assert "checkpoint-2 could not be deleted: Operation not permitted" in capsys.readouterr().out
    assert removal.staging_path(tmp_path / "checkpoint-2").name == ".incomplete-checkpoint-2"


def test_one_timeline(flags, copy, capsys) -> None:
    """Resumed from an earlier step: later checkpoints are set aside, and `last` never takes one."""
    longer = ["--max_steps", "8", "--save_total_limit", "9"]
    run(flags, copy, "--resume_from_checkpoint", "last", *longer)
    capsys.readouterr()
    run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-4"), "--max_steps", "5")
    said = capsys.readouterr().out
    for step in (6, 8):
        assert (
            f"checkpoint-{step} lies after step 4: set aside as abandoned-checkpoint-{step}" in said
        )
        assert check_files(copy / f"abandoned-checkpoint-{step}")
    run(flags, copy, "--resume_from_checkpoint", "last", *longer)
    assert [line["step"] for line in logged(copy)] == [*range(1, 9)]
    run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-4"), "--max_steps", "5")
    names = {path.name for path in copy.glob("abandoned*")}
    assert {"abandoned-checkpoint-6", "abandoned-checkpoint-8", "abandoned-checkpoint-6.2"} <= names


def test_a_lock_that_is_a_link_is_not_followed(flags, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"\.lock is a link"):
        run(flags, tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"
