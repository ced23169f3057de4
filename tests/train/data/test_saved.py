from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict

from longctx.errors import UserError
from longctx.train.data.reading.files import find_files
from longctx.train.data.reading.sources import read_documents


def texts(folder, tell=None):
    return [document.content for document in read_documents(find_files([str(folder)], tell))]


def test_a_saved_folder_gives_what_load_from_disk_gives(tmp_path):
    """Shards of an earlier save and files that `map` has kept are no rows of it."""
    Dataset.from_dict({"text": ["old", "old", "old"]}).save_to_disk(tmp_path / "a", num_shards=3)
    Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "a", num_shards=2)
    shard = tmp_path / "a" / "data-00000-of-00002.arrow"
    shard.with_name("cache-1.arrow").write_bytes(shard.read_bytes())
    lines: list[str] = []
    assert texts(tmp_path / "a", lines.append) == ["one", "two"]
    assert "cache-1.arrow (state.json does not name it)" in lines[0]


def test_of_several_splits_the_training_rows_are_read(tmp_path):
    one, two = (Dataset.from_dict({"text": [text]}) for text in ("one", "two"))
    DatasetDict(train=two, gone=one).save_to_disk(tmp_path)
    DatasetDict(train=one, test=two).save_to_disk(tmp_path)
    lines: list[str] = []
    assert texts(tmp_path, lines.append) == ["one"]
    assert "gone/data-00000-of-00001.arrow (dataset_dict.json names no such split)" in lines[0]
    assert "test/data-00000-of-00001.arrow (not the split train)" in lines[0]


def test_a_saved_folder_that_lacks_a_file_is_refused(tmp_path):
    Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path, num_shards=2)
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"state\.json names data-00001-of-00002\.arrow, which"):
        find_files([str(tmp_path)])
