"""Runs train.py with each class type on the same batches and records every logged line.

    python profiling/bench/train_bench.py --output profiling/results/h200_first_run.json
    python profiling/bench/train_bench.py --case class_type=liger,checkpointing=selective \\
        --output liger.json -- --max_steps 20

The job is recipes/llama-3.2-1b_32k.yaml: Llama-3.2-1B's architecture on real text (Python's
standard library) packed into rows of 32768 tokens, bf16, ten steps. A case is a class type and, of
a peer, its settings (peers.py). Anything after `--` goes to train.py, for all cases.
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

from profiling.bench.peers import prepare_peer, settled
from profiling.bench.subprocess_cases import Case, case_text, parse_case
from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS: Case = {
    "class_type": "custom",
    "checkpointing": None,
    "offload": None,
    "backend": "fa4",
}
"""`offload`: of a peer `none` or `all`, of custom what --offload_activations takes."""
PUBLISHED = (
    dict(class_type="vanilla", checkpointing="layers"),
    dict(class_type="liger", checkpointing="layers"),
    dict(class_type="liger", checkpointing="selective"),
    dict(class_type="liger", checkpointing="none"),
    dict(class_type="custom"),
)
JOB = ["--config", "recipes/llama-3.2-1b_32k.yaml"]
QUIET = ["--save_strategy", "no", "--disable_tqdm", "true"]


def complete(case: Case) -> Case:
    """With its defaults: as train.py runs custom, and a peer that keeps all on the GPU."""
    case = settled({**DEFAULTS, **case})
    offload = "auto" if case["class_type"] == "custom" else "none"
    return {**case, "offload": case["offload"] or offload}


def train_flags(case: Case) -> list[str]:
    flags = ["--class_type", case["class_type"], "--attn_backend", case["backend"]]
    if case["class_type"] == "custom":
        return [*flags, "--offload_activations", case["offload"]]
    return [*flags, "--gradient_checkpointing", "false"]  # it is prepare_peer's


def train(case: Case, flags: list[str]) -> None:
    """train.py in this process, with the peer's settings given to the model that it loads."""
    import train as program
    from longctx.program import program as explained

    load_model = program.load_model

    def load_peer(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        prepare_peer(model, case)
        return model

    program.load_model = load_peer
    with explained():
        program.main(flags)


def run(case: Case, folder: Path, flags: list[str]) -> list[dict[str, Any]]:
    """The logged lines of one run of train.py, and a row that says how it failed if it did."""
    command = [sys.executable, __file__, "--child", "--case", case_text(case, DEFAULTS), "--"]
    command += [*JOB, *QUIET, "--output_dir", str(folder), *train_flags(case), *flags]
    print(f"{case_text(case, DEFAULTS)}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.open()] if metrics.exists() else []
    rows = [{**case, **line} for line in lines if "loss" in line]
    if done.returncode:
        print(done.stderr[-2000:], flush=True)
        status = "oom" if "out of memory" in done.stderr else "failed"
        rows.append({**case, "status": status})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=results_file, help="JSON file to write")
    parser.add_argument("--case", action="append", default=[], help="key=value,... (repeatable)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args()
    cases = [parse_case(text, DEFAULTS) for text in args.case] or list(PUBLISHED)
    if args.child:
        train(complete(cases[0]), args.flags)
        return
    if args.output is None:
        parser.error("--output is missing")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(map(complete, cases)):
            rows += run(case, Path(folder) / str(number), args.flags)
    write_results(args.output, rows)


if __name__ == "__main__":
    main()
