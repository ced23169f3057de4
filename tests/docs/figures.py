"""What figures a page shows: numbers with a unit, in the places where they stand together (a cell
or a line of a table, a sentence), and what the page says of each place's source.

A place's source is the results files that its own line or sentence links to, else its paragraph's.
A table's are those of the paragraph before it, else after it. A comment, which readers do not see,
says what a link cannot:

    <!-- planned -->                           a kind of `KINDS`: no row has these figures
    <!-- planned: 36.7, 115 -->                these figures alone have no row
    <!-- rows: h200_loss; impl=liger -->       files, and what their rows must have
    <!-- rows: h200_loss; down impl=liger,longctx -->   a table: a value for each line
    <!-- rows: h200_kernels; across op=rope,swiglu -->  a value for each of the last columns
    <!-- rows: h200_kernels; value fraction -->         the keys of the values
    <!-- rows: h200_loss plan_cells; together -->      lines of a table that two rows hold
    <!-- rows: h200_loss; ratio fwd_bwd_ms -->          shares and ratios are of two rows' values

A comment in a paragraph of its own is of the next block, one within a sentence or a table's line
of that. `-` stands for any value, `absent` for a key that a row does not have, `1|60` for either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from held import By, Figure, Row, Source, derived, missing, of_two, one_row, rows_among

KINDS = {
    "planned": "`longctx plan` predicts it, or counts with it",
    "counted": "it follows from sizes, by a formula or by counting",
    "given": "a budget, the size of a card, a host or a model, a bound that the code sets",
    "tested": "another test asserts it",
    "theirs": "the page that is linked there says it",
}


@dataclass(frozen=True)
class Place:
    """Figures that stand together."""

    page: str
    text: str
    figures: tuple[Figure, ...]
    source: Source
    settings: tuple[int, ...] = ()
    """Lengths of rows that stand beside them."""
    beside: tuple[Figure, ...] = ()
    """Figures, as the others of a table's line, of which a share or a ratio may be made."""
    of_one_row: bool = False
    """Whether one row has to hold all of them."""

    def measured(self) -> list[Figure]:
        """The figures that a row has to hold."""
        unmeasured = self.source.unmeasured
        others = (*self.figures, *self.beside, *(Figure(str(n), "") for n in self.settings))
        rows = self.rows() if self.source.ratio else []
        return [
            figure
            for figure in self.figures
            if not unmeasured & {figure.text, "*"}
            and not (derived(figure, others) or of_two(figure, rows, self.source.ratio))
        ]

    def rows(self) -> list[Row]:
        return rows_among(self.source, self.settings, "reserved" in self.text)

    def missing(self) -> list[Figure]:
        """The figures that no row holds, or not together where a table has them as one row's."""
        figures, rows = self.measured(), self.rows()
        if self.of_one_row and len(figures) > 1:
            return [] if one_row(figures, rows) else figures
        return missing(figures, rows)


# --- marks and links -------------------------------------------------------------------------

MARK = re.compile(r"<!--\s*(.*?)\s*-->", flags=re.S)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")


def read_mark(text: str) -> Source | None:
    """What a comment says; None for one that is not of figures."""
    kind, _, rest = text.replace("\xa0", " ").partition(":")
    if kind in KINDS:
        return Source(unmeasured=frozenset(re.split(r",\s+", rest.strip())) - {""} or {"*"})
    if kind != "rows":
        return None
    files, *clauses = (" ".join(part.split()) for part in rest.split(";"))
    where: list[tuple[str, str]] = []
    lists: dict[str, list[tuple[str, tuple[str, ...]]]] = {"across": [], "down": []}
    named: dict[str, str] = {"value": "", "ratio": ""}
    together = False
    for clause in clauses:
        head, _, pair = clause.partition(" ")
        key, _, value = (pair if head in lists else clause).partition("=")
        if head in lists:
            lists[head].append((key, tuple(re.split(r",\s*", value))))
        elif clause == "together":
            together = True
        elif head in named:
            named[head] = pair
        else:
            where.append((key, value))
    across, down = tuple(lists["across"]), tuple(lists["down"])
    keys = tuple(named["value"].split(",")) if named["value"] else ()
    return Source(tuple(files.split()), tuple(where), across, down, keys, together, named["ratio"])


def files_in(text: str) -> tuple[str, ...]:
    """The results files that a text links to or names by path."""
    return tuple(dict.fromkeys(re.findall(r"profiling/results/(\w+)\.json", text)))


