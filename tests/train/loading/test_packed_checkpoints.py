"""Checkpoints in MXFP4 and FP8: read dense and saved so; and what a run and its plan refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from small_families import family_config
from small_packed import saved_in_fp8, saved_in_mxfp4
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.constants import GIB
from longctx.cost.fitted import PROCESS_BYTES
from longctx.errors import UserError
from longctx.train.loading.pretrained import packed_files, read_config, read_model
from longctx.train.loading.weight_files import holds_nf4
from longctx.train.options.source import ModelSource
from longctx.train.report.plan import main as plan
from longctx.train.start.loading import load_config
from longctx.train.start.options import parse_planned
from profiling.packed_folder import FP8, MXFP4


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder in MXFP4, and the dense weights of its experts."""
    folder = tmp_path_factory.mktemp("mxfp4")
    sizes = dict(num_hidden_layers=1, layer_types=["full_attention"])
    return folder, saved_in_mxfp4(folder, **sizes)


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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_is_made_dense_under_adapters_and_saved_so(family, tmp_path, capsys) -> None:
    """Experts too, which the files have one by one."""
    truth = saved_in_fp8(tmp_path / "packed", family, num_hidden_layers=2)
    source = ModelSource(name=str(tmp_path / "packed"), frozen=True)
    model = read_model(source, read_config(source), dtype=torch.bfloat16, attention="eager")
    assert "is in FP8: its weights are made dense, in bfloat16" in capsys.readouterr().out
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert len(truth) >= 14 and not any("scale" in name for name in saved)
    for name, wanted in truth.items():
        assert torch.equal(saved[name], wanted.to(torch.bfloat16)), name
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()


def test_a_smaller_last_block_is_refused(tmp_path: Path) -> None:
    """transformers divides a weight's rows by its number of scales: 64 rows in blocks of 48 are two
    blocks of 32 there, and numbers between 32 and 48 would have the other block's scale."""
    saved_in_fp8(tmp_path, "llama", (48, 16), num_hidden_layers=2)
    source = ModelSource(name=str(tmp_path), frozen=True)
    with pytest.raises(UserError, match=r"proj.weight has .* no multiple of its blocks of 48 x 16"):
        read_model(source, read_config(source), dtype=torch.bfloat16, attention=None)


LORA, NF4 = ["--lora_r", "4"], ["--lora_r", "4", "--quantize", "nf4"]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]
BITS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
SAYS: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "MXFP4 in NF4": ("gpt_oss", MXFP4, NF4, "MXFP4, and --quantize would round it once more"),
    "FP8 in NF4": ("llama", FP8, NF4, "FP8, and --quantize would round it once more"),
    "FP8 as a whole": ("llama", FP8, [], "FP8, and rounded .* as a whole: .* with --lora_r"),
    "MXFP4 under ZeRO-3": ("gpt_oss", MXFP4, ZERO3, "MXFP4, which is not made dense under ZeRO-3"),
    "FP8 under ZeRO-3": ("llama", FP8, [*LORA, *ZERO3], "FP8, which is not made dense under"),
    "MXFP4 of another family": ("llama", MXFP4, LORA, r"\(mxfp4\), in a form that longctx does"),
    "GPTQ": ("llama", {"quant_method": "gptq", "bits": 4}, LORA, r"quantised \(gptq\), in a form"),
    "AWQ as a whole": ("llama", {"quant_method": "awq", "bits": 4}, [], r"\(awq\), and rounded"),
    "compressed": ("llama", {"quant_method": "compressed-tensors"}, LORA, "does not read: give"),
    "NF4 as a whole": ("llama", BITS, [], "in 4 bits .bitsandbytes.: .* --quantize nf4"),
    "NF4 without --quantize": ("llama", BITS, LORA, "--lora_r and --quantize nf4"),
    "8 bits": ("llama", BITS | {"load_in_4bit": False}, NF4, r"quantised \(bitsandbytes\)"),
    "FP4": ("llama", BITS | {"bnb_4bit_quant_type": "fp4"}, NF4, r"quantised \(bitsandbytes\)"),
    "4 bits for FSDP": (
        *("llama", BITS | {"bnb_4bit_quant_storage": "bfloat16"}, NF4),
        r"quantised \(bitsandbytes\)",
    ),
}


NO_BLOCK = "two positive numbers are needed"
ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": dict(num_bits=8, type="float", symmetric=True, strategy="channel"),
        }
    },
}


def of_rows(**changes: Any) -> dict[str, Any]:
    """compressed-tensors' settings with other words about weights."""
    group = ROWS["config_groups"]["group_0"]
    return ROWS | {"config_groups": {"a": group | {"weights": group["weights"] | changes}}}


