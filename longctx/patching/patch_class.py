"""Patches a class of transformers, for code that builds its models itself.

    undo = longctx.patch_class("llama", keep="auto")     and back: undo()

Trainers that take a name or a file of settings (axolotl, LLaMA-Factory, ms-swift, ...) build the
model inside, wrap it and prepare it before a caller can patch it. So each instance is patched at
the end of its own `__init__`: before from_pretrained reads weights into it, with or without
quantisation, and before adapters, autocast or an engine wrap it. From then on it is as after
`longctx.patch` (patch.py). The backend of attention is chosen in the first batch, when device and
dtype are known, and the line that says what runs is printed then.

Nothing else of the class changes, and existing models stay as they are.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedModel,
)

from longctx.errors import UserError, print_rank0
from longctx.families.families import FAMILIES, base_of, family_of_class, not_known
from longctx.families.strangers import is_classifier_class
from longctx.families.vision import PREFIXES, is_joint_class, is_whole_class
from longctx.patching.patch import check_parts, checked_options, patch_custom, said_of
from longctx.settings import PatchOptions

_PATCHED: dict[Any, PatchedClass] = {}
"""The classes that are patched now."""
_BUILDING: ContextVar[bool] = ContextVar("_BUILDING", default=False)
"""Whether an instance of a patched class is being built: its base model, which is built inside, is
not patched by itself."""


class PatchedClass:
    """Classes whose new instances are patched, until this object is called or its `with` block
    ends. Models that were built meanwhile stay patched; `longctx.unpatch` is for them."""

    def __init__(self, kinds: list[Any], args: PatchOptions, strict: bool) -> None:
        self._args, self._strict = args, strict
        self._before: dict[Any, Any] = {}
        self._ours: dict[Any, Any] = {}
        for kind in kinds:
            _PATCHED[kind] = self
            self._before[kind] = vars(kind).get("__init__")
            self._ours[kind] = self._around(kind.__init__)
            kind.__init__ = self._ours[kind]

    def _around(self, build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            inside, token = _BUILDING.get(), _BUILDING.set(True)
            try:
                build(model, *args, **kwargs)
            finally:
                _BUILDING.reset(token)
            if self._before and not inside:
                _patch_built(model, self._args, self._strict)

        return __init__

    def __call__(self) -> None:
        """Undoes the patch; a second call does nothing. If other code has replaced `__init__`
        since, its version stays, and ours inside it no longer patches."""
        for kind, before in self._before.items():
            del _PATCHED[kind]
            if vars(kind).get("__init__") is not self._ours[kind]:
                continue
            if before is None:
                del kind.__init__
            else:
                kind.__init__ = before
        self._before = {}

    def __enter__(self) -> PatchedClass:
        return self

    def __exit__(self, *error: object) -> None:
        self()


def patch_class(
    which: str | type[PreTrainedModel], *, strict: bool = False, **options: Any
) -> PatchedClass:
    """Patches every causal language model of a type that is built from now on, as `longctx.patch`
    patches an existing one, and returns an object that undoes it.

    `which` is a model type ("llama", "qwen3", ...) or a class of transformers (LlamaForCausalLM; a
    base model, with or without a tower for images, or a classifier, too). Call it before the
    trainer or the framework builds its model, in each process: by from_pretrained, quantised or
    not, from_config or the class itself.
    `options` are those of `longctx.patch`. Each model prints the line that says what runs in its
    first batch.

    Raises UserError for a class of no supported family, for one that is patched already, and for an
    unknown option or value.

    Example:
        >>> import longctx, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
        >>> heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> with longctx.patch_class("llama", keep="x"):
        ...     model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))  # as a framework does
        >>> ids = torch.randint(64, (1, 16))
        >>> model(input_ids=ids, labels=ids).loss.backward()
        longctx patched: 2 scheduled decoder layers, flash attention, RMSNorm, lm_head + ...
    """
    args, kind = checked_options("patch_class", options), _class_of(which)
    check_parts("patch_class: parts", args, kind.config_class())
    kinds = [kind, *_base_class(kind)]
    for each in kinds:
        if each in _PATCHED:
            raise UserError(
                f"{each.__name__} is patched already: undo that first, by calling what patch_class "
                "returned"
            )
    return PatchedClass(kinds, args, strict)


def _class_of(which: Any) -> Any:
    """Returns the class to patch. Raises UserError for anything but a class of a supported
    family."""
    if isinstance(which, str):
        return _class_of_type(which)
    if not (isinstance(which, type) and issubclass(which, PreTrainedModel)):
        raise UserError(
            f"patch_class takes a model type, as 'llama', or a class of transformers; got {which!r}"
        )
    kind: Any = which
    family = family_of_class(kind)
    names = {kind.__name__ for kind in which.__mro__}
    known = set()
    if family is not None:
        known = {family.known(end)[0].rpartition(".")[2] for end in ("Model", "ForCausalLM")}
    is_classifier = family is not None and is_classifier_class(kind)
    if names & known or is_classifier or is_whole_class(kind) or is_joint_class(kind):
        return kind
    raise UserError(not_known(kind.__name__))


def _class_of_type(model_type: str) -> Any:
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if model_type in PREFIXES:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    config = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None
    kind = None if config is None else mapping.get(config, None)
    if kind is None:
        near = difflib.get_close_matches(model_type, [*FAMILIES, *PREFIXES], n=1, cutoff=0.0)[0]
        raise UserError(
            f"transformers has no causal language model of type {model_type!r}; did you mean "
            f"{near}?"
        )
    return _class_of(kind)


def _base_class(kind: Any) -> list[Any]:
    """Returns the class of a causal model's base model, which may also be built alone."""
    family = family_of_class(kind)
    if family is None or is_whole_class(kind) or is_joint_class(kind):
        return []
    home, _, name = family.known("Model")[0].rpartition(".")
    base = getattr(importlib.import_module(home), name)
    return [] if issubclass(kind, base) else [base]


def _patch_built(model: Any, args: PatchOptions, strict: bool) -> None:
    """Patches a model that was just built. Its line is printed when the model is first called."""
    base: Any = base_of(model)
    if base is None:
        raise UserError(not_known(type(model).__name__))
    patch_custom(model, args, base.device)
    runtime = base.longctx
    runtime.surround(strict=strict)
    if not args.schedules:
        print_rank0(said_of(model))
        return
    built, inner = weakref.ref(model), weakref.ref(base)

    def first_pass() -> bool:
        called: Any = built() or inner()
        print_rank0(said_of(called))
        return True

    runtime.at_next_pass(first_pass)
