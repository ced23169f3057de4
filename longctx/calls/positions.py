"""The positions of a call of a base model: for RoPE, and for the bounds of documents.

Most models take one row of positions for each row of tokens, (B, S), which serves both. The text
models of vision-language models rotate each head by three rows, of time, height and width, and take

    (B, S)       one row for all three
    (3, B, S)    the three rows
    (4, B, S)    a row for the bounds of documents, and the three

For text the three rows are equal: their RoPE is the ordinary one, and they show the bounds of
documents as one row does. Tokens of an image have three different rows, of which each frequency of
RoPE reads one (`rows_of`). These show no bounds; without a fourth row such a row of tokens is one
document. Hugging Face's Qwen2-VL and Qwen2.5-VL read bounds from the fourth row alone, so that
their own layers get one (`four_rows`). GPT-OSS makes masks without positions; its own layers get
masks that were made with them (`with_masks`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from longctx.families.families import base_of, has_windows, known_family, mixes
from longctx.families.vision import joint_of


class Positions(NamedTuple):
    """The positions of a call's tokens. None stands for 0 to S - 1 in each row."""

    rope: Tensor | None  # (B, S), or (3, B, S) where the three differ
    documents: Tensor | None  # (B, S)


def positions_of(position_ids: Tensor | None, rows: int) -> Positions | None:
    """Returns the positions of a call; None if their shape is not one that the model takes. `rows`
    is the number of rows to which the model expands (B, S): 1, 3 or 4.

    Comparing the rows waits for the GPU once; rows that `expand` has made need no comparison.
    """
    if position_ids is None or position_ids.dim() < 3:
        return Positions(position_ids, position_ids)
    if rows == 1 or position_ids.dim() > 3 or len(position_ids) not in (1, 3, 4):
        return None
    first, *others = position_ids[-3:]
    if position_ids.stride(0) != 0 and not all(torch.equal(first, other) for other in others):
        return Positions(position_ids[-3:], position_ids[0] if len(position_ids) == 4 else None)
    return Positions(first, position_ids[0])


def rows_of(rotary: nn.Module, inv_freq: Tensor) -> Tensor:  # (d/2,) -> (d/2,) int32
    """Returns the row of positions, of time, height and width, that each frequency of a rotary
    embedding reads. Its own code decides: each of three tokens has a position other than 0 in one
    row alone, and the sine of a frequency shows in which."""
    tokens = torch.eye(3, dtype=torch.int64, device=inv_freq.device)[:, None]  # (3, 1, 3)
    # `forward`, not a call: engines count the hooks of calls in every process, and only some of the
    # processes may have an image in this batch.
    _, sin = rotary.forward(inv_freq.new_zeros(1, 3, 1, dtype=torch.float32), tokens)  # (1, 3, d)
    return sin[0, :, : len(inv_freq)].abs().argmax(0).int()


def four_rows(base: Any, position_ids: Any) -> Any:
    """Returns positions (4, B, S) instead of (B, S) if `base`, a base model in Hugging Face's code,
    would not read the bounds of documents from (B, S); otherwise the positions as they are."""
    takes_four = known_family(base).position_rows == 3
    if not takes_four or position_ids is None or position_ids.dim() != 2:
        return position_ids
    return position_ids.expand(4, *position_ids.shape)


def with_masks(base: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `base`, a base model in Hugging Face's code, with masks by
    type of layer, if the masks that it makes itself would not keep documents apart."""
    positions, given = inputs.get("position_ids"), inputs.get("attention_mask")
    if known_family(base).masks_by_position or positions is None or given is not None:
        return inputs
    # Masks depend on the shape, dtype and device of embedded tokens alone.
    like = torch.empty(*positions.shape, 0, dtype=base.dtype, device=positions.device)
    call: dict[str, Any] = dict(config=base.config, inputs_embeds=like, attention_mask=None)
    call |= dict(past_key_values=None, position_ids=positions)
    masks = {"full_attention": create_causal_mask(**call)}
    if has_windows(base.config):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**call)
    if mixes(base.config):
        masks["linear_attention"] = None  # no mask keeps documents of a mixer apart
    return inputs | {"attention_mask": masks}


def keep_documents_apart(model: Any) -> list[Any]:
    """Makes Hugging Face's layers of a model heed the bounds of documents in any call, since our
    rows are packed. The model gets four rows of positions for one, or masks, if it needs them. If
    the configuration of a part asks for a cache, with which transformers ignores the bounds, calls
    run without a cache. Returns the handles by which these hooks are removed."""
    handles = []
    if model.config.get_text_config() is not model.config:  # Trainer changes the outer one alone
        handles.append(model.register_forward_pre_hook(_without_cache, with_kwargs=True))
    base = base_of(model)
    if base is not None and known_family(base).position_rows == 3:
        outer = joint_of(model) or base  # called by the whole model, also inside a PeftModel
        hook = partial(_with_four_rows, base)
        handles.append(outer.register_forward_pre_hook(hook, with_kwargs=True))
    if base is not None and not known_family(base).masks_by_position:
        handles.append(base.register_forward_pre_hook(_with_masks, with_kwargs=True))
    return handles


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    asked = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    if kwargs.get("position_ids") is not None and not asked:
        kwargs = kwargs | {"use_cache": False}
    return args, kwargs


def _with_four_rows(base: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"position_ids": four_rows(base, kwargs.get("position_ids"))}


def _with_masks(base: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Adds masks to a call. It skips patched models, whose own forward adds masks when Hugging
    Face's layers run."""
    asked = kwargs.get("use_cache")
    caches = base.config.use_cache if asked is None else asked
    if caches or kwargs.get("past_key_values") is not None or "longctx" in vars(base):
        return args, kwargs
    return args, with_masks(base, kwargs)
