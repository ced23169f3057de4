"""The tokens that ended what was trained, found in the rows, so that a saved model names them.

A base model that was trained on ChatML writes <|im_end|> and goes on, as long as its files name
<|endoftext|> as the only end. The files of `final/` get the trained end beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from longctx.constants import IGNORE_INDEX
from longctx.train.data.chat.ends import end_tokens
from longctx.train.data.chat.rendering import ending_of
from longctx.train.loading.stop_tokens import name_ends

ROWS = 256
"""The rows that are looked at."""
COLUMNS = {"input_ids", "labels", "position_ids"}
BLANKS = 2
"""The tokens of blanks that may stand behind an end token."""
OFTEN = 0.01
"""The share of all ends below which a token is one that a text holds by chance."""


def trained_ends(rows: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of the end tokens with which trained spans of the first rows end, the most
    frequent first. Rows without labels have none."""
    template = tokenizer.chat_template
    texts = end_tokens(tokenizer, template if isinstance(template, str) else "").texts
    known = {tokenizer.convert_tokens_to_ids(text) for text in texts}
    found: Counter[int] = Counter()
    for row in _first(rows):
        if not COLUMNS <= set(row):
            return []
        found.update(_ends(row, known))
    least = OFTEN * found.total()
    return [token for token, count in found.most_common() if count >= least]


def _first(rows: Any) -> Iterable[dict[str, Any]]:
    if isinstance(rows, Dataset) and rows.format["type"] != "custom":  # a transform may want all
        # Columns of all rows at once: one by one, with columns that are not read, 256 rows take
        # half a second.
        columns = [name for name in rows.column_names if name in COLUMNS]
        shown = rows.select_columns(columns)[:ROWS]
        return (dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True))
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        return (rows[i] for i in range(min(ROWS, len(rows))))
    return islice(rows, 1)  # a stream tokenises what is read


def _ends(row: dict[str, Any], known: set[Any]) -> Iterator[int]:
    """Yields the end token of each trained span that does not end where the row does, where a long
    document may be cut. Answers that are compared have a line break behind it."""
    labels, positions = (np.asarray(row[name]) for name in ("labels", "position_ids"))
    if positions.ndim > 1:
        positions = positions[0]
    trained = labels != IGNORE_INDEX
    goes_on = trained[1:] & (positions[1:] == positions[:-1] + 1)
    for last in np.flatnonzero(trained[:-1] & ~goes_on).tolist():
        behind = labels[max(0, last - BLANKS) : last + 1].tolist()
        yield from [token for token in reversed(behind) if token in known][:1]


def name_trained_ends(model: Any, tokenizer: Any, ends: list[int]) -> str | None:
    """Makes the configurations and the tokenizer name these ends. Returns the line that says so;
    None if they were named already."""
    new = name_ends(model, ends)
    if not new:
        return None
    words = ", ".join(tokenizer.convert_ids_to_tokens(new))
    before = tokenizer.eos_token
    # The token of the next role ends an answer, but it ends no text.
    if before is not None and tokenizer.eos_token_id not in ends and _closes(tokenizer):
        tokenizer.add_special_tokens(
            {"extra_special_tokens": [before]}, replace_extra_special_tokens=False
        )
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    return (
        f"what was trained ends with {words}: the config, generation config and tokenizer of the "
        "saved model name this end too"
    )


def _closes(tokenizer: PreTrainedTokenizerBase) -> bool:
    return isinstance(tokenizer.chat_template, str) and ending_of(tokenizer) == "closing"
