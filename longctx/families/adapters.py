"""Reads PEFT's LoRA layers for the schedule, and finds those that Hugging Face's code must run.

PEFT makes, names, saves and merges adapters: `LoraConfig` replaces a linear layer by a `LoraLayer`
that holds the linear layer. The schedule computes with the tensors (projection.py):

    lora_A, lora_B     the active adapter's; none while adapters are disabled or merged
    lora_magnitude_vector    of DoRA: the lengths of the rows of W + s B A
    scaling            lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora
    lora_dropout       p, in training mode

If an adapter has other features (variants of LoRA besides DoRA, a bias of its own, several adapters
at once), Hugging Face's layers run. This is checked on every forward.

Dropout is seeded by one number per forward from torch's CPU generator. Masks therefore repeat after
`manual_seed` and when a run is resumed, and backward draws the same masks by layer, projection and
tile. The masks differ from those of torch's dropout, but have the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.families.look import Read, look, whole_shape
from longctx.layer.adapters.dora import Dora
from longctx.layer.adapters.lora import Lora
from longctx.layer.adapters.protocol import Settings

ADAPTED = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit")
QUANTISED = ("bitsandbytes.nn.modules.Linear4bit", "longctx.layer.packed_linear.PackedLinear")
"""The quantised linear layers whose forward the schedule can replace."""
_LINEAR = ("torch.nn.modules.linear.Linear",)
WRAPPED = ("peft.tuners.lora.layer.ParamWrapper",)
"""Around a module, adapts one parameter of it; each of several has a wrapper around the others."""


class Kind(NamedTuple):
    """A kind of adapter that the schedule computes, as PEFT has it."""

    settings: type[Lora]
    variant: str | None = None
    """PEFT's class of it."""
    more: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Maps each parameter besides A and B to PEFT's dict of its modules, and their class."""
    over_trained: bool = True
    """Whether the weight beneath may be trained, too."""


KINDS = (
    Kind(Lora),
    Kind(
        Dora,
        variant="peft.tuners.lora.variants.DoraLinearVariant",
        more={"magnitude": ("lora_magnitude_vector", "peft.tuners.lora.dora.DoraLinearLayer")},
        over_trained=False,
    ),
)


class Applied(NamedTuple):
    """One projection's adapter, as a forward applies it."""

    a: Tensor  # (r, I)
    b: Tensor  # (O, r)
    scale: float
    dropout: float
    share: float = 1.0
    """The share of the layer's tokens that it is applied to."""
    experts: int = 1
    """The adapters in its parameters, one for each expert."""
    kind: Kind = KINDS[0]
    more: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Its tensors, by the names of its settings."""
        return {"a": self.a, "b": self.b, **self.more}

    @property
    def rank(self) -> int:
        return whole_shape(self.a)[0] // self.experts

    @property
    def inputs(self) -> int:
        return whole_shape(self.a)[1]

    @property
    def outputs(self) -> int:
        return whole_shape(self.b)[0]

    @property
    def rescaled(self) -> int:
        return self.inputs * self.outputs if self.kind.settings is Dora else 0


def with_adapters(
    weights: dict[str, Tensor], adapters: Mapping[str, Applied], layer: int, seed: Callable[[], int]
) -> tuple[dict[str, Tensor], dict[str, Settings]]:
    """Returns a layer's parameters with its adapters' tensors, and the adapters' settings by
    projection name. `seed` gives the pass's seed, and is called only if masks are drawn."""
    parameters = dict(weights)
    settings: dict[str, Settings] = {}
    for name, x in adapters.items():
        for own, tensor in x.parameters.items():
            parameters[f"{name}.{own}"] = tensor
        seeded = hash((seed(), layer, *name.encode())) if x.dropout else 0
        settings[name] = x.kind.settings(scale=x.scale, dropout=x.dropout, seed=seeded)
    return parameters, settings


def inside_peft(model: Any) -> Any:
    """Returns transformers' model inside a PeftModel, and any other model itself. FSDP2 makes a
    subclass of its own for the module that it shards."""
    is_peft = any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
    return model.get_base_model() if is_peft and hasattr(model, "get_base_model") else model


def unwrapped(module: Any) -> Any:
    """Returns the module that runs: the copy trained by `modules_to_save` if it is active."""
    if type(module).__qualname__ != "ModulesToSaveWrapper":
        return module
    adapter = next(iter(module.active_adapters), None)
    if module.disable_adapters or adapter not in module.modules_to_save:
        return module.original_module
    return module.modules_to_save[adapter]


def is_adapted(module: Any) -> bool:
    return "base_layer" in module._modules and "lora_A" in module._modules


def applied(modules: Mapping[str, Any], read: Read = getattr) -> dict[str, Applied]:
    """Returns the adapters that these linear layers apply, by the same names."""
    found = {}
    for name, module in modules.items():
        adapter = _active(module) if is_adapted(module) else None
        if adapter is not None:
            drop = module.lora_dropout[adapter]
            kind, more = _kind(module, adapter)
            found[name] = Applied(
                a=read(module.lora_A[adapter], "weight"),
                b=read(module.lora_B[adapter], "weight"),
                scale=float(module.scaling[adapter]),
                dropout=drop.p if drop.training and isinstance(drop, nn.Dropout) else 0.0,
                kind=kind,
                more={name: read(inner, "weight") for name, inner in more.items()} if more else {},
            )
    return found


