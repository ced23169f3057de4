"""`longctx report`: pages of hostile runs. A page runs nothing, fetches nothing, or is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from hostile.cases import bound_by_permissions, fails, prints, table
from hostile.files import Make, given

REPORT = ["longctx", "report", "FOLDER/mine"]
GOOD = [{"step": step, "loss": 9 - step / 10, "tokens_per_s": 100.0} for step in range(1, 6)]
SCRIPT = "<script>fetch('//evil')</script>"


def metrics(data: str | bytes | list[object], folder_name: str = "mine") -> Make:
    """A run's folder with these metrics: text, or JSON lines."""

    def make(folder: Path) -> list[str]:
        run = Path(os.fsdecode(bytes(folder) + b"/" + os.fsencode(folder_name)))
        run.mkdir()
        text = data
        if isinstance(data, list):
            text = "".join(json.dumps(line) + "\n" for line in data)
        (run / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
        return ["longctx", "report", str(run)]

    return make


def logged(**fields: object) -> Make:
    """Good lines, and one with these fields."""
    return metrics([*GOOD, {"step": 6, "loss": 8.0} | fields])


def linked(link: Callable[[Path, Path], object]) -> Make:
    """--output is a link of the metrics."""

    def make(folder: Path) -> list[str]:
        words = metrics(GOOD)(folder)
        link(folder / "page.html", folder / "mine/metrics.jsonl")
        return [*words, "--output", str(folder / "page.html")]

    return make


HOSTILE = {
    "a script": SCRIPT,
    "an end of svg": "</svg><script>alert(1)</script>",
    "an end of style": "</style><script>alert(1)</script>",
    "an end of title": "</title><script>alert(1)</script>",
    "an event": "<img src=x onerror=alert(1)>",
    "quotes": '" onmouseover="alert(1)',
    "a comment": "--><script>alert(1)</script><!--",
    "CDATA": "]]><script>alert(1)</script>",
    "an entity": "&lt;script&gt;",
    "a link": "javascript:alert(1)",
    "a template": "{{ 7 * 7 }}{% for x in y %}",
    "mathtext": "$\\frac{1}{0}$ $x",
    "a line break": "a\nb",
    "a NUL": "a\0b",
    "right to left": "\u202eabc",
    "a surrogate": "\ud800",
}

REPORTS = {
    "a run": (metrics(GOOD), prints("wrote .*report.html")),
    # what is no run
    "a missing run": (given("longctx report none"), fails("no such folder or file: none")),
    "no run": (given("longctx report"), fails("run")),
    "an empty name": (given("longctx report ''"), fails("holds no metrics.jsonl|no such")),
    "a folder without metrics": (
        given("longctx report BASE/model"),
        fails("holds no metrics.jsonl"),
    ),
    "a file of weights": (
        given("longctx report BASE/model/model.safetensors"),
        fails("is not a text file|no line of metrics"),
    ),
    "a name too long": (given("longctx report " + "x" * 300), fails("no such folder or file: x")),
    "a run below a file": (
        given("longctx report BASE/data/1.txt/x"),
        fails("no such folder or file"),
    ),
    "a run's folder nobody may enter": (
        lambda f: metrics(GOOD)(f) and (f / "mine").chmod(0) or REPORT,
        fails("mine"),
        bound_by_permissions,
    ),
    "a device": (given("longctx report /dev/null"), fails("/dev/null")),
    "an endless device": (given("longctx report /dev/zero"), fails("/dev/zero")),
    "a pipe": (lambda f: os.mkfifo(f / "p") or ["longctx", "report", str(f / "p")], fails("/p")),
    "a pipe in a run": (
        lambda f: (f / "mine").mkdir() or os.mkfifo(f / "mine/metrics.jsonl") or REPORT,
        fails("holds no metrics.jsonl"),
    ),
    "a link to itself": (
        lambda f: (f / "mine").symlink_to("mine") or REPORT,
        fails("mine"),
    ),
    "metrics nobody may read": (
        lambda f: metrics(GOOD)(f) and (f / "mine/metrics.jsonl").chmod(0) or REPORT,
        fails("metrics.jsonl.*Permission denied"),
        bound_by_permissions,
    ),
    "empty metrics": (metrics(""), fails("holds no logged step yet")),
    "blank metrics": (metrics("\n\n \n"), fails("no line of metrics|no logged step")),
    "binary metrics": (metrics(b"\xff\xfe\0\0"), fails("is not a text file")),
    "UTF-16 metrics": (
        metrics('{"step": 1, "loss": 2}\n'.encode("utf-16")),
        fails("not a text file"),
    ),
    "words": (metrics("loss 3\n"), fails(":1 is no line of metrics")),
    "a list": (metrics("[1]\n"), fails(":1 is no line of metrics")),
    "null": (metrics("null\n"), fails(":1 is no line of metrics")),
    "nested too deeply": (metrics("[" * 100_000), fails(":1 is no line of metrics")),
    "a step of words": (metrics('{"step": "1", "loss": 3}\n'), fails(":1 is no line of metrics")),
    "a step of truth": (metrics('{"step": true, "loss": 3}\n'), prints("wrote")),
    "no loss": (metrics('{"step": 1, "train_runtime": 3.0}\n'), fails("no logged step")),
    "a loss of words": (metrics('{"step": 1, "loss": "low"}\n'), prints("wrote")),
    "a loss of null": (metrics('{"step": 1, "loss": null}\n'), prints("wrote")),
    # damaged lines among good ones
    **{
        f"{name} among good lines": (
            metrics("".join(json.dumps(line) + "\n" for line in GOOD) + text + "\n"),
            prints("left out 1 damaged line"),
        )
        for name, text in {
            "half a line": '{"step": 4, "lo',
            "no step": '{"loss": 3}',
            "a list": "[1]",
            "null": "null",
            "words": "Killed",
            "a nested line": "[" * 100_000,
            "a huge number": "9" * 10_000,
            "a step of ten thousand digits": '{"step": ' + "9" * 10_000 + ', "loss": 1}',
        }.items()
    },
    # values
    **{
        f"a loss of {name}": (logged(loss=value), prints("wrote"))
        for name, value in {
            "NaN": float("nan"),
            "infinity": float("inf"),
            "1e308": 1e308,
            "-1e308": -1e308,
            "a list": [1],
            "an object": {"a": SCRIPT},
            "truth": True,
            "a huge integer": 10**400,
            "a huge negative integer": -(10**400),
            "a list of lists": [[1, [2]], {"a": [SCRIPT]}],
        }.items()
    },
    "only NaN": (metrics([{"step": i, "loss": float("nan")} for i in range(5)]), prints("wrote")),
    "only infinity": (
        metrics([{"step": i, "loss": float("inf")} for i in range(5)]),
        prints("wrote"),
    ),
    "one step": (metrics(GOOD[:1]), prints("wrote")),
    "steps that go back": (metrics(GOOD[::-1]), prints("wrote")),
    "one step often": (metrics(GOOD[:1] * 50), prints("wrote")),
    "a step of 10^18": (logged(step=10**18), prints("wrote")),
    "a step of 10^400": (logged(step=10**400), prints("left out 1 damaged line")),
    "a step of -10^400": (logged(step=-(10**400)), prints("left out 1 damaged line")),
    "a step of infinity": (logged(step=float("inf")), prints("left out 1 damaged line")),
    "a step of a list": (logged(step=[1]), prints("left out 1 damaged line")),
    "a memory of a huge integer": (logged(peak_host_gib=10**400), prints("wrote")),
    "a rate of an object": (logged(tokens_per_s={"a": 1}), prints("wrote")),
    "a value nested as deeply as can be read": (
        metrics(
            "".join(json.dumps(line) + "\n" for line in GOOD)
            + "".join(
                '{"step": 6, "loss": 1, "x": ' + "[" * depth + "]" * depth + "}\n"
                for depth in range(900, 1000)
            )
        ),
        prints("wrote"),
    ),
    "a negative step": (logged(step=-5), prints("wrote")),
    "a thousand keys": (logged(**{f"k{i}": i for i in range(1000)}), prints("wrote")),
    "a value of a megabyte": (logged(note="x" * 10**6), prints("wrote")),
    "fifty thousand lines": (
        metrics([{"step": i, "loss": 1.0} for i in range(50_000)]),
        prints("wrote"),
    ),
    "a memory of words": (logged(peak_host_gib="much"), prints("wrote")),
    "keys twice": (metrics('{"step": 1, "loss": 1, "loss": 2}\n'), prints("wrote")),
    # markup in every place
    **{
        f"{what} as a value": (logged(note=text), prints("wrote")) for what, text in HOSTILE.items()
    },
    **{
        f"{what} as a key": (logged(**{text: 1}), prints("wrote")) for what, text in HOSTILE.items()
    },
    **{
        f"{what} as a run's name": (metrics(GOOD, text.replace("/", "∕")), prints("wrote"))
        for what, text in HOSTILE.items()
        if "\0" not in text and "\ud800" not in text
    },
    "a run's name that is no UTF-8": (metrics(GOOD, os.fsdecode(b"caf\xe9")), prints("wrote")),
    # pages that cannot be written
    "a page below a file": (
        given("longctx report BASE/run --output BASE/run/metrics.jsonl/x"),
        fails("cannot write .*metrics.jsonl/x"),
    ),
    "a page that is a folder": (
        given("longctx report BASE/run --output BASE/model"),
        fails("cannot write .*model: it is no regular file"),
    ),
    "a page of a name too long": (
        given("longctx report BASE/run --output FOLDER/" + "x" * 300),
        fails("cannot write .*File name too long"),
    ),
    "a page on a full device": (
        given("longctx report BASE/run --output /dev/full"),
        fails("cannot write /dev/full: it is no regular file"),
    ),
    "a page that is a pipe": (
        lambda f: os.mkfifo(f / "p") or [*metrics(GOOD)(f), "--output", "FOLDER/p"],
        fails("cannot write .*/p: it is no regular file"),
    ),
    "a page that is a link to itself": (
        lambda f: (f / "p").symlink_to("p") or [*metrics(GOOD)(f), "--output", "FOLDER/p"],
        fails("cannot write .*/p"),
    ),
    "a page of no name": (given("longctx report BASE/run --output ''"), fails("cannot write")),
    "a page over the metrics": (
        lambda f: [*metrics(GOOD)(f), "--output", "FOLDER/mine/metrics.jsonl"],
        fails("metrics.jsonl would overwrite .*metrics.jsonl"),
    ),
    "a page that is a link to the metrics": (
        linked(lambda page, metrics: page.symlink_to(metrics)),
        fails("page.html would overwrite .*metrics.jsonl"),
    ),
    "a page that is the metrics by another name": (
        linked(lambda page, metrics: page.hardlink_to(metrics)),
        fails("page.html would overwrite .*metrics.jsonl"),
    ),
    "a run's page that is a link to its metrics": (
        lambda f: (
            metrics(GOOD)(f) and (f / "mine/report.html").symlink_to("metrics.jsonl") or REPORT
        ),
        fails("report.html would overwrite .*metrics.jsonl"),
    ),
    "a run's page that is a planted link": (
        lambda f: (
            metrics(GOOD)(f)
            and (f / "theirs").write_text("x")
            and (f / "mine/report.html").symlink_to("../theirs")
            or REPORT
        ),
        fails("report.html: it is a link"),
    ),
    "a run's page that is a link to nothing": (
        lambda f: metrics(GOOD)(f) and (f / "mine/report.html").symlink_to("none") or REPORT,
        fails("report.html: it is a link"),
    ),
    **{
        f"a page over {what}": (
            lambda f, data=data: (
                metrics(GOOD)(f)
                and (f / "theirs.html").write_bytes(data)
                and [*REPORT, "--output", "FOLDER/theirs.html"]
            ),
            fails("theirs.html: it is there already and longctx did not write it"),
        )
        for what, data in {
            "somebody's page": b"<!DOCTYPE html><p>mine",
            "notes on longctx": b"made with longctx",
            "weights": bytes(1000),
        }.items()
    },
    "metrics of a terabyte": (
        lambda f: metrics(GOOD)(f) and os.truncate(f / "mine/metrics.jsonl", 1 << 40) or REPORT,
        fails("metrics.jsonl has 1048576 MiB"),
    ),
    "metrics called report.html": (
        lambda f: (
            metrics(GOOD)(f)
            and (f / "mine/metrics.jsonl").rename(f / "mine/report.html")
            and ["longctx", "report", str(f / "mine/report.html")]
        ),
        fails("report.html would overwrite .*report.html"),
    ),
    **{
        f"runs called {name}": (
            lambda f, name=name: (
                metrics(GOOD, name)(f)
                and metrics(GOOD, "other")(f)
                and ["longctx", "report", str(f / name), str(f / "other"), "--output", str(f / "p")]
            ),
            prints("wrote .*/p"),
        )
        for name in ("$5_{x}$", r"$\frac$", "_hidden", "a$b", "%s{}", "<svg>")
    },
}

CASES = table("reports", REPORTS)
