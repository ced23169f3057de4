"""Every task of train.py against TRL's trainer of it: losses, metrics and final weights."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from both import arguments, logged, make_model
from small_run import run
from small_task import PAIRS, RATE, as_dataset, flags, pairs, rated, written
from small_tokenizer import small_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("reference_kernels")]
REWARDS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins")
LOGPS = ("logps/chosen", "logps/rejected")


def by_trl(trainer_class: Any, config: Any, model: Any, records: list[Any], **more: Any) -> Any:
    trainer = trainer_class(
        model,
        args=config,
        train_dataset=as_dataset(records),
        processing_class=small_tokenizer(),
        **more,
    )
    trainer.train()
    return logged(trainer), trainer.model


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    same = dict(lr_scheduler_type="constant", weight_decay=0.0, max_length=None)
    batch = dict(per_device_train_batch_size=PAIRS, learning_rate=RATE)
    return arguments(folder, **{**batch, **same, **more})


def small_model() -> Any:
    return make_model(max_position_embeddings=4096)


def assert_same(ours: list[dict[str, float]], theirs: Any, names: Any) -> None:
    for name in names:
        found = [line[name] for line in ours]
        assert found == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def assert_same_weights(
    folder: Path, model: Any, start: Any = None, kind: Any = AutoModelForCausalLM
) -> None:
    start = dict((start or small_model()).named_parameters())
    found = dict(kind.from_pretrained(folder / "final").named_parameters())
    for name, weight in model.named_parameters():
        moved = weight.detach() - start[name].detach()
        assert (found[name] - weight).norm() <= 1e-3 * moved.norm(), name


DPO_CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo and sft": {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
    "lengths": {"ld_alpha": 0.4, "loss_type": ["robust"], "label_smoothing": 0.1},
}
"""tests/losses/test_preference.py has all loss types and divergences against TRL."""


def words(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo(tmp_path: Path, case: str, class_type: str) -> None:
    if class_type == "vanilla" and case != "sigmoid":
        pytest.skip("one loss is enough: the losses are the same functions")
    options = DPO_CASES[case]
    words_of_ours = flags(tmp_path, pairs(), "--task", "dpo", "--class_type", class_type)
    ours = run([*words_of_ours, *words(options)], tmp_path / "run")
    config = trl.DPOConfig(**settings(tmp_path), **options)
    model, reference = small_model(), small_model()
    theirs, model = by_trl(trl.DPOTrainer, config, model, pairs(), ref_model=reference)
    assert_same(ours, theirs, (*REWARDS, "rewards/accuracies", *LOGPS))
    assert_same_weights(tmp_path / "run", model)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(tmp_path: Path, loss_type: str) -> None:
    """Two records have each other's answers as mismatched ones, in TRL and here."""
    records = rated(2 if loss_type == "kto" else PAIRS)
    options = {"desirable_weight": 1.5, "undesirable_weight": 0.5, "beta": 0.2}
    task = ["--task", "kto", "--loss_type", loss_type, *words(options)]
    ours = run(flags(tmp_path, records, *task), tmp_path / "run")
    config = trl.KTOConfig(
        **settings(tmp_path, per_device_train_batch_size=len(records)),
        loss_type=loss_type,
        **options,
    )
    model, reference = small_model(), small_model()
    theirs, model = by_trl(trl.KTOTrainer, config, model, records, ref_model=reference)
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", *LOGPS)
    assert_same(ours, theirs, (*names, "kl") if loss_type == "kto" else names)
    assert_same_weights(tmp_path / "run", model)


WITHOUT: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "orpo": ("orpo", "ORPO", {"beta": 0.3}, {"beta": 0.3}),
    "cpo": ("cpo", "CPO", {"beta": 0.3}, {"beta": 0.3, "label_smoothing": 0.0}),
    "cpo hinge": (
        *("cpo", "CPO", {"loss_type": "hinge", "cpo_alpha": 0.5}),
        {"loss_type": "hinge", "cpo_alpha": 0.5},
    ),
    "simpo": (
        *("simpo", "CPO", {"beta": 2.0, "simpo_gamma": 0.7}),
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
    ),
}


@pytest.mark.parametrize("class_type", ["custom", "vanilla"])
@pytest.mark.parametrize("case", WITHOUT)
def test_without_a_reference(tmp_path: Path, case: str, class_type: str) -> None:
    task, name, options, of_trl = WITHOUT[case]
    if class_type == "vanilla" and task != "orpo":
        pytest.skip("the losses are the same functions; ORPO's also reads prompts")
    more = ["--task", task, "--class_type", class_type, *words(options)]
    # Of conversations TRL's trainers without a reference train an end token behind the template's.
    ours = run(flags(tmp_path, written(), *more), tmp_path / "run")
    home = importlib.import_module(f"trl.experimental.{name.lower()}")
    more = dict(max_length=4096, remove_unused_columns=False)
    config = getattr(home, f"{name}Config")(**settings(tmp_path, **more), **of_trl)
    theirs, model = by_trl(getattr(home, f"{name}Trainer"), config, small_model(), written())
    names = (*REWARDS, "rewards/accuracies", *LOGPS)
    assert_same(ours, theirs, names if task == "simpo" else (*names, "nll_loss"))
    assert_same_weights(tmp_path / "run", model)


def test_reward(tmp_path: Path) -> None:
    records = [{**row, "margin": 0.1 * n} for n, row in enumerate(pairs())]
    torch.manual_seed(0)
    config = small_model().config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(small_model().model.state_dict())
    task = ["--task", "reward", "--center_rewards_coefficient", "0.01"]
    ours = run(flags(tmp_path, records, *task, model=model), tmp_path / "run")
    config = trl.RewardConfig(**settings(tmp_path), center_rewards_coefficient=0.01)
    start = copy.deepcopy(model)
    theirs, model = by_trl(trl.RewardTrainer, config, model, records)
    assert_same(ours, theirs, ("loss", "grad_norm", "accuracy", "margin", "mean_reward"))
    assert_same_weights(tmp_path / "run", model, start, AutoModelForSequenceClassification)
