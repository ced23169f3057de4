"""Names in prose exist: functions and options that pages mention, files that docstrings mention.
A name that was changed in the code is found here where prose still has the old one."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import ROOT

SOURCES = ("longctx", "kernels", "profiling", "scripts", "tests", "recipes", "notebooks", ".ci")
SOURCES += ("ds_configs", "fsdp_configs", "pyproject.toml", "mkdocs.yml", "Dockerfile", "setup.py")
ENDINGS = (".py", ".yaml", ".yml", ".json", ".toml", ".sh", ".ipynb", ".jinja", "")
THEIRS = {"prepare_model_for_kbit_training", "selective_log_softmax"}
THEIRS |= {"NemotronAttention", "NemotronDecoderLayer", "terminationGracePeriodSeconds"}
"""Names in other projects' code that ours does not have."""
THEIR_FILES = {"zero_to_fp32.py", "data_utils.py", "interface.py", "mask.py", "stage3.py"}
THEIR_FILES |= {"partitioned_param_coordinator.py"}
YOUR_FILES = {"train.py", "main.py", "mine.py"}
"""Files that examples name."""
FORMED = {"measured_gpu_gib"}
"""Keys that the code puts together from parts."""


@cache
def sources() -> list[Path]:
    folders = [ROOT / name for name in SOURCES]
    files = [folder for folder in folders if folder.is_file()]
    for folder in folders:
        files += [path for path in folder.rglob("*") if path.is_file() and path.suffix in ENDINGS]
    return [path for path in files if "results" not in path.parts and path != Path(__file__)]


@cache
def words() -> set[str]:
    """All identifiers of the code, and the parts of what it writes to files."""
    text = "\n".join(path.read_text(errors="ignore") for path in sources())
    return set(re.findall(r"[A-Za-z_]\w*", text))


def names(page: str) -> set[str]:
    """Identifiers in backticks, with an underscore or a capital inside."""
    text = re.sub(r"^( *)```.*?^\1```", "", page, flags=re.M | re.S)
    quoted = re.findall(r"`([^`\n]+)`", text)
    dotted = [q for q in quoted if re.fullmatch(r"[\w.]+(\(\))?", q) and not q.endswith(".py")]
    found = {part for q in dotted for part in re.findall(r"\w+", q)}
    stand_in = re.compile("NAME|VERSION")  # for what the reader fills in
    named = {name for name in found if re.search(r"[a-z]_[a-z]|[a-z][A-Z]", name)}
    return {name for name in named if not stand_in.search(name)}


def test_names_on_pages_exist() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    missing = {p.name: names(p.read_text()) - words() - THEIRS - FORMED for p in pages}
    assert {name: found for name, found in missing.items() if found} == {}


def prose(path: Path) -> Iterator[str]:
    """A file's comments and strings."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.string


def test_files_in_docstrings_and_comments_exist() -> None:
    known = {path.name for path in sources()} | THEIR_FILES | YOUR_FILES
    missing = set()
    for room in ("longctx", "kernels", "profiling"):
        for path in (ROOT / room).rglob("*.py"):
            for text in prose(path):
                named = re.findall(r"(?<![\w/.*{}<$~-])[\w./-]+\.py\b", text)
                missing |= {(path.name, name) for name in named if Path(name).name not in known}
    assert missing == set()
