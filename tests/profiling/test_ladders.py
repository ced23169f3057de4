"""profiling/ladders.py: what layers kept is data in a row, and is read as it was written."""

from __future__ import annotations

import json
import re

import pytest
from cost_sizes import keep_of
from paths import ROOT

from longctx.cost.kept import describe
from longctx.cost.sizes import Cut
from profiling.ladders import ladder_columns, ladder_of


def test_a_ladder_is_read_as_it_was_written() -> None:
    ladder = (*2 * (keep_of("h", "h"),), keep_of("all", "qkv"), keep_of("o"))
    row = json.loads(json.dumps(ladder_columns(ladder, Cut(16, 1, 2**29))))
    assert ladder_of(row) == ladder
    assert row["cut"] == {"tile_tokens": 16, "head_groups": 1, "logits_bytes": 2**29}
    assert [part["layers"] for part in row["ladder"]] == [2, 1, 1]
    assert row["ladder"][1]["hosted"] == ["x", "o", "h", "q k v"]
    assert "cut" not in ladder_columns(ladder, None)


@pytest.mark.parametrize(
    "part", [dict(kept=["x"], hosted=["o"]), dict(kept=["x", "y"], hosted=[])], ids=str
)
def test_what_no_layer_keeps_is_refused(part) -> None:
    with pytest.raises(ValueError, match="cannot keep"):
        ladder_of({"ladder": [{"layers": 1, **part}]})


def test_published_ladders_are_what_their_runs_printed() -> None:
    files = sorted((ROOT / "profiling/results").glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    described = [row for row in rows if "description" in row]
    assert described
    for row in described:
        printed = re.sub(r"layers (\d+) to \1:", r"layer \1:", row["description"])  # as it was then
        assert printed.startswith(describe(ladder_of(row)))
