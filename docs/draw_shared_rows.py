"""Draws docs/shared_rows.svg, how a row travels when two ranks share it:
python docs/draw_shared_rows.py

Columns are tokens, rows of a block are heads. Above a layer's attention for one head group, below
when the groups of a layer are sent, attend and return (longctx/attention/sharded.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

WIDTH, HEIGHT = 760, 520
CELL = 34
LEFT, GAP = 120, 48  # of the blocks: rank 0's four columns, a gap, rank 1's
COLOURS = {0: "#cfe3f7", 1: "#fbdcc0", "line": "#44546a", "busy": "#8fb3d9", "link": "#e6a15c"}
DOCUMENTS = (3, 5)
"""Columns of the whole row where a document begins, besides the first."""


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {size} fill="{colour}" stroke="{COLOURS["line"]}" stroke-width="0.8"/>'


def line(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" fill="none" stroke="{COLOURS["line"]}" {more}/>'


def start(rank: int) -> int:
    """Left edge of a rank's blocks."""
    return LEFT + rank * (4 * CELL * 2 + GAP)


def local(y: int, heads: bool) -> list[str]:
    """Each rank's half of the tokens: all heads (coloured by who will attend to them), or none."""
    found = []
    for rank in range(2):
        x = start(rank) + 2 * CELL
        for column in range(4):
            for head in range(2):
                colour = COLOURS[head] if heads else "#ececec"
                found.append(box(x + column * CELL, y + head * CELL, CELL, CELL, colour))
            if 4 * rank + column in DOCUMENTS:
                at = x + column * CELL
                found.append(line(at, y - 4, at, y + 2 * CELL + 4, 'stroke-width="2.5"'))
    return found


def whole(y: int) -> list[str]:
    """All tokens of a rank's own heads."""
    found = []
    for rank in range(2):
        for column in range(8):
            x = start(rank) + column * CELL
            found.append(box(x, y, CELL, CELL, COLOURS[rank]))
            if column in DOCUMENTS:
                found.append(line(x, y - 4, x, y + CELL + 4, 'stroke-width="2.5"'))
    return found


def exchange(y1: int, y2: int) -> list[str]:
    middles = [start(rank) + 4 * CELL for rank in range(2)]
    arrow = 'marker-end="url(#arrow)" stroke-width="1.4"'
    lines = [line(a, y1, b, y2, arrow) for a in middles for b in middles]
    between = (middles[0] + middles[1]) / 2
    return [*lines, text(between, y1 + 12, "all-to-all")]


TURNS = (
    ("project", [("0", 0, 1), ("1", 1, 1), ("2", 4, 1)], "busy"),
    ("attend", [("0", 2, 2), ("1", 5, 2), ("2", 7, 2)], "busy"),
    ("q k v there", [("0", 1, 1), ("1", 2, 1), ("2", 5, 1)], "link"),
    ("o back", [("0", 4, 0.7), ("1", 7, 0.7), ("2", 9, 0.7)], "link"),
)
"""Of three head groups: number, begin, duration. Not to scale: exchanges are far shorter."""


def timeline(y: int) -> list[str]:
    found = [text(LEFT - 12, y - 14, "time, three head groups", "start")]
    for i, (name, parts, colour) in enumerate(TURNS):
        top = y + i * 26
        found.append(text(LEFT - 12, top + 15, name, "end", 12))
        for group, begin, duration in parts:
            x, width = LEFT + begin * 56, duration * 56
            found += [box(x, top, width, 20, COLOURS[colour]), text(x + width / 2, top + 15, group)]
    return found


def picture() -> str:
    centres = [start(rank) + 4 * CELL for rank in range(2)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" fill="#222">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(text(x, 22, f"rank {rank}", size=15) for rank, x in enumerate(centres)),
        text(LEFT - 12, 64, "norm, q k v", "end"),
        text(LEFT - 12, 82, "T/2 tokens, all heads", "end", 10),
        *local(40, heads=True),
        *exchange(116, 158),
        text(LEFT - 12, 182, "attention", "end"),
        text(LEFT - 12, 200, "T tokens, own heads", "end", 10),
        *whole(164),
        *exchange(204, 246),
        text(LEFT - 12, 278, "o, MLP, loss", "end"),
        text(LEFT - 12, 296, "T/2 tokens", "end", 10),
        *local(252, heads=False),
        text(WIDTH / 2, 346, "thick lines: documents begin, for every rank where the row has them"),
        *timeline(406),
        text(LEFT + 9.7 * 56 + 6, 406 + 3 * 26 + 15, "exposed", "start", 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("shared_rows.svg"))
    parser.parse_args().output.write_text(picture())
