"""A disk that is full: nothing half written stays, the run stops or goes on as it was told."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import add_callback, logged, prepare, run
from torch.distributed.checkpoint import CheckpointException
from transformers import TrainerCallback

from longctx.errors import UserError
from longctx.train.output import save
from longctx.train.output.save import disk_problem, require_space, rotate, try_on_all_ranks


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "6"]


def test_a_full_disk_of_one_process_as_fsdp2_reports_it() -> None:
    full = {1: (OSError(errno.ENOSPC, "No space left on device"), None)}

    def work() -> None:
        raise CheckpointException("write", full)

    assert try_on_all_ranks(work) == "No space left on device"


class FullDisk(TrainerCallback):
    """From step 3 to step 4 the kernel refuses to write files beyond 40 KB (EFBIG)."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        limit = 40_000 if state.global_step + 1 in (3, 4) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.fixture
def full_disk(monkeypatch):
    add_callback(FullDisk(), monkeypatch)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if "checkpoint" in p.name)


def test_a_full_disk_stops_the_run_and_it_continues_later(flags, full_disk, tmp_path) -> None:
    with pytest.raises(UserError, match="checkpoint-4 was not saved in .*File too large") as error:
        run(flags, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    whole = run(flags, tmp_path / "whole", "--save_strategy", "no")
    resumed = run(
        flags, tmp_path / "run", "--resume_from_checkpoint", "last", "--on_save_error", "continue"
    )
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_a_full_disk_is_survived(flags, full_disk, tmp_path, capsys) -> None:
    lines = run(flags, tmp_path / "run", "--on_save_error", "continue", "--save_total_limit", "1")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert checkpoints(tmp_path / "run") == ["checkpoint-6"]
    assert "checkpoint-4 was not saved" in capsys.readouterr().out


def test_the_last_whole_checkpoint_stays_while_none_can_be_saved(flags, tmp_path, monkeypatch):
    """With a limit of one: the new checkpoint fails, so the old one is all there is."""
    free = save.shutil.disk_usage

    def little(path):
        saved = (Path(path) / "checkpoint-2").exists()
        return free(path)._replace(free=10**4 if saved else 10**9)

    monkeypatch.setattr(save.shutil, "disk_usage", little)
    run(flags, tmp_path / "run", "--on_save_error", "continue", "--save_total_limit", "1")
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_what_a_full_disk_raises_is_known(tmp_path) -> None:
    """Each library says it in its own way; nothing else is taken for a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(RuntimeError) as torch_error:
            torch.save(torch.zeros(10_000), tmp_path / "a.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert disk_problem(torch_error.value)
    with pytest.raises(OSError, match="GiB needed") as space:
        require_space(tmp_path, 2**60)
    assert disk_problem(space.value)
    rust = Exception("Error while saving: No space left on device (os error 28)")  # tokenizers'
    assert disk_problem(rust) == "No space left on device"
    assert disk_problem(RuntimeError("basic_ios::clear: iostream error"))
    with pytest.raises(ValueError) as wrapped:
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError as error:
            raise ValueError("could not write the file") from error
    assert disk_problem(wrapped.value) == "Disk quota exceeded"
    assert disk_problem(RuntimeError("CUDA error: an illegal memory access")) is None
    assert disk_problem(ValueError("shapes differ")) is None


def test_rotation_deletes_the_oldest_and_keeps_the_best(tmp_path) -> None:
    for step in (8, 10, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path, 2, {tmp_path / "checkpoint-10", tmp_path / "checkpoint-4"})
    assert checkpoints(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    rotate(tmp_path, 1, {tmp_path / "checkpoint-10", tmp_path / "checkpoint-4"})
    assert checkpoints(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    rotate(tmp_path, None, set())
    assert checkpoints(tmp_path) == ["checkpoint-10", "checkpoint-4"]


def test_final_reports_a_full_disk(flags, tmp_path, monkeypatch) -> None:
    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *args, **kwargs) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

    add_callback(AtTheEnd(), monkeypatch)
    try:
        with pytest.raises(UserError, match="final was not saved in"):
            run(flags, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert not (tmp_path / "run" / "final").exists()
    assert checkpoints(tmp_path / "run") == ["checkpoint-4", "checkpoint-6"]
    assert load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    assert len(logged(tmp_path / "run")) == 6
