"""Prompts with images: their records, tokens and rows, and what is refused of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import datasets
import pytest

from longctx.errors import UserError
from longctx.train.data.reading.places import MARK
from longctx.train.data.reading.records import as_document

small = pytest.importorskip("small_images")
USER, BOT = "user", "assistant"


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TEXT = {"type": "text", "text": "What?"}
PLACE, RED, WIDE = (
    {"type": "image", **more} for more in ({}, *({"image": f"{x}.png"} for x in ("red", "wide")))
)
ASKED, A, B = turn(USER, "What?"), turn(BOT, "Red."), turn(BOT, "Blue.")
SHOWN = turn(USER, [PLACE, TEXT])
IMAGES = {"images": ["red.png"]}
PAIRS = {
    "TRL": {**IMAGES, "prompt": [SHOWN], "chosen": [A], "rejected": [B]},
    "one image": {"image": "red.png", "prompt": [SHOWN], "chosen": [A], "rejected": [B]},
    "parts that name it": {"prompt": [turn(USER, [RED, TEXT])], "chosen": [A], "rejected": [B]},
    "no place": {**IMAGES, "prompt": [ASKED], "chosen": [A], "rejected": [B]},
    "strings": {**IMAGES, "prompt": "What?", "chosen": "Red.", "rejected": "Blue."},
    "a marked string": {**IMAGES, "prompt": "<image>What?", "chosen": "Red.", "rejected": "Blue."},
    "a string before turns": {**IMAGES, "prompt": "What?", "chosen": [A], "rejected": [B]},
    "whole conversations": {**IMAGES, "chosen": [SHOWN, A], "rejected": [SHOWN, B]},
    "whole ones that name it": {
        "chosen": [turn(USER, [RED, TEXT]), A],
        "rejected": [turn(USER, [RED, TEXT]), B],
    },
    "whole ones without a place": {**IMAGES, "chosen": [ASKED, A], "rejected": [ASKED, B]},
    "LLaMA-Factory": {
        **IMAGES,
        "conversations": [{"from": "human", "value": "<image>What?"}],
        "chosen": {"from": "gpt", "value": "Red."},
        "rejected": {"from": "gpt", "value": "Blue."},
    },
}
RATED = {
    "TRL": {**IMAGES, "prompt": [SHOWN], "completion": [A], "label": True},
    "strings": {**IMAGES, "prompt": "What?", "completion": "Red.", "label": True},
    "messages": {**IMAGES, "messages": [SHOWN, A], "label": True},
    "parts": {"messages": [turn(USER, [RED, TEXT]), A], "label": True},
}


def read(record: dict[str, Any], folder: Path, rows: Any = "pairs") -> Any:
    document = as_document(record, "f:1", rows=rows, folder=folder, with_images=True)
    assert document is not None and document.kind == "answers_with_pictures"
    return document.content


@pytest.fixture
def folder(tmp_path) -> Path:
    small.write(tmp_path, [])
    return tmp_path


@pytest.mark.parametrize("record", PAIRS)
def test_forms_of_pairs(record, folder) -> None:
    assert read(PAIRS[record], folder) == {
        "prompt": [turn(USER, f"{MARK}What?")],
        "answers": [[A], [B]],
        "sides": [0, 1],
        "pictures": [str(folder / "red.png")],
    }


@pytest.mark.parametrize("record", RATED)
def test_forms_of_rated_answers(record, folder) -> None:
    found = read(RATED[record], folder, "rated")
    assert found["prompt"] == [turn(USER, f"{MARK}What?")] and found["answers"] == [[A]]
    assert found["sides"] == [0] and len(found["pictures"]) == 1


def test_places_keep_their_order(folder) -> None:
    """In several turns, before an answer that belongs to the prompt."""
    turns = [turn(USER, [RED, TEXT]), B, turn(USER, [TEXT, WIDE])]
    found = read({"prompt": turns, "chosen": [A], "rejected": [B]}, folder)
    assert [x["content"].count(MARK) for x in found["prompt"]] == [1, 0, 1]
    assert [Path(x).name for x in found["pictures"]] == ["red.png", "wide.png"]


T = PAIRS["TRL"]
REFUSED = {
    "more images": ({**T, "images": ["red.png"] * 2}, "has 1 image parts or <image> and 2 imag"),
    "more places": (
        {**T, "prompt": [turn(USER, [PLACE, PLACE, TEXT])]},
        "has 2 image parts or <image> and 1 image",
    ),
    "in the chosen answer": (
        {"prompt": [turn(USER, [RED, TEXT])], "chosen": [turn(BOT, [WIDE])], "rejected": [B]},
        "`chosen` is an answer with an image: models that are trained here write text alone",
    ),
    "in the rejected answer": (
        {**T, "rejected": "<image>", "chosen": "Red."},
        "`rejected` is an answer with an image",
    ),
    "other images": (
        {"chosen": [turn(USER, [RED, TEXT]), A], "rejected": [turn(USER, [WIDE, TEXT]), B]},
        "`chosen` and `rejected` show other images: only answers to one prompt are compared",
    ),
    "whole strings": (
        {**IMAGES, "chosen": "What? Red.", "rejected": "What? Blue."},
        "images stand in a prompt, and `chosen` and `rejected` are whole strings: write `prompt`",
    ),
    "a video": ({**T, "videos": ["a.mp4"]}, "has `videos`, which is not read: give frames"),
    "a column and parts": (
        {**T, "prompt": [turn(USER, [RED, TEXT])]},
        "has images in turns and in a column: leave one out",
    ),
    "a missing file": ({**T, "images": ["none.png"]}, "image 1, none.png, is no file in"),
    "a URL": ({**T, "images": ["https://a.b/c.png"]}, "image 1 is a URL, and nothing is fetched"),
    "a mark": ({**T, "prompt": MARK, "chosen": "a", "rejected": "b"}, "which stands for an image"),
    "no pair": (
        {**IMAGES, "prompt": [SHOWN]},
        "expected `chosen` and `rejected` beside a `prompt`",
    ),
}


@pytest.mark.parametrize("record", REFUSED)
def test_a_record_is_refused_in_one_line(record, folder) -> None:
    given, said = REFUSED[record]
    with pytest.raises(UserError) as error:
        as_document(given, "f:1", rows="pairs", folder=folder, with_images=True)
    found = str(error.value)
    assert found.startswith("f:1") and said in found and "\n" not in found


# --- tokens and rows ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.image_model(tmp_path_factory.mktemp(kind), kind))


def rows_of(found: Any, **options: Any) -> list[dict[str, list[Any]]]:
    rows = found.rows(**options)
    return [{k: x.tolist() for k, x in r.items() if k not in ("images", "margins")} for r in rows]


def test_each_image_is_opened_once(model_of, tmp_path) -> None:
    """Though the prompt is rendered alone and before each answer; not at all from the cache."""
    model, records = model_of("qwen3_vl"), small.pairs_about_colours()
    first = small.of_file(model, tmp_path, records, task="dpo")
    rows = rows_of(first)
    assert first.opened == 5
    again = small.Read(model, tmp_path, task="dpo", train_file=first.args.train_file)
    assert rows_of(again) == rows and not again.opened
    small.Image.new("RGB", (60, 60)).save(tmp_path / "red.png")
    assert rows_of(again) != rows


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_dataset_has_the_rows_of_a_file(kind, model_of, tmp_path) -> None:
    records = small.pairs_about_colours()
    file = small.of_file(model_of(kind), tmp_path, records, task="dpo")
    found = []
    for record in records:
        parts = record["prompt"][0]["content"]
        images = [str(tmp_path / part["image"]) for part in parts if part["type"] == "image"]
        parts = [{"type": part["type"], "text": part.get("text")} for part in parts]
        found.append({**record, "prompt": [turn(USER, parts)], "images": images})
    column = datasets.List(datasets.Image())
    dataset = datasets.Dataset.from_list(found).cast_column("images", column)
    dataset.save_to_disk(tmp_path / "dataset")
    read = small.Read(model_of(kind), tmp_path, task="dpo", dataset_name=str(tmp_path / "dataset"))
    assert rows_of(read) == rows_of(file)


@pytest.mark.parametrize("kind", small.PLACES)
def test_the_answers_of_a_shared_prompt_go_on_from_it(kind, model_of, tmp_path) -> None:
    """The second as the first, in each row of positions."""
    read = small.of_file(model_of(kind), tmp_path, [small.compared("wide.png")], task="dpo")
    batch = read.batch(seq_len=160)
    _, first, second, end, _ = batch["cu_seq_lens_q"].tolist()
    positions = batch["position_ids"].view(-1, 160)
    shared = min(second - first, end - second)
    begun = [positions[:, start : start + shared] for start in (first, second)]
    assert (begun[0] == begun[1]).all()
    if kind.startswith("qwen"):
        prompt = positions[1:, :first]
        assert len(positions) == 4 and (begun[0][1:, 0] == prompt.max() + 1).all()
        assert prompt.max() + 1 < first == positions[0, first]


LONG = small.compared("red.png", chosen="red, " * 40, rejected="blue, " * 30)


def cut(model: Path, folder: Path, how: str, *records: Any) -> Any:
    return small.of_file(model, folder, [*records], task="dpo", long_documents=how)


def test_answers_are_cut_behind_a_whole_prompt(model_of, tmp_path) -> None:
    whole = cut(model_of("qwen3_vl"), tmp_path, "truncate", small.compared("red.png"))
    prompt = rows_of(whole, seq_len=160)[0]["lengths"][0]
    (row,) = rows_of(cut(model_of("qwen3_vl"), tmp_path, "truncate", LONG), seq_len=100)
    assert row["lengths"][0] == prompt and sum(row["lengths"]) == 100


def test_a_prompt_with_images_that_would_be_cut_is_left_out(model_of, tmp_path, capsys) -> None:
    found = cut(model_of("qwen3_vl"), tmp_path, "truncate_start", LONG, small.compared("red.png"))
    (row,) = rows_of(found, seq_len=160)
    assert row["documents"] == [1]
    said = capsys.readouterr().out.replace("\n", "")
    assert "left out: 1 too long, 1 with images: " in said and "pictures.jsonl:1" in said


def refused(model: Path, folder: Path, *records: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        small.of_file(model, folder, [*records], task="dpo").rows(**options)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder), "")


def test_a_group_that_is_too_long_names_what_makes_images_smaller(model_of, tmp_path) -> None:
    said = refused(model_of("qwen3_vl"), tmp_path, LONG, seq_len=100)
    assert said.startswith("/pictures.jsonl:1: prompt and answers take ")
    assert "raise --seq_len, lower --image_pixels, or cut" in said


def test_a_broken_image_is_named_by_line_and_number(model_of, tmp_path) -> None:
    record = small.compared("red.png", "pictures.jsonl")
    said = refused(model_of("llava"), tmp_path, small.compared("red.png"), record)
    assert said.startswith("/pictures.jsonl:2: image 2 is no image: ")


def test_the_token_of_a_image_in_a_text(model_of, tmp_path) -> None:
    """In an answer, and in a pair of strings beside records with images."""
    said = refused(
        model_of("qwen3_vl"), tmp_path, small.compared("red.png", chosen="<|image_pad|>")
    )
    assert said.startswith("/pictures.jsonl:1: the chat template shows 2 of 1 images: ")
    pair = {"prompt": "What?", "chosen": "<|image_pad|>", "rejected": "none"}
    said = refused(model_of("qwen3_vl"), tmp_path, small.compared("red.png"), pair)
    assert said.startswith("/pictures.jsonl:2: a text has '<|image_pad|>'")


def test_a_template_that_moves_a_image_behind_the_question(model_of, tmp_path) -> None:
    """The prompt alone begins otherwise than before an answer, so that no prompt is whole."""
    read = small.of_file(model_of("qwen3_vl"), tmp_path, [small.compared("red.png")], task="dpo")
    read.tokenizer.chat_template = (
        "{% if add_generation_prompt %}ask{% endif %}" + read.tokenizer.chat_template
    ).replace("{{ bos_token }}", "")
    with pytest.raises(UserError, match=r"pictures.jsonl:1: the chat template renders "):
        read.rows()
