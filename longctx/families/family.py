"""A `Family` says what the schedule must know of the models of one kind: where the weights of a
layer are, and how it differs from a layer of Llama, which the defaults describe.

families.py and mixtures.py have the families; docs/add_a_family.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from longctx.families.adapters import ADAPTED, QUANTISED, within
from longctx.families.look import Read
from longctx.layer.norm_spec import NormSpec
from longctx.layer.parts.mixer_spec import MixerSpec
from longctx.layer.passes import Blocks, Traits
from longctx.layer.router import Router
from longctx.layer.stack import PLAIN, ExpertLayout
from longctx.layer.weights import MIXER

Names = tuple[str, ...]
LINEAR: Names = ("torch.nn.modules.linear.Linear",)
LAYER_NORM: Names = ("torch.nn.modules.normalization.LayerNorm",)
_SILU: Names = (
    "transformers.activations.SiLUActivation",
    "torch.nn.modules.activation.SiLU",
)
RELU2: Names = ("transformers.activations.ReLUSquaredActivation",)
QKV = {name: f"self_attn.{name}_proj" for name in "qkv"}
OUT = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}
GATE_UP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
OF_Q_AND_K = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def no_window(config: Any, layer: int) -> int | None:
    return None


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


def head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def config_of_layers(config: Any) -> list[Any]:
    """Returns the configuration of each layer, which may have heads and widths of its own, as
    Gemma 4's: whoever asks the whole model's for those gets an error of transformers'."""
    layers = range(config.num_hidden_layers)
    differ = getattr(config, "is_heterogeneous", False)
    return [config.per_layer_config[i] if differ else config for i in layers]


def head_dims(config: Any) -> list[int]:
    """Returns the size of a head of each layer."""
    return [head_dim(own) for own in config_of_layers(config)]


def kv_heads(config: Any) -> int:
    count: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return count


def is_stack(name: str) -> bool:
    """Whether a name in `Family.stacks` is of the experts' weights, not of the router's."""
    return name.startswith("experts")


MLP_WIDTH = "intermediate_size"


