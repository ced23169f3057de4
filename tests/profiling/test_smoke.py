"""The smoke's command lines are what the command line takes, and a failure is known as one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from threading import Lock
from time import sleep

import pytest

from longctx.train.options.config import parse_flags


@pytest.fixture
def smoke():
    from profiling import smoke

    return smoke


@pytest.fixture
def cases(smoke, tmp_path: Path):
    inputs = smoke.Inputs(tmp_path)
    return [smoke.first_case(inputs), *smoke.cases(inputs)]


def test_every_run_has_options_that_exist(cases) -> None:
    """An unknown option or value is a UserError of the parser."""
    runs = 0
    for case in cases:
        for command in case.commands:
            if "train.py" in command or "train" in command:
                at = command.index("train.py") if "train.py" in command else command.index("train")
                parse_flags(command[at + 1 :])
                runs += 1
    assert runs > 50


def test_cases_and_their_folders_have_names_of_their_own(cases) -> None:
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    folders = [
        command[command.index("--output_dir") + 1]
        for case in cases
        for command in {
            c[c.index("--output_dir") + 1]: c for c in case.commands if "--output_dir" in c
        }.values()
    ]
    assert len(folders) == len(set(folders))


@pytest.mark.parametrize(
    ("status", "said", "problem"),
    [
        (0, "custom: LlamaForCausalLM, 1 parameters", None),
        (1, "one\nValueError: two\nthree", "ValueError: two"),
        (1, "", "nothing was printed"),
        (0, "custom: X, 1\nTraceback (most recent call last)", "it printed a traceback"),
        (
            0,
            "custom: X, 1\ncustom: Hugging Face's layers run: dropout",
            "Hugging Face's layers ran",
        ),
        (0, "vanilla: X, 1", "no line has"),
    ],
)
def test_a_case_fails_by_status_or_by_what_it_says(smoke, status, said, problem) -> None:
    case = smoke.Case(name="a", commands=(), prints=(smoke.SCHEDULE,))
    found = smoke.problem_of(case, status, said)
    assert (found is None) if problem is None else problem in (found or "")


def test_a_case_ends_with_its_first_command_that_fails(smoke, tmp_path: Path, monkeypatch) -> None:
    def python(text: str) -> tuple[str, ...]:
        return (sys.executable, "-c", text)

    commands = (
        python("print('one')"),
        python("raise SystemExit('error: two')"),
        python("print(3)"),
    )
    row = smoke.run(smoke.Case(name="a", commands=commands), [0], tmp_path)
    assert (row["outcome"], row["problem"]) == ("failed", "error: two")
    said = (tmp_path / "a.log").read_text()
    assert "one" in said and "\n3\n" not in said
    monkeypatch.setattr(smoke, "LIMIT_S", 0.2)
    waits = python("import time; time.sleep(60)")
    row = smoke.run(smoke.Case(name="b", commands=(waits,)), [0], tmp_path)
    assert row["problem"].startswith("error: it took more than")


def test_no_gpu_has_more_cases_than_places(smoke, tmp_path: Path, monkeypatch) -> None:
    used, most, lock = Counter(), Counter(), Lock()

    def run(case, gpus, logs, end):
        with lock:
            used.update(dict.fromkeys(gpus, case.places))
            most.update({gpu: max(0, used[gpu] - most[gpu]) for gpu in gpus})
        sleep(0.01)
        with lock:
            used.subtract(dict.fromkeys(gpus, case.places))
        return {"case": case.name}

    monkeypatch.setattr(smoke, "run", run)
    sizes = [(1, 1), (1, 2), (2, 1), (1, 2), (1, 1), (2, 2)] * 4
    given = [
        smoke.Case(name=str(i), commands=(), gpus=gpus, places=places)
        for i, (gpus, places) in enumerate(sizes)
    ]
    started = smoke.Lanes(2, 3, tmp_path, 0.0).start(given)
    assert sorted(int(future.result(60)["case"]) for future in started) == [*range(len(given))]
    assert {*most} == {0, 1} and all(2 <= n <= 3 for n in most.values()) and not +used


def test_what_is_left_of_a_run_is_completed(smoke, tmp_path: Path, monkeypatch) -> None:
    """`--limit_s` leaves cases without a row, and `--rest` runs these and what failed."""
    output, ran = tmp_path / "smoke.json", []

    def run(case, gpus, logs, end):
        ran.append(case.name)
        outcome = {2: "failed", 3: "not begun"}.get(len(ran), "passed")
        return {"case": case.name, "gpus": case.gpus, "outcome": outcome, "s": 1.0}

    monkeypatch.setattr(smoke, "run", run)
    monkeypatch.setattr(smoke.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(smoke, "places_of", lambda gpu: 3)
    for rest, status in (((), 1), (("--rest",), 0)):
        with pytest.raises(SystemExit) as ended:
            smoke.main(["dpo", *rest, "--output", str(output), "--logs", str(tmp_path)])
        assert ended.value.code == status
    names = [case for case in ran if "dpo" in case]
    rows = smoke.read_rows(output)
    assert len(names) == len({*names}) + 2 and ran.count("custom") == 2
    assert {row["case"] for row in rows} == {*ran}
    assert all(row["outcome"] == "passed" for row in rows)
    end = smoke.time.monotonic() - 1
    monkeypatch.undo()
    row = smoke.run(smoke.Case(name="late", commands=()), [0], tmp_path, end)
    assert row["outcome"] == "not begun"
