"""--max_samples and --eval_share: which documents are read, and which of them are held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from small_task import rated, write_jsonl
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data.origins import document_names
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.row_report import counts
from longctx.train.options.config import DataArguments


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Five files of text, and two of records: fifteen documents."""
    found = []
    for n in range(5):
        found.append(tmp_path / f"{n}.txt")
        found[-1].write_text(f"the text number {n}")
    for name in ("a", "b"):
        records = [{"text": ""}, *({"text": f"record {n} of {name}"} for n in range(5))]
        found.append(write_jsonl(tmp_path / f"{name}.jsonl", records))
    return list(map(str, found))


@pytest.fixture
def names(tmp_path: Path):
    """The names of the documents in the rows of these options, in order."""

    def names(files: list[str] | None, seed: int = 0, held_out: bool = False, **options: Any):
        args = DataArguments(cache_dir=str(tmp_path / "cache"), train_file=files, **options)
        settings = dict(seq_len=32, vocab_size=None, seed=seed, held_out=held_out)
        rows = build_dataset(args, small_tokenizer(), RowOptions(files=files, **settings))
        named = document_names(args, files)
        packed = [name for row in rows for name in named(row["documents"])]
        return [Path(name).name for name in dict.fromkeys(packed)]

    return names


def test_the_first_of_each_file_of_records_and_of_the_texts_together(names, files) -> None:
    whole = names(files)
    assert len(whole) == 15
    two = names(files, max_samples=2)
    assert sorted(two) == ["0.txt", "1.txt", "a.jsonl:2", "a.jsonl:3", "b.jsonl:2", "b.jsonl:3"]
    assert names(files, max_samples=99) == whole and names(files) == whole  # of the cache


def test_the_first_rows_of_a_dataset(names, tmp_path: Path) -> None:
    texts = [{"text": f"row {n}"} for n in range(8)]
    Dataset.from_list(texts).save_to_disk(str(tmp_path / "saved"))
    found = names(None, dataset_name=str(tmp_path / "saved"), max_samples=3)
    assert sorted(found) == [f"saved row {n}" for n in range(3)]
    (tmp_path / "stream").mkdir()
    write_jsonl(tmp_path / "stream" / "train.jsonl", texts)
    args = DataArguments(dataset_name=str(tmp_path / "stream"), streaming=True, max_samples=3)
    settings = dict(files=None, seq_len=32, vocab_size=None, seed=0)
    rows = build_dataset(args, small_tokenizer(), RowOptions(**settings))
    assert {n for row in rows for n in row["documents"]} - {-1} == {0, 1, 2}


def test_a_share_is_held_out_by_the_seed_alone(names, files) -> None:
    trained, held = names(files, eval_share=0.2), names(files, eval_share=0.2, held_out=True)
    assert len(held) == 3 and sorted([*trained, *held]) == sorted(names(files))
    assert names(files, eval_share=0.2, held_out=True) == held  # of the cache
    others = names(files, eval_share=0.2, held_out=True, seed=1)
    assert len(others) == 3 and others != held
    assert len(names(files, eval_share=0.01, held_out=True)) == 1
    of_few = names(files, eval_share=0.5, held_out=True, max_samples=1)
    assert len(of_few) == 2  # of 0.txt, a.jsonl:2, b.jsonl:2


def test_what_is_held_out_is_said_and_counted(files, tmp_path: Path, capsys) -> None:
    args = DataArguments(cache_dir=str(tmp_path / "cache"), eval_share=0.2)
    found = {}
    for held_out in (False, True):
        rows = build_dataset(
            args,
            small_tokenizer(),
            RowOptions(
                files=files[5:],
                seq_len=32,
                vocab_size=None,
                seed=0,
                held_out=held_out,
                evaluates=held_out,
            ),
        )
        found[held_out] = counts(rows)["documents"]
    assert found == {False: 8, True: 2}
    trained, held = capsys.readouterr().out.splitlines()
    assert "8 documents" in trained and held.startswith("held out of ") and "2 documents" in held
    assert trained.endswith(" are trained") and held.endswith(" are evaluated")


def test_prompts_with_their_answers(tmp_path: Path) -> None:
    """A mismatched answer comes from the same part."""
    data = write_jsonl(tmp_path / "rated.jsonl", rated(8))
    args = DataArguments(cache_dir=str(tmp_path / "cache"), eval_share=0.25)
    settings = dict(seq_len=512, vocab_size=None, seed=0, rows="rated", mismatched=True)
    numbers = []
    for held_out in (False, True):
        rows = build_dataset(
            args, small_tokenizer(), RowOptions(files=[str(data)], held_out=held_out, **settings)
        )
        numbers.append({n for row in rows for n in row["documents"]})
    assert [len(part) for part in numbers] == [6, 2] and not numbers[0] & numbers[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(eval_share=0.1), "--eval_share 0.1 of 1 document leaves none to train"),
        (dict(eval_share=0.1, eval_file=["e.txt"]), "--eval_share holds out .* give one of"),
        (dict(eval_share=0.1, dataset_name="d", streaming=True), "leave out --streaming, or give"),
        (dict(eval_share=1.0), "--eval_share must be below 1"),
        (dict(eval_share=0.0), "--eval_share must be above 0"),
        (dict(max_samples=0), "--max_samples must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(names, files, options, says) -> None:
    with pytest.raises(UserError, match=says) as error:
        names(None if "dataset_name" in options else files[:1], **options)
    assert "\n" not in str(error.value)


def test_other_options_keep_the_names_of_their_files(names, files, tmp_path: Path) -> None:
    """A cache of an earlier version is read."""
    names(files)
    before = {path.name for path in (tmp_path / "cache").iterdir()}
    names(files, eval_share=0.2)
    made = {path.name for path in (tmp_path / "cache").iterdir()} - before
    assert {name.split("-")[0] for name in made} == {"rows"}  # nothing was tokenised again
    reports = [json.loads((tmp_path / "cache" / n).read_text()) for n in made if n.endswith("json")]
    assert reports[0]["stats"]["documents"] == 12
