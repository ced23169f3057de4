"""RULER, as lm-eval has it: answers that lie in synthetic texts of a given length.

Each task makes its texts for a length by the model's tokenizer, and the model generates the answer;
a task's score is the share of expected words in what was generated (Hsieh et al. 2024,
arXiv:2404.06654). lm-eval knows lengths of 4096 to 131072 in powers of two. Of its 13 tasks those
with essays or questions of real data sets download them.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longctx.errors import UserError, did_you_mean, one_line
from longctx.packages import pip_install
from longctx.system import installed

LENGTHS = tuple(2**n for n in range(12, 18))
"""Tokens of a text, the question and room for its answer included."""
OFFLINE = "niah_single_1 niah_multikey_2 niah_multikey_3 ruler_vt ruler_cwe ruler_fwe".split()
DOWNLOADING = "niah_single_2 niah_single_3 niah_multikey_1 niah_multiquery niah_multivalue".split()
DOWNLOADING += ["ruler_qa_hotpot", "ruler_qa_squad"]
TASKS = (*OFFLINE, *DOWNLOADING)
"""lm-eval's names."""
NEEDED = {"lm_eval": "lm-eval", "nltk": "nltk", "wonderwords": "wonderwords"}
"""Module -> its package."""


def check_ruler(tasks: Sequence[str], seq_len: int) -> list[int]:
    """Returns the lengths that are evaluated: from an eighth of `seq_len` to all of it, as needles.

    Raises UserError for an unknown task, for rows that are shorter than RULER's texts, and where
    lm-eval is not installed."""
    for task in tasks:
        if task not in TASKS:
            guess = did_you_mean(task, TASKS, cutoff=0.4)
            raise UserError(f"--ruler {task}: {guess}RULER's tasks are {', '.join(TASKS)}")
    lengths = [tokens for tokens in LENGTHS if seq_len // 8 <= tokens <= seq_len]
    if not lengths:
        raise UserError(
            f"--ruler has texts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, and --seq_len is {seq_len}"
        )
    missing = [package for module, package in NEEDED.items() if not installed(module)]
    if missing:
        raise UserError(f"--ruler needs {', '.join(missing)}: {pip_install(*missing)}")
    return lengths


def ruler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
) -> Iterator[dict[str, Any]]:
    """Yields a line for every task and length: the mean `score` of `samples` texts, or the `error`
    of a task whose texts cannot be made, as without the network that it needs."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    runner = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=max(lengths))
    with tempfile.TemporaryDirectory() as folder:
        # Tasks load the tokenizer by name, and would run code that comes with it: in this folder
        # there is none but what --trust_remote_code has allowed.
        tokenizer.save_pretrained(folder)
        for task, tokens in itertools.product(tasks, lengths):
            made = {"tokenizer": folder, "max_seq_lengths": [tokens]}
            line = {"task": task, "tokens": tokens, "tries": samples}
            try:
                found = lm_eval.simple_evaluate(
                    model=runner,
                    tasks=[task],
                    limit=samples,
                    metadata=made,
                    task_manager=TaskManager(metadata=made),
                    bootstrap_iters=0,
                    log_samples=False,
                )
                yield line | {"score": float(found["results"][task][f"{tokens},none"])}
            except (OSError, LookupError, ValueError) as error:  # hours of others' work stay
                yield line | {"error": one_line(error)}


def ruler_lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields what a terminal shows of each line."""
    for line in found:
        said = f"{line['score']:.0%}" if "score" in line else f"failed: {line['error']}"
        yield f"{line['task']} at {line['tokens']:>6} tokens: {said}"
    failed = {line["task"] for line in found if "error" in line}
    if failed & {*DOWNLOADING}:
        yield f"without a network there are {', '.join(OFFLINE)}"
