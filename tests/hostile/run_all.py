"""Runs every hostile case and records what became of each.

    python tests/hostile/run_all.py --output profiling/results/hostile.json

Rows: table, name, expected, outcome (the line that says it), s, problems (none, if all is well).
The exit status is 1 if a case has problems.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hostile.cases import Case
from hostile.client import Server
from hostile.tables import CASES
from profiling.results import results_file, write_results


def run(cases: list[Case], folder: Path, servers: int) -> Iterator[dict[str, Any]]:
    """Rows in the order of the tables, from so many servers at once."""
    with ExitStack() as stack:
        free: Queue[Server] = Queue()
        for number in range(servers):
            free.put(stack.enter_context(Server(folder / str(number))))

        def run_one(case: Case) -> dict[str, Any]:
            server = free.get()
            try:
                return server.run(case.id)
            finally:
                free.put(server)

        yield from stack.enter_context(ThreadPoolExecutor(servers)).map(run_one, cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=results_file, help="JSON file to write")
    parser.add_argument("--servers", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--only", default="", help="a regular expression of `table: name`")
    args = parser.parse_args()
    cases = [case for case in CASES if re.search(args.only, case.id)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run(cases, Path(folder), args.servers):
            place = rf"{re.escape(folder)}/\d+/(?:\d+|base)"
            row["outcome"] = re.sub(place, "FOLDER", row["outcome"])
            rows.append(row)
            if row["problems"]:
                problems = "; ".join(row["problems"])
                print(f"{row['table']}: {row['name']}: {problems} | {row['outcome']}", flush=True)
    bad = sum(bool(row["problems"]) for row in rows)
    print(f"{len(rows)} cases, {bad} with problems")
    if args.output:
        write_results(args.output, rows, extra={"cases": len(rows), "with_problems": bad})
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
