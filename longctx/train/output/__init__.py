"""The output folder: what a run leaves there, written so that it is whole or absent, and read.

checkpoint-N/                 weights, optimizer, scheduler, RNG after N steps
final/                        the model that `from_pretrained` loads
  manifest.json               in each of them: its files' checksums, and what defines the run
metrics.jsonl                 a line a logged step; `longctx report` draws it
run.json                      model, data, options, machine and versions, for people
abandoned-checkpoint-N/       set aside by a run that was resumed from an earlier step
.incomplete-.../  .lock       what is being written or deleted; who has the folder
"""

from __future__ import annotations

import re
from pathlib import Path

FINAL = "final"
METRICS = "metrics.jsonl"
RECORD = "run.json"
CARD = "README.md"
STATE = "trainer_state.json"
MANIFEST = "manifest.json"
STAGING = ".incomplete-"
ABANDONED = "abandoned-"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)", re.ASCII)


def checkpoint_step(path: Path) -> int | None:
    """Returns N of a folder called checkpoint-N; None for any other name."""
    found = _CHECKPOINT.fullmatch(path.name)
    return int(found[1]) if found else None


def checkpoints(output_dir: Path) -> list[Path]:
    """Returns every checkpoint-N in the folder, by N; also links, and what is no folder."""
    found = [path for path in output_dir.glob("checkpoint-*") if checkpoint_step(path) is not None]
    return sorted(found, key=lambda path: (checkpoint_step(path), path.name))
