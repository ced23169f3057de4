"""Rows with images: their tokens and what is trained of them, from files and from datasets."""

from __future__ import annotations

import base64
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from longctx.errors import UserError
from longctx.train.data.reading.groups import IMAGE_COUNTS
from longctx.train.data.rows import _pixels, pixels_identity, rows_identity

Image = pytest.importorskip("PIL.Image")
small = pytest.importorskip("small_images")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.image_model(tmp_path_factory.mktemp(kind), kind))


@pytest.mark.parametrize("kind", small.PLACES)
def test_tokens_and_masks_are_those_of_the_processor(kind, model_of, tmp_path) -> None:
    model, record = model_of(kind), small.in_turns()
    row = small.of_file(model, tmp_path, [record]).rows(one_document=True)[0]
    theirs = small.alone(kind, model, record, tmp_path)
    assert row["input_ids"].tolist() == theirs["input_ids"][0].tolist()
    assert row["labels"].tolist() == theirs["labels"][0].tolist()


def rows_and_batches(read: Any) -> list[Any]:
    rows = read.rows(seq_len=150)
    batches = [read.collate([rows[n], rows[(n + 1) % len(rows)]]) for n in range(len(rows))]
    return [[row[name].tolist() for name in sorted(row) if name != "images"] for row in rows] + [
        {name: x.tolist() for name, x in batch.items()} for batch in batches
    ]


def saved(folder: Path, records: list[dict[str, Any]], *, embedded: bool) -> Path:
    """The records as a dataset on disk, with a column of images: of bytes, or of paths."""
    found = []
    for record in records:
        parts = [p for turn in record["messages"] for p in turn["content"] if isinstance(p, dict)]
        files = [folder / part["image"] for part in parts if part["type"] == "image"]
        images: list[Any] = [*map(str, files)]
        if embedded:
            images = [{"bytes": file.read_bytes(), "path": None} for file in files]
        turns = [{**turn, "content": without_names(turn["content"])} for turn in record["messages"]]
        found.append({"messages": turns, "images": images})
    column = datasets.List(datasets.Image())
    path = folder / ("embedded" if embedded else "linked")
    datasets.Dataset.from_list(found).cast_column("images", column).save_to_disk(path)
    return path


