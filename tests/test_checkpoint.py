"""A checkpoint is whole or absent, and a run never overwrites another by accident."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from longctx.checkpoint import (
    check_disk_space,
    check_output_dir,
    clear_output_dir,
    publish,
    resolve_resume,
    staging_path,
)
from longctx.config import TrainArguments, UserError


def arguments(output_dir: Path, **changes) -> TrainArguments:
    return TrainArguments(output_dir=str(output_dir), use_cpu=True, **changes)


def test_publish_replaces_a_folder_whole(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for text in ("old", "new"):
        staging = staging_path(final)
        staging.mkdir()
        (staging / text).write_text(text)
        publish(staging, final)
    assert [p.name for p in tmp_path.rglob("*")] == ["final", "new"]


def test_leftovers_of_a_killed_run_are_swept_up(tmp_path: Path) -> None:
    staging = staging_path(tmp_path / "checkpoint-5")
    staging.mkdir()
    (staging / "model.safetensors").write_text("half")
    with pytest.raises(UserError, match="holds no checkpoint-N"):
        resolve_resume(arguments(tmp_path, resume_from_checkpoint="last"))
    clear_output_dir(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_resume_takes_the_newest_or_the_named_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": 1}')
    named = str(tmp_path / "checkpoint-9")
    for name, step in (("last", 10), ("True", 10), (named, 9)):
        resume = resolve_resume(arguments(tmp_path, resume_from_checkpoint=name))
        assert resume == tmp_path / f"checkpoint-{step}"
    assert resolve_resume(arguments(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "message"), [("empty", "trainer_state.json is missing"), ("gone", "no such folder")]
)
def test_resume_from_what_is_no_checkpoint(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        resolve_resume(arguments(tmp_path, resume_from_checkpoint=str(tmp_path / name)))


def test_an_earlier_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    old = tmp_path / "checkpoint-3"
    old.mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--overwrite_output_dir"):
        check_output_dir(tmp_path, arguments(tmp_path), None)
    check_output_dir(tmp_path, arguments(tmp_path), old)
    clear_output_dir(tmp_path, old)
    assert old.exists()
    check_output_dir(tmp_path, arguments(tmp_path, overwrite_output_dir=True), None)
    assert old.exists()  # until everything else is known to work
    clear_output_dir(tmp_path, None)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_disk_space_for_weights_and_adam_states(tmp_path: Path, monkeypatch) -> None:
    free_mib = {"value": 4}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib["value"] * 2**20)
    )
    check_disk_space(tmp_path, 2**20, arguments(tmp_path))
    free_mib["value"] = 3
    with pytest.raises(UserError, match="no space for the checkpoint"):
        check_disk_space(tmp_path, 2**20, arguments(tmp_path))
    check_disk_space(tmp_path, 2**20, arguments(tmp_path, save_only_model=True))
    monkeypatch.setattr(TrainArguments, "engine", "fsdp")  # bf16 model; weights and Adam in fp32
    args = arguments(tmp_path)
    args.bf16, free_mib["value"] = True, 6
    with pytest.raises(UserError, match="no space for the checkpoint"):
        check_disk_space(tmp_path, 2**20, args)
    free_mib["value"] = 7
    check_disk_space(tmp_path, 2**20, args)
