"""The forwards of what is around a language model: vision-language models, and classifiers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers.utils import can_return_tuple

from longctx.calls.caller import Caller, classifier_reads_padding
from longctx.calls.hidden_states import asked as asked_states
from longctx.constants import TOKEN_TYPES
from longctx.errors import UserError
from longctx.families.families import base_of, embedding_multiplier
from longctx.families.vision import NotScheduled, SeenBothWays, named, of_images, sees_both_ways
from longctx.forwards.base import output_class
from longctx.forwards.causal import as_causal, causal_forward
from longctx.forwards.said import check_untraced, untraced
from longctx.images.shared_images import own_features
from longctx.runtime.runtime import runtime_of


@as_causal
def whole_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `causal_forward`, whose arguments Hugging Face's model takes in another order."""
    return causal_forward(self, **named(self, args), **kwargs)


@untraced
@can_return_tuple
def joint_forward(self: Any, *args: Any, caller: Caller | None = None, **kwargs: Any) -> Any:
    """Runs the language model directly if the call has text alone; else Hugging Face's forward,
    which puts features of images among embedded tokens and calls the language model with them."""
    inputs = {k: v for k, v in (named(self, args) | kwargs).items() if v is not None}
    runtime = runtime_of(base_of(self))
    if runtime is None:
        return type(self).forward(self, **inputs)
    images = of_images(inputs)
    if images is None and "past_key_values" not in inputs:
        check_untraced()
        # Gemma 3's whole model hands on labels, which nobody reads.
        text = {k: v for k, v in inputs.items() if k not in (*TOKEN_TYPES, "labels")}
        text |= {} if caller is None else caller.as_keyword(self.language_model)
        base: Any = base_of(self)
        factors = [embedding_multiplier(base, given=given) for given in (False, True)]
        if (runtime.around.moves_weights or factors[0] != factors[1]) and "input_ids" in text:
            # As with images: engines that gather weights have to see one order of calls, and some
            # language models multiply the tokens that they embed themselves.
            text["inputs_embeds"] = self.get_input_embeddings()(text.pop("input_ids"))
        own: Any = type(self)
        found = self.language_model(**text, return_dict=True)
        # Its class has what an image would have given, which is None. Some hand on what they get.
        kind: Any = output_class(own)
        names = {field.name for field in fields(kind)}
        return kind(**found) if names >= {field.name for field in fields(found)} else found
    why = None
    if sees_both_ways(self.config):
        if runtime.shards is not None:
            raise UserError("ranks cannot share rows with images that are seen both ways")
        why = images
        if _makes_no_cache(self, inputs):
            types = inputs.get(TOKEN_TYPES[0])
            masks = SeenBothWays(inputs.get("attention_mask"), types)
            try:
                with runtime.handing(caller):
                    return type(self).forward(self, **inputs | {"attention_mask": masks})
            except NotScheduled as found:  # it needs masks, so that the tower runs once more
                (why,) = found.args
    with runtime.handing(caller, why), own_features(self, inputs, runtime.shards):
        return type(self).forward(self, **inputs)


def _makes_no_cache(joint: Any, inputs: dict[str, Any]) -> bool:
    """Whether a call trains, or says itself that nobody generates from it."""
    trains = joint.training and torch.is_grad_enabled()
    return not inputs.get("use_cache", not trains) and "past_key_values" not in inputs


@untraced
def classifier_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of transformers' classifier, and tells the base model whether it reads
    padding."""
    inputs = named(self, args) | kwargs
    base = getattr(self, self.base_model_prefix)
    shows_states = asked_states(self.config.get_text_config(), inputs) is not None
    read = None if shows_states else classifier_reads_padding(self, inputs)
    caller = Caller(reads_padding=read)
    return type(self).forward(self, **inputs, **caller.as_keyword(base))
