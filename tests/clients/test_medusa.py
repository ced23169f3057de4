"""Medusa's heads on a patched trunk: recipes/medusa.py, and the benchmark of its losses."""

from __future__ import annotations

import copy
import json
import runpy
from typing import Any

import pytest
import torch
from both import LAYERS, make_model, sentence
from paths import ROOT
from safetensors.torch import load_file
from small_tokenizer import small_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

import longctx
from profiling.bench import medusa_bench

pytestmark = pytest.mark.usefixtures("reference_kernels")
HEADS = 5


def with_logits(hidden: Tensor, heads: Any, labels: Tensor, lm_head: Any) -> Tensor:
    """The sum of the losses, by logits and slices."""
    total = cross_entropy(lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
    for n, head in enumerate(heads):
        logits = head.lm_head(head(hidden[:, : -n - 2]))
        loss = cross_entropy(logits.flatten(0, 1), labels[:, n + 2 :].flatten())
        total = total + 0.8 ** (n + 1) * loss
    return total


def gradients(*modules: torch.nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters()]


def test_losses_and_gradients_are_those_with_logits(scheduled) -> None:
    recipe = runpy.run_path(str(ROOT / "recipes/medusa.py"))
    ours = make_model()
    heads = torch.nn.ModuleList(recipe["MedusaHead"](ours.lm_head) for _ in range(HEADS))
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.1)
    vanilla, their_heads = copy.deepcopy(ours), copy.deepcopy(heads)
    longctx.patch(ours, strict=True)
    ids = torch.randint(300, (2, 24))
    hidden = ours.model(input_ids=ids, use_cache=False).last_hidden_state
    loss = recipe["medusa_backward"](hidden, heads, ids, ours.lm_head)
    theirs = vanilla.model(input_ids=ids, use_cache=False).last_hidden_state
    truth = with_logits(theirs, their_heads, ids, vanilla.lm_head)
    truth.backward()
    assert len(scheduled) == LAYERS
    assert loss.item() == pytest.approx(truth.item(), rel=1e-5)
    for our, their in zip(gradients(heads, ours), gradients(their_heads, vanilla), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trunk", [False, True], ids=["frozen trunk", "trained trunk"])
def test_the_recipe(scheduled, capsys, tmp_path, trunk) -> None:
    recipe = runpy.run_path(str(ROOT / "recipes/medusa.py"))
    make_model().save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    lines = (json.dumps({"text": sentence(n)}) for n in range(40))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    paths = [str(tmp_path / name) for name in ("model", "data.jsonl", "out")]
    flags = "--max_length 64 --max_steps 6 --learning_rate 1e-2".split()
    recipe["main"]([*paths, *flags, *(["--train_trunk"] if trunk else [])])
    said = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert len(scheduled) == 6 * LAYERS and "Hugging Face's layers" not in said
    saved = load_file(tmp_path / "out/medusa_heads.safetensors")
    assert len(saved) == 3 * HEADS and saved["4.lm_head.weight"].any()
    assert (tmp_path / "out/model.safetensors").is_file() == trunk


@pytest.mark.parametrize("trunk", [False, True])
def test_the_benchmark_compares_what_computes_the_same(trunk) -> None:
    """Liger's needs a GPU."""
    case = medusa_bench.DEFAULTS | dict(tokens=24, vocab=60, hidden=16, trunk=trunk)
    found = {}
    for impl in ("longctx", "longctx_at_once", "logits"):
        hidden, heads, labels = medusa_bench.made(case, "cpu", torch.float32)
        loss = medusa_bench.backward_of(impl)(hidden, heads, labels)
        assert (hidden.grad is not None) == trunk
        found[impl] = [loss, *gradients(heads), *([hidden.grad] if trunk else [])]
    for values in found.values():
        for ours, truth in zip(values, found["logits"], strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


def test_the_published_cases_are_whole() -> None:
    """Each implementation at each length, over a frozen and over a trained trunk."""
    cases = medusa_bench.BENCH.cases(None)
    assert {case["impl"] for case in cases} == set(medusa_bench.IMPLS)
    assert len(cases) == len(medusa_bench.PUBLISHED)
    assert all("--child" in medusa_bench.BENCH.command(case, 1) for case in cases)
    with pytest.raises(SystemExit, match="impl=torch: one of longctx, "):
        medusa_bench.backward_of("torch")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", medusa_bench.IMPLS)
def test_every_implementation_is_measured(impl) -> None:
    case = medusa_bench.DEFAULTS | dict(impl=impl, tokens=512, vocab=1024, hidden=256, trunk=True)
    (row,) = medusa_bench.run_case(case, 1, [])
    assert row["status"] == "ok" and row["step_s"] > 0 and row["peak_gib"] > 0
