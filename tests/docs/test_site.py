"""The documentation builds as a site, without a warning, with all of its pictures and without a
dead link: files of the repository that pages link to are on it. Issue
forms and the citation are files that GitHub can read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from paths import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs")
from site_links import linked  # noqa: E402


class Page(HTMLParser):
    """What a page links to, shows and can be pointed at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found[name] or "" for name in ("id", "name") if name in found}
        if tag == "img":
            self.pictures.append(found["src"] or "")
        self.links += [found[name] or "" for name in ("href", "src") if name in found]


def dead_links(site: Path) -> list[tuple[str, str]]:
    """Links of a built site to files or headings that it does not have."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            above = site if url.path.startswith("/") else path.parent
            to = Path(os.path.normpath(above / unquote(url.path).lstrip("/"))) if url.path else path
            to = to / "index.html" if to.is_dir() else to
            there = to.is_file()
            if there and url.fragment and to in pages:
                there = unquote(url.fragment) in pages[to].ids
            if not there:
                dead.append((path.relative_to(site).as_posix(), link))
    return dead


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Of a folder with mkdocs.yml and all that it names."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


def test_the_site_has_every_page_and_picture_and_no_dead_link(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    docs = sorted((ROOT / "docs").glob("*.md"))
    for page in docs:
        built = tmp_path / ("" if page.stem == "README" else page.stem) / "index.html"
        shown = Page(built.read_text())
        assert len(shown.pictures) == len(re.findall(r"^!\[", page.read_text(), flags=re.M)), page
        code = re.findall(r"\]\((\.\./[^()\s#]+\.py)\)", page.read_text())
        for target in code:
            path = f"repository/{target.removeprefix('../')}.html"
            assert any(link.endswith(path) for link in shown.links), (page, target)
    assert dead_links(tmp_path) == []
    code = (tmp_path / "repository/longctx/layer/schedule.py.html").read_text()
    assert "hand-written backward" in code
    notebook = (tmp_path / "repository/notebooks/lora_at_length.ipynb.html").read_text()
    assert "# LoRA at length on one card" in notebook and "execution_count" not in notebook
    (tmp_path / "plan/index.html").write_text('<a href="../no/">a</a> <a href="../lora/#no">b</a>')
    assert {link for _, link in dead_links(tmp_path)} >= {"../no/", "../lora/#no"}


def test_a_dead_link_is_a_warning(tmp_path: Path) -> None:
    for folder in ("docs", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("mkdocs.yml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    for page in [*(tmp_path / "docs").glob("*.md")][1:]:
        page.write_text(f"# {page.stem}\n")
    page = tmp_path / "docs/plan.md"
    page.write_text("[dead](no_such_page.md) [gone](../no.py)\n")
    done = build(tmp_path, tmp_path / "dead")
    assert done.returncode != 0
    assert "no_such_page.md" in done.stderr and "../no.py" in done.stderr


def test_links_out_of_docs_become_addresses_or_files_of_the_site() -> None:
    text = "[r](../recipes/trl_sft.py), ![p](../docs/front.png), [plan.md](plan.md#bytes), "
    text += "[no](../no.py), [f](../profiling/results), `[c](../README.md)`"
    plan = linked(text, Path("docs/lora.md"), "")
    assert "[r](repository/recipes/trl_sft.py.html)" in plan and "![p](front.png)" in plan
    assert "[The plan](plan.md#bytes), [no](../no.py)" in plan
    assert "[f](repository/profiling/results/index.html), `[c](../README.md)`" in plan
    with_address = linked(text, Path("docs/lora.md"), "https://host.example/x")
    assert "[r](https://host.example/x/blob/main/recipes/trl_sft.py)" in with_address
    assert "![p](front.png)" in with_address
    inside = linked("[a](docs/plan.md) ![b](docs/front.png)", Path("README.md"), "")
    assert inside == "[a](../plan.md) ![b](../front.png)"


def test_the_issue_forms_ask_for_doctor() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in FORMS}
    assert forms.keys() == {"bug", "feature", "question", "config"}
    for name in ("bug", "feature", "question"):
        form = forms[name]
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids)) and all(
            part["attributes"]["label"] for part in form["body"]
        )
    doctor = next(part for part in forms["bug"]["body"] if part["id"] == "doctor")
    assert doctor["validations"]["required"] and "longctx doctor" in doctor["attributes"]["label"]


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_has_what_it_must_have_and_no_second_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    assert "version" not in citation  # longctx.__version__ is the one home
    assert re.match(r"https://|$", citation.get("repository-code", ""))
