"""A rank that is killed or fails in the middle of a step ends the others, with a line (gloo)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from small_run import fork_ranks, prepare
from transformers import TrainerCallback

from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.engines import lost_ranks as peers
from longctx.train.engines.lost_ranks import end_with_peers
from longctx.train.program import program

pytestmark = pytest.mark.ci
TIMEOUT_S = 30
"""Longer than any of this takes, and far below --ddp_timeout."""


def statuses(log: Path, job: Callable[[int], None]) -> list[int]:
    """Those with which two ranks end, without a launcher that would end one for the other."""

    def run(rank: int) -> NoReturn:
        status = 1
        try:
            sys.stderr = log.open("a", buffering=1)
            torch.set_num_threads(1)
            with program():
                job(rank)
            status = 0
        except SystemExit as ending:
            print(ending.code, file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    left, found = set(children := fork_ranks(2, run)), {}
    until = time.monotonic() + TIMEOUT_S
    while left and time.monotonic() < until:
        for child in sorted(left):
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                found[child] = os.waitstatus_to_exitcode(ended[1])
                left.remove(child)
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not left, f"still there after {TIMEOUT_S} s: {log.read_text()[-2000:]}"
    return [found[child] for child in children]


class Fail(TrainerCallback):
    """Between the batches of the second step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == 1 and args.process_index == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = prepare(tmp_path_factory.mktemp("job"))
    flags += ["--max_steps", "3", "--gradient_accumulation_steps", "2", "--save_strategy", "no"]
    flags += ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json"]
    return [*flags, "--sequence_parallel_size", "2"]


@pytest.mark.parametrize(("how", "said"), [("killed", None), ("no memory", "out of memory")])
def test_shared_rows_end_together(how, said, flags: list[str], tmp_path: Path) -> None:
    def job(rank: int) -> None:
        import fsdp_on_cpu  # noqa: F401
        from small_run import add_callback

        add_callback(Fail(how))
        train.main([*flags, "--output_dir", str(tmp_path / "run")])

    first, second = statuses(tmp_path / "log", job)
    assert (first, second) == (1, -signal.SIGKILL if how == "killed" else 1)
    log = (tmp_path / "log").read_text()
    assert "rank 0 lost the others" in log or "rank 0 ends because rank 1 did" in log
    assert said is None or said in log
    assert "Traceback" not in log


def test_a_collective_that_waits_for_ever(tmp_path: Path, monkeypatch) -> None:
    """As NCCL's do: the thread ends the process, whatever the main thread waits for."""
    monkeypatch.setattr(peers, "GRACE_S", 0.1)

    def job(rank: int) -> None:
        dist.init_process_group("gloo")
        with end_with_peers():
            while rank == 0:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

    assert statuses(tmp_path / "log", job) == [1, -signal.SIGKILL]
    assert "rank 0 ends because rank 1 did" in (tmp_path / "log").read_text()


def test_a_bad_row(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        dist.init_process_group("gloo")
        with end_with_peers():
            if rank == 1:
                raise UserError("books.txt line 7 is no text")
            dist.barrier()

    assert statuses(tmp_path / "log", job) == [1, 1]
    log = (tmp_path / "log").read_text()
    assert "error: books.txt line 7" in log and "rank 0 lost the others" in log


def test_ranks_that_are_done_may_end(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        dist.init_process_group("gloo")
        with end_with_peers():
            pass
        time.sleep(0.3 * (1 - rank))

    assert statuses(tmp_path / "log", job) == [0, 0]


def test_a_run_ends_while_workers_of_data_loaders_live() -> None:
    """They are forked, and have every descriptor of their parent."""
    with peers._watched({}):
        worker = os.fork()
        if not worker:
            time.sleep(60)
            os._exit(0)
        began = time.monotonic()
    took = time.monotonic() - began
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert took < 10
