"""Forks each case from a process that has imported everything and computed nothing, and judges it.

    stdin    a case's id a line
    stdout   {"table", "name", "expected", "outcome", "s", "problems": [...]} a line

The program is what users start: train.py's or `longctx`'s own last lines, its interpreter's exit
included. Whatever a case says, no run may: print a traceback, hang, say an error in more than one
line, exit with 0 without having trained, run what a file holds, publish half a checkpoint, leave
temporary files or processes behind, change an earlier checkpoint, or take memory without bound.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from paths import ROOT
from small_run import compile_patterns, prepare

from hostile.cases import Case
from hostile.files import with_words
from hostile.judge import judge, snapshot
from hostile.tables import CASES
from longctx.train import cli

LIMIT_S = 90
"""A run takes a second; one that is still there then hangs, however loaded the machine is."""
ORPHANS_S = 20
SPACE_BYTES = 3 << 30  # of addresses, beyond the warm process's: a bomb ends before the machine
EARLIER_STEPS = 4
PR_SET_CHILD_SUBREAPER = 36


class Program(BaseException):
    """Unwinds a forked child up to the first frame, where it becomes the program."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


@dataclass
class Ended:
    """How a program ended. A negative status is the signal that killed it."""

    status: int | None
    """None: it hung."""
    s: float
    grown_bytes: int
    orphans: int


class Base:
    """What all cases start from and none may change: a model, data, and an earlier run of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags: list[str] = in_child(lambda: prepare(folder))
        self.flags.insert(self.flags.index("--use_cpu") + 1, "true")
        earlier = [*self.flags, "--output_dir", str(folder / "run")]
        program(["train.py", *earlier, "--max_steps", str(EARLIER_STEPS)], folder)
        (folder / "long.txt").write_text("A sentence of ordinary words, one of many. " * 400)
        self.snapshot = snapshot(folder)

    def words(self, words: list[str], folder: Path) -> list[str]:
        """The whole command line: a case that begins with no program changes the small run."""
        if not words or words[0] not in ("train.py", "longctx"):
            flags = [*self.flags, "--max_steps", "2", "--output_dir", str(folder / "run")]
            flags[flags.index("--cache_dir") + 1] = str(folder / "cache")
            words = ["train.py", *with_words(flags, words)]
        return [
            word.replace("FOLDER", str(folder)).replace("BASE", str(self.folder)) for word in words
        ]


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns (JSON), computed where it starts no thread of ours."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.dup2(2, 1)
        try:
            answer = {"made": work()}
        except BaseException as error:
            answer = {"error": repr(error)}
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    if "error" in answer:
        raise RuntimeError(f"the case cannot be set up: {answer['error'][:300]}")
    return answer["made"]


def program(words: list[str], folder: Path, case: Case | None = None) -> Ended:
    """Runs a program in `folder`, its output in out.txt and err.txt; in the child, raises it."""
    began_s = time.monotonic()
    rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    if not (pid := os.fork()):
        os.setsid()
        torch.set_num_threads(1)  # remakes torch's pool; several threads at once would race for it
        become(folder, case)
        if case and case.shell:
            rss_bytes = 0
            start = ["-m", "longctx"] if words[0] == "longctx" else [str(ROOT / words[0])]
            line = shlex.join([sys.executable, *start, *words[1:]])
            script = case.shell.replace("PROGRAM", line).replace("FOLDER", str(folder))
            os.execvp("bash", ["bash", "-o", "pipefail", "-c", script])
        raise Program(words)
    handle = os.pidfd_open(pid)
    hangs = not select.select([handle], [], [], LIMIT_S)[0]
    os.close(handle)
    if hangs:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return Ended(
        status=None if hangs else os.waitstatus_to_exitcode(status),
        s=time.monotonic() - began_s,
        grown_bytes=usage.ru_maxrss * 1024 - rss_bytes,
        orphans=reap_orphans(pid),
    )


def become(folder: Path, case: Case | None) -> None:
    """Makes the forked process one that a shell has just started in a home of its own."""
    for name in ("tmp", "home"):
        (folder / name).mkdir(exist_ok=True)
    os.environ |= {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home")}
    tempfile.tempdir = None
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, handle in (("out.txt", 1), ("err.txt", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not (case and case.shell):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        space_bytes = pages * resource.getpagesize() + SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (space_bytes, space_bytes))
    for circumstance in case.circumstances if case else ():
        circumstance(folder)
    sys.stdout, sys.stderr = standard_stream(1, "strict"), standard_stream(2, "backslashreplace")


def standard_stream(handle: int, errors: str) -> Any:
    """As the interpreter makes it: None for one that is closed."""
    try:
        return open(handle, "w", buffering=1, errors=errors, closefd=False)
    except OSError:
        return None


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def reap_orphans(group: int) -> int:
    """Waits for what a program left running; how many had to be killed. The kernel hands orphans
    to this process (PR_SET_CHILD_SUBREAPER)."""
    until_s = time.monotonic() + ORPHANS_S
    while children() and time.monotonic() < until_s:
        if os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.01)
    left = children()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(left)


def run_case(case: Case, base: Base, folder: Path) -> dict[str, Any]:
    """How it ended, and what of that must not be. Raises where the case cannot be set up."""
    folder.mkdir()
    shutil.copytree(base.folder / "cache", folder / "cache")
    words = base.words(in_child(lambda: case.make(folder)), folder)
    earlier = snapshot(folder)
    ended = program(words, folder, case)
    outcome, problems = judge(case, words, folder, earlier, ended, base.folder / "model")
    if (now := snapshot(base.folder)) != base.snapshot:
        base.snapshot = now
        problems.append("it wrote into the files of other cases")
    return {"outcome": outcome, "s": round(ended.s, 2), "problems": problems}


def clear(folder: Path) -> None:
    """Deletes a case's folder, with what it mounted and made undeletable."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount).is_relative_to(folder):
            subprocess.run(["umount", "-l", mount], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["chattr", "-R", "-f", "-i", "-a", str(folder)])
        shutil.rmtree(folder)


