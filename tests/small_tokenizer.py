"""Tokenizers of a few hundred tokens, for tests: the default one's own make, trained in 10 ms."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from longctx.train.data.text.tokenizer import as_pretrained, train_backend

TEXTS = ["def attention(query, key, value):\n    return softmax(query @ key.T) @ value\n"] * 4
# The same ChatML without generation markers.
PLAIN_CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _backend() -> str:
    return train_backend(TEXTS, 320).to_str()


def small_tokenizer(chat_template: str | None = "default") -> PreTrainedTokenizerFast:
    tokenizer = as_pretrained(Tokenizer.from_str(_backend()))
    if chat_template != "default":
        tokenizer.chat_template = chat_template
    return tokenizer
