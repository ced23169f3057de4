"""Batches of prompts with their answers, with what tasks need of them beside what
train/data/pack/batches.py makes: how many tokens each answer has, which is its last one, and the
reference's opinion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longctx.train.data.pack.batches import collate_separate, collate_shared


def answers_collator(
    class_type: str, *, alone: bool = False, prompts: bool = False
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """Returns the collator of a class type: `custom` computes a prompt once for all of its answers,
    and others with `alone` each answer in a row of its own. With `prompts` it also lists the
    prompts' own tokens."""
    if class_type == "custom":
        return partial(collate_prompts_once, prompts=prompts)
    return partial(collate_apart, alone=alone, prompts=prompts)


def collate_prompts_once(
    rows: Sequence[dict[str, Any]], *, prompts: bool = False
) -> dict[str, Tensor]:
    batch = collate_shared(rows)
    documents = (batch["parents"] >= 0).nonzero().squeeze(1)
    lasts = batch["cu_seq_lens_q"][documents + 1].long() - 1
    return _completed(rows, batch, lasts, prompts)


def collate_apart(
    rows: Sequence[dict[str, Any]], *, alone: bool = False, prompts: bool = False
) -> dict[str, Tensor]:
    batch = collate_separate(rows, alone=alone)
    ends = torch.bincount(batch["answers"], minlength=len(batch["sides"])).cumsum(0) - 1
    return _completed(rows, batch, batch["predictors"][ends] + 1, prompts)


def _completed(
    rows: Sequence[dict[str, Any]], batch: dict[str, Tensor], lasts: Tensor, prompts: bool
) -> dict[str, Tensor]:
    """Adds `tokens` (A,), `lasts` (A,), indices into the flattened batch, `documents` (B, most
    groups), filled up with -1, and `reference` (A,) where rows have it."""
    found = dict(batch)
    found["tokens"] = torch.bincount(batch["answers"], minlength=len(batch["sides"]))
    found["lasts"] = lasts
    numbers = [torch.as_tensor(np.asarray(row["documents"], np.int64)) for row in rows]
    found["documents"] = torch.nn.utils.rnn.pad_sequence(numbers, True, -1)
    if "reference" in rows[0]:
        values = np.concatenate([np.asarray(row["reference"], np.float64) for row in rows])
        found["reference"] = torch.from_numpy(values)
    return found | (_prompts(rows, found) if prompts else {})


def _prompts(rows: Sequence[dict[str, Any]], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `prompt_predictors` and `prompt_targets`: each token of a prompt but its first, by
    the copy before the group's first answer."""
    lengths = []
    for row in rows:
        parents, tokens = np.asarray(row["parents"]), np.asarray(row["lengths"])
        lengths += tokens[np.unique(parents[parents >= 0])].tolist()
    starts = batch["tokens"].cumsum(0) - batch["tokens"]  # of answers, in the list of tokens
    first = torch.from_numpy(np.unique(batch["groups"].numpy(), return_index=True)[1])
    ends = batch["predictors"][starts[first]].tolist()  # a prompt's last token
    predictors = torch.cat(
        [torch.arange(end - n + 1, end) for end, n in zip(ends, lengths, strict=True)]
    )
    targets = batch["input_ids"].flatten()[predictors + 1]
    return {"prompt_predictors": predictors, "prompt_targets": targets}
