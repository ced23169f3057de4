from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset, List, Value
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data import packed_rows as data
from longctx.train.data.chat import training_templates
from longctx.train.data.origins import check_sources, document_names
from longctx.train.data.pack.batches import collate
from longctx.train.data.pack.cache import dataset_identity
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.text import tokens as tokenising
from longctx.train.options.config import DataArguments


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twenty documents from 2 to 400 words, so that some are longer than a row."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"document {i} " + f"word{i} " * (1 + i * i))
    return folder


@pytest.fixture
def build(tmp_path: Path, corpus: Path):
    def build(
        files=None, tokenizer=None, seq_len=64, vocab_size=None, seed=0, alone=False, **options
    ):
        args = DataArguments(cache_dir=str(tmp_path / "cache"), **options)
        if files is None and not args.dataset_name:
            files = [corpus]
        return build_dataset(
            args,
            tokenizer or small_tokenizer(),
            RowOptions(
                files=files and [str(file) for file in files],
                seq_len=seq_len,
                vocab_size=vocab_size,
                seed=seed,
                one_document=alone,
            ),
        )

    return build


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def documents_in(rows) -> list[list[int]]:
    """The token ids of every packed piece but padding, sorted."""
    pad = small_tokenizer().pad_token_id
    pieces = []
    for row in rows:
        starts = [i for i, p in enumerate(row["position_ids"]) if p == 0] + [len(row["labels"])]
        pieces += [row["input_ids"][a:b] for a, b in zip(starts, starts[1:], strict=False)]
    return sorted(piece for piece in pieces if piece[0] != pad)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_rows_of_one_document_hold_what_packed_ones_do(build, long_documents, capsys):
    packed = build(long_documents=long_documents)
    rows = build(alone=True, long_documents=long_documents)
    assert documents_in(rows) == documents_in(packed)
    for row in rows:
        assert row["position_ids"] == [*range(len(row["input_ids"]))] and len(row["documents"]) == 1
        assert row["labels"][0] == -100 and len(row["labels"]) == len(row["input_ids"]) <= 64
    said, _ = capsys.readouterr()
    assert f"{len(rows):,} rows of up to 64, one document in each (" in said
    again = build(alone=True, long_documents=long_documents)
    assert again.cache_files == rows.cache_files != packed.cache_files
    assert said.splitlines()[-1] == capsys.readouterr().out.strip()


def test_a_stream_of_one_document_a_row_has_rows_of_one_length(build, tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"text": "word " * n} for n in (3, 6, 9)])
    rows = [*build(alone=True, dataset_name=str(tmp_path / "data"), streaming=True)]
    assert [len(row["input_ids"]) for row in rows] == [64, 64, 64]
    assert len(documents_in(rows)) == 3 and all(len(row["documents"]) == 1 for row in rows)


def test_rows_hold_the_text(build, corpus, capsys):
    rows = build(seq_len=4096)
    assert rows.features == {
        name: List(Value("int32")) for name in ("input_ids", "labels", "position_ids", "documents")
    }
    texts = [small_tokenizer().decode(ids) for ids in documents_in(rows)]
    expected = [f"<|bos|>{path.read_text()}<|im_end|>" for path in corpus.iterdir()]
    assert sorted(texts) == sorted(expected)
    assert "20 documents" in capsys.readouterr().out


def test_split_keeps_and_truncate_drops(build, capsys):
    split = build()
    tokens = sum(len(ids) for ids in documents_in(split))
    out = capsys.readouterr().out
    assert f"{tokens:,} tokens -> {len(split)} rows of 64 (" in out
    padding = len(split) * 64 - tokens
    assert f"({padding:,} padding" in out
    kept = sum(len(ids) for ids in documents_in(build(long_documents="truncate")))
    assert kept < tokens
    assert f"({tokens - kept:,} tokens dropped by truncation" in capsys.readouterr().out


def test_same_seed_same_rows_and_another_seed_another_order(build, tmp_path):
    rows = build()[:]
    assert build()[:] == rows
    other = build(seed=1)[:]
    assert other != rows
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert build()[:] == rows
    as_rows = [build(), build(seed=1)]
    assert documents_in(as_rows[0]) == documents_in(as_rows[1])


def test_the_second_call_only_reads_the_cache(build, monkeypatch):
    rows = build()[:]
    monkeypatch.setattr(tokenising, "encode", None)
    monkeypatch.setattr(data, "pack", None)
    assert build()[:] == rows


