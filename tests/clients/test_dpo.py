"""TRL's DPOTrainer on a patched model: two passes a step, of the model and of its reference."""

from __future__ import annotations

import copy
import functools
from typing import Any

import datasets
import pytest
import torch
from both import arguments, assert_same_run, make_model, sentence, trained
from small_tokenizer import small_tokenizer

import longctx
from longctx.calls import shared_prefixes
from longctx.runtime.runtime import runtime_of

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")


def pairs(rows: int) -> datasets.Dataset:
    columns = {"prompt": 0, "chosen": 3, "rejected": 5}
    return datasets.Dataset.from_list(
        [{name: " " + sentence(n + k) for name, k in columns.items()} for n in range(rows)]
    )


def make_trainer(model: Any, folder: Any, ref_model: Any = None, **more: Any) -> Any:
    settings = {k: more.pop(k) for k in [*more] if k != "peft_config"}
    return trl.DPOTrainer(
        model,
        ref_model=ref_model,
        args=trl.DPOConfig(**arguments(folder, **settings)),
        train_dataset=pairs(12),
        eval_dataset=pairs(4),
        processing_class=small_tokenizer(),
        **more,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss_type": ["ipo", "sft"]}, {"use_weighting": True}],
    ids=lambda settings: next(iter(settings), "sigmoid"),
)
def test_reference_given(scheduled, capsys, tmp_path, settings) -> None:
    """Patched, too: it runs the schedule without gradients."""

    def make(model: Any) -> Any:
        reference = copy.deepcopy(model)
        assert (runtime_of(reference) is None) == (runtime_of(model) is None)
        return make_trainer(model, tmp_path, reference, eval_strategy="epoch", **settings)

    numbers = assert_same_run(trained(make), scheduled, capsys, passes=2 * (3 + 1))
    assert {"rewards/margins", "eval_rewards/accuracies"} <= numbers.keys()


def test_reference_of_its_own(scheduled, capsys, tmp_path) -> None:
    """DPOTrainer loads it from where the model came from; the first step finds and patches it."""
    make_model().save_pretrained(tmp_path / "model")
    model = type(make_model()).from_pretrained(tmp_path / "model")
    trainers: list[Any] = []

    def make(model: Any) -> Any:
        trainers.append(make_trainer(model, tmp_path))
        return trainers[-1]

    assert_same_run(trained(make), scheduled, capsys, passes=6, model=model)
    theirs, ours = (runtime_of(trainer.ref_model.model) for trainer in trainers)
    assert theirs is None and ours is not None


def test_adapters(scheduled, capsys, tmp_path) -> None:
    peft = pytest.importorskip("peft")

    def make(model: Any) -> Any:
        torch.manual_seed(3)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        return make_trainer(model, tmp_path, peft_config=adapters)

    # The reference is the same model with its adapters disabled.
    assert_same_run(trained(make), scheduled, capsys, passes=6)


def test_a_prompt_is_computed_once(scheduled, capsys, tmp_path, monkeypatch) -> None:
    """For both answers, of the model and of its reference."""
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2)
    computed: dict[bool, int] = {}
    found = shared_prefixes.found

    def count(*args: Any, **how: Any) -> Any:
        sharing = found(*args, **how)
        if sharing is not None:
            computed[True] = computed.get(True, 0) + len(sharing.kept)
            computed[False] = computed.get(False, 0) + len(sharing.source)
        return sharing

    monkeypatch.setattr("longctx.forwards.computed_tokens.found_prefixes", count)

    def make(model: Any) -> Any:
        return make_trainer(model, tmp_path, copy.deepcopy(model))

    patch = functools.partial(longctx.patch, share_prefixes=True)
    assert_same_run(trained(make), scheduled, capsys, passes=6, patch=patch)
    assert 0 < computed[True] < 0.8 * computed[False]


def test_unpatched_after_training(scheduled, capsys, tmp_path) -> None:
    """TRL's forward stays around ours, which is gone."""
    model = longctx.patch(make_model())
    trainer = make_trainer(model, tmp_path, copy.deepcopy(model), max_steps=1)
    trainer.train()
    scheduled.clear()
    longctx.unpatch(model)
    ids = torch.arange(3, 20)[None]
    truth = type(model).forward(model, input_ids=ids, labels=ids).loss
    assert torch.equal(model(input_ids=ids, labels=ids).loss, truth) and scheduled == []
