"""A hook of mkdocs: links from docs/ into the rest of the repository.

On the site `../recipes/trl_sft.py` would lead nowhere. It becomes an address in the repository,
which CITATION.cff names. Until it does, the file itself is put on the site, under `repository/`: a
page of Markdown as a page, any other text and a notebook's cells as they are, a folder as the list
of its files. Pictures are always copied. Links to a file that is not there stay, so that `mkdocs
build --strict` fails (without -q, which hides warnings from --strict, too).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
"""Where files from outside docs/ are on the site."""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`(?!\]))", flags=re.M | re.S)
PICTURES = {".png", ".svg"}
UNLISTED = {"__pycache__"}
SHOWN = Environment(autoescape=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ path }} - longctx</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto }
pre.code { background: #8881; padding: 0.5rem }
pre.text { font: inherit; white-space: pre-wrap }
</style>
</head>
<body>
<p><a href="{{ home }}">longctx</a> / {{ path }}</p>
{% if names %}<ul>{% for name, to in names %}
<li><a href="{{ to }}">{{ name }}</a></li>{% endfor %}
</ul>{% endif %}
{% for kind, text in parts %}<pre class="{{ kind }}">{{ text }}</pre>
{% endfor %}
</body>
</html>
""")


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once, with the files of docs/: adds those that they lead to."""
    waiting = [Path("docs", page.src_uri) for page in files.documentation_pages()]
    seen: set[Path] = set()
    while waiting:
        for path in sorted({*targets(waiting.pop())} - seen):
            seen.add(path)
            if is_there(path) or address() and path.suffix not in PICTURES:
                continue
            files.append(File.generated(config, site_path(path), content=content(path)))
            if path.suffix == ".md" or (ROOT / path).is_dir():
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Called by mkdocs with each page's text."""
    return linked(markdown, source(page.file.src_uri), address())


def address() -> str:
    """The repository's public address, or nothing."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return citation.get("repository-code", "")


def site_path(path: Path) -> str:
    """Where a file of the repository is on the site, as mkdocs names files of docs/."""
    if is_there(path):
        return path.relative_to("docs").as_posix()
    if (ROOT / path).is_dir():
        return f"{FOLDER}/{path.as_posix()}/index.html"
    shown = "" if path.suffix in {".md", *PICTURES} else ".html"
    return f"{FOLDER}/{path.as_posix()}{shown}"


def is_there(path: Path) -> bool:
    """Whether mkdocs itself puts a file on the site."""
    return path.parts[0] == "docs" and path.suffix in {".md", *PICTURES}


def source(uri: str) -> Path:
    """The file of the repository behind a page of the site."""
    inside = Path(uri).parts[0] == FOLDER
    return Path(uri).relative_to(FOLDER) if inside else Path("docs", uri)


def targets(path: Path) -> Iterator[Path]:
    """The files and folders of the repository that a page links to, or that a folder holds."""
    if (ROOT / path).is_dir():
        inside = sorted((ROOT / path).iterdir())
        yield from (path / p.name for p in inside if p.name not in UNLISTED and p.is_file())
        return
    text = "".join(CODE.split((ROOT / path).read_text(encoding="utf-8"))[::2])
    for match in LINK.finditer(text):
        if (found := resolved(path, match[2])) is not None:
            yield found


def resolved(page: Path, target: str) -> Path | None:
    """The file or folder of the repository that a link on a page leads to, if it is one."""
    if re.match(r"[a-z]+:", target):
        return None
    path = Path(os.path.normpath(page.parent / target))
    return path if path.parts[0] != ".." and (ROOT / path).exists() else None


def linked(markdown: str, page: Path, repository: str) -> str:
    """A page's text with its links as the site needs them. `page` is its file, from the root."""

    def moved(match: re.Match[str]) -> str:
        said, target, anchor = match.groups()
        path = resolved(page, target)
        if path is None:
            return match[0]
        if said == path.name and is_there(path):
            said = title(path)
        if not is_there(path) and repository and path.suffix not in PICTURES:
            return f"[{said}]({repository}/blob/main/{path.as_posix()}{anchor or ''})"
        to = os.path.relpath(site_path(path), Path(site_path(page)).parent)
        return f"[{said}]({to}{anchor or ''})"

    parts = CODE.split(markdown)
    return "".join(p if n % 2 else LINK.sub(moved, p) for n, p in enumerate(parts))


def title(page: Path) -> str:
    """A page's heading, up to its colon: on the site pages have no file names."""
    return (ROOT / page).read_text(encoding="utf-8").splitlines()[0].strip("# ").split(":")[0]


def content(path: Path) -> str | bytes:
    """What the site has of a file: pictures and Markdown as they are, the rest as HTML."""
    full = ROOT / path
    if path.suffix in PICTURES:
        return full.read_bytes()
    if path.suffix == ".md":
        return full.read_text(encoding="utf-8")
    here = Path(site_path(path)).parent
    names, parts = [], []
    if full.is_dir():
        names = [(p.name, os.path.relpath(site_path(p), here)) for p in targets(path)]
    elif path.suffix == ".ipynb":
        parts = [*cells(json.loads(full.read_text(encoding="utf-8")))]
    else:
        parts = [("code", full.read_text(encoding="utf-8"))]
    home = os.path.relpath("index.html", here)
    return SHOWN.render(path=path.as_posix(), home=home, names=names, parts=parts)


def cells(notebook: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A notebook's text, code, and what its code printed."""
    for cell in notebook["cells"]:
        yield ("text" if cell["cell_type"] == "markdown" else "code"), "".join(cell["source"])
        for output in cell.get("outputs", []):
            said = output.get("text") or output.get("data", {}).get("text/plain", [])
            yield "said", "".join(said)
