"""Runs train.py with each class type on the same batches and records every logged line.

    python profiling/bench/train_bench.py --output profiling/results/h200_first_run.json

The job is recipes/llama-3.2-1b_32k.yaml: Llama-3.2-1B's architecture on real text (Python's
standard library), rows of 32768 tokens, bf16, ten steps. Anything after `--` goes to train.py, for
all class types.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiling.results import write_results

ROOT = Path(__file__).resolve().parents[2]
CLASS_TYPES = ("vanilla", "liger", "custom")
JOB = ["--config", "recipes/llama-3.2-1b_32k.yaml"]
QUIET = ["--save_strategy", "no", "--disable_tqdm", "true"]


def run(name: str, flags: list[str], folder: Path) -> list[dict[str, Any]]:
    """The logged lines of one run of train.py, and a row that says how it failed if it did."""
    command = [sys.executable, "train.py", *QUIET, "--output_dir", str(folder), *flags]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.open()] if metrics.exists() else []
    rows = [{"class_type": name, **line} for line in lines if "loss" in line]
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        status = "oom" if "out of memory" in done.stderr else "failed"
        rows.append({"class_type": name, "status": status})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--class_types", nargs="+", choices=CLASS_TYPES, default=CLASS_TYPES)
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for class_type in args.class_types:
            flags = [*JOB, "--class_type", class_type, *args.flags]
            rows += run(class_type, flags, Path(folder) / class_type)
    write_results(args.output, rows)


if __name__ == "__main__":
    main()
