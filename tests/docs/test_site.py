"""The documentation builds as a site, without a warning, and its hook leaves no link that leads out
of docs/. Issue forms and the citation are files that GitHub can read."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from site_links import linked


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Of a folder with mkdocs.yml and all that it names."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="needs the extra docs")
def test_the_site_builds_without_a_warning_and_a_dead_link_is_one(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages == {path.parent.name for path in (tmp_path / "site").glob("*/index.html")} - {
        "assets",
        "search",
    }
    for page in (tmp_path / "site").glob("*/index.html"):
        assert not re.findall(r'(?:href|src)="\.\./\.\./', page.read_text()), page

    copy = tmp_path / "copy"
    for folder in ("docs", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder)
    for name in ("mkdocs.yml", "CITATION.cff"):
        shutil.copy(ROOT / name, copy)
    page = copy / "docs/plan.md"
    page.write_text(page.read_text() + "\n[dead](no_such_page.md)\n")
    done = build(copy, tmp_path / "dead")
    assert done.returncode != 0 and "no_such_page.md" in done.stderr


def test_links_out_of_docs_become_addresses_or_text() -> None:
    text = "[r](../recipes/trl_sft.py), ![p](../docs/front.png), [in](plan.md), [no](../no.py)"
    assert linked(text, "") == "r, p, [in](plan.md), [no](../no.py)"
    with_address = linked(text, "https://host.example/x")
    assert "[r](https://host.example/x/blob/main/recipes/trl_sft.py)" in with_address
    assert "![p](https://host.example/x/raw/main/docs/front.png)" in with_address


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
