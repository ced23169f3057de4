"""The words of the tables: a case is its files and flags, what must happen, and circumstances.

    "seq_len is zero": (given("--seq_len 0"), fails("--seq_len must be at least 1, got 0")),
    "TERM in step 2": (given(""), ends(143, "stopped by SIGTERM"), at(step(2), send("TERM"))),

A circumstance is done to the program's process before its first line. Moments are places in the
order of what the program does, never times, so that a slow or busy machine changes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import importlib
import os
import resource
import signal
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

Make = Callable[[Path], list[str]]
"""Writes files into a case's folder; returns the program's words."""
Circumstance = Callable[[Path], None]
Action = Callable[[], None]
Moment = Callable[[Action], None]


# --- what must happen ------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """How the program must end."""

    status: int
    says: str
    """A regular expression of the one error line, or of what is printed."""
    steps: int | None = None
    """The run trained so many, changed the weights and left a whole final/."""
    leaves: tuple[str, ...] | None = None
    """Checkpoints, final and folders set aside in the output folder at the end."""
    keeps: tuple[str, ...] = ()
    """Temporary names that may stay, because nobody can delete them."""
    one_line: bool = False
    """It says what is wrong in one line on stderr that begins with `error: `."""
    later: bool = False
    """Only the model, the data or the machine show what is wrong: the options alone are taken."""

    def __str__(self) -> str:
        kind = {0: "prints" if self.steps is None else "works", 1: "fails"}.get(self.status)
        return f"{kind or f'ends {self.status}'}: {self.says}"

    def leaving(self, *names: str) -> Expected:
        return replace(self, leaves=names)

    def keeping(self, *names: str) -> Expected:
        return replace(self, keeps=names)


def fails(says: str) -> Expected:
    """One line on stderr that begins with `error: `, exit status 1, nothing left behind."""
    return Expected(1, says, one_line=True)


def fails_later(says: str) -> Expected:
    """The same for options that are refused when the model, the data or the machine is known."""
    return replace(fails(says), later=True)


def finds(says: str) -> Expected:
    """A command that looked and found something wrong: exit status 1, and what it prints."""
    return Expected(1, says)


def works(says: str = "", steps: int = 2) -> Expected:
    """A run that trains all its steps."""
    return Expected(0, says, steps)


def prints(says: str = "") -> Expected:
    """Something that is no training run, and ends well."""
    return Expected(0, says)


def ends(status: int, says: str = "") -> Expected:
    """128 + a signal's number, by the program's own will; minus the number if it was killed."""
    return Expected(status, says)


@dataclass(frozen=True)
class Case:
    table: str
    name: str
    make: Make
    expected: Expected
    circumstances: tuple[Circumstance, ...] = ()
    shell: str | None = None
    """A line for bash in which PROGRAM stands for a fresh process; else a warm one is forked."""
    lost_output: bool = False
    """What is printed goes where nobody can read it."""

    @property
    def id(self) -> str:
        return f"{self.table}: {self.name}"

    @property
    def of_options(self) -> bool:
        """Refused for its options: tests/train/options/test_config.py tries the rules of these
        without a run."""
        refused = self.expected.one_line and not self.circumstances
        return self.table in ("flags", "recipes") and refused


def table(name: str, rows: dict[str, tuple[Any, ...]]) -> list[Case]:
    cases = []
    for title, (make, expected, *how) in rows.items():
        shell = next((word for word in how if isinstance(word, str)), None)
        around = tuple(word for word in how if callable(word))
        lost = any(getattr(word, "loses_output", False) for word in around)
        printable = title.encode("unicode_escape").decode()
        cases.append(Case(name, printable, make, expected, around, shell, lost))
    return cases


# --- moments ---------------------------------------------------------------------------------


def at(moment: Moment, *actions: Action) -> Circumstance:
    """Does `actions` at the moment, once."""

    def install(folder: Path) -> None:
        left = list(actions)

        def act() -> None:
            while left:
                left.pop(0)()

        moment(act)

    return install


def always(moment: Moment, action: Action) -> Circumstance:
    """Does `action` whenever the moment comes."""
    return lambda folder: moment(action)


def step(number: int) -> Moment:
    """Within a step: gradients are there, weights are old."""
    return on("on_pre_optimizer_step", lambda state: state.global_step + 1 == number)


def on(event: str, when: Callable[[Any], bool] = lambda state: True) -> Moment:
    """An event of transformers' callbacks."""

    def install(act: Action) -> None:
        from small_run import add_callback
        from transformers import TrainerCallback

        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if when(state):
                act()

        add_callback(type("At", (TrainerCallback,), {event: method})())

    return install


