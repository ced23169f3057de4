"""CUDA graphs of layers with mixers: the bits of eager passes, for every kind of mixer. On a CPU
one pass's operations are run again, without Python of the layers (tests/small_graphs.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import small_graphs
import torch
from by_bounds import ByMask
from small_families import IN_TORCH_ALONE, MIXERS
from small_graphs import (
    GPU,
    MadeAgain,
    Operations,
    assert_same,
    batch,
    bits_repeat,
    count,
    recorded_with,
    runtime_of,
    trained,
)
from torch import nn

from exactness import DEVICE
from longctx.attention.documents import Documents
from longctx.cost.kept import Keep, asked
from longctx.cost.rates import AttentionRates, Rates
from longctx.cost.sizes import Batch
from longctx.layer import segments as cutting
from longctx.memory.candidates import sets
from longctx.mixers.mixers import ModelsMixer
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import Adopted

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


ONE_OF_EACH = ("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1")
"""A family of each kind of mixer, and one with attention beside it."""


@pytest.fixture
def recording(request: Any, monkeypatch: Any) -> Iterator[None]:
    family = request.getfixturevalue("family") if "family" in request.fixturenames else ""
    by_count = any(word in family for word in BY_COUNT)
    with recorded_with(monkeypatch, MadeAgain if by_count else Operations):
        yield


@pytest.fixture
def repeatable() -> Iterator[None]:
    with bits_repeat():
        yield


def make(family: str, *given: Any, **how: Any) -> Any:
    return small_graphs.make(family, *given, attention=ByMask, **how)


def rows(alike: list[list[int]] = ALIKE, **more: Any) -> list[dict[str, Any]]:
    return [batch(i, documents=lengths, **more) for i, lengths in enumerate(alike)]


@pytest.mark.parametrize(
    ("family", "peft"),
    [
        pytest.param(*case, marks=[] if case[0] in ONE_OF_EACH else [pytest.mark.ci])
        for case in (*((name, None) for name in MIXERS), *ADAPTERS.items())
    ],
)
def test_bits_are_those_of_eager_passes(family: str, peft: Any, recording: None) -> None:
    how = dict(lora=peft is not None, peft=peft) if peft else {}
    ours, eager = make(family, **how), make(family, **how, cuda_graphs="off")
    assert_same(trained(ours, rows()), trained(eager, rows()))
    assert count(ours) == 1 and not count(eager)
    assert runtime_of(ours).graphs._replayed == 7


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_rows_of_a_batch_and_a_document_each(family: str, recording: None) -> None:
    """Most rows are one document. The first graph serves batches of two rows."""
    steps = rows([[48]] * 3, rows=2) + rows([[48]] * 3)
    ours, eager = make(family), make(family, cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 2 and runtime_of(ours).graphs._replayed == 4


def test_other_documents_run_eagerly(recording: None, monkeypatch: Any, capsys: Any) -> None:
    """A mixer that does not read bounds is called document by document: a graph serves batches of
    the same lengths."""
    monkeypatch.setattr(ModelsMixer, "packs", False)
    steps = rows([[20, 28], [21, 27], [22, 26], [23, 25]])
    ours, eager = make("qwen3_5_text"), make("qwen3_5_text", cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert not count(ours)
    assert capsys.readouterr().out.count("no CUDA graphs for batches whose documents") == 1


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "falcon_h1", "qwen3_5_text"])
@pytest.mark.parametrize("lora", [False, True])
def test_bounds_are_data(family: str, lora: bool, recording: None, capsys: Any) -> None:
    """One graph serves one document and many (there is room for 16), some of a single token."""
    many = [[3] * 16, [2] * 9 + [30], [1, 46, 1], [20, 28], [1] * 12 + [36]]
    # torch, in the kernel's place, adds up the filter of a single document in another order, and
    # flash-linear-attention's kernels the gradients of its decays
    if GPU and family != "qwen3_5_text":
        many.append([48])
    steps = rows([[40, 8], *many])
    how = dict(lora=lora, peft=ADAPTERS[family]) if lora else {}
    ours, eager = make(family, **how), make(family, **how, cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 1 and runtime_of(ours).graphs._replayed == len(many)
    assert "no CUDA graphs" not in capsys.readouterr().out


def test_many_short_documents_have_a_graph_for_their_lengths(recording: None, capsys: Any) -> None:
    many = [1] * 17 + [31]
    steps = rows([many] * 3 + [[*reversed(many)]] * 2)
    ours, eager = make("falcon_h1"), make("falcon_h1", cuda_graphs="off")
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 2 and runtime_of(ours).graphs._replayed == 3
    assert capsys.readouterr().out.count("no CUDA graphs for batches whose documents") == 1


def test_documents_that_continue_others_run_eagerly(recording: None) -> None:
    documents = Documents.of([7, 9, 12, 20], [None, 0, 0, None])
    arguments = {name: x.to(DEVICE) for name, x in documents.arguments().items()}
    given = {**batch(0, documents=[48]), **arguments, "labels": None}
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


# --- mixers' own graphs of autograd, which short rows may keep -------------------------------

RATES = Rates(680e12, 47e9, 3e12, AttentionRates(665e12, 610e12))
KEPT = Keep(frozenset({"x", "o", "graph"}))


def keeping(model: Any, keep: Keep = KEPT, graphed: bool = False) -> Any:
    """Has every layer keep this, whatever would be chosen."""
    runtime = runtime_of(model)
    runtime.adopted = Adopted(tokens=2**20, graphed=graphed)
    runtime.store.reserve((keep,), 0)
    return model


def calls_of(model: Any, monkeypatch: Any) -> list[bool]:
    """Notes for each call of a mixer whether it has a graph."""
    seen: list[bool] = []
    theirs = ModelsMixer.__call__

    def counted(self: Any, *given: Any, **how: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        return theirs(self, *given, **how)

    monkeypatch.setattr(ModelsMixer, "__call__", counted)
    return seen


@pytest.mark.parametrize(
    ("family", "peft"), [*((name, None) for name in MIXERS), *ADAPTERS.items()]
)
@pytest.mark.usefixtures("repeatable")
def test_a_kept_graph_changes_no_bit(family: str, peft: Any, monkeypatch: Any) -> None:
    how = dict(lora=peft is not None, peft=peft) if peft else {}
    steps = rows([[20, 27, 1], [48], [16, 16, 16]])
    usual, kept = make(family, **how), keeping(make(family, **how))
    expected = trained(usual, steps)
    seen = calls_of(kept, monkeypatch)
    assert_same(trained(kept, steps), expected)
    assert seen and all(seen)  # in forward, and not again
    assert runtime_of(kept).store.tensors_on_gpu() == []


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "falcon_h1", "lfm2"])
def test_a_kept_graph_is_recorded(family: str, recording: None) -> None:
    ours, eager = keeping(make(family), graphed=True), make(family, cuda_graphs="off")
    assert_same(trained(ours, rows()), trained(eager, rows()))
    assert runtime_of(ours).graphs._replayed == 7


@pytest.mark.usefixtures("repeatable")
def test_states_that_go_on_are_not_kept_in_graphs(monkeypatch: Any) -> None:
    """A segment whose state another begins with would need all graphs at once."""
    monkeypatch.setattr(cutting, "SEGMENT_TOKENS", 16)
    model, usual = keeping(make("qwen3_5_text")), make("qwen3_5_text")
    expected = trained(usual, rows([[48]]))
    seen = calls_of(model, monkeypatch)
    assert_same(trained(model, rows([[48]])), expected)
    assert seen.count(True) == seen.count(False)


class Held:
    """A tensor that a graph saves."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def test_no_graph_of_autograd_outlives_its_backward() -> None:
    """Mamba 2's layers leave nothing. (transformers' delta rule in torch leaves four tensors, in
    vanilla, too.)"""
    model = keeping(make("granitemoehybrid"))
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(x: Any) -> Held:
        held.add(saved := Held(x))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = model(**batch(0, documents=[48])).loss
    usual = len(held)
    loss.backward()
    del loss
    gc.collect()
    assert usual > 50 and not held


def test_only_short_layers_that_are_recorded_may_keep_it() -> None:
    sizes = runtime_of(make("qwen3_5_text")).sizes(make("qwen3_5_text"))
    for tokens, there in ((4096, True), (16384, True), (16385, False)):
        tables = StepTable.of(sizes, Batch(tokens, tokens))
        mixers = [layer for layer in tables.kinds if "q k v" not in layer.by_name]
        assert [("graph" in layer.by_name) for layer in mixers] == [there]
        for recorded in (False, True):
            best = sets(tables.kinds, RATES, recorded=recorded)[-1]
            assert any("graph" in kept for kept in best) == (recorded and there)
            words = [asked("all", layer, recorded=recorded) for layer in mixers]
            assert ["graph" in kept for kept in words] == [recorded and there]