def wrappers(module: Any) -> dict[str, Any]:
    """Returns PEFT's wrappers around a module, by the names of the parameters that they adapt."""
    found = {}
    while is_wrapped(module):
        found[module.parameter_name] = module
        module = module.base_layer
    return found


def is_wrapped(module: Any) -> bool:
    return module is not None and is_adapted(module) and "parameter_name" in vars(module)


def within(module: Any) -> Any:
    """Returns the module inside PEFT's wrappers of its parameters, and any other module itself."""
    while is_wrapped(module):
        module = module.base_layer
    return module


def expert_adapters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields A and B of all adapters of experts inside a module."""
    found: list[Any] = [inner for inner in module.modules() if is_wrapped(inner)]
    for wrapper in found:
        yield from wrapper.lora_A.parameters()
        yield from wrapper.lora_B.parameters()


def adapts_experts(model: nn.Module) -> bool:
    """Whether adapters of experts are among a model's, which PEFT calls `target_parameters`."""
    return next(expert_adapters(model), None) is not None


def inner_modules(module: Any) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yields what the schedule reads inside an adapted linear layer, with the classes whose forward
    it may have."""
    if not is_wrapped(module):
        yield module.base_layer, _LINEAR + QUANTISED
    for adapter in _actives(module):
        yield module.lora_A[adapter], _LINEAR + QUANTISED
        yield module.lora_B[adapter], _LINEAR + QUANTISED
        kind, more = _kind(module, adapter)
        for name, inner in more.items():
            yield inner, (kind.more[name][1],)


def why_not_applied(module: Any, dtype: torch.dtype, where: str) -> Iterator[str]:
    """Yields, in a few words, each feature of an adapted linear layer that the schedule lacks."""
    actives = _actives(module)
    if module.disable_adapters and module.merged:
        yield f"a disabled adapter that is merged in {where}, which PEFT unmerges"
    if len(actives) > 1:
        yield f"several adapters at once in {where}"
    for adapter in actives:
        variant = getattr(module, "lora_variant", {}).get(adapter)
        kind, more = _kind(module, adapter)
        known = f"{type(variant).__module__}.{type(variant).__qualname__}"
        if (known if variant is not None else None) != kind.variant:
            yield f"a variant of LoRA ({type(variant).__name__}) in {where}"
        if not kind.over_trained and look(module.base_layer, "weight").requires_grad:
            yield f"{kind.settings.__name__} over a weight that is trained in {where}"
        if look(module.lora_B[adapter], "bias") is not None:
            yield f"an adapter with a bias in {where}"
        if not isinstance(module.scaling[adapter], (int, float)):
            found = type(module.scaling[adapter]).__name__
            yield f"an adapter whose scaling is a {found} in {where}"
        drop = module.lora_dropout[adapter]
        if type(drop) not in (nn.Dropout, nn.Identity):
            yield f"an adapter with a dropout of its own in {where}"
        parts = (module.lora_A[adapter], module.lora_B[adapter], *more.values())
        for factor in (look(part, "weight") for part in parts):
            if factor.dtype not in (torch.float32, dtype):
                yield f"an adapter in {factor.dtype} over weights in {dtype} in {where}"


def why_not_dense(module: Any, dtype: torch.dtype, where: str) -> Iterator[str]:
    """Yields why the schedule cannot use a linear layer quantised by bitsandbytes; nothing for any
    other layer."""
    if not {"quant_state", "compute_dtype"} <= vars(module).keys():
        return
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        yield f"a weight that is still to be quantised in {where}"
    if getattr(state, "packing_format_for_cpu", False):
        yield f"a weight that bitsandbytes has laid out for this processor in {where}"
    if module.compute_dtype not in (None, dtype):
        yield f"products in {module.compute_dtype} over weights in {dtype} in {where}"


def keep_layout_(model: nn.Module) -> None:
    """Has bitsandbytes leave the bytes of 4-bit weights as they lie. On processors with AVX512-BF16
    its layers lay them out anew, in place, at the first call in evaluation, and round their scales
    to bf16. The schedule would read other numbers then, and bitsandbytes' own matmul gives the
    input no gradient."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def _kind(module: Any, adapter: str) -> tuple[Kind, dict[str, Any]]:
    """Returns the kind of an adapter, and the modules of its parameters besides A and B."""
    for kind in reversed(KINDS):  # often run, so it reads the dicts behind PEFT's modules
        found = {}
        for name, (inside, _) in kind.more.items():
            modules = module._modules.get(inside)
            if modules is None or adapter not in modules._modules:
                break
            found[name] = modules._modules[adapter]
        else:
            return kind, found
    raise AssertionError("the first kind has no more parameters")


def _active(module: Any) -> str | None:
    return next(iter(_actives(module)), None)


def _actives(module: Any) -> list[str]:
    """Returns the names of the adapters that a forward adds."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]
