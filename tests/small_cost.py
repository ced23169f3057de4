"""The count of a small patched model: its tables, and the peak of its activations."""

from __future__ import annotations

from typing import Any

from longctx.cost.kept import Ladder
from longctx.cost.sizes import Batch
from longctx.memory.candidates import Candidates, Counted
from longctx.model.costs import StepTable


def tables_of(patched: Any, tokens: int) -> StepTable:
    """For one row of so many tokens."""
    return StepTable.of(patched.longctx.sizes(patched), Batch(tokens, tokens))


def activity_peak(patched: Any, tokens: int, ladder: Ladder | None = None) -> int:
    """Bytes of activations and work, at the moment of most; `ladder`: the store's."""
    ladder = patched.longctx.store.ladder if ladder is None else ladder
    layers = patched.config.num_hidden_layers
    ladder = (layers - len(ladder)) * ladder[:1] + ladder
    tables = tables_of(patched, tokens)
    found = Counted(Candidates.one(ladder, tables.sizes.of_layer), tables).activity
    return int(max(found.forward.max(), found.loss.max(), found.backward.max()))
