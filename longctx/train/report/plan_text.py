"""A plan in a terminal or a file: figures first, then bars of memory, what was chosen, ways out."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from longctx.errors import printable

WIDEST = 100
"""Columns, however wide the terminal is."""
NAMES = len("kept for backward")
"""Columns of the names of figures, in all of a plan's text."""
PARTS = {
    "products": "matmuls",
    "attention": "attention",
    "memory": "reading and writing",
    "layers": "layers",
    "waits": "waiting",
    "images": "images",
}
"""The parts of a step's seconds, in words."""
OF_SOME = ("layers", "images")
"""Those that not every step has."""
Lines = list[tuple[str, str]]
"""What it is, and its value."""


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.width = min(console.width, WIDEST)
    console.print(Text(printable(title_of(result)), style="bold"))
    console.print()
    console.print(_grid(figures(result), console, "green" if result["fits"] else "red"))
    for line in bars(result, console):
        console.print(line)
    console.print()
    console.print(_grid(chosen(result), console))
    if not result["fits"]:
        console.print()
        console.print(ways_out(result, console))
    if result.get("sweep"):
        console.print()
        console.print(_rows("Lengths that fit", result["sweep"], console))


def show_short(result: dict[str, Any]) -> None:
    """The figures alone, as a run shows them before it starts."""
    console = Console()
    console.width = min(console.width, WIDEST)
    console.print(Text(printable(title_of(result)), style="bold"))
    console.print(_grid([*figures(result), *chosen(result)[:2]], console))


def title_of(result: dict[str, Any]) -> str:
    count = result["rows"] * result["passes"]
    rows = f"{count} rows of {result['seq_len']} tokens" if count > 1 else None
    several, ranks = result["gpus"] > 1, result["sequence_parallel_size"]
    where = f"{result['gpus']} x {result['gpu']}" if several else result["gpu"]
    where += f", {ranks} of which share a row" if ranks > 1 else ""
    engine = f" under {result['engine']}" if result["engine"] else ""
    parts = f" with {', '.join(result['parts'])} alone" if result["parts"] else ""
    return (
        f"{result['model']}, {result['class_type']}{parts}{engine}, "
        f"{rows or 'a row of ' + str(result['seq_len']) + ' tokens'} on {where}"
    )


# --- figures ---------------------------------------------------------------------------------


def figures(result: dict[str, Any]) -> Lines:
    fits = result["fits"]
    several = result["gpus"] > 1
    lines = [("fits", f"yes{_but(result)}" if fits else f"no: {result['problem']}")]
    if "step_s" in result:
        would = "" if fits else "would take "
        lines += [
            ("a step", f"{would}{_range(result, 'step_s')} s{_why_a_range(result)}"),
            ("tokens/s", _range(result, "tokens_per_s")),
        ]
    lines += [
        (
            "GPU memory",
            f"{result['gpu_gib']:.1f} of {result['gpu_limit_gib']:.1f} GiB"
            f"{' of each GPU' * several}, in {result['peak']['phase']}",
        ),
        (
            "host memory",
            f"{result['host_gib']:.1f} of {result['host_free_gib']:.1f} GiB, "
            f"{result['host_locked_gib']:.1f} locked{_while_read(result)}",
        ),
    ]
    if result["class_type"] == "any":
        lines.append(("promised", _promise(result)))
    if images := result.get("images"):
        lines.append(("images", _images(images)))
    if less := result.get("less_memory"):
        shown = (f"{_range(row, 'step_s')} s in {row['gpu_memory_gib']:g} GiB" for row in less)
        lines.append(("with less", f"{', '.join(shown)} (--gpu_memory_gib)"))
    if result["graphs_gib"]:
        held = f"{result['graphs_gib']:.1f} GiB, so that nothing waits for single launches"
        lines.append(("CUDA graphs", held))
    elif result["no_graphs"]:
        lines.append(("CUDA graphs", f"none: {result['no_graphs']}"))
    if "days" in result:
        lines.append(("days", f"{_range(result, 'days')} for {result['data_tokens']:.3g} tokens"))
    return lines


def _promise(result: dict[str, Any]) -> str:
    """Returns what is promised of --class_type any, and how it is known what layers take."""
    known = {
        "measured": "a layer of each kind was run here at two lengths, forward and backward",
        "counted": "the seconds are those of Llama in Hugging Face's layers",
        "unknown": f"no memory and seconds of a layer itself are planned: {result['unknown']}",
    }
    return f"memory, not speed; {known[result['layers']]}"


