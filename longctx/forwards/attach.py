"""Puts our forwards in the place of Hugging Face's, on the instances of one model, and takes them
away again.

A module that was exchanged after `patch` gets ours at the next call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from longctx.errors import UserError
from longctx.families.families import base_of, head_of, known_family
from longctx.families.strangers import is_classifier, is_ours, replaceable
from longctx.families.vision import joint_of
from longctx.forwards.around import classifier_forward, joint_forward, whole_forward
from longctx.forwards.base import base_forward
from longctx.forwards.causal import REPLACED, causal_forward, fused_forward
from longctx.forwards.modules import head_forward, layer_forward, norm_forward
from longctx.forwards.said import known_runtime
from longctx.images.tower import tower_forward, tower_of


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
        return type(self), (self._module(), self.__func__)


def attach(model: Any) -> None:
    """Replaces Hugging Face's forwards by ours, also in modules that were exchanged since. A module
    with a forward of its own keeps it, and strangers.py names it."""
    runtime = known_runtime(base_of(model))
    runtime.attached(attach, None if model is base_of(model) else model)
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
    head, joint, asked = head_of(model), joint_of(model), known_runtime(base).args
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
    yield getattr(base, known_family(base).last_norm, None), norm_forward
    yield from ((layer, layer_forward) for layer in base.layers)


_IN_THEIR_ORDER = (whole_forward, joint_forward, classifier_forward)
"""The forwards that take arguments in the order of the class whose forward they stand in for."""
