"""Merges that leave packed weights as they are published: `longctx merge --keep_packed`.

Only what an adapter changes becomes a weight in 16 bits. All else is copied from the model's files,
byte for byte, so that no weight is rounded into few bits a second time: a rank-16 adapter that
changes weights by 1% would come out of MXFP4 with an error larger than itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from longctx.errors import UserError
from longctx.layer.packed_linear import PackedLinear
from longctx.layer.packed_weights import packed_names, packed_state
from longctx.train.loading.packed_formats import Fp8Files, format_of
from longctx.train.loading.packed_reading import OF_ACTIVATIONS


def unpack_(layer: Any) -> None:
    """Makes the base of a PEFT layer an ordinary linear layer. Raises UserError for experts, all of
    which share a parameter."""
    base: Any = layer.get_base_layer()
    if isinstance(base, PackedLinear):
        base.unpack_()
    elif packed := packed_names(base.parameters(recurse=False)):
        raise UserError(
            f"--keep_packed: this adapter changes experts, which {packed[0]} would round once "
            "more: leave it out, for a model in 16 bits"
        )


def write_packed(
    merged: Any, files: Sequence[Path], settings: Mapping[str, Any], folder: Path
) -> None:
    """Writes a merged model of which some weights are packed: the files that it was read from, with
    other values of those that are not. `settings` are their `quantization_config`. Raises UserError
    where a weight has another name in the files."""
    changed = {name: p.data for name, p in merged.named_parameters() if packed_state(p) is None}
    there = {name for path in files for name in _names(path)}
    if missing := sorted(changed.keys() - there):
        raise UserError(
            f"--keep_packed: the model's files have another name for {missing[0]}: leave it out"
        )
    form = format_of(settings)
    suffix = form.suffix if isinstance(form, Fp8Files) else ""
    unpacked = {name for name in changed if suffix and f"{name}{suffix}" in there}
    dropped = {f"{name}{suffix}" for name in unpacked}
    dropped |= {x for x in there if re.search(OF_ACTIVATIONS, x) and _weight(x) in unpacked}
    places: dict[str, str] = {}
    nbytes = 0
    folder.mkdir(exist_ok=True)
    for path in files:
        tensors = dict(_tensors(path, changed, dropped))
        places |= dict.fromkeys(tensors, path.name)
        nbytes += sum(x.nbytes for x in tensors.values())
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    _write_config(merged, settings, unpacked, folder)


def _write_config(
    merged: Any, settings: Mapping[str, Any], unpacked: Iterable[str], folder: Path
) -> None:
    merged.config.save_pretrained(folder)
    if getattr(merged, "generation_config", None) is not None:
        merged.generation_config.save_pretrained(folder)
    form = format_of(settings)
    lists = form.lists if isinstance(form, Fp8Files) else "modules_to_not_convert"
    dense = [name.removesuffix(".weight") for name in sorted(unpacked)]
    skipped = [*(settings.get(lists) or ()), *dense]
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {**settings, lists: skipped}
    (folder / "config.json").write_text(json.dumps(written, indent=2))


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensors(
    path: Path, changed: Mapping[str, Tensor], dropped: set[str]
) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            if name not in dropped:
                x = changed.get(name)
                yield name, file.get_tensor(name) if x is None else x.contiguous()


def _weight(name: str) -> str:
    """Returns the weight whose inputs a scale of the files rounds."""
    return f"{name.rpartition('.')[0]}.weight"
