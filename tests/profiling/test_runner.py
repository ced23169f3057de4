"""profiling/bench/runner.py: cases as data, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from paths import ROOT

from longctx.errors import UserError
from profiling.bench import (
    grouped_bench,
    layer_bench,
    optimizer_bench,
    runner,
    slab_bench,
    step_bench,
    train_bench,
    trl_bench,
)
from profiling.bench.runner import Benchmark, run_child, train_lines

BENCHES = (grouped_bench, layer_bench, optimizer_bench, slab_bench, step_bench, train_bench)
BENCHES += (trl_bench,)
FAKE = """
import sys
sys.path.insert(0, {root!r})
from profiling.bench import runner

def measure(case, repeats, flags):
    print("what a library prints is no row")
    with runner.until_out_of_memory() as outcome:
        if case["tokens"] == 2:
            raise RuntimeError("CUDA out of memory")
    return [{{**case, **outcome, "repeats": repeats, "flags": flags}}]

BENCH = runner.Benchmark(
    script=__file__,
    description="A fake.",
    defaults=dict(tokens=1, offload="all", twice=None),
    published=dict(published=[dict(tokens=1), dict(tokens=2)], other=[dict(tokens=4)]),
    measure=measure,
    settle=lambda case: {{**case, "twice": 2 * case["tokens"]}},
    key=("tokens",),
    takes_flags=True,
)
if __name__ == "__main__":
    runner.main(BENCH)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setenv("LONGCTX_COMMIT", "a" * 40)
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(root=str(ROOT)))
    found: dict[str, Any] = {"__file__": str(script), "__name__": "fake"}
    exec(compile(script.read_text(), str(script), "exec"), found)
    return found


def test_a_case_runs_in_a_process_of_its_own(fake, tmp_path: Path, capfd) -> None:
    """Out of memory is a row; flags and repeats arrive; what a library prints is no row."""
    output = tmp_path / "fake.json"
    words = ["--output", str(output), "--repeats", "7", "--case", "tokens=2,offload=none"]
    runner.main(fake["BENCH"], [*words, "--", "--use_cpu"])
    (row,) = json.loads(output.read_text())["rows"]
    assert row == dict(
        tokens=2, offload="none", twice=4, status="oom", repeats=7, flags=["--use_cpu"]
    )
    printed = capfd.readouterr()
    assert "a library" in printed.err and "a library" not in printed.out


@pytest.fixture
def in_process(fake, monkeypatch) -> list[str]:
    """Children are calls here; returns the cases' texts."""
    asked: list[str] = []

    def child(command: list[str], timeout_s: float | None = None) -> list[dict[str, Any]]:
        asked.append(command[command.index("--case") + 1])
        case = fake["BENCH"].parsed(asked[-1])
        if case["tokens"] == 3:
            return []
        return fake["measure"](case, int(command[command.index("--repeats") + 1]), [])

    monkeypatch.setattr(runner, "run_child", child)
    return asked


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ([], ["twice=2", "tokens=2,twice=4"]),
        (["--cases", "other"], ["tokens=4,twice=8"]),
        (["--only", "tokens=2"], ["tokens=2,twice=4"]),
        (["--case", "tokens=5"], ["tokens=5,twice=10"]),
        (["--case", "tokens=5", "--cases", "other"], ["tokens=5,twice=10", "tokens=4,twice=8"]),
        (["--dry_run"], []),
    ],
    ids=str,
)
def test_which_cases_run(fake, in_process, words, texts, capsys) -> None:
    runner.main(fake["BENCH"], words)
    assert in_process == texts
    assert ("--child" in capsys.readouterr().out) == (words == ["--dry_run"])


def test_what_would_have_no_effect_is_refused(capsys) -> None:
    for bench, words in ((trl_bench, ["--", "--use_cpu"]), (slab_bench, ["--repeats", "3"])):
        with pytest.raises(SystemExit):
            runner.main(bench.BENCH, ["--dry_run", *words])
        assert "nothing" in capsys.readouterr().err


