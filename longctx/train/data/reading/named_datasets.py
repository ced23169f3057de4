"""Reads --dataset_name: what `load_dataset` or `load_from_disk` gives, with cells of CSV and TSV
files as the text that they are.

The `csv` builder of datasets makes 7.0 of 007 and null of NA. So it is told that every column is
text, and cells become values as those of --train_file do (tables.py). One line names the files and
splits that are read, and those that are not.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetBuilder,
    DatasetDict,
    Features,
    IterableDataset,
    Value,
    load_dataset_builder,
    load_from_disk,
)
from datasets.packaged_modules.csv.csv import CsvConfig
from pandas.errors import ParserWarning

from longctx.errors import UserError
from longctx.system import expanded
from longctx.train.data.reading.folders import MOST_NAMED, other_records
from longctx.train.data.reading.saved import SPLITS, STATE
from longctx.train.data.reading.tables import cell_value
from longctx.train.options.config import DataArguments

Tell = Callable[[str], None]
AS_TEXT: dict[str, Any] = {"keep_default_na": False, "na_filter": False, "index_col": False}
"""Options of pandas by which no cell becomes null, and no first column an index."""


def load_records(args: DataArguments, tell: Tell | None = None) -> Dataset | IterableDataset:
    """Returns the rows of --dataset_name: a folder of `save_to_disk`, or what `load_dataset` takes
    (local or hub). `tell` gets the line that names what is read and what is not, if there is more
    than what is read. Raises UserError for what cannot be loaded."""
    assert args.dataset_name
    check_dataset_name(args.dataset_name)
    folder = expanded(args.dataset_name)
    name = f"the dataset {args.dataset_name}"
    try:
        if any((folder / file).exists() for file in (STATE, SPLITS)):
            return _saved(args, folder, name, tell)
        return _built(args, folder, name, tell)
    except UserError:
        raise
    except Exception as error:  # missing, offline, gated, bad split, bad file: datasets raises many
        cause = error.__cause__ or error
        if isinstance(cause, IndexError):  # what save_to_disk writes of no rows has no file
            raise UserError(f"{name} has no rows in the split {args.dataset_split!r}") from error
        reason = " ".join(str(cause).split())[:200]
        cure = "check the name, --dataset_config, --dataset_split and the connection"
        if folder.is_dir():
            cure = "check --dataset_config and --dataset_split, or give the folder as --train_file"
        raise UserError(f"cannot load {name} ({type(cause).__name__}: {reason}); {cure}") from error


def check_dataset_name(name: str) -> None:
    """Raises UserError for a local path that does not exist; hub ids are not looked up."""
    if name.startswith((".", "/", "~")) and not os.path.exists(expanded(name)):
        raise UserError(f"the dataset {name} does not exist: check the path in --dataset_name")


def _saved(
    args: DataArguments, folder: Path, name: str, tell: Tell | None
) -> Dataset | IterableDataset:
    saved = load_from_disk(str(folder))
    if isinstance(saved, DatasetDict):
        if args.dataset_split not in saved:
            raise _no_split(name, args.dataset_split, [*saved])
        others = [split for split in saved if split != args.dataset_split]
        if tell and others:
            tell(f"{name}: read: split {args.dataset_split}; passed over: {_few(others)}")
        saved = saved[args.dataset_split]
    elif args.dataset_split not in ("train", str(saved.split)):
        raise UserError(f"{name} has no splits: leave out --dataset_split {args.dataset_split}")
    if args.dataset_config:
        raise UserError(
            f"{name} was saved by save_to_disk and has no configurations: leave out "
            f"--dataset_config {args.dataset_config}"
        )
    if not len(saved):
        raise UserError(f"{name} has no rows in the split {args.dataset_split!r}")
    return saved.to_iterable_dataset() if args.streaming else saved


def _no_split(name: str, split: str, splits: list[str], unsplit: str = "") -> UserError:
    files = f", or files by --train_file: it holds {unsplit}" if unsplit else ""
    return UserError(
        f"{name} has no split {split!r}: give one of {', '.join(splits)} as --dataset_split{files}"
    )


def _built(
    args: DataArguments, folder: Path, name: str, tell: Tell | None
) -> Dataset | IterableDataset:
    path = str(folder) if folder.exists() else args.dataset_name
    builder = load_dataset_builder(path, args.dataset_config)
    _tell_files(builder, args, folder, name, tell)
    if not isinstance(builder.config, CsvConfig):
        return _rows(builder, args)
    # pandas warns of rows that it cuts, and a stream's later ones are read when this is over.
    warnings.filterwarnings("error", category=ParserWarning)
    head = load_dataset_builder(path, args.dataset_config, **AS_TEXT)
    split = args.dataset_split.split("+")[0].split("[")[0]
    first = next(iter(head.as_streaming_dataset(split)), None)
    if first is None:
        raise UserError(f"{name} has no rows in the split {args.dataset_split!r}")
    features = Features({column: Value("string") for column in first})
    text = load_dataset_builder(path, args.dataset_config, features=features, **AS_TEXT)
    rows = _rows(text, args)
    return rows.with_transform(_values) if isinstance(rows, Dataset) else rows.map(_value)


def _rows(builder: DatasetBuilder, args: DataArguments) -> Dataset | IterableDataset:
    """Returns what `load_dataset` gives of its builder."""
    if args.streaming:
        return builder.as_streaming_dataset(args.dataset_split)
    builder.download_and_prepare()
    return builder.as_dataset(args.dataset_split)


def _value(record: dict[str, str | None]) -> dict[str, Any]:
    """Returns a row of cells as a record."""
    return {name: cell_value(name, cell or "") for name, cell in record.items()}


def _values(batch: dict[str, list[str | None]]) -> dict[str, list[Any]]:
    """Columns of cells as those of records."""
    return {name: [cell_value(name, cell or "") for cell in cells] for name, cells in batch.items()}


def _tell_files(
    builder: DatasetBuilder, args: DataArguments, folder: Path, name: str, tell: Tell | None
) -> None:
    """Tells which files are read, by their splits, if there are others. Raises UserError for a
    split that does not exist."""
    if not builder.config.data_files:  # datasets reads its own cache
        return
    files = {str(split): [*found] for split, found in builder.config.data_files.items()}
    asked = {part.split("[")[0].strip() for part in args.dataset_split.split("+")}
    asked = {*files} if "all" in asked else asked
    rest: list[str] = []
    if folder.is_dir():
        known = [Path(file) for found in files.values() for file in found]
        rest = [str(path) for path in other_records(folder, known)]
    unsplit = f"{_names(rest, folder)} (in no split)" if rest else ""
    if missing := asked - {*files}:
        raise _no_split(name, min(missing), [*files], unsplit)
    read = [file for split in files if split in asked for file in files[split]]
    left = [f"{_names(files[x], folder)} (split {x})" for x in files if x not in asked]
    left += [unsplit] if unsplit else []
    if configs := [config for config in builder.builder_configs if config != builder.config.name]:
        left.append(f"of --dataset_config: {_few(configs)}")
    if tell and left:
        words = f"read: {_names(read, folder)} (split {args.dataset_split})"
        tell(f"{name}: {words}; passed over: {', '.join(left)}")


def _names(files: list[str], folder: Path) -> str:
    """Names a few files by their paths below their folder, or below that of the hub."""
    root = f"{folder.resolve()}/"
    names = [os.path.realpath(file) if "://" not in file else file for file in files]
    return _few([re.sub(r"hf://datasets/[^@]*@[^/]*/", "", x.removeprefix(root)) for x in names])


def _few(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
