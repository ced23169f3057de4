"""Runs every test that needs a GPU and records what became of each.

    python profiling/gpu_tests.py --output profiling/results/h200_gpu_tests.json

What comes after `--` goes to pytest. Rows: test, outcome (passed, failed, skipped), reason, s.
The exit status is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[1]


def read_junit(path: Path) -> list[dict[str, Any]]:
    """A row for each test of pytest's XML report."""
    rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        row: dict[str, Any] = {"test": f"{case.get('classname')}::{case.get('name')}"}
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        row["outcome"] = outcomes[problems[0].tag] if problems else "passed"
        if problems:
            row["reason"] = (problems[0].get("message") or "").splitlines()[0][:200]
        rows.append({**row, "s": round(float(case.get("time", 0)), 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    parser.add_argument("words", nargs="*", help="after --: more words for pytest")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
        status = subprocess.run([*command, *args.words], cwd=ROOT).returncode
        rows = read_junit(report)
    counts = {name: sum(row["outcome"] == name for row in rows) for name in ("passed", "failed")}
    write_results(args.output, rows, extra=counts)
    sys.exit(status)


if __name__ == "__main__":
    main()
