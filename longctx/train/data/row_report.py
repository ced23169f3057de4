"""What is counted and said of rows, in a JSON file next to them: a run that finds its rows in the
cache prints the lines that the run which made them printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from datasets import Dataset, IterableDataset

from longctx.train.data.pack.cache import content_of, digest, read_json
from longctx.train.data.pack.packing import PackingStats
from longctx.train.data.pack.packing_groups import GroupStats
from longctx.train.data.reading.files import file_of
from longctx.train.data.reading.groups import Rows
from longctx.train.options.config import DataArguments

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor


def read_report(path: Path, rows: Rows = "text") -> dict[str, Any] | None:
    """Reads what was reported of cached rows; None if the file is missing or damaged."""
    report: Any = read_json(path)
    try:
        stats_of(report["stats"], rows).summary(1)
        report["replaced_bytes"].items()
        "".join(report["said"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return report


def stats_of(counted: dict[str, Any], rows: Rows) -> PackingStats | GroupStats:
    named = {"images" if name == "pictures" else name: n for name, n in counted.items()}
    return PackingStats(**named) if rows == "text" else GroupStats(**named)


def saved_counts(stats: PackingStats | GroupStats) -> dict[str, Any]:
    """Returns counts as files have them, where images are called pictures."""
    return {"pictures" if name == "images" else name: n for name, n in asdict(stats).items()}


def counts(rows: Dataset | IterableDataset) -> dict[str, int]:
    """Returns the counts that `build_dataset` wrote next to its rows, by name: documents or groups,
    tokens, rows and others. Empty for a stream, whose rows are not counted."""
    stats = _report_beside(rows).get("stats", {})
    return {name: count for name, count in stats.items() if type(count) is int and count > 0}


def _report_beside(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """Returns what `build_dataset` has written next to its rows; empty for a stream."""
    for file in rows.cache_files if isinstance(rows, Dataset) else ():
        report: Any = read_json(Path(file["filename"]).with_suffix(".json"))
        return report if isinstance(report, dict) else {}
    return {}


def rows_identity(args: DataArguments, rows: Dataset | IterableDataset) -> Any:
    """Returns what differs if the rows of `build_dataset` do. A stream is not read yet: it is told
    by where it comes from."""
    if isinstance(rows, IterableDataset):
        return [args.dataset_name, args.dataset_config, args.dataset_split]
    return content_of(rows)


def pixels_identity(rows: Dataset | IterableDataset, images: ImageProcessor) -> str:
    """Returns what differs if the pixels of the rows of a `build_dataset` do, because the bytes of
    images' files or the processor's settings differ."""
    return digest(_report_beside(rows).get("pixels"), images.settings)


def pixels_hash(tokens: Dataset, order: np.ndarray) -> str:  # (n,) int64: numbers of documents
    hashes = tokens.data.column("pixels").to_numpy()[np.sort(order)]
    return xxhash.xxh3_64_hexdigest(hashes.tobytes())


def replaced_bytes(documents: Dataset) -> dict[str, int]:
    """Returns the number of undecodable bytes that were replaced, by file."""
    counts: Counter[str] = Counter()
    replaced = np.asarray(documents.data.column("replaced_bytes"))
    for i in np.flatnonzero(replaced):
        counts[file_of(documents[int(i)]["where"])] += int(replaced[i])
    return dict(counts)
