"""A PEFT adapter of unknown origin, checked before the weights of its model are read.

read_adapter    adapter_config.json: LoRA, and nothing whose merged model would be another one
check_resumed   the same of a checkpoint of adapters, whose run knows its own
check_fits      PEFT's own matching of names to modules, rehearsed without weights in a child with
                limits: patterns are a stranger's regular expressions, ranks a stranger's numbers

An adapter fits where each of its tensors has a place of its shape and each place has its tensor.
Where its run added tokens, PEFT saves the embedding and lm_head whole, with the new rows: the model
is given as many rows.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from longctx.errors import UserError, many, one_line
from longctx.families.classes import class_of
from longctx.families.look import whole_shape
from longctx.train.lora.renamed import (
    Shapes,
    as_loaded,
    of_single_experts,
    renamed,
    renaming,
    unfoldable,
)
from longctx.train.output.manifest import Damaged, check_files, read_manifest
from longctx.train.safety.processes import Unbounded, in_child
from longctx.train.safety.strange_files import read_json, refuse_odd, tensor_problem

CONFIG, SAFE, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
REHEARSE_S, REHEARSE_BYTES = 60.0, 2 << 30
"""Llama-3.1-405B, an adapter on each of its maps, took 8 s of a busy core and 40 MiB."""

_MERGED_AS_THEY_ARE = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "target_parameters", "modules_to_save", "trainable_token_indices"),
    *("fan_in_fan_out", "bias", "lora_bias", "use_rslora", "use_dora", "init_lora_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("ensure_weight_tying", "megatron_core"),
}
"""Keys of a LoRA's configuration that merging takes into account. Anything else would make other
layers (layer_replication), import a module (megatron_config), or belong to a variant that no
weights hold (aLoRA, Arrow)."""
_INITIAL = re.compile(
    r"gaussian|orthogonal|eva|olora|corda|loftq|lora_ga|pissa(_niter_\d{1,2})?", re.ASCII
)


def read_adapter(folder: Path) -> dict[str, Any]:
    """Returns the configuration of an adapter. Raises UserError for a folder that holds no LoRA
    adapter, and for one that is damaged or cannot be merged."""
    if not os.path.isfile(folder / CONFIG):
        raise UserError(f"{folder} holds no adapter ({CONFIG}): give a run's final/")
    refuse_odd(folder)
    try:
        check_files(folder)
    except Damaged as error:
        raise UserError(
            f"{folder} is damaged ({error}): get it again, or remove its manifest.json if you have "
            "changed it yourself"
        ) from error
    try:
        config = read_json(folder / CONFIG)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: {CONFIG} is unreadable ({one_line(error, 160)})") from error
    if problem := _config_problem(config) or tensor_problem(folder, (PICKLED,)):
        raise UserError(f"cannot merge {folder}: {problem}")
    return config


def base_of_run(folder: Path) -> str | None:
    """Returns what the run that made the adapter recorded of its base's weights
    (train/output/definition.py)."""
    manifest = read_manifest(folder)
    base = (manifest and manifest["run"] or {}).get("base")
    return base if isinstance(base, str) else None


def _config_problem(config: dict[str, Any]) -> str | None:
    import peft

    if config.get("peft_type") != "LORA":
        return f"its peft_type is {config.get('peft_type')!r}, and LORA alone is merged here"
    defaults = vars(peft.LoraConfig())
    for name, value in config.items():
        if name not in _MERGED_AS_THEY_ARE and value and value != defaults.get(name):
            return f"its {name} is {value!r}, which longctx merge does not know"
    counts = {"r": config.get("r", 8), **_items(config, "rank_pattern")}
    scales = {"lora_alpha": config.get("lora_alpha", 8), **_items(config, "alpha_pattern")}
    for name, value in counts.items():
        if type(value) is not int or not 1 <= value < 2**31:
            return f"the rank {name} must be a whole number of at least 1, not {value!r}"
    for name, value in scales.items():
        if type(value) not in (int, float) or not 0 < value < 2**31 or math.isnan(value):
            return f"{name} must be a number above 0, not {value!r}"
    initial = config.get("init_lora_weights", True)
    if type(initial) is not bool and not _INITIAL.fullmatch(str(initial)):
        return f"its init_lora_weights is {initial!r}, which longctx merge does not know"
    base = config.get("base_model_name_or_path")
    if not (base is None or isinstance(base, str)):
        return f"its base_model_name_or_path is {base!r}: give --model"
    return None


def _items(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    return found if isinstance(found, dict) else {name: found}


def check_fits(folder: Path, config: PretrainedConfig) -> tuple[int, dict[str, str]]:
    """Returns the rows of the embedding that the adapter was trained with, and the renaming of its
    tensors (renamed.py). Raises UserError where its tensors are not those of a model of this
    configuration, but for the rows, with the adapter's own, or where finding that out takes more
    than it may."""
    try:
        found: tuple[int, dict[str, str]] = in_child(
            lambda: _rehearse(folder, config), seconds=REHEARSE_S, more_bytes=REHEARSE_BYTES
        )
        return found
    except Unbounded as error:
        raise UserError(
            f"cannot merge {folder}: matching its {CONFIG} to the model's modules {error}: look at "
            "its patterns and ranks"
        ) from error
    except RuntimeError as error:  # of as many types as PEFT has checks
        raise UserError(f"cannot merge {folder}: {error}") from error


def _rehearse(folder: Path, config: PretrainedConfig) -> tuple[int, dict[str, str]]:
    """Runs in the child process."""
    import peft
    import torch

    kind = class_of(config)
    if kind is None:
        raise UserError(f"longctx merge knows no causal language model of {config.model_type!r}")
    found = _tensors(folder)
    lora: Any = peft.LoraConfig.from_pretrained(str(folder))
    lora.init_lora_weights = False  # no numbers are there to begin from
    text = config.get_text_config()
    experts = of_single_experts(found)
    if experts and (problem := unfoldable(lora, experts)):
        raise UserError(f"cannot merge {folder}: {problem}: {_BEFORE_5}")
    with torch.device("meta"):
        skeleton = kind(config)
        names = renaming(path for path, _ in skeleton.named_modules())
        found = renamed(found, names)
        held = _rows(found, skeleton)
        own_rows = text.vocab_size
        rows = text.vocab_size = max(held) or text.vocab_size  # this process's own copy
        adapted: Any = peft.get_peft_model(kind(config), lora, low_cpu_mem_usage=True)
    needed, known = (
        {
            name: tuple(x.shape)
            for name, x in peft.get_peft_model_state_dict(
                adapted, adapted.state_dict(), save_embedding_layers=whole
            ).items()
        }
        for whole in (False, True)
    )
    found = as_loaded(found, adapted, lora)
    if problem := _misfit(found, needed, known) or _lost_rows(held, own_rows, lora, rows):
        cure = "get the adapter again, or give the --model that it was trained over"
        raise UserError(f"cannot merge {folder}: {problem}: {_BEFORE_5 if experts else cure}")
    return rows, names


_BEFORE_5 = "merge it with the transformers 4 and the PEFT that made it (merge_and_unload)"
"""The way out for adapters of single experts that PEFT does not fold."""


def _rows(found: Shapes, model: Any) -> list[int]:
    """Returns how many rows of the embedding, and of an lm_head of its own, the adapter holds; 0
    for an end that it does not hold whole."""
    ends, paths = [model.get_input_embeddings()], {m: path for path, m in model.named_modules()}
    head = model.get_output_embeddings()
    if head is not None and not getattr(model.config, "tie_word_embeddings", False):
        ends.append(head)

    def held(path: str) -> int:
        inside = {n: shape for n, shape in found.items() if f".{path}." in n and "lora_" not in n}
        return max((shape[0] for n, shape in inside.items() if n.endswith(".weight")), default=0)

    return [held(paths[end]) for end in ends]


def _lost_rows(held: Sequence[int], own: int, lora: Any, rows: int) -> str | None:
    """Says which rows of new tokens are in no file; None where all are there. `own` are those of
    the model."""
    if rows != own and 0 in held:
        which = "lm_head" if held[0] else "the embedding"
        return f"it has {rows} rows for a vocabulary of {own}, but none of {which}"
    chosen = lora.trainable_token_indices or []
    tokens = chosen if isinstance(chosen, list) else [i for some in chosen.values() for i in some]
    if tokens and max(tokens) >= rows:
        return f"it trained the row of token {max(tokens)}, and the model has {rows} rows"
    return None


def check_resumed(checkpoint: Path, adapted: Any) -> None:
    """Raises UserError for a checkpoint whose adapter is not that of the run: PEFT would leave what
    is missing at its random beginning, and read adapters of folders within, whatever adapters they
    are."""
    import peft
    import torch

    if others := sorted(checkpoint.glob(f"*/{CONFIG}")):
        raise UserError(
            f"{checkpoint} holds an adapter that no run saves, in {others[0].parent.name}: remove "
            "it"
        )
    shapes = {
        name: torch.empty(whole_shape(p), device="meta")
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    saved = peft.get_peft_model_state_dict(adapted, shapes, save_embedding_layers=False)
    needed = {name: tuple(x.shape) for name, x in saved.items()}
    if problem := _misfit(_tensors(checkpoint), needed, needed):
        raise UserError(
            f"cannot resume from {checkpoint}: of its adapter {problem}: resume from another "
            "checkpoint"
        )


def _misfit(found: Shapes, needed: Shapes, known: Shapes) -> str | None:
    """Returns as a short reason which of an adapter's tensors has no place, or which place no
    tensor; `known` are the places that may have one."""
    for names, what in (
        (needed.keys() - found.keys(), "its file lacks"),
        (found.keys() - known.keys(), "no module of the model takes"),
        ({n for n, shape in found.items() if known.get(n, shape) != shape}, "of another shape"),
    ):
        if names:
            return f"{many(len(names), 'tensor')} {what} ({_first(names)})"
    return None


def _tensors(folder: Path) -> Shapes:
    """Returns names and shapes of the adapter's tensors. Raises UserError."""
    import torch
    from safetensors import safe_open

    if os.path.isfile(folder / SAFE):
        with safe_open(folder / SAFE, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}
            found = {n: (tuple(x.get_shape()), str(x.get_dtype())) for n, x in parts.items()}
    elif os.path.isfile(folder / PICKLED):
        mapped = zipfile.is_zipfile(folder / PICKLED)
        saved = torch.load(folder / PICKLED, weights_only=True, map_location="cpu", mmap=mapped)
        found = {
            n: (tuple(x.shape), "F" if x.is_floating_point() else str(x.dtype))
            for n, x in saved.items()
        }
    else:
        raise UserError(f"{folder} holds no {SAFE}")
    for name, (_, dtype) in found.items():
        if not dtype.startswith(("F", "BF")):
            raise UserError(f"{folder}: {name} holds {dtype}, no floating point")
    return {name: shape for name, (shape, _) in found.items()}


def _first(names: Iterable[str]) -> str:
    chosen = sorted(names)
    return ", ".join(chosen[:2]) + (", ..." if len(chosen) > 2 else "")
