"""Writes the model that a LoRA adapter and its model make: `longctx merge ADAPTER --output DIR`.

    longctx merge runs/lora/final --output merged
    longctx merge runs/lora/final --model ./Llama-3.1-8B --output merged --dtype float32
    longctx merge runs/qlora/final --output merged --quantize nf4

W + s B A is computed in fp32 and rounded once, to the dtype of the model's files or to `--dtype`. W
is the model's; with `--quantize nf4` it has the values of 4 bits that a run with that flag trained
the adapter over. Host memory: the model, and one weight in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longctx.config import expanded, installed
from longctx.errors import UserError, one_line
from longctx.lora.quantise import round_to_nf4_
from longctx.output.removal import staging_path
from longctx.output.save import disk_problem, publish, remove_staging
from longctx.program import Parser

QUANTIZE = ("none", "nf4")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="longctx merge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of a PEFT adapter (final/)")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--model", help="its model, where that has moved")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of what is written")
    parser.add_argument(
        "--quantize", choices=QUANTIZE, default="none", help="of the run that made the adapter"
    )
    args = parser.parse_args(argv)
    adapter, output = expanded(args.adapter), expanded(args.output)
    merge(adapter, output, model=args.model, dtype=args.dtype, quantize=args.quantize)
    print(f"{output}: the merged model; AutoModelForCausalLM.from_pretrained loads it")


def merge(
    adapter: Path,
    output: Path,
    *,
    model: str | None = None,
    dtype: str = "auto",
    quantize: str = "none",
) -> None:
    """Raises UserError for what is no adapter, or does not fit its model."""
    needed = ["peft"] + ["bitsandbytes"] * (quantize == "nf4")
    if missing := [name for name in needed if not installed(name)]:
        raise UserError(f"longctx merge needs {missing[0]}: pip install 'longctx[lora]'")
    if not os.path.isfile(adapter / "adapter_config.json"):
        raise UserError(f"{adapter} holds no adapter (adapter_config.json): give a run's final/")
    if os.path.lexists(output):
        raise UserError(f"{output} exists: give --output a new folder")
    merged = _merged(adapter, model, dtype, quantize)
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_path(output)
    try:
        merged.save_pretrained(staging)
        _copy_tokenizer(adapter, staging)
        publish(staging, output)
    except Exception as error:
        if reason := disk_problem(error):
            raise UserError(f"{output} could not be written: {reason}") from error
        raise
    finally:
        remove_staging(staging)


def _merged(adapter: Path, name: str | None, dtype: str, quantize: str) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    try:
        name = name or peft.PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
        if not name:
            raise UserError(f"{adapter} does not say which model it is of: give --model")
        base = str(expanded(name)) if os.path.isdir(expanded(name)) else name
        asked = dtype if dtype == "auto" else getattr(torch, dtype)
        config = _config(adapter, base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=asked, config=config)
        if quantize != "none":
            round_to_nf4_(model.get_decoder().layers)
        adapted = peft.PeftModel.from_pretrained(model, str(adapter))
        return adapted.merge_and_unload(safe_merge=True)  # which refuses what is not finite
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a file's values raise as many types as there are checks
        raise UserError(f"cannot merge {adapter} into {name}: {one_line(error)}") from error


_TRAINED = ("rope_parameters", "max_position_embeddings")
"""Of a model's configuration, what `--rope_scaling` and `--extend_context` change."""


def _config(adapter: Path, base: str) -> Any:
    """The model's, with the RoPE that the adapter was trained with."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    if os.path.isfile(adapter / "config.json"):
        trained = AutoConfig.from_pretrained(str(adapter))
        for name in _TRAINED:
            if hasattr(trained, name):
                setattr(config, name, getattr(trained, name))
    return config


def _copy_tokenizer(adapter: Path, folder: Path) -> None:
    """What a run saved beside its adapter."""
    from transformers import AutoTokenizer

    if os.path.isfile(adapter / "tokenizer_config.json"):
        AutoTokenizer.from_pretrained(str(adapter)).save_pretrained(folder)
