"""Which rows of profiling/results hold a figure that a page shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from paths import ROOT

RESULTS = ROOT / "profiling/results"


@dataclass(frozen=True)
class Figure:
    """A number as a page prints it; a table whose header gives no unit has figures without."""

    text: str
    unit: str

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def half(self) -> float:
        """Half of its last digit: 0.05 of 36.7, and 50 of 59,300."""
        whole, _, decimals = self.text.replace(",", "").partition(".")
        zeros = len(whole) - len(whole.rstrip("0")) if not decimals and len(whole) > 3 else 0
        return 0.5 * 10.0 ** (zeros - len(decimals)) + 1e-9

    def times(self, factor: float) -> Figure:
        """Another figure of as many digits, about `factor` times as large."""
        decimals = len(self.text.partition(".")[2])
        moved = round(self.value * factor, decimals)
        if moved == self.value:
            moved += 10.0**-decimals * (1 if factor > 1 else -1)
        return replace(self, text=f"{moved:.{decimals}f}")


By = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Source:
    """Where the figures of a place are from."""

    files: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    across: By = ()
    down: By = ()
    value: tuple[str, ...] = ()
    """The keys of rows whose values the figures are; without them all are."""
    together: bool = False
    """Whether each line of a table is one place, though several rows hold it."""
    ratio: str = ""
    """The key of rows' values of which shares and ratios are made."""
    unmeasured: frozenset[str] = frozenset()
    """The figures that no row has to hold; "*" stands for all."""


@dataclass(frozen=True, eq=False)
class Row:
    words: dict[str, str]
    """Its own keys, with their values as text, by which a page may name it."""
    numbers: tuple[tuple[str, float], ...]
    whole: frozenset[int]


