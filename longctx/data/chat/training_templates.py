"""Our chat templates with generation markers, and how a tokenizer's own is recognised.

Most families' templates have no `{% generation %}` markers, and some rewrite earlier turns: Qwen3's
drops their reasoning, Mistral's moves the system prompt into the last user turn, Phi-3's ends every
conversation with a token of its own. The templates in the folder `templates` render the same with
markers; options tell the versions of a family apart.

A tokenizer's template is recognised by what it renders: for every answer of BATTERY the prompt and
the answer must be those of ours (`same_at`). masks.py compares the same for every conversation
that is trained, so nothing outside the battery is taken on trust.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.data.chat.conversation import Renderer, Training
from longctx.data.chat.masks import MARKERS, Conversation, same_at
from longctx.errors import UserError

FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One version of a family's format."""

    name: str
    file: str
    """Name of the template's file in the folder `templates`."""
    options: dict[str, Any] = field(default_factory=dict)
    signs: tuple[str, ...]
    """Texts that the tokenizer's own template holds; without one of them nothing is rendered."""
    rewrites: bool = False
    """Whether an answer that is only read has lost its reasoning even where it is the last."""
    note: str = "its tokens, with the answers marked"
    """Says what is trained, for the line that is printed."""

    @property
    def training(self) -> Training:
        return Training(template=_read(self.file), options=self.options, rewrites=self.rewrites)

    def __str__(self) -> str:
        return f"chat template: {self.name}'s, through longctx's {self.file}: {self.note}"


