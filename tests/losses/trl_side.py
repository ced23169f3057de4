"""TRL's trainers on a tiny Llama and a few sentences, and our losses on their batches."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from small_model import tiny_config
from small_tokenizer import small_tokenizer
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaForCausalLM

WORDS = "the quick brown fox number jumps over a lazy dog and sleeps under its tree".split()
ROWS = 5


def make_model(seed: int = 0) -> Any:
    """Models of different seeds have log-ratios of several nats an answer."""
    tokenizer = small_tokenizer()
    torch.manual_seed(seed)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    model = LlamaForCausalLM(tiny_config(vocab_size=len(tokenizer), **special))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def sentence(number: int) -> str:
    """A space and 2 to 9 words."""
    return " " + " ".join(WORDS[number * 5 % 14 - n] for n in range(2 + number * 3 % 8))


def rows(**columns: int) -> datasets.Dataset:
    table = [{name: sentence(n + k) for name, k in columns.items()} for n in range(ROWS)]
    return datasets.Dataset.from_list(table)


def batch_of(trainer: Any) -> dict[str, Any]:
    return trainer.data_collator([trainer.train_dataset[n] for n in range(ROWS)])


def next_tokens(ids: Tensor, counted: Tensor) -> Tensor:  # (rows, S) each
    """Labels that are aligned with hidden states: each position's next token where it counts."""
    return pad(ids.masked_fill(counted == 0, -100)[:, 1:], (0, 1), value=-100)


def hidden_states(model: Any, ids: Tensor, mask: Tensor) -> Tensor:  # (rows, S, D)
    return model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def make_trainer(kind: Any, config: Any, folder: Any, dataset: Any, **more: Any) -> Any:
    """A trainer of `make_model()` in fp32 on the CPU, whose batches are all rows."""
    settings = dict(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
    )
    model = more.pop("model", None) or make_model()
    tokenizer = small_tokenizer()
    how = dict(train_dataset=dataset, processing_class=tokenizer, **more)
    return kind(model, args=config(**settings), **how)


def assert_same(ours: Tensor, theirs: Tensor, model: Any) -> None:
    """The losses agree to 1e-5, and the gradients of every weight to 1e-4 of their norm: a
    log-probability of -200 is rounded by 1e-5, and gates such as discopop's divide it by 0.05.
    Matmuls of some processors sum in another order, so that 3e-5 was seen."""
    assert theirs.dim() == 0 and theirs.isfinite()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(ours, list(parameters.values()))
    truth = torch.autograd.grad(theirs, list(parameters.values()))
    for name, a, b in zip(parameters, found, truth, strict=True):
        assert b.any(), name
        assert (a - b).norm() <= 1e-4 * b.norm(), f"{name}: {(a - b).norm() / b.norm():.1e}"
