"""`longctx train` on pairs and rated answers whose prompts have images."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import run
from torch import Tensor
from transformers import AutoModelForImageTextToText

import longctx
from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.output import METRICS
from longctx.train.tasks.scoring import attach_scoring

small = pytest.importorskip("small_images")
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("reference_kernels")]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.image_model(tmp_path_factory.mktemp(kind), kind))


def loaded(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()


def vanilla(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The log-probability of the answer of one conversation, by all logits."""
    inputs = {k: x.to(model.dtype) if x.is_floating_point() else x for k, x in given.items()}
    labels = inputs.pop("labels")[0]
    start = int((labels != -100).nonzero()[0])  # the answer is all that follows the prompt
    logits = model(**inputs, use_cache=False).logits[0, start - 1 : -1]
    targets = inputs["input_ids"][0, start:]
    return logits.log_softmax(-1).gather(1, targets[:, None]).sum()


def answers_of(kind: str, model: Path, record: Any, folder: Path) -> list[dict[str, Tensor]]:
    turns = [record["prompt"] + record[side] for side in ("chosen", "rejected")]
    return [small.alone(kind, model, {"messages": found}, folder) for found in turns]


WEIGHTS = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
"""The factor of each answer's log-probability in the sum that is compared. None is negative, or an
image's gradients of two answers would cancel, and leave rounding errors."""


