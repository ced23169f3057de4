"""CUDA graphs of layers with mixers: the bits of eager passes, for every kind of mixer. On a CPU
one pass's operations are run again, without Python of the layers (tests/small_graphs.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_families import IN_TORCH_ALONE, MIXERS
from small_graphs import (
    GPU,
    MadeAgain,
    Operations,
    assert_same,
    batch,
    count,
    make,
    recorded_with,
    runtime_of,
    trained,
)
from torch import nn

from longctx.attention.documents import Documents

pytestmark = [pytest.mark.usefixtures("reference_kernels"), *([] if GPU else [IN_TORCH_ALONE])]
BY_COUNT = ("moe", "experts", "qwen3_next")
"""Words in the names of families with experts, whose tokens a CPU counts on the host."""
ALIKE = [[20, 27, 1]] * 4 + [[16, 16, 16]] * 4
"""The documents of eight rows. One of the first has a single token, which is padded."""
IN_ALL = {"target_modules": "all-linear"}
OF_MAMBA = {"target_modules": ["in_proj", "q_proj", "v_proj"]}
"""PEFT refuses adapters of the out_proj of a Mamba 2."""
ADAPTERS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2"), IN_ALL),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "falcon_h1"), OF_MAMBA),
}


@pytest.fixture
def recording(request: Any, monkeypatch: Any) -> Iterator[None]:
    family = request.getfixturevalue("family") if "family" in request.fixturenames else ""
    by_count = any(word in family for word in BY_COUNT)
    with recorded_with(monkeypatch, MadeAgain if by_count else Operations):
        yield


def rows(alike: list[list[int]] = ALIKE, **more: Any) -> list[dict[str, Any]]:
    return [batch(i, documents=lengths, **more) for i, lengths in enumerate(alike)]


@pytest.mark.parametrize(
    ("family", "peft"), [*((name, None) for name in MIXERS), *ADAPTERS.items()]
)
def test_bits_are_those_of_eager_passes(family: str, peft: Any, recording: None) -> None:
    how = dict(lora=peft is not None, peft=peft) if peft else {}
    ours, eager = make(family, **how), make(family, **how, cuda_graphs="off")
    assert_same(trained(ours, rows()), trained(eager, rows()))
    assert count(ours) == 2 and not count(eager)
    assert runtime_of(ours).graphs._replayed == 6


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_rows_of_a_batch_and_a_document_each(family: str, recording: None) -> None:
    """Which is what most rows are; the first graph serves two rows."""
    steps = rows([[48]] * 3, rows=2) + rows([[48]] * 3)
    ours, eager = make(family), make(family, cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 2 and runtime_of(ours).graphs._replayed == 4


def test_other_documents_run_eagerly(recording: None, capsys: Any) -> None:
    """Mixers are called document by document, so a graph serves batches of the same lengths."""
    steps = rows([[20, 28], [21, 27], [22, 26], [23, 25]])
    ours, eager = make("lfm2"), make("lfm2", cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert not count(ours)
    assert capsys.readouterr().out.count("no CUDA graphs for batches whose documents") == 1


def test_documents_that_continue_others_run_eagerly(recording: None) -> None:
    documents = Documents.of([7, 9, 12, 20], [None, 0, 0, None])
    given = {**batch(0, documents=[48]), **documents.arguments(), "labels": None}
    model = make("qwen3_5_text")
    seen = [model(**given).logits.detach() for _ in range(3)]
    assert not count(model) and all(torch.equal(x, seen[0]) for x in seen)


def _mixer(model: Any) -> nn.Module:
    return next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))


def _hook(model: Any) -> None:
    _mixer(model).norm.register_forward_hook(lambda module, args, output: output * 0.5)


def _hook_on_a_linear_layer(model: Any) -> None:
    _mixer(model).out_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def _another_forward(model: Any) -> None:
    layer = _mixer(model).in_proj_z
    layer.forward = lambda x: type(layer).forward(layer, x) * 0.5


def _weight(model: Any) -> None:
    layer = _mixer(model).in_proj_z
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def _scale(model: Any) -> None:
    for module in _mixer(model).modules():
        if "lora_A" in module._modules:
            module.scaling["default"] *= 3.0


def _no_adapters(model: Any) -> None:
    model.disable_adapter_layers()


@pytest.mark.parametrize(
    ("change", "lora", "ends"),
    [
        (_hook, False, "hooks or another forward inside a mixer"),
        (_hook_on_a_linear_layer, False, "hooks or another forward inside a mixer"),
        (_another_forward, False, "hooks or another forward inside a mixer"),
        (_weight, False, ""),
        (_scale, True, ""),
        (_no_adapters, True, "no weight of a layer is trained"),
    ],
)
def test_a_mixer_that_changes(
    change: Any, lora: bool, ends: str, recording: None, capsys: Any
) -> None:
    found = []
    for options in ({}, {"cuda_graphs": "off"}):
        model = make("qwen3_5_text", lora, **options)
        seen = trained(model, rows([[48]] * 3))
        change(model)
        if change is _no_adapters:
            model.get_input_embeddings().requires_grad_(True)
        found.append(seen + trained(model, rows([[48]] * 3)))
    assert_same(*found)
    assert capsys.readouterr().out.count("no CUDA graphs: " + ends) == bool(ends)


def test_dropout_inside_a_mixer_is_eager(recording: None, capsys: Any) -> None:
    model = make("qwen3_5_text", True, peft={"target_modules": ["in_proj_z"], "lora_dropout": 0.3})
    trained(model, rows([[48]] * 3))
    assert not count(model)
    assert capsys.readouterr().out.count("no CUDA graphs: dropout") == 1


def test_weights_of_32_bits_in_autocast(recording: None) -> None:
    """No cast of an earlier step is read: torch keeps those of a pass in a cache."""
    found = []
    for options in ({}, {"cuda_graphs": "off"}):
        model = make("qwen3_5_text", **options)
        with torch.autocast("cuda" if GPU else "cpu", torch.bfloat16):
            found.append(trained(model, rows([[48]] * 5)))
    assert_same(*found)
