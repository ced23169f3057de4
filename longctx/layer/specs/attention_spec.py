"""What attention of a decoder layer is (parts/attention.py). Its sizes, and what they cost, are in
attention_sizes.py.

T tokens, D hidden size, H query heads and K key/value heads of d columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longctx.layer.specs.attention_sizes import AttentionSizes
from longctx.layer.specs.part_spec import (
    Paths,
    Shape,
    head_dim,
    kv_heads,
    paths,
)

ATTENTION = "self_attn"
QKV = {name: f"{ATTENTION}.{name}_proj" for name in "qkv"}
OUT = {"o": f"{ATTENTION}.o_proj"}
NORM1 = {"norm1": "input_layernorm"}
QK_NORMS = {"q_norm": f"{ATTENTION}.q_norm", "k_norm": f"{ATTENTION}.k_norm"}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionSizes):
    """Attention of one layer. The defaults are Llama's."""

    path: str = ATTENTION
    """The path of the module."""
    modules: Paths = field(default_factory=lambda: {ATTENTION: "Attention"}, hash=False)
    linears: Paths = field(default_factory=lambda: QKV | OUT, hash=False)
    """q, k, v and o. Without k and v, q holds all three in one parameter, without a bias."""
    norms: Paths = field(default_factory=lambda: NORM1, hash=False)
    """norm1 before attention and post1 after it, and q_norm and k_norm of q and k."""
    parameters: Paths = paths()
    """sinks (H,), a logit of each head that takes part in its softmax and has no value."""
    scale: float
    """Multiplies attention's scores before the softmax."""
    score_factor: float = 1.0
    """Multiplies the scores, too: the factors of q and of k together."""
    rope: str | None = field(default="all", compare=False)  # all kinds of RoPE cost the same
    """The name of its RoPE in `Schedule.ropes`; None: the layer has none."""
    interleaved: bool = False
    """RoPE rotates pairs of neighbours, instead of halves."""
    half_tables: bool = False
    """Hugging Face's cosines and sines have a column for each pair, instead of each feature."""
    norms_rotated: bool = False
    """The norms of q and k come after RoPE."""
    drops: bool = True
    """The module has a setting by which it may drop some of its weights."""

    @classmethod
    def usual(cls, config: Any) -> dict[str, Any]:
        d = head_dim(config)
        own = dict(heads=config.num_attention_heads, kv_heads=kv_heads(config), head_dim=d)
        return super().usual(config) | own | {"scale": d**-0.5}

    # --- its parameters and modules ---------------------------------------------------------

    @property
    def side_by_side(self) -> dict[tuple[str, ...], Shape]:
        return {("q", "k", "v"): (self.wide, self.narrow, self.narrow)}

    def shapes(self) -> dict[str, Shape]:
        D, q, kv = self.hidden, self.wide, self.narrow
        in_q = q * (1 + self.output_gate) + sum(sum(rows[1:]) for rows in self.in_one.values())
        rows = dict(q=(in_q, D), k=(kv, D), v=(kv, D), o=(D, q))
        linears = {path: rows[name] for name, path in self.linears.items()}
        d = self.head_dim
        own = dict(q_norm=q, k_norm=kv) if self.wide_norms else dict(q_norm=d, k_norm=d)
        return linears | {path: (own.get(name, D),) for name, path in self.norms.items()}

    def held_shapes(self) -> dict[str, Shape]:
        return {path: (self.heads,) for path in self.parameters.values()}

    def differs(self, modules: Mapping[str, Any], config: Any) -> Iterator[str]:
        attention = modules[self.path]
        state = vars(attention)
        if self.drops:
            _ = attention.attention_dropout  # Hugging Face's forward fails without it
        if not attention.is_causal:
            yield "attention to later tokens"
        if attention.head_dim != self.head_dim:
            yield "another head size than the configuration's"
        if attention.num_key_value_groups != self.heads // self.kv_heads:
            yield "other groups of heads than the configuration's"
        if state.get("attn_logit_softcapping") != self.score_cap:
            yield "a cap of attention's scores of its own"
        if attention.scaling != self.scale:
            yield "an attention scale of its own"
        window = state.get("sliding_window", self.window)
        if (window if state.get("is_sliding", True) else None) != self.window:
            yield "another window than the configuration's"
        rotates = self.rope is not None
        if bool(state.get("use_rope", rotates)) != rotates:
            yield "RoPE where the configuration has none, or none where it has,"
