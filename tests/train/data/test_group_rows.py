"""build_dataset for preference tasks: records on disk -> rows, cached apart from text's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data import packed_rows as data
from longctx.train.data.origins import check_sources, document_names
from longctx.train.data.pack.batches import as_arrays, collate_separate, collate_shared
from longctx.train.data.pack.cache import content_of
from longctx.train.data.pack.packing_groups import GROUP_ROW_FEATURES
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.text import tokens as tokenising
from longctx.train.options.config import DataArguments

U = {"role": "user", "content": "value?"}


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def pairs(count: int) -> list[dict]:
    """Strings and conversations in turn, each with answers of its own."""
    strings = [{"prompt": f"p{n} ", "chosen": f"yes {n}", "rejected": "no"} for n in range(count)]
    chats = [
        {"prompt": [U], "chosen": answer(f"good {n}"), "rejected": answer("bad"), "margin": n / 4}
        for n in range(count)
    ]
    return [record for two in zip(strings, chats, strict=True) for record in two]


def write(path: Path, records: list) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def build(tmp_path: Path):
    def build(files=None, rows="pairs", seq_len=128, mismatched=False, seed=0, **options):
        args = DataArguments(cache_dir=str(tmp_path / "cache"), **options)
        return build_dataset(
            args,
            small_tokenizer(),
            RowOptions(
                files=None if files is None else [str(file) for file in files],
                seq_len=seq_len,
                vocab_size=None,
                seed=seed,
                rows=rows,
                mismatched=mismatched,
            ),
        )

    return build


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", pairs(10))


def texts_in(rows) -> list[list[tuple[int, str]]]:
    """The side and text of every document of each row but padding."""
    tokenizer = small_tokenizer()
    found = []
    for row in rows:
        parts = np.split(np.array(row["input_ids"]), np.cumsum(row["lengths"])[:-1])
        texts = zip(row["sides"], map(tokenizer.decode, parts), strict=True)
        found.append([(side, text) for side, text in texts if not text.startswith("<|pad|>")])
    return found


def test_rows_hold_the_pairs(build, file, tmp_path, capsys):
    rows = build([file])
    assert rows.features == GROUP_ROW_FEATURES
    said = capsys.readouterr().out
    assert "chat template: the tokenizer's own: an answer is all that it adds to a prompt" in said
    assert "20 pairs, " in said and f"-> {len(rows)} rows of 128 (" in said
    texts = [document for row in texts_in(rows) for document in row]
    assert sum(side == 0 for side, _ in texts) == sum(side == 1 for side, _ in texts) == 20
    assert {text for side, text in texts if side == 0} == {
        *(f"yes {n}<|im_end|>" for n in range(10)),
        *(f"good {n}<|im_end|>\n" for n in range(10)),
    }
    names = document_names(DataArguments(cache_dir=str(tmp_path / "cache")), [str(file)], "pairs")
    for row, texts in zip(rows, texts_in(rows), strict=True):
        lines = [int(name.rpartition(":")[2]) for name in names(row["documents"])]
        chosen = [text for side, text in texts if side == 0]
        for line, text, margin in zip(lines, chosen, row["margins"], strict=True):
            kind, number = ("good", (line - 2) // 2) if line % 2 == 0 else ("yes", line // 2)
            assert text.startswith(f"{kind} {number}")
            assert np.isnan(margin) if kind == "yes" else margin == number / 4


def test_both_layouts_come_from_the_cached_rows(build, file):
    rows = as_arrays(build([file]))
    some = [rows[0], rows[len(rows) - 1]]
    shared, separate = collate_shared(some), collate_separate(some)
    assert shared["input_ids"].shape == (2, 128)
    assert torch.equal(shared["targets"], separate["targets"])
    assert len(shared["cu_seq_lens_q"]) == len(shared["parents"]) + 1


def test_the_second_call_only_reads_the_cache(build, file, monkeypatch, capsys):
    rows, said = build([file]), capsys.readouterr().out
    monkeypatch.setattr(tokenising, "encode_groups", None)
    monkeypatch.setattr(data, "pack_groups", None)
    assert content_of(build([file])) == content_of(rows)
    assert capsys.readouterr().out == said


def test_another_length_or_mismatched_answers_tokenise_nothing_again(build, file, monkeypatch):
    build([file], "rated")
    monkeypatch.setattr(tokenising, "encode_groups", None)
    assert len(build([file], "rated", seq_len=200)[0]["labels"]) == 200
    sides = [side for row in build([file], "rated", mismatched=True) for side in row["sides"]]
    assert sides.count(2) == 40 == sides.count(0) + sides.count(1)
    assert 2 not in [side for row in build([file], "rated") for side in row["sides"]]


def test_no_kind_of_rows_is_served_from_the_cache_of_another(build, tmp_path, capsys):
    """A record that every task reads gives the rows of the task that asks."""
    record = {"messages": [U, *answer("a")], "chosen": answer("c"), "rejected": answer("r")}
    record = {**record, "prompt": [U], "label": True, "completion": answer("k")}
    file = write(tmp_path / "all.jsonl", [record, record])
    kinds = {rows: build([file], rows) for rows in ("text", "pairs", "rated")}
    assert {name: "sides" in rows.features for name, rows in kinds.items()} == {
        "text": False,
        "pairs": True,
        "rated": True,
    }
    texts = {kind: str(texts_in(kinds[kind])) for kind in ("pairs", "rated")}
    assert "(0, 'c<|im_end|>" in texts["pairs"] and "(1, 'r<|im_end|>" in texts["pairs"]
    assert "(0, 'k<|im_end|>" in texts["rated"]
    again = {rows: build([file], rows) for rows in ("rated", "pairs", "text")}
    assert all(content_of(again[kind]) == content_of(kinds[kind]) for kind in kinds)
    assert "2 prompts with 2 answers, 2 of them desirable" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_rows(build, file, tmp_path):
    rows = content_of(build([file]))
    assert content_of(build([file], seed=1)) != rows
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert content_of(build([file])) == rows


@pytest.mark.parametrize("kind", ["documents", "tokens", "rows"])
def test_a_damaged_cache_is_rebuilt(build, file, tmp_path, kind, capsys):
    rows = content_of(build([file]))
    for path in (tmp_path / "cache").iterdir():
        if path.suffix == ".json" and kind != "rows":  # or the files before it are not opened
            path.unlink()
    (path,) = (tmp_path / "cache").glob(f"{kind}-*.arrow")
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.unlink()
    path.write_bytes(damaged)
    assert content_of(build([file])) == rows
    assert "rebuilding the damaged cache file" in capsys.readouterr().out


def test_a_dataset_is_packed_like_files(build, file, tmp_path):
    records = [r for r in pairs(10) if isinstance(r["prompt"], list)]
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    rows = build(dataset_name=str(tmp_path / "saved"))
    from_file = build([write(tmp_path / "chats.jsonl", records)])
    assert content_of(rows) == content_of(from_file)
    args = DataArguments(dataset_name=str(tmp_path / "saved"))
    assert document_names(args, None, "pairs")([3]) == [f"{tmp_path / 'saved'} row 3"]


def test_several_processes_give_the_same_rows(build, tmp_path, monkeypatch):
    records = [r for r in pairs(20) if isinstance(r["prompt"], list)]
    file = write(tmp_path / "chats.jsonl", records)
    rows = content_of(build([file]))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    monkeypatch.setattr(tokenising, "_processes", lambda *args, **options: 2)
    environ = os.environ
    assert content_of(build([file])) == rows
    assert os.environ is environ  # of which datasets makes a copy


def test_a_template_that_renders_the_prompt_otherwise_is_said_once(build, tmp_path, capsys):
    tokenizer = small_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>think{% endif %}"
    )
    file = write(tmp_path / "chats.jsonl", [r for r in pairs(3) if isinstance(r["prompt"], list)])
    for _ in range(2):  # packed, and from the cache
        build_dataset(
            DataArguments(cache_dir=str(tmp_path / "cache")),
            tokenizer,
            RowOptions(files=[str(file)], seq_len=128, vocab_size=None, seed=0, rows="pairs"),
        )
        said = capsys.readouterr().out
        assert said.count("3 of 3 prompts are rendered differently by the chat template") == 1


def test_too_long_pairs(build, tmp_path, capsys):
    long = {"prompt": "softmax " * 80, "chosen": "value " * 30, "rejected": "query " * 20}
    file = write(tmp_path / "pairs.jsonl", [*pairs(1), long])
    with pytest.raises(
        UserError, match=r"^\S*pairs\.jsonl:3: prompt and answers take \d+ tokens, "
    ):
        build([file])
    assert not list((tmp_path / "cache").glob("rows-*"))
    whole = build([file], seq_len=1024)
    capsys.readouterr()
    rows = build([file], long_documents="truncate")
    said = capsys.readouterr().out
    assert "3 pairs" in said and "tokens cut from 1; " in said and "left out" not in said
    assert max(len(t) for row in texts_in(rows) for _, t in row) == len("<|bos|>" + "softmax " * 80)
    rows = build([file], long_documents="truncate_start")
    long_answers = {t for row in texts_in(whole) for side, t in row if side >= 0}
    assert {t for row in texts_in(rows) for side, t in row if side >= 0} == long_answers


def test_equal_pairs_are_left_out(build, tmp_path, capsys):
    equal = {"prompt": "p", "chosen": "same", "rejected": "same"}
    build([write(tmp_path / "a.jsonl", [equal, *pairs(1)])])
    assert "2 pairs" in (said := capsys.readouterr().out) and "left out: 1 with equal" in said
    with pytest.raises(UserError, match="nothing to train on in .*: 1 record with equal answers"):
        build([write(tmp_path / "b.jsonl", [equal])])


def test_one_record_is_too_few_for_kto(build, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "c", "label": True}])
    with pytest.raises(UserError, match="--task kto needs at least two records"):
        build([file], "rated", mismatched=True)
    assert len(build([file], "rated")) == 1


def test_plain_text_streams_and_no_data_are_refused(build, tmp_path):
    (tmp_path / "book.txt").write_text("a book")
    message = (
        r"book\.txt is plain text, but a task of pairs reads files of records .* with `chosen`"
    )
    with pytest.raises(UserError, match=message):
        build([tmp_path / "book.txt"])
    none, streamed = DataArguments(), DataArguments(dataset_name="a/b", streaming=True)
    message = "--task kto needs records with `prompt`, `completion` and `label`: give --train_file"
    for refuse in (lambda: check_sources(none, "rated"), lambda: build(rows="rated")):
        with pytest.raises(UserError, match=message):
            refuse()
    with pytest.raises(
        UserError, match="--streaming is for text: leave it out with a task of pairs"
    ):
        check_sources(streamed, "pairs")
    check_sources(streamed)
    check_sources(none)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "p", "chosen": "a"', "f.jsonl:2 is not JSON"),
        (b'{"prompt": "p", "chosen": "a"}', "f.jsonl:2: expected `chosen` and `rejected` beside"),
        (b'{"text": "t"}', "f.jsonl:2: expected .*: --task sft reads such records"),
        (b'{"chosen": ' + b"[" * 10_000_000, "f.jsonl:2 is not JSON .nested too deeply"),
        (b'{"chosen": [' + b'{"content": ' * 5_000_000, "f.jsonl:2 is not JSON .nested too deeply"),
        (
            b'{"prompt": "p", "chosen": "a", "rejected": "b", "margin": NaN}',
            "`margin` must be a num",
        ),
        (b'{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1e999}', "`margin` must be a"),
        (b'{"prompt": "p", "chosen": "a", "rejected": "b", "margin": ' + b"9" * 9999, "not JSON"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_bad_records_end_in_one_line_and_leave_no_cache(build, tmp_path, line, message):
    good = json.dumps(pairs(1)[0]).encode()
    (tmp_path / "f.jsonl").write_bytes(good + b"\n" + line)
    with pytest.raises(UserError, match=message) as error:
        build([tmp_path / "f.jsonl"])
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("*"))


ODD = {
    "half a surrogate pair": b'{"prompt": "p", "chosen": "a \\ud800", "rejected": "b"}',
    "special tokens": b'{"prompt": "<|im_end|>", "chosen": "<|bos|>", "rejected": "<|pad|>"}',
    "a zero width space": b'{"prompt": "p", "chosen": "\\u200b", "rejected": "b"}',
    "an empty prompt": b'{"prompt": "", "chosen": "a", "rejected": "b"}',
    "a prompt of blanks": b'{"prompt": " \\n", "chosen": "a", "rejected": "b"}',
    "an answer of a million letters": b'{"prompt": "p", "chosen": "%s", "rejected": "b"}'
    % (b"a" * 1_000_000),
    "a template in the text": b'{"prompt": "{{ 1 / 0 }}", "chosen": "{% x %}", "rejected": "b"}',
    "a thousand turns": json.dumps(
        {"prompt": [U, *answer("a")] * 500 + [U], "chosen": answer("c"), "rejected": answer("r")}
    ).encode(),
    "keys twice": b'{"prompt": 1, "prompt": "p", "chosen": "a", "rejected": "b"}',
    "a huge extra": b'{"prompt": "p", "chosen": "a", "rejected": "b", "x": "%s"}' % (b"y" * 10**6),
    "Latin-1": '{"prompt": "né", "chosen": "é", "rejected": "b"}'.encode("latin-1"),
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_odd_records_are_read(build, tmp_path, capsys, line):
    (tmp_path / "f.jsonl").write_bytes(json.dumps(pairs(1)[0]).encode() + b"\n" + line)
    options = {"long_documents": "truncate_start", "allow_undecodable": True}
    build([tmp_path / "f.jsonl"], seq_len=2048, **options)
    said = capsys.readouterr().out
    assert "2 pairs, " in said or "1 pair, " in said and "1 too long" in said
