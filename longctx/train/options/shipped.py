"""Files that come with longctx: recipes, scripts with TRL's trainers, settings of engines, and the
pages of the documentation.

In a clone they lie in recipes/, ds_configs/, fsdp_configs/ and docs/, to which share/ has links; in
a wheel share/ has these folders themselves. An option of such a file takes its name, with or
without folder and suffix: `--config quickstart` and `--config recipes/quickstart.yaml` work in any
folder.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from longctx.errors import UserError, did_you_mean, say

SHARE = Path(__file__).parents[2] / "share"
OPTIONS = {
    "config": ("recipes", ".yaml"),
    "deepspeed": ("ds_configs", ".json"),
    "fsdp_config": ("fsdp_configs", ".json"),
}
"""Option -> folder and suffix of the files that it may name."""
LISTED = "`longctx recipes` lists all"
"""The end of a line about an unknown name."""


def files(folder: str, suffix: str = "") -> list[Path]:
    """Returns the files of a folder in share/, by name."""
    return sorted(p for p in (SHARE / folder).iterdir() if p.is_file() and p.name.endswith(suffix))


def find(option: str, written: str) -> Path:
    """Returns the user's own file, or else ours of that name. Raises UserError for a mere name that
    neither has; any other path is for the option to read."""
    path = Path(written)
    folder, suffix = OPTIONS[option]
    if os.path.exists(path) and not path.is_dir() or path.parent not in (Path(), Path(folder)):
        return path
    ours = {name: file for file in files(folder, suffix) for name in (file.name, file.stem)}
    if path.name in ours:
        if path.parent == Path() and os.path.isfile(f"{path}{suffix}"):
            _say_which(option, written, suffix)
        return ours[path.name]
    if os.path.isdir(path):  # False for a name too long, where Path.is_dir raises
        return path
    raise UserError(
        f"--{option}: cannot read {path}: no such file here or among longctx's own"
        f"; {did_you_mean(path.name, ours)}{LISTED}"
    )


@cache
def _say_which(option: str, written: str, suffix: str) -> None:
    """Says once that a name is that of longctx's own file, where the user has one beside it, as
    `longctx recipes NAME > NAME.yaml` makes it."""
    if os.environ.get("RANK", "0") == "0":
        say(
            f"--{option} {written} is the file that comes with longctx; "
            f"write --{option} {written}{suffix} for the one in this folder",
            file=sys.stderr,
        )