def test_another_length_and_seed_tokenise_nothing_again(build, monkeypatch):
    build()
    monkeypatch.setattr(tokenising, "encode", None)
    assert len(build(seq_len=128, seed=3)[0]["labels"]) == 128


@pytest.mark.parametrize("change", ["edit", "same size and mtime", "add", "remove"])
def test_a_changed_file_is_read_again(build, corpus, change):
    before = documents_in(build())
    path = corpus / "03.txt"
    stat = path.stat()
    if change == "edit":
        path.write_text("something new")
    elif change == "same size and mtime":
        path.write_text(path.read_text().replace("document", "DOCUMENT"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "add":
        (corpus / "new.txt").write_text("one more")
    else:
        path.unlink()
    assert documents_in(build()) != before


def test_another_tokenizer_or_template_is_not_served_from_the_cache(build, tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": chat}])
    rows = build([path])[:]
    template = small_tokenizer().chat_template.replace("im_start", "start")
    assert build([path], small_tokenizer(template))[:] != rows


def flip_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["documents", "tokens", "rows"])
@pytest.mark.parametrize("damage", ["garbage", "half", "one byte"])
def test_a_damaged_cache_is_rebuilt(build, tmp_path, kind, damage, capsys):
    rows = build()[:]
    later = {"documents": ("tokens", "rows"), "tokens": ("rows",), "rows": ()}[kind]
    for path in (tmp_path / "cache").iterdir():
        if path.name.startswith(later):
            path.unlink()
        elif path.name.startswith(kind) and path.suffix == ".arrow":
            if damage == "one byte":
                flip_one_byte(path)
            else:
                whole = path.read_bytes()
                path.write_bytes(b"?" * 999 if damage == "garbage" else whole[: len(whole) // 2])
    capsys.readouterr()
    assert build()[:] == rows
    said = capsys.readouterr().out
    assert said.startswith(f"rebuilding the damaged cache file {tmp_path}/cache/{kind}-v")
    assert build()[:] == rows
    assert "rebuilding" not in capsys.readouterr().out


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    turns = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
        for i in range(40)
    ]
    return write_jsonl(tmp_path / "c.jsonl", [{"messages": turn} for turn in turns])


def test_several_processes_leave_the_same_files(build, chats, tmp_path, monkeypatch, capsys):
    processes = []
    map_records = Dataset.map

    def counted(self, *args, **options):
        processes.append(options["num_proc"])
        return map_records(self, *args, **options)

    def files():
        return {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.arrow*")}

    monkeypatch.setattr(Dataset, "map", counted)
    rows = build([chats])[:]
    one_process = files()
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    monkeypatch.setattr(tokenising, "DOCUMENTS_PER_PROCESS", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert build([chats])[:] == rows
    assert processes == [None, 2]
    assert files() == one_process and len(one_process) == 6
    for path in (tmp_path / "cache").glob("rows-*"):
        path.unlink()
    (tokens,) = (tmp_path / "cache").glob("tokens-*.arrow")
    flip_one_byte(tokens)
    assert build([chats])[:] == rows
    assert f"rebuilding the damaged cache file {tokens} (" in capsys.readouterr().out
    assert processes == [None, 2, 2] and files() == one_process


@pytest.mark.parametrize("processes", [1, 2])
def test_a_record_that_fails_leaves_no_temporary_file(
    build, chats, tmp_path, monkeypatch, processes
):
    monkeypatch.setattr(tokenising, "DOCUMENTS_PER_PROCESS", 40 // processes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    with pytest.raises(UserError, match=r"c\.jsonl:\d+: the tokenizer has no chat template"):
        build([chats], small_tokenizer(None))
    left = sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir())
    assert left == ["documents", "documents"]


def test_mixed_formats(build, tmp_path):
    path = write_jsonl(
        tmp_path / "mixed.jsonl",
        [
            {"text": "plain"},
            {"prompt": "p", "completion": "done"},
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "b"}]},
        ],
    )
    (row,) = build([path], seq_len=128)
    trained = [label for label in row["labels"] if label != -100]
    text = small_tokenizer().decode(trained)
    for part in ("plain<|im_end|>", "done<|im_end|>", "a<|im_end|>", "b<|im_end|>"):
        text = text.replace(part, "", 1)
    assert text == ""


def test_undecodable_bytes_are_reported_every_time(build, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au l\xe0it".encode("latin-1"))
    (tmp_path / "lines.jsonl").write_bytes(b'{"text": "a\xff"}\n{"text": "b\xff\xff"}')
    for _ in range(2):
        build([tmp_path / "latin.txt", tmp_path / "lines.jsonl"], allow_undecodable=True)
        out = capsys.readouterr().out
        assert f"{tmp_path / 'latin.txt'}: replaced 2 undecodable bytes" in out
        assert f"{tmp_path / 'lines.jsonl'}: replaced 3 undecodable bytes" in out
    with pytest.raises(UserError, match="latin.txt: 17% .* --allow_undecodable"):
        build([tmp_path / "latin.txt"])
    with pytest.raises(UserError, match="latin.txt: 17% .* --allow_undecodable"):
        build([tmp_path / "latin.txt", tmp_path / "lines.jsonl"])  # what was allowed is cached


def test_token_ids_beyond_the_vocabulary(build):
    largest = max(max(row["input_ids"]) for row in build())
    build(vocab_size=largest + 1)
    for _ in range(2):  # fresh and cached
        with pytest.raises(UserError, match=f"id {largest}, but the model's .* has {largest} "):
            build(vocab_size=largest)
    with pytest.raises(UserError, match="has 10 tokens"):
        build(seed=5, seq_len=32, vocab_size=10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "ok"}\n{"text": 1}', r"f\.jsonl:2: `text` must be a string"),
        ('{"text": "ok"}\nnope', r"f\.jsonl:2 is not JSON"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"f\.jsonl:1: no assistant turn"),
        ('{"text": " "}\n\n', "no readable text in .*f.jsonl"),
        ('{"text": "x"}', "nothing to train on in .*f.jsonl"),
    ],
)
def test_bad_data_stops_with_one_line_and_leaves_no_cache(build, tmp_path, content, message):
    (tmp_path / "f.jsonl").write_text(content)
    seq_len = 1 if "nothing" in message else 16
    for _ in range(2):
        with pytest.raises(UserError, match=message) as error:
            build([tmp_path / "f.jsonl"], seq_len=seq_len)
        assert "\n" not in str(error.value)


def test_chat_without_a_template(build, tmp_path):
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "t"}, {"messages": turns}])
    with pytest.raises(UserError, match=r"c\.jsonl:2: the tokenizer has no chat template"):
        build([path], small_tokenizer(None))


