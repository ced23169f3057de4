"""The arguments of a model with experts that concern its routers, and its auxiliary loss.

output_router_logits    the auxiliary loss that balances experts (layer/balance.py), as
                        transformers' causal models take it and add it to their loss
expert_ids              (L, B, S, k): the experts of each token in each of the L layers with
                        experts, instead of the routers' choice, so that reinforcement learning
                        replays a sampler's choice; the weights are still the routers'
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from longctx.attention.documents import Documents
from longctx.calls.caller import Caller
from longctx.calls.shared_prefixes import Sharing
from longctx.errors import UserError
from longctx.families.families import experts_of, known_family, layer_specs
from longctx.layer.router import IDS
from longctx.layer.specs.experts_spec import ExpertsSpec

EXPERT_IDS = "expert_ids"


def check_chosen(base: Any, ids: Any, rows: tuple[int, ...], reason: str | None) -> None:
    """Raises UserError for experts that cannot be those of a batch of these rows (B, S), and where
    Hugging Face's layers would run, which choose their own."""
    routers = [spec.router for x in layer_specs(base.config) if (spec := x.part(ExpertsSpec))]
    if not routers:
        raise UserError(f"{EXPERT_IDS} are for models with experts, and this one has none")
    if reason:
        raise UserError(f"{EXPERT_IDS} need the schedule, and this call has {reason}")
    wanted = (len(routers), *rows, routers[0].chosen)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or tuple(ids.shape) != wanted:
        found = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(
            f"{EXPERT_IDS} must be integers of shape {wanted}, for each layer with experts, row, "
            f"token and choice: got {found}"
        )
    least, most = ids.aminmax()
    if int(least) < 0 or int(most) >= routers[0].experts:
        raise UserError(
            f"{EXPERT_IDS} must be from 0 to {routers[0].experts - 1}: got {least} to {most}"
        )


def chosen_of(
    base: Any,
    ids: Tensor | None,  # (L, B, S, k)
    where: Tensor,  # (T,): the tokens that are computed, of B S
) -> tuple[Tensor | None, ...]:  # (T, k) each
    """Returns the experts of each layer that a caller chose, None for layers without experts; empty
    if the routers choose."""
    if ids is None:
        return ()
    every = iter(ids.to(where.device, IDS).flatten(1, 2)[:, where])
    return tuple(next(every) if x.part(ExpertsSpec) else None for x in layer_specs(base.config))


def times_of(
    documents: Documents,
    sharing: Sharing | None,
    mask: Tensor | None,  # (B, S), where padding is computed
    real: Tensor | None,  # (T,)
) -> Tensor | None:  # (T,) fp32
    """Returns how often each computed token counts in means over all tokens: a token of a prompt
    once for each answer, and padding not at all. None: all tokens count once."""
    if sharing is not None:
        once = torch.ones_like(sharing.source, dtype=torch.float32)
        return once.new_zeros(len(sharing.kept)).index_add_(0, sharing.source, once)
    if documents.parents:
        return documents.times()
    return None if mask is None or real is None else mask.flatten()[real].float()


def auxiliary_factor(model: Any) -> float:
    """Returns the factor of the auxiliary loss in a model's loss, which vision-language models have
    in their text configuration."""
    own: float | None = getattr(model, "router_aux_loss_coef", None)
    found: float = model.config.get_text_config().router_aux_loss_coef if own is None else own
    return found


def balance_loss(model: Any, caller: Caller, found: Any, mask: Tensor | None) -> Tensor:  # ()
    """Returns the auxiliary loss of a call: the schedule's, or transformers' own loss of the logits
    that Hugging Face's layers have returned."""
    if caller.balance is not None:
        return caller.balance
    family = known_family(model)
    theirs = vars(sys.modules[family.home])["load_balancing_loss_func"]
    experts = experts_of(model.config.get_text_config())
    assert experts is not None
    loss: Tensor = theirs(found.router_logits, experts.experts, experts.chosen, mask)
    return loss
