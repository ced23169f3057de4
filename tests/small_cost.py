"""The count of a small patched model: its tables, and the peak of its activations."""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed._tools.mem_tracker import MemTracker

from longctx.cost.kept import Ladder
from longctx.cost.sizes import Batch
from longctx.memory.candidates import Candidates
from longctx.memory.counted import Counted
from longctx.runtime.costs import StepTable


class PeakTracker(MemTracker):
    """Without the peaks of each module, which take a third of the time of a step."""

    def _update_peak_stats(self, *args: Any) -> None:
        for device, found in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < found["Total"]:
                self._peak_mem[device] = found["Total"]
                self._peak_mem_snap[device] = copy.deepcopy(found)


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
