"""A document's tokens, and which of them are trained.

    text         [bos] t t t t eos               all of it; bos only where the tokenizer adds one
    completion   [bos] p p p | c c c eos         the completion and the end token
    chat         ... assistant\\n | a a a end     assistant turns with their end-of-turn token

Prompt and completion are tokenised apart, so the boundary lies where generation would start.
A conversation is rendered once by the chat template and tokenised once; the characters that are
trained come from the template's `{% generation %}` markers, or, where it has none, from rendering
every prefix: an assistant turn is what it adds to "everything before + generation prompt". That
takes every prefix to be a prefix of the whole, which is checked: a template that rewrites earlier
turns has no exact mask, and is refused. A token is trained if any of its characters is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from longctx.data.packing import Piece
from longctx.data.records import Document
from longctx.data.windows import WINDOW_CHARS, tokenise
from longctx.errors import UserError

ENCODE_CHARS = WINDOW_CHARS  # tokenised together: more is no faster and takes 600 bytes a token
Span = tuple[int, int]


def encode(
    documents: Sequence[Document | None],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None = None,
) -> list[Piece]:
    """Tokenises documents, in order; None, a blank record, has no tokens.

    Raises UserError for a conversation without an exact mask and a token id of `vocab_size` or
    more.
    """
    pieces = [Piece(np.empty(0, np.int32), np.empty(0, bool))] * len(documents)
    texts = {i: d.content for i, d in enumerate(documents) if d and d.kind == "text"}
    for group in _groups(list(texts), [len(text) for text in texts.values()]):
        for i, ids in zip(group, _ids(tokenizer, [texts[i] for i in group]), strict=True):
            pieces[i] = _piece(_end(ids, tokenizer), trained_from=0)
    for i, document in enumerate(documents):
        if document and document.kind == "completion":
            pieces[i] = _completion(document, tokenizer)
        elif document and document.kind == "chat":
            pieces[i] = _chat(document, tokenizer)
    for piece in pieces:
        check_vocabulary(int(piece.input_ids.max(initial=-1)), vocab_size)
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


def _completion(document: Document, tokenizer: PreTrainedTokenizerBase) -> Piece:
    prompt, completion = document.content
    before = tokenise(tokenizer, prompt).ids
    if len(before) and before[-1] == tokenizer.eos_token_id:  # a tokenizer that adds eos by itself
        before = before[:-1]
    ids = np.concatenate([before, tokenise(tokenizer, completion, add_special_tokens=False).ids])
    return _piece(_end(ids, tokenizer), trained_from=len(before))


def _chat(document: Document, tokenizer: PreTrainedTokenizerBase) -> Piece:
    if not tokenizer.chat_template:
        raise UserError(
            f"{document.where}: the tokenizer has no chat template; give an instruct model's "
            "tokenizer with --tokenizer_name"
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"{document.where}: chat data needs a fast tokenizer (tokenizer.json) to find the "
            "assistant's tokens; give one with --tokenizer_name"
        )
    text, spans = trained_characters(document, tokenizer)
    if _leaves_out_calls(document, tokenizer, text):
        raise UserError(
            f"{document.where}: the chat template leaves out `tool_calls`, so no call would be "
            "trained; use a template that shows them, or write the calls into `content`"
        )
    tokens = tokenise(tokenizer, text, add_special_tokens=False, offsets=True)
    assert tokens.offsets is not None
    trained = _overlaps(tokens.offsets, spans)
    if not trained[1:].any():
        raise UserError(
            f"{document.where}: the chat template marks no token of an assistant turn; fix its "
            "{% generation %} markers or remove them"
        )
    trained[0] = False
    return Piece(tokens.ids, trained)


def trained_characters(
    document: Document, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[Span]]:
    """The conversation as the chat template renders it, and the [start, end) spans to train."""
    messages, tools = document.content["messages"], document.content.get("tools")
    template = tokenizer.get_chat_template(tools=tools)

    common: dict[str, Any] = {
        "tools": tools,
        "chat_template": template,
        **tokenizer.special_tokens_map,
    }

    def render(turns: list[dict[str, Any]], **options: Any) -> tuple[str, list[Span]]:
        # Not through apply_chat_template: it finds the markers' tokens with `char_to_token`, which
        # is None for a leading space under ByteLevel(trim_offsets=True), and then silently drops
        # the rest of the conversation from the mask.
        try:
            rendered: Any = render_jinja_template(**common, conversations=[turns], **options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{document.where}: the chat template refuses this conversation: {reason}"
            ) from error
        (text,), spans = rendered
        return text, spans[0] if spans else []

    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return render(messages, return_assistant_tokens_mask=True)

    whole, _ = render(messages)
    ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn, _ = render(messages[: i + 1])
        if i > 0:
            prompt, _ = render(messages[:i], add_generation_prompt=True)
        else:  # templates need a turn; the generation prompt is what they would add after it
            header = render(messages[:1], add_generation_prompt=True)[0].removeprefix(turn)
            prompt = turn[: turn.find(header) + len(header)] if header and header in turn else ""
        if not (prompt and turn.startswith(prompt) and whole.startswith(turn)):
            raise UserError(
                f"{document.where}: the chat template rewrites earlier turns (turn {i + 1}), so "
                "the trained tokens cannot be told; use a template with {% generation %} markers"
            )
        # Generation stops at the end-of-turn token: the line break after it is never generated.
        end = len(turn.rstrip()) if turn.rstrip().endswith(ends) else len(turn)
        spans.append((len(prompt), max(end, len(prompt))))
    return whole, spans


def _leaves_out_calls(document: Document, tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a conversation with tool calls is rendered as it is without them."""
    turns = document.content["messages"]
    if not any(turn.get("tool_calls") for turn in turns):
        return False
    plain = [{k: v for k, v in turn.items() if k != "tool_calls"} for turn in turns]
    try:
        without = replace(document, content={**document.content, "messages": plain})
        return trained_characters(without, tokenizer)[0] == text
    except UserError:  # the template minds
        return False


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


def _end(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    eos = tokenizer.eos_token_id
    return ids if eos is None or (len(ids) and ids[-1] == eos) else np.append(ids, np.int32(eos))


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """(n,) int32 for each of several texts."""
    if len(texts) == 1:
        return [tokenise(tokenizer, texts[0]).ids]
    encoded = tokenizer(
        texts, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]


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
