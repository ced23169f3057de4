"""The parts of a page: what they show, and that nothing in them can become markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from longctx.train.report import page, plan_page
from longctx.train.report.page import code, figure, heading, paragraph, pyplot, table, write_page

EVIL = "<script>'\"&</script>"
SAFE = "&lt;script&gt;&#39;&#34;&amp;&lt;/script&gt;"


def test_everything_is_escaped(tmp_path: Path) -> None:
    drawn, axes = pyplot().subplots()
    axes.set_title(EVIL)
    parts = [paragraph(EVIL), heading(EVIL), code(EVIL), table([{EVIL: EVIL}]), EVIL]
    write_page(tmp_path / "a.html", EVIL, [*parts, figure(drawn, EVIL)])
    text = (tmp_path / "a.html").read_text()
    assert "<script" not in text
    # title and h1, paragraph, heading, code, th, td, bare text, aria-label and figcaption
    assert text.count(SAFE) == 10
    assert text.count("<svg") == 1 and f'<svg role="img" aria-label="{SAFE}" style="min-' in text
    assert "&lt;svg" not in text and "</svg>" in text  # the drawing itself is markup


def test_cells_show_numbers_as_people_write_them() -> None:
    values = {"a": 1234567, "b": 12345.6, "c": 0.000123456, "d": 1e15, "e": True, "f": None}
    text = table([values, {"a": 1, "g": "x"}])
    assert isinstance(text, Markup)
    numbers = ["1,234,567", "12,346", "0.0001235", "1e+15"]
    first = "".join(f'<td class="number">{number}</td>' for number in numbers)
    second = '<td class="number">1</td>' + "<td></td>" * 5 + "<td>x</td>"
    assert f"<tr>{first}<td>True</td><td></td><td></td></tr>" in text
    assert f"<tr>{second}</tr>" in text
    assert "<tr><th>g</th><th>a</th></tr>" in table([values, {"g": 1}], ["g", "a"])


def test_two_figures_share_no_id(tmp_path: Path) -> None:
    drawn, axes = pyplot().subplots()
    axes.plot([1, 2])
    ids = [set(part.split('clipPath id="')[1:]) for part in map(lambda c: figure(drawn, c), "ab")]
    assert ids[0] and not ids[0] & ids[1]
    assert figure(drawn, "a") == figure(drawn, "a")


def test_a_template_that_names_what_is_not_there_fails() -> None:
    with pytest.raises(UndefinedError):
        page._PAGE.render(title="t")


def test_no_two_buffers_of_a_plan_have_one_colour() -> None:
    phases = [
        {"phase": "forward", "buffers": {f"buffer {n}": 1.0 for n in range(25)}},
        {"phase": "backward", "buffers": {f"buffer {n}": 1.0 for n in range(20, 45)}},
    ]
    (axes,) = plan_page._phases({"phases": phases, "gpu_limit_gib": 80.0}).axes
    colours = {bars.get_label(): bars.patches[0].get_facecolor() for bars in axes.containers}
    assert len(colours) == 45 == len({*colours.values()})
