"""What a run prints can be lost without ending it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest
from paths import PYTHONPATH, ROOT

from longctx.errors import UserError, counted, many, on_terminal, print_rank0

# Prints before and after whoever reads has gone; the exit status is the program's own.
PROGRAM = """
import sys
from longctx.errors import print_rank0, survive_lost_output
survive_lost_output()
print_rank0("ready")
sys.stdin.readline()
for _ in range(2000):
    print_rank0("x" * 100)
    print("y" * 100, file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_count_of_one_has_its_noun_in_the_singular() -> None:
    assert (many(1, "row"), many(2, "row"), many(2000, "row")) == ("1 row", "2 rows", "2,000 rows")
    written = re.compile(r"(?<!of )\{len\([^{}]*\)(:,)?\} (?!tokens|characters|entries)[a-z]+s\b")
    for path in (ROOT / "longctx").rglob("*.py"):
        found = written.search(path.read_text())
        assert found is None, f"{path}: {found and found[0]}: use many(count, noun)"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        (os.fsdecode(b"\xff"), r"\udcff"),
        ("\u202etxt", r"\u202etxt"),
        ("é 漢 🙂 %s 'q'", "é 漢 🙂 %s 'q'"),
    ],
)
def test_a_line_stays_a_line(name: str, shown: str, capsys) -> None:
    assert str(UserError(f"{name} is wrong")) == f"{shown} is wrong"
    print_rank0(name)
    assert capsys.readouterr().out == f"{shown}\n"


def test_every_print_escapes_what_it_prints() -> None:
    """But for words that stand in the code, and JSON, which escapes by itself."""
    safe = {"printable", "json.dumps", "usage", "cli.usage"}
    for path in (ROOT / "longctx").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "print":
                for word in call.args:
                    called = ast.unparse(word.func) if isinstance(word, ast.Call) else ""
                    constant = isinstance(word, ast.Constant)
                    assert constant or called in safe, f"{path}:{call.lineno}: use say()"


def test_what_an_encoding_lacks_is_escaped() -> None:
    program = "from longctx.errors import *; survive_lost_output(); print_rank0('é 漢')"
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
    assert done.stdout == rb"\xe9 \u6f22" + b"\n"


def start(**streams) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=env, **streams)


def test_a_closed_pipe() -> None:
    program = start(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout and program.stderr and program.stdin
    assert program.stdout.readline() == b"ready\n"
    program.stdout.close()
    program.stderr.close()
    program.stdin.close()
    assert program.wait(timeout=60) == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        program = start(stdout=full, stderr=full)
        program.communicate(b"\n", timeout=60)
    assert program.returncode == 7


def test_a_terminal_that_is_gone() -> None:
    mine, theirs = os.openpty()
    program = start(stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(mine, 5) == b"ready"
    os.close(mine)
    program.communicate(b"\n", timeout=60)
    assert program.returncode == 7


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (950, "950"),
        (28_224, "28.2K"),
        (999_600, "1M"),
        (8.03e9, "8.03B"),
        (134.5e6, "134M"),
    ],
)
def test_counts_in_three_digits(number, shown) -> None:
    assert counted(number) == shown


def test_who_watches(monkeypatch) -> None:
    assert not on_terminal()  # pytest captures
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not on_terminal()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert on_terminal()
