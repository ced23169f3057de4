"""recipes/trl_sft.py, on a saved model and a file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from both import LAYERS, make_model, sentence
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")
RECIPE = Path(__file__).parents[2] / "recipes" / "trl_sft.py"


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_it_trains_and_saves(scheduled, capsys, tmp_path, kind) -> None:
    spec = importlib.util.spec_from_file_location("trl_sft", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    with (tmp_path / "data.jsonl").open("w") as file:
        for number in range(30):
            turns = [{"role": role, "content": sentence(number)} for role in ("user", "assistant")]
            row = {"text": sentence(number)} if kind == "text" else {"messages": turns}
            file.write(json.dumps(row) + "\n")
    paths = [str(tmp_path / name) for name in ("model", "data.jsonl", "out")]
    recipe.main([*paths, "--max_length", "64", "--max_steps", "2"])
    assert len(scheduled) == 2 * LAYERS and "Hugging Face's layers" not in capsys.readouterr().out
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = model.state_dict()
    assert trained.state_dict().keys() == start.keys()
    assert all((value - start[name]).any() for name, value in trained.state_dict().items())
