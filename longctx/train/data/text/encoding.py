"""A document's tokens, and which of them are trained.

    text         [bos] t t t t eos               all of it; bos only where the tokenizer adds one,
                                                 and once where the text begins with its own
    completion   [bos] p p p | c c c eos         the completion and the end token
    chat         ... assistant\\n | a a a end     assistant turns with their end-of-turn token

Prompt and completion are tokenised apart, so the boundary lies where generation would start.
A conversation is rendered by the chat template, which also says which characters are trained
(rendering.py), and tokenised once, with as much text as stands for each of its images
(images/expansion.py). A token is trained if any of its characters is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError
from longctx.train.data.chat.ends import Span
from longctx.train.data.chat.rendering import rendered
from longctx.train.data.pack.packing import Piece
from longctx.train.data.reading.media import strings_of
from longctx.train.data.reading.places import WRITTEN
from longctx.train.data.reading.records import CHATS, WITH_IMAGES, Document
from longctx.train.data.text.windows import WINDOW_CHARS, call, tokenise

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor

NO_TOKEN_CHARS = 100
"""So much text without a token, and the tokenizer knows no word or its normalizer deletes all."""
ENCODE_CHARS = WINDOW_CHARS  # tokenised together: more is no faster and takes 600 bytes a token


def encode(
    documents: Sequence[Document | None],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    images: ImageProcessor | None = None,
) -> list[Piece]:
    """Tokenises documents, in order; None, a blank record, has no tokens. `images` are those of
    a model that sees some.

    Raises UserError for a conversation without an exact mask, an image that is none and a token
    id of `vocab_size` or more.
    """
    pieces = _encode(documents, tokenizer, images)
    for piece, document in zip(pieces, documents, strict=True):
        check_vocabulary(int(piece.input_ids.max(initial=-1)), vocab_size)
        if images is not None and document:
            check_places(document)
            if document.kind not in CHATS:
                check_no_image(piece.input_ids, document, images)
    return pieces


def check_places(document: Document) -> None:
    """Raises UserError for a place of an image in a record without images, where others have
    some. Plain text may be about anything, HTML among it."""
    if document.kind == "text" or document.kind in WITH_IMAGES:
        return
    if any(WRITTEN in text for text in strings_of(document.content)):
        raise UserError(
            f"{document.where} has {WRITTEN} in its text and no image, and other records have "
            f"images: give its own in `images`, or leave {WRITTEN} out"
        )


def check_no_image(ids: np.ndarray, document: Document, images: ImageProcessor) -> None:
    """Raises UserError for a token of an image in a text, which the model would look for."""
    if images.marks(ids).any():
        from longctx.train.data.images.expansion import strange

        raise UserError(strange(document.where, images.words[0]))


def _encode(
    documents: Sequence[Document | None],
    tokenizer: PreTrainedTokenizerBase,
    images: ImageProcessor | None,
) -> list[Piece]:
    pieces = [Piece(np.empty(0, np.int32), np.empty(0, bool))] * len(documents)
    texts = {i: d.content for i, d in enumerate(documents) if d and d.kind == "text"}
    for group in _groups(list(texts), [len(text) for text in texts.values()]):
        for i, ids in zip(group, _ids(tokenizer, [texts[i] for i in group]), strict=True):
            pieces[i] = _piece(with_end(ids, tokenizer), trained_from=0)
    if sum(map(len, texts.values())) >= NO_TOKEN_CHARS:
        ends = len(with_end(_ids(tokenizer, [""])[0], tokenizer))
        if all(len(pieces[i]) <= ends for i in texts):
            first = next(d.where for d in documents if d and d.kind == "text")
            raise UserError(
                f"{first}: the tokenizer makes no token of this text: give another --tokenizer_name"
            )
    for i, document in enumerate(documents):
        if document and document.kind == "completion":
            pieces[i] = _completion(document, tokenizer)
    chats = {i: d for i, d in enumerate(documents) if d and d.kind in CHATS}
    for i, piece in zip(chats, _chats(list(chats.values()), tokenizer, images), strict=True):
        pieces[i] = piece
    return pieces


def check_vocabulary(largest_token_id: int, vocab_size: int | None) -> None:
    """Raises UserError for a token that the model does not know."""
    if vocab_size is not None and largest_token_id >= vocab_size:
        raise UserError(
            f"the tokenizer produced the token id {largest_token_id}, but the model's vocabulary "
            f"has {vocab_size} tokens: use the model's own tokenizer (--tokenizer_name)"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> int:
    """Padding is never trained and shares no attention, so any id the model knows will do."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None and (vocab_size is None or token_id < vocab_size):
            return token_id
    return 0


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """A text's tokens (n,) int32 with the special tokens that the tokenizer adds, once each."""
    return _once(tokenise(tokenizer, text).ids, tokenizer)


