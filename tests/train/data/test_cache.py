from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import xxhash
from datasets import Features, List, Value
from small_tokenizer import small_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longctx.errors import UserError
from longctx.train.data.pack import cache
from longctx.train.data.pack.cache import (
    FORMAT,
    cache_path,
    digest,
    file_identity,
    open_arrow,
    scratch_folder,
    tokenizer_identity,
    write_arrow,
)
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.row_report import read_report
from longctx.train.options.config import DataArguments
from longctx.train.safety import checksum

FEATURES = Features({"ids": List(Value("int32")), "name": Value("large_string")})


def rows(count):
    return ({"ids": np.arange(i, dtype=np.int32), "name": f"row {i}"} for i in range(count))


def test_round_trip_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BATCH_BYTES", 100)
    path = tmp_path / "new" / "a.arrow"
    write_arrow(path, FEATURES, rows(50))
    dataset = open_arrow(path, rows=50)
    assert dataset is not None and dataset.features == FEATURES
    assert dataset[7] == {"ids": list(range(7)), "name": "row 7"}
    assert dataset.data.column("ids").num_chunks > 5
    assert path.stat().st_size < 50 * 500  # four bytes a token


def test_a_failed_write_leaves_nothing(tmp_path):
    def failing():
        yield from rows(3)
        raise UserError("bad line")

    with pytest.raises(UserError, match="bad line"):
        write_arrow(tmp_path / "a.arrow", FEATURES, failing())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["garbage", "half", "one byte", "other length", "checksum"])
def test_a_damaged_file_is_reported_and_removed(tmp_path, damage, capsys):
    path, checksum = tmp_path / "a.arrow", tmp_path / "a.arrow.xxh3"
    write_arrow(path, FEATURES, rows(50))
    data = bytearray(path.read_bytes())
    if damage == "garbage":
        path.write_bytes(b"garbage" * 100)
    elif damage == "half":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "one byte":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "checksum":
        checksum.write_bytes(b"\xff")
    assert open_arrow(path, rows=51 if damage == "other length" else 50) is None
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert out.startswith(f"rebuilding the damaged cache file {path} (") and out.count("\n") == 1
    assert ("51 rows" if damage == "other length" else "its checksum is ") in out
    assert open_arrow(path) is None


def test_the_checksum_is_that_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BATCH_BYTES", 100)
    monkeypatch.setattr(checksum, "READ_BYTES", 99)
    write_arrow(tmp_path / "a.arrow", FEATURES, rows(50))
    data = (tmp_path / "a.arrow").read_bytes()
    assert (tmp_path / "a.arrow.xxh3").read_text() == xxhash.xxh3_64(data).hexdigest()
    assert open_arrow(tmp_path / "a.arrow", rows=50) is not None


def test_a_file_without_a_checksum_was_never_finished(tmp_path, capsys):
    write_arrow(tmp_path / "a.arrow", FEATURES, rows(5))
    (tmp_path / "a.arrow.xxh3").unlink()
    assert open_arrow(tmp_path / "a.arrow") is None
    assert capsys.readouterr().out == ""
    write_arrow(tmp_path / "a.arrow", FEATURES, rows(6))
    assert len(open_arrow(tmp_path / "a.arrow")) == 6
    (tmp_path / "a.arrow").unlink()
    assert open_arrow(tmp_path / "a.arrow") is None
    assert capsys.readouterr().out == ""


