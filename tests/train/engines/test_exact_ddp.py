"""Exact states in two processes, without DDP's wrapper: one run, wherever the states live.

Two processes average in fp32 what backward gives each of them in bf16; one process with their rows
in one batch rounds the sum once. So gradients differ by roundings of bf16, and Adam makes a step of
full size of each, however small: no fixed tolerance of weights can be derived. Both are therefore
compared with the same run in fp32, and two processes may be no further from it than one is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import exact_jobs
import pytest
import torch
from safetensors.torch import load_file
from small_job import launch, lines_of, run
from small_run import import_late, prepare
from torch import Tensor

from exactness import FACTOR, FLOOR, relative_error
from longctx.kernels.adamw import split_master

pytestmark = pytest.mark.ci
WORDS = "--max_steps 4 --dtype bfloat16 --lr_scheduler_type cosine --save_total_limit 0"
WEIGHTS = "model.safetensors"
ACCUMULATED = "--gradient_accumulation_steps 2"
JOBS = {
    "gpu": (2, "--place gpu"),
    "host": (2, "--place host"),
    "vanilla": (2, "--class_type vanilla --place host"),
    "accumulated": (2, f"--place gpu {ACCUMULATED}"),
    "accumulated on the host": (2, f"--place host {ACCUMULATED}"),
    "one": (1, "--per_device_train_batch_size 2"),
    "fp32": (1, "--per_device_train_batch_size 2 --dtype float32 --optimizer_states fp32"),
    "two in fp32": (2, "--dtype float32 --place host"),
    "masters": (2, "--place host --save_fp32"),
    "broken, skipped": (2, "--place host --on_nonfinite skip --save_steps 1"),
    "broken, stopped": (2, "--place host --on_nonfinite stop"),
}
BREAKS = {name: (1, 2) for name in JOBS if name.startswith("broken")}
"""Rank and step of an infinite gradient."""
RESUMED = {"resumed": "gpu", "resumed on the host": "host"}
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, plain_kernels) -> tuple[Path, dict[str, list[int]]]:
    """All runs, and the exit statuses of their processes."""
    folder = tmp_path_factory.mktemp("exact")
    flags = [*prepare(folder), *WORDS.split()]

    def job(name: str, processes: int, words: str) -> dict[str, object]:
        own = ["--output_dir", str(folder / name), *words.split()]
        return {"processes": processes, "flags": [*flags, *own], "breaks": BREAKS.get(name)}

    jobs = {name: job(name, *how) for name, how in JOBS.items()}
    for name, place in RESUMED.items():
        checkpoint = folder / {"gpu": "host", "host": "gpu"}[place] / "checkpoint-2"
        jobs[name] = job(name, 2, f"--place {place} --resume_from_checkpoint {checkpoint}")
    import_late()
    gc.freeze()
    return folder, {name: exact_jobs.run(job) for name, job in jobs.items()}


@pytest.fixture
def whole(ran) -> Folder:
    """The folder of a run that ended well."""

    def whole(name: str) -> Path:
        folder, statuses = ran
        assert not any(statuses[name]), log(folder, name, statuses[name].index(1))
        return folder / name

    return whole


def log(folder: Path, name: str, rank: int) -> str:
    return (folder / f"{name}-{rank}.log").read_text()[-3000:]


def seen(folder: Path, rank: int) -> dict[str, Tensor]:
    """The weights after each step, as a process sees them."""
    return load_file(folder.with_name(f"{folder.name}-{rank}.safetensors"))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def states(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.parametrize("name", ["gpu", "host", "vanilla", "accumulated on the host"])
def test_processes_have_the_same_weights_after_each_step(whole, name) -> None:
    folder = whole(name)
    first, second = seen(folder, 0), seen(folder, 1)
    assert {key.split()[0] for key in first} == {"1", "2", "3", "4"}
    assert_equal(first, second)


@pytest.mark.parametrize(
    ("gpu", "host"), [("gpu", "host"), ("accumulated", "accumulated on the host")]
)
def test_places_change_no_bit(whole, gpu, host) -> None:
    for name in ("checkpoint-2", "checkpoint-4", "final"):
        assert states(whole(host) / name) == states(whole(gpu) / name) != {}
    assert_equal(seen(whole(host), 0), seen(whole(gpu), 0))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_in_the_other_place(whole, name) -> None:
    assert states(whole(name) / "checkpoint-4") == states(whole("gpu") / "checkpoint-4")
    assert states(whole(name) / "final") == states(whole("gpu") / "final")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder) if "loss" in line]


def moved(folder: Path, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far training has moved each weight."""
    weights = load_file(folder / "final" / WEIGHTS)
    return {name: weight.double() - start[name].double() for name, weight in weights.items()}


