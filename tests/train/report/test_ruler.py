"""`longctx eval --ruler`: what lm-eval is asked, against a stand-in of it whose one task counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from longctx.errors import UserError
from longctx.train.loading.tiny import tiny_llama_and_tokenizer
from longctx.train.report import evaluate, ruler

TEXT = "A brown fox jumps over it. "


class Asked:
    """lm-eval: `simple_evaluate` scores a text by whether the tokenizer of its folder reads it."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def simple_evaluate(self, **call: Any) -> dict[str, Any]:
        self.calls.append(call)
        made = call["metadata"]
        assert call["task_manager"] == made
        if call["tasks"] == ["niah_single_2"]:
            raise OSError("no network")
        read = AutoTokenizer.from_pretrained(made["tokenizer"])
        (tokens,) = made["max_seq_lengths"]
        score = float(read.decode(read(TEXT).input_ids) == TEXT) * call["limit"] / 4
        return {"results": {call["tasks"][0]: {f"{tokens},none": score}}}


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.tasks")}
    modules["lm_eval.models.huggingface"] = ModuleType("huggingface")
    vars(modules["lm_eval"])["simple_evaluate"] = asked.simple_evaluate
    vars(modules["lm_eval.models.huggingface"])["HFLM"] = lambda **how: how
    vars(modules["lm_eval.tasks"])["TaskManager"] = lambda metadata: metadata
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ruler, "installed", lambda module: True)
    return asked


@pytest.mark.parametrize(
    ("tasks", "seq_len", "said"),
    [
        (["niah_singel_1"], 8192, "--ruler niah_singel_1: did you mean niah_single_1?"),
        (["all"], 8192, "RULER's tasks are niah_single_1, .*ruler_qa_squad"),
        (["ruler_vt"], 2048, "texts of 4096 to 131072 tokens, and --seq_len is 2048"),
    ],
)
def test_what_cannot_be_is_one_line(tasks, seq_len, said, lm_eval) -> None:
    with pytest.raises(UserError, match=said):
        ruler.check_ruler(tasks, seq_len)


def test_what_is_missing_is_named_before_the_model_is_read(monkeypatch) -> None:
    monkeypatch.setattr(ruler, "installed", lambda module: module == "nltk")
    words = ["no/such/model", "--eval_file", "no.txt", "--seq_len", "4096", "--ruler", "ruler_vt"]
    with pytest.raises(UserError, match="needs lm-eval, wonderwords: pip install .*wonderwords"):
        evaluate.main(words)


@pytest.mark.parametrize(
    ("seq_len", "lengths"),
    [(4096, [4096]), (10000, [4096, 8192]), (131072, [16384, 32768, 65536, 131072])],
)
def test_lengths_are_those_of_needles(seq_len, lengths, lm_eval) -> None:
    assert ruler.check_ruler(["niah_single_1"], seq_len) == lengths


def test_a_model_is_scored_by_task_and_length(tmp_path: Path, lm_eval, capsys) -> None:
    for part in tiny_llama_and_tokenizer():
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 200)
    model, text, output = tmp_path / "model", tmp_path / "text.txt", tmp_path / "eval.json"
    words = [str(model), "--eval_file", str(text), "--seq_len", "4096", "--output", str(output)]
    words += ["--windows", "1", "--repeats", "1", "--samples", "2"]
    evaluate.main([*words, "--ruler", "niah_single_1", "niah_single_2"])
    said = capsys.readouterr().out
    assert "niah_single_1 at   4096 tokens: 50%" in said
    assert "niah_single_2 at   4096 tokens: failed: no network" in said
    assert "without a network there are niah_single_1, " in said
    (result,) = json.loads(output.read_text())
    assert [line.get("score") for line in result["ruler"]] == [0.5, None]
    first = lm_eval.calls[0]
    assert first["model"]["max_length"] == 4096 and first["model"]["pretrained"].config.use_cache
    assert not Path(first["metadata"]["tokenizer"]).exists()  # temporary, without foreign code