def test_a_run_that_ends_between_a_file_and_its_checksum_leaves_no_checksum(tmp_path, monkeypatch):
    def killed(path, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_arrow(tmp_path / "a.arrow", FEATURES, rows(5))
    assert [path.name for path in tmp_path.iterdir()] == ["a.arrow"]


@pytest.mark.parametrize(("limit_bytes", "shown"), [(0, True), (1 << 30, False)])
def test_large_files_show_their_progress(tmp_path, monkeypatch, limit_bytes, shown):
    bars = []

    class Bar(checksum.tqdm):
        def __init__(self, **options):
            bars.append(options)
            super().__init__(**options)

    monkeypatch.setattr(checksum, "tqdm", Bar)
    monkeypatch.setattr(checksum, "PROGRESS_BYTES", limit_bytes)
    write_arrow(tmp_path / "a.arrow", FEATURES, rows(5))
    assert open_arrow(tmp_path / "a.arrow") is not None
    assert [bar["disable"] for bar in bars] == [None if shown else True]  # None: on a terminal
    assert bars[0]["total"] == (tmp_path / "a.arrow").stat().st_size


def test_opening_a_file_says_that_it_is_used(tmp_path, monkeypatch):
    beside = tmp_path / "a.arrow.xxh3"
    write_arrow(tmp_path / "a.arrow", FEATURES, rows(5))
    os.utime(beside, (0, 0))
    open_arrow(tmp_path / "a.arrow")
    assert beside.stat().st_mtime > 1e9

    def refuse(*args, **options):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)  # a shared cache that may only be read
    assert open_arrow(tmp_path / "a.arrow") is not None


def test_a_link_that_somebody_planted_is_not_followed(tmp_path):
    target, folder = tmp_path / "target", tmp_path / "cache"
    folder.mkdir()
    target.mkdir()
    (target / "precious").write_text("mine")
    for path in (target / "precious", target):
        os.utime(path, (0, 0))
    name = cache._prefix(cache_path(folder, "rows", digest(1)))
    (folder / f"{name}abcdefgh.tmp").symlink_to(target)
    (folder / f"{name}hgfedcba.tmp").symlink_to(target / "precious")
    (folder / "a.arrow.xxh3").symlink_to(target / "precious")
    cache.mark_used(folder / "a.arrow.xxh3")
    cache.remove_leftovers(folder)
    write_arrow(folder / "a.arrow", FEATURES, rows(3))
    assert (target / "precious").read_text() == "mine"
    assert target.stat().st_mtime == (target / "precious").stat().st_mtime == 0
    assert not (folder / "a.arrow.xxh3").is_symlink()


def write_for_ever(folder: Path, begun) -> None:
    def wait():
        begun.set()
        signal.pause()
        yield

    with scratch_folder(cache_path(folder, "tokens", digest(1))) as scratch:
        (scratch / "half").write_text("half")
        write_arrow(cache_path(folder, "rows", digest(1)), FEATURES, wait())


