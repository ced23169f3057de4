"""Trainers that are built around a model before it is patched. TRL's have put their fused lm_head
into its forward by then: it stays, with the schedule under it, and unpatching gives it back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import arguments, assert_same_run, logged, make_model, sentences
from small_tokenizer import small_tokenizer
from test_hf_trainer import make_trainer
from test_other_trainers import rows

import longctx
from longctx.errors import UserError

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")
IDS = torch.arange(3, 20)[None]


def sft(model: Any, folder: Any, **more: Any) -> Any:
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**arguments(folder, max_steps=2, **more)),
        train_dataset=sentences(12),
        processing_class=small_tokenizer(),
    )


def dpo(model: Any, folder: Any) -> Any:
    return trl.DPOTrainer(
        model,
        ref_model=make_model(),
        args=trl.DPOConfig(**arguments(folder, max_steps=2)),
        train_dataset=rows(prompt=0, chosen=3, rejected=5),
        processing_class=small_tokenizer(),
    )


def grpo(model: Any, folder: Any) -> Any:
    settings = dict(num_generations=2, max_completion_length=6, max_steps=1)
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=trl.GRPOConfig(**arguments(folder, **settings)),
        train_dataset=rows(prompt=0),
        processing_class=small_tokenizer(),
    )


def plain(model: Any, folder: Any) -> Any:
    return make_trainer(model, folder, max_steps=2)


@pytest.mark.parametrize(
    ("build", "steps", "models"), [(sft, 2, 1), (dpo, 2, 2), (grpo, 1, 1), (plain, 2, 1)]
)
def test_patched_after_the_trainer_was_built(
    scheduled, capsys, tmp_path, build: Callable[..., Any], steps: int, models: int
) -> None:
    """The vanilla run is trained by a trainer of its own; ours is patched when it stands, and the
    reference in the first step."""
    patches = iter([False, True])

    def train(model: Any) -> Any:
        trainer = build(model, tmp_path)
        if next(patches):
            longctx.patch(trainer.model)
        trainer.train()
        numbers = logged(trainer)
        numbers.pop("step_time", None)
        return numbers

    passes = steps * models
    assert_same_run(train, scheduled, capsys, passes=passes, steps=steps, patch=lambda model: model)


def test_a_model_that_the_trainer_loads(scheduled, tmp_path) -> None:
    """`SFTTrainer("name")`, with adapters."""
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "model")
    trainer = trl.SFTTrainer(
        str(tmp_path / "model"),
        args=trl.SFTConfig(**arguments(tmp_path, max_steps=1)),
        train_dataset=sentences(12),
        processing_class=small_tokenizer(),
        peft_config=peft.LoraConfig(target_modules=["q_proj"]),
    )
    longctx.patch(trainer.model, strict=True)
    trainer.train()
    assert len(scheduled) == 2


def test_unpatching_gives_trls_head_back(scheduled, tmp_path) -> None:
    model = make_model()
    sft(model, tmp_path)
    before = vars(model)["forward"]
    for _ in range(2):  # and it can be patched again
        longctx.patch(model)
        assert vars(model)["forward"] is not before
        model(input_ids=IDS, labels=IDS, use_cache=False, fused_lm_head=True).loss.backward()
        assert len(scheduled) == 2
        longctx.unpatch(model)
        assert vars(model)["forward"] == before and "longctx" not in vars(model)
        scheduled.clear()
    found = model(input_ids=IDS, labels=IDS, use_cache=False, fused_lm_head=True).loss
    truth = type(model).forward(model, input_ids=IDS, labels=IDS, use_cache=False).loss
    torch.testing.assert_close(found, truth)
    assert scheduled == []


def test_both_heads_of_a_model_that_was_patched_then(scheduled, tmp_path) -> None:
    """TRL's where it asks for that, else ours; of a copy, too."""
    model = make_model()
    truth = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    sft(model, tmp_path)
    sft(model, tmp_path)  # around the first one's
    longctx.patch(model.train())
    for one in (model, copy.deepcopy(model)):
        for fused in (False, True):
            scheduled.clear()
            loss = one(input_ids=IDS, labels=IDS, use_cache=False, fused_lm_head=fused).loss
            loss.backward()
            torch.testing.assert_close(loss, truth)
            assert len(scheduled) == 2
        assert all(p.grad is not None for p in one.parameters())


def wrapped(model: Any) -> Any:
    """As accelerate does for autocast."""
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return model


@pytest.mark.parametrize("order", ["alone", "around TRL's", "under TRL's", "on the base model"])
def test_any_other_forward_is_one_line(tmp_path, order: str) -> None:
    model = make_model()
    if order == "around TRL's":
        sft(model, tmp_path)
    wrapped(model.model if order == "on the base model" else model)
    if order == "under TRL's":
        sft(model, tmp_path)
    before = vars(model).get("forward")
    with pytest.raises(UserError, match="patch before you build the trainer") as error:
        longctx.patch(model)
    assert "\n" not in str(error.value) and vars(model).get("forward") is before


def distillation(model: Any, folder: Any) -> Any:
    settings = dict(max_completion_length=6, max_steps=1)
    return trl.DistillationTrainer(
        model,
        teacher_model=make_model(rms_norm_eps=1e-2),
        args=trl.DistillationConfig(**arguments(folder, **settings)),
        train_dataset=rows(prompt=0),
        processing_class=small_tokenizer(),
    )


def test_distillation(scheduled, capsys, tmp_path) -> None:
    """It hands `logits_to_keep` to the base model, which ignores it. The teacher runs the schedule,
    too."""

    def train(model: Any) -> Any:
        trainer = distillation(model, tmp_path)
        trainer.train()
        numbers = logged(trainer)
        numbers.pop("step_time", None)
        return numbers

    assert_same_run(train, scheduled, capsys, passes=2, steps=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ORPO", "CPO"])
def test_metrics_of_padded_logits_are_said_once(scheduled, capsys, tmp_path, name: str) -> None:
    """Means over whole rows: everything but those is Hugging Face's."""
    home = pytest.importorskip(f"trl.experimental.{name.lower()}")

    def train(model: Any) -> Any:
        trainer = getattr(home, f"{name}Trainer")(
            model,
            args=getattr(home, f"{name}Config")(**arguments(tmp_path, max_steps=2)),
            train_dataset=rows(prompt=0, chosen=3, rejected=6),
            processing_class=small_tokenizer(),
        )
        trainer.train()
        said.append(capsys.readouterr().out.count("means over real tokens"))
        numbers = logged(trainer)
        logits.append([numbers.pop(f"logits/{which}") for which in ("chosen", "rejected")])
        return numbers

    said: list[int] = []
    logits: list[Any] = []
    assert_same_run(train, scheduled, capsys, passes=2, steps=2)
    assert said == [0, 1] and logits[0] != logits[1]
