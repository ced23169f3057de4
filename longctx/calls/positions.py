"""The positions of a call of a base model: those of RoPE, and those that tell documents apart.

Most models take one row of positions for each row of tokens, (B, S), and both are that. The text
models of vision-language models rotate each head by three rows, of time, height and width, and take

    (B, S)       the same for all three
    (3, B, S)    the three
    (4, B, S)    the three after one that tells documents apart

The three are equal for text: their RoPE is the ordinary one, and they tell documents apart as one
row does. Tokens of an image have three of their own, of which each frequency of RoPE reads one
(`rows_of`). These tell no documents apart; without a fourth row such a row of tokens is one
document. Hugging Face's Qwen2-VL and Qwen2.5-VL read documents from the fourth row alone, so that
their own layers get one (`four_rows`). GPT-OSS makes masks without positions; its own layers get
some that were made with them (`with_masks`).
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
    """Returns the positions of a call; None if they have another shape than the model takes.
    `rows` are those to which the model expands (B, S): 1, 3 or 4.

    Rows that `expand` has made are not read. To compare others waits for the GPU once."""
    if position_ids is None or position_ids.dim() < 3:
        return Positions(position_ids, position_ids)
    if rows == 1 or position_ids.dim() > 3 or len(position_ids) not in (1, 3, 4):
        return None
    first, *others = position_ids[-3:]
    if position_ids.stride(0) != 0 and not all(torch.equal(first, other) for other in others):
        return Positions(position_ids[-3:], position_ids[0] if len(position_ids) == 4 else None)
    return Positions(first, position_ids[0])


def rows_of(rotary: nn.Module, inv_freq: Tensor) -> Tensor:  # (d/2,) -> (d/2,) int32
    """Returns the row of positions that each frequency of a rotary embedding reads, of time, height
    and width, as its own code has it: of three tokens each has a position other than 0 in one row
    alone, and the sine of a frequency tells in which."""
    tokens = torch.eye(3, dtype=torch.int64, device=inv_freq.device)[:, None]  # (3, 1, 3)
    # Not by a call, whose hooks an engine counts in every process: one of them may be the first to
    # have an image.
    _, sin = rotary.forward(inv_freq.new_zeros(1, 3, 1, dtype=torch.float32), tokens)  # (1, 3, d)
    return sin[0, :, : len(inv_freq)].abs().argmax(0).int()


def four_rows(base: Any, position_ids: Any) -> Any:
    """Returns positions (4, B, S) in the place of (B, S), if these would not tell `base`, a base
    model in Hugging Face's code, where documents begin; else the positions as they are."""
    takes_four = known_family(base).position_rows == 3
    if not takes_four or position_ids is None or position_ids.dim() != 2:
        return position_ids
    return position_ids.expand(4, *position_ids.shape)


def with_masks(base: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `base`, a base model in Hugging Face's code, with masks by
    the type of layer, if the masks that it makes itself would not tell where documents begin."""
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
    """Lets Hugging Face's layers of a model hear where documents begin, whoever calls it: our rows
    are packed. It gets four rows of positions for one, or masks, where it needs them. Where the
    configuration of a part asks for a cache, with which nobody looks for documents, calls do
    without. Returns the handles by which these hooks are taken away."""
    handles = []
    if model.config.get_text_config() is not model.config:  # whose own cache Trainer switches off
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
    """Leaves patched models alone, whose forward knows when Hugging Face's layers run."""
    asked = kwargs.get("use_cache")
    caches = base.config.use_cache if asked is None else asked
    if caches or kwargs.get("past_key_values") is not None or "longctx" in vars(base):
        return args, kwargs
    return args, with_masks(base, kwargs)
