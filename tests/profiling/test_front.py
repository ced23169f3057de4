"""The front's rows, read: where a peer is ahead, and the picture."""

from __future__ import annotations

from typing import Any

import pytest

from profiling import front


def ours(budget_gib: float, s: float | None, rows: str = "8192 tokens") -> dict[str, Any]:
    row = {"model": "m", "rows": rows, "class_type": "custom", "budget_gib": budget_gib}
    if s is None:
        return {**row, "status": "oom"}
    measured = {"s": s, "tokens_per_s": 1 / s, "peak_gib": budget_gib - 1, "status": "ok"}
    return {**row, **measured}


def peer(peak_gib: float, s: float, rows: str = "8192 tokens") -> dict[str, Any]:
    keys = {"model": "m", "rows": rows, **front.PEERS[0]}
    return {**keys, "s": s, "tokens_per_s": 1 / s, "peak_gib": peak_gib, "status": "ok"}


@pytest.mark.parametrize(
    ("rows", "ahead"),
    [
        ([ours(12, 1.0), peer(11, 1.1)], 0),
        ([ours(12, 1.0), peer(11, 0.9)], 1),
        ([ours(12, 1.0), peer(13, 0.9)], 0),  # needs more
        ([ours(12, None), peer(11, 0.9)], 1),
        ([ours(12, 1.0), ours(24, 0.95), peer(11, 0.9)], 2),
        ([ours(12, 1.0), peer(11, 0.9, rows="32768 tokens")], 0),
        ([ours(12, 1.0), {**peer(11, 0.9), "status": "oom"}], 0),
    ],
)
def test_where_a_peer_is_ahead(rows, ahead) -> None:
    assert len(front.behind(rows)) == ahead


def test_the_picture_has_a_panel_for_each_kind_of_row() -> None:
    rows = [ours(12, 1.0), ours(24, 0.9), peer(11, 1.1), peer(20, 2.0, rows="131072 tokens")]
    fig = front.draw(rows)
    assert [axes.get_title() for axes in fig.axes] == ["m\n8192 tokens", "m\n131072 tokens"]
    lines = fig.axes[0].lines
    assert sorted(line.get_xdata().tolist() for line in lines) == [[11.0], [11.0, 23.0]]


def test_rows_are_as_long_as_their_names_say() -> None:
    for name, batch in front.batches().items():
        assert batch["input_ids"].shape == (1, int(name.split()[0]))
        assert int((batch["position_ids"] == 0).sum()) == (1 if "packed" not in name else 6)
