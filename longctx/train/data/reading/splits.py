"""Tells which files of a folder hold training rows, by their names and by the README of the folder,
in the words that the hub and `datasets` use.

    data/train-00000-of-00002.parquet     train: a word of its name
    data/test/part-0.jsonl                held out: a word of its folder, which goes before its name
    part-0.jsonl                          no word: training rows, unless the README says otherwise

    ---                                   README.md, or .huggingface.yaml without the dashes
    configs:
    - config_name: default
      data_files:                         also one pattern or a list of them, which are train
      - split: train
        path: "data/a-*.jsonl"
      - split: test
        path: data/b.jsonl
    ---

A README goes before names where its patterns match files. Only files that were found in the folder
are matched: no pattern leads out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from longctx.train.safety.strange_files import read_small

TRAIN = frozenset({"train", "training"})
HELD_OUT = frozenset({"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})
"""Words by which `datasets` tells splits, between the signs of _BETWEEN."""
_BETWEEN = re.compile(r"[-._ 0-9]+")
CARD_NAMES = ("README.md", ".huggingface.yaml")
MOST_CARD_BYTES = 4 << 20
"""A larger README of a folder is not read."""
_NOTHING_ELSE = " (held-out rows by name: there are no others)"
Side = Literal["train", "held out", ""]


@dataclass
class SplitChoice:
    """The files of a folder to read as training rows, and the others."""

    read: list[Path]
    left: dict[Path, str] = field(default_factory=dict)
    """A file that is not read -> why, in brackets behind its name."""
    note: str | None = None
    """A note on `read` by names or the README, to be put behind the names: empty for the training
    rows of one set beside others, None where they tell nothing."""


def choose(records: Sequence[Path], folder: Path) -> SplitChoice:
    """Returns which of a folder's files of records are read."""
    named = {path.relative_to(folder): path for path in records}
    configs = _configs(folder, list(named))
    if not configs:
        return _by_side({path: _side(short) for short, path in named.items()}, folder)
    splits = {(c.name, split): files for c in configs for split, files in c.files.items()}
    sides = {key: _words_side(key[1]) for key in splits}
    trained = [key for key in splits if sides[key] != "held out"] or list(splits)
    read = {named[file]: None for key in trained for file in splits[key]}
    left: dict[Path, str] = {}
    for (_, split), files in splits.items():
        left |= {named[file]: f"split {split}" for file in files if named[file] not in read}
    for path in records:
        if path not in read:
            left.setdefault(path, "the README names it for no split that is read")
    note = _NOTHING_ELSE if any(sides[key] == "held out" for key in trained) else ""
    return SplitChoice(list(read), left, note if note or left or len(trained) > 1 else None)


def _by_side(sides: Mapping[Path, Side], folder: Path) -> SplitChoice:
    """Returns the choice where names alone tell. Files with no word of a split are read as training
    rows; held-out ones are read if there is nothing else."""
    read = [path for path, side in sides.items() if side != "held out"]
    if not read:
        return SplitChoice(list(sides), note=_NOTHING_ELSE if sides else None)
    left = {path: "not the split train" for path in sides if sides[path] == "held out"}
    told = any(sides.values())
    sets = {_set_of(path.relative_to(folder)) for path in read}
    return SplitChoice(read, left, "" if left or (told and len(sets) > 1) else None)


def _side(path: Path) -> Side:
    """Returns the side of a file by the words of its folders, the outermost first, and then of its
    name. A part with words of both sides (`train_test`) tells nothing."""
    for part in path.parts:
        if side := _words_side(part):
            return side
    return ""


def _words_side(name: str) -> Side:
    words = {*_BETWEEN.split(name.lower())}
    if bool(words & TRAIN) == bool(words & HELD_OUT):
        return ""
    return "train" if words & TRAIN else "held out"


def _set_of(path: Path) -> tuple[str, ...]:
    """Returns a file's name without the words of splits and the numbers of shards."""
    words = [word for part in path.parts for word in _BETWEEN.split(part.lower())]
    return tuple(word for word in words if word and word not in TRAIN | {"of"})


@dataclass(frozen=True, kw_only=True)
class _Config:
    """A configuration of a README, and the files that its patterns match, by split."""

    name: str
    files: Mapping[str, list[Path]]
    default: bool


def _configs(folder: Path, files: Sequence[Path]) -> list[_Config]:
    """Returns the README's configurations that match files: its default one alone, where it has
    one."""
    found = []
    for entry in _entries(folder):
        name, root = str(entry["config_name"]), Path(str(entry.get("data_dir") or ""))
        inside = [file for file in files if file.is_relative_to(root)]
        splits: dict[str, list[Path]] = {}
        if entry.get("data_files") is None:
            for file in inside:
                side = _side(file.relative_to(root))
                splits.setdefault("test" if side == "held out" else "train", []).append(file)
        for split, pattern in _patterns(entry.get("data_files")):
            parts = Path(pattern).parts
            fitting = [file for file in inside if _fits(file.relative_to(root).parts, parts)]
            splits.setdefault(split, []).extend(fitting)
        splits = {split: matched for split, matched in splits.items() if matched}
        if splits:
            default = name == "default" or entry.get("default") is True
            found.append(_Config(name=name, files=splits, default=default))
    return [config for config in found if config.default][:1] or found


def _entries(folder: Path) -> list[Mapping[str, Any]]:
    """Returns the entries of `configs` in the YAML of a folder's README; none where it is
    broken."""
    card: dict[str, Any] = {}
    for name in CARD_NAMES:
        try:
            text = read_small(folder / name, MOST_CARD_BYTES).decode()
            if name.endswith(".md"):
                front = re.match(r"\s*---[ \t]*\r?\n(.*?)\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
                text = front[1] if front else ""
            read = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        card |= read if isinstance(read, dict) else {}
    entries = card.get("configs")
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, Mapping) and "config_name" in entry]


def _patterns(given: Any) -> Iterator[tuple[str, str]]:
    """Yields the splits and patterns of a README's `data_files`."""
    for item in given if isinstance(given, list) else [given]:
        split, paths = "train", item
        if isinstance(item, Mapping):
            split, paths = str(item.get("split", "train")), item.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                yield split, path


def _fits(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a path matches a glob, whose `**` stands for any folders; at the end for any file."""
    if not pattern or not parts:
        return not pattern and not parts
    if pattern[0] != "**":
        return fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])
    rest = pattern[1:]
    return not rest or any(_fits(parts[start:], rest) for start in range(len(parts)))