def test_check_sources(corpus, tmp_path):
    check_sources(DataArguments())
    check_sources(DataArguments(train_file=[str(corpus)], eval_file=[str(corpus / "01.txt")]))
    with pytest.raises(UserError, match="none.txt does not exist"):
        check_sources(DataArguments(train_file=[str(corpus)], eval_file=["none.txt"]))
    with pytest.raises(UserError, match="./none does not exist"):
        check_sources(DataArguments(dataset_name="./none"))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    texts = [f"text {i} " * (1 + i % 30) for i in range(100)]
    Dataset.from_dict({"text": [*texts, None, " "], "id": range(102)}).save_to_disk(
        tmp_path / "saved"
    )
    return str(tmp_path / "saved")


def test_a_dataset_is_packed_like_files(build, saved, tmp_path, monkeypatch):
    records = [{"text": text} for text in Dataset.load_from_disk(saved)["text"] if text]
    Dataset.from_list(records).save_to_disk(tmp_path / "clean")
    rows = build(dataset_name=str(tmp_path / "clean"))
    path = write_jsonl(tmp_path / "same.jsonl", records)
    assert documents_in(rows) == documents_in(build([path]))
    monkeypatch.setattr(tokenising, "encode", None)
    assert build(dataset_name=str(tmp_path / "clean"))[:] == rows[:]


def test_a_dataset_row_is_checked_like_a_line(build, saved, tmp_path):
    with pytest.raises(UserError, match="saved row 100: expected .* found `text` .null.,"):
        build(dataset_name=saved)
    Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "other")
    for streaming in (False, True):
        with pytest.raises(UserError, match="other row 0: expected `text`.* found `body`"):
            build(dataset_name=str(tmp_path / "other"), streaming=streaming)


def test_a_stream_that_breaks_is_one_line(build, monkeypatch):
    def breaking():
        yield from [{"text": "some text " * 9}] * 400
        raise ConnectionResetError("reset\nby peer")

    monkeypatch.setattr(
        data, "load_records", lambda args, tell: IterableDataset.from_generator(breaking)
    )
    rows = build(dataset_name="far/away", streaming=True)
    message = (
        r"^far/away broke after \d+ streamed records \(ConnectionResetError: reset by peer\): check"
    )
    with pytest.raises(UserError, match=message):
        list(rows)


