"""Plans in which only the lowest of every k layers keeps its input: where, and as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from longctx.constants import GIB
from longctx.cost.kept import Keep, describe, run_again
from longctx.cost.machines import MACHINES
from longctx.errors import UserError
from longctx.memory.decide import decide_as_given
from longctx.memory.ladder import predicted
from longctx.train.engines.layout import FullyShard
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.step import step_of
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.plan.written_plan import plan_as_json, read_given
from longctx.train.start.loading import load_config

MODEL = ModelArguments(preset="llama-3.1-8b", seq_len=131072, lora_r=16)
CARD = MACHINES["rtx-4090"]


@cache
def adapted() -> Subject:
    return Subject(load_config(MODEL, vocab_size=1), MODEL)


def planned(host_gib: int, tokens: int = 131072, again: bool = True, **options) -> Plan:
    """Llama-3.1-8B with adapters on 24 GB."""
    run = PlannedRun(model=MODEL).having(seq_len=tokens, **options)
    having = None if again else (lambda step: replace(step, again=False))
    return plan(adapted(), run, CARD, host_gib * GIB, having)


def runs_again(found: Plan) -> bool:
    return any(run_again(found.decision.kept.ladder))


def test_a_host_of_32_gib() -> None:
    """Its plan fits only so; a row nearly twice as long as the longest without fits too."""
    assert not planned(32, again=False).fits and planned(32, 122880, again=False).fits
    for tokens in (131072, 229376):
        found = planned(32, tokens)
        assert found.fits and runs_again(found)
        assert found.gpu_bytes <= found.gpu_limit and found.host_bytes <= 32 * GIB
    assert not planned(32, 262144).fits


def test_where_it_is_faster_though_each_input_has_room() -> None:
    less, found = planned(64, 196608, again=False), planned(64, 196608)
    assert less.fits and found.fits and runs_again(found)
    assert 0.94 < found.step_s / less.step_s < 1


def test_a_large_host_has_no_use_for_it() -> None:
    for tokens in (8192, 131072, 229376):
        found = planned(512, tokens)
        assert found.decision.kept == planned(512, tokens, again=False).decision.kept
        assert not runs_again(found)


def test_weights_on_the_host_come_up_once_more() -> None:
    """In the count: the link is busy for longer."""
    found = planned(64, 196608, place="host")
    assert runs_again(found)
    ladder, chosen = found.decision.kept.ladder, found.decision.chosen
    of_layer = adapted().parameters.layer_words[0] * 2
    bare = [not keep.kept for keep in ladder]
    again = sum(a or b for a, b in zip(run_again(ladder), bare, strict=True))
    step = step_of(adapted(), found.run, CARD, found.backend)
    copies = chosen.traffic.backward
    fewer = copies._replace(up=copies.up - again * of_layer)
    once = replace(chosen, traffic=replace(chosen.traffic, backward=fewer))
    more_s = predicted(step, chosen).link - predicted(step, once).link
    assert more_s == pytest.approx(again * of_layer / CARD.link_bytes, rel=0.02)


def test_engines_and_ranks_that_share_rows_keep_every_input() -> None:
    for options in (
        dict(engine=FullyShard(processes=2), gpus=2),
        dict(engine=FullyShard(processes=2), gpus=2, sequence_parallel_size=2),
        dict(keep="x"),
    ):
        found = planned(32, **options)
        assert not any(run_again(found.decision.kept.ladder))


def test_a_line_says_what_is_kept() -> None:
    x, o = frozenset({"x"}), frozenset({"x", "o"})
    nothing, host = Keep(frozenset()), Keep(x, x)
    ladder = (*3 * (host, nothing, nothing), host, nothing, host, Keep(o))
    assert describe(ladder) == (
        "kept for backward: layers 0 to 8: x on the host, one layer in 3; "
        "layers 9 to 10: x on the host, one layer in 2; layer 11: x on the host; "
        "layer 12: x o on the GPU"
    )
    assert "layers 0 to 8: x, one layer in 3" in describe(ladder, on_gpu=False)


# --- as a file ---------------------------------------------------------------------------------


def file_of(found: Plan, path: Path, **changes) -> Path:
    text = {"fits": found.fits, "problem": found.problem, "plan": plan_as_json(found) | changes}
    path.write_text(json.dumps(text))
    return path


def test_a_plan_comes_back_from_its_file(tmp_path) -> None:
    found = planned(32)
    read = read_given(file_of(found, tmp_path / "plan.json"))
    assert read.ladder == found.decision.kept.ladder
    read.check(found.run, found.sizes)
    step = read.step(step_of(adapted(), found.run, CARD, found.backend))
    specs = found.decision.specs
    again = decide_as_given(specs, read.budget, accumulates=False, step=step, places=read.places)
    assert again.kept == found.decision.kept and again.host.nbytes == found.decision.host.nbytes
    assert again.gpu_problem() is None and again.host_problem() is None


def test_the_first_layer_has_none_below_it(tmp_path) -> None:
    found = planned(32)
    layers = [[[], []], *plan_as_json(found)["layers"][1:]]
    read = read_given(file_of(found, tmp_path / "plan.json", layers=layers))
    with pytest.raises(UserError, match=r"other activations than layers of this model.*\(x\)"):
        read.check(found.run, found.sizes)
