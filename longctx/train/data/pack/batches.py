"""Batches of rows: of text (packing.py), and of groups (packing_groups.py) in the two layouts that
models can take.

A row of groups that holds a prompt `pqr` with the answers `ab` and `c`:

    shared      p q r a b c          positions 0 1 2 3 4 3          lengths 3 2 1, parents -1 0 0
    separate    p q r a b p q r c    positions 0 1 2 3 4 0 1 2 3    no lengths, no parents
    alone       p q r a b            positions 0 1 2 3 4            the same, in rows of one answer
                p q r c _                      0 1 2 3 4

`collate_shared` is for patched models (attention/documents.py). `collate_separate` is for others,
which keep documents apart by `position_ids` alone; its rows are as long as the longest of the
batch needs. With `alone` nothing has to be kept apart, as with images: padding follows a row's
answer, which does not see it. Both make the same arrays for scoring N tokens of A answers in G
groups, in the same order; only `predictors` depend on the layout:

    predictors (N,)   index, in the flattened B * S tokens, of the token that predicts the answer's
    targets    (N,)   the answer's token
    answers    (N,)   number of its answer, 0 to A - 1
    sides      (A,)   chosen 0, rejected 1; desirable 0, undesirable 1, mismatched 2 (groups.py)
    groups     (A,)   number of the answer's group, 0 to G - 1
    rows       (A,)   number of the answer's row, 0 to B - 1
    records    (G,)   number of the group's record in the data
    margins    (G,)   float32, NaN where the record names none

With the targets' log-probabilities (N,) at the predictors, the answers' sums are
`torch.zeros(A).index_add(0, answers, log_probs)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset, List, Value
from torch import Tensor

from longctx.constants import PAD_TOKEN_ID
from longctx.train.data.pack.packing import lengthened


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows into int64 tensors (B, S): input_ids, labels, position_ids, documents. S is
    seq_len, or the longest row of the batch where rows have a length of their own.

    No attention_mask but where rows were lengthened, as one document each has to be: an all-ones
    mask switches HF's packing detection off, and `position_ids` already say where documents begin.
    `documents` is filled up with -1, to a width that is the same in every process; LongTrainer
    takes it out before the model is called.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    longest = int(lengths.max())
    full = [lengthened(row, longest) for row in rows]
    batch = {name: torch.from_numpy(np.stack([row[name] for row in full])) for name in full[0]}
    if bool((lengths < longest).any()):
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    if "documents" not in rows[0]:  # --remove_unused_columns
        return batch
    documents = torch.full_like(batch["input_ids"], -1)
    for filled, row in zip(documents, rows, strict=True):
        filled[: len(row["documents"])] = torch.as_tensor(row["documents"])
    return {**batch, "documents": documents}


def as_arrays(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Makes rows arrays for `collate`: lists would take 7 ms for 32768 tokens. A reference's fp64
    stays in lists, since datasets would round it to fp32."""
    if not isinstance(rows, Dataset):
        return rows
    exact = [name for name, kind in rows.features.items() if kind == List(Value("float64"))]
    if not exact:
        return rows.with_format("numpy")
    columns = [name for name in rows.column_names if name not in exact]
    return rows.with_format("numpy", columns=columns, output_all_columns=True)


