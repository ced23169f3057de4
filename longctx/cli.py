"""`longctx COMMAND ...`: what people run beside train.py.

A command is a module with `main(argv)`; its docstring's first line is its help. Modules are
imported when they are called, so `longctx report` does not wait for torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from longctx.errors import UserError
from longctx.program import program

COMMANDS = {
    "cache": "longctx.data.prune",
    "doctor": "longctx.report.doctor",
    "eval": "longctx.report.evaluate",
    "merge": "longctx.lora.merge",
    "plan": "longctx.report.plan",
    "report": "longctx.report.report",
    "verify": "longctx.output.verify",
}
"""Command -> module."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console command."""
    with program():
        run(list(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> None:
    """Raises UserError for an unknown command, and what a command raises."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.0)[0]
        raise UserError(f"unknown command {argv[0]!r}; did you mean longctx {close}?")
    importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


def usage() -> str:
    lines = ["usage: longctx COMMAND ...", ""]
    for name, module in COMMANDS.items():
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin  # read, not imported: that would load torch
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        lines.append(f"  {name:10} {(ast.get_docstring(tree) or '').splitlines()[0]}")
    return "\n".join([*lines, "", "longctx COMMAND --help shows a command's options."])


if __name__ == "__main__":
    main()
