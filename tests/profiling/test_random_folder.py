"""A folder of a preset's random weights, which a run reads as the public files."""

from __future__ import annotations

import pytest
import torch

from longctx.layer.packed_weights import packed_names
from longctx.train.options.config import ModelArguments
from longctx.train.options.source import PRESETS
from longctx.train.start.loading import load_config, load_model
from profiling import random_folder

pytestmark = pytest.mark.usefixtures("plain_kernels")
SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=1024)
OSS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4)


@pytest.mark.parametrize(
    ("preset", "sizes", "packed"),
    [("gpt-oss-20b", OSS, ["MXFP4"]), ("qwen3-8b-fp8", {}, ["FP8"]), ("qwen3-8b", {}, [])],
)
def test_it_is_read_as_the_public_files_are(preset, sizes, packed, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(PRESETS, preset, PRESETS[preset] | SMALL | sizes)
    random_folder.write(preset, folder := tmp_path / preset)
    args = ModelArguments(model_name_or_path=str(folder), lora_r=4, seq_len=64)
    config = load_config(args, vocab_size=1024)
    model = load_model(args, config, device=torch.device("cpu"))
    assert packed_names(model.parameters()) == packed
    assert config.num_hidden_layers == 2 and (folder / "tokenizer.json").exists()
