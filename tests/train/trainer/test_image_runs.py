"""`longctx train` on conversations with images: exact, resumable, and refused in one line."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_layer import gradients
from small_run import prepare, run
from torch import Tensor
from transformers import AutoModelForImageTextToText

import longctx
from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.output import METRICS

small = pytest.importorskip("small_images")
pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.image_model(tmp_path_factory.mktemp(kind), kind))


def summed(model: Any, documents: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of documents, each run by itself, weighted by trained tokens."""
    total = sum(int(one["labels"].ne(-100).sum()) for one in documents)
    whole, grads = torch.zeros((), dtype=model.dtype), {}
    for one in documents:
        share = int(one["labels"].ne(-100).sum()) / total
        loss, found = gradients(model, one)
        whole += share * loss.detach()
        for name, grad in found.items():
            if grad is not None:  # a text reaches no tower
                grads[name] = grads.get(name, 0) + share * grad
    return whole, grads


@pytest.mark.parametrize("kind", small.PLACES)
def test_packed_rows_train_as_each_document_alone(kind, model_of, tmp_path) -> None:
    """Loss and all gradients, beside Hugging Face's model and transformers' own processor."""
    model, records = model_of(kind), [*small.about_colours(6), small.in_turns()]
    batch = small.of_file(model, tmp_path, records).batch()
    assert len(batch["input_ids"]) < len(records) / 2
    batch.pop("documents")
    naive = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).train()
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    documents = [small.alone(kind, model, record, tmp_path) for record in records]
    loss, grads = gradients(ours, batch)
    found = loss, {name: grad for name, grad in grads.items() if grad is not None}
    small.assert_as_each_alone(found, naive, lambda model: summed(model, documents))


@pytest.mark.parametrize("kind", small.PLACES)
def test_rows_of_one_document_each_are_padded(kind, model_of, tmp_path) -> None:
    """As other class types have them, of several lengths in a batch; patched and not."""
    model, records = model_of(kind), [*small.about_colours(3), small.in_turns()]
    batch = small.of_file(model, tmp_path, records).batch(one_document=True)
    batch.pop("documents")
    assert not batch["attention_mask"].all()
    documents = [small.alone(kind, model, record, tmp_path) for record in records]
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        total = sum(int(one["labels"].ne(-100).sum()) for one in documents)
        losses = [plain(**one).loss * int(one["labels"].ne(-100).sum()) for one in documents]
        for model in (plain, longctx.patch(copy.deepcopy(plain), strict=True)):
            found = model(**batch).loss
            torch.testing.assert_close(found, sum(losses) / total, rtol=2e-6, atol=0)


SHORT = ["--max_steps", "4", "--save_steps", "2", "--logging_steps", "1", "--dtype", "float32"]


@pytest.fixture
def flags_of(model_of, tmp_path) -> Any:
    """The flags of a short run on conversations about images, for a model of a kind."""

    def flags(kind: str, records: Sequence[Any] | None = None) -> list[str]:
        records = small.about_colours() if records is None else records
        found = ["--model_name_or_path", str(model_of(kind)), "--seq_len", "128", "--use_cpu"]
        found += ["--train_file", str(small.write(tmp_path, records)), *SHORT]
        found += ["--cache_dir", str(tmp_path / "cache"), "--learning_rate", "0.003"]
        return [*found, "--disable_tqdm", "true", "--dataloader_num_workers", "0"]

    return flags


