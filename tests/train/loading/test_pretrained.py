"""What tells a model's weights from those of others, and which files hold them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longctx.errors import UserError
from longctx.train.data.text.tokenizer import read_tokenizer
from longctx.train.loading.pretrained import read_config, weights_identity
from longctx.train.loading.weight_files import weight_files
from longctx.train.options.source import ModelSource

CONFIG: Any = SimpleNamespace(_commit_hash="1234abcd")


def model(folder: Path, value: float = 0.0, shards: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensors = {f"w{n}": torch.full((4,), value + n) for n in range(4)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = {name: f"model-{n % shards}.safetensors" for n, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: x for n, x in tensors.items() if names[n] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return folder


def identity(folder: Path | str) -> str | None:
    return weights_identity(ModelSource(name=str(folder)), CONFIG)


def test_an_identity_is_of_the_bytes_alone(tmp_path: Path) -> None:
    same = [identity(model(tmp_path / name)) for name in ("a", "b")]
    assert same[0] == same[1] and str(same[0]).startswith("xxh3 ")
    (tmp_path / "b" / "config.json").write_text('{"a": 1}')
    (tmp_path / "b" / "consolidated.safetensors").write_bytes(b"not read by transformers")
    assert identity(tmp_path / "b") == same[0]
    assert identity(model(tmp_path / "c", 1e-3)) != same[0]
    parts = [identity(model(tmp_path / name, value, 2)) for name, value in (("d", 0), ("e", 1e-3))]
    assert len({*parts, same[0]}) == 3


def test_a_hub_model_is_its_commit_and_a_preset_its_seed(tmp_path: Path) -> None:
    assert identity("someone/model") == "commit 1234abcd"
    unknown: Any = SimpleNamespace()
    assert weights_identity(ModelSource(name="some/model"), unknown) is None
    assert weights_identity(ModelSource(), unknown) is None


INDEXES = {
    "no map": "{}",
    "a list": "[]",
    "a map that is a list": '{"weight_map": [1]}',
    "another folder": '{"weight_map": {"a": "../model/model.safetensors"}}',
    "an absolute name": '{"weight_map": {"a": "/etc/passwd"}}',
    "a folder": '{"weight_map": {"a": "."}}',
    "a missing file": '{"weight_map": {"a": "model-1.safetensors"}}',
    "nested": '{"weight_map": ' + "[" * 5000,
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_names_no_files_of_the_folder(tmp_path: Path, what: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(INDEXES[what])
    with pytest.raises(UserError, match="cannot load a model from") as error:
        identity(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_tokenizer, lambda name: read_config(ModelSource(name=name))])
def test_a_runs_folder_is_not_its_model(tmp_path: Path, read: Any) -> None:
    (tmp_path / "run").mkdir()
    model(tmp_path / "run" / "final")
    with pytest.raises(UserError) as error:
        read(str(tmp_path / "run"))
    assert str(error.value) == (
        f"{tmp_path}/run is the folder of a run: its model is in {tmp_path}/run/final"
    )


@pytest.mark.parametrize("name", ["path/to/model", "https://huggingface.co/a/b"])
def test_a_path_that_is_not_there_is_looked_for_on_no_hub(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is no folder here and no hub id"):
        read_config(ModelSource(name=name))


def test_one_file_comes_before_an_index_and_safetensors_before_pickles(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", shards=2)
    assert [path.name for path in weight_files(folder)] == [
        "model-0.safetensors",
        "model-1.safetensors",
    ]
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert len(weight_files(folder)) == 2
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]
