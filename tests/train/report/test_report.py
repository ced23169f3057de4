"""`longctx report`: a page of what a run logged, and one line for anything that is no run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser import measure_page, open_page
from markupsafe import Markup

from longctx.train import cli
from longctx.train.report.page import write_page
from longctx.train.report.runs import loss_change


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


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path) -> None:
    wide = Markup('<p style="width: 900px; color: #999">wide and pale</p>')
    write_page(tmp_path / "bad.html", "bad", [wide, Markup("<script>nothing.here()</script>")])
    found = measure_page(tmp_path / "bad.html", tmp_path, width=400)
    assert len(found.overflowing) == 1 and "900px" in found.overflowing[0]
    assert 2 < found.least_contrast < 4
    opened = open_page(tmp_path / "bad.html", tmp_path)
    assert len(opened.console) == 1 and "nothing is not defined" in opened.console[0]
    assert (opened.svgs, opened.colours) == (0, 0)


RECORD = {
    "task": "dpo",
    "model": {"name": "a/" + "very-long-name" * 9, "class": "LlamaForCausalLM", "dtype": "bf16"},
    "data": {"train": {"files": ["books"], "counts": {"documents": 1, "rows": 12}}},
    "options": {"seq_len": 131072, "learning_rate": 1e-5, "lora_r": 8},
    "starts": [
        {
            "date": "2026-11-25T10:00:00+00:00",
            "step": step,
            "command": "longctx train --train_file 'a --b' --seq_len 131072 " + "x" * 200,
            "machine": {"processes": 1, "gpu": "NVIDIA H200", "gpu_gib": 139.8, "cores": 8},
            "versions": {"longctx": "0.2.0", "torch": "2.13.0"},
        }
        for step in (0, 20)
    ],
}


def test_runs_are_compared_on_a_phone_in_the_dark(tmp_path: Path, monkeypatch) -> None:
    """Nothing reaches over the edge of 400 px, all is legible, and each run has its figures."""
    monkeypatch.chdir(tmp_path)
    folders = [run_folder(tmp_path / where / "run") for where in ("one", "two", "old")]
    other = RECORD["options"] | {"learning_rate": 3e-5, "seed": 7, "output_dir": "elsewhere"}
    for folder, options in zip(folders, (RECORD["options"], other), strict=False):
        (folder / "run.json").write_text(json.dumps(RECORD | {"options": options}))
    with (folders[2] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": NaN, "rewards/chosen": 1, "eval_rewards/accuracies": 1}\n')
    cli.main(["report", "one/run", "two/run", "old/run"])
    page = (tmp_path / "report.html").read_text()
    assert "3 runs" in page and "<td>one/run</td>" in page and "old/run, training: not fin" in page
    differ = page.split("Options that differ")[1].split("</table>")[0]
    assert "<tr><td>learning_rate</td><td>1e-05</td><td>3e-05</td><td></td></tr>" in differ
    assert "<tr><td>seed</td><td></td><td>7</td><td></td></tr>" in differ
    assert differ.count("<tr>") == 3
    assert "longctx train \\\n  --train_file &#39;a --b&#39; \\\n" in page
    assert page.count("Started 2026-11-25 10:00 UTC, after step 20:") == 2
    assert "1x NVIDIA H200 (139.8 GiB), 8 cores" in page and "1 document, 12 rows" in page
    found = measure_page(tmp_path / "report.html", tmp_path, width=400, dark=True)
    assert found.overflowing == [] and found.least_contrast > 4.5 and found.smallest_px > 9
    assert found.background == "rgb(22, 24, 28)"


def test_a_run_of_one_step_and_a_record_of_other_types(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=1)
    odd = {"task": [1], "model": 3, "data": {"train": "x"}, "options": [], "starts": {"a": 1}}
    for record in (odd, {"starts": [3, {"command": "a 'b"}], "data": {"train": {"files": 3}}}):
        (run / "run.json").write_text(json.dumps(record))
        cli.main(["report", str(run)])
        assert "8.9000" in (run / "report.html").read_text()


def test_a_run_without_a_gpu_gets_no_gpu_figures(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "cpu", gpu=False)
    cli.main(["report", str(run / "metrics.jsonl"), "--output", str(tmp_path / "out.html")])
    page = (tmp_path / "out.html").read_text()
    assert "No GPU: throughput and memory are the CPU" in page
    assert "GPU, allocated" not in page and "MFU by step" not in page


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


def test_a_loss_that_is_known_once_went_nowhere() -> None:
    assert [loss_change(losses) for losses in ([5.2524], [5.0, 3.0, 4.0])] == [
        "5.2524",
        "5.0000 -> 4.0000",
    ]
