"""Small files as people have them: each is read as the records it holds, or refused in its line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageColumn
from PIL import Image
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data.reading import json_values, opened
from longctx.train.data.reading.files import file_of, find_files
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.rows import build_dataset, check_sources, document_names
from longctx.train.options.config import DataArguments

V = Value("string")
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = [Q, A]
CHAT = {"messages": TURNS}
ALPACA = {"instruction": "Add.", "input": "1, 2", "output": "3"}
ADDED = {"messages": [{"role": "user", "content": "Add.\n1, 2"}, {**A, "content": "3"}]}
SHARE = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
CALLS = [Q, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TWO = b'{"text": "one"}\n{"text": "two"}\n'
CSV = b"text\none\ntwo\n"
FRENCH = "Tous les \xeatres humains naissent libres et \xe9gaux en dignit\xe9 et en droits. " * 3


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def cells(*rows: str) -> bytes:
    return "\n".join([*rows, ""]).encode()


def quoted(value: Any) -> str:
    """A value as JSON in a cell of CSV."""
    return '"' + json.dumps(value).replace('"', '""') + '"'


def parquet(columns: Mapping[str, Any]) -> bytes:
    pq.write_table(pa.table(dict(columns)), file := io.BytesIO())
    return file.getvalue()


def arrow(columns: Mapping[str, Any], new: Any = pa.ipc.new_stream) -> bytes:
    table = pa.table(dict(columns))
    with new(file := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def zst(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


READ: dict[str, tuple[str, bytes, list[Any]]] = {
    # JSON
    "a list": ("a.json", dumped([{"text": "one"}, {"text": "two"}]), ["one", "two"]),
    "a list of many lines": ("a.json", json.dumps([ALPACA], indent=2).encode(), [ADDED]),
    "ShareGPT in a list": ("a.json", dumped([SHARE, SHARE]), [CHAT, CHAT]),
    "an empty list": ("a.json", b" [ ] \n", []),
    "an object with the list": ("a.json", dumped({"v": 1, "data": [{"text": "one"}]}), ["one"]),
    "one record": ("a.json", json.dumps(CHAT, indent=2).encode(), [CHAT]),
    "lines in a .json": ("a.json", TWO, ["one", "two"]),
    "objects of several lines": (
        "a.json",
        b'{\n"text": "one"}\n{\n"text":\n"two"}',
        ["one", "two"],
    ),
    "a list with a mark": ("a.json", b"\xef\xbb\xbf" + dumped([{"text": "one"}]), ["one"]),
    "a list in UTF-16": ("a.json", '[{"text": "\xe9"}]'.encode("utf-16"), ["\xe9"]),
    "half a character": ("a.json", b'[{"text": "\\ud800!"}]', ["?!"]),
    "null in a call": ("a.json", dumped([{"messages": CALLS}]), [{"messages": CALLS}]),
    "numbers beside": ("a.json", b'[{"text": "one", "id": 1e3}, 2]'[:-4] + b"]", ["one"]),
    "ndjson": ("a.ndjson", TWO, ["one", "two"]),
    "capitals": ("A.JSON", dumped([{"text": "one"}]), ["one"]),
    # compressed
    "jsonl.gz": ("a.jsonl.gz", gzip.compress(TWO), ["one", "two"]),
    "json.bz2": ("a.json.bz2", bz2.compress(dumped([ALPACA])), [ADDED]),
    "csv.xz": ("a.csv.xz", lzma.compress(CSV), ["one", "two"]),
    "jsonl.zst": ("a.jsonl.zst", zst(TWO) + zst(TWO), ["one", "two"] * 2),
    # CSV and TSV
    "csv": ("a.csv", CSV, ["one", "two"]),
    "text that looks like values": (
        "a.csv",
        cells("text", "007", "NA", "1.50"),
        ["007", "NA", "1.50"],
    ),
    "lines in a cell": ("a.csv", b'id,text\r\n1,"a, ""b""\nc"\r\n', ['a, "b"\nc']),
    "an index without a name": ("a.csv", cells(",text", "0,one"), ["one"]),
    "semicolons": ("a.csv", cells("id;text", "1;a, b"), ["a, b"]),
    "a mark in CSV": ("a.csv", b"\xef\xbb\xbf" + CSV, ["one", "two"]),
    "CSV in UTF-16": ("a.csv", CSV.decode().encode("utf-16"), ["one", "two"]),
    "blank lines in CSV": ("a.csv", cells("text", "one", "", "two"), ["one", "two"]),
    "Alpaca in CSV": ("a.csv", cells("instruction,input,output", 'Add.,"1, 2",3'), [ADDED]),
    "Alpaca without input": (
        "a.csv",
        cells("instruction,input,output,history", "q,,a,"),
        [CHAT],
    ),
    "a completion in CSV": ("a.csv", cells("prompt,completion", "q,a"), [["q", "a"]]),
    "turns in CSV": ("a.csv", cells("messages", quoted(TURNS)), [CHAT]),
    "turns as prompt in CSV": (
        "a.csv",
        cells("prompt,completion", f"{quoted([Q])},{quoted([A])}"),
        [CHAT],
    ),
    "tsv": ("a.tsv", b"id\ttext\n1\ta, b\n", ["a, b"]),
    # columns
    "parquet": ("a.parquet", parquet({"text": ["one", "two"]}), ["one", "two"]),
    "parquet of turns": ("a.parquet", parquet({"messages": [TURNS]}), [CHAT]),
    "parquet of Alpaca": ("a.parquet", parquet({k: [v] for k, v in ALPACA.items()}), [ADDED]),
    "an Arrow stream": ("a.arrow", arrow({"text": ["one"] * 130}), ["one"] * 130),
    "an Arrow file": ("a.arrow", arrow({"text": ["one"]}, pa.ipc.new_file), ["one"]),
    "turns in a string": ("a.parquet", parquet({"messages": [json.dumps(TURNS)]}), [CHAT]),
    "a dictionary": (
        "a.parquet",
        parquet({"text": pa.array(["one", "one"]).dictionary_encode()}),
        ["one", "one"],
    ),
    # turns
    "a dict of lists": (
        "a.jsonl",
        dumped({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}),
        [CHAT],
    ),
    "ShareGPT as a dict of lists": (
        "a.parquet",
        parquet({"conversations": [{"from": ["human", "gpt"], "value": ["q", "a"]}]}),
        [CHAT],
    ),
    "the role model": ("a.jsonl", dumped({"messages": [Q, {**A, "role": "model"}]}), [CHAT]),
    "roles in capitals": (
        "a.json",
        dumped([{"messages": [{**Q, "role": "User"}, {**A, "role": "ASSISTANT"}]}]),
        [CHAT],
    ),
    # text
    "text": ("a.md", b"# one\r\n", ["# one\n"]),
    "any other name": ("notes", b"one", ["one"]),
}


def contents(name: str, data: bytes, folder: Path, **options: Any) -> list[Any]:
    path = folder / name
    path.write_bytes(data)
    return [document.content for document in read_documents(find_files([str(path)]), **options)]


@pytest.mark.parametrize(("name", "data", "expected"), READ.values(), ids=READ)
def test_a_file_is_read(tmp_path, name, data, expected):
    assert contents(name, data, tmp_path) == expected


PREFERENCES: dict[str, tuple[str, bytes, str]] = {
    "a pair in CSV": ("a.csv", cells("prompt,chosen,rejected", "q,a,b"), "pairs"),
    "a pair in a list": (
        "a.json",
        dumped([{"prompt": "q", "chosen": "a", "rejected": "b"}]),
        "pairs",
    ),
    "a rated answer in CSV": ("a.csv", cells("prompt,completion,label", "q,a,True"), "rated"),
    "a rated answer in Parquet": (
        "a.parquet",
        parquet({"prompt": ["q"], "completion": ["a"], "label": [True]}),
        "rated",
    ),
}


@pytest.mark.parametrize(("name", "data", "rows"), PREFERENCES.values(), ids=PREFERENCES)
def test_preferences_are_read_from_all_kinds(tmp_path, name, data, rows):
    (found,) = contents(name, data, tmp_path, rows=rows)
    assert found["prompt"] == "q" and found["answers"][0] == "a"
    assert found["sides"] == ([0, 1] if rows == "pairs" else [0])


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a list that breaks off": (
        "a.json",
        b'[{"text": "a"},\n{"te',
        r"a\.json:2 is not JSON \(Unterm",
    ),
    "a list without end": (
        "a.json",
        b'[{"text": "a"}',
        r"a\.json:1 is not JSON \(the list has no end",
    ),
    "a list and more": ("a.json", b"[] {}", r"a\.json:1 is not JSON \(Extra data behind the list"),
    "no comma": ("a.json", b"[{}\n {}]", r"a\.json:1 \(record 1\): expected `text`"),
    "a comma too many": (
        "a.json",
        b'[{"text": "a"},\n]',
        r":2 is not JSON \(Expecting value at column 1",
    ),
    "a word": ("a.json", b'[{"text": tru}]', r":1 is not JSON \(Expecting value at column 11\)"),
    "a bad record": (
        "a.json",
        b'[{"text": "a"},\n {"question": "q"}]',
        r"a\.json:2 \(record 2\): expected `text`.* found `question`",
    ),
    "several lists": (
        "a.json",
        dumped({"train": [{"text": "a"}], "test": [{"text": "b"}]}),
        r"a\.json holds several lists of records, `train`, `test`: leave one",
    ),
    "a bad record of a list in an object": (
        "a.json",
        dumped({"data": [{"a": 1}]}),
        r"a\.json \(record 1 of `data`\): expected `text`",
    ),
    "nested too deeply": ("a.json", b"[" * 100_000, r"a\.json:1 is not JSON \(nested too deeply"),
    "a list named .jsonl": (
        "a.jsonl",
        b'[\n{"text": "a"}]',
        r"a\.jsonl:1 is not JSON .*; a list of records is read from a \.json file",
    ),
    "a list on one line, named .jsonl": (
        "a.jsonl",
        b'[{"text": "a"}]',
        r"a\.jsonl:1 is a list, .*; a list of records is read from a \.json file",
    ),
    "CSV with the line ends of old Macs": (
        "a.csv",
        b"text\rone\rtwo\r",
        r"a\.csv ends its lines with a carriage return alone: tr '\\r' '\\n' <",
    ),
    "CSV with a byte order mark alone": ("a.csv", b"\xef\xbb\xbf", "The first line names nothing;"),
    "CSV of other columns": (
        "a.csv",
        cells("question,answer", "q,a"),
        r"a\.csv has no columns of records\. The first line names `question`, `answer`; `text`, "
        r"`messages`, .* are read: rename its columns",
    ),
    "CSV without a header": (
        "a.csv",
        cells("hello you, all"),
        r"first line names `hello you`, `all`;",
    ),
    "a blank header": ("a.csv", b"\n\n", r"a\.csv has no columns of records\. .* names nothing;"),
    "a column twice": ("a.csv", cells("text,text", "a,b"), r"a\.csv has two columns `text`"),
    "a ragged CSV": (
        "a.csv",
        cells("id,text", '1,"a', 'b"', "2,a,b"),
        r"a\.csv:4 has 3 cells, and line 1 has 2",
    ),
    "an open quote": (
        "a.csv",
        cells("text", "a", '"b', "c"),
        r"a\.csv:3 is not a row of cells \(unexp",
    ),
    "a broken cell": (
        "a.csv",
        cells("text", '"a"b'),
        r"a\.csv:2 is not a row of cells .* its own quotes",
    ),
    "turns that are no JSON": (
        "a.csv",
        cells("messages", """"[{'role': 'user'}]\""""),
        r"a\.csv:2: `messages` must be a list of turns, found a string that is not JSON \(Exp",
    ),
    "an empty answer": ("a.csv", cells("instruction,output", "q,"), r"a\.csv:2: `output` is empty"),
    "lists of unlike lengths": (
        "a.jsonl",
        dumped({"messages": {"role": ["user"], "content": []}}),
        r"a\.jsonl:1: `messages` is an object of lists, which must all be as long",
    ),
    "a torn Parquet file": ("a.parquet", b"PAR1" + bytes(99), r"a\.parquet broke after 0 rows \("),
    "no Parquet file": (
        "a.parquet",
        b"text",
        r"a\.parquet is not a file of Parquet, as its name says",
    ),
    "a torn Arrow file": ("a.arrow", b"ARROW1\0\0" + bytes(9), r"a\.arrow broke after 0 rows \("),
    "a bad row": (
        "a.parquet",
        parquet({"text": ["a", None]}),
        r"a\.parquet row 1: expected `text`",
    ),
    "other columns": ("a.parquet", parquet({"q": ["a"]}), r"a\.parquet row 0: .* found `q`"),
    "a torn gzip": (
        "a.jsonl.gz",
        gzip.compress(TWO)[:-9],
        r"cannot read .*a\.jsonl\.gz: its compre",
    ),
    "no gzip": ("a.jsonl.gz", TWO, r"a\.jsonl\.gz is named \.gz and is not compressed so"),
    "Parquet of another name": (
        "a.bin",
        b"PAR1\x15\x04",
        r"a Parquet file: rename it to .*a\.parquet",
    ),
    "Word": (
        "a.docx",
        b"PK\x03\x04",
        r"is no text but a Word document: .*pandoc -t plain .*a\.txt",
    ),
    "EPUB": ("a.epub", b"PK\x03\x04", r"is no text but an EPUB book: convert it to text: pandoc "),
    "ODT": ("a.odt", b"PK\x03\x04", r"is no text but an OpenDocument text: .*pandoc"),
    "Excel": (
        "a.xlsx",
        b"PK\x03\x04",
        r"an Excel table: .*libreoffice --headless --convert-to csv",
    ),
    "PDF": ("a b.pdf", b"%PDF-1.7", r"is no text but a PDF: .*pdftotext '.*a b\.pdf' '.*a b'\.txt"),
    "RTF": ("a.txt", rb"{\rtf1 a}", r"is no text but a text in RTF: convert it to text: pandoc"),
    "an old encoding": (
        "a.txt",
        FRENCH.encode("cp1252"),
        r"a\.txt: \d% of its bytes are not UTF-8 text: it reads as CP1252 \('Tous les .*'\): "
        r"iconv -f CP1252 -t UTF-8 .*a\.txt > .*a\.utf8\.txt, or train on it as it is with --allow",
    ),
    "an old encoding in CSV": (
        "a.csv",
        cells("text", "@").replace(b"@", FRENCH.encode("cp1252")),
        r"a\.csv: \d% of its bytes are not UTF-8 text: it reads as CP1252",
    ),
    "Russian lines": (
        "a.json",
        '[{"text": "Это обычный русский текст в старой кодировке."}]'.encode("cp1251"),
        r"it reads as CP1251 \('.*Это обычный .*'\): iconv -f CP1251 ",
    ),
    "UTF-16 without a mark": (
        "a.txt",
        ("Ordinary words. " * 20).encode("utf-16-le"),
        r"UTF-16, not UTF-8 text: it reads as UTF-16LE \('Ordinary words.*'\): iconv -f UTF-16LE",
    ),
}


