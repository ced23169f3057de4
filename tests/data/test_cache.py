from __future__ import annotations

import os

import numpy as np
import pytest
from datasets import Features, List, Value
from small_tokenizer import small_tokenizer

from longctx.data import cache
from longctx.data.cache import digest, file_identity, open_arrow, tokenizer_identity, write_arrow
from longctx.data.rows import _report
from longctx.errors import UserError

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


@pytest.mark.parametrize("damage", ["garbage", "half", "other length"])
def test_a_damaged_file_is_reported_and_removed(tmp_path, damage, capsys):
    path = tmp_path / "a.arrow"
    write_arrow(path, FEATURES, rows(50))
    data = path.read_bytes()
    if damage != "other length":
        path.write_bytes(b"garbage" * 100 if damage == "garbage" else data[: len(data) // 2])
    assert open_arrow(path, rows=51) is None
    assert not path.exists()
    assert "rebuilding the damaged cache file" in capsys.readouterr().out
    assert open_arrow(path) is None


@pytest.mark.parametrize("text", ["[1]", '{"stats": {}}', '{"stats": {"no": 1}}', "null", "{"])
def test_a_damaged_report_is_made_again(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    assert _report(tmp_path / "rows.json") is None


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


def test_names_depend_on_every_part():
    assert digest("a", 1) == digest("a", 1)
    assert len({digest("a", 1), digest("a", 2), digest("a"), digest(["a", 1])}) == 4
