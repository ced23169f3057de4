"""Puts the matrices of a saved model into a format that models are published in.

    python profiling/packed_folder.py runs/base/final runs/fp8           as DeepSeek and Qwen: FP8
    python profiling/packed_folder.py runs/base/final runs/mxfp4 mxfp4   experts, as gpt-oss: MXFP4

The copy has the values of so few bits; the smoke and tests train adapters over it.
"""

from __future__ import annotations

import argparse
import json
import shutil
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
MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The numbers of three bits; the fourth is their sign."""
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def in_fp8(
    folder: Path, block: tuple[int, int] | None = (32, 16), *, compressed: bool = False
) -> dict[str, Tensor]:
    """Rounds the matrices of the language model's layers in a folder, of which each `block` gets a
    scale (0: all columns), or each matrix, then with one of what it multiplies, as Ministral 3 has;
    returns their values, in fp32. All scales are random. `compressed`: as compressed-tensors has
    such files."""
    tensors, truth = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("proj.weight") and "vis" not in n]:
        weight = tensors[name].float()
        sizes = [of or size for of, size in zip(block or (0, 0), weight.shape, strict=True)]
        grid = [-(-size // of) for size, of in zip(weight.shape, sizes, strict=True)]
        scales = (torch.rand(grid) + 0.5).bfloat16()
        whole = scales.float().repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
        whole = whole[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / whole).to(torch.float8_e4m3fn)
        truth[name] = tensors[name].float() * whole
        if not block:
            scales = scales.view(1) if compressed else scales.view(())
            own = "input_scale" if compressed else "activation_scale"
            tensors[f"{name.removesuffix('weight')}{own}"] = torch.rand(())
        tensors[f"{name}_scale" if compressed else f"{name}_scale_inv"] = scales
    rest = [n.removesuffix(".weight") for n in tensors if n.endswith(".weight") and n not in truth]
    _write(folder, tensors, _compressed(block, rest) if compressed else _fp8(block, rest))
    return truth


def _fp8(block: tuple[int, int] | None, rest: list[str]) -> dict[str, Any]:
    scheme = "dynamic" if block else "static"
    sizes = {"weight_block_size": block and [*block], "activation_scheme": scheme}
    return FP8 | sizes | {"modules_to_not_convert": rest}


def _compressed(block: tuple[int, int] | None, rest: list[str]) -> dict[str, Any]:
    strategy = "tensor" if block is None else "channel" if block == (1, 0) else "block"
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if block and strategy == "block":
        weights["block_structure"] = [*block]
    group = {"targets": ["Linear"], "weights": weights}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**settings, "config_groups": {"group_0": group}, "ignore": rest}


def in_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Rounds the experts (E, K, O) of the gpt-oss in a folder; returns their values, in fp32."""
    tensors, truth = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(STACKS)]:
        weight = tensors.pop(name).float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponent = weight.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2  # FP4 ends at 6
        scaled = torch.ldexp(weight, -exponent[..., None])
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
        signs = scaled < 0
        values = torch.ldexp(FP4[codes] * (1 - 2 * signs.int()), exponent[..., None])
        truth[name] = values.flatten(-2).transpose(1, 2)
        low, high = (codes + 8 * signs).byte().unflatten(-1, (-1, 2)).unbind(-1)
        tensors[f"{name}_blocks"] = low | high << 4
        tensors[f"{name}_scales"] = (exponent + 127).byte()
    _write(folder, tensors, MXFP4)
    return truth


def _write(folder: Path, tensors: dict[str, Tensor], bits: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": bits}
    (folder / "config.json").write_text(json.dumps(written))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder with model.safetensors")
    parser.add_argument("folder", type=Path, help="where to write; must not be there")
    parser.add_argument("format", choices=("fp8", "mxfp4"), nargs="?", default="fp8")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    for file in args.model.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors") and "manifest" not in file.name:
            shutil.copy(file, args.folder)
    (in_fp8 if args.format == "fp8" else in_mxfp4)(args.folder)


if __name__ == "__main__":
    main()
