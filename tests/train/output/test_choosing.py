"""A checkpoint is whole or absent, and the one that is named is the one that is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from longctx.errors import UserError
from longctx.train.options.config import TrainArguments
from longctx.train.output.folder import check_output_dir
from longctx.train.output.removal import staging_path
from longctx.train.output.resume import resolve_resume
from longctx.train.output.save import publish


def arguments(output_dir: Path, **changes) -> TrainArguments:
    return TrainArguments(output_dir=str(output_dir), use_cpu=True, **changes)


def test_publish_replaces_a_folder_whole(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for text in ("old", "new"):
        staging = staging_path(final)
        staging.mkdir()
        (staging / text).write_text(text)
        publish(staging, final)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert names == ["final", "final/manifest.json", "final/new"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch) -> None:
    final, staging = tmp_path / "final", staging_path(tmp_path / "final")
    for folder in (final, staging):
        folder.mkdir()
        (folder / folder.name).touch()
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == staging:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        publish(staging, final)
    assert [path.name for path in final.iterdir()] == ["final"]


def test_resume_takes_the_newest_or_the_named_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(f'{{"global_step": {step}}}')
    named = str(tmp_path / "checkpoint-9")
    for name, step in (("last", 10), ("True", 10), ("auto", 10), (named, 9)):
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


def test_auto_starts_where_nothing_is_saved_and_never_over_a_damaged_checkpoint(
    tmp_path: Path,
) -> None:
    auto = arguments(tmp_path, resume_from_checkpoint="auto")
    assert resolve_resume(auto) is None
    (tmp_path / "metrics.jsonl").touch()  # of a run that was killed before its first save
    check_output_dir(tmp_path, auto, None)
    with pytest.raises(UserError, match="holds an earlier run"):
        check_output_dir(tmp_path, arguments(tmp_path), None)
    (tmp_path / "final").mkdir()  # a model without a checkpoint: another run's
    with pytest.raises(UserError, match="holds an earlier run"):
        check_output_dir(tmp_path, auto, None)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        resolve_resume(auto)
