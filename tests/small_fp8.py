"""A saved model whose matrices are put in FP8 with a scale for each block, as DeepSeek has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [32, 16],
    "activation_scheme": "dynamic",
}


def in_fp8(folder: Path, block: tuple[int, int] = (32, 16)) -> dict[str, Tensor]:
    """Rounds the matrices of the layers in a folder; returns their values, in fp32."""
    tensors, truth = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        weight = tensors[name].float()
        grid = [-(-size // of) for size, of in zip(weight.shape, block, strict=True)]
        scales = torch.rand(grid) + 0.5
        whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        whole = whole[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / whole).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        truth[name] = tensors[name].float() * whole
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bits = {"quantization_config": FP8 | {"weight_block_size": [*block]}}
    written = json.loads((folder / "config.json").read_text()) | bits
    (folder / "config.json").write_text(json.dumps(written))
    return truth
