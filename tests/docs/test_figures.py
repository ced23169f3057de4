"""Each figure that README, the pages of docs and the recipes show is in its row of
profiling/results, or a comment on the page says what else it is (see figures.py)."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from figures import MARK, Place, comments_of, places, read_mark
from held import RESULTS
from paths import ROOT

from profiling.front import behind

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*.yaml")),
]


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return comments_of(text) if page.suffix == ".yaml" else text


def stale(found: list[Place]) -> list[str]:
    return [f"{f.text} {f.unit} in: {place.text}" for place in found for f in place.missing()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_figure_is_in_its_row(page) -> None:
    text = text_of(page)
    assert not [mark for mark in MARK.findall(text) if read_mark(mark) is None]
    ends = r"[^>\n]\n *<!--"  # a comment that begins a line ends the paragraph above it
    assert not re.findall(ends, text)
    assert not stale(list(places(page.name, text)))


def changed(text: str, before: list[Place], number: int, factor: float) -> str | None:
    """The text with one figure of its places, counted through, a tenth more or less; None where
    the place in the text cannot be told."""
    shown = [figure for place in before for figure in place.figures]
    figure, other = shown[number], shown[number].times(factor)
    for at in re.finditer(rf"(?<![\d.,]){re.escape(figure.text)}(?![\d]|\.\d)", text):
        new = text[: at.start()] + other.text + text[at.end() :]
        after = [figure for place in places("", new) for figure in place.figures]
        if after == [*shown[:number], other, *shown[number + 1 :]]:
            return new
    return None


def test_a_figure_that_is_a_tenth_off_is_noticed() -> None:
    """Of thirty figures with a row, which are changed one at a time, nearly all are found."""
    random.seed(74)
    read = [(text := text_of(page), list(places(page.name, text))) for page in PAGES]
    drawn = [
        (text, found, number)
        for text, found in read
        for number, figure in enumerate(f for place in found for f in place.figures)
    ]
    tried = noticed = 0
    for text, found, number in random.sample(drawn, len(drawn)):
        place, figure = [(p, f) for p in found for f in p.figures][number]
        if place.source.unmeasured & {"*", figure.text}:
            continue
        if new := changed(text, found, number, random.choice((0.9, 1.1))):
            tried += 1
            noticed += bool(stale(list(places("", new))))
        if tried == 30:
            break
    assert tried == 30 and noticed >= 28


def test_the_smokes_are_those_of_their_files() -> None:
    """How many command lines ran and at which commit, and that all passed."""
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    said = r"(\d+) for (?:one GPU|one and two GPUs|four) passed at (\w+)"
    for (count, commit), name in zip(
        re.findall(said, text), ("gpu_smoke", "h200_x2_smoke", "h100_x4_smoke"), strict=True
    ):
        file = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        outcomes = [row["outcome"] for row in file["rows"]]
        assert outcomes == ["passed"] * int(count) and file["commit"].startswith(commit), name


def test_peers_are_faster_where_the_page_says_so() -> None:
    """The sentences of docs/results.md below its first table."""
    file = json.loads((RESULTS / "h200_front.json").read_text(encoding="utf-8"))
    assert behind(file["rows"]) == file["behind"] == []
    ran = [row for row in file["rows"] if row["status"] == "ok"]
    ours = [row for row in ran if row["class_type"] == "custom"]
    ahead, below = [], {}
    for peer in (row for row in ran if row["class_type"] != "custom"):
        where = (peer["model"], peer["rows"])
        points = [row for row in ours if (row["model"], row["rows"]) == where]
        within = [row["s"] for row in points if row["peak_gib"] <= peer["peak_gib"]]
        if within and min(within) >= peer["s"]:
            ahead.append((*where, peer["checkpointing"]))
        gap = min(row["peak_gib"] for row in points) - peer["peak_gib"]
        below[where] = max(gap, below.get(where, 0.0))
    assert ahead == [("4 layers of Llama-3.1-8B", "8192 tokens", "none")]
    assert round(below.pop(("Llama-3.2-1B", "8192 tokens")), 1) == 2.4
    assert round(max(below.values()), 1) == 0.4


TABLE = "<!-- rows: h200_loss; down impl=longctx,liger -->\n\n| | a step |\n|---|---|"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("It takes 636 ms and 3.0 GiB ([a](profiling/results/h200_loss.json)).", []),
        ("It takes 700 ms and 3.0 GiB ([a](profiling/results/h200_loss.json)).", ["700"]),
        ("It takes 36.8 s ([a](profiling/results/h200_states_step.json)).", []),
        ("It takes 36.8 ms ([a](profiling/results/h200_states_step.json)).", ["36.8"]),
        ("It takes 137.8 GiB of 36.8 s ([a](profiling/results/h200_states_step.json)).", ["137.8"]),
        ("36.8 s, 137.8 GiB reserved ([a](profiling/results/h200_states_step.json)).", []),
        ("Nothing says where 12 s are from.", ["12"]),
        ("The plan says 12 s. <!-- planned -->", []),
        ("The plan says 12 s of 13 s. <!-- planned: 12 -->", ["13"]),
        (f"{TABLE}\n| ours | 654 ms, 4.9 |\n| liger | 636 ms, 3.0 |", []),
        (f"{TABLE}\n| ours | 654 ms, 4.9 |\n| liger | 654 ms, 3.0 |", ["654", "3.0"]),
        ("| | a step |\n|---|---|\n| nothing says where it is from | 3.6 |", ["3.6"]),
        ("12 s are 2.0 times as long as 6.0 s. <!-- planned: 12, 6.0 -->", []),
        ("12 s are 2.5 times as long as 6.0 s. <!-- planned: 12, 6.0 -->", ["2.5"]),
        ("2.8% faster. <!-- rows: h200_loss; ratio fwd_bwd_ms -->", []),
        ("3.1% faster. <!-- rows: h200_loss; ratio fwd_bwd_ms -->", ["3.1"]),
        ("torch 2.11, TRL 1.16's, Llama-3.1-8B, 131072 tokens, `--gpu_memory_gib 24`, 80 GB", []),
    ],
)
def test_what_is_found(text, wrong) -> None:
    assert [figure.text for place in places("", text) for figure in place.missing()] == wrong
