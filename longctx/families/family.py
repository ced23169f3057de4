"""A `Family` says what the schedule must know of the models of one kind: their classes, and the
specs of each layer's parts (layer/specs/), whose defaults describe a layer of Llama.

families.py, mixtures.py and hybrids.py have the families; docs/add_a_family.md shows how to write
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from longctx.cost.dims import LayerSpec
from longctx.families.adapters import ADAPTED, QUANTISED, within
from longctx.families.look import Read
from longctx.layer.norm_spec import NormSpec
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.layer.specs.mlp_spec import MLP_WIDTH, MlpSpec
from longctx.layer.specs.part_spec import Declare, PartSpec, head_dim
from longctx.layer.weights import MIXER

Names = tuple[str, ...]
LINEAR: Names = ("torch.nn.modules.linear.Linear",)
LAYER_NORM: Names = ("torch.nn.modules.normalization.LayerNorm",)
ACTIVATIONS: dict[str, Names] = {
    "silu": ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU"),
    "gelu_tanh": ("transformers.activations.GELUTanh",),
    "relu2": ("transformers.activations.ReLUSquaredActivation",),
}
"""Maps names of activations (kernels/swiglu.py) to the classes that compute them."""


def one_window(config: Any, layer: int) -> int | None:
    """Returns the window that all layers share, as in Mistral."""
    window: int | None = config.sliding_window
    return window


def window_by_type(config: Any, layer: int) -> int | None:
    """Returns a layer's window if the layer has one, as in Qwen2. transformers turns
    `use_sliding_window` and `max_window_layers` into `layer_types` in each configuration."""
    sliding = config.layer_types[layer] == "sliding_attention"
    window: int | None = config.sliding_window if sliding else None
    return window


def mlp_width(config: Any) -> int:
    """Returns F, the features between the matmuls of a layer's MLP; those of a token's experts
    together where no layer has an MLP."""
    width: int | None = getattr(config, MLP_WIDTH, None)
    return width or config.num_experts_per_tok * config.moe_intermediate_size


def config_of_layers(config: Any) -> list[Any]:
    """Returns the configuration of each layer, which may have heads and widths of its own, as
    Gemma 4's: the configuration of the whole model raises an error of transformers for those."""
    layers = range(config.num_hidden_layers)
    differ = getattr(config, "is_heterogeneous", False)
    return [config.per_layer_config[i] if differ else config for i in layers]


def head_dims(config: Any) -> list[int]:
    """Returns the size of a head of each layer."""
    return [head_dim(own) for own in config_of_layers(config)]


# --- how a family declares the parts of its layers ----------------------------------------------

attention, mlp = AttentionSpec.declared, MlpSpec.declared
experts, mixer = ExpertsSpec.declared, MixerSpec.declared
DeclareLayer = Callable[[Any, int], tuple[PartSpec, ...]]


def layer_of(*parts: Declare) -> DeclareLayer:
    """Returns what declares layers that all have these parts."""
    return lambda config, i: tuple(part(config, i) for part in parts)


def either(is_first: Callable[[Any, int], bool], first: Any, second: Any) -> Any:
    """Returns what declares one thing for some layers and another for all others: parts, or all
    parts of a layer."""
    return lambda config, i: (first if is_first(config, i) else second)(config, i)


# --- what all layers of a family share ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NormClass:
    """The class of a family's norms."""

    suffix: str = "RMSNorm"
    """The end of its name; empty for torch's LayerNorm."""
    epsilon: str = "variance_epsilon"
    """The name of epsilon in a module."""
    configured: str = "rms_norm_eps"
    """The name of epsilon in the configuration."""
    spec: Callable[..., NormSpec] = NormSpec
    """Returns how such a norm computes, from `eps`."""


