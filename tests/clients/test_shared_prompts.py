"""TRL's trainers of preferences, answers and teachers on a patched model that computes prompts
once, beside the unpatched one: losses, metrics and weights of five steps."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import datasets
import pytest
import torch
from both import LAYERS, arguments, assert_same_run, logged, make_model, sentence, trained
from small_tokenizer import small_tokenizer
from transformers import AutoModelForSequenceClassification

import longctx
from longctx.calls import shared_prefixes
from longctx.runtime.runtime import runtime_of

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.usefixtures("reference_kernels"),
    pytest.mark.filterwarnings("ignore"),  # of what is experimental
]
STEPS = 5
PATCH = functools.partial(longctx.patch, share_prefixes=True)
PROMPT = " ".join(sentence(n) for n in range(3))


@pytest.fixture
def saved(monkeypatch) -> list[float]:
    """The share of tokens that was saved, of each batch in which a prompt was found."""
    shares: list[float] = []
    found = shared_prefixes.found

    def note(*args: Any, **how: Any) -> Any:
        sharing = found(*args, **how)
        shares.extend([] if sharing is None else [sharing.saved])
        return sharing

    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 2)
    monkeypatch.setattr("longctx.forwards.computed_tokens.found_prefixes", note)
    return shares


def rows(**answers: int) -> datasets.Dataset:
    """Prompts that begin alike, with answers of 3 to 16 words."""
    return datasets.Dataset.from_list(
        [
            {"prompt": f" {PROMPT} {sentence(n % 2)}"}
            | {name: " " + sentence(n + k) for name, k in answers.items()}
            for n in range(4 * STEPS)
        ]
    )


def pairs() -> datasets.Dataset:
    return rows(chosen=3, rejected=5)


def trainer_of(
    name: str, model: Any, folder: Any, data: Any, settings: dict[str, Any], **more: Any
) -> Any:
    """A trainer of TRL, or of its experimental ones."""
    home = (
        trl
        if hasattr(trl, f"{name}Trainer")
        else importlib.import_module(f"trl.experimental.{name.lower()}")
    )
    return getattr(home, f"{name}Trainer")(
        model,
        args=getattr(home, f"{name}Config")(
            **arguments(folder, **{"max_steps": STEPS, **settings})
        ),
        train_dataset=data,
        processing_class=small_tokenizer(),
        **more,
    )


# Name, settings, forward passes of a step that run the schedule, metrics over padded logits.
PREFERENCES: dict[str, tuple[str, dict[str, Any], int, tuple[str, ...]]] = {
    "DPO, reference computed before": ("DPO", dict(precompute_ref_log_probs=True), 1, ()),
    "Reward": ("Reward", {}, 1, ()),
    "ORPO": ("ORPO", {}, 1, ("logits/chosen", "logits/rejected")),
    "CPO": ("CPO", {}, 1, ("logits/chosen", "logits/rejected")),
    "SimPO": (
        "CPO",
        dict(loss_type="simpo", cpo_alpha=0.0),
        1,
        ("logits/chosen", "logits/rejected"),
    ),
}


@pytest.mark.parametrize("case", PREFERENCES)
def test_preferences(scheduled, capsys, tmp_path, saved, case: str) -> None:
    name, settings, passes, of_padding = PREFERENCES[case]
    model = make_model()
    if name == "Reward":
        model.config.num_labels = 1
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(model.config)

    def train(model: Any) -> Any:
        trainer = trainer_of(name, model, tmp_path, pairs(), settings)
        scheduled.clear()
        trainer.train()
        numbers = logged(trainer)
        for metric in of_padding:
            del numbers[metric]
        if "rewards/accuracies" in numbers:  # of the first step's rewards, which are 0
            del numbers["rewards/accuracies"][0]
        return numbers

    assert_same_run(
        train, scheduled, capsys, passes=STEPS * passes, steps=STEPS, model=model, patch=PATCH
    )
    assert len(saved) >= STEPS and min(saved) > 0.2


def test_kto(scheduled, capsys, tmp_path, saved) -> None:
    """Four passes a step: answers and mismatched answers, of the model and of its reference."""
    labels = [n % 3 != 0 for n in range(4 * STEPS)]
    data = rows(completion=3).add_column("label", labels)

    def make(model: Any) -> Any:
        return trainer_of("KTO", model, tmp_path, data, {}, ref_model=make_model())

    assert_same_run(trained(make), scheduled, capsys, passes=4 * STEPS, steps=STEPS, patch=PATCH)
    assert len(saved) == 4 * STEPS


def test_rloo(scheduled, capsys, tmp_path, saved) -> None:
    """It loads its reference from where the model came from. Both score the answers before the
    step."""
    make_model().save_pretrained(tmp_path / "model")
    model = type(make_model()).from_pretrained(tmp_path / "model")

    def train(model: Any) -> Any:
        trainer = trainer_of(
            *("RLOO", model, tmp_path, rows()),
            dict(num_generations=2, max_completion_length=6, max_steps=2),
            reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        )
        trainer.train()
        numbers = logged(trainer)
        numbers.pop("step_time", None)
        return numbers

    assert_same_run(train, scheduled, capsys, passes=6, steps=2, model=model, patch=PATCH)
    assert len(saved) == 6


def test_gkd(scheduled, capsys, tmp_path, saved) -> None:
    """Off-policy: teacher and student read the same rows."""
    turns = [
        {
            "messages": [
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": sentence(n)},
            ]
        }
        for n in range(4 * STEPS)
    ]

    def make(model: Any) -> Any:
        return trainer_of(
            *("GKD", model, tmp_path, datasets.Dataset.from_list(turns), dict(lmbda=0.0)),
            teacher_model=make_model(rms_norm_eps=1e-2),
        )

    assert_same_run(trained(make), scheduled, capsys, passes=2 * STEPS, steps=STEPS, patch=PATCH)
    assert len(saved) == 2 * STEPS


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_dpo_with_exact_adamw(scheduled, capsys, tmp_path, saved, place: str) -> None:
    """Beside torch's AdamW on the unpatched model, in fp32."""

    def make(model: Any) -> Any:
        optimizer = None
        if runtime_of(model) is not None:
            optimizer = longctx.exact_adamw(
                model, lr=1e-3, eps=1e-5, weight_decay=0.0, tokens=512, place=place
            )
        return trainer_of(
            *("DPO", model, tmp_path, pairs(), {}),
            ref_model=make_model(),
            optimizers=(optimizer, None),
        )

    assert_same_run(trained(make), scheduled, capsys, passes=2 * STEPS, steps=STEPS, patch=PATCH)
    assert len(saved) == 2 * STEPS


def test_adapters_after_the_trainer_was_built(scheduled, tmp_path, saved) -> None:
    """`DPOTrainer("name")` loads the model, gives it adapters and its head; then it is patched. The
    reference is the model without adapters."""
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "model")
    trainer = trainer_of(
        *("DPO", str(tmp_path / "model"), tmp_path, pairs(), dict(max_steps=2)),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear"),
    )
    PATCH(trainer.model, strict=True)
    trainer.train()
    assert len(scheduled) == 2 * 2 * LAYERS and len(saved) == 4
