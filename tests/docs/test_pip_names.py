"""No text of the tree tells pip the name of a distribution that is not ours: `longctx` on the
public index is another project's, with the same import name and command."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

import longctx

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = {
    canonicalize_name(Requirement(line).name)
    for line in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
}
OTHERS = {"pillow", "torchvision", "kernels", "uv", "flash-attn", "triton"}
OTHERS |= {"axolotl", "llamafactory", "ms-swift", "lightning", "flytekit", "azureml-core"}
"""Packages that texts name and that longctx does not declare. Before a name is added here, look it
up with pip: an index may hold another project under it."""
KNOWN = DECLARED | OTHERS
ENDINGS = {".py", ".md", ".ipynb", ".yaml", ".yml", ".json", ".sh", ".toml", ".cff", ".in", ""}
INSTALL = re.compile(r"\bpip3?[\"', ]+(?:install|download)\b([^`\n#&;]*)")
BY_NAME = re.compile(r"(?<![\w/-])longctx(?:\[|(?:[=~<>!]=|[<>])[\d$])")
"""`longctx[fa4]` and `longctx==0.2`: as pip takes them, and as nothing else is written."""


def texts() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if (
            path.suffix in ENDINGS
            and path.is_file()
            and path != Path(__file__)
            and "profiling/results" not in name
        ):
            yield path, path.read_text(encoding="utf-8", errors="replace")


def named(text: str) -> Iterator[str]:
    """The distributions that a text tells pip to install."""
    for match in INSTALL.finditer(text):
        line = re.sub(r"[\w.-]*[{($*:][^\s]*", "", match[1])  # code, and globs
        words = [word.strip("\"'\\,:()[]").rstrip(".") for word in line.split()]
        for before, word in zip(["", *words], words, strict=False):
            name = re.split(r"[\[<>=!~@]", word)[0]
            if word in ("it", "that", "them", "from", "in"):  # the sentence goes on
                break
            if re.fullmatch(r"[A-Za-z][\w.-]*", name) and not before.startswith(("-w", "-d")):
                yield canonicalize_name(name)


def wrong(text: str) -> list[str]:
    found = [name for name in named(text) if name not in KNOWN]
    return found + BY_NAME.findall(text)


def test_no_text_tells_pip_a_name_that_is_not_ours() -> None:
    found = {path: wrong(text) for path, text in texts()}
    assert len(found) > 500
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run `pip install longctx` first", ["longctx"]),
        ('"# %pip install \\"longctx\\" \\"trl>=1.16\\""', ["longctx"]),
        ('["pip", "install", "-q", "longctx"]', ["longctx"]),
        ("pip install --upgrade longctx-trian", ["longctx-trian"]),
        ("needs PEFT: longctx[lora]", ["longctx["]),
        ("uv pip install longctx-train trl -e . ./dist/x.whl '.[dev]' \"x-{y}\"", []),
        ("pip install from https://host.example/whl, or pip install it", []),
        ("/tmp/longctx[fa4] and longctx = 3", []),
    ],
)
def test_what_is_found(text: str, names: list[str]) -> None:
    assert wrong(text) == names


def test_advice_of_the_code_names_declared_packages() -> None:
    """`pip_install(...)`, whose words stand in no text."""
    calls = [
        call
        for path in (ROOT / "longctx").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pip_install"
    ]
    names = {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)}
    assert {"flash-attn-4", "peft", "deepspeed", "liger-kernel", "matplotlib"} <= names <= DECLARED


def test_the_name_stands_once_and_where_it_cannot_be_read_from_the_code() -> None:
    assert PROJECT["name"] == longctx.__distribution__
    assert canonicalize_name(longctx.__distribution__) != "longctx"
    own = [line for lines in EXTRAS.values() for line in lines if "longctx" in line]
    assert all(line.startswith(f"{PROJECT['name']}[") for line in own) and own
