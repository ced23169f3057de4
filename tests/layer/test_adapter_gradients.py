"""Gradients of adapters as a pass gives them to autograd: stacked by rows, summed or passed on."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longctx.cost.dims import LayerSpec
from longctx.layer.adapters.lora import Lora
from longctx.layer.gradients import Gradients
from longctx.layer.linear import WeightGradient
from longctx.layer.projection import ProjectionGradient
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.weights import Weights

ROWS = slice(0, 6)


class _Stacks(TorchDispatchMode):
    """Counts calls of torch.cat, each a kernel of its own on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.cat
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("names", "stacks"), [("o", 0), ("qkv", 1)])
def test_only_several_parts_are_stacked(names: str, stacks: int) -> None:
    """q, k and v lie in one parameter here: its B has a gradient of three parts, o's of one."""
    torch.manual_seed(0)
    held, outputs = names[0], 8 if names == "o" else 16
    own = {"a": torch.randn(2, 8), "b": torch.randn(outputs, 2)}
    given = {"q": torch.randn(16, 8), "o": torch.randn(8, 8)}
    given |= {f"{held}.{name}": x for name, x in own.items()}
    sizes = dict(hidden=8, heads=2, kv_heads=1, head_dim=4)
    spec = AttentionSpec(**sizes, scale=0.5, linears={"q": "", "o": ""})
    w = Weights.of(given, LayerSpec(parts=(spec,)), {held: Lora(scale=1.5)}, torch.float32)
    grads = Gradients(w, [f"{held}.a", f"{held}.b"], 1)
    found: dict[str, ProjectionGradient] = {
        name: grads.projection(name, WeightGradient(False)) for name in names
    }
    x, dy = torch.randn(6, 8), torch.randn(6, outputs)
    for grad, part in zip(
        found.values(), dy.split([len(w[n].weight) for n in names], 1), strict=True
    ):
        assert grad.adapter is not None
        grad.add(part, x, grad.adapter.inner_grad(part), ROWS)
    with _Stacks() as seen:
        grads._finish_adapters(found)
    assert seen.count == stacks
    expected = {"a": 1.5 * own["b"].t() @ dy.t() @ x, "b": 1.5 * dy.t() @ x @ own["a"].t()}
    for name, truth in expected.items():
        torch.testing.assert_close(grads.done[f"{held}.{name}"], truth)
