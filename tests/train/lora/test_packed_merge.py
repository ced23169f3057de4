"""Merges that leave packed weights as they are published: the values of the merge in 16 bits, and
the bytes of all that the adapter does not change."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_packed import made_dense, saved_in_fp8, saved_in_mxfp4
from transformers import AutoModelForCausalLM

from longctx.errors import UserError
from longctx.train.loading.pretrained import read_config, read_model
from longctx.train.lora.merge import merge
from longctx.train.options.source import ModelSource

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")
SAFE = "model.safetensors"
ATTENTION = ["q_proj", "v_proj", "o_proj"]
BASES: dict[str, Any] = {
    "llama": partial(saved_in_fp8, family="llama"),
    "llama, a scale a matrix": partial(saved_in_fp8, family="llama", block=None),
    "qwen3_moe": partial(saved_in_fp8, family="qwen3_moe", block=(8, 16)),
    "a scale a row": partial(saved_in_fp8, family="qwen3_moe", block=(1, 0), compressed=True),
    "gpt_oss": partial(saved_in_mxfp4, intermediate_size=96),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Any:
    made: dict[str, Path] = {}

    def base(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("base")
            BASES[case](made[case])
        return made[case]

    return base


def read(folder: Path) -> Any:
    """The model of a folder, dense in fp32."""
    where = ModelSource(name=str(folder), frozen=True, keeps_packed=True)
    return made_dense(read_model(where, read_config(where), dtype=torch.float32, attention="eager"))


def adapter_over(base: Path, folder: Path, **how: Any) -> Path:
    """A random adapter, saved by PEFT, with weights large enough to show in 16 bits."""
    model = read(base)
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **how}
    config = peft.LoraConfig(**options)
    adapted = peft.get_peft_model(model, config)
    for name, x in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.1)
    config.base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", BASES)
def test_what_an_adapter_does_not_change_has_its_bytes(case, dora, bases, tmp_path) -> None:
    base = bases(case)
    adapter = adapter_over(base, tmp_path / "adapter", use_dora=dora)
    merge(adapter, tmp_path / "kept", keep_packed=True)
    read(base).save_pretrained(tmp_path / "base")
    merge(adapter, tmp_path / "dense", model=str(tmp_path / "base"), dtype="float32")
    before, after = (load_file(folder / SAFE) for folder in (base, tmp_path / "kept"))
    endings = [
        f".{x}.{end}" for x in ATTENTION for end in ("weight", "activation_scale", "input_scale")
    ]
    changed = {name for name in before if any(end in name for end in endings)}
    assert changed and before.keys() - changed <= after.keys() <= before.keys()
    for name in before.keys() - changed:
        one, other = before[name], after[name]
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    truth = load_file(tmp_path / "dense" / SAFE)
    for name in after.keys() & changed:
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], truth[name].to(torch.bfloat16)), name
        assert not any(other.startswith(f"{name}_scale") for other in after)
    found, theirs = (dict(read(x).named_parameters()) for x in (tmp_path / "kept", base))
    for name, weight in found.items():
        wanted = after[name].float() if name in changed else theirs[name]
        assert torch.equal(weight, wanted), name


def test_transformers_reads_it_and_so_does_a_run(bases, tmp_path) -> None:
    """Another adapter may be trained over it; files of several parts keep their names."""
    base = Path(shutil.copytree(bases("gpt_oss"), tmp_path / "base"))
    tensors = load_file(base / SAFE)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, base / file, metadata={"format": "pt"})
    places = {name: file for file, some in parts.items() for name in some}
    (base / f"{SAFE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (base / SAFE).unlink()
    merge(adapter_over(base, tmp_path / "adapter"), tmp_path / "kept", keep_packed=True)
    assert sorted(x.name for x in (tmp_path / "kept").glob("*.safetensors")) == sorted(parts)
    index = json.loads((tmp_path / "kept" / f"{SAFE}.index.json").read_text())
    assert index["weight_map"] == places and index["metadata"]["total_size"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    ids = torch.arange(3, 40)[None]
    assert model(input_ids=ids).logits.isfinite().all()
    where = ModelSource(name=str(tmp_path / "kept"), frozen=True, keeps_packed=True)
    read_model(where, read_config(where), dtype=torch.bfloat16, attention="eager")
    assert "MXFP4 as it was" in (tmp_path / "kept" / "README.md").read_text()


def test_a_model_of_which_nothing_stays_packed_is_an_ordinary_one(bases, tmp_path) -> None:
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = adapter_over(bases("llama"), tmp_path / "adapter", target_modules=layers)
    merge(adapter, tmp_path / "merged", keep_packed=True)
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    saved = load_file(tmp_path / "merged" / SAFE)
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}


def test_what_cannot_stay_is_refused(bases, tmp_path) -> None:
    base = bases("gpt_oss")
    experts = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    adapter = adapter_over(base, tmp_path / "experts", **experts)
    with pytest.raises(UserError, match="this adapter changes experts, which MXFP4 would round"):
        merge(adapter, tmp_path / "merged", keep_packed=True)
    attention = adapter_over(base, tmp_path / "attention")
    for more in ({"dtype": "float32"}, {"quantize": "nf4"}):
        with pytest.raises(UserError, match="leave out --quantize and --dtype"):
            merge(attention, tmp_path / "merged", keep_packed=True, **more)
    merge(attention, tmp_path / "dense")
    with pytest.raises(UserError, match="has no weights in MXFP4 or FP8: leave it out"):
        merge(attention, tmp_path / "merged", model=str(tmp_path / "dense"), keep_packed=True)
    assert not (tmp_path / "merged").exists()
