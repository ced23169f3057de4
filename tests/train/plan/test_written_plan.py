"""`train.py --plan`: a file of `longctx plan --json`, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import tiny_config

from longctx.constants import GIB
from longctx.cost.machines import MACHINES
from longctx.errors import UserError
from longctx.memory.decide import decide_as_given
from longctx.memory.place import Place
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.step import step_of
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.plan.written_plan import Given, plan_as_json, read_given

SUBJECT = Subject(tiny_config(num_hidden_layers=4))


def run(**options) -> PlannedRun:
    return PlannedRun(model=ModelArguments(preset="tiny", seq_len=512)).having(**options)


def planned(**options) -> Plan:
    return plan(SUBJECT, run(**options), MACHINES["rtx-4090"], 16 * GIB)


def file_of(found: Plan, path: Path, **changes) -> Path:
    text = {"fits": found.fits, "problem": found.problem, "plan": plan_as_json(found) | changes}
    path.write_text(json.dumps(text))
    return path


def given(folder: Path, **options) -> Given:
    return read_given(file_of(planned(**options), folder / "plan.json"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"place": "host", "offload_activations": "all"},
        {"keep": "qkv"},
        {"task": "dpo"},
        {"class_type": "vanilla", "place": "host"},
        {"class_type": "vanilla", "task": "dpo"},
        {"class_type": "liger", "gradient_accumulation_steps": 2},
    ],
)
def test_what_was_decided_is_read_again(tmp_path, options) -> None:
    found, decision = given(tmp_path, **options), planned(**options).decision
    assert (found.budget, found.ladder) == (decision.budget, decision.kept.ladder)
    assert found.places == decision.places
    found.check(run(**options), SUBJECT.sizes(run(**options)))
    assert found.places_of(decision.specs) == decision.places
    away = Place(weight=False, states=False, grad=False)
    for places in (found.places[1:], [*found.places[:-1], away]):  # norms never leave
        with pytest.raises(UserError, match="places blocks as this version of longctx does not"):
            replace(found, places=places).places_of(decision.specs)


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_layers_run_as_graphs_where_the_plan_says_so(tmp_path, asked) -> None:
    found = planned(cuda_graphs=asked)
    held = found.decision.chosen.graph_bytes
    assert bool(held) == (asked == "auto")
    read = read_given(file_of(found, tmp_path / "plan.json"))
    for graphs in (True, False):  # as this run may have them
        step = read.step(
            replace(step_of(SUBJECT, run(), MACHINES["rtx-4090"], found.backend), graphs=graphs)
        )
        specs, places = found.decision.specs, read.places
        again = decide_as_given(specs, read.budget, accumulates=False, step=step, places=places)
        assert again.chosen.graph_bytes == held * graphs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seq_len": 1024}, "a run with --seq_len 512, and this one has --seq_len 1024"),
        ({"keep": "o"}, "--keep auto, and this one has --keep o"),
        ({"gpu_memory_gib": 8.0}, "no --gpu_memory_gib, and this one has --gpu_memory_gib 8"),
        ({"gradient_accumulation_steps": 2}, "--gradient_accumulation_steps 1, and this one has"),
        ({"class_type": "liger"}, "--class_type custom, and this one has --class_type liger"),
    ],
)
def test_another_run_is_refused(tmp_path, options, says) -> None:
    with pytest.raises(UserError, match=says):
        given(tmp_path).check(run(**options), SUBJECT.sizes(run()))


def test_another_model_is_refused(tmp_path) -> None:
    other = Subject(tiny_config(num_hidden_layers=3)).sizes(run())
    with pytest.raises(UserError, match="a model with layers 4, and this one's is 3: plan again"):
        given(tmp_path).check(run(), other)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no plan: write one with longctx plan --json"),
        ("[1]", "is no plan"),
        ('{"fits": true, "plan": []}', "is no plan"),
        ('{"fits": false, "problem": "too large"}', "does not fit its machine: too large"),
        ('{"fits": true}', "a run with torch's AdamW, whose states nobody places"),
        ('{"fits": true, "plan": {"format": 0}}', "written by another version"),
        ('{"fits": true, "plan": {"format": 3, "budget_bytes": [1]}}', "is no plan"),
    ],
)
def test_what_is_no_plan(tmp_path, text, says) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_given(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": [[["x", "o"]]]},
        {"layers": [[["x", "o"], ["h"]]]},
        {"layers": [["x", None]]},
        {"budget_bytes": [1e999, 1]},
        {"blocks_on_gpu": [["weights"]]},
        {"blocks_on_gpu": ["weight"]},
        {"budget_bytes": ["many", 1]},
        {"run": {}},
        {"model": {"layers": "four"}},
        {"budget_bytes": [-1, 1]},
        {"budget_bytes": [10**30, 1]},
        {"budget_bytes": [True, 1]},
        {"cut": [-1, 1, 1]},
        {"cut": [512, 0, 1]},
        {"cut": [512, 1, "1"]},
        {"cut": [512, 1.5, 1]},
    ],
)
def test_a_damaged_plan(tmp_path, changes) -> None:
    with pytest.raises(UserError, match="is no plan"):
        read_given(file_of(planned(), tmp_path / "plan.json", **changes))


def test_a_plan_that_keeps_other_layers(tmp_path) -> None:
    found = read_given(file_of(planned(), tmp_path / "plan.json", layers=[[["x", "o"], []]]))
    with pytest.raises(UserError, match="keeps 1 of 4 layers"):
        found.check(run(), SUBJECT.sizes(run()))


@pytest.mark.parametrize(
    ("kept", "named"),
    [(["x", "y"], "y"), (["o"], "x"), (["x", "o", "down"], "down")],  # no norm reads a Llama's
    ids=["unknown", "without-x", "of-another-family"],
)
def test_a_plan_that_keeps_other_activations(tmp_path, kept, named) -> None:
    found = read_given(file_of(planned(), tmp_path / "plan.json", layers=[[kept, []]] * 4))
    with pytest.raises(UserError, match=rf"can or must \({named}\): plan again"):
        found.check(run(), SUBJECT.sizes(run()))


def test_a_plan_of_an_older_version_is_read(tmp_path) -> None:
    """Its layers were of one kind, whose dimensions stood with the model's."""
    found = planned()
    new = plan_as_json(found)
    old = dict(format=3, model=new["model"] | new["kinds"][0], kinds=None, kind_of_layer=None)
    old["run"] = {name: x for name, x in new["run"].items() if name not in ("use_dora", "parts")}
    read = read_given(file_of(found, tmp_path / "plan.json", **old))
    assert (read.ladder, read.places) == (found.decision.kept.ladder, found.decision.places)
    read.check(run(), SUBJECT.sizes(run()))
    wider = Subject(tiny_config(num_hidden_layers=4, intermediate_size=128)).sizes(run())
    with pytest.raises(UserError, match=r"intermediate \d+ in layer 0, and this one's is 128"):
        read.check(run(), wider)


