"""Finds what the schedule would pass by without a word.

The schedule reads weights, and PEFT's LoRA adapters (adapters.py), and stands in for the forward of
every module of the base model but the embedding. A stranger is anything in such a module that the
schedule does not compute: a forward of its own (another kind of adapter, a quantised weight,
another activation), hooks, a submodule or a parameter that the family does not declare, weights of
several dtypes, dropout, an epsilon or a scale that differs from the configuration's.
`why_not_scheduled` names the first stranger in a base model, and Hugging Face's layers run instead.
`why_not_chunked` does the same for lm_head and the loss, and all logits are computed instead.
`replaceable` and `is_ours` say which forwards `patch` may exchange, and which it has exchanged.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from longctx.errors import many, one_line
from longctx.families.adapters import (
    WRAPPED,
    inner_modules,
    is_adapted,
    why_not_applied,
    why_not_dense,
    within,
    wrappers,
)
from longctx.families.families import (
    family_of,
    final_norm_of,
    final_norm_spec,
    head_of,
    is_a,
    known_family,
    layer_specs,
    layers_of,
    logits_cap,
    rotary_embeddings,
)
from longctx.families.family import LAYER_NORM, LINEAR, Family, Layer, part_of
from longctx.families.look import look, whole_shape
from longctx.families.vision import forward_names, is_joint, is_whole
from longctx.layer.packed_weights import packed_state
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mixer_spec import MixerSpec

_AFTER = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", *_AFTER)
_ENGINES = ("deepspeed.", "torch.distributed.")
"""The packages of engines, whose hooks on a layer gather its weights for a call."""
_HARMLESS = (
    *_ENGINES,
    "torch.utils.",  # counters of FLOPs and memory
    "transformers.utils.output_capturing",  # left behind by output_hidden_states=True
    "trl.models.activation_offloading",  # what lm_head keeps stays on the GPU
    "longctx.",
)
"""Whose hooks change no value."""
_FORWARDS = "longctx.forwards.attach"
_CLASSIFIERS = tuple(
    f"transformers.modeling_layers.GenericFor{kind}Classification" for kind in ("Sequence", "Token")
)
_IN_BASE = frozenset({"layers", "rotary_emb"})


def replaceable(module: nn.Module) -> bool:
    """Whether the module is a model, layer, norm or lm_head whose forward may be exchanged for
    ours."""
    if is_a(module, "Model") or is_a(module, "ForCausalLM"):
        return True
    if is_whole(module) or is_classifier(module):
        return True
    if is_joint(module):  # text goes around its forward, so that a subclass keeps one of its own
        return forward_name(type(module).forward) in forward_names()
    family, known = family_of(module), LINEAR + LAYER_NORM
    if family is not None:
        known = family.known("DecoderLayer") + family.norm_classes
    return forward_name(type(module).forward) in known


def is_classifier(model: Any) -> bool:
    """Whether this is transformers' classifier of sequences or of tokens, with its own forward."""
    return is_classifier_class(type(model))


def is_classifier_class(kind: Any) -> bool:
    return forward_name(kind.forward) in _CLASSIFIERS


def is_trls_head(forward: Any, module: nn.Module) -> bool:
    """Whether `forward` is the fused lm_head that TRL's trainers put around a model's forward
    (trl.trainer.utils.add_fused_lm_head), and around the forward of nobody else."""
    function = getattr(forward, "__func__", None)
    home = getattr(function, "__globals__", {}).get("__name__")
    if function is None or home != "trl.trainer.utils":
        return False
    inside = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return (
        getattr(inside, "__func__", None) is type(module).forward
        or type(inside).__module__ == _FORWARDS
        or is_trls_head(inside, module)
    )


def is_ours(module: nn.Module) -> bool:
    """Whether the module runs a forward that `patch` put there."""
    return type(vars(module).get("forward")).__module__ == _FORWARDS


