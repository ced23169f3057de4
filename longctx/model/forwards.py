"""What the modules of a patched model run instead of their own forward, on one instance.

    causal_forward   ForCausalLM     with labels the loss, in chunks, and logits if they are read
    whole_forward    the same of a vision-language model
    joint_forward    what is around its language model (vision.py)
    tower_forward    its vision tower, by groups of images (tower.py)
    base_forward     its base model  embedding, scheduled layers, final norm
    layer_forward    a decoder layer | with a schedule ours, else Hugging Face's; the hooks of
    norm_forward     the final norm  | engines that gather weights run around them
    classifier_forward  a classifier, of sequences or tokens
    head_forward     lm_head         with labels the loss

The schedule runs in the base model's forward, so whatever calls that in training gets it: the
causal model, with or without labels, a trainer that goes around it, a classifier. Generation and
calls that the schedule does not cover run Hugging Face's own code. torch.compile leaves our
forwards as they are, since their kernels are written by hand.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import ModelOutput, can_return_tuple

from longctx.attention.documents import Documents, Parents
from longctx.attention.images import with_images
from longctx.attention.padding import sorted_rows
from longctx.constants import IGNORE_INDEX, TOKEN_TYPES
from longctx.errors import UserError, print_rank0
from longctx.head.logits import lazy_logits
from longctx.head.loss import RowCount, linear_cross_entropy
from longctx.layer.balance import Balance, RouterLogits, with_said
from longctx.layer.norm_spec import NormSpec
from longctx.layer.parts.norms import final_norm
from longctx.layer.passes import Added, Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.memory.stream import bring_again
from longctx.model.adapters import with_adapters
from longctx.model.caller import Caller, classifier_reads_padding, labels_on_padding
from longctx.model.families import (
    base_of,
    embedding_multiplier,
    family_of,
    final_norm_spec,
    head_of,
    known_family,
    layer_adapters,
    layer_weights,
    layers_of,
    logits_cap,
    logits_scaling,
    query_scale,
    rotary_embeddings,
)
from longctx.model.family import Family
from longctx.model.graphs import graphed
from longctx.model.hidden_states import NAME as HIDDEN_STATES
from longctx.model.hidden_states import asked as asked_states
from longctx.model.hidden_states import is_served, last_alone
from longctx.model.look import look
from longctx.model.parents import PARENTS, check_labels, check_positions
from longctx.model.positions import Positions, four_rows, positions_of, with_masks
from longctx.model.read_padding import (
    COMPUTED,
    ComputedPadding,
    padding_of,
    refuse_gradient,
    with_means,
)
from longctx.model.routing import (
    EXPERT_IDS,
    auxiliary_factor,
    balance_loss,
    check_chosen,
    chosen_of,
    times_of,
)
from longctx.model.runtime import (
    Runtime,
    copied_keys,
    follows_positions,
    make_schedule,
    runtime_of,
)
from longctx.model.shared_images import own_features
from longctx.model.shared_prefixes import Sharing, spread
from longctx.model.shared_prefixes import found as found_prefixes
from longctx.model.stand_ins import dense_experts
from longctx.model.strangers import (
    asks_for_router_logits,
    changing_hooks,
    gathers_weights,
    has_known_loss,
    is_classifier,
    is_heard,
    is_ours,
    replaceable,
    why_not_chunked,
    why_not_scheduled,
)
from longctx.model.tower import tower_forward, tower_of
from longctx.model.vision import (
    NotScheduled,
    SeenBothWays,
    joint_of,
    named,
    of_images,
    sees_both_ways,
)

_NO_TRACE = (
    "the schedule cannot be traced or transformed: longctx.unpatch(model) first, for torch.export, "
    "torch.compile(fullgraph=True), torch.jit and torch.func"
)
_ZERO = (
    "padding is left out of all work with labels, and its hidden states are zero: means of logits "
    "over whole rows differ from Hugging Face's; losses do not"
)
_MEANS = (
    "padding is left out of all work: logits/chosen and logits/rejected of TRL's ORPO and CPO are "
    "means over real tokens, where Hugging Face's are over padding, too; losses do not differ"
)
REPLACED = "_longctx_replaced"
"""The attribute of a model that keeps the forward which `patch` found on it."""
untraced = torch.compiler.disable(reason=_NO_TRACE)
_BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""The arguments in which packing collators say where documents begin."""
_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
"""Qwen3-VL's arguments: which tokens are of images, and the features that its first layers add."""
Deepstack = tuple[Tensor, Sequence[Tensor]]  # (B, S) bool, (n, D) each
_OF_THE_LOSS = {"num_items_in_batch", "shift_labels", "ignore_index"}


