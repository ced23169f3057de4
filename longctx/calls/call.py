"""One call of a patched model: its arguments, read once.

    causal_forward     reads the labels, and hands the others on to the base model
    base_forward       decides whether the schedule covers the call (forwards/covered.py)
    scheduled_forward  computes the tokens (forwards/computed_tokens.py)

A causal model and its base model each make a `Call` of what reached them, since wrappers of
engines and trainers may change tensors on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longctx.attention.documents import Parents
from longctx.calls.caller import Caller
from longctx.calls.hidden_states import asked
from longctx.calls.labels import Labels
from longctx.calls.parents import PARENTS
from longctx.calls.routing import EXPERT_IDS
from longctx.families.strangers import is_heard
from longctx.families.vision import SeenBothWays

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""The arguments in which packing collators say where documents begin; the first is read."""
DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
"""Qwen3-VL's arguments: which tokens are of images, and the features that its first layers add."""
Deepstack = tuple[Tensor, Sequence[Tensor]]  # (B, S) bool, (n, D) each


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of one call of a causal model, or of its base model."""

    input_ids: Tensor | None  # (B, S)
    attention_mask: Tensor | None  # (B, S); of another shape, or a mapping: not for the schedule
    position_ids: Tensor | None  # (B, S); of three rows also (3, B, S) or (4, B, S)
    past_key_values: Any
    inputs_embeds: Tensor | None  # (B, S, D)
    use_cache: bool | None
    others: Mapping[str, Any]
    """All other keywords of the call, as they were given."""
    labels: Labels = field(default_factory=Labels)
    """The labels by which a causal model computes its loss; a base model has none."""
    caller: Caller = field(default_factory=Caller)
    """Records what the base model's caller reads of the output, and takes what it is told."""
    trains: bool
    """Whether the model is in training, and the call records a gradient."""
    states: Any
    """The hidden states that the call asks for (hidden_states.py); None for none."""
    seen_both_ways: SeenBothWays | None
    """Stands for the masks of a call with images whose tokens attend to each other (vision.py)."""

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: Tensor | None,  # (B, S)
        attention_mask: Any,  # (B, S)
        position_ids: Tensor | None,  # (B, S), (3, B, S) or (4, B, S)
        past_key_values: Any,
        inputs_embeds: Tensor | None,  # (B, S, D)
        use_cache: bool | None,
        *,
        others: Mapping[str, Any],
        **more: Any,
    ) -> Call:
        """Reads the arguments of a call of `model`, in Hugging Face's order; `more` are `labels`
        and `caller`."""
        both_ways = attention_mask if isinstance(attention_mask, SeenBothWays) else None
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask if both_ways is None else both_ways.attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            others=others,
            trains=model.training and torch.is_grad_enabled(),
            states=asked(model.config.get_text_config(), others),
            seen_both_ways=both_ways,
            **more,
        )

    @property
    def bounds(self) -> Tensor | None:  # (documents + 1,)
        """The boundaries of documents in the flattened batch; None if the call gives none."""
        return self.others.get(BOUNDS[0])

    @property
    def parents(self) -> Parents:  # (documents,)
        """The document that each document continues (parents.py); None where none does."""
        return self.others.get(PARENTS)

    @property
    def expert_ids(self) -> Any:  # (L, B, S, k)
        """The experts that the caller chose (routing.py); None: the routers choose."""
        return self.others.get(EXPERT_IDS)

    @property
    def image_types(self) -> Tensor | None:  # (B, S)
        """1 where a token is of an image that is seen both ways; None for a call without them."""
        return None if self.seen_both_ways is None else self.seen_both_ways.token_type_ids

    @property
    def rows(self) -> Tensor:  # (B, S) or (B, S, D)
        """The tokens, or their embeddings where the call has no tokens."""
        found = self.inputs_embeds if self.input_ids is None else self.input_ids
        assert found is not None
        return found

    def deepstack(self, base: Any) -> Deepstack | None:
        """Returns which tokens are of images, and what is added to them after each of the first
        layers; None for a base model that adds nothing."""
        tokens, features = (self.others.get(name) for name in DEEPSTACK)
        if tokens is None or features is None or not is_heard(base, DEEPSTACK[1]):
            return None
        return tokens, features

    def arguments(self) -> dict[str, Any]:
        """Returns what the call gives a base model, by Hugging Face's names."""
        return dict(
            input_ids=self.input_ids,
            attention_mask=self.attention_mask,
            position_ids=self.position_ids,
            past_key_values=self.past_key_values,
            inputs_embeds=self.inputs_embeds,
            use_cache=self.use_cache,
            **self.others,
        )

    def without_cache(self) -> Call:
        """Returns the call without a key/value cache, unless it asks for one itself."""
        return self if self.use_cache is not None else replace(self, use_cache=False)