def why_not_scheduled(base: PreTrainedModel, *, training: bool = False) -> str | None:
    """The first thing that the schedule would pass by, in a few words; None if there is none. With
    `training` dropout counts in a model that is in evaluation mode now, too.

    Looked for on every forward, in 4 ms for 32 layers: adapters and hooks come and go. A module
    that lacks what its class sets is a stranger, too: nn.Module's AttributeError names it. A model
    that is not patched yet must have none of our forwards, a patched one all of them.
    """
    runtime = vars(base).get("longctx")
    if runtime is not None and not runtime.args.schedules:
        return "single parts"
    try:
        return next(_strangers(base, training), None)
    except (AttributeError, KeyError) as error:
        return f"a module that is not whole: {one_line(error)}"


def is_heard(base: PreTrainedModel, name: str) -> bool:
    """Whether Hugging Face's forward of the base model does anything with an argument `name`. It
    takes any, and hands it on to layers and attention, which take any, too."""
    kind: Any = type(base)
    return name.startswith(("output_", "debug_")) or name in _heard(kind, known_family(base))


@cache
def _heard(kind: Any, family: Any) -> frozenset[str]:
    """The names that a function on the way from the base model to attention asks for: of every
    implementation of attention, so that a name which one of them ignores may be here."""
    code = vars(sys.modules[family.home])
    functions = [kind.forward, code["eager_attention_forward"], _flash_attention_forward]
    layers = family.known("DecoderLayer") + family.known("Attention")
    functions += [code[name.rpartition(".")[2]].forward for name in layers]
    functions += [f for f in ALL_ATTENTION_FUNCTIONS.values() if _is_transformers(f)]
    names = {name for f in functions for name in inspect.signature(f).parameters}
    return frozenset(names | TransformersKwargs.__annotations__.keys() | {"return_dict"})


