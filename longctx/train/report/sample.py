"""How a trained model goes on: the beginning of a row, and the tokens that the model finds most
likely after it.

Each token is computed with the whole text before it, by the forward of training, so that a sample
is right for every family that trains, and needs no cache. All forwards take as many tokens: what
follows a token changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from datasets import Dataset

from longctx.constants import IGNORE_INDEX
from longctx.families.adapters import inside_peft
from longctx.families.vision import is_whole
from longctx.kernels import launch
from longctx.train.data.pack.packing import TOKEN_COLUMNS
from longctx.train.trainer.trainer import LongTrainer

TOKENS = 32
"""The tokens that are generated."""
LONGEST_PROMPT = 256
OF_A_TEXT = 48
"""The tokens of a prompt where all of a text is trained."""
CPU_FLOPS = 1e12
"""A sample that computes more on a CPU, about ten seconds, is left out."""


class Sample(NamedTuple):
    text: str
    continued: str


def sample(trainer: LongTrainer, rows: Any) -> Sample | None:
    """Returns a sample of the model that was trained, after the beginning of the first of `rows`;
    None where these are a stream, where the task is not text, where an engine or several processes
    share the model, where some of it is on the host, where the configuration asks for tuples (of
    which transformers' causal models cannot make logits), and where it would take long: for a large
    model on a CPU, and in Triton's interpreter."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer: Any = trainer.processing_class
    if trainer.args.task != "sft" or tokenizer is None or not isinstance(rows, Dataset):
        return None
    if trainer.engine.shards_states or trainer.shards or is_whole(inside_peft(model)):
        return None
    if not inside_peft(model).config.return_dict:
        return None
    device = trainer.args.device
    parameters = list(model.parameters())
    if any(p.device.type != device.type for p in parameters) or launch.INTERPRETED:
        return None
    prompt = prompt_of(rows[0])
    length = -(-(len(prompt) + TOKENS) // 64) * 64
    flops = 2 * sum(p.numel() for p in parameters) * length * TOKENS
    if not prompt or (device.type == "cpu" and flops > CPU_FLOPS):
        return None
    try:
        found = _most_likely(model, prompt, length, tokenizer.eos_token_id)
    except torch.OutOfMemoryError:
        return None
    text, continued = (tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, found))
    return Sample(text, continued)


def prompt_of(row: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of the row's first document that stand before those that are trained, or
    the first of them where all are, or where too many stand before."""
    tokens, labels, positions = ([*map(int, row[name])] for name in TOKEN_COLUMNS)
    end = next((i for i, p in enumerate(positions) if i and p == 0), len(positions))
    labels = labels[:end]
    trained = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), end)
    if not 1 < trained < min(end, LONGEST_PROMPT + 1):
        trained = min(OF_A_TEXT, end // 2)
    return tokens[:trained]


@torch.no_grad()
def _most_likely(model: Any, prompt: list[int], length: int, eos: int | None) -> list[int]:
    was_training = model.training
    model.eval()
    ids = torch.full((1, length), prompt[-1], device=model.device)
    ids[0, : len(prompt)] = torch.tensor(prompt)
    try:
        for at in range(len(prompt), len(prompt) + TOKENS):
            last = torch.tensor([at - 1], device=ids.device)
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=last).logits  # (1, 1, V)
            ids[0, at] = logits[0, 0].argmax()
            if ids[0, at] == eos:
                return ids[0, len(prompt) : at].tolist()
        return ids[0, len(prompt) : len(prompt) + TOKENS].tolist()
    finally:
        model.train(was_training)
