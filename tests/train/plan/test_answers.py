"""Plans of rows that are a prompt with two answers."""

from __future__ import annotations

import numpy as np
import pytest

from longctx.cost.named import machine_named
from longctx.errors import UserError
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.report.plan_run import with_answers
from longctx.train.report.predicted import equal_tokens
from longctx.train.start.loading import load_config

HOST = 110 << 30


@pytest.fixture(scope="module")
def subject() -> Subject:
    args = ModelArguments(preset="llama-3.1-8b", seq_len=8192)
    return Subject(load_config(args, vocab_size=1), args)


def run(tokens: int = 131072, **more) -> PlannedRun:
    model = ModelArguments(preset="llama-3.1-8b", seq_len=tokens)
    return PlannedRun(model=model, **more)


@pytest.mark.parametrize(("tokens", "answer"), [(131072, 1024), (4096, 1000), (300, 1)])
def test_attention_counts_by_the_area_of_a_row(tokens: int, answer: int) -> None:
    prompt = tokens - 2 * answer
    after = np.arange(prompt, prompt + answer)
    positions = np.concatenate([np.arange(prompt), after, after])
    found = with_answers(run(tokens, task="dpo"), answer).document_tokens
    assert found == pytest.approx(equal_tokens(positions), abs=1)


def test_the_loss_costs_its_answers_and_lm_head_stays(subject: Subject) -> None:
    machine = machine_named("h200")
    plain = plan(subject, run(), machine, HOST)
    pairs = plan(subject, with_answers(run(task="dpo"), 1024), machine, HOST)
    head = 2 * 4096 * 128256 * 131072  # FLOPs of one product with lm_head
    spared = 3 * head - 4 * head * 2048 / 131072
    rate = machine.rates("fa4", 131072, 128).flops
    found = plain.seconds.products - pairs.seconds.products
    assert found == pytest.approx(spared / rate, rel=0.02)
    for task, stays in (("dpo", True), ("sft", False)):
        found = plan(subject, run(8192, place="host", task=task), machine, HOST).decision
        names = [spec.name for spec in found.specs]
        here = dict(zip(names, (place.weight for place in found.places), strict=True))
        assert here["lm_head"] == stays and not here["layer 31"]


def test_answers_that_cannot_be_are_one_line() -> None:
    with pytest.raises(UserError, match="of --task sft and distill there are none"):
        with_answers(run(), 1024)
    with pytest.raises(UserError, match="two of them leave no prompt in --seq_len 4096"):
        with_answers(run(4096, task="dpo"), 2048)
