"""Self-contained HTML pages: text, tables and matplotlib figures as inline SVG, in one file.

Nothing is fetched and no script runs, so a page opens anywhere and can be sent as one file.
Everything that is not a number goes through `html.escape`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from longctx.errors import UserError, writing

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { background: #f4f4f4; font-size: .85rem; } pre { padding: .75rem; overflow-x: auto; }
"""


def pyplot() -> Any:
    """matplotlib.pyplot that draws into files. Raises UserError where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError("pictures need matplotlib: pip install 'longctx[profile]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
    }
    return plt


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def figure(drawn: Any, caption: str) -> str:
    """A matplotlib figure as inline SVG. The caption also salts the SVG's ids, which would
    otherwise clash between two figures of a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": caption}):
        drawn.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """One line a row; a missing value is an empty cell. Columns: all keys, as they come."""
    rows = list(rows)
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(_cell(row.get(name)) for name in columns) + "</tr>\n" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return f"<td>{'' if value is None else escape(str(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if isinstance(value, float) and 1e4 <= abs(value) < 1e15:
        text = f"{value:,.0f}"
    return f'<td class="number">{text}</td>'


def named(output: Path, end: str) -> Path:
    """OUTPUT with an ending; `with_suffix` would take the `.1-8b` of a model's name for one."""
    return output.with_name(output.name + end)


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Writes the page of `parts` (what the functions above return). Raises UserError."""
    body = "\n".join(parts)
    with writing(path):
        path.write_text(
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n",
            encoding="utf-8",
        )
