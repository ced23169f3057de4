"""A sample of text is what the model finds most likely, for every family, and changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from small_families import family_config
from transformers import AutoModelForCausalLM

import longctx
from longctx.constants import IGNORE_INDEX
from longctx.train.report import sample as sampling
from longctx.train.report.sample import prompt_of, sample

pytestmark = pytest.mark.usefixtures("reference_kernels")
TOKENS = 3


def row(lengths: list[int], untrained: int = 1) -> dict[str, list[int]]:
    """Documents of these lengths, of whose tokens the first are not trained."""
    ids = [*range(1, sum(lengths) + 1)]
    positions = [p for n in lengths for p in range(n)]
    labels = [IGNORE_INDEX if p < untrained else i for p, i in zip(positions, ids, strict=True)]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize(
    ("found", "tokens"),
    [
        (row([200, 8]), 48),  # text: its beginning
        (row([20, 8]), 10),  # half of a short one
        (row([100], untrained=70), 70),  # a question before its answer
        (row([600], untrained=400), 48),  # a long one: the beginning
        (row([30], untrained=30), 15),  # nothing is trained
        (row([1, 5]), 0),
    ],
)
def test_what_a_sample_begins_with(found, tokens) -> None:
    assert prompt_of(found) == [*range(1, tokens + 1)]


class Words:
    eos_token_id = None

    def decode(self, ids: list[int], **more: bool) -> str:
        return " ".join(map(str, ids))


def trainer_of(model, **changed) -> SimpleNamespace:
    found = dict(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(task="sft", device=torch.device("cpu")),
        engine=SimpleNamespace(shards_states=False),
        model=model,
        processing_class=Words(),
        shards=None,
    )
    return SimpleNamespace(**found | changed)


def greedy(model, ids: list[int]) -> str:
    for _ in range(TOKENS):
        ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return " ".join(map(str, ids[-TOKENS:]))


@pytest.fixture
def three_tokens(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "TOKENS", TOKENS)


ROWS = Dataset.from_list([row([40])])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "granite", "cohere2", "phi3"])
def test_a_sample_is_the_models_most_likely_text(family, three_tokens) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).train()
    expected = greedy(model.eval(), prompt_of(ROWS[0]))
    longctx.patch(model.train())
    before = torch.get_rng_state()
    found = sample(trainer_of(model), ROWS)
    assert found is not None and found.continued == expected
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_where_there_is_no_sample(three_tokens, monkeypatch) -> None:
    model = AutoModelForCausalLM.from_config(family_config("llama"))
    assert sample(trainer_of(model), ROWS) is not None
    device = torch.device("cpu")
    without = (
        dict(args=SimpleNamespace(task="dpo", device=device)),
        dict(engine=SimpleNamespace(shards_states=True)),
        dict(processing_class=None),
        dict(shards=object()),
        dict(args=SimpleNamespace(task="sft", device=torch.device("cuda"))),  # it is on the host
    )
    assert [sample(trainer_of(model, **changed), ROWS) for changed in without] == [None] * 5
    assert sample(trainer_of(model), ROWS.to_iterable_dataset()) is None
    monkeypatch.setattr(sampling, "CPU_FLOPS", 1)
    assert sample(trainer_of(model), ROWS) is None
