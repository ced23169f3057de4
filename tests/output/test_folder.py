"""One run at a time in a folder, which never overwrites another by accident."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import PYTHONPATH

from longctx.config import TrainArguments
from longctx.engines.fsdp import FSDP2
from longctx.engines.plain import Plain
from longctx.errors import UserError
from longctx.output.folder import (
    check_disk_space,
    check_output_dir,
    clear_output_dir,
    lock_folder,
)
from longctx.output.removal import staging_path
from longctx.output.resume import resolve_resume

HOLD = (
    "import sys, time, os, pathlib; from longctx.output.folder import lock_folder;"
    "lock = lock_folder(pathlib.Path(sys.argv[1])); child = os.fork();"
    "child and print('held', flush=True); time.sleep(60)"
)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*--output_dir"):
            lock_folder(tmp_path)
        holder.kill()  # its forked child, like a data loader's worker, lives on
        holder.wait()
        lock_folder(tmp_path).close()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write to"):
        lock_folder(tmp_path / "missing")


def arguments(output_dir: Path, **changes) -> TrainArguments:
    return TrainArguments(output_dir=str(output_dir), use_cpu=True, **changes)


def test_leftovers_of_a_killed_run_are_swept_up(tmp_path: Path) -> None:
    staging = staging_path(tmp_path / "checkpoint-5")
    staging.mkdir()
    (staging / "model.safetensors").write_text("half")
    with pytest.raises(UserError, match="holds no checkpoint-N"):
        resolve_resume(arguments(tmp_path, resume_from_checkpoint="last"))
    clear_output_dir(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_refused_resumed_or_overwritten(tmp_path: Path) -> None:
    old = tmp_path / "checkpoint-3"
    old.mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--overwrite_output_dir"):
        check_output_dir(tmp_path, arguments(tmp_path), None)
    check_output_dir(tmp_path, arguments(tmp_path), old)
    (old / "trainer_state.json").write_text('{"global_step": 3}')
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
    copies = Plain().checkpoint_copies(arguments(tmp_path), torch.float32)
    check_disk_space(tmp_path, 2**20, copies, arguments(tmp_path))
    free_mib["value"] = 3
    with pytest.raises(UserError, match="no space for the checkpoint"):
        check_disk_space(tmp_path, 2**20, copies, arguments(tmp_path))
    check_disk_space(tmp_path, 2**20, copies, arguments(tmp_path, save_only_model=True))
    args = arguments(tmp_path)
    args.bf16, free_mib["value"] = True, 6
    copies = FSDP2().checkpoint_copies(args, torch.bfloat16)  # weights and Adam are in fp32
    with pytest.raises(UserError, match="no space for the checkpoint"):
        check_disk_space(tmp_path, 2**20, copies, args)
    free_mib["value"] = 7
    check_disk_space(tmp_path, 2**20, copies, args)
