"""Workers: what ends one is said in one line, and none outlives its parent."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from paths import PYTHONPATH
from small_run import prepare, run
from small_tokenizer import small_tokenizer
from torch.utils.data import DataLoader, IterableDataset

from longctx.errors import UserError
from longctx.train.data.pack.cache import remove_leftovers
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.text import tokens
from longctx.train.options.config import DataArguments
from longctx.train.safety.processes import bound_children, explained_workers, make_room_for_workers

pytestmark = pytest.mark.usefixtures("reference_kernels", "heard_signals")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_bad_streamed_record_is_one_line_with_workers_too(tmp_path, workers):
    flags = prepare(tmp_path)
    texts = ["a long text " * 9] * 40 + [None]
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    at = flags.index("--train_file")
    flags[at : at + 2] = ["--dataset_name", str(tmp_path / "saved"), "--streaming"]
    with pytest.raises(UserError) as error:
        run([*flags, "--max_steps", "90", "--dataloader_num_workers", workers], tmp_path / "run")
    assert str(error.value).startswith(f"{tmp_path / 'saved'} streamed record ")
    assert str(error.value).endswith("found `text` (null)")


class Dying(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_loader_worker_is_one_line():
    message = "^a data loader worker was killed, .*: give fewer --dataloader_num_workers or more"
    with pytest.raises(UserError, match=message), explained_workers():
        list(DataLoader(Dying(), num_workers=1))


def test_a_killed_map_worker_is_one_line(tmp_path, monkeypatch):
    test = os.getpid()

    def encode(documents, *args):
        if os.getpid() != test:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tokens, "encode", encode)
    monkeypatch.setattr(tokens, "_processes", lambda *args, **options: 2)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 9)
    with pytest.raises(UserError, match="^a process that tokenises was killed, .* more memory$"):
        build_dataset(
            DataArguments(cache_dir=str(tmp_path / "cache")),
            small_tokenizer(),
            RowOptions(files=[str(tmp_path / "a.jsonl")], seq_len=8, vocab_size=None, seed=0),
        )
    assert not list((tmp_path / "cache").glob("*.tmp"))


@pytest.mark.parametrize("error", [UserError("two\nlines"), RuntimeError("other"), KeyError(1)])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as raised, explained_workers():
        raise error
    assert raised.value is error


# A pool of two, one of them without work, whose parent is killed.
PARENT = """
import os, sys, time
from multiprocess import Pool
from longctx.train.safety.processes import bound_children

with bound_children():
    pool = Pool(2)
print(*(worker.pid for worker in pool._pool), flush=True)
pool.apply_async(time.sleep, (600,))
time.sleep(600)
"""


def test_a_pool_ends_with_its_parent():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHONPATH, *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        workers = list(map(int, run.stdout.readline().split()))
        run.kill()
        assert run.stdout.read() == b""  # ends when the last process that could write has ended
    assert len(workers) == 2


def test_only_what_is_forked_within_is_bound():
    for within in (True, False):
        read, write = os.pipe()
        if (pid := os.fork()) == 0:  # the parent that ends first
            if within:
                with bound_children():
                    child = os.fork()
            else:
                child = os.fork()
            if child == 0:
                signal.pause()
            os.write(write, str(child).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        child = int(os.read(read, 20))
        if within:
            assert os.read(read, 1) == b""  # it has ended, too
        else:
            os.kill(child, signal.SIGKILL)
        os.close(read)


def prepare_data(folder: Path, place: str, processes: int, begun: int) -> None:
    """As train.py does, in one process or two; says when it has come to `place`, and waits."""

    def stop(number, frame):
        raise SystemExit(128 + number)

    def wait(*args, **options):
        os.write(begun, b"begun")
        while True:
            signal.pause()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    setattr(tokens, place, wait)
    tokens._processes = lambda *args, **options: processes or None
    args = DataArguments(cache_dir=str(folder / "cache"))
    files = [str(folder / "c.jsonl")]
    build_dataset(
        args, small_tokenizer(), RowOptions(files=files, seq_len=8, vocab_size=None, seed=0)
    )


@pytest.mark.parametrize(
    ("place", "processes"), [("encode", 0), ("encode", 2), ("pieces_of", 0)], ids=str
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_no_signal_leaves_files_or_processes(tmp_path, place, processes, number):
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "c.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 9)
    begun, begins = os.pipe()
    if (pid := os.fork()) == 0:
        status = 99
        try:
            prepare_data(tmp_path, place, processes, begins)
        except SystemExit as stopped:
            status = stopped.code
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        finally:
            os._exit(status)
    os.close(begins)
    assert os.read(begun, 5) == b"begun"
    assert list((tmp_path / "cache").glob("*.tmp"))
    os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    while os.read(begun, 100):  # ends when the last process has ended
        pass
    os.close(begun)
    if number == signal.SIGKILL:
        assert os.WTERMSIG(status) == number
        for leftover in (tmp_path / "cache").glob("*.tmp"):
            handle = os.open(leftover, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)  # waits: the last process may close this one last
            os.close(handle)
        remove_leftovers(tmp_path / "cache")
    else:
        assert os.WEXITSTATUS(status) == 128 + number
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_workers_get_the_open_files_that_they_need(monkeypatch) -> None:
    allowed = [20, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(allowed))
    monkeypatch.setattr(
        resource, "setrlimit", lambda kind, limits: allowed.__setitem__(0, limits[0])
    )
    make_room_for_workers(0, None)
    assert allowed == [20, 1000]
    make_room_for_workers(8, None)
    assert 160 <= allowed[0] < 300 and allowed[1] == 1000
    with pytest.raises(UserError, match=r"--dataloader_num_workers 64: .* and 1000 are allowed"):
        make_room_for_workers(64, 4)