def test_what_a_killed_run_was_writing_goes_with_the_next(tmp_path):
    """And what a living one is writing stays."""
    forked = multiprocessing.get_context("fork")
    begun = [forked.Event() for _ in range(2)]
    runs = [forked.Process(target=write_for_ever, args=(tmp_path, event)) for event in begun]
    try:
        for run, event in zip(runs, begun, strict=True):
            run.start()
            assert event.wait(60)
        assert len(list(tmp_path.glob("*.tmp"))) == 4
        for left in (4, 2, 0):
            cache.remove_leftovers(tmp_path)
            assert len(list(tmp_path.glob("*.tmp"))) == left
            if left:
                runs[left // 4].kill()
                runs[left // 4].join()
        assert list(tmp_path.iterdir()) == []
    finally:
        for run in runs:
            run.kill()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_run_that_loses_what_it_has_just_made_makes_it_again(tmp_path, monkeypatch, kind):
    """Between the making and the lock, another run may take it for a leftover."""
    lock, made = cache._lock, []

    def lose_the_first(handle, path):
        made.append(path)
        if len(made) == 1:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return lock(handle, path)

    monkeypatch.setattr(cache, "_lock", lose_the_first)
    if kind == "file":
        cache.write_text(tmp_path / "a", "text")
        assert (tmp_path / "a").read_text() == "text"
    else:
        with cache.scratch_folder(tmp_path / "a") as folder:
            assert folder == made[1] and folder.is_dir()
    assert len(made) == 2 and not list(tmp_path.glob("*.tmp"))


def test_a_disk_without_locks_keeps_what_cannot_be_judged(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    path = cache_path(tmp_path, "rows", digest(1))
    with cache.scratch_folder(path):
        before = list(tmp_path.iterdir())
        cache.remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == before
    cache.write_text(path, "text")
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["[1]", '{"stats": {}}', '{"stats": {"no": 1}}', "null", "{"])
def test_a_damaged_report_is_made_again(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    assert read_report(tmp_path / "rows.json") is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*--cache_dir"):
        write_arrow(tmp_path / "file" / "a.arrow", FEATURES, rows(1))


def test_a_file_with_the_same_size_and_time_is_another_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before, stat = file_identity(path), path.stat()
    assert file_identity(path) == before
    path.write_text("two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert file_identity(path) != before


def test_tokenizers_are_told_apart_by_what_they_do():
    tokenizer = small_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert tokenizer_identity(tokenizer) == before == tokenizer_identity(small_tokenizer())
    assert tokenizer_identity(small_tokenizer("{{ messages }}")) != before
    tokenizer.add_tokens(["new"])
    assert tokenizer_identity(tokenizer) != before


def test_names_depend_on_every_part(tmp_path, monkeypatch):
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a"), digest(["a", 1])}) == 4
    now = cache_path(tmp_path, "rows", digest("a"))
    assert now != cache_path(tmp_path, "tokens", digest("a"))
    monkeypatch.setattr(cache, "FORMAT", FORMAT + 1)
    assert cache_path(tmp_path, "rows", digest("a")) != now


def test_names_do_not_depend_on_source_text():
    """Constants: a comment in this project's code, or a new version of it, changes no name."""
    assert digest("a", [1, None], {"b": 2.5}) == "e8e952af0d860dbc0a03"
    assert cache_path(Path("c"), "rows", "k").name == f"rows-v{FORMAT}-k.arrow"


WORDS = "<s> </s> <pad> <user> <assistant> a b c d e".split()
TEMPLATE = """\
{%- for m in messages %}{% if m.role == 'assistant' %}<assistant>
{%- generation %} {{ m.content }} </s>{% endgeneration %}
{%- else %}<user> {{ m.content }} </s>{% endif %}
{%- endfor %}"""
CORPUS = [
    {"text": "a b c d e"},
    {"text": "e d c b a " * 8},  # longer than a row
    {"prompt": "a b", "completion": "c d"},
    {
        "messages": [
            {"role": "user", "content": "a b c"},
            {"role": "assistant", "content": "d e"},
            {"role": "user", "content": "e"},
            {"role": "assistant", "content": "a"},
        ]
    },
    {"text": " "},
    {"text": "b"},
    {  # format 1 trained both answers
        "conversations": [
            {"from": "human", "value": "c"},
            {"from": "gpt", "value": "d e", "train": False},
            {"from": "human", "value": "e"},
            {"from": "gpt", "value": "b"},
        ]
    },
    {"instruction": "a", "input": "b", "output": "c"},
]
ROWS = {4: "268c841a2da9f3a5d900050094eba4cb0584921c571b6292753e5358a3e0e51c"}
"""Format -> what the rows of CORPUS hash to."""


def test_the_rows_of_this_format(tmp_path):
    """The cache's names hold no trace of the code that made the rows, so this test watches it."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)))
    found = [
        row
        for long_documents in ("split", "truncate")
        for row in build_dataset(
            DataArguments(cache_dir=str(tmp_path / "cache"), long_documents=long_documents),
            tokenizer,
            RowOptions(
                files=[str(tmp_path / "corpus.jsonl")], seq_len=16, vocab_size=len(WORDS), seed=0
            ),
        )
    ]
    hashed = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert hashed == ROWS.get(FORMAT), (
        "the same documents give other rows than before: if that is meant, raise FORMAT in "
        "longctx/train/data/pack/cache.py, or old caches will be used, and write down "
        f"{hashed!r} for it here"
    )


@pytest.mark.parametrize("end", [".arrow", ".arrow.xxh3"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "a link"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, end: str, linked: bool
) -> None:
    path, rows = tmp_path / "reference-v2-0.arrow", [{"a": 1}, {"a": 2}]
    features = Features({"a": Value("int64")})
    write_arrow(path, features, rows)
    damaged = path.with_name(path.name.removesuffix(".arrow") + end)
    damaged.unlink()
    os.mkfifo(tmp_path / "pipe" if linked else damaged)
    if linked:
        damaged.symlink_to(tmp_path / "pipe")
    assert open_arrow(path) is None
    assert write_arrow(path, features, rows)["a"] == [1, 2]