def _but(result: dict[str, Any]) -> str:
    return ", but for a layer's own memory" if result["layers"] == "unknown" else ""


def _images(images: dict[str, Any]) -> str:
    many = images["in_a_row"] > 1
    trained = "trains" if images["trained"] else "is frozen"
    if images["tower_on_host"]:
        trained += " and waits on the host while it does not run"
    return (
        f"{images['in_a_row']} of {images['width']} x {images['height']}{' in a row' * many}, "
        f"{images['patches']} patches and {images['tokens']} tokens{' each' * many}, "
        f"{images['row_tokens']} tokens in all; the vision tower {trained}"
    )


def _while_read(result: dict[str, Any]) -> str:
    """Returns what the host holds while the model is read, where that is more than in a step."""
    reading = result["host_reading_gib"]
    return f"; {reading:.1f} while the model is read" if reading > result["host_gib"] else ""


def _range(row: dict[str, Any], key: str) -> str:
    """One figure where rates were measured, else two; none where nobody knows."""
    if f"{key}_low" not in row:
        return "?"
    ends = dict.fromkeys(_figure(row[f"{key}_{end}"]) for end in ("low", "high"))
    return " to ".join(ends)


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _why_a_range(result: dict[str, Any]) -> str:
    if result["rates"] != "estimated":
        return f" (rates {result['rates']})"
    by = "the datasheet; not measured on this card"
    if result["assumed"]:
        by = f"these numbers; {result['assumed']}"
    return f" ({_figure(result['step_s'])} by {by})"


def chosen(result: dict[str, Any]) -> Lines:
    kinds = (_named(result[key]) for key in ("states", "kept"))
    lines = [*kinds, ("attention", result["attn_backend"])]
    if "parts_s" in result:
        parts = ", ".join(f"{name} {_figure(value)}" for name, value in parts_s(result).items())
        busy = f"{parts}; the link to the host is busy for {_figure(result['link_s'])}"
        lines.append(("seconds", busy))
    return lines


