"""Runs train.py with each class type on the same batches and records every logged line.

    python profiling/bench/train_bench.py --output profiling/results/h200_first_run.json
    python profiling/bench/train_bench.py --case class_type=liger,checkpointing=selective \\
        --output liger.json -- --max_steps 20

The job is recipes/llama-3.2-1b_32k.yaml: Llama-3.2-1B's architecture on real text (Python's
standard library) packed into rows of 32768 tokens, bf16, ten steps. A case is a class type and, of
a peer, its settings (peers.py). Anything after `--` goes to train.py, for all cases.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiling.bench import runner
from profiling.bench.peers import prepare_peer, settled
from profiling.bench.runner import QUIET, ROOT, Case, Row, logged_lines, until_out_of_memory

DEFAULTS: Case = {
    "class_type": "custom",
    "checkpointing": None,
    "offload": None,
    "backend": "fa4",
}
"""`offload`: of a peer `none` or `all`, of custom what --offload_activations takes."""
PUBLISHED = [
    dict(class_type="vanilla", checkpointing="layers"),
    dict(class_type="liger", checkpointing="layers"),
    dict(class_type="liger", checkpointing="selective"),
    dict(class_type="liger", checkpointing="none"),
    dict(class_type="custom"),
]
JOB = ["--config", str(ROOT / "recipes/llama-3.2-1b_32k.yaml")]


def complete(case: Case) -> Case:
    """The case with its settings: as train.py runs custom, and a peer that keeps all on the GPU."""
    offload = "auto" if case["class_type"] == "custom" else "none"
    return {**settled(case), "offload": case["offload"] or offload}


def train_flags(case: Case) -> list[str]:
    flags = ["--class_type", case["class_type"], "--attn_backend", case["backend"]]
    if case["class_type"] == "custom":
        return [*flags, "--offload_activations", case["offload"]]
    return [*flags, "--gradient_checkpointing", "false"]  # it is prepare_peer's


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """The logged lines of train.py in this process, with the peer's settings given to the model
    that it loads, and a row that says so where memory ran out."""
    from longctx.train.commands import train

    load_model = train.load_model

    def load_peer(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        prepare_peer(model, case)
        return model

    train.load_model = load_peer
    with tempfile.TemporaryDirectory() as folder:
        words = [*JOB, *QUIET, "--output_dir", folder, *train_flags(case), *flags]
        with until_out_of_memory() as outcome:
            train.main(words)
        rows = [{**case, **line} for line in logged_lines(Path(folder))]
    return rows if outcome["status"] == "ok" else [*rows, {**case, **outcome}]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"published": PUBLISHED},
    measure=run_case,
    settle=complete,
    key=(*DEFAULTS, "step"),
    repeats=None,
    takes_flags=True,
)

if __name__ == "__main__":
    runner.main(BENCH)
