"""A conversation's prompt and each answer to it, as the chat template renders them.

    prompt      template(prompt, generation prompt)     <|user|>Why?<|end|><|assistant|>
    texts       template(prompt + answer), for each     <|user|>Why?<|end|><|assistant|>So.<|end|>

Both are what TRL renders for its preference tasks. The answer is what a text has beyond the prompt
(encoding_groups.py): all of it counts, so no mask is needed, and templates that rewrite earlier
turns can be used. What a template leaves out of a conversation is refused as elsewhere (masks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longctx.data.masks import Conversation, Renderer, check_shown

Continued = tuple[str, list[str]]
"""The rendered prompt, and the rendered conversation with each answer."""


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """The conversations that one prompt begins; chat.py runs it in the process with limits."""

    conversations: tuple[Conversation, ...]
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
        prompt, _ = Renderer(first, alive).own(turns, add_generation_prompt=True)
        return prompt, [_text(conversation, alive) for conversation in self.conversations]


def _text(conversation: Conversation, alive: Callable[[], None]) -> str:
    render = Renderer(conversation, alive)
    text, _ = render.own(conversation.messages)
    check_shown(
        conversation,
        text,
        lambda changed: render.call(changed, changed.messages, changed.template)[0],
    )
    return text
