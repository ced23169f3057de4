"""TRL's SFTTrainer on a patched model. It calls the base model, and has a loss of its own that
reads lm_head's weight."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from both import arguments, assert_same_run, sentence, sentences, trained
from small_tokenizer import small_tokenizer

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture
def run(tmp_path, scheduled, capsys):
    """Trains both models with an SFTTrainer of these settings."""

    def run(
        data: Any = None, passes: int = 3, more: Any = None, bars: Any = None, **settings: Any
    ) -> Any:
        def make(model: Any) -> Any:
            return trl.SFTTrainer(
                model,
                args=trl.SFTConfig(**arguments(tmp_path, **settings)),
                train_dataset=data or sentences(12),
                processing_class=small_tokenizer(),
                **more or {},
            )

        return assert_same_run(trained(make), scheduled, capsys, passes=passes, **bars or {})

    return run


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_padded(run, scheduled, loss_type) -> None:
    numbers = run(loss_type=loss_type)
    assert {"entropy", "mean_token_accuracy", "grad_norm"} <= numbers.keys()
    tokens = numbers["num_tokens"]  # so far, without padding, of which there is no work
    assert scheduled[::2] == [b - a for a, b in zip([0, *tokens], tokens, strict=False)]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed(run, scheduled, strategy) -> None:
    run(sentences(60), packing=True, packing_strategy=strategy, max_length=20)
    assert max(scheduled) <= 4 * 20


def test_padding_free(run) -> None:
    run(padding_free=True, max_length=None)


def test_completion_only(run) -> None:
    rows = [{"prompt": sentence(n), "completion": " " + sentence(n + 5)} for n in range(12)]
    run(datasets.Dataset.from_list(rows))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_assistant_only(run, packing) -> None:
    run(conversations(12), assistant_only_loss=True, packing=packing, max_length=96)


def test_evaluation_with_metrics(run) -> None:
    numbers = run(
        passes=3 + 2 * 2, more=dict(eval_dataset=sentences(7)), eval_strategy="steps", eval_steps=2
    )
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"} <= numbers.keys()
    assert len(numbers["eval_loss"]) == 2 and numbers["eval_entropy"][0] > 1


def test_packed_evaluation(run) -> None:
    """Of packed training, on rows that are not."""
    settings = dict(packing=True, eval_packing=False, max_length=64, eval_strategy="epoch")
    run(sentences(30), passes=3 + 2, more=dict(eval_dataset=sentences(7)), **settings)


def test_metrics_of_the_logits(run) -> None:
    """TRL computes them in one more pass, without labels."""

    def mean(found: Any) -> dict[str, float]:
        return {"mean": float(found.predictions[found.label_ids != -100].mean())}

    run(
        passes=3 + 2 * 2,
        more=dict(eval_dataset=sentences(7), compute_metrics=mean),
        eval_strategy="epoch",
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("passes", "settings"),
    [
        (6, {"label_smoothing_factor": 0.1}),  # one more pass for the metrics
        (6, {"gradient_accumulation_steps": 2}),
        (3, {"gradient_checkpointing": False}),
        (3, {"gradient_checkpointing_kwargs": {"selective": True}}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(run, passes, settings) -> None:
    run(sentences(24), passes=passes, **settings)


def test_autocast(run) -> None:
    """TRL's default."""
    run(bars=dict(rel=2e-2, bar=0.1), bf16=True)


def conversations(rows: int) -> datasets.Dataset:
    def turns(n: int) -> list[dict[str, str]]:
        roles = ("user", "assistant") * (1 + n % 2)
        return [{"role": role, "content": sentence(n + i)} for i, role in enumerate(roles)]

    return datasets.Dataset.from_list([{"messages": turns(n)} for n in range(rows)])