def source_of(text: str, otherwise: Source) -> Source:
    """The source that a text's marks and links name, or else its block's."""
    marks = [mark for found in MARK.findall(text) if (mark := read_mark(found))]
    named = [mark for mark in marks if mark.files]
    files = files_in(text)
    source = named[-1] if named else replace(otherwise, files=files) if files else otherwise
    unmeasured = otherwise.unmeasured.union(*(mark.unmeasured for mark in marks))
    return replace(source, unmeasured=unmeasured)


# --- numbers ---------------------------------------------------------------------------------

UNITS = r"(?:%|(?:tokens/s|TFLOP/s|[TG]B/s|times|GiB|MiB|ms|seconds|s)\b)"
NUMBER = r"(?<![\w.,/$^])(?<!\w-)\d[\d,]*(?:\.\d+)?(?!\w|\.\d)"
SHORT = {"seconds": "s"}
WITH_UNIT = re.compile(rf"({NUMBER}(?:(?:, and|,| and| to| or) {NUMBER})*)\s?({UNITS})")
NAMED = re.compile(
    r"\b(TRL|PEFT|torch|transformers|accelerate|Python|CUDA|DeepSpeed|Liger-Kernel|bitsandbytes|"
    r"Triton|Lightning|axolotl|ms-swift|LLaMA-Factory|OLMo|Granite|Gemma|ERNIE|Llama|Mistral|GLM|"
    r"version|flash-attn-4|Qwen|InternLM|Phi|EXAONE|StarCoder|Cohere|Mamba)(?:'s)? v?\d[\w.]*"
    r"(?: to \d[\w.]*)?"
    rf"(?![\w.]|\s?{UNITS})"
)
"""Versions, and models with a number in their names."""


def plain(text: str) -> str:
    """A text as readers see it, without its code and its versions."""
    text = re.sub(r"`[^`\n]*`", "`", LINK.sub(r"\1", MARK.sub(" ", text)))
    return NAMED.sub("", text.replace("**", ""))


def figures_in(text: str, unit: str | None = None, cell: bool = True) -> tuple[Figure, ...]:
    """Numbers with a unit, also those of a list that ends in one. `unit` is that of a table's
    header or "", and in prose "" where the place has a source, else None: unless it is None,
    decimals are figures without a unit, too. In a cell so are whole numbers below a unit and, if
    no word follows, in brackets or beside decimals; in brackets they have the unit GiB, if another
    figure there has it."""
    return tuple(figure for figure, _ in _read(text, unit, cell))


def settings_in(text: str, unit: str | None = None) -> tuple[int, ...]:
    """Whole numbers of a thousand and more that are no figures: the lengths of rows."""
    taken = {at for _, at in _read(text, unit)}
    whole = [n for n in re.finditer(NUMBER, plain(text)) if n.start() not in taken]
    values = [int(n[0].replace(",", "")) for n in whole if "." not in n[0]]
    return tuple(value for value in values if value >= 1000)


def _read(text: str, unit: str | None, cell: bool = True) -> list[tuple[Figure, int]]:
    """The figures of a text, and where in its plain form they begin."""
    text = plain(text)
    found = {}
    for match in WITH_UNIT.finditer(text):
        short = SHORT.get(match[2], match[2])
        for number in re.finditer(NUMBER, match[1]):
            found[match.start() + number.start()] = Figure(number[0].rstrip(","), short)
    decimals = re.search(r"\d\.\d", text)
    for number in re.finditer(NUMBER, text) if unit is not None else ():
        figure = Figure(number[0].rstrip(","), unit or "")
        word = re.match(r"\s*[A-Za-z]", text[number.end() :])
        bracket = text[: number.start()].endswith("(")
        if bracket and "GiB" in text:  # as the host's beside the GPU's
            figure = replace(figure, unit="GiB")
        whole = cell and (unit or (not word and (bracket or decimals)))
        if number.start() not in found and ("." in figure.text or whole):
            found[number.start()] = figure
    return [(found[at], at) for at in sorted(found)]


# --- pages -----------------------------------------------------------------------------------


def comments_of(recipe: str) -> str:
    """The text in a recipe's comments, up to the prediction with which a paragraph may end:
    another test makes the plan again that stands below it."""
    lines = [line[2:] for line in recipe.splitlines() if line.startswith("#")]
    text = re.sub(r"^  +.*$", "", "\n".join(lines), flags=re.M)
    text = re.sub(r"(profiling/results/)\n", r"\1", text)
    return re.sub(r"(?i)[^.\n]*\bpredictions?\b.*?(?=\n\n|\Z)", "", text, flags=re.S)


