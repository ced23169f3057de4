"""One run at a time in a folder, which never overwrites another by accident."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.errors import UserError
from longctx.train.engines.fsdp import FSDP2
from longctx.train.engines.plain import Plain
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.output.folder import (
    check_disk_space,
    check_output_dir,
    clear_output_dir,
    keep_images,
    lock_folder,
)
from longctx.train.output.inputs import named_inputs
from longctx.train.output.removal import staging_path
from longctx.train.output.resume import resolve_resume


def hold(folder: Path, held: Any) -> None:
    """A run, and a child of its own that lives on, like a data loader's worker."""
    os.setsid()
    lock = lock_folder(folder)
    if os.fork():
        held.set()
    signal.pause()
    lock.close()


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    held = forked.Event()
    holder = forked.Process(target=hold, args=(tmp_path, held))
    holder.start()
    assert holder.pid is not None
    try:
        assert held.wait(60)
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on .*--output_dir"):
            lock_folder(tmp_path)
        holder.kill()
        holder.join()
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


def test_what_is_deleted_is_said(tmp_path: Path, capsys) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    clear_output_dir(tmp_path, None)
    said = f"deleting the earlier run in {tmp_path}: checkpoint-9, checkpoint-10, metrics.jsonl"
    assert capsys.readouterr().out == said + "\n"
    clear_output_dir(tmp_path, None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["final", "checkpoint-7"])
def test_what_no_run_has_saved_is_not_deleted(tmp_path: Path, name) -> None:
    (tmp_path / name).mkdir()
    overwriting = arguments(tmp_path, overwrite_output_dir=True)
    check_output_dir(tmp_path, overwriting, None)
    (tmp_path / name / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=f"{name} holds nothing that a run has saved: move it"):
        check_output_dir(tmp_path, overwriting, None)
    (tmp_path / name / "config.json").write_text("{}")
    check_output_dir(tmp_path, overwriting, None)


INPUTS = {
    # what is named, as seen from the folder that has run/ and kept/ -> whether it would be lost
    "run/final": True,
    "run/final/": True,
    "run/./final/../final/model.safetensors": True,
    "run/checkpoint-2/optimizer.pt": True,
    "run/metrics.jsonl": True,
    "run/checkpoint-2/lr=1": True,
    "run/model": False,  # not what a run saves
    "run/run.json": False,
    "run": False,
    "kept": False,
    "nowhere": False,
    "to_final": True,
    "to_folder_of_run/final": True,
    "to_link/model.safetensors": True,
    "weights": True,  # a folder with a link to weights of final/
    "to_nothing": False,
    "circle": False,
    # final/ may itself be a link to a bigger disk: it goes, and what it points to stays
    "moved/checkpoint-4": True,
    "moved/checkpoint-4/config.json": True,
    "to_moved": True,
    "disk/checkpoint-4": False,
}


@pytest.fixture
def placed(tmp_path: Path, monkeypatch) -> Path:
    """An earlier run, one on another disk, and links to both."""
    for folder in ("run/final", "run/checkpoint-2", "run/model", "kept", "disk/checkpoint-4"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    files = "final/model.safetensors checkpoint-2/optimizer.pt checkpoint-2/lr=1 metrics.jsonl"
    for file in files.split():
        (tmp_path / "run" / file).write_text("")
    links = {
        "to_final": "run/final",
        "to_folder_of_run": "run",
        "to_link": "to_final",
        "weights/model.safetensors": "../run/final/model.safetensors",
        "run/final-of-others": "../kept",
        "moved/checkpoint-4": "../disk/checkpoint-4",
        "to_moved": "moved/checkpoint-4",
        "to_nothing": "gone",
        "circle": "circle",
    }
    for link, target in links.items():
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(("name", "lost"), INPUTS.items())
def test_a_run_never_deletes_what_it_reads(placed: Path, name, lost, relative) -> None:
    output_dir = Path("moved" if "moved" in name or "disk" in name else "run")
    word = name if relative else str(placed / name)
    inputs = named_inputs(["--config", "x", f"--any={word}"])
    args = arguments(output_dir, overwrite_output_dir=True)
    if not lost:
        check_output_dir(output_dir, args, None, inputs)
        return
    with pytest.raises(UserError, match="would be deleted to make way for this run, which reads"):
        check_output_dir(placed / output_dir, args, None, inputs)
    check_output_dir(output_dir, args, output_dir / "checkpoint-2", inputs)  # which deletes nothing


def test_values_of_options_are_inputs_too(placed: Path) -> None:
    """As a recipe gives them."""
    model = ModelArguments(model_name_or_path="run/model", tokenizer_name="kept")
    data = DataArguments(train_file=["run/final", "nowhere"], cache_dir="run/checkpoint-2")
    found = named_inputs([], model, data)
    assert found == list(map(Path, ("run/model", "kept", "run/final", "run/checkpoint-2")))


LEADS = {
    "adapter_config.json": '{"base_model_name_or_path": "run/final"}',
    "preprocessor_config.json": '{"image_processor": {"file": "run/checkpoint-2/p.json"}}',
    "README.md": "---\nconfigs:\n- data_files:\n  - ../run/final/*.parquet\n---\n",
}


@pytest.mark.parametrize("name", LEADS)
def test_what_a_folder_names_is_an_input_too(name, placed: Path) -> None:
    """Through one folder more, which is a link."""
    given, inner = placed / "given", placed / "inner"
    given.mkdir()
    inner.mkdir()
    (placed / "run" / "checkpoint-2" / "p.json").write_text("{}")
    (inner / name).write_text(LEADS[name])
    (given / "link").symlink_to(inner)
    (given / "config.json").write_text('{"_name_or_path": "run/final", "model_type": "llama"}')
    args = arguments(Path("run"), overwrite_output_dir=True)
    with pytest.raises(UserError, match="would be deleted to make way for this run, which reads"):
        check_output_dir(Path("run"), args, None, named_inputs([str(given)]))
    (inner / name).write_text("[")  # its own reader says what is wrong
    check_output_dir(Path("run"), args, None, named_inputs([str(given)]))


def test_images_that_records_name_are_kept(placed: Path) -> None:
    for name in ("run/final/a.png", "run/checkpoint-2/deep/a.png"):
        with pytest.raises(UserError, match="would be deleted to make way for this run, which"):
            keep_images(Path("run"), iter([placed / name]))
    keep_images(Path("run"), iter([placed / "run/images/a.png", placed / "other/a.png"]))


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