def test_a_plan_from_before_single_parts_is_of_the_schedule(tmp_path) -> None:
    found = planned()
    earlier = {name: x for name, x in plan_as_json(found)["run"].items() if name != "parts"}
    read = read_given(file_of(found, tmp_path / "plan.json", run=earlier))
    read.check(run(), SUBJECT.sizes(run()))
    with pytest.raises(UserError, match="no --parts, and this one has --parts"):
        read.check(run(parts=["rope"]), SUBJECT.sizes(run()))


def test_a_plan_of_layers_of_several_kinds(tmp_path) -> None:
    windows = dict(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    config = tiny_config("qwen2", num_hidden_layers=4, **windows)
    found = plan(Subject(config), run(), MACHINES["rtx-4090"], 16 * GIB)
    read = read_given(file_of(found, tmp_path / "plan.json"))
    read.check(run(), found.sizes)
    assert [kind["window"] for kind in read.kinds] == [None, 64] and read.of_layer == [0, 0, 1, 1]
    shorter = Subject(tiny_config("qwen2", num_hidden_layers=4, **windows | {"sliding_window": 32}))
    with pytest.raises(UserError, match="a model with window 64 in layer 2, and this one's is 32"):
        read.check(run(), shorter.sizes(run()))
    for damaged in ([0, 0, 1], [0, 0, 1, 2], [0, 0, 1, -1], "0011"):
        with pytest.raises(UserError, match="is no plan"):
            read_given(file_of(found, tmp_path / "plan.json", kind_of_layer=damaged))


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(UserError, match="--plan: cannot read .*No such file"):
        read_given(tmp_path / "plan.json")
