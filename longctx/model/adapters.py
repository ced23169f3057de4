"""What the schedule reads of PEFT's LoRA layers, and what it leaves to Hugging Face's code.

PEFT makes, names, saves and merges adapters: `LoraConfig` puts a `LoraLayer` in the place of a
linear map, with the map itself inside it. The schedule computes with the tensors (projection.py):

    lora_A, lora_B     of the one adapter that is active; none while adapters are disabled or merged
    scaling            lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora
    lora_dropout       p, while its module trains

An adapter with more to it (DoRA and the other variants, a bias of its own, several at once) is
found on every forward, and Hugging Face's layers run.

Dropout draws from a number that torch's CPU generator gives once a forward: so it repeats itself
after `manual_seed` and when a run is resumed, and backward makes the same masks again by layer,
projection and tile. They are other masks than torch's dropout would draw, of the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.layer.lora import Lora
from longctx.layer.weights import Weights

ADAPTED = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit")
QUANTISED = ("bitsandbytes.nn.modules.Linear4bit",)
"""Whose forward the schedule can stand in for."""


class Applied(NamedTuple):
    """One projection's adapter, as a forward applies it."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)
    scale: float
    dropout: float


def with_adapters(
    weights: Weights, adapters: Mapping[str, Applied], layer: int, seed: Callable[[], int]
) -> tuple[Weights, dict[str, Lora]]:
    """A layer's parameters, and what its adapters have besides, by the names of projections. `seed`
    is of the pass, and asked for if masks are drawn."""
    tensors: dict[str, Tensor] = {}
    loras: dict[str, Lora] = {}
    for name, (a, b, scale, dropout) in adapters.items():
        tensors |= {f"{name}_a": a, f"{name}_b": b}
        own = hash((seed(), layer, *name.encode())) if dropout else 0
        loras[name] = Lora(scale=scale, dropout=dropout, seed=own)
    return weights._replace(**tensors), loras


def inside_peft(model: Any) -> Any:
    """transformers' model in a PeftModel; any other as it is."""
    is_peft = type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft else model


def unwrapped(module: Any) -> Any:
    """The copy that `modules_to_save` trains in the place of a module, where it runs."""
    if type(module).__qualname__ != "ModulesToSaveWrapper":
        return module
    adapter = next(iter(module.active_adapters), None)
    if module.disable_adapters or adapter not in module.modules_to_save:
        return module.original_module
    return module.modules_to_save[adapter]


def is_adapted(module: Any) -> bool:
    return "base_layer" in module._modules and "lora_A" in module._modules


def applied(modules: Mapping[str, Any]) -> dict[str, Applied]:
    """Of the linear maps that have an adapter, and apply it."""
    found = {}
    for name, module in modules.items():
        adapter = _active(module) if is_adapted(module) else None
        if adapter is not None:
            drop = module.lora_dropout[adapter]
            found[name] = Applied(
                a=module.lora_A[adapter].weight,
                b=module.lora_B[adapter].weight,
                scale=float(module.scaling[adapter]),
                dropout=drop.p if drop.training and isinstance(drop, nn.Dropout) else 0.0,
            )
    return found


def inner_linears(module: Any) -> Iterator[nn.Module]:
    """The linear maps that the schedule reads inside an adapted one."""
    yield module.base_layer
    for adapter in _actives(module):
        yield module.lora_A[adapter]
        yield module.lora_B[adapter]


def why_not_applied(module: Any, dtype: torch.dtype, where: str) -> Iterator[str]:
    """What the schedule would pass by of an adapted map, in a few words."""
    actives = _actives(module)
    if module.disable_adapters and module.merged:
        yield f"a disabled adapter that is merged in {where}, which PEFT unmerges"
    if len(actives) > 1:
        yield f"several adapters at once in {where}"
    for adapter in actives:
        variant = getattr(module, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(module, "use_dora", {}).get(adapter):
            yield f"a variant of LoRA ({type(variant).__name__}) in {where}"
        if module.lora_B[adapter].bias is not None:
            yield f"an adapter with a bias in {where}"
        if not isinstance(module.scaling[adapter], (int, float)):
            kind = type(module.scaling[adapter]).__name__
            yield f"an adapter whose scaling is a {kind} in {where}"
        drop = module.lora_dropout[adapter]
        if type(drop) not in (nn.Dropout, nn.Identity):
            yield f"an adapter with a dropout of its own in {where}"
        for factor in (module.lora_A[adapter].weight, module.lora_B[adapter].weight):
            if factor.dtype not in (torch.float32, dtype):
                yield f"an adapter in {factor.dtype} over weights in {dtype} in {where}"


def why_not_dense(module: Any, dtype: torch.dtype, where: str) -> Iterator[str]:
    """The same of a map that bitsandbytes has quantised, and of any other nothing."""
    if not {"quant_state", "compute_dtype"} <= vars(module).keys():
        return
    if getattr(module.weight, "quant_state", None) is None:
        yield f"a weight that is still to be quantised in {where}"
    if module.compute_dtype not in (None, dtype):
        yield f"products in {module.compute_dtype} over weights in {dtype} in {where}"


def _active(module: Any) -> str | None:
    return next(iter(_actives(module)), None)


def _actives(module: Any) -> list[str]:
    """The adapters that a forward adds."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]
