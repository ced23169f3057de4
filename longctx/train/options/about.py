"""Facts about an option besides its type and default: its range, its group in the help, and what it
needs.

Our options say it where they stand (arguments.py, task.py), in the metadata of their
fields; for those of transformers theirs.py has a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from longctx.ranges import Range


@dataclass(frozen=True)
class Need:
    """A condition without which options do nothing. A run says so and goes on, because runs share
    recipes."""

    words: str
    is_met: Callable[[Any, Any, Any], bool]
    """Whether options of model, data and training, the three dataclasses, meet the need."""


class Resume(Enum):
    """The meaning of another value in a resumed run: other rows or numbers are refused, and what
    people change on purpose is applied. An option of none changes speed, memory or rounding
    alone."""

    ROWS = 1
    NUMBERS = 2
    APPLIED = 3


ROWS, NUMBERS, APPLIED = Resume
Fact = Range | Need | Resume


@dataclass(frozen=True, kw_only=True)
class About:
    """The facts about an option."""

    group: str = ""
    """Its group in the help."""
    rare: bool = False
    """Whether --help_all alone lists it."""
    says: str = ""
    """A line for the help, instead of transformers' own text."""
    range: Range = Range()
    """The numbers that it may be; any that is finite and fits in 32 bits by default."""
    needs: tuple[Need, ...] = ()
    resume: Resume | None = None

    @classmethod
    def of(cls, group: str, facts: Sequence[Fact], **rest: Any) -> About:
        """Makes the facts of an option from facts in any order: a range, a kind of resuming,
        needs."""
        ranges = [fact for fact in facts if isinstance(fact, Range)] or [cls.range]
        needs = tuple(fact for fact in facts if isinstance(fact, Need))
        resume = next((fact for fact in facts if isinstance(fact, Resume)), None)
        return cls(group=group, range=ranges[0], needs=needs, resume=resume, **rest)


def having(group: str, *facts: Fact, rare: bool = False) -> Callable[..., Any]:
    """Makes fields of a dataclass behind the command line, of which all this is true."""

    def option(default: Any, help: str, *more: Fact, **for_argparse: Any) -> Any:
        known = {**for_argparse, "help": help, "about": About.of(group, (*facts, *more), rare=rare)}
        if isinstance(default, list):
            return field(default_factory=default.copy, metadata=known)
        return field(default=default, metadata=known)

    return option


CHECKPOINTS = Need(
    "--class_type vanilla or liger, or --parts; custom and any always compute again what they do "
    "not keep",
    lambda m, d, t: not m.keeps_inputs,
)