@pytest.mark.parametrize(("name", "data", "line"), REFUSED.values(), ids=REFUSED)
def test_a_file_is_refused_in_one_line(tmp_path, name, data, line):
    with pytest.raises(UserError, match=line) as error:
        contents(name, data, tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


FOLDERS: dict[str, tuple[dict[str, bytes], list[str], str | None]] = {
    "records of all kinds and a note": (
        {
            "a.csv": CSV,
            "b.parquet": parquet({"text": ["one"]}),
            "c.json": dumped([ALPACA]),
            "note.txt": b"a note",
        },
        ["a.csv", "b.parquet", "c.json"],
        "passed over: note.txt; to train on its texts too, name them as files or by a glob",
    ),
    "a folder of the hub": (
        {
            "README.md": b"---\nlicense: mit\n---\n",
            "LICENSE": b"MIT",
            ".gitattributes": b"*.parquet lfs",
            "data/train-00000-of-00001.parquet": parquet({"text": ["one"]}),
            "data/test-00000-of-00001.parquet": parquet({"text": ["two"]}),
            "loading.py": b"import this",
        },
        ["train-00000-of-00001.parquet"],
        "read: data/train-00000-of-00001.parquet; passed over: data/test-00000-of-00001.parquet "
        "(not the split train), README.md, loading.py, LICENSE; to train on its texts too, name "
        "them as files or by a glob",
    ),
    "what is no text": (
        {
            "README.md": b"about",
            "a.jsonl": TWO,
            **{f"{i}.png": b"\x89PNG\r\n" for i in range(3)},
            "b.docx": b"PK\x03\x04",
            "empty.txt": b"",
        },
        ["a.jsonl"],
        "passed over: README.md, 3 images (read where records name them), 1 .docx, 1 empty file",
    ),
    "a folder of code": (
        {
            "a.py": b"x = 1",
            "README.md": b"about",
            "package.json": b'{"name": "a"}',
            "t.csv": b"a,b\n1,2",
        },
        ["README.md", "a.py"],
        "passed over: package.json (no records), t.csv (no records)",
    ),
    "what save_to_disk leaves": (
        {"data-0.arrow": arrow({"text": ["one"]}), "state.json": b"{}", "dataset_info.json": b"{}"},
        ["data-0.arrow"],
        "passed over: dataset_info.json (no records), state.json (no records)",
    ),
    "settings that name columns": (
        {
            "chats.jsonl": TWO,
            "dataset_info.json": dumped({"messages": {"columns": {"prompt": "p"}}}),
            "dataset_infos.json": dumped({"default": {"features": {"messages": [{"a": "b"}]}}}),
            "metrics.json": dumped({"runs": {"text": "a"}, "text": {"f": 1}, "x": [["text", {}]]}),
            "held.json": dumped({"rows": [{"id": 1, "text": "a"}]}),
        },
        ["chats.jsonl", "held.json"],
        "passed over: dataset_info.json (no records), dataset_infos.json (no records), "
        "metrics.json (no records)",
    ),
    "test files alone": (
        {"test.jsonl": TWO, "valid.jsonl": TWO},
        ["test.jsonl", "valid.jsonl"],
        "read: test.jsonl, valid.jsonl (held-out rows by name: there are no others)",
    ),
    "text alone": ({"a.txt": b"one", "b.md": b"two"}, ["a.txt", "b.md"], None),
}


@pytest.mark.parametrize(("files", "read", "told"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_says_what_it_passes_over(tmp_path, files, read, told):
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    lines: list[str] = []
    found = find_files([str(tmp_path)], tell=lines.append)
    assert [path.name for path in found] == read
    assert lines == ([f"in {tmp_path} {told}"] if told else [])
    assert [*read_documents(found)]


def test_a_folder_without_text_says_what_it_holds(tmp_path):
    for name in ("a.docx", "b.png"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(UserError, match=r"holds 1 \.docx, 1 image: it needs non-empty \.txt"):
        find_files([str(tmp_path)])


def test_a_card_beside_a_table_of_something_else_is_not_trained(tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\nlicense: mit\n---\n")
    (tmp_path / "qa.csv").write_bytes(cells("question,answer", "q,a"))
    found = find_files([str(tmp_path)])
    with pytest.raises(UserError, match=r"qa\.csv has no columns of records.*`question`, `answer`"):
        [*read_documents(found)]


@pytest.fixture
def build(tmp_path):
    """Packs files, on a cache of their own, and gives their texts and the places of the rows."""

    def build(*files: Path) -> tuple[list[str], list[str]]:
        args = DataArguments(cache_dir=str(tmp_path / "cache"), train_file=[*map(str, files)])
        tokenizer = small_tokenizer()
        rows = build_dataset(
            args, tokenizer, files=args.train_file, seq_len=16, vocab_size=None, seed=0
        )
        names = document_names(args, args.train_file)
        places = [place for row in rows for place in names(row["documents"])]
        return [tokenizer.decode(row["input_ids"]) for row in rows], places

    return build


def test_all_kinds_are_packed_alike_and_cached_by_file(build, tmp_path, monkeypatch):
    """The shuffle depends on the number of documents alone, not on where they are from."""
    texts = [f"text {n} " * (n + 1) for n in range(9)]
    kinds = {
        "a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts).encode(),
        "a.json": dumped([{"text": text} for text in texts]),
        "a.csv": cells("text", *texts),
        "a.parquet": parquet({"text": texts}),
        "a.csv.gz": gzip.compress(cells("text", *texts)),
    }
    found = {}
    for name, data in kinds.items():
        (tmp_path / name).write_bytes(data)
        found[name] = build(tmp_path / name)
    rows, places = found["a.jsonl"]
    assert all(other == rows for other, _ in found.values())
    assert [place.replace(" row ", ":") for place in found["a.parquet"][1]] == [
        f"{tmp_path}/a.parquet:{int(place.split(':')[1]) - 1}" for place in places
    ]
    with monkeypatch.context() as patched:
        patched.setattr("longctx.train.data.rows.read_documents", None)
        assert build(tmp_path / "a.csv") == found["a.csv"]
    (tmp_path / "a.csv").write_bytes(cells("text", *texts[::-1]))
    assert build(tmp_path / "a.csv")[0] != rows


def test_a_run_says_once_what_it_passes_over(tmp_path, capsys):
    (tmp_path / "README.md").write_bytes(b"about")
    (tmp_path / "a.csv").write_bytes(CSV)
    assert check_sources(DataArguments(train_file=[str(tmp_path)])) == [tmp_path / "a.csv"]
    assert capsys.readouterr().out == f"in {tmp_path} passed over: README.md\n"


def test_replaced_bytes_are_counted_by_file(tmp_path, capsys, build):
    """A byte in fifty may be lost, which the run says for each file."""
    for name, data in (
        ("a.json", b'[{"text": "' + b"x " * 99 + b'\xff"}, {"text": "\xfe' + b"y " * 99 + b'"}]'),
        ("b.csv", b"text\n" + b"z " * 99 + b"\xff\n"),
    ):
        (tmp_path / name).write_bytes(data)
    build(tmp_path / "a.json", tmp_path / "b.csv")
    said = capsys.readouterr().out
    assert f"{tmp_path}/a.json: replaced 2 undecodable bytes" in said
    assert f"{tmp_path}/b.csv: replaced 1 undecodable bytes" in said


def test_places_are_lines_records_and_rows(tmp_path):
    places = {
        "a.json": (b'[{"text": "a"},\n\n{"text": "b"}]', [":1 (record 1)", ":3 (record 2)"]),
        "a.csv": (b'text\n"a\nb"\nc\n', [":2", ":4"]),
        "a.parquet": (parquet({"text": ["a", "b"]}), [" row 0", " row 1"]),
        "a.jsonl": (b'{"text": "a"}\n\n{"text": "b"}', [":1", ":3"]),
    }
    for name, (data, expected) in places.items():
        path = tmp_path / name
        path.write_bytes(data)
        found = [document.where for document in read_documents([path])]
        assert found == [f"{path}{place}" for place in expected]
        assert {file_of(where) for where in found} == {str(path)}
    assert file_of("notes:3") == "notes:3"


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_blocks_cut_a_list_anywhere(tmp_path, monkeypatch, block):
    """Characters of several bytes, words, numbers and escapes lie across the edges of blocks."""
    monkeypatch.setattr(opened, "BLOCK_BYTES", block)
    texts = ['\xe9\U0001f600 \\ " \n' * n for n in range(9)] + ["x" * 500]
    records = [{"text": text, "n": [1234567, -1.5e-7, None, True]} for text in texts]
    data = json.dumps(records, ensure_ascii=False, indent=1).encode()
    assert contents("a.json", data, tmp_path) == [text for text in texts if text.strip()]
    broken = data.replace(b"-1.5e-07", b"-1.5e-x", 1)
    line = broken[: broken.index(b"-1.5e-x")].count(b"\n") + 1
    with pytest.raises(UserError, match=rf"a\.json:{line} is not JSON"):
        contents("a.json", broken, tmp_path)
    with pytest.raises(UserError, match=rf"a\.json:{line} is not JSON \(Unterminated string at co"):
        contents("a.json", data[: data.index(b"-1.5e") - 1] + b'"n: [1', tmp_path)
    (tmp_path / "b.json").write_bytes(b'[{"text": "\xff\xc3"}]')
    (document,) = read_documents([tmp_path / "b.json"], allow_undecodable=True)
    assert document.content == "\ufffd\ufffd" and document.replaced_bytes == 2


def test_a_value_of_json_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(opened, "BLOCK_BYTES", 100)
    monkeypatch.setattr(json_values, "BLOCK_BYTES", 100)
    monkeypatch.setattr(json_values, "MOST_CHARS", 1000)
    assert contents("a.json", dumped([{"text": "x" * 300}] * 20), tmp_path) == ["x" * 300] * 20
    with pytest.raises(UserError, match=r"a\.json:1: a value of more than"):
        contents("a.json", dumped({"data": [{"text": "x" * 100}] * 50}), tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_bomb_is_refused_while_it_is_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(opened, "GROWTH_FREE_BYTES", 1 << 20)
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}
    data = compress[suffix](b'{"text": "' + b"a" * (16 << 20))
    with pytest.raises(
        UserError, match=r"unpacks to more than 200 times its size: unpack it yours"
    ):
        contents(f"a.jsonl{suffix}", data, tmp_path)


def test_a_bomb_of_columns_is_refused(tmp_path, monkeypatch):
    """Parquet writes a value that is repeated once."""
    monkeypatch.setattr(opened, "GROWTH_FREE_BYTES", 1 << 20)
    with pytest.raises(UserError, match=r"unpacks to more than 200 times .*: write its records as"):
        contents("a.parquet", parquet({"text": ["x" * 100_000] * 1000}), tmp_path)


def test_max_samples_are_the_first_of_each_file(tmp_path):
    for name, data in (("a.csv", CSV), ("b.json", dumped([{"text": "x"}] * 3)), ("c.txt", b"c")):
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / name for name in ("a.csv", "b.json", "c.txt")]
    found = [document.content for document in read_documents(files, max_samples=1)]
    assert found == ["one", "x", "c"]


def test_images_in_parquet_become_data_urls(tmp_path):
    """As datasets of the hub hold them: the bytes of each file, in a column of images."""
    path = tmp_path / "a.parquet"
    turns = [{"role": "user", "content": "<image>q"}, A]
    Image.new("RGB", (2, 2)).save(image := io.BytesIO(), "png")
    images = Features({"messages": [{"role": V, "content": V}], "images": List(ImageColumn())})
    held = {"messages": [turns], "images": [[{"bytes": image.getvalue(), "path": None}]]}
    Dataset.from_dict(held, images).to_parquet(path)
    (document,) = read_documents(find_files([str(path)]), with_images=True)
    assert document.kind == "chat_with_pictures"
    assert document.content["pictures"][0].startswith("data:image;base64,iVBOR")


def test_a_name_that_is_no_text(tmp_path):
    for name, data in (("\udce9.parquet", parquet({"text": ["a"]})), ("[x]*.csv", CSV)):
        path = tmp_path / os.fsdecode(os.fsencode(name))
        path.write_bytes(data)
        assert [*read_documents(find_files([str(path)]))]
        assert re.search(r"row 0|:2", next(iter(read_documents([path]))).where)
