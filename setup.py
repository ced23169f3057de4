"""Makes what pyproject.toml cannot hold: the README as package indexes show it, and the project's
links.

An index shows README.md away from the repository, where relative links and images lead nowhere.
They become links into the repository, whose address is `repository-code` in CITATION.cff; until it
has one there, links become their text and images their description.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def repository() -> str:
    """The repository's public address, or nothing."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = re.search(r"^repository-code: *(\S+)$", text, flags=re.M)
    return found[1].strip("\"'").rstrip("/") if found else ""


def version() -> str:
    """`longctx.__version__`, read without importing the package."""
    tree = ast.parse((ROOT / "longctx/constants.py").read_text(encoding="utf-8"))
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    return str(ast.literal_eval(values["__version__"]))


def long_description(readme: str, address: str, ref: str) -> str:
    """README.md with its relative links and images as addresses at `ref`, a tag or a branch."""

    def absolute(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        if not address:
            return text
        if target.startswith("#"):
            return f"[{text}]({address}/blob/{ref}/README.md{target})"
        return f"{mark}[{text}]({address}/{'raw' if mark else 'blob'}/{ref}/{target})"

    link = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
    # Blocks of code stay as they are.
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.M | re.S)
    return "".join(p if p.startswith("```") else link.sub(absolute, p) for p in parts)


def project_urls(address: str, ref: str) -> dict[str, str]:
    if not address:
        return {}
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/{ref}/docs/README.md",
        "Changelog": f"{address}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def ref_of(release: str) -> str:
    """A release's tag, or for a version in development the branch."""
    return "main" if "dev" in release else f"v{release}"


REF = ref_of(version())
setup(
    long_description=long_description(
        (ROOT / "README.md").read_text(encoding="utf-8"), repository(), REF
    ),
    long_description_content_type="text/markdown",
    project_urls=project_urls(repository(), REF),
)
