"""profiling/icons_run.py: what it asks about which icon, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.train.options.config import parse_flags
from longctx.train.output import METRICS

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def icons(monkeypatch: pytest.MonkeyPatch) -> Any:
    from profiling import icons_run

    return icons_run


def test_each_icon_is_asked_about(icons, tmp_path: Path) -> None:
    icons.write_icons(tmp_path)
    counts = []
    for file, side in ((icons.TRAINED, 24), (icons.HELD_OUT, 48)):
        records = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        counts.append(len(records))
        for record in records:
            (picture,), (asked, answer) = record["images"], record["messages"]
            assert asked["content"] == icons.QUESTION and picture.startswith(answer["content"])
            assert Image.open(tmp_path / picture).size == (side, side)
    assert counts == [11, 10]  # there is one hand alone


def test_losses_and_their_picture_are_written(icons, tmp_path: Path, monkeypatch) -> None:
    def trained(flags: list[str], folder: Path) -> list[dict[str, float]]:
        parse_flags([*flags, "--use_cpu", "--output_dir", str(folder)])
        lines = [{"step": n, "loss": 3.0 - n} for n in (1, 2)]
        folder.mkdir()
        log = [*lines, {"step": 2, "eval_loss": 1.5}]
        (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in log))
        return lines

    monkeypatch.setattr(icons, "train_lines", trained)
    monkeypatch.setattr(icons, "make_model", lambda folder, *args, **sizes: None)
    monkeypatch.setenv("LONGCTX_COMMIT", "abc")
    output = tmp_path / "icons.json"
    icons.main(["--output", str(output), "--steps", "2"])
    written = json.loads(output.read_text())
    assert written["rows"] == [
        {"class_type": name, "step": step, "loss": loss, "eval_loss": held_out}
        for name in ("custom", "vanilla")
        for step, loss, held_out in ((1, 2.0, None), (2, 1.0, 1.5))
    ]
    assert Image.open(output.with_suffix(".png")).size[0] > 400
