"""Puts the matrices of a saved model in FP8 with a scale for each block, as DeepSeek has them.

    python profiling/fp8_folder.py runs/base/final runs/fp8

The copy has the values of 8 bits that random scales give; the smoke and tests train adapters over
it.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder with model.safetensors")
    parser.add_argument("folder", type=Path, help="where to write; must not be there")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    for file in args.model.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors") and "manifest" not in file.name:
            shutil.copy(file, args.folder)
    in_fp8(args.folder)


if __name__ == "__main__":
    main()