REASONING_KEPT = (
    "every trained turn keeps its reasoning, which the tokenizer's own drops from earlier turns; "
    "turns with `train` false lose it as there"
)
SYSTEM_LAST = (
    "a system prompt and tools stand in the last user turn, as in a chat with the model, so "
    "earlier answers are trained without them"
)
_QWEN = dict[str, Any](file="qwen.jinja")
_LLAMA = dict[str, Any](file="llama.jinja", signs=("<|start_header_id|>", "<|eot_id|>"))
_MISTRAL = dict[str, Any](file="mistral.jinja", signs=("[INST]", "[/INST]"))
_TURNS = {"start": "<|", "middle": "|>\n", "stop": "<|end|>", "gap": "\n", "final": True}
_GRANITE = {
    "start": "<|start_of_role|>",
    "middle": "<|end_of_role|>",
    "stop": "<|end_of_text|>",
    "gap": "\n",
    "blank": True,
}
_GRANITE_3 = (
    "Knowledge Cutoff Date: April 2024.{}Today's Date: {{date}}.{}You are Granite, developed by "
    "IBM. You are a helpful AI assistant."
)
NEXT_ROLE = "its tokens, with the answers marked up to the next role's token, which ends them"
FAMILIES = (
    Family(name="Llama 3", options={"blocks": False}, **_LLAMA),
    Family(name="Llama 3.1", options={"blocks": True, "date": "26 Jul 2024"}, **_LLAMA),
    Family(name="Llama 3.2", options={"blocks": True, "date": None}, **_LLAMA),
    Family(
        name="Qwen2",
        options={"default": "You are a helpful assistant.", "thinks": False},
        signs=("<|im_start|>", "You are a helpful assistant"),
        **_QWEN,
    ),
    Family(
        name="Qwen2.5",
        options={
            "default": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
            "thinks": False,
        },
        signs=("<|im_start|>", "You are Qwen"),
        **_QWEN,
    ),
    Family(
        name="Qwen3",
        options={"default": None, "thinks": True},
        signs=("<|im_start|>", "</think>"),
        note=REASONING_KEPT,
        **_QWEN,
    ),
    Family(
        name="Qwen3-Instruct-2507",
        options={"default": None, "thinks": False},
        signs=("<|im_start|>", "<tool_call>"),
        **_QWEN,
    ),
    Family(
        name="Mistral-7B-v0.2",
        options={
            "opening": " [INST] ",
            "closing": " [/INST]",
            "prefix": " ",
            "trimmed": False,
            "gap": " ",
            "early": True,
        },
        **_MISTRAL,
    ),
    Family(
        name="Mistral-7B-v0.3",
        options={
            "opening": "[INST] ",
            "closing": "[/INST]",
            "prefix": " ",
            "trimmed": True,
            "gap": " ",
            "early": False,
        },
        note=SYSTEM_LAST,
        **_MISTRAL,
    ),
    Family(
        name="Mistral-Nemo and Ministral",
        options={
            "opening": "[INST]",
            "closing": "[/INST]",
            "prefix": "",
            "trimmed": False,
            "gap": "",
            "early": False,
        },
        note=SYSTEM_LAST,
        **_MISTRAL,
    ),
    Family(
        name="Phi-3",
        file="turns.jinja",
        options={**_TURNS, "blank": True},
        signs=("<|end|>", "<|assistant|>"),
    ),
    Family(
        name="Phi-3.5",
        file="turns.jinja",
        options={**_TURNS, "blank": False},
        signs=("<|end|>", "<|assistant|>"),
    ),
    Family(
        name="Phi-4",
        file="turns.jinja",
        options={
            "start": "<|im_start|>",
            "middle": "<|im_sep|>",
            "stop": "<|im_end|>",
            "gap": "",
            "blank": True,
        },
        signs=("<|im_sep|>",),
    ),
    *(
        Family(
            name=name,
            file="turns.jinja",
            options={**_GRANITE, "default": default},
            signs=("<|start_of_role|>",),
        )
        for name, default in {
            "Granite 3.0": None,
            "Granite 3.1": _GRANITE_3.format("\n", "\n"),
            "Granite 3.3": _GRANITE_3.format(" ", " "),
            "Granite 4": (
                "You are a helpful assistant. Please ensure responses are professional, accurate, "
                "and safe."
            ),
        }.items()
    ),
    Family(
        name="Seed-OSS",
        file="turns.jinja",
        options={
            "start": "<seed:bos>",
            "middle": "\n",
            "stop": "<seed:eos>",
            "gap": "",
            "blank": True,
            "think": ["<seed:think>", "</seed:think>"],
            "trimmed": True,
        },
        signs=("<seed:",),
    ),
    Family(
        name="GLM-4",
        file="glm.jinja",
        options={"thinks": False},
        signs=("[gMASK]<sop>", "<|assistant|>"),
        note=NEXT_ROLE,
    ),
    Family(
        name="GLM-4.5",
        file="glm.jinja",
        options={"thinks": True},
        signs=("[gMASK]<sop>", "</think>"),
        note=f"{NEXT_ROLE}; {REASONING_KEPT}",
    ),
    Family(
        name="Nemotron-4",
        file="nemotron.jinja",
        options={"gap": "\n", "trimmed": False},
        signs=("<extra_id_0>System",),
        note=NEXT_ROLE,
    ),
    Family(
        name="Nemotron-Mini",
        file="nemotron.jinja",
        options={"gap": "\n\n", "trimmed": True},
        signs=("<extra_id_0>System",),
        note=NEXT_ROLE,
    ),
    *(
        Family(
            name="DeepSeek-R1-Distill",
            file="deepseek.jinja",
            options={"opening": opening},
            signs=("<｜User｜>", "</think>"),
            note=REASONING_KEPT,
            rewrites=True,
        )
        for opening in ("", "<think>\n")  # its generation prompt has had the second since 2025
    ),
)


@functools.cache
def _read(file: str) -> str:
    return FOLDER.joinpath(file).read_text(encoding="utf-8")


@functools.cache
def identity() -> str:
    """Changes whenever what is made of a conversation may: the templates and their options."""
    parts = [(family.name, _read(family.file), family.options) for family in FAMILIES]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def candidates(template: str) -> tuple[Family, ...]:
    """The families whose signs the template holds. One that has markers has no need of ours."""
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

    candidates: tuple[Family, ...]
    template: str
    special_tokens: dict[str, str]
    where: str

    def run(self, alive: Callable[[], None]) -> Family | None:
        return next((f for f in self.candidates if self._matches(f, alive)), None)

    def _matches(self, family: Family, alive: Callable[[], None]) -> bool:
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