def mlp_width(config: Any) -> int:
    """Returns F, the features between the matmuls of a layer's MLP; those of a token's experts
    together where no layer has an MLP."""
    width: int | None = getattr(config, MLP_WIDTH, None)
    return width or config.num_experts_per_tok * config.moe_intermediate_size


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
    """The rest of the base model's."""
    mlp: str = ""
    """The name of the MLP's class, if it has another prefix."""
    embedding: str = "embed_tokens"
    """The name of the base model's embedding of tokens."""
    last_norm: str = "norm"
    """The name of the base model's norm after its last layer."""
    rotary: str = "RotaryEmbedding"
    """The rest of the rotary embedding's; empty for models without one."""
    decoders: Names = ("DecoderLayer",)
    """The rest of the names of its layers' classes."""
    modules: Mapping[str, str] = field(
        default_factory=lambda: {"self_attn": "Attention", "mlp": "MLP"}
    )
    """Maps the paths of the modules whose place the parts take to the rest of their classes'
    names. A layer without one of them has no linear layer and no norm in it."""
    attention: str = "self_attn"
    """The path of attention."""
    mixer: MixerSpec | None = None
    """The mixer that a layer has in the place of attention or beside it; None without one."""
    linears: Mapping[str, str] = field(default_factory=lambda: QKV | OUT | GATE_UP)
    """Maps the names that the parts declare to the paths of a layer's linear layers. Without k and
    v, q holds all three in one parameter; without up, gate holds both. Such layers must have no
    bias. Without gate, the MLP has none. A shared expert's begin with "shared_", of which
    shared_gate may hold shared_up, too, and the one that weighs it for each token is "share"."""
    stacks: dict[str, str] = field(default_factory=dict)
    """Maps the names of the router's weight (E, D) and of the experts' weights, (E, 2 I, D) and
    (E, D, I), to the paths of these parameters. A layer without experts has none."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Maps the names of other parameters and buffers that modules hold themselves to their paths:
    sinks (H,), the biases of what `stacks` names, and one that decides the choice alone (E,)."""
    router: Callable[[Any], Router] | None = None
    """Returns how experts are chosen, from the configuration."""
    experts: Callable[[Any], ExpertLayout] = field(default=lambda config: PLAIN)
    """Returns how the experts' weights lie, from the configuration."""
    in_fp32: Names = ()
    """The paths of modules whose parameters transformers keeps in fp32."""
    auxiliary: bool = True
    """transformers' causal model has an auxiliary loss, if there are experts."""
    half_tables: bool = False
    """RoPE's cosines and sines have a column for each pair, instead of each feature."""
    interleaved: bool = False
    """RoPE rotates pairs of neighbours, instead of halves."""
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    """Maps names of parameters to the paths of a layer's norms."""
    activation: str = "mlp.act_fn"
    """The path of the MLP's activation; empty where there is no MLP."""
    shared_activation: str = "act_fn"
    """The name of the activation in the module of the shared expert."""
    activations: Names = _SILU
    """The classes that it may be of."""
    wide_norms: bool = False
    """The norms of q and k are over all heads together."""
    output_gate: bool = False
    """q's projection also has the rows of a gate of attention's output, those of each head after
    the head's own."""
    norm: NormClass = NormClass()
    drops_attention: bool = True
    """Attention may drop some of its weights."""
    dropouts: Names = ()
    """The paths of dropout modules, which must not drop anything."""
    window: Callable[[Any, int], int | None] = no_window
    """Returns the window of a layer, from the configuration and the layer's index."""
    traits: Callable[[Any, int], dict[str, Any]] = field(default=lambda config, layer: {})
    """Returns the other fields of `Traits` that differ from Llama's."""
    factors: Callable[[Any], dict[str, float]] = field(default=lambda config: {})
    """Returns the factors that modules of a layer multiply by, from the configuration, by the paths
    of their attributes in a layer. `traits` says what they do."""
    by_layer: Callable[[Any, int], dict[str, Any]] = field(default=lambda config, layer: {})
    """Returns those of these fields that differ in a layer: the paths of its modules, their
    classes, the width of its MLP."""
    width: str = MLP_WIDTH
    """The name of the width of the MLP, or of one expert, in the configuration."""
    adjusted: Callable[[Any, int], int] = field(default=lambda config, width: width)
    """Returns the features of the MLP, from the configuration and that width."""
    shared_width: Callable[[Any], int] = field(default=lambda config: 0)
    """Returns the features of the shared expert, from the configuration."""
    output: str = ""
    """The name of the class of transformers that its base model returns, if the base model's
    annotation names another."""
    position_rows: int = 1
    """The rows of positions to which the base model expands one, as in positions.py."""
    masks_by_position: bool = True
    """The base model makes masks that keep documents apart where positions restart."""
    query_scale: Callable[[Any, Tensor], Tensor | None] = field(default=lambda config, at: None)
    """Returns a factor (T,) of q from the configuration and the positions (T,)."""
    score_cap: Callable[[Any], float | None] = field(default=lambda config: None)
    """Returns the softcap of attention's scores, the same in all layers."""
    embedding_multiplier: Callable[[Any], float] = field(default=lambda base: 1.0)
    """Returns the factor by which a base model multiplies embedded tokens."""
    multiplies_given: bool = False
    """Embeddings that a caller gives (inputs_embeds) have that factor, too, as in Granite."""
    logits_scaling: Callable[[Any], float] = field(default=lambda model: 1.0)
    """Returns the number by which a model divides its logits."""
    logits_cap: Callable[[Any], float | None] = field(default=lambda model: None)
    """Returns the softcap of a model's logits."""

    @property
    def attends(self) -> bool:
        return "q" in self.linears

    @property
    def blocks(self) -> Blocks:
        """The blocks of a layer that has these modules: attention and a mixer stand side by side,
        and an MLP follows."""
        has = {"attention": self.attends, "mixer": self.mixer is not None}
        row = tuple(part for part, there in has.items() if there)
        tiles = "experts" if self.stacks else "mlp" if "down" in self.linears else ""
        return tuple(block for block in (row, (tiles,) if tiles else ()) if block)

    @property
    def balances(self) -> bool:
        """Whether the causal model has an auxiliary loss that balances experts."""
        return self.router is not None and self.auxiliary

    def routes(self, config: Any) -> Router:
        """Returns how experts are chosen, in a family that has some."""
        assert self.router is not None
        return self.router(config)

    def features(self, config: Any) -> int:
        """Returns F, the features between the matmuls of a layer's MLP, or of one expert."""
        return self.adjusted(config, getattr(config, self.width))

    def shared(self, config: Any) -> int:
        """Returns the features of a layer's shared expert; 0 if the layer has none."""
        return self.shared_width(config) if "shared_down" in self.linears else 0

    def of_layer(self, config: Any, layer: int) -> Family:
        """Returns the family as one layer sees it."""
        own = self.by_layer(config, layer)
        return replace(self, **own) if own else self

    def known(self, suffix: str) -> Names:
        if suffix == "DecoderLayer":
            return tuple(f"{self.home}.{self.prefix}{name}" for name in self.decoders)
        names = {"Model": self.prefix + self.base, "MLP": self.mlp or f"{self.prefix}MLP"}
        return (f"{self.home}.{names.get(suffix, self.prefix + suffix)}",)

    @property
    def norm_classes(self) -> Names:
        return self.known(self.norm.suffix) if self.norm.suffix else LAYER_NORM

    @cached_property
    def of_experts(self) -> Names:
        """The paths of the modules that hold experts' weights, around which PEFT puts wrappers."""
        owners = [path.rpartition(".")[0] for n, path in self.stacks.items() if is_stack(n)]
        return tuple(dict.fromkeys(owners))

    @property
    def home(self) -> str:
        """The name of the module that has its classes."""
        name = self.module or self.kind
        return f"transformers.models.{name}.modeling_{name}"

    @cached_property
    def fused(self) -> Names:
        """The paths of linear layers that hold several weights in one parameter."""
        inside = {"q": "k", "gate": "up", "shared_gate": "shared_up"}
        names = [n for n in inside if n in self.linears and inside[n] not in self.linears]
        return tuple(self.linears[n] for n in names)

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shape of the weight of each linear layer and norm of a layer, by path."""
        D, F, d = config.hidden_size, self.features(config), head_dim(config)
        q, kv = d * config.num_attention_heads, d * kv_heads(config)
        S = self.shared(config)
        rows = dict(q=q, k=kv, v=kv, o=D, gate=F, up=F, down=D)
        rows |= dict(shared_gate=S, shared_up=S, shared_down=D, share=1)
        rows["q"] += q * self.output_gate
        if "k" not in self.linears:
            rows["q"] += 2 * kv
        if "up" not in self.linears:
            rows["gate"] += F
        if "shared_up" not in self.linears:
            rows["shared_gate"] += S
        columns = dict.fromkeys(rows, D) | dict(o=q, down=F, shared_down=S)
        linears = {path: (rows[name], columns[name]) for name, path in self.linears.items()}
        own = dict(q_norm=q, k_norm=kv) if self.wide_norms else dict(q_norm=d, k_norm=d)
        return linears | {path: (own.get(name, D),) for name, path in self.norms.items()}

    def stack_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters in `stacks` and `parameters`, by path."""
        shapes: dict[str, tuple[int, ...]] = {"sinks": (config.num_attention_heads,)}
        if self.router is not None and self.stacks:
            E, D = self.router(config).experts, config.hidden_size
            width = self.features(config)
            shapes |= {"router": (E, D), "router.bias": (E,), "choice_bias": (E,)}
            for name, rows, columns in (("experts_in", 2 * width, D), ("experts_out", D, width)):
                lies = (columns, rows) if self.experts(config).transposed else (rows, columns)
                shapes |= {name: (E, *lies), f"{name}.bias": (E, rows)}
        return {path: shapes[name] for name, path in (self.stacks | self.parameters).items()}

    @property
    def of_activations(self) -> Names:
        """The paths of a layer's activations: of its MLP or its experts, and of a shared expert."""
        own = (self.activation,) if self.activation else ()
        shared, _, _ = self.linears.get("shared_down", "").rpartition(".")
        return (*own, f"{shared}.{self.shared_activation}") if shared else own

    @cached_property
    def in_layer(self) -> dict[str, Names]:
        """Maps each module to the classes whose forward it may have, given by name, so that a class
        whose forward was replaced process-wide (as Liger-Kernel does) does not match."""
        return {
            **{path: self.known(suffix) for path, suffix in self.modules.items()},
            **dict.fromkeys(self.of_activations, self.activations),
            **dict.fromkeys(self.linears.values(), LINEAR + QUANTISED + ADAPTED),
            **dict.fromkeys(self.norms.values(), self.norm_classes),
            **dict.fromkeys(self.dropouts, ("torch.nn.modules.dropout.Dropout",)),
        }

    @cached_property
    def children(self) -> dict[str, frozenset[str]]:
        """Maps the path of each module of a layer that has submodules, or parameters of its own, ""
        for the layer itself, to the names of those that the schedule knows."""
        owned = [*self.in_layer, *self.stacks.values(), *self.parameters.values()]
        owned += [self.mixer.path] if self.mixer else []
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
        for name, path in (*self.stacks.items(), *self.parameters.items()):
            owner, _, own = path.rpartition(".")
            found[name] = read(within(part_of(layer, owner)), own)
        if self.mixer:
            own_parameters = part_of(layer, self.mixer.path).named_parameters()
            found |= {f"{MIXER}.{name}": parameter for name, parameter in own_parameters}
        return found

    def layer_traits(self, config: Any) -> tuple[Traits, ...]:
        return tuple(self._traits_of(config, i) for i in range(config.num_hidden_layers))

    def _traits_of(self, config: Any, layer: int) -> Traits:
        found = {"scale": head_dim(config) ** -0.5, "window": self.window(config, layer)}
        own = self.of_layer(config, layer)
        found |= {"output_gate": own.output_gate, "blocks": own.blocks}
        if own.stacks and own.router is not None:
            found |= {"router": own.router(config), "experts": own.experts(config)}
        own_traits = self.traits(config, layer)
        return Traits(**found | own_traits | ({} if own.attends else {"rope": None}))


def part_of(layer: Any, name: str) -> Any:
    """Returns the submodule of a layer at the dotted path `name`; None if there is none. Only the
    last one on the path may be a wrapper of parameters (families/adapters.py)."""
    for step in name.split("."):
        layer = within(layer)._modules.get(step) if isinstance(layer, nn.Module) else None
    return layer
