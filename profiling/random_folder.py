"""Writes a preset's model with random weights as its public files are: packed where they are.

    python profiling/random_folder.py gpt-oss-120b /dev/shm/gpt-oss-120b

A run over the folder reads what one over the public files does, with a tokenizer of a thousand
words, `w4` to `w999`. Layers have the same numbers, so that 61 GiB take a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.families.classes import auto_class
from longctx.train.loading.packed_formats import format_of, held_by
from longctx.train.loading.quantised import of_preset, quantization
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config
from profiling.bench.everyday_peers import tokenizer
from profiling.build import VOCABULARY

ENDS = "ends"
"""The shard of what belongs to no layer."""


def write(preset: str, folder: Path) -> None:
    """Raises UserError for an unknown preset."""
    special = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config = load_config(ModelArguments(preset=preset), vocab_size=VOCABULARY, special_ids=special)
    settings = quantization(of_preset(preset, config))
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = format_of(settings)
    packed = {id(held.weight): held for held in held_by(form, model)} if form else {}

    @cache
    def drawn(name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
        assert form is not None
        data, scale = form.drawn(name, shape, device)
        return data.cpu(), scale.cpu()

    @cache
    def dense(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float("norm" in name), dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, device=device)).bfloat16().cpu()

    shards: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        _, found, rest = name.partition(".layers.")
        layer, _, own = rest.partition(".") if found else (ENDS, "", name)
        shard = shards.setdefault(layer, {})
        if held := packed.get(id(parameter)):
            assert form is not None
            tensors = drawn(own, parameter.shape)
            for stored, x in zip(form.stored(held.name, parameter.shape), tensors, strict=True):
                shard[f"{name}{stored.suffix}"] = x.view(stored.dtype).view(stored.shape)
        else:
            shard[name] = dense(own, parameter.shape)
    where = {}
    folder.mkdir(parents=True)
    for number, shard in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    if settings:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"quantization_config": settings}))
    tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("folder", type=Path, help="where to write; must not be there")
    args = parser.parse_args()
    write(args.preset, args.folder)


if __name__ == "__main__":
    main()
