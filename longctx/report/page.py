"""Self-contained HTML pages: text, tables and matplotlib figures as inline SVG, in one file.

Nothing is fetched and no script runs, so a page opens anywhere and can be sent as one file. jinja2
escapes all that goes into it but `Markup`, which is what the functions here return.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from longctx.errors import UserError
from longctx.writing import MARK, replace_file

_JINJA = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_PAGE = _JINJA.from_string("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{{ mark }}">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { background: #f4f4f4; font-size: .85rem; } pre { padding: .75rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for part in parts %}
{{ part }}
{% endfor %}
</body>
</html>
""")
_TABLE = _JINJA.from_string("""\
<div class="scroll"><table>
<tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for name in columns %}{{ cell(row.get(name)) }}{% endfor %}</tr>
{% endfor %}
</table></div>
""")


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


def paragraph(text: str) -> Markup:
    return Markup("<p>{}</p>").format(text)


def heading(text: str) -> Markup:
    return Markup("<h2>{}</h2>").format(text)


def code(text: str) -> Markup:
    return Markup("<pre>{}</pre>").format(text)


def figure(drawn: Any, caption: str) -> Markup:
    """A matplotlib figure as inline SVG. The caption also salts the SVG's ids, which would
    otherwise clash between two figures of a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": caption}):
        drawn.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()
    _, drawing = svg.split("<svg", 1)
    return Markup(
        '<figure><svg role="img" aria-label="{}"{}<figcaption>{}</figcaption></figure>'
    ).format(caption, Markup(drawing), caption)


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Markup:
    """One line a row; a missing value is an empty cell. Columns: all keys, as they come."""
    rows = list(rows)
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    return Markup(_TABLE.render(rows=rows, columns=columns, cell=_cell))


def _cell(value: Any) -> Markup:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Markup("<td>{}</td>").format("" if value is None else _text(value))
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if isinstance(value, float) and 1e4 <= abs(value) < 1e15:
        text = f"{value:,.0f}"
    return Markup('<td class="number">{}</td>').format(text)


def _text(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        return "(nested too deeply to show)"


def with_ending(output: Path, ending: str) -> Path:
    """OUTPUT with an ending; `with_suffix` would take the `.1-8b` of a model's name for one."""
    return output.with_name(output.name + ending)


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Writes the page of `parts` (what the functions above return). Raises UserError."""
    page = _PAGE.render(title=title, parts=parts, mark=MARK.decode())
    replace_file(path, page.encode(errors="backslashreplace"))  # lone surrogates
