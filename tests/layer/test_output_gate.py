"""A gate of attention's output, against autograd in fp64: beside whatever else a layer may have,
with any part of it frozen, and whatever is kept. Whole models are in tests/model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.cost.dims import LayerSpec
from longctx.cost.kept import Keep
from longctx.layer.adapters.protocol import ALL
from longctx.layer.norm_spec import NormSpec
from longctx.layer.passes import Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.memory.store import ActivationStore

pytestmark = pytest.mark.usefixtures("reference_kernels")
D, T, TILE, H, K, d, F = 16, 21, 8, 4, 2, 6, 20
LAYERS: dict[str, tuple[bool, tuple[str, ...], float]] = {
    "qwen3.5": (False, ("norm1", "norm2", "q_norm", "k_norm"), 1.0),
    "plain": (False, ("norm1", "norm2"), 0.7),
    "post norms": (False, ("post1", "post2"), 1.0),
    "four norms": (False, ("norm1", "post1", "norm2", "post2"), 1.0),
    "side by side": (True, ("norm1",), 1.0),
}
"""Whether the MLP stands beside attention, a layer's norms, and the factor of both sums."""


def weights_of(layer: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = dict(q=(2 * H * d, D), k=(K * d, D), v=(K * d, D), o=(D, H * d))
    shapes |= dict(gate=(F, D), up=(F, D), down=(D, F))
    made = {name: 0.4 * torch.randn(shape) for name, shape in shapes.items()}
    made |= {"q.bias": torch.randn(2 * H * d), "k.bias": torch.randn(K * d)}
    made["v.bias"] = torch.randn(K * d)
    own = {"q_norm": d, "k_norm": d}
    return made | {n: 1 + 0.3 * torch.randn(own.get(n, D)) for n in LAYERS[layer][1]}


def truth(layer: str, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    beside, _, residual = LAYERS[layer]

    def norm(name: str, x: Tensor) -> Tensor:
        if name not in w:
            return x
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[name]

    n1 = norm("norm1", x)
    q, g = (n1 @ w["q"].T + w["q.bias"]).view(T, H, 2, d).unbind(2)
    k, v = ((n1 @ w[n].T + w[f"{n}.bias"]).view(T, K, d) for n in "kv")
    q, k = norm("q_norm", q), norm("k_norm", k)
    k, v = (y.repeat_interleave(H // K, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * g.sigmoid()
    h = x + residual * norm("post1", o.flatten(1) @ w["o"].T)
    n2 = n1 if beside else norm("norm2", h)
    product = torch.nn.functional.silu(n2 @ w["gate"].T) * (n2 @ w["up"].T)
    return h + residual * norm("post2", product @ w["down"].T)


def spec_of(layer: str) -> LayerSpec:
    beside, names, residual = LAYERS[layer]
    norms: tuple[dict[str, str], ...] = ({}, {})
    for name in names:
        norms[name.endswith("2")][name] = name
    attention = AttentionSpec(
        hidden=D,
        heads=H,
        kv_heads=K,
        head_dim=d,
        linears={name: name for name in "qkvo"},
        norms=norms[0],
        scale=0.5,
        rope=None,
        output_gate=True,
        factor=residual,
    )
    linears = {name: name for name in ("gate", "up", "down")}
    how: Any = dict(hidden=D, width=F, linears=linears, norms=norms[1])
    return LayerSpec(parts=(attention, MlpSpec(**how, beside=beside, factor=residual)))


def schedule(layer: str, keep: Keep, groups: int) -> Schedule:
    cpu = torch.device("cpu")
    store = ActivationStore(cpu)
    store.reserve((keep,), 2**20)
    positions = torch.arange(T)
    return Schedule(
        layers=(spec_of(layer),),
        documents=Documents.of_batch(positions[None], None, None, None)[0],
        position_ids=positions,
        ropes={},
        query_scale=None,
        head_dim=d,
        norm=NormSpec(eps=1e-6),
        attention=choose_attention("math", cpu, torch.float32)[1],
        store=store,
        tile_tokens=TILE,
        head_groups=groups,
        dtype=torch.float32,
    )


Found = dict[str, Tensor]


def run(layer: str, keep: Keep, groups: int, trained: Any, *, in_fp64: bool = False) -> Found:
    """Returns y and the gradients of what is trained, of x too if it is."""
    dtype = torch.float64 if in_fp64 else torch.float32
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = {"x": x} | {name: w.to(dtype) for name, w in weights_of(layer).items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(trained(name))
    x, w = leaves["x"], {name: leaf for name, leaf in leaves.items() if name != "x"}
    y = truth(layer, x, w) if in_fp64 else scheduled_layer(x, schedule(layer, keep, groups), 0, w)
    dy = torch.randn(T, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(dy)
    return {"y": y.detach()} | {n: leaf.grad for n, leaf in leaves.items() if trained(n)}


def assert_close(ours: Found, wanted: Found) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        if name == "k.bias" and value.norm() < 1e-9:
            continue  # softmax ignores what all keys share, unless q and k have norms
        error = (ours[name].double() - value).norm() / value.norm()
        assert error < 2e-6, (name, error)


SETS = [frozenset(names) for names in (("x",), ("x", "o"), ("x", "o", "h", "q k v", "gate up"))]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_that_has_one(layer: str, groups: int) -> None:
    found = [run(layer, Keep(names), groups, lambda name: True) for names in SETS]
    assert_close(found[0], run(layer, Keep(SETS[0]), 1, lambda name: True, in_fp64=True))
    for other in found[1:]:
        assert [n for n in other if not torch.equal(other[n], found[0][n])] == []


@pytest.mark.parametrize("layer", ["qwen3.5", "four norms", "side by side"])
@pytest.mark.parametrize("only", [("o",), ("q",), ("k", "x"), ("norm1",), ("down",), ("x",)])
def test_any_part_alone_is_trained(layer: str, only: tuple[str, ...]) -> None:
    if "norm1" in only and "norm1" not in LAYERS[layer][1]:
        pytest.skip("no such norm")
    wanted = run(layer, Keep(SETS[1]), 1, only.__contains__, in_fp64=True)
    for names in SETS[::2]:
        assert_close(run(layer, Keep(names), 2, only.__contains__), wanted)


def test_the_rows_of_a_head_and_of_its_gate() -> None:
    """q's are those of Hugging Face's first chunk, head by head."""
    from longctx.layer.parts.heads import HeadGroups
    from longctx.layer.passes import Pass
    from longctx.layer.weights import Weights

    s, w = schedule("plain", Keep(SETS[0]), 2), weights_of("plain")
    weights = Weights.of(w, spec_of("plain"), {}, torch.float32)
    heads = HeadGroups(Pass(schedule=s, layer=0, weights=weights))
    assert heads.columns == H * d
    theirs = torch.chunk(w["q"].view(H, 2 * d, D), 2, dim=1)
    for which, rows in enumerate(theirs):
        assert torch.equal(w["q"][heads.rows_of_q(which, ALL)], rows.flatten(0, 1))
    second = [*heads][1]
    assert torch.equal(w["q"][heads.rows_of_q(0, second.q)], theirs[0][H // 2 :].flatten(0, 1))
