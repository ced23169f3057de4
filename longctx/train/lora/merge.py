"""Writes the model that a LoRA adapter and its model make: `longctx merge ADAPTER --output DIR`.

    longctx merge runs/lora/final --output merged
    longctx merge runs/lora/final --model ./Llama-3.1-8B --output merged --dtype float32
    longctx merge runs/qlora/final --output merged --quantize nf4
    longctx merge runs/oss/final --output merged --keep_packed

W + s B A is computed in fp32 and rounded once, to the dtype of the model's files or to `--dtype`. W
is the model's; with `--quantize nf4` it has the values of 4 bits that a run with that flag trained
the adapter over; with `--keep_packed` what the adapter does not change stays as the model's files
have it, in MXFP4 or FP8 (packed_merge.py). Host memory: the model, and three of one weight in fp32.

Adapter and model may be a stranger's (foreign.py, train/loading/pretrained.py): no code of theirs
runs, and what is published is whole, finite, and has a weight for every tensor of both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from longctx.errors import UserError, one_line, say
from longctx.families.classes import as_reward_model
from longctx.families.stand_ins import shaped_experts
from longctx.families.vision import copy_processor
from longctx.layer.packed_weights import packed_names, packed_state
from longctx.packages import pip_install
from longctx.system import expanded, installed
from longctx.train.data.text.tokenizer import largest_id, read_tokenizer
from longctx.train.loading.pretrained import (
    files_of,
    packed_files,
    read_config,
    read_model,
    weights_identity,
)
from longctx.train.loading.stop_tokens import add_ends, ids_of, name_ends
from longctx.train.loading.weight_files import forget_tie
from longctx.train.lora.foreign import base_of_run, check_fits, read_adapter
from longctx.train.lora.packed_merge import unpack_, write_packed
from longctx.train.lora.quantise import round_to_nf4_
from longctx.train.options.source import ModelSource
from longctx.train.output.card import merged_card, write_card
from longctx.train.output.definition import BASE
from longctx.train.output.folder import claimed
from longctx.train.output.rehearsal import rehearse
from longctx.train.output.save import disk_problem, publish, require_space
from longctx.train.program import Parser

QUANTIZE = ("none", "nf4")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="longctx merge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of a PEFT adapter (final/)")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--model", help="the adapter's model, if it has moved")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the merged model")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        default="none",
        help="as the run that made the adapter was given",
    )
    parser.add_argument(
        "--keep_packed",
        action="store_true",
        help="leave weights in MXFP4 or FP8 that the adapter does not change as they are",
    )
    parser.add_argument(
        "--allow_changed",
        nargs="+",
        choices=[BASE],
        default=[],
        help="merge into other weights than the run's",
    )
    args = parser.parse_args(argv)
    output = expanded(args.output)
    merge(
        expanded(args.adapter),
        output,
        model=args.model,
        dtype=args.dtype,
        quantize=args.quantize,
        keep_packed=args.keep_packed,
        allow_changed=args.allow_changed,
    )
    say(f"{output}: the merged model, which from_pretrained loads")


def merge(
    adapter: Path,
    output: Path,
    *,
    model: str | None = None,
    dtype: str = "auto",
    quantize: str = "none",
    keep_packed: bool = False,
    allow_changed: Sequence[str] = (),
) -> None:
    """Raises UserError for what is no adapter, does not fit its model, or would run code."""
    if keep_packed and (quantize, dtype) != ("none", "auto"):
        raise UserError("--keep_packed keeps values and dtypes: leave out --quantize and --dtype")
    needed = ["peft"] + ["bitsandbytes"] * (quantize == "nf4")
    if missing := [name for name in needed if not installed(name)]:
        raise UserError(f"longctx merge needs {missing[0]}: {pip_install(*missing)}")
    found = read_adapter(adapter)
    name = model or found.get("base_model_name_or_path")
    if not name:
        raise UserError(f"{adapter} does not say which model it is of: give --model")
    with claimed(output) as staged:
        tokenizer = _tokenizer(adapter)
        base = ModelSource(name=name, frozen=True, keeps_packed=keep_packed)
        config = _config(adapter, base)
        if keep_packed and not ((packed := packed_files(base, config)) and packed.form):
            raise UserError(f"--keep_packed: {name} has no weights in MXFP4 or FP8: leave it out")
        if found.get("task_type") == "SEQ_CLS":
            as_reward_model(config)
        rows, names = check_fits(adapter, config)
        _check_tokens(adapter, tokenizer, base, rows)
        if BASE not in allow_changed:
            _check_base(adapter, base, config)
        merged = _merged(adapter, base, config, rows, names, dtype, quantize)
        name_ends(merged, ids_of(getattr(config.get_text_config(), "eos_token_id", None)))
        try:
            rehearse(merged, lambda to: merged.save_pretrained(to, state_dict={}), staged.parent)
            require_space(output.parent, sum(x.nbytes for x in merged.parameters()))
            if packed_names(merged.parameters()):
                write_packed(merged, *files_of(base, config), staged)
            else:
                merged.save_pretrained(staged)
            copy_processor(merged, staged)
            if tokenizer is not None:
                tokenizer.save_pretrained(staged)
            card = merged_card(
                base.name or "", adapter, type(merged).__name__, _said(merged, quantize)
            )
            write_card(card, staged, output)
            publish(staged, output, replace=False)
        except Exception as error:
            if reason := disk_problem(error):
                raise UserError(f"{output} could not be written: {reason}") from error
            raise


def _said(merged: Any, quantize: str) -> str:
    of = "" if quantize == "none" else f", of base weights rounded to {quantize}"
    of += "".join(f", and {name} as it was" for name in packed_names(merged.parameters()))
    return f"{str(merged.dtype).removeprefix('torch.')}{of}"


def _check_base(adapter: Path, base: ModelSource, config: Any) -> None:
    """Raises UserError for other weights than those that the adapter's run was trained over."""
    if (trained := base_of_run(adapter)) is None:
        return
    given = weights_identity(base, config)
    if given is not None and trained != given:
        raise UserError(
            f"{adapter} was trained over other weights than those of {base.name} "
            f"({trained}, not {given}): give the right --model, or merge them with --allow_changed "
            f"{BASE}"
        )


