"""What a task computes of the last hidden states instead of logits: inside the model's own forward,
so that DDP, engines that gather weights, adapters and autocast see an ordinary call.

    attach_scoring(model)                    once, on the model that a run trains
    model(**batch, scoring=LogProbs(...))    -> {"log_probs": (N,), ...}

The model runs its decoder (ours, Hugging Face's or Liger's), of a vision-language model its joint,
which sees images and runs the decoder, takes the hidden states of
`scoring.predictors` from the flattened batch and hands them to `scoring` with the weight of its
head. Only these tokens cost anything in the head. Their gradient goes back by an index_add in the
hidden states' dtype: a prompt's last token, which predicts the first token of each of its answers,
adds up one gradient an answer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longctx.errors import UserError
from longctx.families.adapters import inside_peft, unwrapped
from longctx.families.families import base_of, head_of, logits_cap, logits_scaling, not_known
from longctx.families.strangers import is_ours, why_not_chunked
from longctx.forwards.attach import Forward
from longctx.forwards.causal import as_causal
from longctx.forwards.modules import head_forward
from longctx.head.log_probs import linear_log_probs
from longctx.runtime.runtime import runtime_of

UNSCORED = "_longctx_unscored"
"""The attribute of a model that keeps the forward which scoring went around."""


class Scoring:
    """A function of some hidden states. It is no dataclass, which wrappers that cast tensors would
    copy."""

    def __init__(self, predictors: Tensor) -> None:  # (N,) int64, into the flattened batch
        self.predictors = predictors

    def values(
        self, hidden: Tensor, head: nn.Module, model: Any
    ) -> dict[str, Tensor]:  # hidden (N, D)
        """Computes the values from hidden states and the head of a model."""
        raise NotImplementedError


class LogProbs(Scoring):
    """Log-probabilities of `targets` and what else `linear_log_probs` finds of them."""

    def __init__(
        self,
        predictors: Tensor,  # (N,)
        targets: Tensor,  # (N,) int64
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        super().__init__(predictors)
        self.targets, self.outputs = targets, outputs

    def values(self, hidden: Tensor, head: Any, model: Any) -> dict[str, Tensor]:
        found = linear_log_probs(
            hidden,
            head.weight,
            self.targets,
            bias=head.bias,
            temperature=logits_scaling(model),
            softcap=logits_cap(model),
            outputs=self.outputs,
            logits_bytes=logits_bytes(model),
        )
        return {name: getattr(found, name) for name in self.outputs}


class Rewards(Scoring):
    """The reward of each answer: one number from the hidden state of its last token."""

    def values(self, hidden: Tensor, head: Any, model: Any) -> dict[str, Tensor]:
        found = nn.functional.linear(hidden, head.weight, head.bias)
        return {"rewards": found.squeeze(-1).float()}


def logits_bytes(model: Any) -> int | None:
    """Returns the bytes of logits that a patched model's plan allows at a time, else None."""
    runtime = runtime_of(model)
    cut = None if runtime is None else runtime.adopted.cut
    return None if cut is None else cut.logits_bytes


def attach_scoring(model: Any) -> None:
    """Lets a model, also one inside a PeftModel, take `scoring`. Raises UserError for a model of no
    family that longctx knows, whose logits may be computed in another way."""
    inner = inside_peft(model)
    if base_of(inner) is None:
        raise UserError(not_known(type(inner).__name__, scored=True))
    head, own = _head(inner), vars(inner)
    if "forward" in vars(head) and not is_ours(head):
        raise UserError(f"{_IMPOSSIBLE} a forward that another library put on the model's head")
    head.forward = Forward(head, scoring_head_forward)
    if head is head_of(inner) and (reason := why_not_chunked(inner)):
        raise UserError(f"{_IMPOSSIBLE} {reason}")
    own[UNSCORED] = own.get("forward")
    inner.forward = Forward(inner, scored_forward)


_IMPOSSIBLE = "log-probabilities without logits are impossible with"


def _head(model: Any) -> Any:
    """Returns the lm_head of a causal model, or the head of one number of a classifier."""
    found = getattr(model, "score", None)
    return head_of(model) if found is None else unwrapped(found)


@as_causal
def scored_forward(self: Any, *args: Any, scoring: Scoring | None = None, **kwargs: Any) -> Any:
    """Runs the forward that scoring went around, or, with `scoring`, the decoder and the head."""
    if scoring is None:
        before = vars(self)[UNSCORED]
        return (
            type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)
        )
    given = {name: value for name, value in kwargs.items() if value is not None}  # PEFT's
    base = self.model(*args, **{"use_cache": False, **given, "return_dict": True})
    hidden = base.last_hidden_state.flatten(0, 1)  # (B S, D)
    chosen = hidden.index_select(0, scoring.predictors)
    return _head(self)(chosen, scoring=scoring, model=self)


def scoring_head_forward(
    self: Any, hidden: Tensor, *, scoring: Scoring | None = None, model: Any = None, **options: Any
) -> Any:
    """Runs a head's own forward, or hands it to `scoring`. As the head's own call, for engines that
    gather its weight around that."""
    if scoring is None:
        return head_forward(self, hidden, **options)
    return scoring.values(hidden, self, model)
