"""Compares checkpoints and models with the checksums that were written while they were saved.

    longctx verify runs/longctx                   every checkpoint-N and final in a run's folder
    longctx verify runs/longctx/checkpoint-100    one of them

Reads all of it, as fast as the disk does. The exit status is 1 if anything is damaged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from longctx.errors import UserError, many, say, shortened
from longctx.train.output import ABANDONED, FINAL, MANIFEST, checkpoints
from longctx.train.output.manifest import Damaged, check_files, unlisted
from longctx.train.program import Parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="longctx verify", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    args = parser.parse_args(argv)
    damaged = 0
    for name in args.folders:
        for folder in published(Path(os.path.expanduser(name))):
            damaged += not verify(folder)
    if damaged:
        sys.exit(1)


def published(folder: Path) -> list[Path]:
    """Returns the folder itself, or the published folders in it. Raises UserError where there is
    none."""
    if not os.path.isdir(folder):  # False for a name too long, where Path.is_dir raises
        raise UserError(f"{folder} is no folder: give a run's --output_dir or a checkpoint-N")
    if os.path.lexists(folder / MANIFEST):
        return [folder]
    inside = [*checkpoints(folder), *sorted(folder.glob(f"{ABANDONED}*")), folder / FINAL]
    found = [path for path in inside if path.is_dir()]
    if not found:
        raise UserError(f"{folder} holds no checkpoint-N, no {FINAL} and no {MANIFEST}")
    return found


def verify(folder: Path) -> bool:
    """Prints one line; whether nothing is damaged."""
    try:
        files, others = check_files(folder), unlisted(folder)
    except Damaged as problem:
        say(f"{folder}: DAMAGED: {problem}")
        return False
    whole = f"{many(files or 0, 'file')} {'is' if files == 1 else 'are'} whole"
    said = "no manifest.json" if files is None else whole
    if others:
        said += f", and {shortened(', '.join(others))}: not saved with them"
    say(f"{folder}: {said}")
    return True
