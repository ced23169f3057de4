"""One packed row as people read it: where its documents begin, and which tokens are trained.

    ── 1 of 2: chats.jsonl:7, 812 tokens, 300 trained
    <|im_start|>user Why is the sky blue? <|im_end|> ... «Because of Rayleigh scattering.<|im_end|>»

A row of prompts with their answers shows each prompt once and says whose answers follow:

    ── 1 of 2: pairs.jsonl:7, prompt, 800 tokens
    ── 1 of 2: pairs.jsonl:7, chosen, 12 tokens
    ── 1 of 2: pairs.jsonl:7, rejected, 9 tokens

Trained tokens are green (and between « and » where there is no colour), the others dim. A stretch
of more than STRETCH characters is shortened in its middle. Where an image stands, its tokens are
counted, each image's by themselves:

    <|vision_start|> [image, 196 tokens] <|vision_end|> What is this?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from longctx.constants import IGNORE_INDEX
from longctx.errors import printable
from longctx.train.data.reading.groups import SIDE_NAMES, Rows

STRETCH = 600
TRAINED, CONTEXT, EDGE = "bold green", "dim", "cyan"


def show_example(
    row: dict[str, Any],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None = None,
    rows: Rows = "text",
    images: np.ndarray | None = None,  # (n,)
) -> None:
    """Prints a row of `build_dataset` of this kind of rows; `names` are those of its documents
    (`document_names`), `images` are the row's `numbered_images`."""
    console = console or Console()
    ids, labels = (np.asarray(row[name]) for name in ("input_ids", "labels"))
    trained = labels != IGNORE_INDEX
    of_images = np.zeros(len(ids), int) if images is None else images
    console.print(f"one row of {len(ids):,} tokens, {trained.sum():,} of them trained")
    pieces = _documents(row) if rows == "text" else _answers(row, SIDE_NAMES[rows])
    for number, side, start, end in pieces:
        if number >= len(names):
            console.print(f"── padding, {end - start:,} tokens", style=EDGE)
            continue
        what = f"{number + 1} of {len(names)}: {printable(names[number])}"
        tokens = f"{end - start:,} tokens"
        counts = f"{side}, {tokens}" if side else f"{tokens}, {trained[start:end].sum():,} trained"
        console.print(Text(f"── {what}, {counts}", EDGE), soft_wrap=True)
        part = slice(start, end)
        text = _coloured(ids[part], trained[part], of_images[part], tokenizer, console.is_terminal)
        console.print(text, soft_wrap=True)


def numbered_images(ids: Sequence[int], images: Any, sources: Sequence[Any]) -> np.ndarray:
    """Returns the number of the image that each of a row's tokens belongs to, from 1, and 0 for
    text; (n,). `images` is the processor (train/data/images/processor.py), and `sources` are
    those of the row's images. Tokens between an image's parts, as Mistral 3 has them at the end
    of a line, are the image's."""
    counts = []
    for number, source in enumerate(sources, 1):
        at = f"image {number} of the row"
        counts.append(images.tokens_of(images.opened(source, at).size, at))
    found, parts = np.zeros(len(ids), int), np.flatnonzero(images.marks(np.asarray(ids)))
    for number, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True), 1):
        found[parts[end - count] : parts[end - 1] + 1] = number
    return found


Part = tuple[int, str, int, int]
"""The number of a document in its row, the side of an answer, and [start, end) tokens; padding has
the number after the last."""


def _documents(row: dict[str, Any]) -> Iterator[Part]:
    positions = np.asarray(row["position_ids"])
    edges = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    for number, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        yield number, "", start, end


def _answers(row: dict[str, Any], sides: Sequence[str]) -> Iterator[Part]:
    """Prompts and answers; the number is that of the group."""
    group, start = -1, 0
    for length, side in zip(row["lengths"], row["sides"], strict=True):
        group += side < 0
        yield group, sides[side] if side >= 0 else "prompt", start, start + length
        start += length


def _coloured(
    ids: np.ndarray,
    trained: np.ndarray,
    of_images: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    colour: bool,
) -> Text:
    """Stretches of equal `trained` and `imaged`, decoded; all (n,)."""
    text = Text()
    changes = np.diff(trained) | (np.diff(of_images) != 0)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        if of_images[start]:
            text.append(f"[image, {end - start:,} tokens]", EDGE)
            continue
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
