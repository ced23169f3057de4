"""Draws docs/shared_prompts.svg, the attention of a prompt and its answers in one row:
python docs/draw_shared_prompts.py

Rows of the square are queries, columns are keys; what attends to what, and in which of two calls
(longctx/attention/prefixes.py). Beside it, the same as separate rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PARTS = (("prompt", 7), ("answer 1", 3), ("answer 2", 4))
"""Documents, and how many cells each is long."""
CELL, TOP, LEFT, GAP = 22, 64, 70, 90
OWN, OF_PROMPT, AGAIN, LINE = "#8fb3d9", "#e6a15c", "#d9d9d9", "#44546a"


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def cell(x: float, y: float, colour: str) -> str:
    size = f'x="{x}" y="{y}" width="{CELL}" height="{CELL}"'
    return f'<rect {size} fill="{colour}" stroke="white" stroke-width="1"/>'


def frame(x: float, y: float, columns: int, rows: int) -> str:
    size = f'x="{x}" y="{y}" width="{columns * CELL}" height="{rows * CELL}"'
    return f'<rect {size} fill="none" stroke="{LINE}" stroke-width="1.2"/>'


def causal(x: float, y: float, length: int, colours: tuple[str, str], begin: int) -> list[str]:
    """A triangle of cells. Those of queries and keys before `begin` have the second colour."""
    return [
        cell(x + j * CELL, y + i * CELL, colours[i < begin])
        for i in range(length)
        for j in range(i + 1)
    ]


def one_row(x: int) -> list[str]:
    found, at, prompt = [text(x, TOP - 34, "one row, the prompt once", "start", 14)], 0, PARTS[0][1]
    for number, (name, length) in enumerate(PARTS):
        left, top = x + at * CELL, TOP + at * CELL
        found.append(text(left + length * CELL / 2, TOP - 10, name))
        if number:
            found += [
                cell(x + j * CELL, top + i * CELL, OF_PROMPT)
                for i in range(length)
                for j in range(prompt)
            ]
            found.append(frame(x, top, prompt, length))
        found += causal(left, top, length, (OWN, OWN), 0)
        found.append(frame(left, top, length, length))
        at += length
    return found


def separate(x: int) -> list[str]:
    found, y, prompt = [text(x, TOP - 34, "separate rows", "start", 14)], TOP, PARTS[0][1]
    for number, (_, length) in enumerate(PARTS[1:]):
        begin = prompt if number else 0  # computed a second time
        found += [
            cell(
                x + j * CELL,
                y + i * CELL,
                AGAIN if i < begin else OF_PROMPT if j < prompt <= i else OWN,
            )
            for i in range(prompt + length)
            for j in range(i + 1)
        ]
        found.append(frame(x, y, prompt + length, prompt + length))
        y += (prompt + length) * CELL + 18
    return found


def key(x: int, y: int) -> list[str]:
    words = {
        OWN: "call 1: each document sees itself, causally",
        OF_PROMPT: "call 2: answers see the whole prompt",
        AGAIN: "the prompt again, for nothing",
    }
    found = []
    for number, (colour, meaning) in enumerate(words.items()):
        found.append(cell(x, y + number * 26, colour))
        found.append(text(x + CELL + 8, y + number * 26 + 16, meaning, "start"))
    return found


def draw() -> str:
    length = sum(n for _, n in PARTS)
    right = LEFT + length * CELL + GAP
    height = TOP + sum(PARTS[0][1] + n for _, n in PARTS[1:]) * CELL + 40
    width = right + (PARTS[0][1] + PARTS[-1][1]) * CELL + LEFT
    parts = [*one_row(LEFT), *separate(right), *key(LEFT, TOP + length * CELL + 30)]
    style = 'font-family="sans-serif" fill="#222"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", default=Path(__file__).with_name("shared_prompts.svg"))
    Path(parser.parse_args().output).write_text(draw())