@pytest.mark.parametrize("change", ["in place", "same size and mtime", "state"])
def test_a_saved_dataset_is_known_by_its_files(build, tmp_path, change):
    folder = tmp_path / "saved"
    Dataset.from_dict({"text": ["one text " * 20] * 9}).save_to_disk(folder)
    before = build(dataset_name=str(folder))[:]
    assert build(dataset_name=str(folder))[:] == before
    (arrow,) = folder.glob("*.arrow")
    stat = arrow.stat()
    if change == "state":
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "_fingerprint": "0" * 16}))
    else:
        arrow.write_bytes(arrow.read_bytes().replace(b"one text", b"two text"))
    if change == "same size and mtime":
        os.utime(arrow, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (build(dataset_name=str(folder))[:] == before) is (change == "state")


def test_the_rows_chosen_from_a_dataset_are_part_of_its_identity(tmp_path):
    Dataset.from_dict({"text": list("abcdef")}).save_to_disk(tmp_path / "saved")
    saved = Dataset.load_from_disk(tmp_path / "saved")
    chosen = [saved.select([0, 2, 4]), saved.select([1, 3, 5])]
    identities = [json.dumps(dataset_identity(dataset)) for dataset in (saved, *chosen)]
    assert len(set(identities)) == 3
    assert json.dumps(dataset_identity(saved)) == identities[0]


def test_chat_datasets_keep_their_structure(build, tmp_path):
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    Dataset.from_list([{"messages": turns}, {"messages": turns + turns}]).save_to_disk(
        tmp_path / "chats"
    )
    rows = build(dataset_name=str(tmp_path / "chats"))
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": turns}, {"messages": turns + turns}])
    assert rows[:] == build([path])[:]


EXCHANGES = {
    "chat": {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
    "Alpaca": {"instruction": "u", "input": "", "output": "a"},
    "TRL": {
        "prompt": [{"role": "user", "content": "u"}],
        "completion": [{"role": "assistant", "content": "a"}],
    },
}


@pytest.mark.parametrize("record", EXCHANGES.values(), ids=EXCHANGES)
def test_the_same_exchange_in_other_words_is_the_same_rows(build, tmp_path, capsys, record):
    path = write_jsonl(tmp_path / "f.jsonl", [record] * 3)
    Dataset.from_list([record] * 3).save_to_disk(tmp_path / "saved")
    chat = build([write_jsonl(tmp_path / "c.jsonl", [EXCHANGES["chat"]] * 3)])[:]
    capsys.readouterr()
    for sources in ({"files": [path]}, {"dataset_name": str(tmp_path / "saved")}):
        for _ in range(2):  # fresh and cached: both are said
            rows = build(**sources)[:]
            assert {**rows, "documents": 0} == {**chat, "documents": 0}
            out = capsys.readouterr().out
            assert out.count("chat template: the tokenizer's own: its {% generation %} mark") == 1
            alpaca = "records of instruction, input and output are exchanges of the chat template"
            assert out.count(alpaca) == ("instruction" in record)
    list(build(dataset_name=str(tmp_path / "saved"), streaming=True))
    assert "chat template: the tokenizer's own" in capsys.readouterr().out


def test_nothing_is_said_of_templates_where_there_is_no_conversation(build, tmp_path, capsys):
    records = [{"text": "some words"}, {"prompt": "p", "completion": "done"}]
    build([write_jsonl(tmp_path / "f.jsonl", records)])
    assert "template" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["train", "weight"])
def test_turns_that_are_not_trained(build, tmp_path, key):
    user = {"role": "user", "content": "u"}
    turns = [user, {"role": "assistant", "content": "first", key: 0}, user]
    record = {"messages": [*turns, {"role": "assistant", "content": "second"}]}
    Dataset.from_list([record]).save_to_disk(tmp_path / "saved")
    path = write_jsonl(tmp_path / "f.jsonl", [record])
    for rows in (build([path]), build(dataset_name=str(tmp_path / "saved"))):
        (row,) = rows
        trained = [label for label in row["labels"] if label != -100]
        assert small_tokenizer().decode(trained) == "second<|im_end|>"


def test_other_training_templates_are_not_served_from_the_cache(build, tmp_path, monkeypatch):
    chats = write_jsonl(tmp_path / "c.jsonl", [EXCHANGES["chat"]] * 3)
    made = []
    encode = tokenising.encode
    monkeypatch.setattr(tokenising, "encode", lambda *args: made.append(1) or encode(*args))
    build([chats])
    build([chats])
    before = len(made)
    monkeypatch.setattr(training_templates, "identity", lambda: "changed")
    build([chats])
    assert len(made) == 2 * before


@pytest.fixture
def streamable(tmp_path: Path) -> str:
    texts = [f"text {i} " * (1 + i % 30) for i in range(100)]
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "stream")
    return str(tmp_path / "stream")