def _once(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The tokens without the bos or eos that the tokenizer added to a text which has its own."""

    def adds(place: int) -> bool:
        alone = tokenizer("a", add_special_tokens=False)["input_ids"]
        return tokenizer("a")["input_ids"][place] != alone[place]

    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if len(ids) > 1 and ids[0] == ids[1] == bos and adds(0):
        ids = ids[1:]
    if len(ids) > 1 and ids[-1] == ids[-2] == eos and adds(-1):
        ids = ids[:-1]
    return ids


def _completion(document: Document, tokenizer: PreTrainedTokenizerBase) -> Piece:
    prompt, completion = document.content
    before = prompt_ids(tokenizer, prompt)
    ids = np.concatenate([before, tokenise(tokenizer, completion, add_special_tokens=False).ids])
    return _piece(with_end(ids, tokenizer), trained_from=len(before))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> np.ndarray:
    """A prompt's tokens (n,) int32: bos where the tokenizer adds one, and no eos."""
    ids = text_ids(tokenizer, prompt)
    return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_token_id else ids


def check_chat_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises UserError, which names the document, where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the tokenizer has no chat template; give an instruct model's tokenizer with "
            "--tokenizer_name"
        )


def _chats(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> Iterator[Piece]:
    for document in documents[:1]:
        check_chat_template(tokenizer, document.where)
        if not tokenizer.is_fast:
            raise UserError(
                f"{document.where}: chat data needs a fast tokenizer (tokenizer.json) to find the "
                "assistant's tokens; give one with --tokenizer_name"
            )
    texts = rendered(documents, tokenizer, parts=images is not None)
    for document, (text, spans) in zip(documents, texts, strict=True):
        seen, pixels = document.content.get("pictures", ()), 0
        if images is not None:
            from longctx.train.data.images.expansion import expanded, texts_of

            inserted, pixels = texts_of(seen, images, document.where)
            text, spans = expanded(text, spans, inserted, images, document.where)
        tokens = tokenise(tokenizer, text, add_special_tokens=False, offsets=True)
        assert tokens.offsets is not None
        trained = _overlaps(tokens.offsets, spans)
        if not trained[1:].any():
            raise UserError(
                f"{document.where}: the chat template marks no token of an assistant turn; fix its "
                "{% generation %} markers or remove them"
            )
        trained[0] = False
        yield Piece(tokens.ids, trained, images=len(seen), pixels=pixels)


def _overlaps(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens hold a character of a span. offsets: (n, 2) characters; returns (n,) bool.

    Some tokenizers trim spaces off a token's offsets, so a token begins where the one before
    ended, unless several tokens share one character (then they share its offsets).
    """
    ends = offsets[:, 1]
    starts = np.minimum(offsets[:, 0], np.maximum.accumulate(np.concatenate([[0], ends]))[:-1])
    trained = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        trained |= (starts < end) & (ends > start)
    return trained


def _piece(ids: np.ndarray, trained_from: int) -> Piece:
    trained = np.ones(len(ids), dtype=bool)
    trained[: max(1, trained_from)] = False
    return Piece(ids, trained)


def with_end(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The tokens (n,) int32 with the tokenizer's eos at their end."""
    eos = tokenizer.eos_token_id
    return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int32(eos))


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """(n,) int32 for each of several texts."""
    if len(texts) == 1:
        return [text_ids(tokenizer, texts[0])]
    encoded = call(tokenizer, texts)
    return [_once(np.array(ids, dtype=np.int32), tokenizer) for ids in encoded["input_ids"]]


def _groups(items: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive items of at most ENCODE_CHARS characters together (a larger one alone)."""
    group: list[int] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if group and total + size > ENCODE_CHARS:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
