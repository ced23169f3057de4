"""A pretrained model's files of weights: which are read, what they hold, and that it is all read.

Files come from the model's own folder, or the hub's copy of it. No number in them is cast from
integers, no weight of the model is left random, and no tensor of the files is left out: a scale
that no module multiplies by, a layer or a bias that the configuration does not have.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file, cached_files

from longctx.errors import UserError
from longctx.train.loading.config_sizes import MOST_EXPERTS
from longctx.train.safety.strange_files import read_json, tensor_problem

WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names of weights, in the order in which transformers looks: one file, or an index of several."""
_SAFE = ".safetensors"
"""The ending of the name of a file that is no pickle; transformers looks at nothing else."""
REWARD_HEAD = "score.weight"
"""The name of the head's weight in transformers' classifiers."""
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
}
_FLOATS, _BYTES = ("F", "BF", "float", "bfloat"), ("U8", "uint8")
"""Beginnings of the names of dtypes, in safetensors and in torch."""
_IN_BYTES = {"NF4": re.compile(""), "MXFP4": re.compile(r"_(blocks|scales)$")}
"""Maps formats of packed weights to the tensors that are bytes in their files. FP8 is a dtype."""
_BUFFERS = re.compile(r"(^|\.)(inv_freq|position_ids|attn\.bias|attention\.bias|masked_bias)$")
"""Tensors of old checkpoints that models compute: frequencies of RoPE, positions, masks."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files in a folder that transformers reads. Raises OSError, and ValueError,
    LookupError, TypeError or AttributeError for a damaged index or one that names a file outside
    the folder."""
    for single, index in WEIGHTS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return [folder / name for name in _shards(folder / index)]
    raise FileNotFoundError(f"no file named {WEIGHTS[0][0]}")


def fetched_files(name: str, **where: Any) -> list[Path]:
    """Returns a hub model's files of weights, downloaded unless they are here already."""
    for single, index in WEIGHTS:
        for file in (single, index):
            found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where)
            if found and file == single:
                return [Path(found)]
            if found:
                return list(map(Path, cached_files(name, _shards(Path(found)), **where) or ()))
    raise FileNotFoundError(f"no file named {WEIGHTS[0][0]}")


def _shards(index: Path) -> list[str]:
    names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{index.name} names {name}, which is not in the folder")
    return names


def quantization(config: Any) -> dict[str, Any]:
    """Returns a configuration's settings of quantisation; empty if it has none."""
    found: Any = getattr(config, "quantization_config", None)
    found = found.to_dict() if hasattr(found, "to_dict") else found
    return found if isinstance(found, dict) else {}


def holds_nf4(config: Any) -> bool:
    """Whether a checkpoint's weights are in 4 bits as `--quantize nf4` makes them: two in a byte,
    not four in the bytes of a floating point number, as FSDP takes them."""
    found = {"bnb_4bit_quant_storage": "uint8", **quantization(config)}
    return _NF4.items() <= {name: found.get(name) for name in _NF4}.items()


def check_files(files: Sequence[Path], packed: str | None = None) -> list[str]:
    """Returns the names of the tensors in a model's files. Raises ValueError for a file that would
    fill the memory, and for a tensor that is no floating point: transformers would cast it, and a
    run would train what is left. `packed` is the format of packed weights, whose bytes are
    accepted."""
    folder = Path(os.path.commonpath([path.parent for path in files])) if files else Path()
    pickled = [p.relative_to(folder) for p in files if p.suffix != _SAFE]
    if files and (problem := tensor_problem(folder, [escape(str(path)) for path in pickled])):
        raise ValueError(problem)
    names, in_bytes = [], _IN_BYTES.get(packed or "")
    for path in files:
        for name, dtype in _dtypes(path):
            names.append(name)
            takes = in_bytes is not None and in_bytes.search(name)
            known = (*_FLOATS, *_BYTES) if takes else _FLOATS
            if not dtype.startswith(known) and not _BUFFERS.search(name):
                raise ValueError(f"{name} in {path.name} holds {dtype}, no floating point")
    return names


