"""The same training, with Hugging Face's model and with a patched copy of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from small_model import tiny_config
from small_tokenizer import small_tokenizer
from transformers import LlamaForCausalLM

import longctx

LAYERS = 2
WORDS = "the quick brown fox number jumps over a lazy dog and sleeps under its tree".split()
Numbers = dict[str, list[float]]
"""What a run reports, by name: the loss of every step, metrics."""
Train = Callable[[Any], Numbers]


def make_model(**changes: Any) -> Any:
    """One in which nothing vanishes, for the tokens of `small_tokenizer`."""
    tokenizer = small_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(vocab_size=len(tokenizer), **special, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def sentence(number: int) -> str:
    """3 to 16 words."""
    return " ".join(WORDS[number * 5 % 14 - n] for n in range(3 + number * 7 % 14))


def sentences(rows: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [sentence(n) for n in range(rows)]})


def arguments(folder: Any, **more: Any) -> dict[str, Any]:
    """Of a Trainer: three steps of four rows, each logged, in fp32 on the CPU."""
    settings = dict(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-3,
        adam_epsilon=1e-5,  # with 1e-8 the sign of a gradient of 1e-9 would decide a whole step
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    return settings | more


TIMES = ("runtime", "per_second", "total_flos")


def logged(trainer: Any) -> Numbers:
    """All that a Trainer has logged but the time it took."""
    found: Numbers = {}
    for line in trainer.state.log_history:
        for name, value in line.items():
            if not name.endswith(TIMES):
                found.setdefault(name, []).append(value)
    return found


def trained(make: Callable[[Any], Any]) -> Train:
    """Training by the Trainer that `make` makes of a model."""

    def train(model: Any) -> Numbers:
        trainer = make(model)
        trainer.train()
        return logged(trainer)

    return train


def assert_same_run(
    train: Train,
    scheduled: list[int],
    capsys: pytest.CaptureFixture[str],
    *,
    passes: int,  # batches that go through the model, of evaluation too
    steps: int = 3,
    layers: int = LAYERS,
    model: Any = None,
    says: str | None = None,  # why Hugging Face's layers run in all passes
    bar: float = 1e-4,  # of the change of a parameter
    rel: float = 2e-5,  # of a number
    patch: Callable[[Any], Any] = longctx.patch,  # of the copy
) -> Numbers:
    """The patched model reports the same numbers and ends with the same weights, in fp32 but for
    the order of sums, and the schedule ran in every pass; or said why not. Returns the numbers.

    What changed in each parameter is compared, to 1e-4 of it: summation makes 1e-5.
    """
    vanilla = make_model() if model is None else model
    start = {name: p.detach().clone() for name, p in vanilla.named_parameters()}
    ours = patch(copy.deepcopy(vanilla))
    truth = train(vanilla)
    assert scheduled == []
    capsys.readouterr()
    found = train(ours)
    said = [
        line for line in capsys.readouterr().out.splitlines() if "Hugging Face's layers" in line
    ]
    assert len(said) == (says is not None) and (says or "") in "".join(said), said
    assert len(scheduled) == (0 if says else layers * passes)
    assert len(truth["loss"]) == steps and truth.keys() == found.keys()
    for name, values in truth.items():
        assert found[name] == pytest.approx(values, rel=rel, abs=1e-5), name
    others = dict(ours.named_parameters())
    for name, parameter in vanilla.named_parameters():
        change, other = (p.detach() - start.get(name, 0.0) for p in (parameter, others[name]))
        assert change.any() or not parameter.requires_grad, name
        assert (other - change).norm() <= bar * change.norm(), name
    return truth
