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
from types import FrameType
from typing import Any, NoReturn

from longctx.errors import UserError, on_terminal, printable, survive_lost_output
from longctx.noise import hide_noise


@contextmanager
def program() -> Iterator[None]:
    """Around all that a program does. Signals are heard as before when it ends."""
    survive_lost_output()
    hide_noise()
    if not on_terminal():
        os.environ |= dict.fromkeys(_BARS, "1")
    records = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_Record)
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in heard}
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        logging.setLogRecordFactory(records)
        for number, handler in before.items():
            signal.signal(number, handler)


_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""What libraries read when they are imported: in a file a bar is a line for each time that it is
drawn."""


@contextmanager
def importing() -> Iterator[None]:
    """Around heavy imports, of which nothing is garbage: collecting it takes 1 s of the 6 s of
    transformers' Trainer and its options."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def started_as(launcher: str = "") -> str:
    """How training is started here, for lines that name the command: `python train.py` for whoever
    runs that file of a clone, else `longctx train`; after a launcher in the form that it takes."""
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
