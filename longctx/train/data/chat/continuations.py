"""A conversation's prompt and each answer to it, as the chat template renders them.

    prompt      template(prompt, generation prompt)     <|user|>Why?<|end|><|assistant|>
    texts       template(prompt + answer), for each     <|user|>Why?<|end|><|assistant|>So.<|end|>

Both are what TRL renders for its preference tasks. The answer is what a text has beyond the prompt
(encoding_groups.py): all of it counts, so no mask is needed, and templates that rewrite earlier
turns can be used. What a template leaves out of a conversation is refused as elsewhere
(shown_content.py), and an answer without an end gets one (ends.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from longctx.train.data.chat.conversation import Asked, Renderer, unless_refused
from longctx.train.data.chat.ends import with_ends
from longctx.train.data.chat.shown_content import check_shown, check_words

Continued = tuple[str, list[str]]
"""The rendered prompt, and the rendered conversation with each answer."""


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """The conversations that one prompt begins; rendering.py runs it in the process with limits."""

    conversations: tuple[Asked, ...]
    prompt_turns: int
    where: str

    @property
    def chars(self) -> int:
        return sum(conversation.chars for conversation in self.conversations)

    def run(self, alive: Callable[[], None]) -> Continued:
        """Calls `alive` after each call of the template. Raises UserError for a conversation that
        the template refuses or leaves something out of."""
        first = self.conversations[0]
        turns = first.messages[: self.prompt_turns]
        renders = [Renderer(conversation, alive) for conversation in self.conversations]
        texts = [render.own(render.conversation.messages)[0] for render in renders]
        prompt = renders[0].prompt(turns, *texts)
        return prompt, [
            _checked(render, prompt, text) for render, text in zip(renders, texts, strict=True)
        ]


def _checked(render: Renderer, prompt: str, text: str) -> str:
    """Returns the text, with a token that ends the answer. Raises UserError where it leaves out a
    part."""
    asked = render.conversation

    def own(changed: Asked) -> str:
        return render.call(changed, changed.messages, changed.template)[0]

    check_shown(asked, text, own)
    answer = len(os.path.commonprefix([prompt, text])), len(text)
    if answer[0] == answer[1]:
        return text
    check_words(asked, text, [answer] * len(asked.trained))
    ended, ((_, end),) = with_ends(
        (text, [answer]), asked.words[-1:], asked.tokens, lambda: unless_refused(own, asked)
    )
    return text if ended == text else ended[:end]
