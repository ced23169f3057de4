"""Advice names packages in the versions that longctx takes, and another package of our name is
found, with what it overwrote."""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path

import pytest

from longctx import packages
from longctx.constants import __distribution__
from longctx.train.report.missing import Facts, missing

NEEDED = ["torch<2.14,>=2.11", 'peft>=0.21; extra == "lora"', 'ruff>=0.14; extra == "dev"']


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (["peft"], "pip install 'peft>=0.21'"),
        (["peft", "bitsandbytes"], "pip install 'peft>=0.21' bitsandbytes"),
        (["ruff"], "pip install ruff"),  # an extra that is no run's
    ],
)
def test_bounds_are_those_of_the_metadata(monkeypatch, names, command) -> None:
    monkeypatch.setattr(metadata, "requires", {__distribution__: NEEDED}.get)
    assert packages.pip_install(*names) == command


def test_a_folder_of_sources_has_no_bounds(monkeypatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert packages.pip_install("flash-attn-4") == "pip install flash-attn-4"


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Writes what pip writes of a distribution whose package is `longctx`."""
    record = []
    for file, text in files.items():
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record.append(f"{file},sha256={digest.rstrip('=')},{len(text)}")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("longctx\n")
    (info / "RECORD").write_text("\n".join(record))


def test_another_distribution_of_our_import_name_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda: metadata.Distribution.discover(
        path=[str(tmp_path)]))  # fmt: skip
    monkeypatch.setattr(
        metadata.Distribution,
        "from_name",
        lambda name: next(iter(metadata.Distribution.discover(name=name, path=[str(tmp_path)]))),
    )
    ours = {
        "longctx/__init__.py": "ours",
        "longctx/train/cli.py": "ours",
        "longctx/train/plan.py": "ours",
    }
    install(tmp_path, __distribution__, "0.2.0", ours)
    assert packages.namesakes() == []
    install(tmp_path, "longctx", "0.3.2", dict.fromkeys([*ours][:2], "another project's"))
    (found,) = packages.namesakes()
    assert found[:2] == ("longctx", "0.3.2") and found.overwritten == 2
    line = [*missing(Facts(namesakes=[found]))][-1]
    assert "longctx 0.3.2 is imported as longctx, too" in line.found
    assert f"2 files of {__distribution__} are overwritten" in line.found
    assert line.do.startswith(f"pip uninstall longctx {__distribution__}, then install")