def serve(root: Path) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Whoever started the tests may ignore them (a job in the background, nohup).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    compile_patterns()
    gc.freeze()  # or every child's first collection copies the memory of all that was imported
    cases = {case.id: case for case in CASES}
    (root / "base").mkdir()
    base = Base(root / "base")
    for number, line in enumerate(requests()):
        case = cases[json.loads(line)]
        row: dict[str, Any] = {"table": case.table, "name": case.name}
        row |= {"expected": str(case.expected), "outcome": "", "s": 0.0, "problems": []}
        try:
            row |= run_case(case, base, root / str(number))
        except Exception as error:
            if os.getpid() != SERVER:  # the program: its traceback is for the judge
                raise
            row["problems"] = [f"{type(error).__name__}: {error}"[:500]]
        finally:
            if os.getpid() == SERVER and "HOSTILE_KEEP" not in os.environ:
                clear(root / str(number))
        print(json.dumps(row), flush=True)


def requests() -> Iterator[str]:
    """Unbuffered: a forked child has no part of a line."""
    pending = b""
    while block := os.read(0, 1 << 16):
        *lines, pending = (pending + block).split(b"\n")
        yield from (line.decode() for line in lines)


def start(words: list[str]) -> None:
    """The program, as its own interpreter would run it."""
    name, sys.argv = words[0], words
    if name == "longctx":
        cli.main(words[1:])
    else:
        runpy.run_path(str(ROOT / name), run_name="__main__")


SERVER = os.getpid()


def end(words: list[str]) -> NoReturn:
    """Runs the program and ends the process as the interpreter would, but for the destruction of
    all that was imported, which takes longer than the run."""
    status = 0
    try:
        start(words)
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        status = 1
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status)


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]))
        os._exit(0)
    except Program as program_:
        words_ = program_.words
    end(words_)
