"""Hides lines of other libraries that mean nothing to a user of longctx, recognised by their words.
All other lines of these libraries still show.

    DeepSpeed's greeting    accelerate imports DeepSpeed wherever it is installed; a run that asks
                            for it shows the line
    the padding token       transformers says that it took the tokenizer's; packed rows need none
    a deprecated name       of transformers, which PEFT uses
    a kernel for CPUs       which bitsandbytes looks for on some CPUs, and does without
    a report of loading     in which a checkpoint lacks only the head of rewards: longctx prints a
                            line about this
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class _LeftOut(logging.Filter):
    """Drops records whose message begins with the pattern, colours left out."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.pattern.match(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()))


_GREETING = _LeftOut(r"Setting (accelerator|ds_accelerator) to ")
_PADDING = _LeftOut(r"The tokenizer has new .* Updated tokens: {'pad_token_id': \d+}\.$")
_CPU_KERNEL = _LeftOut(r"Failed to load CPU gemm_4bit_forward from kernels-community: ")
_HIDDEN = {
    "DeepSpeed": _GREETING,
    "transformers.trainer_utils": _PADDING,
    "bitsandbytes.backends.cpu.ops": _CPU_KERNEL,
}


def hide_noise() -> None:
    """Hides these lines from now on, in the whole program."""
    for name, left_out in _HIDDEN.items():
        logging.getLogger(name).addFilter(left_out)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hides these lines while longctx imports other libraries in a foreign program; afterwards all
    loggers are as before."""
    filters = {name: _LeftOut(left_out.pattern.pattern) for name, left_out in _HIDDEN.items()}
    for name, left_out in filters.items():
        logging.getLogger(name).addFilter(left_out)
    try:
        yield
    finally:
        for name, left_out in filters.items():
            logging.getLogger(name).removeFilter(left_out)


def show_greeting() -> None:
    """Shows DeepSpeed's greeting again, in a run that asks for DeepSpeed."""
    logging.getLogger("DeepSpeed").removeFilter(_GREETING)


@contextmanager
def hidden_report(weight: str) -> Iterator[None]:
    """Hides transformers' report of loading if it says only that this weight is missing."""
    rows = rf"Key +\|.*\n[-+]+\n{re.escape(weight)} +\| MISSING +\|[ |]*\n(?!.*\|)"
    left_out = _LeftOut(rf"\w+ LOAD REPORT from: .*\n{rows}")
    loggers = [logging.getLogger(f"transformers.{name}") for name in _REPORTERS]
    for logger in loggers:
        logger.addFilter(left_out)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(left_out)


_REPORTERS = ("modeling_utils", "utils.loading_report")
"""The loggers of transformers that write the report."""
