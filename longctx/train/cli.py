"""The command line `longctx COMMAND ...`. The file train.py of a clone runs `longctx train`.

A command is a module with `main(argv)`; its docstring's first line is its help. Modules are
imported when they are called, so `longctx report` does not wait for torch.

`longctx train` may be one of several processes. Any other command is one process, also in a job or
a shell that a launcher made for several: what torchrun, `accelerate launch`, MPI and Slurm say in
the environment is not for it. With it, transformers would wait for a process group whose other
members nobody started.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from longctx.constants import __version__
from longctx.errors import UserError, say
from longctx.train.program import importing, program

COMMANDS = {
    "cache": "longctx.train.data.pack.prune",
    "doctor": "longctx.train.report.doctor",
    "eval": "longctx.train.report.evaluate",
    "help": "longctx.train.commands.help_pages",
    "merge": "longctx.train.lora.merge",
    "plan": "longctx.train.report.plan",
    "recipes": "longctx.train.commands.recipes",
    "report": "longctx.train.report.report",
    "train": "longctx.train.commands.train",
    "verify": "longctx.train.output.verify",
}
"""Command -> module."""
LAUNCHED = {"train"}
"""Commands that launchers start, as one of several processes."""
LAUNCHERS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME|NPROC|NNODES"
    r"|MPI_LOCAL.*|(TORCHELASTIC|ACCELERATE|FSDP|PARALLELISM_CONFIG|OMPI|PMI|PMIX|MV2|SLURM)_.*)"
)
"""Names in the environment that say what one of several processes is to do."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the console command."""
    with program():
        run(list(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> None:
    """Raises UserError for an unknown command, and what a command raises."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    if argv[0] in ("-V", "--version", "version"):
        say(f"longctx {__version__}")
        return
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0].strip().lower(), COMMANDS, n=1)
        guess = f"did you mean longctx {near[0]}?" if near else "`longctx --help` lists all"
        raise UserError(f"unknown command {argv[0]!r}; {guess}")
    if sys.flags.optimize > 1:
        raise UserError(
            "transformers needs its docstrings, which PYTHONOPTIMIZE=2 and python -OO remove: "
            "start without them"
        )
    with nullcontext() if argv[0] in LAUNCHED else started_alone():
        with importing():
            command = importlib.import_module(COMMANDS[argv[0]])
        command.main(argv[1:])


@contextmanager
def started_alone() -> Iterator[None]:
    """Hides a launcher's variables from what runs within."""
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if LAUNCHERS.fullmatch(name)}
    try:
        yield
    finally:
        os.environ |= hidden


def usage() -> str:
    lines = ["usage: longctx COMMAND ...", ""]
    for name, module in COMMANDS.items():
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin  # read, not imported: that would load torch
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        lines.append(f"  {name:10} {(ast.get_docstring(tree) or '').splitlines()[0]}")
    return "\n".join(
        [
            *lines,
            "",
            "longctx COMMAND --help shows a command's options, longctx help lists the pages of the",
            "documentation, longctx --version shows the version.",
        ]
    )


if __name__ == "__main__":
    main()
