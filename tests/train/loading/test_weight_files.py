"""A pretrained model's files: no tensor is cast from integers, is left out or lies elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_families import family_config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longctx.errors import UserError
from longctx.families.classes import as_language_model, as_reward_model
from longctx.train.loading.pretrained import read_config, read_model
from longctx.train.loading.weight_files import fetched_files, refuse_without_experts
from longctx.train.options.source import ModelSource

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1)
UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"
ONES = torch.ones(4)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict()


def saved(folder: Path, tensors: dict[str, torch.Tensor], file: str, **config: Any) -> Path:
    """A model whose weights are in `file`, which an index names unless it is called as usual."""
    folder.mkdir(exist_ok=True)
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], **config).save_pretrained(folder)
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
        usual = "model.safetensors"
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=path.suffix != ".old")
        usual = "pytorch_model.bin"
    if file != usual:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
        (folder / f"{usual}.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path, rewards: bool = False) -> Any:
    source = ModelSource(name=str(folder))
    config = read_config(source)
    (as_reward_model if rewards else as_language_model)(config)
    return read_model(source, config, dtype="auto", attention=None)


FILES = (
    "model.safetensors",
    "part-1.safetensors",
    "sub/part-1.safetensors",
    "pytorch_model.bin",
    "part-1.bin",
    "weights.old",
)


@pytest.mark.parametrize("file", FILES)
def test_integers_are_refused_in_every_format(tmp_path: Path, tensors, file) -> None:
    read(saved(tmp_path / "whole", tensors, file))
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool):
        folder = saved(tmp_path / "rounded", {**tensors, UP: tensors[UP].to(dtype)}, file)
        with pytest.raises(UserError, match=f"{UP} in {Path(file).name} holds .*no floating"):
            read(folder)


@pytest.mark.parametrize("name", ["../whole/{}", "{root}/whole/{}", "sub/../../whole/{}"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_no_index_leads_out_of_its_folder(tmp_path: Path, tensors, file, name) -> None:
    saved(tmp_path / "whole", tensors, file)
    folder = saved(tmp_path / "broken", {}, file)
    (folder / file).unlink()
    elsewhere = dict.fromkeys(tensors, name.format(file, root=tmp_path))
    index = {"metadata": {}, "weight_map": elsewhere}
    (folder / f"{file}.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="index.json names .*which is not in the folder"):
        read(folder)


def test_nor_does_a_hub_models(tmp_path: Path, tensors) -> None:
    home = tmp_path / "models--a--b"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("1234")
    (home / "snapshots").mkdir()
    folder = saved(home / "snapshots" / "1234", tensors, "part-1.safetensors")
    assert fetched_files("a/b", cache_dir=tmp_path) == [folder / "part-1.safetensors"]
    index = {"metadata": {}, "weight_map": {UP: "../../../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names ../../../elsewhere.safetensors"):
        fetched_files("a/b", cache_dir=tmp_path)
    saved(folder, tensors, "model.safetensors")
    assert fetched_files("a/b", cache_dir=tmp_path) == [folder / "model.safetensors"]
    with pytest.raises((OSError, ValueError)):
        fetched_files("a/nothing", cache_dir=tmp_path)


def test_a_config_names_no_other_file(tmp_path: Path, tensors) -> None:
    folder = saved(tmp_path / "m", tensors, "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "x.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="x.safetensors .*: call that file model.safetensors"):
        read(folder)


@pytest.mark.parametrize("file", ["model.safetensors", "part-1.bin"])
@pytest.mark.parametrize(
    "name",
    [
        f"{UP}_scale",
        f"{UP}_scale_inv",
        UP.replace("weight", "input_scale"),
        UP.replace("weight", "bias"),
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.embed_positions.weight",
        "lm_head.bias",
        "mtp.layers.0.weight",
        "vision_tower.weight",
    ],
)
def test_a_tensor_that_nobody_reads_is_refused(tmp_path: Path, tensors, file, name) -> None:
    folder = saved(tmp_path / "m", {**tensors, name: ONES}, file)
    with pytest.raises(UserError) as error:
        read(folder)
    assert f"1 of the tensors in {folder} are read by nobody ({name})" in str(error.value)


def test_scales_beside_fp8_are_refused(tmp_path: Path, tensors) -> None:
    """Without quantization_config they would be cast: here, 2,100 times too large."""
    scaled = {UP: (tensors[UP] * 2100).to(torch.float8_e4m3fn), f"{UP}_scale_inv": ONES[:1] / 2100}
    with pytest.raises(UserError, match="read by nobody .*weight_scale_inv.*not quantised"):
        read(saved(tmp_path / "m", tensors | scaled, "model.safetensors"))


HARMLESS = {
    "frequencies of old RoPE": {"model.layers.0.self_attn.rotary_emb.inv_freq": ONES},
    "one of all layers": {"model.rotary_emb.inv_freq": ONES},
    "a mask": {"model.layers.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
    "positions": {"model.embeddings.position_ids": torch.arange(4)},
    "a classifier's head": {"score.weight": torch.ones(1, 16)},
}


@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_what_old_checkpoints_hold_is_accepted(tmp_path: Path, tensors, file, what) -> None:
    read(saved(tmp_path / "m", tensors | HARMLESS[what], file))


def test_a_head_may_give_way_to_that_of_rewards(tmp_path: Path, tensors) -> None:
    read(saved(tmp_path / "m", tensors, "model.safetensors"), rewards=True)
    folder = saved(tmp_path / "n", {**tensors, f"{UP}_scale": ONES}, "model.safetensors")
    with pytest.raises(UserError, match="read by nobody .*weight_scale"):
        read(folder, rewards=True)


def test_two_ends_are_tied_only_where_they_are_equal(tmp_path: Path, tensors) -> None:
    """final/ would say that they are one, and other programs would read the embedding alone."""
    embedding = tensors["model.embed_tokens.weight"]
    for head, tied in ((embedding.clone(), True), (embedding + 1, False)):
        folder = tmp_path / str(tied)
        both = {**tensors, "lm_head.weight": head}
        model = read(saved(folder, both, "model.safetensors", tie_word_embeddings=True))
        assert model.config.tie_word_embeddings is tied
        model.config.save_pretrained(folder)
        assert AutoConfig.from_pretrained(folder).tie_word_embeddings is tied
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(again.lm_head.weight, head, rtol=0, atol=0)


def expert_tensors(experts: int) -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{i}.{name}.weight"
        for layer in range(2)
        for i in range(experts)
        for name in ("gate_proj", "down_proj")
    ]


@pytest.mark.parametrize(
    ("lost", "told", "message"),
    [
        (
            "layers.1.mlp.experts.2.down_proj",
            4,
            r"^1 of .* \(model.*1.mlp.experts.2.down_proj.weig",
        ),
        ("layers.1.mlp.experts.2.", None, r"^2 of .* \(model.*experts.2.down_proj.weight, model"),
        (
            "experts.3.",
            4,
            r"^4 of the model's weights are not in M .*, \.\.\.\): they would be rand",
        ),
    ],
)
def test_an_expert_that_is_missing_is_named(lost, told, message) -> None:
    """transformers would speak of a stack of all experts in another shape."""
    whole = expert_tensors(4)
    refuse_without_experts("M", [*whole, "model.norm.weight"], told)
    refuse_without_experts("M", ["model.layers.0.mlp.experts.down_proj"], 4)  # stacked
    with pytest.raises(UserError, match=message):
        refuse_without_experts("M", [name for name in whole if lost not in name], told)


def test_a_run_says_which_expert_is_missing(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(family_config("mixtral"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"^1 of .*block_sparse_moe.experts.3.w2.weight\): they"):
        read(tmp_path)