def parts_s(result: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of a step by part, in words, without parts that this step has not."""
    parts = {key: result["parts_s"][key] for key in PARTS}
    return {PARTS[key]: s for key, s in parts.items() if s or key not in OF_SOME}


def _named(line: str) -> tuple[str, str]:
    name, _, rest = line.partition(": ")
    return name, rest


# --- bars ------------------------------------------------------------------------------------

COLOURS = {
    "weights": ("w", "blue"),
    "gradients": ("g", "green"),
    "AdamW's states": ("s", "magenta"),
    "saved activations": ("a", "yellow"),
    "a layer's work": ("l", "cyan"),
    "lm_head and loss": ("h", "red"),
    "images": ("i", "bright_blue"),
    "processes": ("p", "white"),
    "free": (".", "bright_black"),
}
"""A group of buffers -> its letter, which is read where there are no colours, and its colour."""
OTHER = ("e", "bright_magenta")
"""Letter and colour of a group that COLOURS does not have: an engine's states, which are called by
the engine's name."""


def bars(result: dict[str, Any], console: Console) -> list[Text]:
    """The GPU at its peak, and the host where anything waits there."""
    peak = result["peak"]
    limit, free = result["gpu_limit_gib"], result["host_free_gib"]
    lines: list[str | Text] = ["", f"GPU memory at its peak ({peak['phase']}), of {limit:.1f} GiB"]
    lines += bar(peak["groups"], limit, console)
    if result["host_locked_gib"]:
        lines += ["", f"host memory, of {free:.1f} GiB that are free"]
        lines += bar(result["host_holds"], free, console)
    return [Text(line) if isinstance(line, str) else line for line in lines]


def bar(holds: dict[str, float], there: float, console: Console) -> list[Text]:
    """A line of blocks, or of letters where there are no colours, and its legend."""
    taken = sum(holds.values())
    whole, width = max(taken, there, 1e-9), console.width
    if there > taken:
        holds = {**holds, "free": there - taken}
    parts = [(name, gib, *COLOURS.get(name, OTHER)) for name, gib in holds.items() if gib]
    coloured = console.color_system is not None and not console.options.ascii_only
    line, legend, drawn, sum_gib = Text(), [Text()], 0, 0.0
    for name, gib, letter, colour in parts:
        sum_gib += gib
        end = round(sum_gib / whole * width)
        line.append(("\u2588" if coloured else letter) * (end - drawn), style=colour)
        drawn = end
        item = Text("\u25a0" if coloured else letter, style=colour)
        item.append(f" {name} {gib:.1f}", style="default")
        if len(legend[-1]) + len(item) + 2 > width:
            legend.append(Text())
        legend[-1].append_text(item).append("  ")
    for text in legend:
        text.rstrip()
    return [line, *legend]


# --- tables ----------------------------------------------------------------------------------


def ways_out(result: dict[str, Any], console: Console) -> Table | Text:
    if not result.get("changes"):
        return Text("no flag makes it fit: a smaller model, or a larger machine")
    return _rows("It fits with", result["changes"], console)


def _rows(title: str, rows: list[dict[str, Any]], console: Console) -> Table | Text:
    """A table, in which an option stays in one line with its values, or a list of lines where the
    terminal is too narrow for it."""
    flags = [printable(row.get("flags", "")) for row in rows]
    unbounded = console.options.update_width(10 * WIDEST)
    left = console.width - console.measure(_table(title, rows, []), options=unbounded).maximum - 2
    if not any(flags) and left >= -2:
        return _table(title, rows, [])
    broken = [_broken(words, left) for words in flags]
    if any(flags) and max(len(line) for words in broken for line in words.splitlines()) <= left:
        return _table(title, rows, broken)
    return _list(title, rows, flags)


def _broken(flags: str, width: int) -> str:
    """Flags with a line end before each option that does not fit behind those before it."""
    lines = [""]
    for option in re.split(r" (?=--)", flags):
        if lines[-1] and len(lines[-1]) + 1 + len(option) > width:
            lines.append("")
        lines[-1] += f"{' ' * bool(lines[-1])}{option}"
    return "\n".join(lines)


def _list(title: str, rows: list[dict[str, Any]], flags: list[str]) -> Text:
    """Lists the rows for narrow terminals, which break these lines themselves, between words."""
    said = "{} tokens, {} s a step, {} tokens/s, {} GiB of the GPU, {} of the host"
    figures = (said.format(*_cells(row)) for row in rows)
    lines = [f"{f}: {line}" if f else line for f, line in zip(flags, figures, strict=True)]
    return Text("\n").join([Text(title, style="bold"), *map(Text, lines)])


FLAGS = len("--lora_r 16 --quantize nf4")
FIGURES = {"tokens": 7, "s a step": 9, "tokens/s": 11, "GPU GiB": 7, "host GiB": 8}
"""A column of figures -> its width, whatever the figures are. With flags a row has 78 columns."""


def _table(title: str, rows: list[dict[str, Any]], flags: list[str]) -> Table:
    found = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    if flags:
        found.add_column("flags", no_wrap=True, min_width=FLAGS)
    for name, width in FIGURES.items():
        found.add_column(name, justify="right", no_wrap=True, min_width=width)
    for i, row in enumerate(rows):
        found.add_row(*map(escape, flags[i : i + 1]), *_cells(row))
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    ranges = [_range(row, key).replace(" to ", "-") for key in ("step_s", "tokens_per_s")]
    return [f"{row['seq_len']}", *ranges, *(f"{row[k]:.1f}" for k in ("gpu_gib", "host_gib"))]


def _grid(lines: Lines, console: Console, colour: str = "") -> Table:
    """`colour` is the first line's."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=NAMES)
    grid.add_column(overflow="fold")
    for i, (name, text) in enumerate(lines):
        shown = wrapped(printable(text), console.width - NAMES - 2)
        grid.add_row(name, Text(shown, style=colour if i == 0 else ""))
    return grid


def wrapped(text: str, width: int) -> str:
    """Returns a text in lines of at most `width` columns that end where a part of it ends, before
    they end between words: `8 GiB` and `x o h` stay together."""
    lines = [""]
    for part in re.split(r"(?<=[,;]) | (?=\()", text):
        fits = len(lines[-1]) + 1 + len(part) <= width
        if lines[-1] and fits:
            lines[-1] += f" {part}"
        else:
            pieces = textwrap.wrap(part, max(1, width)) or [""]
            lines[-1:] = [*filter(None, lines[-1:]), *pieces]
    return "\n".join(lines)