def collate_shared(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns input_ids and position_ids (B, S), cu_seq_lens_q (documents + 1,) int32 and parents
    (documents,) over the flattened tokens, and the arrays for scoring. Padding is a document."""
    read = [_Row(row) for row in rows]
    scores = _Scores()
    bounds, parents = [np.zeros(1, np.int64)], []
    first = documents = 0  # of the row, in the flattened batch
    for row in read:
        scores.start(row)
        for prompt, answer in row.answers:
            scores.add(row, answer, first + row.ends[prompt], first + row.starts[answer])
        bounds.append(first + row.ends)
        parents.append(np.where(row.parents < 0, -1, row.parents + documents))
        first += len(row.input_ids)
        documents += len(row.parents)
    return {
        "input_ids": torch.from_numpy(np.stack([row.input_ids for row in read])),
        "position_ids": torch.from_numpy(np.stack([row.position_ids for row in read])),
        "cu_seq_lens_q": torch.from_numpy(np.concatenate(bounds).astype(np.int32)),
        "parents": torch.from_numpy(np.concatenate(parents)),
        **scores.tensors(),
    }


def collate_separate(rows: Sequence[dict[str, Any]], *, alone: bool = False) -> dict[str, Tensor]:
    """Returns input_ids and position_ids (B, S), S the tokens of the longest row of the batch, and
    the arrays for scoring. Every answer stands behind a copy of its prompt; with `alone` in a row
    of its own, so that B is A."""
    read = [_Row(row) for row in rows]
    scores = _Scores()
    laid = [(row, of_row) for row in read for of_row in row.laid(alone)]
    seq_len = max(sum(len(row.tokens(i)) for pair in pairs for i in pair) for row, pairs in laid)
    input_ids = np.full((len(laid), seq_len), PAD_TOKEN_ID, np.int64)
    position_ids = np.empty_like(input_ids)
    current = None
    for number, (row, pairs) in enumerate(laid):
        if row is not current:
            scores.start(row)
            current = row
        start = 0
        for prompt, answer in pairs:
            ids = np.concatenate([row.tokens(prompt), row.tokens(answer)])
            end = start + len(ids)
            input_ids[number, start:end] = ids
            position_ids[number, start:end] = np.arange(len(ids))
            own = number * seq_len + end - int(row.lengths[answer])
            scores.add(row, answer, own, own)
            start = end
        first = start if alone else 0
        position_ids[number, start:] = np.arange(first, first + seq_len - start)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        **scores.tensors(),
    }


class _Row:
    """The documents of one packed row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.input_ids, self.position_ids, self.lengths, self.parents, self.sides, self.records = (
            np.asarray(row[name], np.int64)
            for name in ("input_ids", "position_ids", "lengths", "parents", "sides", "documents")
        )
        self.margins = np.asarray(row["margins"], np.float32)
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        self.answers = [(int(self.parents[i]), int(i)) for i in np.flatnonzero(self.sides >= 0)]
        """The numbers of each answer's prompt and of the answer, among the row's documents."""

    def laid(self, alone: bool) -> list[list[tuple[int, int]]]:
        """Returns the answers of each row that is made of this one."""
        return [[pair] for pair in self.answers] if alone else [self.answers]

    def tokens(self, document: int) -> np.ndarray:
        return self.input_ids[self.starts[document] : self.ends[document]]


class _Scores:
    """The arrays for scoring, filled answer by answer."""

    def __init__(self) -> None:
        self.predictors: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.sides: list[int] = []
        self.groups: list[int] = []
        self.rows: list[int] = []
        self.records: list[np.ndarray] = []
        self.margins: list[np.ndarray] = []
        self.prompt = -1
        self.row = self.group = -1

    def start(self, row: _Row) -> None:
        """Begins another row, whose answers are added next."""
        self.records.append(row.records)
        self.margins.append(row.margins)
        self.row += 1
        self.prompt = -1

    def add(self, row: _Row, answer: int, prompt_end: int, start: int) -> None:
        """Adds an answer whose prompt ends at, and which itself starts at, these indices of the
        flattened batch."""
        if row.parents[answer] != self.prompt:
            self.prompt = int(row.parents[answer])
            self.group += 1
        targets = row.tokens(answer)
        predictors = np.arange(start - 1, start - 1 + len(targets))
        predictors[0] = prompt_end - 1
        self.predictors.append(predictors)
        self.targets.append(targets)
        self.sides.append(int(row.sides[answer]))
        self.groups.append(self.group)
        self.rows.append(self.row)

    def tensors(self) -> dict[str, Tensor]:
        counts = [len(targets) for targets in self.targets]
        return {
            "predictors": torch.from_numpy(np.concatenate(self.predictors)),
            "targets": torch.from_numpy(np.concatenate(self.targets)),
            "answers": torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
            "sides": torch.tensor(self.sides),
            "groups": torch.tensor(self.groups),
            "rows": torch.tensor(self.rows),
            "records": torch.from_numpy(np.concatenate(self.records)),
            "margins": torch.from_numpy(np.concatenate(self.margins)),
        }
