"""What one line says of media in records that were tokenised: columns that are not read, and tokens
of images, videos or sounds in a text that shows none.

A token of media is what the model's configuration or the tokenizer calls one (`image_token_id`,
`video_token`), or an added token of such a name: <|image_pad|>, <video>, [IMG], <|AUDIO|>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.train.data.reading.media import COLUMNS
from longctx.train.data.reading.unread_media import unread_line

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor
    from longctx.train.data.text.tokens import Reader

_NAMED = re.compile(r"image|\bimg|_img|video|audio|vision|sound", re.IGNORECASE)
_KEY = re.compile(r"(image|video|audio|vision)_(\w+_)?token(_id|_index)?|[be]oi_token(_id|_index)?")
_READ_WITH_IMAGES = re.compile(r"image|img|vision", re.IGNORECASE)


def media_tokens(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig | None = None
) -> dict[int, str]:
    """Returns the tokens that stand for media, by id."""
    named = {i: word for word, i in tokenizer.get_added_vocab().items() if _NAMED.search(word)}
    given = {**tokenizer.special_tokens_map, **({} if config is None else config.to_dict())}
    for key, value in given.items():
        if not _KEY.fullmatch(key):
            continue
        word = tokenizer.convert_ids_to_tokens(value) if type(value) is int else value
        number = tokenizer.convert_tokens_to_ids(word) if isinstance(word, str) else None
        if isinstance(word, str) and number is not None and number != tokenizer.unk_token_id:
            named[number] = word
    return named


def media_line(
    tokens: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig | None,
    images: ImageProcessor | None,
    where: Callable[[int], str],
) -> list[str]:
    """Returns the line for the first record whose text has a token of media that are not shown.
    Where the model sees `images` of records, their own tokens are no word of a text: encoding
    refuses such a text."""
    named = media_tokens(tokenizer, config)
    if images is not None:
        named = {i: word for i, word in named.items() if not _READ_WITH_IMAGES.search(word)}
    for number, token in _first_with(tokens, np.array([*named], np.int32)):
        return [token_line(where(number), named[token])]
    return []


def token_line(where: str, word: str) -> str:
    return (
        f"{where}: its text has {word}, a token of media, and nothing is shown there: it is "
        "trained as a word, here and in records like this one"
    )


def token_of_media(ids: np.ndarray, named: dict[int, str]) -> str | None:
    """Returns the first token of media among a document's tokens (n,)."""
    found = np.flatnonzero(np.isin(ids, [*named]))
    return named[int(ids[found[0]])] if len(found) else None


def _first_with(tokens: Dataset, wanted: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first row that has one of the `wanted` ids, and that id."""
    row = 0
    for chunk in tokens.data.column("input_ids").chunks if len(wanted) else ():
        ids = chunk.flatten().to_numpy()
        found = np.flatnonzero(np.isin(ids, wanted))
        if len(found):
            ends = np.cumsum(chunk.value_lengths().to_numpy())
            yield row + int(np.searchsorted(ends, found[0], side="right")), int(ids[found[0]])
            return
        row += len(chunk)


def unread_lines(records: Dataset, read: Reader, where: Callable[[int], str]) -> Iterable[str]:
    """Yields a line for columns of a medium's name that are not read: those of our own documents
    that say so, or of a dataset's columns, each tried by its first value."""
    if "unread" in records.column_names:
        numbers = _first_filled(records, "unread")
        return [unread_line(where(n), records[n]["unread"]) for n in numbers]
    lines: dict[str, Any] = {}
    for name in records.column_names:
        for number in _first_filled(records, name) if name in COLUMNS else ():
            found = read(records[number], number)
            if found and name in found.unread:
                lines[unread_line(where(number), found.unread)] = None
    return [*lines]


def _first_filled(records: Dataset, name: str) -> list[int]:
    """Returns the number of the first row whose column is neither null nor empty, if there is."""
    row = 0
    for chunk in records.select_columns([name]).with_format("arrow").iter(1000):
        values = chunk.column(name)
        filled = values.is_valid()
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            filled = pc.greater(pc.list_value_length(values), 0)
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            filled = pc.greater(pc.binary_length(values), 0)
        found = pc.index(filled, True).as_py()
        if found >= 0:
            return [row + found]
        row += len(values)
    return []
