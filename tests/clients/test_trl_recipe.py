"""The scripts recipes/trl_*.py, on a saved model and a file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from both import LAYERS, make_model, sentence
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from longctx.calls import shared_prefixes
from profiling import pictures_to_read

pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")
RECIPES = Path(__file__).parents[2] / "recipes"


def load_recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def run(name: str, folder: Path, rows: list[dict[str, Any]], *flags: str) -> tuple[Any, Path]:
    """Returns the model that the recipe started from, and where it saved."""
    recipe = load_recipe(name)
    model = make_model()
    model.save_pretrained(folder / "model")
    small_tokenizer().save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.main([*(str(folder / part) for part in ("model", "data.jsonl", "out")), *flags])
    return model, folder / "out"


def assert_trained(start: Any, folder: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    start = start.state_dict()
    assert trained.keys() == start.keys()
    assert all((value != start[name].to(value.dtype)).any() for name, value in trained.items())


def test_sft(scheduled, capsys, tmp_path) -> None:
    """On conversations; tests/test_package.py has a run on text."""
    rows: list[dict[str, Any]] = []
    for number in range(30):
        turns = [{"role": role, "content": sentence(number)} for role in ("user", "assistant")]
        rows.append({"messages": turns})
    flags = ["--max_length", "64", "--max_steps", "2"]
    assert_trained(*run("trl_sft", tmp_path, rows, *flags))
    assert len(scheduled) == 2 * LAYERS and "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--train_vision",)])
def test_images(scheduled, capsys, tmp_path, flags) -> None:
    pictures_to_read.make(tmp_path, hidden=128, layers=2, side=28)
    data, out = str(tmp_path / "pictures.jsonl"), tmp_path / "out"
    given = [str(tmp_path / "model"), data, str(out), "--max_steps", "2", *flags]
    load_recipe("trl_images").main(given)
    start, trained = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name).state_dict()
        for name in ("model", "out")
    )
    moved = {name for name, x in trained.items() if (x != start[name].to(x.dtype)).any()}
    assert any("language_model" in name for name in moved)
    assert any("vision_tower" in name for name in moved) == bool(flags)
    assert any("projector" in name for name in moved) == bool(flags)
    assert len(scheduled) == 2 * 2 and "Hugging Face's layers" not in capsys.readouterr().out
    AutoProcessor.from_pretrained(out)


def test_a_file_that_is_no_image(capsys, tmp_path) -> None:
    """It is named before a model is loaded."""
    pictures_to_read.make(tmp_path, hidden=128, layers=2, side=28)
    data = tmp_path / "pictures.jsonl"
    first = json.loads(data.read_text().splitlines()[0])
    (tmp_path / first["images"][0]).write_bytes(b"text")
    with pytest.raises(SystemExit) as ended:
        load_recipe("trl_images").main(["no/model", str(data), str(tmp_path / "out")])
    assert ended.value.code == 1
    assert f"error: {data}:1: image 1 is no image: PNG" in capsys.readouterr().err


SHARED = "a prompt that documents of a batch share is computed once"


@pytest.mark.parametrize("rank", ["4", "0"])
def test_dpo(scheduled, capsys, tmp_path, monkeypatch, rank) -> None:
    """The reference is the model without adapters, or was computed before the first step."""
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2)
    answers = {"chosen": 3, "rejected": 5}
    rows = [
        {"prompt": sentence(n)} | {name: " " + sentence(n + k) for name, k in answers.items()}
        for n in range(4)
    ]
    flags = "--max_length 64 --max_steps 2 --learning_rate 1e-2 --lora_rank".split()
    start, out = run("trl_dpo", tmp_path, rows, *flags, rank)
    said = capsys.readouterr().out
    assert SHARED in said and "Hugging Face's layers" not in said
    references = 2 if int(rank) else len(rows)
    assert len(scheduled) == (2 + references) * LAYERS
    if int(rank):
        assert (out / "adapter_model.safetensors").is_file()
    else:
        assert_trained(start, out)


def test_grpo(scheduled, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2)
    rows = [{"prompt": sentence(n), "answer": "fox"} for n in range(4)]
    flags = "--max_steps 2 --num_generations 2 --max_completion_length 6 --lora_rank 4".split()
    _, out = run("trl_grpo", tmp_path, rows, *flags)
    said = capsys.readouterr().out
    assert SHARED in said and len(scheduled) == 2 * LAYERS
    assert (out / "adapter_model.safetensors").is_file()
