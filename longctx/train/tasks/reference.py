"""Log-probabilities of all answers under the reference model, computed once, before training.

The reference is the model as it is before the first update, or another one that is loaded alone
and is gone before training begins; no second model exists. A row's log-probabilities do not change
while a run trains, so they are kept in cache_dir (train/data/pack/cache.py):

    reference-v3-<key>.arrow             a row of numbers for each packed row, one per answer
    reference-v3-<key of a part>.arrow   the same of PART_ROWS rows, deleted when all are there

The key says all that they depend on: the rows' content and images, the reference's weights and
how they are computed (dtype, 4 bits), and how tokens are weighted. A run that is killed in the pass
loses a part at most, and a resumed run computes nothing again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.utils import tqdm
from torch import Tensor

from longctx.errors import UserError, many, print_rank0
from longctx.train.data.pack.cache import (
    cache_path,
    content_of,
    digest,
    forget,
    open_arrow,
    write_arrow,
)
from longctx.train.tasks.protocol import Batch

REFERENCE = "reference"
FEATURES = Features({REFERENCE: List(Value("float64"))})
PART_ROWS = 32
"""Rows of a part, which is what a run that is killed in the pass has to compute again."""


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """How the log-probabilities of rows are computed, and where they are kept."""

    score: Callable[[Batch], Tensor]
    """A batch to the log-probability of each of its answers, (A,); runs without gradients."""
    collate: Callable[[Sequence[dict[str, Any]]], Batch]
    identity: Any
    """Whatever the numbers depend on beside the rows, as JSON."""
    read: Callable[[str, Dataset], Any] = lambda what, rows: rows.with_format("numpy")
    """Makes what `collate` gets rows from of a dataset, given what it is for."""
    with_images: bool = False
    """Whether rows have images, which their content does not tell apart: their file's name does,
    since it depends on the files of images."""
    cache_dir: Path
    device: torch.device
    rank: int = 0
    ranks: int = 1
    """Processes that compute rows of their own: those that share rows count as one."""
    processes: int = 1
    writes: bool = True
    """Whether this is the process that writes."""
    names: Callable[[list[int]], list[str]] = lambda numbers: [f"record {n}" for n in numbers]
    of: str = "the model before its first step"
    """The reference, in words."""

    def path(self, rows: Dataset, part: int | None = None) -> Path:
        files = [Path(file["filename"]).stem for file in rows.cache_files if self.with_images]
        whole = digest(content_of(rows), self.identity, *files)
        return cache_path(self.cache_dir, REFERENCE, whole if part is None else digest(whole, part))

    def is_cached(self, rows: Dataset) -> bool:
        """Whether nothing has to be computed."""
        return open_arrow(self.path(rows), len(rows)) is not None

    def run(self, rows: Dataset, what: str) -> Dataset:
        """Returns the rows with a column REFERENCE. Every process must call it.

        Raises UserError for a log-probability that is not finite.
        """
        found = open_arrow(self.path(rows), len(rows))
        there = self._agree(found is not None)
        print_rank0(
            f"reference, {what} rows: log-probabilities under {self.of} "
            + (f"are in {self.cache_dir}" if there else "are computed once")
            + ("" if there else f", {many(len(rows), 'row')}, and kept in {self.cache_dir}")
        )
        if not there:
            found = self._compute(rows, what)
        assert found is not None
        return concatenate_datasets([rows, found], axis=1)

    def _compute(self, rows: Dataset, what: str) -> Dataset:
        arrays, parts = self.read(what, rows), list[Any]()
        bar = tqdm(
            total=len(rows), desc=f"Reference, {what}", unit=" rows", leave=False, disable=None
        )
        for number, first in enumerate(range(0, len(rows), PART_ROWS)):
            chosen = range(first, min(first + PART_ROWS, len(rows)))
            path = self.path(rows, number)
            part = open_arrow(path, len(chosen))
            if not self._agree(part is not None):
                part = self._write(path, self._scored(arrays, chosen))
            parts.append(part)
            bar.update(len(chosen))
        bar.close()
        whole = self._write(self.path(rows), (row[REFERENCE] for part in parts for row in part))
        if self.writes:
            for number in range(len(parts)):
                forget(self.path(rows, number))
        return whole

    def _scored(self, rows: Any, chosen: range) -> list[list[float]]:
        """The log-probabilities of some rows, which the processes share among them. All run as
        often: engines gather weights together."""
        mine = [*chosen][self.rank :: self.ranks]
        times = -(-len(chosen) // self.ranks)
        found = []
        for i in range(times):
            number = mine[i] if i < len(mine) else chosen[-1]
            row = rows[number]
            batch = {name: x.to(self.device) for name, x in self.collate([row]).items()}
            with torch.no_grad():
                found.append((number, self.score(batch).double().tolist()))
        everyone = dict(gather_object(found)) if self.processes > 1 else dict(found)
        for number in chosen:
            if not all(map(math.isfinite, everyone[number])):
                records = [int(n) for n in rows[number]["documents"] if n >= 0]
                raise UserError(
                    f"the reference model's log-probabilities ({self.of}) are not finite in the "
                    f"row of {', '.join(self.names(records))}: look at its weights, or leave these "
                    "out"
                )
        return [everyone[number] for number in chosen]

    def _write(self, path: Path, found: Any) -> Dataset:
        """The first process writes, the others wait and read."""
        columns = ({REFERENCE: log_probs} for log_probs in found)
        if self.writes:
            written = write_arrow(path, FEATURES, columns)
        if self.processes > 1:
            torch.distributed.barrier()
        return written if self.writes else Dataset.from_file(str(path))

    def _agree(self, there: bool) -> bool:
        """Whether all processes found it."""
        return all(gather_object([there])) if self.processes > 1 else there
