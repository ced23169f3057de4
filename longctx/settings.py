"""The settings with which `longctx.patch` patches a model, and their words.

Single parts of a decoder have Liger-Kernel's names; `patch(parts=...)` and `--parts` take them:

    rope, rms_norm, layer_norm, swiglu, geglu     kernels in Hugging Face's layers
    cross_entropy                                 the loss over whole logits
    fused_linear_cross_entropy                    lm_head and the loss in chunks, without logits

`schedule` alone, the default, means scheduled layers and the loss in chunks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from longctx.errors import UserError
from longctx.ranges import COUNT, NOT_NEGATIVE, Range

Keeping = Literal["auto", "x", "o", "h", "qkv", "all"]
Offload = Literal["none", "all", "auto"]
ClassType = Literal["vanilla", "custom", "liger", "any"]
Backend = Literal["auto", "fa4", "cudnn", "flash", "math", "fa2", "sdpa", "eager"]
TaskName = Literal["sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "distill"]
LABELLED = ("sft", "distill")
"""Tasks whose loss covers all tokens of a row; other tasks use log-probabilities of answers."""


def scored_tokens(task: TaskName, tokens: int) -> int | None:
    """Returns the most tokens of a batch that a task scores, for the count of a step's memory and
    time; None if its loss covers all tokens."""
    return None if task in LABELLED else tokens


SCHEDULE = "schedule"
FUSED, WHOLE = "fused_linear_cross_entropy", "cross_entropy"
LAYER_PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
PARTS = (*LAYER_PARTS, WHOLE, FUSED)


def within(numbers: Range) -> Any:
    """Returns a field of PatchOptions that is None or a number of this range."""
    return field(default=None, metadata={"range": numbers})


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """The settings of a patched model. Raises UserError for a number out of its range."""

    class_type: ClassType = "custom"
    """vanilla: Hugging Face as it is; liger: Liger-Kernel's patch; custom: longctx; any: Hugging
    Face's layers of any model, with longctx's checkpoints, attention and loss. The other fields but
    `parts` apply to custom, and some of them to any."""
    parts: tuple[str, ...] | None = None
    """Single parts in Hugging Face's layers (PARTS); None: the schedule, or Liger's own choice."""
    keep: Keeping = "auto"
    """The activations that each layer keeps for backward (cost/kept.py); auto: the fastest choice
    that fits into memory."""
    offload_activations: Offload = "auto"
    """The place of kept activations: the GPU, host memory, or the GPU first."""
    attn_backend: Backend = "auto"
    """The attention backend; auto: the fastest one for the device and the model."""
    head_groups: int | None = within(COUNT)
    """Parts in which attention runs; None: by free memory."""
    tile_tokens: int | None = within(COUNT)
    """Tokens that token-wise work takes at a time; None: by free memory."""
    host_memory_gib: float | None = within(NOT_NEGATIVE)
    """GiB of host memory for activations; None: all that is available."""
    share_prefixes: bool = False
    """Whether a prompt with which several documents of a batch begin is computed once."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Whether the layers of short batches that are alike run as CUDA graphs."""
    seq_len: int | None = within(COUNT)
    """Tokens of the longest document, on which attention's time depends; None: the batch's."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, numbers = getattr(self, option.name), option.metadata.get("range")
            if numbers is None or value is None or isinstance(value, bool):
                continue
            if problem := numbers.problem(value):
                raise UserError(f"--{option.name} must be {problem}, got {value}")

    @property
    def schedules(self) -> bool:
        """Whether our schedule is to run the layers."""
        return self.class_type == "custom" and self.parts is None

    @property
    def fuses_loss(self) -> bool:
        """Whether lm_head and the loss are to be one operation of ours, without logits."""
        return self.class_type == "custom" and (self.parts is None or FUSED in self.parts)


def chosen_parts(where: str, given: str | Collection[str] | None) -> tuple[str, ...] | None:
    """Returns the given parts, each once; None for the schedule. `where` names the option in
    messages. Raises UserError for a single word, for no parts and for two losses."""
    if given is None or given == SCHEDULE or list(given) == [SCHEDULE]:
        return None
    if isinstance(given, str):
        raise UserError(f"{where} takes {SCHEDULE!r} or a collection of parts, as [{given!r}]")
    parts = tuple(dict.fromkeys(given))
    if not parts:
        raise UserError(f"{where} is empty: name parts of {', '.join(PARTS)}, or leave it out")
    if SCHEDULE in parts:
        raise UserError(f"{where}: {SCHEDULE!r} has all parts and stands alone")
    if {FUSED, WHOLE} <= {*parts}:
        raise UserError(
            f"{where}: {WHOLE} computes the loss over logits, {FUSED} without them: give one"
        )
    return parts


def check_names(where: str, parts: Iterable[str], known: Collection[str]) -> None:
    """Raises UserError for an unknown part, and names the nearest known one."""
    for name in parts:
        if name not in known:
            near = difflib.get_close_matches(str(name), [*known], n=1, cutoff=0.0)[0]
            raise UserError(f"{where} has no part {name!r}; did you mean {near}?")