def places(page: str, text: str) -> Iterator[Place]:
    """The places of a page with figures, in their order."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n\n)(?:    .*\n)+", "", text)
    for section in re.split(r"^(?=#+ )", text, flags=re.M):
        blocks = re.split(r"\n\s*\n", section)
        shown = [block for block in blocks if MARK.sub("", block).strip()]
        marks = ""
        for block in blocks:
            if block not in shown:
                marks += block
                continue
            at = shown.index(block)
            table = block.lstrip().startswith("|")
            near = [shown[at - 1] if at else "", *shown[at + 1 : at + 2]] if table else [block]
            source = source_of(marks, Source(next(filter(None, map(files_in, near)), ())))
            if not block.startswith("#"):
                yield from (of_table if table else of_prose)(page, block.strip(), source)
            marks = ""


def of_prose(page: str, text: str, source: Source) -> Iterator[Place]:
    for item in re.split(r"\n(?=\s*(?:- |\d+\. ))", text):
        item = MARK.sub(lambda mark: mark[0].replace(" ", "\xa0"), re.sub(r"\s+", " ", item))
        for sentence in re.split(r"(?:(?<=[.:])|(?<=-->)) (?=[A-Z`(\[*\d])", item):
            of_it = source_of(sentence, source)
            if figures := figures_in(sentence, "" if of_it.files else None, cell=False):
                settings = settings_in(sentence) or settings_in(item)
                yield Place(page, sentence, figures, of_it, settings)


def of_table(page: str, text: str, source: Source) -> Iterator[Place]:
    """A table's lines, if most are a row of results each, else its cells."""
    head, _, *lines = text.splitlines()
    wholes, parts = [], []
    for number, line in enumerate(lines):
        of_line = narrowed(source_of(line, source), source.down, number, len(lines))
        whole, cells = of_line_and_cells(page, cells_of(head), line, of_line)
        wholes.append(whole)
        parts += cells
    several = [whole for whole in wholes if len(whole.figures) > 1]
    alike = [whole for whole in several if one_row(whole.measured(), whole.rows())]
    most = bool(several) and 2 * len(alike) >= len(several) and not source.across
    by_line = most or source.together
    yield from (place for place in (wholes if by_line else parts) if place.figures)


def of_line_and_cells(
    page: str, heads: list[str], line: str, source: Source
) -> tuple[Place, list[Place]]:
    """A table's line as one place, and each of its cells with the figures of its label."""
    cells = cells_of(line)
    units = [None, *map(unit_of, heads[1:])]
    shown = [figures_in(cell, unit) for cell, unit in zip(cells, units, strict=True)]
    lengths = [settings_in(cell, unit) for cell, unit in zip(cells, units, strict=True)]
    together = tuple(figure for figures in shown for figure in figures)
    label = tuple(n for found in lengths for n in found)
    head = " ".join(heads)
    parts = []
    for column in range(1, len(cells)):
        settings = settings_in(heads[column]) or lengths[column] or label
        of_cell = narrowed(source, source.across, column, len(heads))
        for part in cells[column].split("; "):
            own = figures_in(part, units[column])
            figures = (*shown[0], *own) if own else ()
            text = f"{heads[column]} | {cells[0]} | {part}"
            parts.append(Place(page, text, figures, of_cell, settings, together, True))
    return Place(page, f"{head} | {line}", together, source, label, (), not source.together), parts


def cells_of(line: str) -> list[str]:
    line = re.sub(r"`[^`]*`", lambda code: code[0].replace("|", "/"), line.strip())
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def unit_of(head: str) -> str:
    """The unit that a column's header gives to its numbers."""
    head = plain(head)
    named = re.search(r"GiB|tokens/s|\bms\b|TFLOP/s|\bs (?=a\b)|\bs$|\bseconds\b", head)
    return "" if not named or re.search(r"\d", head) else SHORT.get(named[0], named[0].strip())


def narrowed(source: Source, by: By, at: int, of: int) -> Source:
    """The source of a table's line or column, by the value that a mark gives it."""
    chosen = [(key, values[at - of + len(values)]) for key, values in by if at >= of - len(values)]
    return replace(source, where=(*source.where, *(pair for pair in chosen if pair[1] != "-")))
