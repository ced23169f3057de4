from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.reading.named_datasets import check_dataset_name, load_records
from longctx.train.options.config import DataArguments


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """datasets keeps what it builds by the path and times of files, which tests share."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def records(name, **options):
    return load_records(DataArguments(dataset_name=str(name), **options))


def test_saved_datasets(tmp_path):
    Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_dict({"text": ["c"]})).save_to_disk(tmp_path / "many")
    assert records(tmp_path / "one")["text"][:] == ["a", "b"]
    assert records(tmp_path / "many")["text"][:] == ["c"]
    streamed = records(tmp_path / "one", streaming=True)
    assert isinstance(streamed, IterableDataset)
    assert [row["text"] for row in streamed] == ["a", "b"]
    Dataset.from_dict({"text": ["d"]}, split="test").save_to_disk(tmp_path / "test")
    assert records(tmp_path / "test", dataset_split="test")["text"][:] == ["d"]
    for streaming in (False, True):
        with pytest.raises(UserError, match="one has no splits: leave out --dataset_split gone"):
            records(tmp_path / "one", dataset_split="gone", streaming=streaming)
    with pytest.raises(UserError, match="no split 'test': give one of train"):
        records(tmp_path / "many", dataset_split="test")


def test_a_local_folder_of_data_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    streamed = records(tmp_path / "data", streaming=True)
    assert [row["text"] for row in streamed] == ["a", "b"]
    with pytest.raises(UserError, match="data has no split 'nosplit': give one of train"):
        records(tmp_path / "data", streaming=True, dataset_split="nosplit")


@pytest.mark.parametrize("name", ["./none", "/none/such", "~/none"])
def test_a_missing_local_dataset_is_known_at_once(name):
    with pytest.raises(UserError, match=f"the dataset {name} does not exist"):
        check_dataset_name(name)


def test_a_hub_dataset_that_cannot_be_reached():
    with pytest.raises(UserError, match="cannot load the dataset no/such") as error:
        records("no/such")
    assert "\n" not in str(error.value)


CELLS = [("prompt", "completion", "label"), ("007", "NA", "True"), ("1.50", "", "false")]
CARD = """---
configs:
- config_name: one
  sep: "|"
  data_files:
  - split: train
    path: x/a.csv
  - split: test
    path: x/b.csv
  default: true
- config_name: two
  data_files: x/*.csv
---
"""


def table(sign: str) -> str:
    return "".join(sign.join(row) + "\n" for row in CELLS)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"train.csv": table(",")},
        {"data/train.tsv": table("\t")},
        {"README.md": CARD, "x/a.csv": table("|"), "x/b.csv": table("|")},
    ],
    ids=["csv", "tsv", "card"],
)
def test_cells_of_a_dataset_are_text_as_it_stands(tmp_path, files, streaming):
    for name, text in files.items():
        (tmp_path / "set" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "set" / name).write_text(text)
    assert [*records(tmp_path / "set", streaming=streaming)] == [
        {"prompt": "007", "completion": "NA", "label": True},
        {"prompt": "1.50", "completion": "", "label": False},
    ]


def test_a_row_of_too_many_cells_is_not_cut(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text,id\none,two,3\n")
    with pytest.raises(UserError, match="cannot load the dataset .*ParserWarning"):
        records(tmp_path / "set")


def test_rows_of_a_csv_dataset_are_those_of_its_file(tmp_path):
    """Turns in cells are read, and the tokens are those that --train_file has."""
    file = tmp_path / "set" / "train.csv"
    file.parent.mkdir()
    file.write_text(
        'prompt,completion\n007,NA\n"[{""role"": ""user"", ""content"": ""q""}]",'
        '"[{""role"": ""assistant"", ""content"": ""null""}]"\n'
    )
    tokenizer = small_tokenizer()
    found = []
    for args in (
        DataArguments(dataset_name=str(file.parent), cache_dir=str(tmp_path / "cache")),
        DataArguments(train_file=[str(file)], cache_dir=str(tmp_path / "cache")),
    ):
        rows = build_dataset(
            args, tokenizer, RowOptions(files=args.train_file, seq_len=64, vocab_size=None, seed=0)
        )
        found.append(rows[:]["input_ids"])
    assert found[0] == found[1]


def test_a_line_names_the_files_that_are_read_and_those_that_are_not(tmp_path):
    for name, text in {"README.md": CARD, "x/a.csv": table("|"), "x/b.csv": table("|")}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "more.jsonl").write_text('{"text": "not in the README"}')
    lines: list[str] = []
    load_records(DataArguments(dataset_name=str(tmp_path), streaming=True), lines.append)
    assert lines == [
        f"the dataset {tmp_path}: read: x/a.csv (split train); passed over: x/b.csv (split test), "
        "more.jsonl (in no split), of --dataset_config: two"
    ]
    lines.clear()
    load_records(
        DataArguments(dataset_name=str(tmp_path), dataset_config="two", dataset_split="train[:1]"),
        lines.append,
    )
    assert "read: x/a.csv, x/b.csv (split train[:1]); passed over: more.jsonl" in lines[0]


def test_a_folder_without_the_split_names_the_files_in_no_split(tmp_path):
    for name in ("part-0.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(UserError, match=r"give one of test .* it holds part-0\.jsonl \(in no spl"):
        records(tmp_path)


def test_a_line_names_the_other_splits_of_what_was_saved(tmp_path):
    one = Dataset.from_dict({"text": ["c"]})
    DatasetDict(train=one, test=one).save_to_disk(tmp_path / "many")
    lines: list[str] = []
    load_records(DataArguments(dataset_name=str(tmp_path / "many")), lines.append)
    assert lines == [f"the dataset {tmp_path / 'many'}: read: split train; passed over: test"]
