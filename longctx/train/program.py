"""How `longctx COMMAND` ends: one line for bad input, a signal's status for a signal.

    UserError, a wrong option    `error: ...` on stderr, status 1
    Ctrl-C                       `interrupted`, status 130; during training it saves (interrupts.py)
    SIGTERM, SIGHUP              status 143 and 129; what is open is closed, temporary files deleted

What is printed may be lost on the way: a closed pipe or a full disk ends nothing. Libraries may log
a stranger's names, so all of a line but its colours is escaped. Imports nothing heavy, so that a
command is guarded before it imports torch.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, NoReturn

from longctx.errors import UserError, on_terminal, printable, survive_lost_output
from longctx.noise import hide_noise
from longctx.train.safety.exhausted import refusal


@contextmanager
def program() -> Iterator[None]:
    """Surrounds all that a program does. Signals are heard as before when it ends."""
    survive_lost_output()
    hide_noise()
    if not on_terminal():
        os.environ |= dict.fromkeys(_BARS, "1")
    records = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_Record)
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in heard}
    try:
        with _no_signal_lost():
            _check_folder()
            yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if (line := refusal(error)) is None:
            raise
        sys.exit(f"error: {UserError(line)}")
    finally:
        logging.setLogRecordFactory(records)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_signal_lost() -> Iterator[None]:
    """Sends a signal once more whose exception Python has dropped.

    Python prints and drops what is raised in a `__del__` or the callback of a weak reference. A run
    that heard Ctrl-C in the `__del__` of a pattern that regex compiled went on to its last step and
    ended with status 0.
    """
    before, again = sys.unraisablehook, []

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        number = _signal_of(dropped.exc_value)
        if number is None:
            before(dropped)
            return
        # From another thread and a moment later: what is raised in this hook is dropped, too.
        again.append(Timer(0.01, os.kill, (os.getpid(), number)))
        again[-1].daemon = True
        again[-1].start()

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in again:
            timer.cancel()


def _signal_of(error: BaseException | None) -> int | None:
    """Returns the signal that was heard as this exception: Python's own handler's, or
    `_leave`'s."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    codes = {128 + number: number for number in (signal.SIGTERM, signal.SIGHUP)}
    code = error.code if isinstance(error, SystemExit) else None
    return codes.get(code) if isinstance(code, int) else None


def _check_folder() -> None:
    """Raises UserError where the current folder is gone: the imports of torch and transformers ask
    for it, and end without a word of what is wrong."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the current folder cannot be used ({error.strerror}): go to another one with cd"
        ) from error


_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables that libraries read when they are imported: in a file a bar is a line for each time
that it is drawn."""


@contextmanager
def importing() -> Iterator[None]:
    """Surrounds heavy imports, of which nothing is garbage: collecting it takes 1 s of the 6 s of
    transformers' Trainer and its options."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def started_as(launcher: str = "") -> str:
    """Returns how training is started here, for lines that name the command: `python train.py` if
    that file of a clone runs, else `longctx train`; after a launcher in the form that it takes."""
    clone = Path(sys.argv[0]).name == "train.py"
    if launcher:
        return f"{launcher} {'train.py' if clone else '-m longctx train'}"
    return "python train.py" if clone else "longctx train"


_LAYOUT = re.compile(r"(\x1b\[[0-9;]*m|[\n\t])")
"""Colours, and what tables of several lines need."""


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        parts = _LAYOUT.split(super().getMessage())
        return "".join(part if n % 2 else printable(part) for n, part in enumerate(parts))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class Parser(argparse.ArgumentParser):
    """Options are spelled out; what is wrong with them is a UserError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UserError(re.sub(r"^argument (--\w+)[^:]*:", r"\1:", message))
