"""What is below the command line is told of a model: how it is patched, and where it comes from.

arguments.py has an option for each field, of the same name but for `ModelSource.name`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from longctx.train.options.about import COUNT, NOT_NEGATIVE, About, Range
from longctx.train.options.limits import check_values
from longctx.train.options.parts import FUSED

Keeping = Literal["auto", "x", "o", "h", "qkv", "all"]
Offload = Literal["none", "all", "auto"]
ClassType = Literal["vanilla", "custom", "liger", "any"]
Backend = Literal["auto", "fa4", "cudnn", "flash", "math", "fa2", "sdpa", "eager"]


def within(numbers: Range) -> Any:
    """A field that is None or a number among these, whoever patches the model."""
    return field(default=None, metadata={"about": About(range=numbers)})


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """Raises UserError for a number out of its range."""

    class_type: ClassType = "custom"
    """vanilla: Hugging Face as it is; liger: Liger-Kernel's patch; custom: longctx; any: Hugging
    Face's layers, with longctx's checkpoints, attention and loss, whatever the model. The other
    fields but `parts` are custom's, and some of them any's."""
    parts: tuple[str, ...] | None = None
    """Single parts in Hugging Face's layers (train/options/parts.py); None: the schedule, or Liger's own
    choice."""
    keep: Keeping = "auto"
    """What each layer keeps for backward (cost/kept.py); auto: what is fastest in the memory there
    is."""
    offload_activations: Offload = "auto"
    """The place where it waits: the GPU, host memory, or the GPU first."""
    attn_backend: Backend = "auto"
    head_groups: int | None = within(COUNT)
    """Parts in which attention runs; None: by what is free."""
    tile_tokens: int | None = within(COUNT)
    """Tokens that token-wise work takes at a time; None: by what is free."""
    host_memory_gib: float | None = within(NOT_NEGATIVE)
    """Host memory for activations; None: what is available."""
    share_prefixes: bool = False
    """Whether a prompt with which several documents of a batch begin is computed once."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Whether the layers of short batches that are alike run as CUDA graphs."""
    seq_len: int | None = within(COUNT)
    """The longest document's tokens, on which attention's time depends; None: the batch's."""

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def schedules(self) -> bool:
        """Whether our schedule is to run the layers."""
        return self.class_type == "custom" and self.parts is None

    @property
    def fuses_loss(self) -> bool:
        """Whether lm_head and the loss are to be one operation of ours, without logits."""
        return self.class_type == "custom" and (self.parts is None or FUSED in self.parts)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place that a pretrained model comes from."""

    name: str | None = None
    """A local folder, a .gguf file or a hub id; None: a preset, with random weights."""
    trust_remote_code: bool = False
    """Whether code that a model repository ships may run."""
    flag: str = "--model_name_or_path"
    """The option that named it, for messages."""
    frozen: bool = False
    """Whether its weights are not trained: under adapters, or of a model that only computes."""
    in_nf4: bool = False
    """Whether its weights are to be in 4 bits, by `--quantize nf4`."""
