"""Deleting what may be a link to a bigger disk, or may not be deleted (immutable, another's, NFS).

A link goes and what it points to stays. What cannot be deleted is said and ends nothing: it has
been renamed before, to a name that is not taken for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from longctx.errors import UserError, print_rank0
from longctx.train.output import STAGING

_PROBE = ".longctx-probe"


def staging_path(path: Path) -> Path:
    """Returns a free name next to `path` to write into or to delete from; what a killed run left
    under it goes first."""
    for number in range(1, 1000):
        suffix = "" if number == 1 else f".{number}"
        staging = path.with_name(f"{STAGING}{path.name}{suffix}")
        if remove(staging) is None:
            return staging
    raise UserError(f"{path.parent} is full of folders that cannot be deleted ({staging.name})")


def remove(path: Path) -> str | None:
    """Deletes a file, a folder or a link, if it is there; None, or what stood in the way."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None


def discard(path: Path) -> None:
    """Deletes what was published; renamed first, so that no half of it looks whole."""
    doomed = staging_path(path)
    target = link_target(path)
    try:
        path.rename(doomed)
    except OSError as error:
        print_rank0(f"{path} could not be deleted: {error.strerror}")
        return
    discard_renamed(doomed, path)
    if target is not None:
        print_rank0(f"{path} was a link: {target} stays, delete it when you need its space")


def link_target(path: Path) -> str | None:
    """Returns where a link points to, even if it leads in a circle; None for what is no link."""
    return os.path.realpath(path) if path.is_symlink() else None


def discard_renamed(doomed: Path, was: Path) -> None:
    if reason := remove(doomed):
        print_rank0(f"{was} could not be deleted whole ({reason}): what is left is {doomed.name}")


def require_removable(paths: list[Path]) -> None:
    """Raises UserError if something in `paths` could not be deleted; deletes nothing.

    Every file is renamed and renamed back, which asks for the same rights on any filesystem.
    """
    try:
        for path in paths:
            for file in [path, *_inside(path)]:
                probe = file.with_name(file.name[:200] + _PROBE)
                file.rename(probe)
                probe.rename(file)
    except OSError as error:
        raise UserError(
            f"--overwrite_output_dir: {error.filename} cannot be deleted ({error.strerror}); "
            "nothing was deleted: make it deletable or choose another --output_dir"
        ) from error


def _inside(folder: Path) -> list[Path]:
    """Returns files at any depth. Raises OSError for a folder that may not be read."""

    def stop(error: OSError) -> None:
        raise error

    if folder.is_symlink() or not folder.is_dir():
        return []
    return [Path(root, name) for root, _, names in os.walk(folder, onerror=stop) for name in names]