def without_names(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": part["type"], "text": part.get("text")} for part in content]


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_a_dataset_has_the_rows_of_a_file(kind, embedded, model_of, tmp_path) -> None:
    records = [*small.about_colours(5), small.in_turns()]
    file = small.of_file(model_of(kind), tmp_path, records)
    path = saved(tmp_path, records, embedded=embedded)
    found = small.Read(model_of(kind), tmp_path, dataset_name=str(path))
    assert rows_and_batches(found) == rows_and_batches(file)


def test_a_broken_image_of_a_dataset_is_named_by_its_row(model_of, tmp_path) -> None:
    small.write(tmp_path, [])
    (tmp_path / "red.png").write_bytes(b"no image")
    path = saved(tmp_path, [*small.about_colours(2), small.asked("red.png")], embedded=True)
    read = small.Read(model_of("llava"), tmp_path, dataset_name=str(path))
    with pytest.raises(UserError) as error:
        read.rows()
    assert str(error.value).startswith(f"{path} row 2: image 1 is no image: ")


def test_the_same_arguments_open_no_image_again(model_of, tmp_path) -> None:
    records = small.about_colours()
    first = small.of_file(model_of("llava"), tmp_path, records)
    rows = first.rows()
    assert first.opened == 12
    again = small.Read(model_of("llava"), tmp_path, train_file=first.args.train_file)
    assert again.rows().rows.to_dict() == rows.rows.to_dict() and not again.opened


@pytest.mark.parametrize("dataset", [False, True])
def test_a_changed_image_gives_other_rows(dataset, model_of, tmp_path) -> None:
    """Also where a dataset has a column of paths, and holds no images."""
    model, turns = model_of("qwen3_vl"), small.exchange("What?", "It is green.")
    record = {"messages": turns, "images": ["green.png"]}
    read = small.of_file(model, tmp_path, [record])
    folder = tmp_path
    if dataset:
        folder = tmp_path / "dataset"
        datasets.Dataset.from_list([record]).save_to_disk(folder)
        shutil.copy(tmp_path / "green.png", folder)
        read = small.Read(model, tmp_path, dataset_name=str(folder))

    def tokens() -> int:
        rows = read.rows(one_document=True)
        return sum(len(rows[n]["input_ids"]) for n in range(len(rows)))

    before = tokens()
    small.Image.new("RGB", (60, 60)).save(folder / "green.png")
    assert tokens() > before


def test_other_image_pixels_give_other_rows(model_of, tmp_path) -> None:
    model, records = model_of("qwen3_vl"), [small.in_turns()]
    whole = small.of_file(model, tmp_path, records).batch()
    less = small.Read(model, tmp_path, pixels=256, train_file=[str(tmp_path / "pictures.jsonl")])
    smaller = less.batch()
    assert len(smaller["pixel_values"]) < len(whole["pixel_values"])
    counts = [int(b["image_grid_thw"].prod(1).sum()) // 4 for b in (whole, smaller)]
    seen = [int(b["mm_token_type_ids"].sum()) for b in (whole, smaller)]
    assert seen == counts


def test_images_in_the_records_themselves(model_of, tmp_path) -> None:
    """As OpenAI's API takes them: data URLs in base64."""
    files = small.of_file(model_of("llava"), tmp_path, small.about_colours(5))
    expected = rows_and_batches(files)
    written = (tmp_path / "pictures.jsonl").read_text()
    for name in small.COLOURS:
        data = base64.b64encode((tmp_path / f"{name}.png").read_bytes()).decode()
        written = written.replace(f'"{name}.png"', f'"data:image/png;base64,{data}"')
        (tmp_path / f"{name}.png").unlink()
    (tmp_path / "urls.jsonl").write_text(written)
    assert ".png" not in written
    urls = small.Read(model_of("llava"), tmp_path, train_file=[str(tmp_path / "urls.jsonl")])
    assert rows_and_batches(urls) == expected


@pytest.mark.parametrize("kind", small.PLACES)
def test_workers_make_the_same_batches(kind, model_of, tmp_path) -> None:
    """Two rows each, some without any image."""
    records = [small.asked(*["red.png"] * (n == 3)) for n in range(8)]
    read = small.of_file(model_of(kind), tmp_path, records)
    rows = read.rows(one_document=True)
    found = [
        [*DataLoader(rows, batch_size=2, collate_fn=read.collate, num_workers=workers)]
        for workers in (0, 2)
    ]
    assert sum("pixel_values" in batch for batch in found[0]) == 1
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_a_column_of_images_without_a_conversation(model_of, tmp_path) -> None:
    """As a folder of images is read."""
    small.write(tmp_path, [])
    images = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    path = {"path": str(tmp_path / "red.png"), "bytes": None}
    table = pa.Table.from_pylist([{"image": path, "text": "red"}], schema=images.arrow_schema)
    datasets.Dataset(table).save_to_disk(tmp_path / "dataset")
    read = small.Read(model_of("llava"), tmp_path, dataset_name=str(tmp_path / "dataset"))
    with pytest.raises(UserError, match="row 0: images stand in conversations: write `messages`"):
        read.rows()


@pytest.mark.parametrize(
    "record",
    [
        {"messages": small.exchange("<image>What?", "A heron.")},
        {"prompt": "<image>What?", "completion": "A heron."},
        {"instruction": "What?", "input": "<image>", "output": "A heron."},
        {"messages": small.exchange("<image>What?", "A heron."), "images": None},
        {"messages": small.exchange("<image>What?", "A heron."), "image": []},
    ],
)
def test_a_place_without_a_image_is_refused_beside_others(record, model_of, tmp_path) -> None:
    read = small.of_file(model_of("qwen3_vl"), tmp_path, [small.asked("red.png"), record])
    with pytest.raises(UserError, match="jsonl:2 has <image> in its text and no image"):
        read.rows()
    beside_text = [small.asked("red.png"), {"text": "An <image> of RSS."}]
    assert len(small.of_file(model_of("qwen3_vl"), tmp_path, beside_text).rows())


def test_pixels_are_part_of_a_runs_data(model_of, tmp_path) -> None:
    """Bytes of files and the processor's settings; no path, no time, no version."""

    def identity(model: Path, folder: Path, *changed: str) -> tuple[Any, str]:
        folder.mkdir(exist_ok=True)
        records = [small.asked(name) for name in ("red.png", "green.png")]
        read = small.of_file(model, folder, records)
        for name in changed:
            Image.new("RGB", Image.open(folder / name).size, "black").save(folder / name)
        rows = read.rows().rows
        return rows_identity(read.args, rows), pixels_identity(rows, read.images)

    model = model_of("qwen3_vl")
    rows, pixels = identity(model, tmp_path / "a")
    assert identity(model, tmp_path / "b") == (rows, pixels)
    assert identity(model, tmp_path / "a", "green.png")[0] == rows  # as many tokens
    assert identity(model, tmp_path / "a", "green.png")[1] != pixels
    other = shutil.copytree(model, tmp_path / "model")
    file = other / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "transformers_version": "0"}))
    assert identity(other, tmp_path / "c") == (rows, pixels)
    file.write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    assert identity(other, tmp_path / "c")[1] != pixels


def test_a_held_out_image_is_no_part_of_what_is_trained() -> None:
    features = datasets.Features({"pixels": IMAGE_COUNTS["pixels"]})
    hashes = datasets.Dataset.from_dict({"pixels": [5, 0, 7]}, features)
    found = [_pixels(hashes, np.array(order)) for order in ([0, 1, 2], [2, 0, 1], [0, 1])]
    assert found[0] == found[1] != found[2]
