"""The parts of a step carry their names in a trace, and nothing happens without a profiler."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from longctx.kernels.annotate import annotate, annotated, each
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")


def step() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    args = PatchOptions(tile_tokens=8, head_groups=2, offload_activations="all")
    patch_as(model, args, torch.device("cpu"))
    ids = torch.arange(24)[None] % 64
    model(input_ids=ids, labels=ids).loss.backward()


def test_a_profile_of_a_step_names_its_parts() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    count: dict[str, int] = {}
    for event in prof.events():
        count[event.name] = count.get(event.name, 0) + 1
    assert count["layer forward"] == count["layer backward"] == 2
    assert count["attention"] == 2 * 2 * 2  # layers, groups, forward and backward
    assert count["mlp"] == 2 * 2
    # 3 tiles of 8 tokens in: mlp forward and backward, input backward, q, k, v forward and backward
    # for each of 2 groups.
    assert count["tile"] == 2 * 3 * (3 + 2 * 2)
    assert count["loss"] == 2
    assert count["offload out"] == 2  # x, then o and lse; the last layer stays where it is
    assert count["offload in"] > 2
    assert {"norm", "rope", "projections", "head group"} <= count.keys()


def test_nothing_is_recorded_without_a_profiler(monkeypatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a range {name} without a profiler")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    step()
    assert annotate("x") is annotate("y")


def test_wrapped_functions_and_loops_keep_their_values() -> None:
    @annotated("sum")
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    assert (add(1, b=3), add.__doc__) == (4, "Adds.")
    assert list(each("item", [1, 2, 3])) == [1, 2, 3]
