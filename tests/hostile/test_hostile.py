"""Every case of the tables. A plain run of pytest takes a sample that is always the same;
`--hostile all` takes all of them (run_all.py also records what became of each)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.cases import Case, find_named
from hostile.client import Server
from hostile.tables import CASES

SAMPLED = 80
"""A plain run takes one of so many cases of each table."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("hostile")) as server:
        yield server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        chosen = CASES if metafunc.config.getoption("--hostile") == "all" else sample()
        metafunc.parametrize("case", chosen, ids=[case.id for case in chosen])


def sample() -> list[Case]:
    """Every SAMPLED-th case of each table that a warm process can run, but for those whose rules
    tests/train/options/test_config.py tries."""
    seen: Counter[str] = Counter()
    chosen = []
    for case in CASES:
        if case.shell is None and not (case.of_options and not case.expected.later):
            if seen[case.table] % SAMPLED == 0:
                chosen.append(case)
            seen[case.table] += 1
    return chosen


def test_case(server: Server, case: Case) -> None:
    row = server.run(case.id)
    assert not row["problems"], row


def test_functions_that_a_moment_waits_for_are_there() -> None:
    """Most moments are tried by run_all.py alone."""
    tables = (Path(__file__).parent / "tables").glob("*.py")
    names = {n for path in tables for n in re.findall(r'before\("([\w.]+)"\)', path.read_text())}
    assert len(names) > 10 and all(callable(find_named(name)) for name in names)


def test_no_name_hides_another() -> None:
    assert max(Counter(case.id for case in CASES).values()) == 1
    assert len(CASES) >= 600
