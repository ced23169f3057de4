"""The forwards of a decoder layer, the final norm and lm_head.

The schedule calls them through `Module.__call__`, so that the hooks of engines that gather weights
run around them. Called by others they are Hugging Face's.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from longctx.errors import UserError
from longctx.families.adapters import with_adapters
from longctx.families.families import family_of, layer_adapters, layer_weights
from longctx.families.family import Layer
from longctx.families.stand_ins import dense_experts
from longctx.families.strangers import gathers_weights
from longctx.forwards.said import untraced
from longctx.head.loss import linear_cross_entropy
from longctx.layer.norm_spec import NormSpec
from longctx.layer.parts.norms import final_norm
from longctx.layer.passes import Added, Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.memory.stream import bring_again
from longctx.mixers.mixers import mixer_of


@untraced
def layer_forward(
    self: Any,
    hidden_states: Tensor,  # (T, D) with a schedule
    *args: Any,
    schedule: Schedule | None = None,
    layers_above: int = 0,
    spec: Layer | None = None,
    added: Added | None = None,
    **kwargs: Any,
) -> Tensor:
    if schedule is None or spec is None:
        with dense_experts(self) if family_of(self) else nullcontext():
            return type(self).forward(self, hidden_states, *args, **kwargs)
    weights, adapters = layer_weights(self, spec), layer_adapters(self, spec)
    given = with_adapters(weights, adapters, layers_above, lambda: schedule.seed)
    bring = partial(_bring, self)
    mixes = mixer_of(self, spec)
    return scheduled_layer(hidden_states, schedule, layers_above, *given, bring, added, mixes)


def _bring(layer: Any, above: int) -> None:
    """Brings the weights of a layer that is to run forward again in backward. Raises UserError if
    an engine gathers them in hooks, which run around a call only."""
    if gathers_weights(layer):
        raise UserError(
            "an engine gathers each layer's weights for a call, so that no layer can run forward "
            "again in backward: set --keep x"
        )
    bring_again(layer, above)


def norm_forward(self: Any, x: Tensor, spec: NormSpec | None = None, owned: bool = False) -> Tensor:
    """Runs our norm if the schedule calls it, with how it computes; `owned` says that nobody else
    holds the output's gradient."""
    if spec is None:
        return type(self).forward(self, x)
    return final_norm(x, self.weight, getattr(self, "bias", None), spec, owned)


def head_forward(
    self: Any,
    hidden: Tensor,  # (B, S, D)
    labels: Tensor | None = None,  # (B, S), already shifted
    **options: Any,
) -> Tensor:  # the logits, or with labels the loss
    if labels is None:
        return type(self).forward(self, hidden)
    return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, **options)