def _dtypes(path: Path) -> Iterator[tuple[str, str]]:
    """Yields each tensor's name and dtype, as its format spells it."""
    if path.suffix == _SAFE:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_slice(name).get_dtype()
        return
    mapped = zipfile.is_zipfile(path)
    found = torch.load(path, map_location="meta", weights_only=True, mmap=mapped)
    for name, tensor in found.items():
        if isinstance(tensor, torch.Tensor):
            yield name, str(tensor.dtype).removeprefix("torch.")


_OF_AN_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
"""The name of a tensor of a single expert: what is before and behind the expert's number."""
_RANDOM = "they would be random; get the files again, or those of this config.json"


def refuse_without_experts(name: str, tensors: Iterable[str], experts: int | None) -> None:
    """Raises UserError if the files of the model `name` lack a tensor of an expert: of `experts`,
    as the configuration has it, or as other tensors tell. transformers makes one tensor of those of
    all experts, so that it could name none of them."""
    found: dict[tuple[str, str], set[int]] = {}
    for tensor in tensors:
        if match := _OF_AN_EXPERT.fullmatch(tensor):
            before, number, behind = match.groups()
            found.setdefault((before, behind), set()).add(int(number))
    counts: dict[str, int] = {}
    for (before, _), numbers in found.items():
        counts[before] = max(counts.get(before, experts or 0), 1 + max(numbers))
    missing = [
        f"{before}{number}{behind}"
        for (before, behind), numbers in found.items()
        if len(numbers) < counts[before] <= MOST_EXPERTS
        for number in sorted({*range(counts[before])} - numbers)
    ]
    _refuse(missing, f"of the model's weights are not in {name}", _RANDOM)


def _refuse(names: Sequence[str], problem: str, remedy: str) -> None:
    """Raises UserError if there are names of weights with a problem."""
    if names:
        shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise UserError(f"{len(names)} {problem} ({shown}): {remedy}")


def refuse_partial(
    name: str, model: Any, found: Mapping[str, Any], *, beside: Sequence[str] = ()
) -> None:
    """Raises UserError unless every weight of the model `name` was `found` in its files, which
    transformers would leave random, and every tensor of the files was read. `beside` are names of
    tensors that transformers has not looked at."""
    mismatched = [f"{weight} {tuple(there)}" for weight, there, _ in found["mismatched_keys"]]
    unread = [*_unread(model, found["unexpected_keys"]), *beside]
    other = (
        "trained without them it would be another model; get the config.json that belongs to the "
        "files, or files that are not quantised (for a GGUF file the model that it was made from)"
    )
    for names, problem, remedy in (
        ([*found["missing_keys"]], f"of the model's weights are not in {name}", _RANDOM),
        (mismatched, f"of the model's weights have another shape in {name}", _RANDOM),
        (unread, f"of the tensors in {name} are read by nobody", other),
    ):
        _refuse(names, problem, remedy)


def _unread(model: Any, unexpected: Iterable[str]) -> Sequence[str]:
    """Returns the tensors of the files that the model does not take, without buffers, and without
    heads if the task puts another on: those of a language model trained as a model of rewards, or
    the other way round."""
    names = [n for n in unexpected if n != REWARD_HEAD and not _BUFFERS.search(n)]
    if hasattr(model, REWARD_HEAD.partition(".")[0]):
        names = [n for n in names if n.startswith(f"{model.base_model_prefix}.")]
    return names


def unread_of_gguf(file: Path, model: Any) -> list[str]:
    """Returns the tensors of a GGUF file that are no weights of the model made of it, which
    transformers skips without a word: a layer more, biases, and the factors of Llama 3's RoPE
    (`rope_freqs`). A head is accepted where the task has another."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = GGUFReader(file)
    numbers = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    if sum(numbers.values()) <= sum(p.numel() for p in model.parameters()):
        return []  # transformers has found all of the model in the file, which has no more
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    read = get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    # Experts' names are those of parameters, without `.weight`.
    unread = [n for n in numbers if n not in read and n.removesuffix(".weight") not in read]
    return [name for name in unread if name != "output.weight"]


def forget_tie(model: Any) -> None:
    """Has lm_head and the embedding both saved if they are two weights, whatever the configuration
    said, and the configuration say so: other programs would put the embedding in lm_head's
    place."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
