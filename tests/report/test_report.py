"""`longctx report`: a page of what a run logged, and one line for anything that is no run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser import open_page
from markupsafe import Markup

from longctx import cli
from longctx.report.page import write_page


def run_folder(folder: Path, steps: int = 30, gpu: bool = True) -> Path:
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 9 - step / 10, "learning_rate": 1e-4, "grad_norm": 1.5}
        line |= {"step_s": 0.5, "tokens_per_s": 8192.0, "peak_host_gib": 2.0}
        line |= {"mfu": 0.4, "peak_gpu_gib": 11.0, "peak_reserved_gib": 12.0} if gpu else {}
        lines.append(line)
    lines.append({"step": steps, "eval_loss": 6.25})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_page_shows_every_panel_in_a_browser(tmp_path: Path, capsys) -> None:
    run = run_folder(tmp_path / "a <b> run")
    cli.main(["report", str(run)])
    assert "report.html" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    assert "8.9000 -&gt; 6.0000" in page and "Run a &lt;b&gt; run" in page
    assert "src=" not in page and "<script" not in page  # one file, nothing to fetch
    opened = open_page(run / "report.html", tmp_path)
    assert opened.console == []
    assert opened.svgs == 7
    assert opened.ink > 0.02 and opened.colours >= 2


def test_a_console_error_and_an_empty_page_are_seen(tmp_path: Path) -> None:
    write_page(tmp_path / "bad.html", "bad", [Markup("<script>nothing.here()</script>")])
    opened = open_page(tmp_path / "bad.html", tmp_path)
    assert len(opened.console) == 1 and "nothing is not defined" in opened.console[0]
    assert (opened.svgs, opened.colours) == (0, 0)


def test_a_run_without_a_gpu_gets_no_gpu_figures(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "cpu", gpu=False)
    cli.main(["report", str(run / "metrics.jsonl"), "--output", str(tmp_path / "out.html")])
    page = (tmp_path / "out.html").read_text()
    assert "had no GPU" in page
    assert "GPU, allocated" not in page and "MFU" not in page


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 4, "lo',
        '{"loss": 3}\n',
        "[1]\n",
        "null\n",
        "[" * 100_000,
        '{"step": 1' + "0" * 400 + ', "loss": 3}\n',
    ],
    ids=["half", "no step", "a list", "null", "nested", "a step beyond 64 bits"],
)
def test_damaged_lines_are_left_out_and_said(tmp_path: Path, damaged: str, capsys) -> None:
    run = run_folder(tmp_path / "killed", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(damaged)
    cli.main(["report", str(run)])
    assert "8.9000 -&gt; 8.7000" in (run / "report.html").read_text()
    assert "left out 1 damaged line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("metrics.jsonl/x", "cannot write .*metrics.jsonl/x"),
        (".", "it is no regular file"),
        ("pipe", "it is no regular file"),
        ("metrics.jsonl", "metrics.jsonl would overwrite .*metrics.jsonl"),
        ("link", "link would overwrite .*metrics.jsonl"),
        ("same", "same would overwrite .*metrics.jsonl"),
        ("none/../metrics.jsonl", "would overwrite .*metrics.jsonl"),
        ("elsewhere", "elsewhere: it is a link"),
        ("notes.html", "notes.html: it is there already and longctx did not write it"),
    ],
)
def test_a_page_that_cannot_be_written_changes_nothing(
    output: str, message: str, tmp_path: Path
) -> None:
    run = run_folder(tmp_path / "run", steps=3)
    metrics = run / "metrics.jsonl"
    os.mkfifo(run / "pipe")
    (run / "link").symlink_to("metrics.jsonl")
    (run / "elsewhere").symlink_to(tmp_path / "nowhere")
    (run / "notes.html").write_text("<!DOCTYPE html>")
    (run / "same").hardlink_to(metrics)
    before = metrics.read_text()
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        cli.main(["report", str(run), "--output", f"{run}/{output}"])
    assert metrics.read_text() == before


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ('"loss": [1, {"a": "<b>"}]', "<td>[1, {&#39;a&#39;: &#39;&lt;b&gt;&#39;}]</td>"),
        ('"loss": 1' + "0" * 400, '<td class="number">inf</td>'),
        ('"loss": 1, "\\ud800": "\\ud801"', r"<td>\ud801</td>"),
        ('"loss": 1, "n": 12345678901234567890', '<td class="number">1.235e+19</td>'),
    ],
)
def test_odd_values_are_shown(fields: str, shown: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / os.fsdecode(b"caf\xe9"), steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, ' + fields + "}\n")
    cli.main(["report", str(run)])
    page = (run / "report.html").read_text()
    assert shown in page and r"Run caf\udce9" in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such folder or file"),
        ("folder", "holds no metrics.jsonl"),
        ("", "no logged step"),
        ('{"step": 1, "train_runtime": 3.0}\n', "no logged step"),
        ("loss 3\n", ":1 is no line of metrics"),
        ("[1]\n", ":1 is no line of metrics"),
        ('{"step": "1", "loss": 3}\n', ":1 is no line of metrics"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_what_is_no_run_is_one_line(content, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as error:
        cli.main(["report", str(path)])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_unknown_commands_name_the_closest(capsys) -> None:
    with pytest.raises(SystemExit, match="did you mean longctx report?"):
        cli.main(["repotr", "x"])
    cli.main([])
    assert "report" in capsys.readouterr().out
