"""Self-contained HTML pages: text, tables and matplotlib figures as inline SVG, in one file.

Nothing is fetched and no script runs, so a page opens anywhere and can be sent as one file. It is
readable on a telephone and in the dark, where figures are inverted with their hues kept. jinja2
escapes all that goes into it but `Markup`, which is what the functions here return.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from longctx.errors import UserError, printable
from longctx.packages import pip_install
from longctx.train.safety.writing import MARK, replace_file

_JINJA = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_PAGE = _JINJA.from_string(Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8"))
_TABLE = _JINJA.from_string("""\
<div class="scroll"><table>
<tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for name in columns %}{{ cell(row.get(name)) }}{% endfor %}</tr>
{% endfor %}
</table></div>
""")
_FACTS = _JINJA.from_string("""\
<dl>
{% for name, value in facts %}
<dt>{{ name }}</dt><dd>{{ shown(value) }}</dd>
{% endfor %}
</dl>
""")


def pyplot() -> Any:
    """Returns matplotlib.pyplot set to draw into files. Raises UserError where it is not
    installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError(f"pictures need matplotlib: {pip_install('matplotlib')}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
        "text.parse_math": False,  # names may hold dollar signs
    }
    return plt


def legend_name(name: str) -> str:
    """Returns a stranger's name as a curve's label: matplotlib leaves those that begin with `_` out
    of the legend."""
    return printable(f" {name}" if name.startswith("_") else name)


def paragraph(text: str) -> Markup:
    return Markup("<p>{}</p>").format(text)


def heading(text: str) -> Markup:
    return Markup("<h2>{}</h2>").format(text)


def code(text: str) -> Markup:
    return Markup("<pre>{}</pre>").format(text)


def facts(found: Iterable[tuple[str, Any]]) -> Markup:
    """Returns names with their values, which may be long: a narrow page shows one above the
    other."""
    return Markup(_FACTS.render(facts=list(found), shown=_shown))


def details(title: str, parts: Iterable[str]) -> Markup:
    """Parts that are shown on demand."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, Markup().join(parts))


def figures(drawn: Iterable[Markup]) -> Markup:
    """Figures side by side where the page is wide enough for two."""
    return Markup('<div class="figures">{}</div>').format(Markup().join(drawn))


LEAST_SCALE = 0.7
"""A figure shrinks to this on a narrow page (letters of 10 points have 7); then it scrolls."""


def figure(drawn: Any, caption: str) -> Markup:
    """Returns a matplotlib figure as inline SVG, on the page's own background. The caption also
    salts the SVG's ids, which would otherwise clash between two figures of a page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": caption}):
        drawn.savefig(
            text, format="svg", bbox_inches="tight", metadata={"Date": None}, transparent=True
        )
    svg = text.getvalue()
    _, drawing = svg.split("<svg", 1)
    width_pt = float(re.search(r'width="([\d.]+)pt"', drawing)[1])  # type: ignore[index]
    return Markup(
        '<figure><svg role="img" aria-label="{}" style="min-width: {:.0f}pt"{}'
        "<figcaption>{}</figcaption></figure>"
    ).format(caption, LEAST_SCALE * width_pt, Markup(drawing), caption)


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Markup:
    """Returns one line a row; a missing value is an empty cell. Columns: all keys, as they come."""
    rows = list(rows)
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    return Markup(_TABLE.render(rows=rows, columns=columns, cell=_cell))


def _cell(value: Any) -> Markup:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = Markup(' class="number"') if is_number else ""
    return Markup("<td{}>{}</td>").format(kind, "" if value is None else _shown(value))


def _shown(value: Any) -> str:
    """Numbers as people write them, anything else as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    try:
        return str(value)
    except RecursionError:
        return "(nested too deeply to show)"


def with_ending(output: Path, ending: str) -> Path:
    """Returns OUTPUT with an ending; `with_suffix` would take the `.1-8b` of a model's name for
    one."""
    return output.with_name(output.name + ending)


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Writes the page of `parts` (what the functions above return). Raises UserError."""
    page = _PAGE.render(title=title, parts=parts, mark=MARK.decode())
    replace_file(path, page.encode(errors="backslashreplace"))  # lone surrogates
