"""Runs a notebook here, keeps what its cells print as their outputs, and records its rows.

    python profiling/run_notebook.py with_and_without \\
        --output profiling/results/h200_with_and_without.json

The cells run in this process, in an empty folder. The variable `rows`, a list of dicts, becomes the
rows of the results file.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.errors import UserError
from longctx.train.program import program
from longctx.train.safety.writing import replace_file
from profiling.results import results_file, write_results

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("notebook", help="its name in notebooks/, or a path")
    parser.add_argument("--output", type=results_file, help="JSON file for its rows")
    args = parser.parse_args(argv)
    path = NOTEBOOKS / f"{args.notebook}.ipynb"
    path = path if path.exists() else Path(args.notebook)
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as a notebook: {error}") from error
    output = args.output and args.output.absolute()
    path, before = path.absolute(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            rows = run(notebook)
        finally:
            os.chdir(before)
    replace_file(path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())
    if output:
        write_results(output, rows)


def run(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the cells, writes their outputs into the notebook, and returns its rows."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"code cell {number}", "exec"), variables)
        print(printed.getvalue(), end="")
        text = printed.getvalue().splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": text}
        cell["execution_count"], cell["outputs"] = number, [stream] if text else []
    return list(variables.get("rows", []))


if __name__ == "__main__":
    with program():
        main()
