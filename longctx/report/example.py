"""One packed row as people read it: where its documents begin, and which tokens are trained.

    ── 1 of 2: chats.jsonl:7, 812 tokens, 300 trained
    <|im_start|>user Why is the sky blue? <|im_end|> ... «Because of Rayleigh scattering.<|im_end|>»

Trained tokens are green (and between « and » where there is no colour), the others dim. A stretch
of more than STRETCH characters is shortened in its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from longctx.constants import IGNORE_INDEX
from longctx.errors import printable

STRETCH = 600
TRAINED, CONTEXT, EDGE = "bold green", "dim", "cyan"


def show_example(
    row: dict[str, Any],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None = None,
) -> None:
    """Prints a row of `build_dataset`; `names` are those of its documents (`document_names`)."""
    console = console or Console()
    ids, labels, positions = (
        np.asarray(row[name]) for name in ("input_ids", "labels", "position_ids")
    )
    trained = labels != IGNORE_INDEX
    edges = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
    pieces = list(zip(edges, edges[1:], strict=False))
    console.print(f"one row of {len(ids):,} tokens, {trained.sum():,} of them trained")
    for number, (start, end) in enumerate(pieces):
        if number >= len(names):
            console.print(f"── padding, {end - start:,} tokens", style=EDGE)
            continue
        what = f"{number + 1} of {len(names)}: {printable(names[number])}"
        counts = f"{end - start:,} tokens, {trained[start:end].sum():,} trained"
        console.print(Text(f"── {what}, {counts}", EDGE), soft_wrap=True)
        text = _coloured(ids[start:end], trained[start:end], tokenizer, console.is_terminal)
        console.print(text, soft_wrap=True)


def _coloured(
    ids: np.ndarray, trained: np.ndarray, tokenizer: PreTrainedTokenizerBase, colour: bool
) -> Text:
    """Stretches of equal `trained`, decoded; both (n,)."""
    text = Text()
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        stretch = _short(str(tokenizer.decode(ids[start:end].tolist())))
        if trained[start]:
            text.append(stretch if colour else f"«{stretch}»", TRAINED)
        else:
            text.append(stretch, CONTEXT)
    return text


def _short(text: str) -> str:
    if len(text) <= STRETCH:
        return text
    half = STRETCH // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
