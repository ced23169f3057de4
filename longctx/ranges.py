"""Ranges of numbers, for options and for arguments of functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from longctx.errors import UserError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included unless they are `open_low` or `open_high`. NaN is
    in no range."""

    low: float = -(2**31)
    high: float = 2**31 - 1
    open_low: bool = False
    open_high: bool = False

    def problem(self, value: float) -> str | None:
        """Returns what a value outside the range must be instead; None for one inside."""
        if math.isnan(value):
            return "a number"
        if value < self.low or (self.open_low and value == self.low):
            return f"{'above' if self.open_low else 'at least'} {self.low}"
        if value > self.high or (self.open_high and value == self.high):
            return f"{'below' if self.open_high else 'at most'} {self.high}"
        return None


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1, open_high=True)


def check_argument(call: str, name: str, value: Any, range_: Range, *, whole: bool = False) -> None:
    """Raises UserError for an argument of a function that is no number, or out of its range."""
    kind = Integral if whole else Real
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = "a whole number" if whole else "a number"
        raise UserError(f"{call}: {name} must be {expected}, got {value!r}")
    if problem := range_.problem(float(value)):
        raise UserError(f"{call}: {name} must be {problem}, got {value!r}")
