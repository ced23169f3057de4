"""Results files: described by the run that made them, renewed row by row."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch):
    from profiling import results

    return results


def test_rows_are_replaced_by_key_and_the_command_names_no_machine(
    results, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "cpu_step.json"
    monkeypatch.setattr(sys, "argv", ["profiling/step.py", "--output", str(path)])
    monkeypatch.setenv("LONGCTX_COMMIT", "abc")
    results.write_results(path, [{"tokens": 1, "s": 2.0}, {"tokens": 2, "s": 3.0}])
    results.write_results(path, [{"tokens": 2, "s": 9.0}], key=["tokens"], extra={"rate": 7})
    written = json.loads(path.read_text())
    assert written["rows"] == [{"tokens": 1, "s": 2.0}, {"tokens": 2, "s": 9.0}]
    assert written["rate"] == 7
    assert written["commit"] == "abc"
    assert written["command"] == (
        "python profiling/step.py --output profiling/results/cpu_step.json"
    )
    assert {"hardware", "versions", "date"} <= written.keys()
    assert str(tmp_path) not in path.read_text()


def test_the_recorded_command_names_places_in_the_repository(results, monkeypatch) -> None:
    path = Path("/machine/out/profile_custom/phases_rank0.json")
    command = ["profiling/profile_step.py", "--profile_dir", "/machine/out/profile_custom"]
    monkeypatch.setattr(sys, "argv", command)
    assert results.describe_run(path)["command"].endswith("--profile_dir runs/profile_custom")
    monkeypatch.setattr(
        sys, "argv", ["profiling/bench/compare.py", "--output", "/machine/out/compare"]
    )
    described = results.describe_run(Path("/machine/out/compare.json"))
    assert described["command"].endswith("--output profiling/results/compare")


def test_renewed_results_are_no_changed_code(results, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("LONGCTX_COMMIT", raising=False)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "profiling" / "results.py"))
    (tmp_path / "profiling" / "results").mkdir(parents=True)
    table, code = tmp_path / "profiling/results/a.json", tmp_path / "train.py"
    for path in (table, code):
        path.write_text("1")
    as_someone = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*as_someone, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    table.write_text("2")
    assert re.fullmatch("[0-9a-f]{40}", results.describe_run(table)["commit"])
    code.write_text("2")
    assert results.describe_run(table)["commit"].endswith("-dirty")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "profiling/results").glob("*.json")), ids=lambda p: p.stem
)
def test_published_results_say_where_they_come_from(path: Path) -> None:
    published = json.loads(path.read_text())
    assert {"hardware", "versions", "commit", "command", "date", "rows"} <= published.keys()
    assert len(published["commit"]) == 40
    assert published["rows"]


SCRIPTS = [
    path
    for folder in ("profiling", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "write_results(" in path.read_text() and path.name not in ("results.py", Path(__file__).name)
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_checks_its_output_before_it_works(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            if isinstance(node.args[0], ast.Constant) and node.args[0].value in OUTPUTS:
                kind = next(word.value for word in node.keywords if word.arg == "type")
                name = kind.func if isinstance(kind, ast.Call) else kind
                assert isinstance(name, ast.Name) and name.id in ("results_file", "files_named")


OUTPUTS = ("--output", "--out")


def test_somebody_elses_file_is_refused(results, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LONGCTX_COMMIT", "abc")
    output = tmp_path / "new" / "a.json"
    for _ in range(2):  # also when it holds results
        assert results.results_file(str(output)) == output
        results.write_results(output, [{"s": 1.0}])
    (tmp_path / "new" / "a.png").write_bytes(b"a picture of them")
    both = results.files_named(".json", ".png")
    assert both(str(output.with_suffix(""))) == output.with_suffix("")
    for name, text in {"notes.json": "{}", "b.json": "[1]", "c.json": "rows commit"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(argparse.ArgumentTypeError, match="longctx did not write it"):
            results.results_file(str(tmp_path / name))
    (tmp_path / "d.png").write_bytes(b"somebody's")
    with pytest.raises(argparse.ArgumentTypeError, match="d.png: it is there already"):
        both(str(tmp_path / "d"))
