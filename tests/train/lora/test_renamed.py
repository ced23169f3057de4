"""Adapters whose names are those of earlier versions of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from longctx.errors import UserError
from longctx.train.lora.merge import merge

pytest.importorskip("peft")
R, ALPHA, EXPERTS = 4, 8, 11  # more than ten: names are sorted as numbers
SIZES: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MIXTURES = {
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=EXPERTS),
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=48, head_dim=8),
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
QWEN2_VL = Qwen2VLConfig(
    text_config=SIZES | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    vision_config=dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=14),
    **dict(image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33),
)

QWEN3_VL = Qwen3VLConfig(
    text_config=SIZES | {"head_dim": 8, "rope_scaling": {"mrope_section": [1, 1, 2]}},
    vision_config=dict(
        depth=1,
        hidden_size=32,
        num_heads=2,
        intermediate_size=32,
        patch_size=14,
        out_hidden_size=32,
        deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    ),
    **dict(image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33),
)


def save_base(folder: Path, config: Any, auto: Any = AutoModelForCausalLM) -> dict[str, Any]:
    """Saves a random model; returns its weights as its class names them."""
    torch.manual_seed(0)
    model = auto.from_config(config)
    model.save_pretrained(folder / "base")
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def save_adapter(folder: Path, maps: dict[str, tuple[int, int]], **changes: Any) -> dict[str, Any]:
    """Saves a random adapter of maps (O, I) by their paths; returns s B A of each."""
    torch.manual_seed(1)
    tensors, change = {}, {}
    for path, (outputs, inputs) in maps.items():
        a, b = 0.1 * torch.randn(R, inputs), 0.1 * torch.randn(outputs, R)
        tensors |= {f"base_model.model.{path}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
        change[path] = ALPHA / R * b @ a
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=R, lora_alpha=ALPHA)
    config |= dict(
        target_modules=sorted({path.rpartition(".")[2] for path in maps}),
        base_model_name_or_path=str(folder / "base"),
    )
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config | changes))
    return change


def of_experts(block: str, names: tuple[str, str, str]) -> dict[str, tuple[int, int]]:
    maps = {"model.layers.0.self_attn.q_proj": (32, 32)}
    for expert in range(EXPERTS):
        for name, shape in zip(names, ((48, 32), (48, 32), (32, 48)), strict=True):
            maps[f"model.layers.0.{block}.experts.{expert}.{name}"] = shape
    return maps


def merged(folder: Path, auto: Any = AutoModelForCausalLM) -> dict[str, Any]:
    merge(folder / "adapter", folder / "merged")
    return auto.from_pretrained(folder / "merged").state_dict()


@pytest.mark.parametrize(("config", "block", "names"), MIXTURES.values(), ids=MIXTURES)
def test_adapters_of_single_experts_are_folded(config, block, names, tmp_path: Path) -> None:
    """Each expert's weight is W + s B A, as where the experts were modules of their own."""
    before = save_base(tmp_path, config)
    change = save_adapter(tmp_path, of_experts(block, names))
    after = merged(tmp_path)
    q = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(after[f"{q}.weight"], before[f"{q}.weight"] + change[q])
    inside = "model.layers.0.mlp.experts"
    for expert in range(EXPERTS):
        gate, up, down = (
            change[f"model.layers.0.{block}.experts.{expert}.{name}"] for name in names
        )
        for name, moved in (("gate_up_proj", torch.cat([gate, up])), ("down_proj", down)):
            stack = f"{inside}.{name}"
            torch.testing.assert_close(after[stack][expert], before[stack][expert] + moved)


@pytest.mark.parametrize(
    ("changes", "left_out", "says"),
    [
        ({"use_rslora": True}, "", "rsLoRA's scale is another one"),
        ({"alpha_pattern": {"w2": 16}}, "", "its alpha_pattern has 'w2' for single experts"),
        ({}, r"experts\.10\.w2", "of another shape"),
        ({"target_modules": ["q_proj", "w1"]}, r"w[23]\.", "without also targeting w3"),
    ],
)
def test_what_cannot_be_folded_is_one_line(changes, left_out, says, tmp_path: Path) -> None:
    config, block, names = MIXTURES["mixtral"]
    save_base(tmp_path, config)
    save_adapter(tmp_path, of_experts(block, names), **changes)
    if left_out:
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        kept = {k: x for k, x in load_file(file).items() if not re.search(left_out, k)}
        save_file(kept, file)
    with pytest.raises(UserError, match=f"cannot merge .*{says}") as error:
        merged(tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "merged").exists()


VISION = {
    "qwen2_vl": (
        QWEN2_VL,
        {"model.layers": "model.language_model.layers", "visual": "model.visual"},
    ),
    "qwen3_vl, whose text has no end token": (QWEN3_VL, {}),
}


@pytest.mark.parametrize(("config", "today"), VISION.values(), ids=VISION)
def test_names_of_vision_models_before_4_52(config, today, tmp_path: Path) -> None:
    before = save_base(tmp_path, config, AutoModelForImageTextToText)
    old = dict(zip(today.values(), today, strict=True))
    maps = {}
    for new in ("model.language_model.layers", "model.visual"):
        inside, shape = (
            ("0.self_attn.q_proj", (32, 32)) if "layers" in new else ("blocks.0.attn.qkv", (96, 32))
        )
        maps[f"{new}.{inside}.weight"] = f"{old.get(new, new)}.{inside}", shape
    change = save_adapter(tmp_path, dict(maps.values()))
    after = merged(tmp_path, AutoModelForImageTextToText)
    for name, (path, _) in maps.items():
        torch.testing.assert_close(after[name], before[name] + change[path])
