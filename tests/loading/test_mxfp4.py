"""A model whose experts are in MXFP4, as gpt-oss is published: read dense, and saved so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_families import family_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from longctx.errors import UserError
from longctx.loading.pretrained import read_config, read_model
from longctx.options.model import ModelSource

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder in MXFP4, and the dense weights of its experts."""
    folder, dense = tmp_path_factory.mktemp("mxfp4"), {}
    torch.manual_seed(0)
    config = family_config("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(NAMES)]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 125, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
        values = FP4[codes & 7] * (1 - 2 * (codes >> 3)) * 2.0 ** (scales.int() - 127)[..., None]
        dense[name] = values.flatten(-2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": PACKED}
    (folder / "config.json").write_text(json.dumps(written))
    return folder, dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_made_dense_and_saved_so(published, dtype, tmp_path, capsys) -> None:
    folder, dense = published
    source = ModelSource(name=str(folder))
    config = read_config(source)
    assert not hasattr(config, "quantization_config")
    model = read_model(source, config, dtype=dtype, attention="eager")
    assert {p.dtype for p in model.parameters()} == {dtype}
    said = f"is in MXFP4: its experts are made dense, in {str(dtype).removeprefix('torch.')}"
    assert said in capsys.readouterr().out
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert not hasattr(again.config, "quantization_config")
    for name, wanted in dense.items():
        for found in (model, again):
            assert torch.equal(found.get_parameter(name).float(), wanted), name
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_four_bits_more_are_refused(published) -> None:
    source = ModelSource(name=str(published[0]))
    more = {"quantization_config": object()}
    with pytest.raises(UserError, match="is in MXFP4, and --quantize would round it once more"):
        read_model(source, read_config(source), dtype=torch.bfloat16, attention=None, **more)


def test_other_models_in_mxfp4_are_refused(tmp_path: Path) -> None:
    family_config("llama", quantization_config=PACKED).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is quantised \(mxfp4\)"):
        read_config(ModelSource(name=str(tmp_path)))