def test_two_processes_are_one_with_all_rows(ran, whole) -> None:
    start = load_file(ran[0] / "model" / WEIGHTS)
    ours, theirs, truth = (moved(whole(name), start) for name in ("gpu", "one", "fp32"))
    for name in truth:
        error, naive = (relative_error(x[name], truth[name]) for x in (ours, theirs))
        assert error <= FACTOR * naive + FLOOR[torch.bfloat16], name
    assert losses(whole("gpu")) == pytest.approx(losses(whole("one")), rel=2**-8)


def test_in_fp32_they_differ_by_the_order_of_sums(ran, whole) -> None:
    start = load_file(ran[0] / "model" / WEIGHTS)
    ours, truth = (moved(whole(name), start) for name in ("two in fp32", "fp32"))
    for name in truth:
        assert relative_error(ours[name], truth[name]) <= 2 * FLOOR[torch.float32], name


def test_masters_of_two_processes(whole) -> None:
    fine, rounded = (load_file(whole(n) / "final" / WEIGHTS) for n in ("masters", "gpu"))
    for name, weight in fine.items():
        assert torch.equal(split_master(weight)[0], rounded[name]), name


BROKEN = "step 2 is not finite: first in the gradient of model.layers.1.mlp.up_proj.weight, in the"


def test_a_step_that_one_process_breaks_is_skipped_by_both(ran, whole) -> None:
    folder = whole("broken, skipped")
    assert BROKEN in log(ran[0], "broken, skipped", 0)
    weights = seen(folder, 0)
    assert_equal(weights, seen(folder, 1))
    steps = [{k[2:]: w for k, w in weights.items() if k[0] == step} for step in "1234"]
    assert_equal(steps[0], steps[1])
    assert not any(torch.equal(weight, steps[2][name]) for name, weight in steps[1].items())
    assert states(folder / "checkpoint-1") == states(folder / "checkpoint-2")


def test_a_step_that_one_process_breaks_stops_both(ran) -> None:
    folder, statuses = ran
    assert statuses["broken, stopped"] == [1, 1]
    for rank in (0, 1):
        assert f"UserError: {BROKEN}" in log(folder, "broken, stopped", rank)
    assert not list((folder / "broken, stopped").glob("checkpoint-*"))


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path) -> None:
    """Over NCCL: states on GPUs and on the host are one run, also resumed in the other place."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    flags = [word for word in prepare(tmp_path) if word != "--use_cpu"] + WORDS.split()
    resumed = ["--resume_from_checkpoint", str(tmp_path / "gpu" / "checkpoint-2")]
    for name, words in {
        "gpu": ["--place", "gpu"],
        "host": ["--place", "host"],
        "resumed": ["--place", "host", *resumed],
    }.items():
        own = ["--output_dir", str(tmp_path / name), *words]
        run(launch(2, "train.py", *flags, *own), gpus=2)
    for name in ("checkpoint-4", "final"):
        one, *others = (states(tmp_path / run / name) for run in ("gpu", "host", "resumed"))
        assert one and all(other == one for other in others)