PASSED_OVER = {"ladder", "cut", "versions", "peer_versions", "losses", "on", "capacity_gib"}
PASSED_OVER |= {"host_free_gib", "host_room_gib", "loss_error", "gradient_error"}
"""Lists and settings of rows that are no measurements by themselves."""


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name in value.keys() - PASSED_OVER:
            yield from _numbers(value[name], name)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(part, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, float(value)


def _row(found: dict[str, Any], reserved: bool) -> Row:
    numbers = [pair for pair in _numbers(found) if reserved or pair[0] != "reserved_gib"]
    if needles := found.get("needles"):
        numbers.append(("found", sum(n["found"] for n in needles) / len(needles)))
    for name in [key.removeprefix("measured_") for key in found if key.startswith("measured_")]:
        for plan in ("predicted", "own_choice"):
            if planned := found.get(f"{plan}_{name}"):
                numbers.append((f"{plan}_{name}_off", abs(planned / found[f"measured_{name}"] - 1)))
    whole = {int(value) for _, value in numbers if value == int(value)}
    names = f"{found.get('cell')} {found.get('rows')}"  # which say lengths in words
    whole.update(map(int, re.findall(r"\d{4,}", names)))
    return Row({key: str(value) for key, value in found.items()}, tuple(numbers), frozenset(whole))


@cache
def rows_of(name: str, reserved: bool) -> tuple[Row, ...]:
    """A results file's rows, and its head with the number of them. A figure of memory is a peak
    of what was allocated; only a text that says so has what the allocator reserved."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    rows = read["rows"]
    head = {key: value for key, value in read.items() if key != "rows"} | {"count": len(rows)}
    return tuple(_row(found, reserved) for found in [*rows, head])


def rows_among(source: Source, settings: Iterable[int], reserved: bool) -> list[Row]:
    """The rows that a source names, without those of other lengths where some have these."""
    found = [row for name in source.files for row in rows_of(name, reserved)]
    for key, value in source.where:
        found = [row for row in found if row.words.get(key, "absent") in value.split("|")]
    found = [row for row in found if any(n in row.whole for n in settings)] or found
    return [_only(row, source.value) if source.value else row for row in found]


@cache
def _only(row: Row, keys: tuple[str, ...]) -> Row:
    return replace(row, numbers=tuple(pair for pair in row.numbers if pair[0] in keys))


SCALES: dict[str, dict[str, float]] = {
    "s": {"s": 1, "s_per_step": 1, "ms": 1e-3},
    "ms": {"ms": 1, "us": 1e-3, "s": 1e3},
    "GiB": {"gib": 1, "mb": 1 / 1024},
    "MiB": {"mib": 1},
    "tokens/s": {"tokens_per_s": 1},
    "TFLOP/s": {"tflop_per_s": 1, "tflops": 1},
    "TB/s": {"tb_per_s": 1},
}
"""Unit of a figure -> how keys of such values end -> what turns the value into the figure."""
ENDS = sorted({end for ends in SCALES.values() for end in ends}, key=len, reverse=True)


@cache
def _factor(key: str, unit: str) -> float | None:
    """What turns a value of `key` into a figure in `unit`; None if it is of another kind."""
    end = next((end for end in ENDS if key == end or key.endswith(f"_{end}")), "")
    if unit == "%":
        return None if end else 100
    return SCALES.get(unit, {}).get(end) if unit else 1


@cache
def holds(row: Row, figure: Figure) -> bool:
    """Whether the figure is one of the row's values, rounded."""
    for key, value in row.numbers:
        factor = _factor(key, figure.unit)
        if factor and abs(value * factor - figure.value) <= figure.half:
            return True
    return False


def one_row(figures: Iterable[Figure], rows: Iterable[Row]) -> bool:
    figures = list(figures)
    return any(all(holds(row, figure) for figure in figures) for row in rows)


def derived(figure: Figure, others: Iterable[Figure]) -> bool:
    """Whether a share or a ratio is that of two figures which stand beside it."""
    if figure.unit not in ("%", "times"):
        return False
    pairs = [(a, b) for a in others for b in others if a is not b and a.unit == b.unit]
    slack = 0.005 * figure.value if figure.unit == "times" else 0  # both were rounded
    return any(
        _is_ratio(figure, a.value, b.value, slack)
        for a, b in pairs
        if a.unit not in ("%", "times") and a.value and b.value
    )


def of_two(figure: Figure, rows: list[Row], key: str) -> bool:
    """Whether a share or a ratio is that of the values which two of a few rows have of `key`."""
    values = [value for row in rows for name, value in row.numbers if name == key]
    assert not key or 2 <= len(values) <= 4, f"name two rows with {key}, not {len(values)}"
    pairs = [(a, b) for a in values for b in values if a != b]
    return figure.unit in ("%", "times") and any(_is_ratio(figure, a, b) for a, b in pairs)


def _is_ratio(figure: Figure, a: float, b: float, slack: float = 0) -> bool:
    """a of b: as a ratio, or in percent also what a is less or more than b."""
    shares = (a / b,) if figure.unit == "times" else (a / b, 1 - a / b, a / b - 1)
    scale = 1 if figure.unit == "times" else 100
    return any(abs(share * scale - figure.value) <= figure.half + slack for share in shares)


def missing(figures: Iterable[Figure], rows: list[Row]) -> list[Figure]:
    """The figures that no row holds. Neighbours are cut into the fewest runs that one row holds
    together; a figure that is a run by itself must name its row: no row has one a tenth off."""
    figures = list(figures)
    best: list[tuple[int, list[Figure]]] = [(0, [])]
    for end, last in enumerate(figures, 1):
        options = [(best[-1][0] + len(figures) + 1, [*best[-1][1], last])]
        held = rows
        for start in range(end - 1, -1, -1):
            held = [row for row in held if holds(row, figures[start])]
            if not held:
                break
            if end - start > 1 or not near(last, rows):
                options.append((best[start][0] + 1, best[start][1]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def near(figure: Figure, rows: list[Row]) -> bool:
    """Whether a row holds the figure a tenth more or less."""
    others = [figure.times(factor) for factor in (0.9, 1.1)]
    return any(holds(row, other) for other in others for row in rows)
