"""run.json: what a run is, in words: model, data, options, and each start of it on some machine.

    {"format": 1, "model": {...}, "data": {"train": {...}, "eval": {...}}, "task": "sft",
     "options": {"seq_len": 131072, ...},
     "tracked_as": "books-20261125-101500",
     "starts": [{"date": ..., "step": 0, "command": ..., "machine": {...}, "versions": {...}}, ...]}

It is written after the first step, for people: `longctx report` and the card of final/ show it.
What decides whether a checkpoint may be resumed is definition.py's, in the checkpoint itself. A
resumed run adds a start and replaces the rest.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx.constants import GIB, __version__
from longctx.errors import UserError, print_rank0
from longctx.system import cpu_line, version_of
from longctx.train.output import RECORD
from longctx.train.safety.strange_files import read_json
from longctx.train.safety.writing import replace_file

Record = dict[str, Any]
FORMAT = 1
MOST_STARTS = 100
"""Kept of a run that is resumed again and again: the first and the newest."""
LOSSES = {
    "loss": "loss",
    "eval_loss": "evaluation loss",
    "eval_rewards/accuracies": "evaluation accuracy",
    "eval_accuracy": "evaluation accuracy",
}
"""Key of metrics.jsonl -> what a card and a report call it."""
PACKAGES = (
    "torch transformers accelerate peft bitsandbytes triton flash-attn-4 liger-kernel deepspeed "
    "datasets tokenizers"
).split()


def write_record(folder: Path, record: Record, *, resumed: bool) -> None:
    """Writes it into the run's folder, after the starts that a resumed run has had. A disk that
    takes no file ends no run."""
    earlier = (read_record(folder) or {}).get("starts") if resumed else None
    starts = [*(earlier if isinstance(earlier, list) else []), *record["starts"]]
    record = record | {"starts": starts[:1] + starts[1:][1 - MOST_STARTS :]}
    try:
        replace_file(folder / RECORD, json.dumps(record, indent=1).encode())
    except UserError as error:
        print_rank0(f"{error}: `longctx report` will show less of this run")


def read_record(folder: Path) -> Record | None:
    """Reads the record of a run; None if there is none or it is damaged: an earlier version wrote
    none. Values may be of any type."""
    try:
        found = read_json(folder / RECORD)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def machine(device: Any, processes: int) -> dict[str, Any]:
    """Returns the hardware that a run on this device has, without the machine's name."""
    import psutil
    import torch  # not above: `longctx report` reads records without it

    found: dict[str, Any] = {
        "processes": processes,
        "cpu": cpu_line("model name").partition(":")[2].strip()
        or platform.processor()
        or platform.machine(),
        "cores": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / GIB, 1),
    }
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_gib": round(memory_bytes / GIB, 1),
        }
    return found


def versions() -> dict[str, str]:
    import torch

    found = {"longctx": __version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {package: known for package in PACKAGES if (known := version_of(package))}


def hardware(machine: Mapping[str, Any]) -> str:
    """Returns a short description of a machine."""
    host = f"{machine.get('cores')} cores ({machine.get('cpu')}), {machine.get('host_gib')} GiB RAM"
    if "gpu" not in machine:
        return f"no GPU, {host}"
    return f"{machine.get('processes')}x {machine['gpu']} ({machine.get('gpu_gib')} GiB), {host}"


def counts_of(counts: Mapping[str, int]) -> list[str]:
    """Returns the counts of train/data/row_report.py that people ask for: `1,234 documents`, ..."""
    found = ((name, counts.get(name, 0)) for name in ("documents", "groups", "tokens", "rows"))
    return [f"{n:,} {name.removesuffix('s' * (n == 1))}" for name, n in found if n]
