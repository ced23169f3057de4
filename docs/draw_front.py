"""Draws docs/front.png, two panels of the measured front of time against memory.

    PYTHONPATH=. python docs/draw_front.py

The points are rows of profiling/results/h200_front.json; profiling/front.py draws all eight panels.
"""

from __future__ import annotations

import json
from pathlib import Path

from profiling.front import draw

ROOT = Path(__file__).resolve().parent.parent
MODEL, KINDS = "4 layers of Llama-3.1-8B", ("32768 tokens, packed documents", "131072 tokens")


def main() -> None:
    rows = json.loads((ROOT / "profiling/results/h200_front.json").read_text())["rows"]
    shown = [row for row in rows if row["model"] == MODEL and row["rows"] in KINDS]
    draw(shown).savefig(ROOT / "docs/front.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
