"""`AutoModelForCausalLM`, patched."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx.model.patch import OPTIONS, patch


class AutoLongctxModelForCausalLM:
    """AutoModelForCausalLM.from_pretrained whose model is patched: it takes what that takes, and
    the options of `longctx.patch` by name, `strict` too."""

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> PreTrainedModel:
        options = {name: kwargs.pop(name) for name in ("strict", *OPTIONS) if name in kwargs}
        return patch(AutoModelForCausalLM.from_pretrained(name_or_path, *args, **kwargs), **options)