ROUNDED_ONCE = partial(NormSpec, llama_rounding=False)
ONE_PLUS = NormClass(epsilon="eps", spec=partial(ROUNDED_ONCE, offset=1.0))
"""Gemma's norms, which store w and multiply by 1 + w."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A kind of model whose layers the schedule computes."""

    kind: str
    """transformers' `model_type`."""
    module: str = ""
    """The name of transformers' module, if it is another."""
    prefix: str
    """The prefix of its classes' names."""
    base: str = "Model"
    """The rest of the base model's name."""
    rotary: str = "RotaryEmbedding"
    """The rest of the rotary embedding's name; empty for models without one."""
    decoders: Names = ("DecoderLayer",)
    """The rest of the names of its layers' classes."""
    embedding: str = "embed_tokens"
    """The name of the base model's embedding of tokens."""
    last_norm: str = "norm"
    """The name of the base model's norm after its last layer."""
    norm: NormClass = NormClass()
    layer: DeclareLayer = field(default=layer_of(attention(), mlp()))
    """Returns the specs of a layer's parts, in forward's order, from the configuration and the
    layer's index."""
    balances: bool = False
    """transformers' causal model has an auxiliary loss that balances experts."""
    output: str = ""
    """The name of the class of transformers that its base model returns, if the base model's
    annotation names another."""
    position_rows: int = 1
    """The rows of positions to which the base model expands one, as in positions.py."""
    masks_by_position: bool = True
    """The base model makes masks that keep documents apart where positions restart."""
    query_scale: Callable[[Any, Tensor], Tensor | None] = field(default=lambda config, at: None)
    """Returns a factor (T,) of q from the configuration and the positions (T,)."""
    embedding_multiplier: Callable[[Any], float] = field(default=lambda base: 1.0)
    """Returns the factor by which a base model multiplies embedded tokens."""
    multiplies_given: bool = False
    """Embeddings that a caller gives (inputs_embeds) have that factor, too, as in Granite."""
    logits_scaling: Callable[[Any], float] = field(default=lambda model: 1.0)
    """Returns the number by which a model divides its logits."""
    logits_cap: Callable[[Any], float | None] = field(default=lambda model: None)
    """Returns the softcap of a model's logits."""

    @property
    def home(self) -> str:
        """The name of the module that has its classes."""
        name = self.module or self.kind
        return f"transformers.models.{name}.modeling_{name}"

    def known(self, suffix: str) -> Names:
        """Returns the names of the family's classes that end with `suffix`; behind a dot it is the
        whole name of a class."""
        if suffix.startswith("."):
            return (f"{self.home}{suffix}",)
        if suffix == "DecoderLayer":
            return tuple(f"{self.home}.{self.prefix}{name}" for name in self.decoders)
        return (f"{self.home}.{self.prefix}{self.base if suffix == 'Model' else suffix}",)

    @property
    def norm_classes(self) -> Names:
        return self.known(self.norm.suffix) if self.norm.suffix else LAYER_NORM


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer(LayerSpec):
    """A decoder layer of a family, as the specs of its parts: where its parameters are."""

    parts: tuple[PartSpec, ...]
    family: Family

    def _all(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= getattr(part, name)
        return found

    @cached_property
    def linears(self) -> dict[str, str]:
        """Maps the names of linear layers to their paths."""
        return self._all("linears")

    @cached_property
    def norms(self) -> dict[str, str]:
        """Maps the names of norms to their paths."""
        return self._all("norms")

    @cached_property
    def held(self) -> dict[str, str]:
        """Maps the names of parameters and buffers that modules hold themselves to their paths."""
        return self._all("stacks") | self._all("parameters")

    @cached_property
    def factors(self) -> dict[str, float]:
        """Maps the paths of factors that modules hold to the values that the schedule has."""
        return self._all("factors")

    @cached_property
    def dropouts(self) -> Names:
        return tuple(path for part in self.parts for path in part.dropouts)

    @cached_property
    def in_fp32(self) -> Names:
        return tuple(path for part in self.parts for path in part.in_fp32)

    @cached_property
    def classes(self) -> Names:
        """The classes that the layer may be of."""
        own = next((part.decoder for part in self.parts if part.decoder), "DecoderLayer")
        return self.family.known(own)

    @cached_property
    def fused(self) -> Names:
        """The paths of linear layers that hold several weights in one parameter."""
        return tuple(self.linears[names[0]] for part in self.parts for names in part.in_one)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Maps the path of each linear layer and norm to the shape of its weight."""
        return {path: shape for part in self.parts for path, shape in part.shapes().items()}

    @cached_property
    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """Maps the path of each parameter in `held` to its shape."""
        return {path: shape for part in self.parts for path, shape in part.held_shapes().items()}

    @cached_property
    def in_layer(self) -> dict[str, Names]:
        """Maps each module to the classes whose forward it may have, given by name, so that a class
        whose forward was replaced process-wide (as Liger-Kernel does) does not match."""
        modules, acts = self._all("modules"), self._all("activations")
        return {
            **{path: self.family.known(suffix) for path, suffix in modules.items()},
            **{path: ACTIVATIONS[name] for path, name in acts.items()},
            **dict.fromkeys(self.linears.values(), LINEAR + QUANTISED + ADAPTED),
            **dict.fromkeys(self.norms.values(), self.family.norm_classes),
            **dict.fromkeys(self.dropouts, ("torch.nn.modules.dropout.Dropout",)),
        }

    @cached_property
    def children(self) -> dict[str, frozenset[str]]:
        """Maps the path of each module of a layer that has submodules, or parameters of its own, ""
        for the layer itself, to the names of those that the schedule knows."""
        owned = [*self.in_layer, *self.held.values()]
        owned += [mixes.path] if (mixes := self.part(MixerSpec)) else []
        parts = [path.rpartition(".") for path in owned]
        return {
            owner: frozenset(name for other, _, name in parts if other == owner)
            for owner in dict.fromkeys(owner for owner, _, _ in parts)
        }

    def weights(self, layer: Any, read: Read = getattr) -> dict[str, Tensor]:
        """Returns the parameters of a layer by name (layer/weights.py), without adapters but for
        those inside a mixer."""
        found = {}
        for name, path in (*self.linears.items(), *self.norms.items()):
            module = part_of(layer, path)
            found[name] = read(module, "weight")
            if (bias := read(module, "bias", None)) is not None:
                found[f"{name}.bias"] = bias
        for name, path in self.held.items():
            owner, _, own = path.rpartition(".")
            found[name] = read(within(part_of(layer, owner)), own)
        if mixes := self.part(MixerSpec):
            own_parameters = part_of(layer, mixes.path).named_parameters()
            found |= {f"{MIXER}.{name}": parameter for name, parameter in own_parameters}
        return found


def part_of(layer: Any, name: str) -> Any:
    """Returns the submodule of a layer at the dotted path `name`; None if there is none. Only the
    last one on the path may be a wrapper of parameters (families/adapters.py)."""
    for step in name.split("."):
        layer = within(layer)._modules.get(step) if isinstance(layer, nn.Module) else None
    return layer
