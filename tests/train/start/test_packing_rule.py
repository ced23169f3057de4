"""Rows of one document each, where a model mixes those of a packed row: whole runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_run import on_ranks, prepare, run
from small_tokenizer import small_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.options.config import ModelArguments, TrainArguments
from longctx.train.start import packing_rule as documents
from longctx.train.start.loading import weights_bytes
from longctx.train.start.packing_rule import needs_one_document

TEXTS = [f"Story {i} of a fox. " + "It runs on. " * (1 + i % 5) for i in range(8)]
JOINED = "does not keep the documents of a packed row apart"


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Flags of a run of a model whose convolutions reach back, and its data, short texts."""
    found = prepare(tmp_path)
    for old in (tmp_path / "model").glob("*model*"):
        old.unlink()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "lfm2",
            **dict(vocab_size=len(small_tokenizer()), hidden_size=32, intermediate_size=64),
            **dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2),
            **dict(layer_types=["conv", "full_attention"], tie_word_embeddings=True),
            **dict(bos_token_id=0, eos_token_id=1, pad_token_id=2),
        )
    )
    model.save_pretrained(tmp_path / "model")
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    found[found.index("--train_file") + 1] = str(tmp_path / "texts.jsonl")
    return [*found, "--seq_len", "256", "--class_type", "vanilla"]


def lost(folder, tokenizer: Any) -> float:
    """The mean loss of all trained tokens, each document by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses, tokens = 0.0, 0
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        ids = torch.tensor([[*ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses += float(model(input_ids=ids, labels=ids).loss) * (ids.numel() - 1)
        tokens += ids.numel() - 1
    return losses / tokens


def test_each_row_holds_one_document(flags, tmp_path, capsys) -> None:
    options = ["--per_device_train_batch_size", "8", "--max_steps", "1", "--logging_steps", "1"]
    options += ["--eval_file", str(tmp_path / "texts.jsonl"), "--per_device_eval_batch_size", "3"]
    [line] = run(flags, tmp_path / "run", *options, "--learning_rate", "1e-12")
    expected = lost(tmp_path / "model", small_tokenizer())
    assert abs(line["loss"] - expected) < 2e-4
    said = capsys.readouterr().out
    assert said.count(JOINED) == 1 and "8 rows of up to 256, one document in each (0 pad" in said
    logged = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    [evaluated] = [json.loads(x)["eval_loss"] for x in logged if "eval_loss" in x]
    assert abs(evaluated - expected) < 1e-4
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["data"]["train"]["counts"]["rows"] == 8


def test_such_a_run_resumes_and_shows_its_rows(flags, tmp_path, capsys) -> None:
    flags += ["--lr_scheduler_type", "constant"]
    whole = run(flags, tmp_path / "whole", "--max_steps", "4", "--logging_steps", "1")
    run(flags, tmp_path / "run", "--max_steps", "2", "--logging_steps", "1")
    resumed = run(
        *(flags, tmp_path / "run", "--max_steps", "4", "--logging_steps", "1"),
        *("--resume_from_checkpoint", "true"),
    )
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    capsys.readouterr()
    train.main([*flags, "--show_example", "--output_dir", str(tmp_path / "shown")])
    said = capsys.readouterr().out
    assert "1 of 1: " in said and "padding, " not in said


def options(tmp_path, **more: Any) -> Any:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    model_args = ModelArguments(preset="tiny", seq_len=64, **{"class_type": "custom", **more})
    return model_args, args


def llama(**more: Any) -> Any:
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    return AutoConfig.for_model("llama", **sizes, num_attention_heads=4, **more)


@pytest.mark.parametrize(
    ("class_type", "dropout", "tried"),
    [("custom", 0.0, False), ("custom", 0.1, True), ("vanilla", 0.0, True)],
)
def test_hugging_faces_layers_are_tried(class_type, dropout, tried, tmp_path, monkeypatch) -> None:
    """The schedule gets boundaries; dropout sends a model to Hugging Face's layers."""
    found = []
    why = documents.why_joined
    monkeypatch.setattr(documents, "why_joined", lambda *a: found.append(a) or why(*a))
    chosen = options(tmp_path, class_type=class_type)
    state = torch.random.get_rng_state()
    config = llama(attention_dropout=dropout)
    assert not needs_one_document(*chosen, config, text=True)
    assert bool(found) == tried and torch.equal(torch.random.get_rng_state(), state)


def test_a_causal_class_takes_the_text_of_a_configuration(tmp_path) -> None:
    """As Llama 4, which also sees images."""
    text = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    text |= dict(num_local_experts=2, intermediate_size_mlp=64, pad_token_id=0)
    config = AutoConfig.for_model("llama4", text_config=text)
    model_args, args = options(tmp_path, class_type="vanilla")
    assert 0 < weights_bytes(model_args, config, args.device) < 10**6
    assert not needs_one_document(model_args, args, config, text=True)


def test_rows_that_must_hold_several_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "_why_joined", lambda *a: "why")
    model_args, args = options(tmp_path, class_type="vanilla")
    with pytest.raises(UserError, match="several answers: use --class_type custom"):
        needs_one_document(model_args, args, llama(), text=False)
    args.sequence_parallel_size = 2
    with pytest.raises(UserError, match="leave out --sequence_parallel_size"):
        needs_one_document(model_args, args, llama(), text=True)


def test_a_model_that_cannot_be_tried_is_not_packed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(documents, "why_joined", lambda *a: 1 / 0)
    assert needs_one_document(*options(tmp_path, class_type="vanilla"), llama(), text=True)
    assert "cannot be tried: ZeroDivisionError" in capsys.readouterr().out


def test_all_processes_answer_the_same(tmp_path, monkeypatch) -> None:
    chosen = options(tmp_path, class_type="vanilla")

    def check(rank: int, processes: int) -> None:
        monkeypatch.setattr(documents, "_why_joined", lambda *a: "why" if rank else None)
        assert needs_one_document(*chosen, llama(), text=True)

    on_ranks(2, check, tmp_path)