def summed(model: Any, answers: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted log-probability of answers, each with its prompt by itself, and gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for answer, weight in zip(answers, WEIGHTS, strict=True):
        found = weight * vanilla(model, answer)
        found.backward()
        total += found.detach()
    return total, gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", small.PLACES)
def test_shared_prompts_train_as_each_answer_alone(kind, model_of, tmp_path) -> None:
    """Log-probabilities and all gradients, beside Hugging Face's model and transformers' own
    processor."""
    model, records = model_of(kind), small.pairs_about_colours(5)
    read = small.of_file(model, tmp_path, records, task="dpo")
    batch = read.batch(seq_len=768)
    numbers = batch["records"].tolist()
    assert len(batch["input_ids"]) == 1 and {*numbers} == {*range(5)}
    naive = loaded(model)
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    attach_scoring(ours)
    answers = [one for n in numbers for one in answers_of(kind, model, records[n], tmp_path)]
    total = (WEIGHTS * read.task.log_probs(ours, batch)).sum()
    total.backward()
    found = total, gradients_of(ours)
    small.assert_as_each_alone(found, naive, lambda model: summed(model, answers))


@pytest.mark.parametrize("kind", small.PLACES)
def test_answers_in_rows_of_their_own(kind, model_of, tmp_path) -> None:
    """Under vanilla and liger the pixels of a prompt stand in a batch once for each answer."""
    model, records = model_of(kind), small.pairs_about_colours()
    read = small.of_file(model, tmp_path, records, task="dpo", class_type="vanilla")
    batch = read.batch(seq_len=512)
    assert len(batch["input_ids"]) == 2 * len(records)
    plain = loaded(model)
    attach_scoring(plain)
    with torch.no_grad():
        found = read.task.log_probs(plain, batch)
        expected = [
            vanilla(plain, answer)
            for n in batch["records"].tolist()
            for answer in answers_of(kind, model, records[n], tmp_path)
        ]
    torch.testing.assert_close(found, torch.stack(expected).double(), rtol=2e-6, atol=2e-6)


# --- runs --------------------------------------------------------------------------------------

SHORT = ["--max_steps", "2", "--logging_steps", "1", "--dtype", "float32", "--save_steps", "1"]


@pytest.fixture
def flags_of(model_of, tmp_path) -> Any:
    """The flags of a short run of a task, for a model of a kind."""

    def flags(kind: str, task: str, records: Sequence[Any] | None = None) -> list[str]:
        records = small.pairs_about_colours() if records is None else records
        found = ["--model_name_or_path", str(model_of(kind)), "--seq_len", "160", "--use_cpu"]
        found += ["--train_file", str(small.write(tmp_path, records)), "--task", task, *SHORT]
        found += ["--cache_dir", str(tmp_path / "cache"), "--learning_rate", "0.001"]
        return [*found, "--disable_tqdm", "true", "--dataloader_num_workers", "0"]

    return flags


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [*map(json.loads, (folder / METRICS).read_text().splitlines())]


@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_dpo_takes_the_steps_of_vanilla_and_evaluates(kind, flags_of, tmp_path, capsys) -> None:
    (tmp_path / "other").mkdir()
    other = small.write(tmp_path / "other", small.pairs_about_colours(3))
    flags = [*flags_of(kind, "dpo"), "--eval_file", str(other), "--train_vision"]
    flags += ["--seq_len", "512", "--learning_rate", "1e-4"]
    vanilla = run(flags, tmp_path / "vanilla", "--class_type", "vanilla")
    ours = run(flags, tmp_path / "ours")
    said = capsys.readouterr().out
    assert "6 pairs" in said and "and 5 images" in said and "1 row of 512" in said
    assert ours[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert ours[1]["rewards/margins"] > 0.01
    for a, b in zip(ours, vanilla, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    evaluated = [
        [line["eval_loss"] for line in lines_of(tmp_path / name) if "eval_loss" in line][-1]
        for name in ("ours", "vanilla")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5) and evaluated[0] < 0.69
    loaded(tmp_path / "ours" / "final")


def test_kto_takes_the_steps_of_vanilla(flags_of, tmp_path) -> None:
    records = [
        {"prompt": x["prompt"], "completion": x["chosen" if n % 2 else "rejected"], "label": n % 2}
        for n, x in enumerate(small.pairs_about_colours())
    ]
    records = [{**record, "label": bool(record["label"])} for record in records]
    flags = [*flags_of("llava", "kto", records), "--seq_len", "512", "--learning_rate", "1e-4"]
    vanilla = run(flags, tmp_path / "vanilla", "--class_type", "vanilla")
    ours = run(flags, tmp_path / "ours")
    for a, b in zip(ours, vanilla, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["gemma3"])
def test_text_alone_takes_the_steps_of_vanilla(kind, flags_of, tmp_path, capsys) -> None:
    """Pairs of text train a vision-language model whose tower stays on the host, and vanilla packs
    their answers, too."""
    records = [small.compared(chosen=name) for name in small.COLOURS]
    flags = [*flags_of(kind, "simpo", records), "--learning_rate", "1e-4"]
    vanilla = run(flags, tmp_path / "vanilla", "--class_type", "vanilla")
    ours = run(flags, tmp_path / "ours")
    said = capsys.readouterr().out
    assert said.count("the vision tower stays in host memory, frozen") == 2
    for a, b in zip(ours, vanilla, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_positions_of_an_answer_go_on_from_the_image(model_of, tmp_path) -> None:
    """From the largest of the prompt's three rows."""
    read = small.of_file(model_of("qwen3_vl"), tmp_path, [small.compared("wide.png")], task="dpo")
    batch = read.batch(seq_len=160)
    ours = longctx.patch(loaded(model_of("qwen3_vl")), strict=True)
    attach_scoring(ours)
    start = int(batch["cu_seq_lens_q"][1])
    batch["position_ids"][1:, :, start] += 1
    with pytest.raises(UserError, match="^position_ids of a document with a parent must go on"):
        read.task.log_probs(ours, batch)


def test_a_resumed_run_is_the_uninterrupted_one(flags_of, tmp_path) -> None:
    """A run of adapters that evaluates held-out pairs goes on from a checkpoint as if it had not
    stopped."""
    flags = [*flags_of("qwen2_5_vl", "dpo"), "--lora_r", "4", "--eval_share", "0.2"]
    flags += ["--lr_scheduler_type", "constant"]
    whole = run(flags, tmp_path / "whole")
    run(flags, tmp_path / "parts", "--max_steps", "1")
    parts = run(flags, tmp_path / "parts", "--resume_from_checkpoint", "true")
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


def test_a_changed_image_has_another_reference(flags_of, model_of, tmp_path) -> None:
    """Also where the rows' tokens are the same, as those of LLaVA are."""
    records = [small.compared("red.png"), small.compared("red.png", chosen="x")]
    flags = [*flags_of("llava", "dpo", records), "--max_steps", "1"]
    flags += ["--reference", str(model_of("llava"))]
    run(flags, tmp_path / "first")
    small.Image.effect_noise((24, 16), 90).save(tmp_path / "red.png")
    (line,) = run(flags, tmp_path / "second")
    assert line["rewards/chosen"] == pytest.approx(0, abs=1e-6)
    assert len([*(tmp_path / "cache").glob("reference-*.arrow")]) == 2


def test_an_example_counts_the_tokens_of_a_image(flags_of, tmp_path, capsys) -> None:
    flags = flags_of("qwen3_vl", "dpo", [small.compared("wide.png")])
    train.main([*flags, "--output_dir", str(tmp_path / "run"), "--show_example"])
    said = capsys.readouterr().out.replace(str(tmp_path), "")
    assert "/pictures.jsonl:1, prompt, " in said and "/pictures.jsonl:1, rejected, " in said
    assert said.count("[image, ") == 1


def test_options_of_images_without_any(flags_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "load_model", None)
    flags = flags_of("llava", "dpo", [small.compared()])
    with pytest.raises(UserError, match="^--image_pixels limits images, and no record has any"):
        run(flags, tmp_path / "run", "--image_pixels", "64x64")
