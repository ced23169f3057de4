"""CUDA graphs of the layers: the bits of eager passes, over whatever changes between two batches.

Without a GPU a recording is made again at each replay (tests/small_graphs.py).
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_graphs import (
    GPU,
    MadeAgain,
    assert_same,
    batch,
    compute_by,
    count,
    make,
    recorded_with,
    runtime_of,
    step,
    trained,
)
from torch import Tensor, nn

import longctx
from exactness import DEVICE
from longctx.attention import copied
from longctx.attention.backends import FlashOnCpu
from longctx.attention.documents import Documents
from longctx.cost.fitted import GRAPHED_TOKENS
from longctx.cost.seconds import NO_TRAFFIC
from longctx.memory.ladder import Budget, Chosen
from longctx.runtime import graphs

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: Any) -> Iterator[None]:
    with recorded_with(monkeypatch, MadeAgain):
        yield


EITHER_WAY = ["llama", "gemma3_text"]
ALL_WEIGHTS = [*EITHER_WAY, "cohere2", "phi3", "qwen3_5_text-attention"]
ADAPTERS = [*EITHER_WAY, "qwen3", "granite", "qwen3_5_text-attention"]


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((name, False) for name in ALL_WEIGHTS), *((name, True) for name in ADAPTERS)],
)
def test_bits_are_those_of_eager_passes(family: str, lora: bool) -> None:
    rows = [batch(i) for i in range(5)]
    ours, eager = make(family, lora), make(family, lora, cuda_graphs="off")
    assert_same(trained(ours, rows), trained(eager, rows))
    assert count(ours) >= 1 and not count(eager)


def test_it_says_so_once(capsys: Any) -> None:
    model = make()
    trained(model, [batch(i) for i in range(6)])
    lines = capsys.readouterr().out.splitlines()
    assert sum("CUDA graphs" in line for line in lines) == 1


def test_gradients_that_add_up_and_are_kept() -> None:
    ours, eager = make(), make(cuda_graphs="off")
    for model in (ours, eager):
        trained(model, [batch(i) for i in range(3)])
    assert count(ours) == 1
    sums: list[list[Tensor]] = []
    for model in (ours, eager):
        kept = []
        for i in range(3):
            (model(**batch(i)).loss / 3).backward()
            kept.append(model.model.layers[0].mlp.up_proj.weight.grad)
            if i == 0:
                model.model.layers[0].mlp.up_proj.weight.grad = None
        sums.append([*kept, *(p.grad for p in model.parameters())])
    assert_same(sums[:1], sums[1:])


def test_evaluation_and_other_batches_in_between() -> None:
    ours, eager = make(), make(cuda_graphs="off")
    found: list[list[list[Tensor]]] = []
    for model in (ours, eager):
        seen = trained(model, [batch(0, rows=2), *(batch(i) for i in range(3))])
        with torch.no_grad():
            seen.append([model(**batch(4)).loss, model(**batch(2)).logits])
        seen += trained(model, [batch(0, rows=2), batch(1), batch(5, documents=[17, 4]), batch(2)])
        seen += trained(model, [batch(i, rows=2) for i in range(4)])
        found.append(seen)
    assert_same(*found)
    assert count(ours) == 2


def test_more_documents_than_there_is_room_for() -> None:
    rows = [[48], [48], [48], *([2] * 24 for _ in range(4)), [24, 24], [48]]
    ours, eager = make(), make(cuda_graphs="off")
    steps = [batch(i, documents=lengths) for i, lengths in enumerate(rows)]
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 1


PAIRS = ([7, 9, 12, 20], [11, 9, 9, 19], [3, 20, 5, 20], [20, 1, 12, 15])
"""Tokens of a prompt, its two answers, and padding."""


def pair(i: int, lengths: list[int] | None = None) -> dict[str, Any]:
    lengths = PAIRS[i % len(PAIRS)] if lengths is None else lengths
    documents = Documents.of(lengths, [None, 0, 0, None], device=DEVICE)
    given = batch(i, documents=[sum(lengths)])
    begins = documents.cu_seqlens[:-1].long()
    given["labels"] = given["labels"].index_fill(1, begins, -100)
    return {**given, **documents.arguments()}


@pytest.mark.parametrize("lora", [False, True])
def test_documents_that_continue_others(lora: bool) -> None:
    """One graph serves pairs whose prompts and answers have other lengths each time."""
    ours, eager = make(lora=lora), make(lora=lora, cuda_graphs="off")
    steps = [pair(i) for i in range(7)]
    assert_same(trained(ours, steps), trained(eager, steps))
    assert count(ours) == 1


def test_prompts_of_another_size() -> None:
    """A graph with room for more copies serves fewer. Three answers have one place more."""
    ours, eager = make(), make(cuda_graphs="off")
    of_three = Documents.of([12, 12, 12, 12], [None, 0, 0, 0], device=DEVICE)
    steps = [pair(3), pair(3), pair(0), pair(0), batch(0), batch(0)]
    steps += 2 * [{**batch(5, documents=[48]), **of_three.arguments(), "labels": None}]
    found = [[ours(**x).logits.detach()] for x in steps]
    assert_same(found, [[eager(**x).logits.detach()] for x in steps])
    assert count(ours) == 3


@pytest.mark.parametrize("more", ["copies", "documents"])
def test_the_only_graph_is_replaced_by_one_with_more_room(more: str) -> None:
    """Which needs a memory pool of its own: torch takes none that nothing uses any more."""
    few, many = pair(0), pair(3, [30, 4, 5, 9])
    if more == "documents":
        few, many = (batch(i, documents=[48 // n] * n) for i, n in enumerate((4, 24)))
    ours, eager = make(), make(cuda_graphs="off")
    steps = [few, few, many, many, few]
    assert_same(trained(ours, steps), trained(eager, steps))
    found = runtime_of(ours).graphs
    assert len(found) == 1 and found._recorded == 2 and not found.given_up


def test_a_graph_keeps_the_room_of_the_one_that_it_replaces() -> None:
    """Else one for many documents and one for many copies would replace each other for ever."""
    parents = [None, 0, 0] + [None] * 18
    many = Documents.of([4, 2, 2, *[2] * 18, 4], [*parents, None], device=DEVICE)
    given = {**batch(5, documents=[48]), **many.arguments(), "labels": None}
    ours, eager = make(), make(cuda_graphs="off")
    steps = 2 * [pair(3, [30, 4, 5, 9])] + 2 * [given] + [pair(0), given, pair(3, [30, 4, 5, 9])]
    found = [[ours(**x).logits.detach()] for x in steps]
    assert_same(found, [[eager(**x).logits.detach()] for x in steps])
    assert len(runtime_of(ours).graphs) == 1 and runtime_of(ours).graphs._recorded == 2


def test_prompts_whose_keys_are_not_copied_are_eager(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(copied, "MOST_BYTES", 0)
    ours, eager = make(), make(cuda_graphs="off")
    if not GPU:
        for model in (ours, eager):
            compute_by(model, FlashOnCpu())
    assert_same(trained(ours, [pair(0)] * 3), trained(eager, [pair(0)] * 3))
    assert count(ours) == 0
    assert capsys.readouterr().out.count("no CUDA graphs for batches in which copies") == 1


def test_two_batches_before_a_backward() -> None:
    """The second one runs eagerly, since graphs have room for one."""
    found = []
    for model in (make(), make(cuda_graphs="off")):
        trained(model, [batch(i) for i in range(3)])
        first, second = model(**batch(0)).loss, model(**batch(1)).loss
        (first - second).backward()
        found.append([first, second, *(p.grad for p in model.parameters())])
    assert_same(found[:1], found[1:])


def test_outputs_are_nobody_elses() -> None:
    model = make()
    trained(model, [batch(i) for i in range(3)])
    hidden = model.model(**{k: v for k, v in batch(0).items() if k != "labels"}).last_hidden_state
    before = hidden.detach().clone()
    loss = hidden.float().square().sum()
    loss.backward()
    kept = [p.grad for p in model.model.parameters()]
    values = [x.clone() for x in kept]
    model.zero_grad()
    trained(model, [batch(i) for i in range(2)])
    assert torch.equal(hidden, before) and all(map(torch.equal, kept, values))
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_weights_that_are_written_before_backward() -> None:
    for options in ({}, {"cuda_graphs": "off"}):
        model = make(**options)
        trained(model, [batch(i) for i in range(3)])
        loss = model(**batch(0)).loss
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _replace_weight(model: Any) -> None:
    up = model.model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(up.weight.detach() * 2)


def _replace_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def _freeze(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)


def _thaw(model: Any) -> None:
    model.model.layers[1].requires_grad_(True)


def _train_the_first_only(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)


def _shift_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)


def _hook_inside(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0] * 0.5, output[1]))


def _load(model: Any) -> None:
    model.load_state_dict({name: x * 1.25 for name, x in model.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        _replace_weight,
        _replace_data,
        _freeze,
        _thaw,
        _train_the_first_only,
        _shift_rope,
        _hook,
        _hook_inside,
        _load,
    ],
)
def test_a_model_that_changes(change: Any) -> None:
    found = []
    for options in ({}, {"cuda_graphs": "off"}):
        model = make(**options)
        model.model.layers[1].requires_grad_(change is not _thaw)
        seen = trained(model, [batch(i) for i in range(3)])
        change(model)
        found.append(seen + trained(model, [batch(i) for i in range(4)]))
    assert_same(*found)


def test_adapters_that_change() -> None:
    found = []
    for options in ({}, {"cuda_graphs": "off"}):
        model = make(lora=True, **options)
        seen = trained(model, [batch(i) for i in range(3)])
        for module in model.modules():
            if "lora_A" in module._modules:
                module.scaling["default"] = 0.25
        seen += trained(model, [batch(i) for i in range(3)])
        with model.disable_adapter():
            seen += [[model(**batch(1)).loss.detach()]]
        seen += trained(model, [batch(i) for i in range(3)])
        found.append(seen)
    assert_same(*found)


def test_dropout_of_adapters_is_eager(capsys: Any) -> None:
    model = make(lora=True, peft={"lora_dropout": 0.3})
    trained(model, [batch(i) for i in range(4)])
    assert not count(model)
    assert capsys.readouterr().out.count("no CUDA graphs: dropout") == 1


def chosen(model: Any, no_graphs: str) -> Chosen:
    given: Any = dict(ladder=(), places=[], traffic=NO_TRAFFIC, needed=Budget(0, 0), seconds=1.0)
    return Chosen(sizes=runtime_of(model).sizes(model), no_graphs=no_graphs, **given)


def test_it_says_once_why_layers_run_eagerly(capsys: Any, monkeypatch: Any) -> None:
    model = make()
    trained(model, [batch(0)])
    runtime = runtime_of(model)
    monkeypatch.setattr(runtime.store, "device", torch.device("cuda"))
    found = []
    for moves in (False, True):
        runtime.surround(moves_weights=moves)
        for tokens in (48, 2 * GRAPHED_TOKENS):
            said = "no room" if tokens == 48 else ""  # which the search asks of short rows alone
            runtime.adopt(chosen(model, no_graphs=said), tokens)
            found.append(runtime.adopted.no_graphs)
    monkeypatch.undo()
    assert found == ["no room", "", "the engine moves each layer's weights", ""]
    runtime.adopted = replace(runtime.adopted, no_graphs="no room")
    trained(model, [batch(i) for i in range(3)])
    assert capsys.readouterr().out.count("no CUDA graphs: no room") == 1


def test_a_copy_and_a_file_have_no_graphs() -> None:
    model = make()
    trained(model, [batch(i) for i in range(3)])
    other = copy.deepcopy(model)
    assert count(other) == 0 and count(model) == 1


def test_what_changes_at_every_step_is_not_recorded_for_ever(capsys: Any) -> None:
    model = make()
    for i in range(60):
        if i % 3 == 0:
            _replace_data(model)
            model.model.layers[1].mlp.up_proj.weight.data /= 2
        step(model, batch(i))
    assert "or what memory is left, changes too often" in capsys.readouterr().out


def test_exact_states() -> None:
    found = []
    for options in ({}, {"cuda_graphs": "off"}):
        model = make(**options)
        optimizer = longctx.exact_adamw(model, lr=1e-3, tokens=48)
        seen = []
        for i in range(6):
            for part in range(2):
                (model(**batch(2 * i + part)).loss / 2).backward()
            seen.append([optimizer.clip(1.0).clone()])
            optimizer.step()
            optimizer.zero_grad()
        found.append([*seen, [p.detach().clone() for p in model.parameters()]])
        if not options:
            assert count(model) == 1
    assert_same(*found)


def test_nothing_is_left_of_graphs_that_were_dropped(monkeypatch: Any) -> None:
    """A thousand steps, recorded again fifty times, on a GPU; a few of both without one."""
    times, steps = (50, 20) if GPU else (4, 12)
    alive: weakref.WeakSet[graphs.Graph] = weakref.WeakSet()
    make_graph = graphs.Graph.__init__

    def counted(self: graphs.Graph, *args: Any) -> None:
        alive.add(self)
        make_graph(self, *args)

    monkeypatch.setattr(graphs.Graph, "__init__", counted)
    model, held = make(), []
    for _ in range(times):
        _replace_data(model)
        model.model.layers[1].mlp.up_proj.weight.data /= 2
        for i in range(steps):
            step(model, batch(i))
        assert count(model) == 1
        gc.collect()
        assert len(alive) == 1
        if GPU:
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
    assert not held or held[-1] <= held[2]