def test_streaming_gives_the_same_documents(build, streamable, capsys):
    stored = build(dataset_name=streamable)
    summary = capsys.readouterr().out.split("tokens ->")[0]
    streamed = build(dataset_name=streamable, streaming=True)
    assert isinstance(streamed, IterableDataset) and streamed.features == stored.features
    rows = list(streamed)
    assert documents_in(rows) == documents_in(stored)
    assert summary in capsys.readouterr().out
    assert all(len(row["labels"]) == 64 for row in rows)


def test_streaming_repeats_and_resumes(build, streamable):
    streamed = build(dataset_name=streamable, streaming=True)
    rows = list(streamed)
    assert list(streamed) == rows
    assert list(build(dataset_name=streamable, streaming=True)) == rows
    assert list(build(dataset_name=streamable, streaming=True, seed=1)) != rows
    assert list(streamed.skip(5)) == rows[5:]
    begun = iter(streamed)
    for _ in range(3):
        next(begun)
    resumed = build(dataset_name=streamable, streaming=True)
    resumed.load_state_dict(streamed.state_dict())
    assert list(resumed) == rows[3:]


def test_streaming_checks_as_it_goes(build, saved, tmp_path):
    with pytest.raises(UserError, match="saved streamed record .*: expected"):
        list(build(dataset_name=saved, streaming=True))
    with pytest.raises(UserError, match="has 10 tokens"):
        build(dataset_name=saved, streaming=True, vocab_size=10)


def test_collate(build):
    rows = build()
    batch = collate([rows[0], rows[1]])
    assert set(batch) == {"input_ids", "labels", "position_ids", "documents"}
    for name, tensor in batch.items():
        assert tensor.dtype == torch.int64 and tensor.shape == (2, 64)
        for filled, row in zip(tensor.tolist(), rows, strict=False):
            assert filled == row[name] + [-1] * (64 - len(row[name]))
    formatted = rows.with_format("numpy")
    assert all(torch.equal(collate([formatted[0]])[name][0], batch[name][0]) for name in batch)
    kept = rows.remove_columns("documents")  # --remove_unused_columns true
    assert set(collate([kept[0]])) == set(batch) - {"documents"}


def pieces_of(row) -> list[list[int]]:
    starts = [i for i, p in enumerate(row["position_ids"]) if p == 0] + [len(row["labels"])]
    return [row["input_ids"][a:b] for a, b in zip(starts, starts[1:], strict=False)]


def test_every_row_names_the_documents_of_its_pieces(build, corpus, tmp_path):
    args = DataArguments(cache_dir=str(tmp_path / "cache"))
    names_of = document_names(args, [str(corpus)])
    for _ in range(2):  # fresh, and from the cache
        for row in build():
            names = names_of(row["documents"])
            for name, ids in zip(names, pieces_of(row), strict=False):
                assert small_tokenizer().decode(ids, skip_special_tokens=True) in (
                    Path(name).read_text()
                )
    assert names_of([-1, 3]) == [str(corpus / "03.txt")]


def test_names_survive_a_change_of_the_data(build, corpus, tmp_path):
    args = DataArguments(cache_dir=str(tmp_path / "cache"))
    build()
    names_of = document_names(args, [str(corpus)])
    (corpus / "00.txt").unlink()
    (corpus / "zz.txt").write_text("new")
    assert names_of([3]) == [str(corpus / "03.txt")]
    for documents in (tmp_path / "cache").glob("documents-*"):
        documents.unlink()
    with pytest.raises((UserError, OSError)):
        names_of([3])


def test_rows_of_datasets_name_their_records(build, streamable):
    stored, streamed = (build(dataset_name=streamable, streaming=s) for s in (False, True))
    texts = Dataset.load_from_disk(streamable)["text"]
    for row in stored:
        for number, ids in zip(row["documents"], pieces_of(row), strict=False):
            assert small_tokenizer().decode(ids, skip_special_tokens=True) in texts[number]
    numbers = [number for row in streamed for number in row["documents"]]
    assert sorted(set(numbers)) == list(range(100))
    args = DataArguments(dataset_name="d")
    assert document_names(args, None)([4, -1]) == ["d row 4"]
    args = DataArguments(dataset_name="d", streaming=True)
    assert document_names(args, None)([4]) == ["d record of the shuffled stream 4"]
