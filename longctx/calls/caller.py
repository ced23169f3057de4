"""The caller of a base model: what it tells the model, and what it learns from the call.

Our forwards around the base model pass it a `Caller`. Without one, and if a causal model returns
logits for another library's loss, the call stack shows who reads the hidden states.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from longctx.calls.labels import labels_on_padding


class Caller:
    """One call of a base model. It is no dataclass, which wrappers that cast tensors would copy."""

    def __init__(
        self,
        *,
        owns_gradient: bool = False,
        reads_padding: bool | None = None,
        averages: bool = False,
        balances: bool = False,
    ) -> None:
        self.owns_gradient = owns_gradient
        """Whether the output goes to our loss, which alone holds its gradient."""
        self.reads_padding = reads_padding
        """Whether hidden states of padding are read; None: the call stack decides."""
        self.averages = averages
        """Whether padding that is left out gets means of hidden states, since the logits of all
        tokens follow, and TRL's trainers log their means."""
        self.balances = balances
        """Whether the auxiliary loss of experts is computed."""
        self.balance: Tensor | None = None
        """The auxiliary loss of experts, (), once the scheduled layers have run; otherwise None."""
        self.router_logits: tuple[Tensor, ...] | None = None
        """The logits of routers, (B S, E) for each layer with experts, after the call; None if they
        were not asked for."""
        self.padded = False
        """Whether the scheduled layers left padding out; known after the call."""

    def as_keyword(self, base: nn.Module) -> dict[str, Any]:
        """Returns this object as a keyword if the base model runs our forward, also inside a
        wrapper that shows its signature (accelerate's autocast); otherwise no keyword."""
        takes = "caller" in inspect.signature(base.forward).parameters
        return {"caller": self} if takes else {}

    def may_read_padding(self) -> bool:
        if self.reads_padding is None:
            self.reads_padding = not _masks_padding()
        return self.reads_padding


_AROUND = (
    *("torch.", "accelerate.", "peft.", "deepspeed.", "contextlib", "functools", "trl."),
    *("transformers.models.", "transformers.utils."),
    *("longctx.any_model.", "longctx.calls.", "longctx.families.", "longctx.forwards."),
    *("longctx.images.", "longctx.mixers.", "longctx.patching.", "longctx.runtime."),
)
"""The modules whose functions pass a call on to a model, causal models of transformers among them.
TRL's trainers are recognised first."""


def _masks_padding() -> bool:
    """Whether a trainer of TRL, or a run of longctx, makes the current call: neither reads padding.
    A user's own method of such a trainer counts as neither."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if home.startswith("trl.") and "trainer" in home:
            return True
        if not home.startswith(_AROUND):
            return bool(home.startswith("longctx."))
        frame = frame.f_back
    return False


def classifier_reads_padding(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether one of transformers' classifiers reads hidden states of padding. Those of tokens read
    the tokens with a label, or all if there are no labels; those of sequences read one token."""
    ids, mask, labels = (inputs.get(n) for n in ("input_ids", "attention_mask", "labels"))
    if not isinstance(mask, Tensor):
        return False
    if hasattr(model, "dropout"):  # only classifiers of tokens have one
        return labels is None or labels_on_padding(labels, mask)
    pad = model.config.get_text_config().pad_token_id
    if ids is None or pad is None or ids.shape != mask.shape:
        return bool((mask[:, -1] == 0).any())
    numbers = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    last = ((ids != pad) * numbers).argmax(1, keepdim=True).to(mask.device)
    return bool((mask.gather(1, last) == 0).any())
