"""Preference pairs with long prompts, made of Python's own library, with some modules held out.

    python scripts/get_preference_pairs.py data/pairs

    train.jsonl   {"prompt", "chosen", "rejected", "name"} a line
    eval.jsonl    the same of the modules of held-out packages

The prompt is the beginning of a source file, the chosen answer its next lines, and the rejected
answer the same lines in another order. A model that reads code can learn which of the two is code,
so that rewards of held-out pairs say whether preference training works at this length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.errors import UserError
from longctx.train.data.reading.files import stdlib_files

HELD_OUT = ("email", "tkinter", "multiprocessing", "xml", "idlelib")
PROMPT_CHARS = (16_000, 22_000)
"""About 5000 to 7000 tokens of code."""
ANSWER_LINES = 30
FEWEST_LINES = 20
"""Of an answer's lines, so many must say something."""


def pairs(path: Path, name: str) -> Iterator[dict[str, str]]:
    """Consecutive stretches of a file, each a prompt with two answers. The same file gives the same
    pairs."""
    drawn = random.Random(name)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    begin = 0
    while begin < len(lines):
        least, chars, end = drawn.randint(*PROMPT_CHARS), 0, begin
        while end < len(lines) and chars < least:
            chars += len(lines[end])
            end += 1
        answer = lines[end : end + ANSWER_LINES]
        if sum(map(bool, map(str.strip, answer))) < FEWEST_LINES:
            return
        shuffled = drawn.sample(answer, len(answer))
        if shuffled != answer:
            yield {
                "prompt": f"# file: {name}\n" + "".join(lines[begin:end]),
                "chosen": "".join(answer),
                "rejected": "".join(shuffled),
                "name": f"{name}:{end + 1}",
            }
        begin = end + ANSWER_LINES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    output = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    root = Path(json.__file__).parent.parent
    named = {path: path.relative_to(root).parts for path in stdlib_files()}
    for file, wanted in (("train.jsonl", False), ("eval.jsonl", True)):
        found = [
            pair
            for path, parts in named.items()
            if (parts[0] in HELD_OUT) == wanted
            for pair in pairs(path, "/".join(parts))
        ]
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in found]
        (output / file).write_text("".join(lines), encoding="utf-8")
        print(f"{output / file}: {len(found)} pairs")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