def final(folder: Path) -> dict[str, Tensor]:
    model, said = AutoModelForImageTextToText.from_pretrained(
        folder / "final", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    return model.state_dict()


def changed(before: Path, after: dict[str, Tensor]) -> set[str]:
    old = AutoModelForImageTextToText.from_pretrained(before).state_dict()
    return {name for name, weight in after.items() if not torch.equal(weight, old[name])}


RUNS = [kind for kind in small.PLACES if kind != "qwen2_5_vl"]
"""Of the two models of Qwen's, whose rows and batches are made alike, one runs from end to end."""


def with_images(name: str) -> bool:
    return "vision" in name or "visual" in name


@pytest.mark.parametrize("kind", ["qwen3_vl"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, flags_of, model_of, tmp_path) -> None:
    flags = [*flags_of(kind), "--lr_scheduler_type", "constant"]
    whole = run(flags, tmp_path / "whole")
    run(flags, tmp_path / "parts", "--max_steps", "2")
    parts = run(flags, tmp_path / "parts", "--resume_from_checkpoint", "true")
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    weights = [final(tmp_path / name) for name in ("whole", "parts")]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    names = changed(model_of(kind), weights[0])
    assert names and not any(map(with_images, names))
    files = {path.name for path in model_of(kind).iterdir()}
    assert files <= {path.name for path in (tmp_path / "whole" / "final").iterdir()}
    shutil.copy(tmp_path / "green.png", tmp_path / "red.png")  # as large, so as many tokens
    with pytest.raises(UserError, match=r"is of another run: images \(files of them"):
        run(flags, tmp_path / "parts", "--resume_from_checkpoint", "true", "--max_steps", "6")


@pytest.mark.parametrize("lora", [[], ["--lora_r", "4"]], ids=["whole", "adapters"])
def test_no_bit_depends_on_where_a_frozen_tower_waits(lora, flags_of, tmp_path, capsys) -> None:
    """Of a resumed run, too. Checkpoints and the final model have its weights."""
    flags = [*flags_of("qwen3_vl"), *lora, "--lr_scheduler_type", "constant"]
    flags += ["--optimizer_states", "fp32"]
    here = run([*flags, "--place", "gpu"], tmp_path / "here")
    flags += ["--place", "host"]
    run(flags, tmp_path / "away", "--max_steps", "2")
    capsys.readouterr()
    away = run(flags, tmp_path / "away", "--resume_from_checkpoint", "true")
    assert "in memory: " in (said := capsys.readouterr().out) and "; on the host: weights" in said
    assert [line["loss"] for line in away] == [line["loss"] for line in here]
    folders = [tmp_path / name for name in ("here", "away")]
    if lora:
        weights = [load_file(path / "final" / "adapter_model.safetensors") for path in folders]
    else:
        weights = [final(path) for path in folders]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_train_vision_changes_what_sees(kind, flags_of, model_of, tmp_path, capsys) -> None:
    run(flags_of(kind), tmp_path / "run", "--train_vision", "--max_steps", "1")
    names = changed(model_of(kind), final(tmp_path / "run"))
    assert {with_images(name) for name in names} == {True, False}
    assert "the vision tower is trained, too" in capsys.readouterr().out


def evaluated(folder: Path) -> float:
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def test_it_evaluates_on_images_of_another_file_and_held_out_ones(flags_of, tmp_path) -> None:
    """Of another file the loss is that of the saved model, which is not trained on it."""
    flags = [*flags_of("llava"), "--seq_len", "256"]
    (tmp_path / "other").mkdir()
    other = small.write(tmp_path / "other", [small.in_turns()])
    run(flags, tmp_path / "run", "--eval_file", str(other))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "final")
    alone = small.alone("llava", tmp_path / "run" / "final", small.in_turns(), tmp_path)
    with torch.no_grad():
        assert evaluated(tmp_path / "run") == pytest.approx(float(model(**alone).loss), rel=1e-5)
    run(flags, tmp_path / "held", "--eval_share", "0.3")
    assert 0 < evaluated(tmp_path / "held") < 7


@pytest.mark.parametrize("vision", [[], ["--train_vision"]])
def test_adapters_are_on_what_sees_if_it_trains(vision, flags_of, tmp_path) -> None:
    run(flags_of("qwen3_vl"), tmp_path / "run", "--lora_r", "4", "--max_steps", "1", *vision)
    adapters = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert any("language_model" in name for name in adapters)
    of_towers = {name for name in adapters if with_images(name)}
    assert bool(of_towers) == bool(vision)
    assert all(adapters[name].any() for name in of_towers)  # B began as zeros


@pytest.mark.parametrize("kind", RUNS)
def test_vanilla_takes_the_same_steps_of_one_document_a_row(
    kind, flags_of, tmp_path, capsys
) -> None:
    (tmp_path / "other").mkdir()
    other = small.write(tmp_path / "other", small.about_colours(4))
    flags = [*flags_of(kind, [small.in_turns()]), "--eval_file", str(other), "--train_vision"]
    flags += ["--seq_len", "256", "--max_steps", "3", "--learning_rate", "1e-4"]
    vanilla = run(flags, tmp_path / "vanilla", "--class_type", "vanilla")
    assert "4 rows of up to 256, one document in each" in capsys.readouterr().out
    ours = run(flags, tmp_path / "ours")
    assert "1 row of 256" in capsys.readouterr().out
    for a, b in zip(ours, vanilla, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    losses = [evaluated(tmp_path / name) for name in ("ours", "vanilla")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# --- refusals ----------------------------------------------------------------------------------


def refused(flags: list[str], folder: Path, monkeypatch: Any, *more: str) -> str:
    """The line with which a run ends before it has loaded weights."""
    monkeypatch.setattr(train, "load_model", None)
    with pytest.raises(UserError) as error:
        run(flags, folder / "run", *more)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder), "")


ANSWERED = {"role": "assistant", "content": [{"type": "image", "image": "red.png"}]}
RECORDS = {
    "a broken image": (small.asked("broken.png"), "image 1 is a broken image: "),
    "no image": (small.asked("red.png", "pictures.jsonl"), "image 2 is no image: "),
    "a missing one": (small.asked("none.png"), "image 1, none.png, is no file in "),
    "a URL": (small.asked("https://a.b/c.png"), "image 1 is a URL, and nothing is fetched"),
    "out of the folder": (small.asked("../out.png"), "image 1, ../out.png, leads out of "),
    "no base64": (small.asked("data:image/png;base64,%"), "image 1 is no base64 "),
    "base64 of no image": (small.asked("data:image/png;base64,AAAA"), "image 1 is no image"),
    "in an answer": (
        {"messages": [*small.asked()["messages"], ANSWERED]},
        "answer 2 has an image: models that are trained here write text alone",
    ),
    "the image token in a text": (
        small.asked("red.png", question="What does <|image_pad|> mean?"),
        "the chat template shows 2 of 1 images: use one that shows each, and no '<|image_pad|>'",
    ),
    "the image token in an answer": (
        small.asked("red.png", answer="<|image_pad|>"),
        "the chat template shows 2 of 1 images",
    ),
    "the image token beside no image": (
        small.asked(question="What does <|image_pad|> mean?"),
        "the chat template shows 1 of 0 images",
    ),
    "the image token in text alone": (
        {"text": "What does <|image_pad|> mean?"},
        "a text has '<|image_pad|>', which stands for a part of an image: leave it out",
    ),
    "the image token in a completion": (
        {"prompt": "What?", "completion": "<|image_pad|>"},
        "a text has '<|image_pad|>'",
    ),
    "too long": (
        small.asked(*["red.png"] * 9, question="What colour is it? " * 9),
        "is never split: raise --seq_len (128), lower --image_pixels",
    ),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_refused_by_its_line(record, flags_of, tmp_path, monkeypatch) -> None:
    given, said = RECORDS[record]
    flags = flags_of("qwen3_vl", [small.asked("red.png"), given])
    small.Image.effect_noise((64, 64), 90).save(tmp_path / "broken.png")
    whole = (tmp_path / "broken.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path.parent / "out.png").write_bytes(whole)
    found = refused(flags, tmp_path, monkeypatch)
    assert found.startswith("/pictures.jsonl:2") and said in found


def test_a_part_of_a_image_in_a_text(flags_of, tmp_path, monkeypatch) -> None:
    """Gemma 3's place is another token."""
    flags = flags_of("gemma3", [small.asked("red.png", question="What is <image_soft_token>?")])
    found = refused(flags, tmp_path, monkeypatch)
    assert found.startswith("/pictures.jsonl:1: a text has '<image_soft_token>', which stands for")


def test_where_others_are_truncated_a_long_one_is_left_out(flags_of, tmp_path, capsys) -> None:
    long, _ = RECORDS["too long"]
    flags = flags_of("qwen3_vl", [long, small.asked("red.png")])
    run(flags, tmp_path / "run", "--long_documents", "truncate", "--max_steps", "1")
    said = capsys.readouterr().out.replace("\n", "")
    assert "1 document with images left out as too long: " in said and "pictures.jsonl:1" in said


def test_all_are_too_long(flags_of, tmp_path, monkeypatch) -> None:
    long, _ = RECORDS["too long"]
    flags = flags_of("qwen3_vl", [long, long])
    assert refused(flags, tmp_path, monkeypatch, "--long_documents", "truncate") == (
        "nothing to train on in /pictures.jsonl: 2 documents with images, too long for "
        "--seq_len: raise it, or lower --image_pixels"
    )


@pytest.fixture
def of_text(tmp_path) -> list[str]:
    """The flags of a run of a model of text."""
    (tmp_path / "text").mkdir()
    return [*prepare(tmp_path / "text"), *SHORT]


READERS = "it has images, which --task sft, dpo, orpo, cpo, simpo and kto of a vision-"


def test_images_are_refused_by_a_model_of_text(of_text, tmp_path, monkeypatch) -> None:
    file = small.write(tmp_path, [small.asked(), small.asked("red.png")])
    found = refused(of_text, tmp_path, monkeypatch, "--train_file", str(file))
    assert found.startswith("/pictures.jsonl:2: " + READERS)


def test_images_are_refused_by_other_tasks(flags_of, model_of, tmp_path, monkeypatch) -> None:
    flags = flags_of("gemma3", [small.asked("red.png")])
    words = ("--task", "distill", "--teacher", str(model_of("gemma3")))
    found = refused(flags, tmp_path, monkeypatch, *words)
    assert found.startswith("/pictures.jsonl:1: " + READERS)


def test_images_of_a_stream_are_refused(flags_of, tmp_path, monkeypatch) -> None:
    flags = flags_of("qwen3_vl", [small.asked("red.png")])
    at = flags.index("--train_file")
    flags[at : at + 2] = ["--dataset_name", str(tmp_path), "--streaming"]
    found = refused(flags, tmp_path, monkeypatch)
    assert READERS in found


def test_unused_columns_stay(flags_of, tmp_path, monkeypatch) -> None:
    found = refused(flags_of("llava"), tmp_path, monkeypatch, "--remove_unused_columns", "true")
    assert found == "--remove_unused_columns would remove images from rows: leave it out"


WITHOUT_USE = [["--train_vision"], ["--image_pixels", "64x64"]]


@pytest.mark.parametrize("option", WITHOUT_USE)
def test_options_of_images_are_refused_where_none_is_seen(
    option, of_text, flags_of, tmp_path, monkeypatch
) -> None:
    for flags in (of_text, flags_of("llava", [{"text": "Of herons. " * 9}])):
        assert option[0] in refused(flags, tmp_path, monkeypatch, *option)


@pytest.mark.parametrize("given", ["0", "448x", "x448", "4.5", "-3x4", "448x448x3", "99999", "big"])
def test_image_pixels_are_checked_with_the_options(given, flags_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "load_tokenizer", None)
    flags = flags_of("llava", [{"text": "Of herons."}])
    found = refused(flags, tmp_path, monkeypatch, f"--image_pixels={given}")
    assert found.startswith(f"--image_pixels {given}: ") and "as" in found and "448x448" in found


@pytest.mark.parametrize("kind", small.PLACES)
def test_a_model_without_a_processor(kind, flags_of, model_of, tmp_path, monkeypatch) -> None:
    shutil.copytree(model_of(kind), tmp_path / "bare")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "bare" / name).unlink(missing_ok=True)
    flags = [*flags_of(kind), "--model_name_or_path", str(tmp_path / "bare")]
    found = refused(flags, tmp_path, monkeypatch)
    assert found.startswith("/bare has no processor that reads images (")


@pytest.mark.parametrize("becomes", ["nothing", "another"])
def test_a_image_that_changes_under_way(becomes, flags_of, tmp_path, monkeypatch) -> None:
    """It was whole when the rows were made."""
    flags = flags_of("qwen3_vl", [small.asked("red.png")])
    load = train.load_model

    def loaded(*args: Any, **options: Any) -> Any:
        (tmp_path / "red.png").unlink()
        if becomes == "another":
            small.Image.new("RGB", (60, 60)).save(tmp_path / "red.png")
        return load(*args, **options)

    monkeypatch.setattr(train, "load_model", loaded)
    with pytest.raises(UserError) as error:
        run(flags, tmp_path / "run")
    said = str(error.value)
    assert "\n" not in said and "red.png" in said


def test_images_in_the_earlier_run_are_not_deleted(flags_of, tmp_path) -> None:
    """Records outside of it name them: before a model is loaded, and overwriting or resuming."""
    flags, out = flags_of("qwen3_vl"), tmp_path / "run"
    (out / "final").mkdir(parents=True)
    (out / "final" / "config.json").write_text("{}")
    shutil.copy(tmp_path / "red.png", out / "final")
    (tmp_path / "red.png").unlink()
    (tmp_path / "red.png").symlink_to(out / "final" / "red.png")
    with pytest.raises(UserError, match=r"run/final would be deleted .* reads .*red\.png"):
        run(flags, out, "--overwrite_output_dir")
    assert (out / "final" / "red.png").exists()
