"""Whether a run's rows are packed: only if its model keeps the documents of a row apart.

The schedule gets the boundaries of documents. Hugging Face's layers get `position_ids` that
restart, and whether they hear them is tried before data is read, on a specimen of the model
(any_model/packed.py): its class, configuration, attention, dtype and device are the run's.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from longctx.any_model.declined import why_declined
from longctx.any_model.packed import why_joined, with_short_windows
from longctx.any_model.patch import any_attention
from longctx.any_model.specimen import Specimen, of_specimen, outline
from longctx.calls.positions import keep_documents_apart
from longctx.errors import UserError, one_line, print_rank0
from longctx.families.classes import class_of, own_class_of
from longctx.families.families import family_of
from longctx.loop.collectives import any_rank
from longctx.patching.patch import patch_as
from longctx.train.options.config import ModelArguments, TrainArguments
from longctx.train.start.loading import attention_name, compute_dtype


def needs_one_document(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig, *, text: bool
) -> bool:
    """Returns whether each row must hold one document, and says so once; every process answers the
    same. Raises UserError where rows cannot: those of prompts with answers, which are no `text`,
    and those that ranks share."""
    kind = class_of(config)
    if kind is None and model_args.trust_remote_code:
        kind = own_class_of(config)
    if kind is None:
        return False  # no model can be made of it, which `load_model` says
    reason = _why_joined(model_args, args, config, kind)
    if not any_rank(reason is not None, args.device):
        return False
    reason = reason or "another process has found it"
    line = (
        f"{model_args.class_type}: {kind.__name__} does not keep the documents of a packed row "
        f"apart ({reason})"
    )
    remedy = "use a model that does, as those of --class_type custom"
    if family_of(config.get_text_config()) is not None:
        remedy = "use --class_type custom, or another --attn_backend"
    if not text:
        raise UserError(f"{line}, and rows of --task {args.task} hold several answers: {remedy}")
    if args.sequence_parallel_size > 1:
        raise UserError(
            f"{line}, and ranks cannot share the rows of such a model: leave out "
            f"--sequence_parallel_size, or {remedy}"
        )
    print_rank0(f"{line}: each row holds one document")
    return True


def _why_joined(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig, kind: Any
) -> str | None:
    dtype = compute_dtype(model_args, args.device)
    attention = attention_name(model_args, config, args.device)
    mixed = args.bf16 or args.fp16
    rounding = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else dtype
    shortened = copy.deepcopy(config)
    tried = [config, *([shortened] if with_short_windows(shortened) else [])]

    def look(specimen: Specimen) -> str | None:
        keep_documents_apart(specimen.model)
        if model_args.class_type == "liger":
            patch_as(specimen.model, model_args.patch_options, args.device)
        with torch.autocast(args.device.type, rounding, enabled=bool(mixed)):
            return why_joined(specimen, rounding)

    try:
        ours = model_args.schedules and dtype != torch.float64
        if ours and why_declined(config) is None:
            return None  # documents are apart by construction
        if model_args.class_type == "any":
            named, _ = any_attention(config, kind, model_args.attn_backend, args.device)
            attention = named or attention
        for each in tried:
            make = partial(outline, each, kind, attention, dtype)
            if reason := of_specimen(make, args.device, look):
                return reason
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a stranger's model raises of such a row
        return f"it cannot be tried: {type(error).__name__}: {one_line(error, 120)}"
    return None