SAYS |= {
    "a block of one number": ("llama", FP8 | {"weight_block_size": [128]}, LORA, NO_BLOCK),
    "a block of nothing": ("llama", FP8 | {"weight_block_size": [0, 128]}, LORA, NO_BLOCK),
    "a block of words": ("llama", FP8 | {"weight_block_size": ["a" * 999, 1]}, LORA, NO_BLOCK),
    "no names": ("llama", FP8 | {"modules_to_not_convert": [3]}, LORA, "a list of names is needed"),
    "no list": ("llama", ROWS | {"ignore": {"a": 1}}, LORA, "ignore .*: a list of names is needed"),
    "no structure": ("llama", of_rows(strategy="block"), LORA, NO_BLOCK),
    "int4": ("llama", of_rows(num_bits=4, type="int"), LORA, "does not read: give"),
    "groups of weights": ("llama", of_rows(strategy="group"), LORA, "does not read: give"),
    "no groups": ("llama", ROWS | {"config_groups": ["a"]}, LORA, "does not read: give"),
    "empty groups": ("llama", ROWS | {"config_groups": {}}, LORA, "does not read: give"),
    "a group of nothing": ("llama", ROWS | {"config_groups": {"a": 1}}, LORA, "not read: give"),
    "rows for Hugging Face's layers": (
        *("llama", ROWS, [*LORA, "--class_type", "vanilla"]),
        "FP8 of compressed-tensors, which stays packed and is not made dense",
    ),
    "rows as a whole": ("llama", ROWS, [], "FP8, and rounded .* as a whole: .* with --lora_r"),
    "rows under ZeRO-3": ("llama", ROWS, [*LORA, *ZERO3], "stays packed and is not made dense"),
}


@pytest.mark.parametrize("case", SAYS)
def test_a_run_and_its_plan_refuse_the_same(case, tmp_path, capsys) -> None:
    """With one line of the same words, before any weight is looked for: the folder has none."""
    family, bits, words, says = SAYS[case]
    family_config(family, quantization_config=bits).save_pretrained(tmp_path / "model")
    given = ["--model_name_or_path", str(tmp_path / "model"), *words]
    with pytest.raises(UserError, match=says):
        plan(["--gpu", "h100", "--seq_len", "64", *given])
    model_args, _, _, engine = parse_planned(["--seq_len", "64", *given])
    with pytest.raises(UserError, match=says):
        load_config(model_args, vocab_size=64, engine=engine)


def test_a_checkpoint_in_4_bits_is_taken_under_adapters(tmp_path: Path) -> None:
    family_config("llama", quantization_config=BITS).save_pretrained(tmp_path)
    source = ModelSource(name=str(tmp_path), frozen=True, in_nf4=True)
    assert holds_nf4(read_config(source)) and packed_files(source, read_config(source)) is None


PLANNED = {"custom": ("packed, as it stays", 0), "vanilla": ("dense, as it is read", 2)}
"""The line of a plan on FP8 by class type, and the bytes a number that reading takes on the
host."""


@pytest.mark.parametrize("class_type", PLANNED)
def test_a_plan_says_what_becomes_of_fp8(class_type, tmp_path, capsys) -> None:
    """Packed weights are mapped from their files, and NF4 is no way out that training takes."""
    says, nbytes = PLANNED[class_type]
    sizes = dict(hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, vocab_size=64)
    config = AutoConfig.for_model("llama", **sizes, quantization_config=FP8)
    config.save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), "--seq_len", "512", "--lora_r", "4", "--json"]
    words += ["--class_type", class_type]
    plan([*words, "--gpu", "h100", "--host_memory_gib", "16"])
    out, err = capsys.readouterr()
    assert f"{tmp_path} is in FP8: planned {says}" in err
    read = nbytes * 8 * (4 * 1024 * 1024 + 3 * 1024 * 8192) / GIB + PROCESS_BYTES / GIB
    assert json.loads(out)["host_reading_gib"] == pytest.approx(read, rel=0.01)
    with pytest.raises(SystemExit):
        plan([*words, "--gpu", "gib=1,flops=1e14", "--host_memory_gib", "1"])
    assert not any("nf4" in way["flags"] for way in json.loads(capsys.readouterr().out)["changes"])


def test_a_preset_whose_public_files_are_refused_has_a_note(capsys) -> None:
    note = "has random weights: its public checkpoint is in MXFP4, stays so under adapters"
    for words, noted in ((NF4, True), (LORA, False)):
        model_args = parse_planned(["--preset", "gpt-oss-20b", "--seq_len", "512", *words])[0]
        load_config(model_args, vocab_size=64)
        assert (note in capsys.readouterr().out) == noted
