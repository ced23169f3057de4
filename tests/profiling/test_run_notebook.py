"""A notebook is run, and keeps what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longctx.errors import UserError
from profiling import run_notebook


def cell(kind: str, *lines: str) -> dict:
    return {"cell_type": kind, "source": [*lines], "outputs": ["old"], "execution_count": 7}


def test_outputs_and_rows(tmp_path: Path) -> None:
    path, results = tmp_path / "some.ipynb", tmp_path / "some.json"
    cells = [cell("code", "x = 2\n", "print(x)\n", "print('é')"), cell("markdown", "print(3)")]
    cells.append(cell("code", "from pathlib import Path\n", "rows = [{'x': x}]"))
    cells.append(cell("code", "_ = Path('made').write_text('')"))
    path.write_text(json.dumps({"cells": cells}))
    run_notebook.main([str(path), "--output", str(results)])
    first, second, third, _ = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert first["execution_count"] == 1 and third["execution_count"] == 2
    stream = {"name": "stdout", "output_type": "stream", "text": ["2\n", "é\n"]}
    assert first["outputs"] == [stream] and third["outputs"] == []
    assert second == cells[1]
    assert json.loads(results.read_text())["rows"] == [{"x": 2}]
    assert not (tmp_path / "made").exists() and not Path("made").exists()


def test_what_is_no_notebook_is_refused() -> None:
    with pytest.raises(UserError, match="cannot read nothing.ipynb as a notebook"):
        run_notebook.main(["nothing.ipynb"])