def _check_tokens(adapter: Path, tokenizer: Any, base: ModelSource, rows: int) -> None:
    """Raises UserError for a tokenizer of the adapter's folder with a token that its run added and
    whose row is in no file. Some models' own tokenizers have tokens without a row."""
    if tokenizer is None or (most := largest_id(tokenizer)) < rows:
        return
    with suppress(UserError):  # a model without a tokenizer
        if largest_id(read_tokenizer(base.name or "")) >= most:
            return
    raise UserError(
        f"cannot merge {adapter}: its tokenizer has the token {most}, and neither the adapter nor "
        f"{base.name} a row for it (they have {rows}): save the adapter again with "
        "save_embedding_layers=True, or give the --model whose vocabulary was extended"
    )


def _merged(
    adapter: Path,
    base: ModelSource,
    config: Any,
    rows: int,
    names: dict[str, str],
    dtype: str,
    quantize: str,
) -> Any:
    import peft

    asked = dtype if dtype == "auto" else getattr(torch, dtype)
    model = read_model(base, config, dtype=asked, attention="eager", head_follows=True)
    if rows != len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter holds all rows
    weights = model.named_parameters()
    dtypes = {name: x.dtype for name, x in weights if packed_state(x) is None}
    if quantize != "none":
        round_to_nf4_(model.get_decoder().layers)
    where = f"cannot merge {adapter} into {base.name}"
    try:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        with shaped_experts(model):
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), key_mapping=names)
        _part_ends(adapted, *ends)
        for layer in _layers(adapted):
            unpack_(layer)
            _add_in_fp32(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that all is merged already
            merged = adapted.merge_and_unload(safe_merge=True)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a file's values raise as many types as there are checks
        raise UserError(f"{where}: {one_line(error)}") from error
    for name, weight in merged.named_parameters():
        if packed_state(weight) is not None:
            continue
        weight.data = weight.data.to(dtypes.get(name, merged.dtype))
        if not weight.isfinite().all():
            raise UserError(f"{where}: {name} would not be finite in {weight.dtype}")
    forget_tie(merged)
    return merged


def _layers(adapted: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]


def _part_ends(adapted: Any, embedding: Any, head: Any) -> None:
    """Gives two ends that share a weight one each if an adapter changes one of them alone."""
    from peft.tuners.lora import LoraLayer

    changed = [x.get_base_layer() for x in _layers(adapted) if isinstance(x, LoraLayer)]
    if head is None or head.weight is not embedding.weight:
        return
    if any(layer is end for layer in changed for end in (embedding, head)):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        adapted.config.tie_word_embeddings = False


@torch.no_grad()
def _add_in_fp32(layer: Any) -> None:
    """Adds s B A to W as PEFT does, with one rounding instead of two."""
    weights = list(layer.get_base_layer().parameters(recurse=False))
    dtypes = [weight.dtype for weight in weights]
    for weight in weights:
        weight.data = weight.data.float()
    layer.merge(safe_merge=True)
    for weight, dtype in zip(weights, dtypes, strict=True):
        weight.data = weight.data.to(dtype)


_TRAINED = ("rope_parameters", "max_position_embeddings")
"""The keys of a configuration that `--rope_scaling` and `--extend_context` change."""


def _config(adapter: Path, base: ModelSource) -> Any:
    """Returns the model's configuration, with the RoPE and the end tokens that the adapter was
    trained with."""
    config = read_config(base)
    if not os.path.isfile(adapter / "config.json"):
        return config
    try:
        trained = AutoConfig.from_pretrained(str(adapter), trust_remote_code=False)
    except Exception as error:  # a file's values raise as many types as there are checks
        raise UserError(f"{adapter}: its config.json: {one_line(error, 200)}") from error
    if trained.model_type != config.model_type:
        raise UserError(
            f"{adapter} was trained over a model of type {trained.model_type!r}, and "
            f"{base.name} is of type {config.model_type!r}: give the right --model"
        )
    of_text, trained_text = config.get_text_config(), trained.get_text_config()
    for name in _TRAINED:
        if hasattr(trained_text, name):
            setattr(of_text, name, getattr(trained_text, name))
    add_ends(of_text, ids_of(getattr(trained_text, "eos_token_id", None)))
    return config


def _tokenizer(adapter: Path) -> Any:
    """Reads the tokenizer that a run saved next to its adapter; None if it saved none."""
    if not os.path.isfile(adapter / "tokenizer_config.json"):
        return None
    return read_tokenizer(str(adapter), remedy="remove its tokenizer's files, or get them again")
