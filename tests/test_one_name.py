"""One name, one thing: modules and classes have names of their own, but for pairs with a reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "longctx"
MODULES = {
    "attention": "a part of our layer, and what class_type any puts into Hugging Face's layers",
    "gradients": "of a layer in backward, and in `parameter.grad` as loops want them",
    "images": "the attention of images that see both ways, and what images cost",
    "loss": "the chunked loss of lm_head, and its place in class_type any",
    "modules": "that `losses` offers, and whose forwards a patch exchanges",
    "pairs": "a preference loss, and the task that trains with it",
    "patch": "of a known family, and of class_type any",
    "protocol": "what the files of its folder have in common",
    "rates": "that cost counts with, and their measurement",
    "reward": "the loss of a model of rewards, and the task that trains with it",
    "runtime": "of a known family, and of class_type any",
    "states": "AdamW's in memory, and where a run's options place them",
    "stream": "of logits through lm_head, and of states between host and GPU",
    "table": "rows of cost, and the parts of a layer by their names",
}
"""Module names that several rooms have, and what each of the files is."""
CLASSES = {
    "Counted": "bytes and FLOPs of what may be kept, and elements of a peer's layer with experts",
    "Part": "of a layer, and a tensor of a block of states",
    "_CrossEntropy": "over lm_head, and over logits",
}
"""Class names that several files have, and what each of the classes is."""


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]


def used_twice(named: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in named.items() if len(places) > 1}


def modules() -> dict[str, list[str]]:
    named = defaultdict(list)
    for path in sources():
        named[path.stem].append(str(path.relative_to(PACKAGE)))
    return used_twice(named)


def classes() -> dict[str, list[str]]:
    named = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                named[node.name].append(str(path.relative_to(PACKAGE)))
    return used_twice(named)


@pytest.mark.parametrize(("found", "allowed"), [(modules, MODULES), (classes, CLASSES)])
def test_a_name_is_used_twice_with_a_reason_alone(found, allowed: dict[str, str]) -> None:
    twice = found()
    new = {name: places for name, places in twice.items() if name not in allowed}
    assert not new, f"call one of each pair something else: {new}"
    gone = allowed.keys() - twice.keys()
    assert not gone, f"take out of the table what is no longer used twice: {sorted(gone)}"