def test_a_row_replaces_the_one_of_its_key(fake, in_process, tmp_path: Path) -> None:
    output = tmp_path / "fake.json"
    for words in ([], ["--case", "tokens=1,offload=none"]):
        runner.main(fake["BENCH"], [*words, "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert [(row["tokens"], row["offload"]) for row in rows] == [(2, "all"), (1, "none")]


def test_a_case_that_fails_is_no_row_and_fails_the_command(fake, in_process, tmp_path) -> None:
    output = tmp_path / "fake.json"
    words = ["--case", "tokens=3", "--case", "tokens=1", "--output", str(output)]
    with pytest.raises(SystemExit, match="1 of 2 cases failed"):
        runner.main(fake["BENCH"], words)
    assert [row["tokens"] for row in json.loads(output.read_text())["rows"]] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--case", "token=1"], "unknown key 'token' in --case; known: tokens, offload, twice"),
        (["--only", "tokens=9"], "nothing to run: give --case or --cases"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(fake, in_process, words, message) -> None:
    with pytest.raises(SystemExit, match=message):
        runner.main(fake["BENCH"], words)
    assert not in_process


@pytest.mark.parametrize("module", BENCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_published_cases_survive_their_text(module) -> None:
    """What a child measures is the case that its row is of, by the file that declares it."""
    bench: Benchmark = module.BENCH
    texts = set()
    for name in bench.published:
        for case in bench.cases(name):
            command = bench.command(case, 3, ["--use_cpu"] * bench.takes_flags)
            text = command[command.index("--case") + 1]
            assert bench.parsed(text) == case
            assert Path(command[command.index("--child") - 1]).samefile(module.__file__)
            words = command[command.index("--child") + 3 :]
            assert words == ["--repeats", "3", "--", *["--use_cpu"] * bench.takes_flags]
            assert ("torch.distributed.run" in command) == (case.get("gpus", 1) > 1)
            texts.add(text)
    assert len(texts) > 1


def test_a_run_of_train_py_that_fails_is_an_error_of_one_line(tmp_path: Path) -> None:
    program = ("-c", "import sys; sys.exit(3)")
    with pytest.raises(UserError, match="exit code 3 of -c"):
        train_lines([], tmp_path, program)
    log = "import sys; folder = sys.argv[sys.argv.index('--output_dir') + 1]; "
    log += "open(folder + '/metrics.jsonl', 'w').write('{\"loss\": 1}\\n{\"eval\": 2}\\n')"
    assert train_lines(["--seed", "1"], tmp_path, ("-c", log)) == [{"loss": 1}]


# --- processes -------------------------------------------------------------------------------


def test_a_child_that_is_late_or_fails_has_no_rows(capfd) -> None:
    def python(code: str, timeout_s: float | None = None) -> list[dict[str, object]]:
        return run_child([sys.executable, "-c", code], timeout_s)

    assert python("print('a line'); print('[{\"status\": \"oom\"}]')") == [{"status": "oom"}]
    assert python("raise SystemExit('no such thing')") == []
    assert "failed: exit code 1" in (printed := capfd.readouterr()).out
    assert "no such thing" in printed.err
    assert python("print('[{\"a\": 1}]'); raise SystemExit(1)") == [{"a": 1}]  # a peer failed
    assert python("import time; time.sleep(9)", 0.2) == []
    assert "not done after" in capfd.readouterr().out


def test_a_late_launcher_takes_its_workers_with_it(tmp_path: Path, monkeypatch) -> None:
    """It is late as soon as its worker runs: no time is measured here."""

    class LatePopen(subprocess.Popen):
        def communicate(self, input=None, timeout=None):
            if timeout is None:
                return super().communicate(input)
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", LatePopen)
    pid_file, written = str(tmp_path / "pid"), str(tmp_path / "written")
    worker = f"import os, time; open({written!r}, 'w').write(str(os.getpid())); "
    worker += f"os.rename({written!r}, {pid_file!r}); time.sleep(3600)"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], "
    launcher += "start_new_session=True)"  # as torchrun starts them
    # A worker that lives on holds the pipe, and this call, until pytest's timeout.
    assert run_child([sys.executable, "-c", launcher, worker], 2) == []
    pid = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):  # one that was not killed sleeps until pytest's timeout
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
