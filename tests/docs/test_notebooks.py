"""The notebooks run from top to bottom as a newcomer runs them: a tiny model, in an empty folder.

Their cells are run in order in this process, which takes a fraction of a notebook's kernel."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH, ROOT

from longctx.train import cli

pytestmark = pytest.mark.usefixtures("reference_kernels")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LAYERS, STEPS = 2, 6


def cells(name: str, kind: str) -> list[str]:
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a notebook and returns its variables."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # of the commands that a notebook starts

    def run(name: str) -> dict[str, Any]:
        variables: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(cells(name, "code")):
            exec(compile(cell, f"{name}, code cell {number}", "exec"), variables)
        return variables

    return run


def test_sft_with_trl(run: Any, scheduled: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    found = run("sft_with_trl")
    assert found["after"] == pytest.approx(found["before"], rel=1e-6)
    assert len(scheduled) == (1 + STEPS) * LAYERS and found["LENGTH"] in scheduled
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert Path("runs/sft/final/model.safetensors").is_file()
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def test_lora_at_length(run: Any, scheduled: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    found = run("lora_at_length")
    assert (
        len(scheduled) == len(found["losses"]) * LAYERS == STEPS * LAYERS
        and found["LENGTH"] in scheduled
    )
    assert found["losses"][-1] < found["losses"][0] - 0.2  # over frozen random weights
    assert "rtx-4090" in found["plan"].stdout.lower() and found["plan"].returncode == 0
    assert Path("runs/lora/adapter_model.safetensors").is_file()
    weights = dict(found["model"].named_parameters())
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in weights.items())
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def test_preferences(run: Any, scheduled: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule sees a prompt once: fewer tokens than two rows of a pair have."""
    found = run("preferences")
    said = capsys.readouterr().out
    assert "a prompt that documents of a batch share is computed once" in said
    assert len(scheduled) == 2 * STEPS * LAYERS  # a step's policy, and its reference
    assert min(found["lengths"]) >= 256
    answers = 64  # tokens, at most, with padding
    assert all(n < max(found["lengths"]) + answers for n in scheduled)
    assert found["history"][-1]["loss"] < found["history"][0]["loss"]
    assert found["history"][-1]["rewards/accuracies"] == 1.0
    assert Path("runs/dpo/final/adapter_model.safetensors").is_file()


def test_with_and_without(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Vanilla and longctx have the same losses, and the notebook's own loss equals the model's."""
    found = run("with_and_without")
    vanilla, ours = found["rows"]
    assert (vanilla["name"], ours["name"]) == ("vanilla", "longctx")
    assert ours["losses"] == pytest.approx(vanilla["losses"], rel=1e-4)
    assert ours["eval_loss"] == pytest.approx(vanilla["eval_loss"], rel=1e-4)
    assert len(ours["losses"]) == found["STEPS"] and ours["losses"][-1] < ours["losses"][0]
    assert found["own"] == pytest.approx(found["theirs"], rel=1e-5)
    said = capsys.readouterr().out
    assert "Hugging Face's layers run" not in said
    assert "needles found in all" in said and " s; at the peak " in said
    assert "3 images" in said and "the vision tower is trained, too" in said
    assert Path("runs/pictures/run/final/model.safetensors").is_file()


def outputs(name: str) -> list[str]:
    """What a notebook's code cells printed when it was recorded (profiling/run_notebook.py)."""
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert all(output["output_type"] == "stream" for output in found)
    return ["".join(output["text"]) for output in found]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_is_tested_and_shows_what_it_prints(path: Path) -> None:
    assert f"test_{path.stem}" in globals()
    said = outputs(path.stem)
    prints = [cell for cell in cells(path.stem, "code") if "print(" in cell]
    assert len(said) >= len(prints) - 1 > 2  # a cell may define a function that prints
    text = "".join(said)
    assert len(text) < 10_000 and str(Path.home()) not in text
    assert not re.search(r"(?i)warning|traceback|/tmp/|/work/|\x1b", text)


def test_the_plan_that_a_notebook_shows_is_todays(monkeypatch, capsys) -> None:
    """`python profiling/run_notebook.py lora_at_length` records it anew."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = next(text for text in outputs("lora_at_length") if "rtx-4090" in text)
    source = next(cell for cell in cells("lora_at_length", "code") if "subprocess" in cell)
    words = " ".join(re.findall(r'= "([^"]*)"', source)).split()
    cli.run(words)
    assert capsys.readouterr().out.split() == shown.split()


def test_links_and_imports_of_notebooks() -> None:
    """A link leads to a file that is there, and no cell imports what an extra does not bring."""
    known = {"torch", "tokenizers", "transformers", "longctx", "datasets", "trl", "peft"}
    known |= {"pathlib", "sysconfig", "subprocess", "sys", "random", "gc", "time", "liger_kernel"}
    known |= {"json", "PIL"}
    for path in NOTEBOOKS:
        text = "\n".join(cells(path.stem, "markdown"))
        for part in text.split("](")[1:]:
            target = part.partition(")")[0]
            assert (path.parent / target.partition("#")[0]).exists(), (path, target)
        for node in ast.walk(ast.parse("\n".join(cells(path.stem, "code")))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or node.names[0].name  # type: ignore[union-attr]
                assert module.partition(".")[0] in known, (path, module)
