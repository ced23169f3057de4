"""A prompt with its answers becomes token ids, the prompt's once.

    strings         [bos] p p p | a a a eos     prompt and answers are tokenised apart
    joined strings  [bos] p p p | a a a eos     prompt + answer is tokenised as a whole
    conversations   ... assistant | a a a end   as the chat template renders them

The last two follow TRL: an answer is all that its whole text has after the tokens that the prompt
and all whole texts begin with. TRL tokenises explicit prompts and answers as a whole, too, so that
a prompt loses its last token wherever that merges with an answer's first letters; here the boundary
lies where generation would start, as for `prompt` and `completion` (encoding.py).

Images of a prompt become as many tokens as each needs (images/expansion.py), all of which must
be among those that the answers share.

A prompt without a token gets the bos token, or eos where the tokenizer has none, so that the first
token of each answer has one that predicts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from longctx.errors import UserError
from longctx.train.data.chat.rendering import continued
from longctx.train.data.reading.groups import Group
from longctx.train.data.reading.records import CHAT_ANSWERS, Document
from longctx.train.data.text.encoding import (
    check_chat_template,
    check_no_image,
    check_places,
    check_vocabulary,
    prompt_ids,
    text_ids,
    with_end,
)
from longctx.train.data.text.windows import tokenise

if TYPE_CHECKING:  # Pillow is needed where images are read alone
    from longctx.train.data.images.processor import ImageProcessor


def encode_groups(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
    images: ImageProcessor | None = None,
) -> list[Group]:
    """Tokenises documents of prompts with their answers, in order. `images` are those of a model
    that sees some.

    Raises UserError for what the chat template refuses, an answer without a token, an image that
    is none and a token id of `vocab_size` or more.
    """
    # To its end, or the process that renders would be taken for one that nobody hears.
    in_turns = [document for document in documents if document.kind in CHAT_ANSWERS]
    chats = iter([*_chats(in_turns, tokenizer, images)])
    groups = [
        next(chats) if document.kind in CHAT_ANSWERS else _strings(document, tokenizer, images)
        for document in documents
    ]
    for document, group in zip(documents, groups, strict=True):
        if images is not None:
            check_places(document)
        if not all(map(len, group.answers)):
            raise UserError(f"{document.where}: an answer has no token: remove the record")
        for ids in (group.prompt, *group.answers):
            check_vocabulary(int(ids.max(initial=-1)), vocab_size)
    return groups


def _strings(
    document: Document, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> Group:
    content = document.content
    prompt = prompt_ids(tokenizer, content["prompt"])
    if content.get("joined"):
        texts = [content["prompt"] + answer for answer in content["answers"]]
        whole = [with_end(text_ids(tokenizer, text), tokenizer) for text in texts]
        prompt, answers, _ = cut_at_shared(prompt, whole)
    else:
        answers = [
            with_end(tokenise(tokenizer, text, add_special_tokens=False).ids, tokenizer)
            for text in content["answers"]
        ]
    if not len(prompt):
        prompt = _start(tokenizer, document.where)
    if images is not None:
        check_no_image(np.concatenate([prompt, *answers]), document, images)
    return _group(content, prompt, answers)


def _chats(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> Iterator[Group]:
    for document in documents[:1]:
        check_chat_template(tokenizer, document.where)
    texts = continued(documents, tokenizer, parts=images is not None)
    for document, (prompt, wholes) in zip(documents, texts, strict=True):
        given, pixels = [prompt, *wholes], 0
        if images is not None:
            given, pixels = _with_images(given, document, images)
        ids, *whole = (tokenise(tokenizer, text, add_special_tokens=False).ids for text in given)
        shared, answers, dropped = cut_at_shared(ids, whole)
        if not len(shared):
            raise UserError(
                f"{document.where}: the chat template renders no beginning of the prompt alike "
                "alone and before its answers: use another one"
            )
        if not all(map(len, answers)):
            raise UserError(
                f"{document.where}: the chat template shows nothing of an answer: use another one"
            )
        if images is not None and any(images.marks(answer).any() for answer in answers):
            raise UserError(
                f"{document.where}: the chat template renders what stands before an image, or the "
                "image, otherwise alone than before an answer: use another one"
            )
        yield replace(_group(document.content, shared, answers, dropped), pixels=pixels)


def _with_images(
    texts: Sequence[str], document: Document, images: ImageProcessor
) -> tuple[list[str], int]:
    """Returns the texts with what stands for each image, of which each is opened once, and the
    hash of the images."""
    from longctx.train.data.images.expansion import expanded, texts_of

    inserted, pixels = texts_of(document.content.get("pictures", ()), images, document.where)
    shown = [expanded(text, (), inserted, images, document.where)[0] for text in texts]
    return shown, pixels


def cut_at_shared(
    prompt: np.ndarray,  # (n,) int32
    whole: Sequence[np.ndarray],  # (m_i,) int32 each: prompt and answer
) -> tuple[np.ndarray, list[np.ndarray], int]:
    """The tokens that the prompt and all wholes begin with, what each whole has after them, and the
    number of the prompt's tokens that are none of them."""
    shared = min(_common(prompt, ids) for ids in whole)
    return prompt[:shared], [ids[shared:] for ids in whole], len(prompt) - shared


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _start(tokenizer: PreTrainedTokenizerBase, where: str) -> np.ndarray:
    """Returns the one token, bos or eos, that takes the place of an empty prompt. Raises UserError
    if the tokenizer has neither."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return np.array([token_id], np.int32)
    raise UserError(
        f"{where}: the prompt is empty, and the tokenizer has neither a bos nor an eos token to "
        "stand for it: write a prompt"
    )


def _group(
    content: dict[str, Any], prompt: np.ndarray, answers: Sequence[np.ndarray], dropped: int = 0
) -> Group:
    return Group(
        prompt,
        tuple(answers),
        tuple(content["sides"]),
        margin=content.get("margin"),
        dropped=dropped,
        images=len(content.get("pictures", ())),
    )
