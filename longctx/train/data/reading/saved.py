"""Tells which files `load_from_disk` would read of a folder that `datasets` saved.

    state.json           names the Arrow files of one dataset, in order
    dataset_info.json    settings
    dataset_dict.json    names the splits of several datasets, each of which is a folder beside it

Other Arrow files lie there, too: shards of an earlier and longer dataset, and what `map` has kept
(cache-*.arrow).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longctx.errors import UserError
from longctx.train.safety.strange_files import read_json

STATE, SPLITS = "state.json", "dataset_dict.json"


def not_saved(records: Sequence[Path], root: Path) -> dict[Path, str]:
    """Returns the files of records below `root` that lie in a folder of save_to_disk and that
    `load_from_disk` would not read, each with the reason. Raises UserError for a folder that lacks
    a file which its state.json names."""
    left: dict[Path, str] = {}
    for folder in dict.fromkeys(path.parent for path in records):
        inside = [path for path in records if path.parent == folder]
        named = _listed(folder / STATE, "_data_files")
        if named is not None:
            names = [item["filename"] for item in named if isinstance(item, dict)]
            if missing := set(names) - {path.name for path in inside}:
                raise UserError(
                    f"{folder / STATE} names {min(missing)}, which is missing or empty: save the "
                    "dataset again, or copy the whole folder"
                )
            left |= {path: f"{STATE} does not name it" for path in inside if path.name not in names}
        splits = _listed(folder.parent / SPLITS, "splits") if folder != root else None
        if splits is not None and folder.name not in splits:
            left |= {path: f"{SPLITS} names no such split" for path in inside}
    return left


def _listed(path: Path, key: str) -> list[Any] | None:
    """Returns the list under a key of a JSON file; None where there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    items = found.get(key) if isinstance(found, dict) else None
    return items if isinstance(items, list) else None