def asks_for_router_logits(config: Any, given: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether a call, or else the configuration, asks for the logits of routers. The model's own
    forward then adds an auxiliary loss to its loss."""
    asked, text = given.get("output_router_logits"), config.get_text_config()
    return bool(getattr(text, "output_router_logits", False) if asked is None else asked)


def why_not_chunked(
    model: PreTrainedModel, given: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """The same for lm_head and the loss of a call with the arguments `given`, which need all logits
    then."""
    head = head_of(model)
    patched = head is not None and is_ours(head)
    found = _problems(head, LINEAR, "lm_head", patched=patched, hooks=_AFTER)
    if reason := _own_loss(model):
        return reason
    family = family_of(model)
    if asks_for_router_logits(model.config, given) and not (family and family.balances):
        return "output_router_logits, and the auxiliary loss of routers"
    if getattr(model.config, "final_logit_softcapping", None) != logits_cap(model):
        return "a cap of logits"
    if any(changing_hooks(model.lm_head)):
        return "hooks on lm_head"
    return next(found, None)


def has_known_loss(model: PreTrainedModel) -> bool:
    """Whether Hugging Face's own code computes the loss, which masks labels of -100."""
    return _own_loss(model) is None


def _own_loss(model: PreTrainedModel) -> str | None:
    kind, family = type(model), family_of(model)
    known = family.known("ForCausalLM") if family is not None else ()
    if forward_name(kind.forward) not in (*known, *forward_names()):
        return f"{kind.__module__}.{kind.__qualname__}, a model with a forward of its own"
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "a loss of its own"
    return None


def _strangers(base: Any, training: bool) -> Iterator[str]:
    """Yields whatever the schedule would pass by: in the base model, in its configuration, and in
    each layer."""
    family = known_family(base)
    yield from _in_base(base, family, training)
    yield from _in_config(base)
    for i, (layer, spec) in enumerate(layers_of(base)):
        yield from _in_layer(_Looked(layer, spec, base, f"model.layers.{i}", training), i)


def _in_base(base: Any, family: Family, training: bool) -> Iterator[str]:
    """Yields what is strange in the base model itself, its RoPE and its last norm."""
    config, dtype, patched = base.config, base.dtype, is_ours(base)
    if config.output_attentions:
        yield "output_attentions"
    yield from _problems(base, family.known("Model"), "model", patched=patched)
    yield from _undeclared(base, _IN_BASE | {family.embedding, family.last_norm}, "model")
    yield from _dropouts(base, "model", training)
    attends = [spec for layer in layer_specs(config) if (spec := layer.part(AttentionSpec))]
    if any(spec.rope is not None for spec in attends):
        yield from _problems(base.rotary_emb, family.known(family.rotary), "model.rotary_emb")
    last, where = final_norm_of(base), f"model.{family.last_norm}"
    yield from _problems(last, family.norm_classes, where, patched=patched)
    yield from _other_shape(last, (config.hidden_size,), where)
    if type(next(base.parameters())) is nn.Parameter:  # FSDP's shards have another dtype
        yield from _other_dtypes(last, dtype, where)
    _ = rotary_embeddings(base), final_norm_spec(base)
    if len(base.layers) != config.num_hidden_layers:
        held = many(len(base.layers), "layer")
        yield f"{held} where the configuration has {config.num_hidden_layers}"


def _in_config(base: Any) -> Iterator[str]:
    """Yields what a configuration, or the whole process, asks for and the schedule does not do."""
    config = base.config
    if getattr(config, "clip_qkv", None) is not None:
        yield "a clip of q, k and v"
    attention = config._attn_implementation
    if attention != "eager" and not _is_transformers(ALL_ATTENTION_FUNCTIONS.get(attention)):
        yield f"the attention implementation {attention!r}, which transformers does not ship"
    all_ways = getattr(config, "use_bidirectional_attention", False)
    if all_ways or not getattr(config, "is_causal", True):
        yield "attention to later tokens"
    if any(changing_hooks(torch_module, (f"_global{hooks}" for hooks in _HOOKS))):
        yield "hooks on all modules"


class _Looked(NamedTuple):
    """A layer that is compared with what its family says of it."""

    layer: Any
    spec: Layer
    base: Any
    where: str
    training: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def _in_layer(at: _Looked, index: int) -> Iterator[str]:
    """Yields what is strange in a layer."""
    layer, spec, where = at.layer, at.spec, at.where
    for name, shape in {**spec.shapes, **spec.held_shapes}.items():
        if 0 in shape:  # as of a shared expert of width 0
            yield f"a weight without elements ({where}.{name})"
    yield from _problems(layer, spec.classes, where, patched=is_ours(at.base))
    modules = {name: part_of(layer, name) for name in spec.in_layer}
    yield from _in_modules(at, modules)
    yield from _in_weights(at, modules)
    config = at.base.config
    for part in spec.parts:
        for reason in part.differs(modules, config):
            yield f"{reason} in {where}"
    yield from _other_parameters(spec, modules, config, where)
    if (mixes := spec.part(MixerSpec)) is not None:
        known = spec.family.known(mixes.module)
        yield from _other_mixer(part_of(layer, mixes.path), known, f"{where}.{mixes.path}")
    yield from _other_factors(spec, layer, where)
    kind, attends = vars(layer).get("block_type"), spec.part(AttentionSpec) is not None
    other = kind is not None and kind != config.layer_types[index]
    if other or vars(layer).get("is_attention_layer", attends) != attends:
        yield f"a layer of another kind than in the configuration in {where}"


def _in_modules(at: _Looked, modules: dict[str, Any]) -> Iterator[str]:
    """Yields what is strange in the modules of a layer, and leaves in `modules` those inside the
    wrappers of experts' weights."""
    spec, where = at.spec, at.where
    stacked = spec.part(ExpertsSpec)
    for name in stacked.owners if stacked else ():
        for wrapper in wrappers(modules[name]).values():
            yield from _wrapper_problems(wrapper, at.dtype, f"{where}.{name}")
        modules[name] = within(modules[name])
    for name, known in spec.in_layer.items():
        yield from _problems(modules[name], known, f"{where}.{name}")
    for name, children in spec.children.items():
        module, path = modules[name] if name else at.layer, f"{where}.{name}".rstrip(".")
        yield from _undeclared(module, children, path)
        yield from _dropouts(module, path, at.training)
    for name in spec.dropouts:
        yield from _dropouts(modules[name], f"{where}.{name}", at.training)


def _in_weights(at: _Looked, modules: dict[str, Any]) -> Iterator[str]:
    """Yields what is strange in the weights of a layer and in its adapters, and leaves in `modules`
    the linear layers inside adapters."""
    spec, where, dtype = at.spec, at.where, at.dtype
    for name, shape in spec.shapes.items():
        yield from _other_shape(modules[name], shape, f"{where}.{name}")
    linears = spec.linears.values()
    adapted = {name: modules[name] for name in linears if is_adapted(modules[name])}
    for name, module in adapted.items():
        for inner, known in inner_modules(module):
            yield from _problems(inner, known, f"{where}.{name}, inside its adapter")
        yield from why_not_applied(module, dtype, f"{where}.{name}")
        modules[name] = module.base_layer
    for name in linears:
        yield from why_not_dense(modules[name], dtype, f"{where}.{name}")
    for name, shape in spec.held_shapes.items():
        yield from _other_stack(at.layer, name, shape, where)
    for name, module in modules.items():
        kept = torch.float32 if name in spec.in_fp32 else dtype
        yield from _other_dtypes(module, dtype, where, kept)


def _problems(
    module: nn.Module | None,
    known: tuple[str, ...],
    where: str,
    *,
    patched: bool = False,  # it must have our forward
    hooks: tuple[str, ...] = _HOOKS,  # that matter
) -> Iterator[str]:
    if module is None:
        yield f"no {where}"
        return
    state = vars(module)  # as nn.Module's own look-up of what is not there is slow
    own = "forward" in state
    if forward_name(type(module).forward) not in known or own != patched or own != is_ours(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        yield f"{where}, a {kind} with a forward that the schedule does not know"
    if any(map(state.get, hooks)) and any(changing_hooks(module, hooks)):
        yield f"hooks on {where}"


def _undeclared(module: nn.Module, children: frozenset[str], where: str) -> Iterator[str]:
    """A submodule that the schedule does not know, or a parameter or buffer of the module's own:
    its forward may compute with it, as Cohere's attention does with norms of q and k, and routers
    with the bias by which they choose."""
    for own in (module._modules, module._parameters, module._buffers):
        for name, value in own.items():
            if value is not None and name not in children:
                yield f"{where}.{name}, which the schedule does not know"


def _dropouts(module: nn.Module, where: str, training: bool) -> Iterator[str]:
    """Yields each dropout of a module that is in training: a Dropout, or an attribute so named."""
    if not (training or module.training):
        return
    state = vars(module)
    if type(module) is nn.Dropout and state["p"]:
        yield f"dropout in {where}"
    for name, value in state.items():
        drops = "dropout" in name or name == "jitter_noise"  # of the input of Mixtral's routers
        if drops and isinstance(value, (int, float)) and value:
            yield f"{name.replace('_', ' ')} in {where}"


def _other_shape(module: Any, shape: tuple[int, ...], where: str) -> Iterator[str]:
    """A weight of another shape than the configuration's, as pruning leaves it. What engines have
    cut up (DTensors, empty ones) and 4 bits tell their shape by the module's features."""
    weight = module._parameters.get("weight")
    if weight is None and "parametrizations" not in module._modules:
        weight = look(module, "weight", None)  # FSDP and functional_call put tensors there
        if not isinstance(weight, torch.Tensor):
            yield f"no weight in {where}"
            return
    found = shape
    if len(shape) == 2:
        found, _ = (module.out_features, module.in_features), look(module, "bias")
    if type(weight) is nn.Parameter and weight.numel():
        found = tuple(weight.shape)
    if found != shape:
        yield f"a weight of {found} in {where} where the configuration has {shape}"


def _other_stack(layer: Any, name: str, shape: tuple[int, ...], where: str) -> Iterator[str]:
    """Experts' weights, or a router's, of another shape than the configuration's, also in 4 bits.
    What engines have cut up (DTensors, empty ones) does not tell its own. A bias may be (1, E)."""
    owner, _, own = name.rpartition(".")
    module = within(part_of(layer, owner))
    weight = look(module, own, None)
    if not isinstance(weight, torch.Tensor):
        yield f"no weight in {where}.{name}"
        return
    is_whole = type(weight) is nn.Parameter or own in module._buffers
    if not weight.numel() or not (is_whole or packed_state(weight) is not None):
        return
    found = whole_shape(weight)
    if found[-len(shape) :] != shape or math.prod(found) != math.prod(shape):
        yield f"a weight of {found} in {where}.{name} where the configuration has {shape}"


def _wrapper_problems(wrapper: Any, dtype: torch.dtype, where: str) -> Iterator[str]:
    """Yields what the schedule does not compute of PEFT's adapters of all experts' weights."""
    yield from _problems(wrapper, WRAPPED, where)
    for inner, known in inner_modules(wrapper):
        yield from _problems(inner, known, f"{where}, inside its adapter")
    yield from why_not_applied(wrapper, dtype, where)


def _other_dtypes(
    module: nn.Module, dtype: torch.dtype, where: str, kept: torch.dtype | None = None
) -> Iterator[str]:
    """Parameters that do not have the embedding's dtype, nor the one in which they are `kept`. What
    FSDP has sharded (DTensors) takes it on before it is used, and packed weights as they are made
    dense."""
    for parameter in module._parameters.values():
        state = packed_state(parameter)
        if type(parameter) is nn.Parameter:
            found = parameter.dtype if state is None else state.dtype
            if found not in (dtype, kept):
                yield f"weights in {found} in {where} where others are in {dtype}"


def _other_parameters(
    spec: Layer, modules: dict[str, Any], config: Any, where: str
) -> Iterator[str]:
    norm = spec.family.norm
    for name in spec.norms.values():
        if getattr(modules[name], norm.epsilon) != getattr(config, norm.configured):
            yield f"another epsilon than the configuration's in {where}"
    for name in spec.fused:
        if look(modules[name], "bias") is not None:
            yield f"a bias of {name} in {where}"
    biases = {look(modules[spec.linears[n]], "bias") is None for n in "qkv" if n in spec.linears}
    if len(biases) > 1:
        yield f"biases on some of q, k, v only in {where}"


def _other_factors(spec: Layer, layer: Any, where: str) -> Iterator[str]:
    for path, factor in spec.factors.items():
        owner, _, name = path.rpartition(".")
        found = getattr(part_of(layer, owner) if owner else layer, name)
        if found != factor:
            yield f"{path} {found:g}, where the schedule has {factor:g}, in {where}"
    residual = vars(layer).get("residual_multiplier")
    if residual is not None and any(part.factor != residual for part in spec.parts):
        yield f"a residual multiplier of its own in {where}"


def _other_mixer(mixer: Any, known: tuple[str, ...], where: str) -> Iterator[str]:
    """A mixer of another class, which may take its state otherwise, and one whose weights an engine
    brings module by module: none of it is there in backward. All else in it runs as it is."""
    yield from _problems(mixer, known, where, hooks=())
    if any(map(gathers_weights, mixer.modules())):
        yield f"an engine's hooks inside {where}"


def changing_hooks(owner: Any, names: Iterable[str] = _AFTER) -> Iterator[Any]:
    """The hooks that may change something, or hold on to it."""
    for name in names:
        for hook in getattr(owner, name).values():
            if not _home(hook).startswith(_HARMLESS):
                yield hook


def gathers_weights(layer: Any) -> bool:
    """Whether hooks of an engine gather the layer's weights for each call."""
    hooks = (hook for name in _HOOKS for hook in getattr(layer, name).values())
    return any(_home(hook).startswith(_ENGINES) for hook in hooks)


def _home(hook: Any) -> str:
    """Returns the module in which a hook is defined."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


@cache
def forward_name(forward: Callable[..., Any]) -> str:
    return f"{forward.__module__}.{forward.__qualname__}".removesuffix(".forward")


def _is_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers.")