def before(function: str) -> Moment:
    """Before a function is called, by its full name."""

    def install(act: Action) -> None:
        owner_name, _, name = function.rpartition(".")
        owner = find_named(owner_name)
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        setattr(owner, name, call)

    return install


def find_named(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        return getattr(find_named(owner), attribute)


def file_event(event: str, pattern: str) -> Moment:
    """Before Python opens (for writing), renames, removes or makes a path like `*/tokens-*`."""
    audited = {"open": "open", "mkdir": "os.mkdir", "rename": "os.rename", "remove": "os.remove"}

    def install(act: Action) -> None:
        pid = os.getpid()

        def audit(name: str, args: tuple[Any, ...]) -> None:
            if name != audited[event] or isinstance(args[0], int) or os.getpid() != pid:
                return
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
                return
            if fnmatch.fnmatchcase(os.fsdecode(args[0]), pattern):
                act()

        sys.addaudithook(audit)

    return install


# --- what happens then -----------------------------------------------------------------------


def send(*names: str) -> Action:
    """Signals, to the program itself."""

    def act() -> None:
        for name in names:
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    return act


def refuse(code: int) -> Action:
    """What Python was about to do with a file fails: EDQUOT, EIO, EROFS, ..."""

    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def limit(file_bytes: int) -> Action:
    """From now on the kernel writes no file beyond so many bytes (EFBIG)."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))


def unlimit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# --- circumstances ---------------------------------------------------------------------------


def from_the_start(*actions: Action) -> Circumstance:
    return lambda folder: [action() for action in actions] and None


def ignoring(*names: str) -> Circumstance:
    """As `nohup` does with HUP."""

    def install(folder: Path) -> None:
        for name in names:
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)

    return install


def _losing(circumstance: Circumstance) -> Circumstance:
    circumstance.loses_output = True  # type: ignore[attr-defined]
    return circumstance


def output_to(*targets: int, device: str) -> Circumstance:
    """stdout (1) and stderr (2) are a device: /dev/full, /dev/null."""

    def install(folder: Path) -> None:
        handle = os.open(device, os.O_WRONLY)
        for target in targets:
            os.dup2(handle, target)

    return _losing(install)


def closed_pipe(*targets: int) -> Circumstance:
    """stdout and stderr are pipes whose reader has gone."""

    def install(folder: Path) -> None:
        reader, writer = os.pipe()
        for target in targets:
            os.dup2(writer, target)
        os.close(reader)

    return _losing(install)


def closed(*handles: int) -> Circumstance:
    """stdin (0), stdout or stderr are closed."""
    return _losing(lambda folder: [os.close(handle) for handle in handles] and None)


class Terminal:
    """A terminal of the program's own. The program holds its other end, so that hanging up is a
    thing it does to itself, at a moment of its own."""

    def __init__(self) -> None:
        self.ours = -1

    def open(self, folder: Path) -> None:
        self.ours, theirs = os.openpty()
        ioctl(theirs, termios.TIOCSCTTY, 0)
        for target in (0, 1, 2):
            os.dup2(theirs, target)
        os.close(theirs)

    def hang_up(self) -> None:
        os.close(self.ours)


def terminal_lost(moment: Moment) -> Circumstance:
    """The program runs in a terminal, which is gone from the moment on."""

    def install(folder: Path) -> None:
        terminal = Terminal()
        terminal.open(folder)
        at(moment, terminal.hang_up)(folder)

    return _losing(install)


CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER = 1, 2, 3


def bound_by_permissions(folder: Path) -> None:
    """As everybody but root is: mode bits hold for this process too."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER):
        for kind in range(3):  # effective, permitted, inheritable
            data[kind] &= ~(1 << capability)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def environment(**variables: str) -> Circumstance:
    return lambda folder: os.environ.update(variables)


def setting(name: str, value: Any) -> Circumstance:
    """Another value of a constant, by its full name: a shorter wait."""

    def install(folder: Path) -> None:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(find_named(owner), attribute), name
        setattr(find_named(owner), attribute, value)

    return install


FULL, QUOTA, IO, READ_ONLY = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS
