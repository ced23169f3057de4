"""The forward of any model with our loss in it: lm_head and cross-entropy in chunks.

The model's own forward runs, without labels. When it calls lm_head, the loss is computed inside
that call (head/loss.py), under the hooks with which an engine gathers lm_head's weight, and lm_head
returns one column of its input instead of logits. So no family has to be known: all that a forward
computes before lm_head stays. What it would have done to logits is in `LossFactors`, which probe.py
has found by comparing this loss with the model's own. Logits are computed when they are read
(head/logits.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.any_model.runtime import LossFactors, any_runtime_of
from longctx.calls.routing import auxiliary_factor
from longctx.constants import IGNORE_INDEX
from longctx.families.vision import named
from longctx.forwards.attach import Forward
from longctx.head.logits import lazy_logits
from longctx.head.loss import linear_cross_entropy


class AnyForward(Forward):
    """`any_forward` as the forward of one model, with the signature of the model's own forward,
    which trainers inspect."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        super().__init__(module, function)
        signature = inspect.signature(type(module).forward)
        _, *parameters = signature.parameters.values()
        self.__signature__ = signature.replace(parameters=parameters)


def any_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs Hugging Face's forward, with our loss if labels are given and our loss serves the
    call."""
    given = named(self, args) | kwargs
    runtime = any_runtime_of(self)
    if runtime is None:
        return type(self).forward(self, **given)
    embedded = given.get("inputs_embeds")
    runtime.begin(self, given.get("input_ids") if embedded is None else embedded)
    if runtime.loss is not None and _is_ours(self, given):
        found = _with_our_loss(self, runtime.loss, given)
    else:
        found = type(self).forward(self, **_known(self, given))
    runtime.check_checkpoints(self)
    return found


def _is_ours(model: Any, given: dict[str, Any]) -> bool:
    """Whether our loss serves a call. It does not for calls that ask for logits of some tokens, for
    tuples, or for the auxiliary loss of routers against the configuration."""
    if given.get("labels") is None:
        return False
    keeps, shows = given.get("logits_to_keep"), given.get("return_dict")
    all_tokens = keeps is None or isinstance(keeps, int) and keeps == 0
    asked = getattr(model.config.get_text_config(), "output_router_logits", None)
    as_tried = given.get("output_router_logits", asked) in (None, asked)
    return all_tokens and shows is not False and as_tried


_OFFERED = ("num_items_in_batch", "return_dict")
"""Arguments that are passed to a model's forward only if it takes them."""


def _known(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments without those of `_OFFERED` that the model's forward does not take."""
    parameters = inspect.signature(type(model).forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {n: value for n, value in given.items() if n not in _OFFERED or n in parameters}


def _with_our_loss(model: Any, factors: LossFactors, given: dict[str, Any]) -> Any:
    own = ("labels", "shift_labels", "num_items_in_batch")
    targets, items = given.get("shift_labels"), given.get("num_items_in_batch")
    if targets is None:
        targets = nn.functional.pad(given["labels"][..., 1:], (0, 1), value=IGNORE_INDEX)
    rest = {name: value for name, value in given.items() if name not in own}
    head = model.get_output_embeddings()
    with in_head(head, targets, factors, items) as inside:
        found = type(model).forward(model, **_known(model, rest | {"return_dict": True}))
    loss, hidden = inside
    if getattr(found, "aux_loss", None) is not None:
        loss = loss + auxiliary_factor(model) * found.aux_loss.to(loss.device)
    logits = partial(_logits, head, factors)
    lazy = lazy_logits(hidden, logits, len(head.weight), loss)
    return type(found)(**{**found, "loss": loss, "logits": lazy})


@contextmanager
def in_head(
    head: Any, targets: Tensor, factors: LossFactors, items: Any = None
) -> Iterator[list[Tensor]]:
    """Returns a context in which lm_head, when it is called, computes the loss of its input; both
    are put into the list that the context gives. Raises RuntimeError for a model that calls lm_head
    twice."""
    found: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:  # (B, S, D) -> (B, S, 1)
        if found:
            raise RuntimeError("lm_head is called more than once")
        loss = linear_cross_entropy(
            hidden,
            head.weight,
            targets.to(hidden.device),
            bias=head.bias,
            num_items=items,
            logits_scaling=factors.scaling,
            softcap=factors.cap,
        )
        found.extend((loss, hidden))
        return hidden[..., :1].detach()

    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield found
    finally:
        del head.forward
        if before is not None:
            head.forward = before


def _logits(head: Any, factors: LossFactors, hidden: Tensor) -> Tensor:  # (B, S, D) -> (B, S, V)
    logits: Tensor = head(hidden) / factors.scaling
    return logits if factors.cap is None else torch.tanh(logits / factors.cap) * factors.cap