class Forward:
    """A function in the place of a module's forward. It holds the module weakly, so that a deleted
    model is gone at once, and is saved and copied with it. Otherwise it behaves as a bound method,
    which accelerate takes apart to put its autocast between."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self.__func__ = function
        _, *parameters = inspect.signature(function).parameters.values()
        if function in _IN_THEIR_ORDER:  # with *args
            _, *theirs, rest = inspect.signature(type(module).forward).parameters.values()
            known = {"args", rest.name, *(parameter.name for parameter in theirs)}
            ours = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in known]
            parameters = [*theirs, *ours, rest]
        self.__signature__ = inspect.Signature(parameters)  # trainers look at it

    @property
    def __self__(self) -> nn.Module | None:
        return self._module()

    @property
    def __code__(self) -> Any:  # torch.export asks for the line where it begins
        return inspect.unwrap(self.__func__).__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._module(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Forward, (self._module(), self.__func__)


def attach(model: Any) -> None:
    """Replaces Hugging Face's forwards by ours, also in modules that were exchanged since. A module
    with a forward of its own keeps it, and strangers.py names it."""
    if model is not base_of(model):
        _runtime(base_of(model)).whole = weakref.ref(model)  # what plans for lm_head, too
    vars(base_of(model))["_replicate_for_data_parallel"] = _no_replicas
    for module, function in _places(model):
        if not isinstance(module, nn.Module) or "forward" in vars(module):
            continue
        if function is tower_forward or replaceable(module):
            module.forward = Forward(module, function)


def attach_around(model: Any) -> None:
    """Puts our forward around the fused lm_head of a TRL trainer that was built before."""
    vars(model)[REPLACED] = vars(model)["forward"]
    model.forward = Forward(model, fused_forward)


def detach(module: nn.Module) -> None:
    """Takes our forward from a module, and puts back what `attach_around` found there."""
    if is_ours(module):
        del module.forward
        if REPLACED in vars(module):
            module.forward = vars(module).pop(REPLACED)


def _no_replicas() -> None:
    """Raises UserError in torch's DataParallel, whose replicas run the forward of the module that
    they were copied from."""
    raise UserError(
        "a patched model cannot be copied by DataParallel: start a process per GPU (accelerate "
        "launch), or show one GPU (CUDA_VISIBLE_DEVICES=0)"
    )


def _places(model: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    base: Any = base_of(model)
    head, joint, asked = head_of(model), joint_of(model), _runtime(base).args
    if head is not None and asked.fuses_loss:
        yield model, whole_forward if joint is not None else causal_forward
        yield head, head_forward
    if not asked.schedules:  # parts.py has put single kernels into the layers
        return
    if head is None and is_classifier(model):
        yield model, classifier_forward
    if joint is not None:
        yield joint, joint_forward
        yield tower_of(model), tower_forward
    yield base, base_forward
    yield getattr(base, "norm", None), norm_forward
    yield from ((layer, layer_forward) for layer in base.layers)


# --- the causal model ------------------------------------------------------------------------


@untraced
@can_return_tuple
def causal_forward(
    self: Any,
    input_ids: Tensor | None = None,  # (B, S)
    attention_mask: Tensor | None = None,  # (B, S)
    position_ids: Tensor | None = None,  # (B, S), restarting at every packed document
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,  # (B, S, D)
    labels: Tensor | None = None,  # (B, S), not shifted; -100 is ignored
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,  # (B, S), already shifted; wins over labels, as in HF
    ignore_index: int = IGNORE_INDEX,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Runs Hugging Face's forward, except that with labels the loss is computed in chunks, and
    logits when they are read."""
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    given: dict[str, Any] = dict(num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
    given = {name: value for name, value in given.items() if value is not None}
    if ignore_index != IGNORE_INDEX:
        given["ignore_index"] = ignore_index
    given |= dict(labels=labels, logits_to_keep=logits_to_keep)
    runtime = runtime_of(self)
    if runtime is None:  # unpatched, while others hold on to this forward inside one of theirs
        return type(self).forward(self, **inputs, **given)
    _check_untraced()
    attach(self)
    if kwargs.get(PARENTS) is not None and not runtime.args.schedules:
        raise UserError("parents need the schedule, and this model has single parts")
    if labels is not None and shift_labels is None and kwargs.get(PARENTS) is not None:
        of_rows = runtime.shards.whole(labels) if runtime.shards else labels
        check_labels(of_rows, kwargs.get("cu_seq_lens_q"), kwargs[PARENTS], ignore_index)
    targets = shift_labels
    if labels is not None and targets is None:
        targets = _shifted(labels, runtime, ignore_index)
    if targets is not None and ignore_index != IGNORE_INDEX:
        targets = targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
    # Whoever reads hidden states beside the loss may read those of padding, and has a gradient.
    shows_states = asked_states(self.config.get_text_config(), kwargs) is not None
    trains_padding = targets is not None and labels_on_padding(targets, attention_mask)
    reads_padding = None if labels is None or shows_states else trains_padding
    wants_logits = not isinstance(logits_to_keep, int) or logits_to_keep != 0
    whole = None if labels is None or wants_logits else _why_all_logits(self, kwargs)
    if labels is None or wants_logits or whole:
        if whole:
            _decline(runtime, "all logits are computed", whole)
            if self.training and runtime.label_smoothing:
                raise UserError(f"--label_smoothing_factor is impossible with {whole}")
        caller = Caller(
            reads_padding=reads_padding,
            averages=labels is None and not wants_logits,
        )
        if labels is None or has_known_loss(self):  # another loss would get the keyword, too
            inputs |= caller.as_keyword(self.model)
        found: CausalLMOutputWithPast = type(self).forward(self, **inputs, **given)
        if caller.padded and not wants_logits:
            _say(runtime, _MEANS if caller.averages else _ZERO)
        return found
    if use_cache is None:
        inputs["use_cache"] = False  # with a cache Hugging Face does not look for documents
    assert targets is not None
    shards = runtime.shards
    caller = Caller(
        owns_gradient=not shows_states and not any(map(_is_held, {self.model, base_of(self)})),
        reads_padding=reads_padding,
        balances=asks_for_router_logits(self.config, kwargs),
    )
    if caller.balances:
        inputs["output_router_logits"] = False  # sums of them are enough (layer/balance.py)
    counted = RowCount(targets)
    inputs |= caller.as_keyword(self.model)
    base = self.model(**inputs, return_dict=True)  # a config may ask for tuples
    hidden = base.last_hidden_state
    parts = 1  # of the auxiliary loss: where the items of all ranks are counted, losses add up
    if shards is not None and num_items_in_batch is not None:
        parts = shards.ranks
    elif shards is not None:
        # The mean over the ranks is the loss, and so it is of their gradients.
        count = (targets != IGNORE_INDEX).sum().to(hidden.device)
        num_items_in_batch = shards.total(count).clamp(min=1) / shards.ranks
    head, scaling, cap = head_of(self), logits_scaling(self), logits_cap(self)
    left_out = None
    if attention_mask is not None and caller.padded:
        left_out = partial(_say_left_out, runtime, attention_mask)
    loss = head(
        hidden,
        labels=targets.to(hidden.device),
        counted=counted,
        num_items=num_items_in_batch,
        logits_scaling=scaling,
        softcap=cap,
        label_smoothing=runtime.label_smoothing if self.training else 0.0,
        logits_bytes=runtime.cut and runtime.cut.logits_bytes,
    )
    logits = partial(_logits, head, scaling, cap, left_out)
    said: dict[str, Any] = {}
    if caller.balances:
        said["aux_loss"] = balance_loss(self, caller, base, attention_mask)
        loss = loss + auxiliary_factor(self) / parts * said["aux_loss"].to(loss.device)
    own: Any = type(self)
    kind: Any = output_class(own, CausalLMOutputWithPast)
    # Hugging Face's model hands on what its base has found, as features of images.
    handed = {field.name: getattr(base, field.name, None) for field in fields(kind)}
    lazy = lazy_logits(hidden, logits, _vocab(head), loss)
    return cast(CausalLMOutputWithPast, kind(**handed | said | {"loss": loss, "logits": lazy}))


def as_causal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the signature of `causal_forward`, and leaves it the name by which it is
    pickled."""
    return functools.update_wrapper(function, causal_forward, assigned=(), updated=())


@as_causal
def fused_forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
    """Runs TRL's own head over our base model if TRL asks for it; else `causal_forward`."""
    if fused_lm_head:
        return vars(self)[REPLACED](*args, fused_lm_head=True, **kwargs)
    return causal_forward(self, *args, **kwargs)


def _logits(
    head: Any,
    scaling: float,
    cap: float | None,
    left_out: Callable[[Tensor], None] | None,  # told of logits that hold padding's
    hidden: Tensor,  # (B, S, D)
) -> Tensor:  # (B, S, V)
    logits: Tensor = head(hidden)
    logits = logits if scaling == 1.0 else logits / scaling
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    if left_out is not None:
        left_out(logits)
    return logits


def _say_left_out(runtime: Runtime, mask: Tensor, logits: Tensor) -> None:  # (B, S), (B, S, V)
    """Says once that logits of padding are no logits, and lets no loss have a gradient of them."""
    _say(runtime, _ZERO)
    refuse_gradient(logits, mask)


def _vocab(head: Any) -> int:
    weight = head._parameters.get("weight")
    return int(head.out_features) if weight is None else len(weight)


def _why_all_logits(model: Any, given: dict[str, Any]) -> str | None:
    reason = why_not_chunked(model, given)
    if reason is None and look(head_of(model), "weight").dtype == torch.float64:
        return _DOUBLE
    return reason


def _is_held(module: nn.Module) -> bool:
    """Whether hooks of others see what the module returns."""
    return any(changing_hooks(module))


def _shifted(labels: Tensor, runtime: Runtime, ignore_index: int) -> Tensor:  # (B, S)
    if runtime.shards is not None:
        return runtime.shards.shifted(labels, ignore_index)
    return nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


# --- around the language model of one that sees images ----------------------------------------


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
        _check_untraced()
        # Gemma 3's whole model hands on labels, which nobody reads.
        text = {k: v for k, v in inputs.items() if k not in (*TOKEN_TYPES, "labels")}
        text |= {} if caller is None else caller.as_keyword(self.language_model)
        if runtime.moves_weights and "input_ids" in text:
            # As with images: engines that gather weights have to see one order of calls.
            text["inputs_embeds"] = self.get_input_embeddings()(text.pop("input_ids"))
        own: Any = type(self)
        found = self.language_model(**text, return_dict=True)
        # Its class has what an image would have given, which is None. Some hand on what they get.
        kind: Any = output_class(own)
        names = {field.name for field in fields(kind)}
        return kind(**found) if names >= {field.name for field in fields(found)} else found
    why = None
    if sees_both_ways(self):
        if runtime.shards is not None:
            raise UserError("ranks cannot share rows with images that are seen both ways (Gemma 3)")
        why = images
        if _makes_no_cache(self, inputs):
            types = inputs.get(TOKEN_TYPES[0])
            masks = SeenBothWays(inputs.get("attention_mask"), types)
            try:
                with _with_images(runtime, caller):
                    return type(self).forward(self, **inputs | {"attention_mask": masks})
            except NotScheduled as found:  # it needs masks, so that the tower runs once more
                (why,) = found.args
    with _with_images(runtime, caller, why), own_features(self, inputs, runtime.shards):
        return type(self).forward(self, **inputs)


@contextmanager
def _with_images(
    runtime: Runtime, caller: Caller | None, reason: str | None = None
) -> Iterator[None]:
    """Tells the language model what Hugging Face's joint does not hand on: who calls, and why
    Hugging Face's layers are to run, if they are."""
    runtime.caller, runtime.images = caller, reason
    try:
        yield
    finally:
        runtime.caller = runtime.images = None


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


_IN_THEIR_ORDER = (whole_forward, joint_forward, classifier_forward)
"""The forwards that take arguments in the order of the class whose forward they stand in for."""


# --- the base model --------------------------------------------------------------------------


@untraced
@can_return_tuple
def base_forward(
    self: Any,
    input_ids: Tensor | None = None,  # (B, S)
    attention_mask: Tensor | None = None,  # (B, S)
    position_ids: Tensor | None = None,  # (B, S); of three rows also (3, B, S) or (4, B, S)
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,  # (B, S, D)
    use_cache: bool | None = None,
    caller: Caller | None = None,
    **kwargs: Any,
) -> ModelOutput:
    """Runs Hugging Face's forward, with the scheduled layers if they cover the call. Raises
    NotScheduled if they do not and it has `SeenBothWays` for a mask."""
    both_ways = attention_mask if isinstance(attention_mask, SeenBothWays) else None
    if both_ways is not None:
        attention_mask = both_ways.attention_mask
    inputs = dict(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    runtime = runtime_of(self)
    if runtime is None:
        return type(self).forward(self, **inputs)
    _check_untraced()
    attach(self)
    bounds, parents = kwargs.get("cu_seq_lens_q"), kwargs.get(PARENTS)
    trains = self.training and torch.is_grad_enabled()
    if use_cache is None and (trains or parents is not None):
        inputs["use_cache"] = False
    caller = caller or runtime.caller or Caller()
    # Of a model with graphs that is asked later, beside the work of the GPU (graphs.py).
    asked_later = trains and runtime.graphs is not None and len(runtime.graphs) > 0
    wanted = asked_states(self.config, kwargs)
    reason, positions, padding = _call_not_covered(self, inputs, trains), None, None
    if reason is None and not asked_later:
        reason = why_not_scheduled(self)
    if reason is None and attention_mask is not None and parents is None:
        read = caller.may_read_padding()
        padding, reason = padding_of(self, attention_mask, read=read)
    if reason is None:
        positions = positions_of(position_ids, known_family(self).position_rows)
        reason = _why_not_positions(positions, position_ids, parents, runtime)
    if both_ways is not None and padding is not None and reason is None:
        reason = "images beside padding that may be read"
    if parents is not None and reason:
        raise UserError(f"parents need the schedule, and this call has {reason}")
    if runtime.shards is not None:
        _check_shared(inputs, reason)
    if known_family(self).balances and asks_for_router_logits(self.config, inputs):
        caller.router_logits = ()
    expert_ids = inputs.pop(EXPERT_IDS, None)
    if expert_ids is not None:
        rows: Any = inputs_embeds if input_ids is None else input_ids
        check_chosen(self, expert_ids, tuple(rows.shape[:2]), reason)
    if positions is not None and reason is None:
        hidden = _scheduled_forward(
            *(self, input_ids, attention_mask, positions, inputs_embeds, bounds, parents),
            caller=caller,
            padding=padding,
            deepstack=_deepstack(self, inputs),
            types=None if both_ways is None else both_ways.token_type_ids,
            asked=not asked_later,
            expert_ids=expert_ids,
        )
        kind: Any = type(self)
        if isinstance(hidden, Tensor):
            said: dict[str, Any] = {}
            if caller.router_logits is not None:
                said["router_logits"] = caller.router_logits
            states = last_alone(wanted, hidden, len(self.layers))
            return output_class(kind)(last_hidden_state=hidden, hidden_states=states, **said)
        reason = hidden
    assert reason is not None
    if reason != _CACHE or torch.is_grad_enabled():
        _decline(runtime, _LAYERS, reason)
    if both_ways is not None:
        raise NotScheduled(reason)
    if caller.balances:
        inputs["output_router_logits"] = True
    if attention_mask is None and reason != _CACHE:
        inputs["position_ids"] = four_rows(self, _restarting(inputs, bounds))
        inputs = with_masks(self, inputs)
    return type(self).forward(self, **inputs)


def _why_not_positions(
    found: Positions | None, given: Tensor | None, parents: Parents, runtime: Runtime
) -> str | None:
    """Returns why the positions of a call keep it from the schedule, in a few words; else None."""
    if found is None:
        assert given is not None
        return f"positions of shape {tuple(given.shape)}"
    of_image = found.rope is not None and found.rope.dim() > 2
    if of_image and parents is not None and runtime.shards is not None:
        return "images in prompts of rows that ranks share"
    return None


def _deepstack(base: Any, inputs: dict[str, Any]) -> Deepstack | None:
    """Returns which tokens are of images, and what is added to them after each of the first
    layers."""
    seen, features = (inputs.get(name) for name in _DEEPSTACK)
    if seen is None or features is None or not is_heard(base, _DEEPSTACK[1]):
        return None
    return seen, features


def _restarting(inputs: dict[str, Any], bounds: Tensor | None) -> Any:
    """Returns a call's positions, made of its bounds if these alone say where documents begin:
    without flash attention Hugging Face's layers do not read them."""
    if bounds is None or inputs["position_ids"] is not None:
        return inputs["position_ids"]
    tokens = inputs["input_ids"]
    shape = (inputs["inputs_embeds"][..., 0] if tokens is None else tokens).shape
    found = Documents.from_bounds(bounds.tolist(), shape.numel(), bounds.device)
    return found.position_ids().view(shape)


@functools.cache
def output_class(
    kind: Any, default: type[ModelOutput] = BaseModelOutputWithPast
) -> type[ModelOutput]:
    """Returns the class that a model's own forward says it returns: what its caller reads, as
    `router_logits` or `image_hidden_states`, is an attribute of it."""
    said = inspect.signature(kind.forward).return_annotation
    for found in (said, *get_args(said)):  # some say that it may also be a tuple
        if isinstance(found, type) and issubclass(found, ModelOutput):
            return found
    return default


_CACHE = "a key/value cache"
_DOUBLE = "weights in float64"


def _check_shared(inputs: dict[str, Any], reason: str | None) -> None:
    """Raises UserError if Hugging Face's layers would take a rank's tokens for the whole row. With
    parents, bounds and parents are those of the whole rows, on every rank."""
    for name in ("attention_mask", *(_BOUNDS if inputs.get(PARENTS) is None else ())):
        if inputs.get(name) is not None:
            reason = reason or f"{name} (position_ids say where documents begin)"
    if reason:
        raise UserError(f"ranks that share rows need the schedule, and this call has {reason}")


def _call_not_covered(base: Any, inputs: dict[str, Any], trains: bool) -> str | None:
    """Returns why this call cannot run the scheduled layers, in a few words; None if it can, as far
    as the model is what it was."""
    config, mask, embeds = base.config, inputs["attention_mask"], inputs["inputs_embeds"]
    known = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"}
    known |= {*_BOUNDS, *_OF_THE_LOSS, PARENTS, *_DEEPSTACK}
    known |= {"output_router_logits"} if known_family(base).balances else set()
    given = {k: v for k, v in inputs.items() if k not in known and v is not None}
    if not given.pop("is_causal", True):
        return "attention to later tokens (is_causal=False)"
    unknown = {k for k, v in given.items() if v is not False and is_heard(base, k)}
    unknown -= {HIDDEN_STATES}
    if not is_served(config, asked_states(config, inputs), trains=trains):
        unknown |= {HIDDEN_STATES}
    uses_cache = inputs["use_cache"]
    if (config.use_cache if uses_cache is None else uses_cache) or "past_key_values" in unknown:
        return _CACHE
    if images := _runtime(base).images:
        return images
    if unknown:
        return ", ".join(sorted(unknown))
    if (inputs["input_ids"] is None) == (embeds is None):
        return "input_ids and inputs_embeds together, or neither"
    if not known_family(base).balances and asks_for_router_logits(config, inputs):
        return "output_router_logits"
    tokens = inputs["input_ids"] if embeds is None else embeds
    if mask is not None and getattr(mask, "shape", None) != tokens.shape[:2]:
        return "an attention mask of another shape than the batch"
    if base.dtype == torch.float64:
        return _DOUBLE
    whole = type(next(base.parameters())) is nn.Parameter  # FSDP's shards have another dtype
    if whole and embeds is not None and embeds.dtype != base.dtype:
        return f"inputs_embeds in {embeds.dtype} over weights in {base.dtype}"
    device = base.device.type
    if torch.is_autocast_enabled(device):
        if base.dtype not in (torch.float32, torch.get_autocast_dtype(device)):
            return f"weights in {base.dtype} in autocast to {torch.get_autocast_dtype(device)}"
    return None


def _scheduled_forward(
    base: Any,
    input_ids: Tensor | None,  # (B, S)
    attention_mask: Tensor | None,  # (B, S)
    positions: Positions,
    inputs_embeds: Tensor | None,  # (B, S, D)
    bounds: Tensor | None = None,  # (documents + 1,)
    parents: Parents = None,  # (documents,)
    *,
    caller: Caller,
    padding: ComputedPadding | None = None,
    deepstack: Deepstack | None = None,
    types: Tensor | None = None,  # (B, S): 1 where a token is of an image that is seen both ways
    asked: bool = True,
    expert_ids: Tensor | None = None,  # (L, B, S, k)
) -> Tensor | str:  # (B, S, D)
    """Runs embedding, scheduled layers, final norm. Padding is left out, and its output is zero, if
    it is not to be computed. Where nobody has asked yet whether the schedule covers the model,
    returns why it does not, in a few words."""
    runtime = _runtime(base)
    x = _embedded(base, runtime, input_ids, inputs_embeds)
    B, S, D = x.shape
    runtime.follow(x, _compute_dtype(x), base.config)
    runtime.begin_pass()
    if (multiplier := embedding_multiplier(base)) != 1.0:
        x = x * multiplier
    rope, documents, real = _positions(base, x, positions, attention_mask, bounds, parents, padding)
    caller.padded = real is not None and padding is None
    x, rope = x.reshape(B * S, D), rope.flatten(-2)  # (T,), or (3, T) with images
    where = torch.arange(B * S, device=x.device) if real is None else real
    sharing = None
    if types is not None:
        documents = with_images(documents, (types.flatten() == 1)[where])
    elif deepstack is None and rope.dim() == 1:
        sharing = _sharing(base, runtime, input_ids, where, rope, documents)
    if sharing is not None:
        documents, real = sharing.documents, where[sharing.kept]
    if real is not None:
        x, rope = x[real], rope[..., real]
    if sharing is not None and sharing.shift is not None:
        rope = rope + sharing.shift
    if torch.is_grad_enabled():
        tokens = B * S if sharing is None else len(x)
        runtime.reserve((runtime.whole and runtime.whole()) or base, tokens)
    with torch.autocast(x.device.type, enabled=False):  # the schedule casts by itself
        hidden, documents = None, copied_keys(base, runtime, documents)
        balance, computed = None, where if real is None else real
        chosen = chosen_of(base, expert_ids, computed)
        if caller.balances:
            mask = None if padding is None else attention_mask
            times = times_of(documents, sharing, mask, real)
            if documents.parents and runtime.shards is not None and times is not None:
                times = runtime.shards.own(times.view(B, -1)).flatten()
            router = known_family(base).routes(base.config)
            balance = Balance(router, times, runtime.shards)
        logits = RouterLogits() if caller.router_logits is not None else None
        if not (sharing or runtime.shards or deepstack or balance or logits or chosen):
            hidden = graphed(base, runtime, x, rope, documents)
        is_settled = hidden is not None and runtime.settled
        if not asked and not is_settled and (reason := why_not_scheduled(base)):
            return reason
        if hidden is None:
            # The loop stands here and not in a function, whose caller would hold the embedding's
            # output.
            schedule = make_schedule(
                *(base, runtime, rope, documents, B),
                balance=balance,
                router_logits=logits,
                expert_ids=chosen,
            )
            layers, added = layers_of(base), _added(deepstack, real)
            for above, (layer, family) in zip(reversed(range(len(layers))), layers, strict=True):
                # Module.__call__ runs the hooks of DeepSpeed and FSDP, and leaves out the
                # checkpointing that Hugging Face's layer class would put around the schedule.
                given = dict(schedule=schedule, layers_above=above, family=family)
                given["added"] = next(added, None)
                x = nn.Module.__call__(layer, x, **given)
            if balance is not None:
                x, (caller.balance,) = with_said(x, balance)
            elif logits is not None:
                x, said = with_said(x, logits)
                caller.router_logits = tuple(
                    _spread(one, sharing, where, real, B * S) for one in said
                )
            owned = caller.owns_gradient or sharing is not None
            hidden = base.norm(x, spec=final_norm_spec(base), owned=owned)
    x = hidden
    x = _spread(x, sharing, where, real, B * S).view(B, S, D)
    if attention_mask is not None and caller.padded and caller.averages:
        x = with_means(x, attention_mask)
    return x


def _added(deepstack: Deepstack | None, real: Tensor | None) -> Iterator[Added]:
    """Yields what each of the first layers adds, by the tokens that are computed, `real` (T,)."""
    if deepstack is None:
        return
    seen, every = deepstack
    where = seen.flatten().nonzero()[:, 0]
    there: Any = slice(None)
    if real is not None:
        places = where.new_full((seen.numel(),), -1)
        places[real] = torch.arange(len(real), device=real.device)
        where = places[where]
        there = where >= 0  # an image's token may be padding
    for features in every:
        yield Added(where[there], features[there])


def _positions(
    base: Any,
    x: Tensor,  # (B, S, D)
    positions: Positions,
    attention_mask: Tensor | None,  # (B, S)
    bounds: Tensor | None,  # (documents + 1,)
    parents: Parents,  # (documents,)
    padding: ComputedPadding | None,
) -> tuple[Tensor, Documents, Tensor | None]:  # (B, S), documents, (T,)
    """Returns the position of each token for RoPE, the documents, and which tokens are computed;
    None for all. Tells the rotary embedding of the longest position if it follows them."""
    runtime = _runtime(base)
    B, S, _ = x.shape
    shards = runtime.shards
    own = torch.arange(S * (shards.ranks if shards else 1), device=x.device)[None]
    own = shards.own(own) if shards else own
    rope, of_documents = (
        own.expand(B, S) if p is None else p.expand(*p.shape[:-2], B, S) for p in positions
    )
    whole = shards.whole(of_documents) if shards else of_documents  # NCCL takes its memory first
    if padding is None:
        documents, real = Documents.of_batch(whole, attention_mask, bounds, parents)
    else:
        _say(runtime, COMPUTED)
        documents, real = sorted_rows(padding.rows, x.device, blind=padding.blind)
    if documents.parents and positions.rope is None:
        rope = documents.position_ids().view(whole.shape)
        rope = shards.own(rope) if shards else rope
    elif documents.parents:
        check_positions(shards.whole(rope) if shards else rope, documents)
    if follows_positions(base):
        _follow_positions(base, x, shards.whole(rope) if shards else rope)
    return rope, documents, real


def _follow_positions(base: Any, x: Tensor, rope: Tensor) -> None:  # (B, S, D), (B, S)
    """Calls the rotary embedding for its side effect, with the longest position: of padding, too,
    as Hugging Face does."""
    longest = rope.max().view(1, 1)
    if known_family(base).position_rows > 1:
        longest = longest.expand(3, 1, 1)
    for name in rotary_embeddings(base):
        of_type = () if name == "all" else (name,)
        base.rotary_emb(x[:1, :1], longest, *of_type)


def _sharing(
    base: Any,
    runtime: Runtime,
    input_ids: Tensor | None,  # (B, S)
    where: Tensor,  # (T,): the tokens that are computed
    rope: Tensor,  # (B S,)
    documents: Documents,
) -> Sharing | None:
    """Returns how prompts that documents share are computed once; None if they are not. Says once
    what is saved, or why nothing is."""
    if not runtime.args.share_prefixes or documents.parents:
        return None
    reason = _why_not_shared(base, runtime, input_ids)
    if reason := "padding is computed" if documents.padding else reason:
        _say(runtime, f"prompts are not shared: {reason}")
        return None
    assert input_ids is not None
    absolute = follows_positions(base) or query_scale(base, rope[:1]) is not None
    found = found_prefixes(input_ids.flatten()[where], rope[where], documents, absolute=absolute)
    if found is not None and _SHARED not in runtime.warned:
        runtime.warned.add(_SHARED)
        rows, tokens = sum(len(starts) for _, starts in found.prompts), len(found.source)
        print_rank0(
            f"custom: {_SHARED}: {tokens} tokens of the first such batch, in which {rows} "
            f"documents share {len(found.prompts)}, are {len(found.kept)} ({found.saved:.0%} less)"
        )
    return found


_SHARED = "a prompt that documents of a batch share is computed once"


def _why_not_shared(base: Any, runtime: Runtime, input_ids: Tensor | None) -> str | None:
    if input_ids is None:
        return "the call has inputs_embeds, which are not compared"
    if runtime.shards is not None:
        return "ranks share rows"
    adapters = (x for layer in layers_of(base) for x in layer_adapters(*layer, look).values())
    if base.training and any(adapter.dropout for adapter in adapters):
        return "dropout of adapters draws another mask for each row"
    return None


def _spread(
    x: Tensor,  # (T, D)
    sharing: Sharing | None,
    where: Tensor,  # (T,), or with sharing more
    real: Tensor | None,  # (T,)
    tokens: int,
) -> Tensor:  # (tokens, D)
    """Puts every row at its token's place. Documents that share a prompt get its rows, and padding
    that was left out is zero."""
    if sharing is not None:
        return spread(x, sharing, where, tokens)
    return x if real is None else x.new_zeros(tokens, x.shape[-1]).index_copy(0, real, x)


def _embedded(
    base: Any,
    runtime: Runtime,
    input_ids: Tensor | None,  # (B, S)
    inputs_embeds: Tensor | None,  # (B, S, D)
) -> Tensor:  # (B, S, D)
    """Returns the embedding's output, or what the call has in its place. transformers asks for the
    gradient of a frozen embedding's output, for the sake of checkpoints. Nobody reads it, and its
    graph would hold the output until backward ends, so it is cut off, unless an engine needs it."""
    x: Tensor = base.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    if runtime.needs_input_gradient and torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_()
    if inputs_embeds is not None:
        return x
    models = (base, runtime.whole and runtime.whole())
    asked = any(getattr(model, "_require_grads_hook", None) is not None for model in models)
    return x.detach() if asked and x.is_leaf else x


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matmuls: autocast's over fp32 weights, else x's."""
    kind = x.device.type
    wide = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if wide else x.dtype


# --- their parts -----------------------------------------------------------------------------


@untraced
def layer_forward(
    self: Any,
    hidden_states: Tensor,  # (T, D) with a schedule
    *args: Any,
    schedule: Schedule | None = None,
    layers_above: int = 0,
    family: Family | None = None,
    added: Added | None = None,
    **kwargs: Any,
) -> Tensor:
    if schedule is None or family is None:
        known = family_of(self)
        with dense_experts(self) if known and known.router else nullcontext():
            return type(self).forward(self, hidden_states, *args, **kwargs)
    weights, adapters = layer_weights(self, family), layer_adapters(self, family)
    given = with_adapters(weights, adapters, layers_above, lambda: schedule.seed)
    bring = partial(_bring, self)
    return scheduled_layer(hidden_states, schedule, layers_above, *given, bring, added)


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


def _runtime(model: Any) -> Runtime:
    runtime = runtime_of(model)
    assert runtime is not None
    return runtime


def _decline(runtime: Runtime, what: str, reason: str) -> None:
    """Reports once what Hugging Face's code does instead of ours; in training `strict` forbids
    it."""
    line = _instead(what, reason)
    if runtime.strict and torch.is_grad_enabled():
        raise UserError(f"{line} (strict=True)")
    _say(runtime, line)


def foretell(model: Any, is_dropout: Callable[[str], bool] = lambda reason: False) -> None:
    """Says of a patched model that Hugging Face's layers will run in training, if they will: at its
    first call nothing more is said. `is_dropout` tells whether --dropout 0 would help."""
    base = base_of(model)
    if base is not None and (reason := why_not_scheduled(base, training=True)):
        ours = "; with --dropout 0 ours do" if is_dropout(reason) else ""
        _say(_runtime(base), _instead(_LAYERS, reason), ours)


_LAYERS = "Hugging Face's layers run"


def _instead(what: str, reason: str) -> str:
    return f"{what} for calls with {reason}"


def _say(runtime: Runtime, line: str, more: str = "") -> None:
    """Prints a line once, the first time with what `more` is known."""
    if line not in runtime.warned:
        runtime.warned.add(line)
        print_rank0(f"custom: {line}{more}")


def _check_untraced() -> None:
    """Raises UserError if the call is exported, traced or transformed. torch.compile leaves our
    forwards out, and prints _NO_TRACE where it may not."""
    if (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        raise UserError(_NO_TRACE)
