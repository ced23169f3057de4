"""Our chat templates with generation markers, and how a tokenizer's own is recognised.

Most families' templates have no `{% generation %}` markers, and some rewrite earlier turns: Qwen3's
drops their reasoning, Mistral's moves the system prompt into the last user turn, Phi-3's ends every
conversation with a token of its own. The templates in the folder `templates` render the same with
markers; options tell the versions of a family apart.

A tokenizer's template is recognised by what it renders: for every answer of BATTERY the prompt and
the answer must be those of ours (`same_at`). assistant_masks.py compares the same for every
conversation that is trained, so nothing outside the battery is taken on trust.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from longctx.errors import UserError
from longctx.train.data.chat.assistant_masks import MARKERS, Conversation, same_at
from longctx.train.data.chat.conversation import Renderer, Training

FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True, kw_only=True)
class TemplateFamily:
    """One version of a family's format."""

    name: str
    file: str
    """Name of the template's file in the folder `templates`."""
    options: dict[str, Any] = field(default_factory=dict)
    signs: Sequence[str]
    """Texts that the tokenizer's own template holds; without one of them nothing is rendered."""
    rewrites: bool = False
    """Whether an answer that is only read has lost its reasoning even where it is the last."""
    note: str
    """Says what is trained, for the line that is printed."""

    @property
    def training(self) -> Training:
        return Training(template=_read(self.file), options=self.options, rewrites=self.rewrites)

    def __str__(self) -> str:
        return f"chat template: {self.name}'s, through longctx's {self.file}: {self.note}"


def _families() -> tuple[TemplateFamily, ...]:
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

    def note(row: dict[str, Any]) -> str:
        return "; ".join(found["notes"][name] for name in row.get("note", ["marked"]))

    return tuple(TemplateFamily(**{**row, "note": note(row)}) for row in found["families"])


FAMILIES = _families()
"""Families of chat templates, of training_templates.yaml; the first that is recognised is taken."""


@functools.cache
def _read(file: str) -> str:
    return FOLDER.joinpath(file).read_text(encoding="utf-8")


@functools.cache
def identity() -> str:
    """Changes whenever what is made of a conversation may: the templates and their options."""
    parts = [(family.name, _read(family.file), family.options) for family in FAMILIES]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def candidates(template: str) -> tuple[TemplateFamily, ...]:
    """Returns the families whose signs the template holds. One that has markers has no need of
    ours."""
    if MARKERS.search(template):
        return ()
    return tuple(f for f in FAMILIES if all(sign in template for sign in f.signs))


def _turn(role: str, content: str, **extra: str) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


_ASKED, _SYSTEM = _turn("user", "one"), _turn("system", "Be brief.")
_ANSWERED = _turn("assistant", "two")
_THOUGHT = _turn("assistant", "four", reasoning_content="as three is less")
BATTERY = (
    [_ASKED, _ANSWERED],
    [_SYSTEM, _ASKED, _ANSWERED],
    [_ASKED, _ANSWERED, _turn("user", "three"), _turn("assistant", "five")],
    [_SYSTEM, _ASKED, _ANSWERED, _turn("user", "three"), _turn("assistant", "five")],
    [_ASKED, _THOUGHT, _turn("user", "six"), _THOUGHT],
    [_turn("user", " one\n"), _turn("assistant", "\n  two \n"), _ASKED, _ANSWERED],
    [_turn("system", ""), _ASKED, _ANSWERED],
)
"""Conversations by which a template is recognised."""


@dataclass(frozen=True, kw_only=True)
class Recognition:
    """A question to the child process: whose template is this?"""

    candidates: tuple[TemplateFamily, ...]
    template: str
    special_tokens: dict[str, str]
    where: str

    def run(self, alive: Callable[[], None]) -> TemplateFamily | None:
        return next((f for f in self.candidates if self._matches(f, alive)), None)

    def _matches(self, family: TemplateFamily, alive: Callable[[], None]) -> bool:
        """Whether all answers are the same that the tokenizer's template can render."""
        seen, hides_system = False, False
        for messages in BATTERY:
            conversation = Conversation(
                messages=messages,
                template=self.template,
                training=family.training,
                special_tokens=self.special_tokens,
                where=self.where,
            )
            render = Renderer(conversation, alive)
            try:
                text, _ = render.own(messages)
                if messages[0] is _SYSTEM:
                    hides_system = text == render.own(messages[1:])[0]
            except UserError:  # a format without system prompts, say
                continue
            if hides_system and messages[0]["role"] == "system":
                continue
            if not all(same_at(conversation, render, i) for i in conversation.trained):
                return False
            seen = True
        return seen
