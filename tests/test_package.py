"""longctx as a package: built as an index gets it, installed, and used away from its repository."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT, TESTS
from test_kernels_name import write_kernels

import longctx
from longctx.train.cli import COMMANDS

LINKED = ("kernels", "recipes", "ds_configs", "fsdp_configs", "docs")
"""Folders of the repository to which longctx/ has links."""
BUILD = """
import os, sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def built(what: str, source: Path, to: Path) -> Path:
    command = [sys.executable, "-c", BUILD, what, str(to)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is written beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    for path in ROOT.iterdir():
        if path.name in ("longctx", *LINKED):
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, symlinks=True, ignore=unwanted)
        elif path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    return built("sdist", folder, folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as `python -m build` does: what an sdist lacks, the wheel lacks."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, folder)  # tarfile asks for a filter that Python 3.11.2 has not
    return built("wheel", next(folder.iterdir()), folder)


WRITTEN = {"cache", "runs", "text.jsonl", "merged", "sft.py", "trl"}


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        return archive.read(name).decode()


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    folder = ROOT / "longctx"
    sources = {  # rglob follows no links
        path.relative_to(ROOT).as_posix()
        for top in (folder, folder / "kernels", *(folder / "share").iterdir())
        for path in top.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and (top.name != "docs" or path.suffix == ".md")  # `longctx help` shows no images
    }
    assert packed == sources
    assert {
        "longctx/py.typed",
        "longctx/train/data/chat/templates/llama.jinja",
        "longctx/train/options/presets.yaml",
    } < packed
    assert {"longctx/kernels/norm.py", "longctx/share/ds_configs/zero3.json"} < packed


def test_the_sdist_holds_what_it_is_built_from_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "setup.py"} < names
    assert not [name for name in names if name.startswith("tests")]


@pytest.fixture(scope="module")
def report(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/installed.py finds in an empty folder. The packages that longctx needs are this
    environment's; longctx and its command are the wheel's."""
    site, empty, others = map(tmp_path_factory.mktemp, ("site", "empty", "others"))
    theirs = write_kernels(others)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", "--target", str(site), str(wheel)], check=True)
    done = subprocess.run(
        [sys.executable, str(TESTS / "installed.py")],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": f"{site}:{others}", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (site / "bin/longctx").is_file()
    found = json.loads(done.stdout.splitlines()[-1])
    left = [path.name for path in empty.iterdir()]
    return found | {"site": str(site), "left": left, "theirs": str(theirs)}


def test_the_wheel_is_what_ran_and_every_module_imports(report: dict[str, Any]) -> None:
    assert report["file"].startswith(report["site"])
    assert report["version"] == [longctx.__version__] * 2
    sources = [p for p in (ROOT / "longctx").rglob("*.py") if "__main__" not in p.name]
    sources += (ROOT / "kernels").glob("*.py")
    names = {path.relative_to(ROOT).with_suffix("").as_posix() for path in sources}
    names = {re.sub("^kernels", "longctx/kernels", name) for name in names}
    names = {name.removesuffix("/__init__").replace("/", ".") for name in names} - {"longctx"}
    assert {*report["modules"]} == names
    assert report["kernels"] == report["theirs"]  # Hugging Face's package, beside longctx.kernels
    templates = sorted(path.name for path in (ROOT / "longctx").rglob("*.jinja"))
    assert report["templates"] == templates


def test_the_commands_of_the_wheel_work(report: dict[str, Any]) -> None:
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", report["help"], flags=re.M)
    assert "This machine" in report["doctor"]
    assert json.loads(report["plan"])["gpu_gib"] > 16  # bf16 weights of 8.03e9 parameters are 15


def test_a_patched_model_of_the_wheel_trains_as_hugging_faces(report: dict[str, Any]) -> None:
    first, second, vanilla_first, vanilla_second = report["losses"]
    assert first == pytest.approx(vanilla_first, rel=1e-6) and second < first
    assert second == pytest.approx(vanilla_second, rel=1e-4)


def test_the_wheel_trains_merges_evaluates_and_serves_trl(report: dict[str, Any]) -> None:
    said = report["trains"]
    assert said.keys() == {"quickstart", "lora", "merge", "eval"}
    assert "runs/quickstart/final" in said["quickstart"]
    assert {*report["left"]} == WRITTEN


# --- the README as an index shows it ---------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> Iterator[ModuleType]:
    """setup.py, whose call of setuptools does nothing."""
    spec = importlib.util.spec_from_file_location("longctx_setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **options: None)
        spec.loader.exec_module(module)
        yield module


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*(?:src|href)=\"([^\"]+)", text)


def test_no_link_of_the_long_description_is_relative(wheel: Path, setup: ModuleType) -> None:
    """With the repository's address as it is set, and with one."""
    readme = (ROOT / "README.md").read_text()
    description = metadata(wheel).partition("\n\n")[2]
    with_address = setup.long_description(readme, "https://host.example/longctx", "v1")
    for text in (description, with_address):
        found = [markdown or html for markdown, html in targets(text)]
        assert not [link for link in found if not link.startswith("https://")]
    assert len(targets(with_address)) == len(targets(readme)) > 20
    assert "raw/v1/docs/front.png)" in with_address and "blob/v1/docs/results.md#" in with_address
    assert description.count("```") == readme.count("```")
    for link in re.findall(r"https://host.example/longctx/(?:blob|raw)/v1/([^)\s]+)", with_address):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        text = (ROOT / path).read_text() if anchor else ""
        heads = re.findall(r"^#+ (.*)$", text, flags=re.M)
        assert not anchor or anchor in {
            re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
        }, link


def test_an_index_takes_both(sdist: Path, wheel: Path) -> None:
    """`twine check --strict`."""
    check = pytest.importorskip("twine.commands.check").check
    assert check([str(sdist), str(wheel)], strict=True) is False  # nothing failed


def test_links_in_code_and_elsewhere_stay(setup: ModuleType) -> None:
    text = "[a](b.md) ![c](d.png) [e](https://f.g/)\n```\nx[0](y)\n```\n"
    assert setup.long_description(text, "", "main") == "a c [e](https://f.g/)\n```\nx[0](y)\n```\n"
    assert "[a](r/blob/main/b.md) ![c](r/raw/main/d.png)" in setup.long_description(
        text, "r", "main"
    )


def test_the_metadata_says_what_an_index_shows(wheel: Path, setup: ModuleType) -> None:
    text = metadata(wheel)
    assert f"\nVersion: {longctx.__version__}\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    for field in ("Summary", "Keywords", "License-Expression", "Requires-Python"):
        assert f"\n{field}: " in text, field
    assert text.count("\nClassifier: ") > 5
    urls = re.findall(r"^Project-URL: (\w+), (.*)$", text, flags=re.M)
    assert dict(urls) == setup.project_urls(setup.repository(), setup.ref_of(longctx.__version__))
    assert setup.ref_of("0.2.0.dev0") == "main" and setup.ref_of("0.2.0") == "v0.2.0"
