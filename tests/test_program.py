"""How a program ends: the same for train.py and for every `longctx COMMAND`."""

from __future__ import annotations

import errno
import gc
import logging
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx.errors import UserError
from longctx.train import cli
from longctx.train.program import Parser, importing, program, started_as

pytestmark = pytest.mark.usefixtures("heard_signals")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def refuse() -> None:
    raise UserError("--seq_len is\nwrong")


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (refuse, r"error: --seq_len is\nwrong", ""),
        (send(signal.SIGINT), 130, "interrupted\n"),
        (send(signal.SIGTERM), 143, ""),
        (send(signal.SIGHUP), 129, ""),
    ],
)
def test_how_a_program_ends(work: Callable[[], None], code: object, said: str, capsys) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    closed = []
    with pytest.raises(SystemExit) as end, program():
        try:
            work()
        finally:
            closed.append("the file")
    assert (end.value.code, closed) == (code, ["the file"])
    assert capsys.readouterr().err == said
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, monkeypatch) -> None:
    """The imports of torch and transformers ask for it: MKL ended the process, without a traceback
    even."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as end, program():
        raise AssertionError("the program must not begin")
    assert str(end.value.code) == (
        "error: the current folder cannot be used (No such file or directory): "
        "go to another one with cd"
    )


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_drops_is_heard_again(number: signal.Signals) -> None:
    """Twice: the second time it is dropped again."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    hook = sys.unraisablehook
    begun = []
    with pytest.raises(SystemExit) as end, program():
        for _ in range(2):
            begun.append(Dying())
            del begun[:]
        for _ in range(1000):
            time.sleep(0.01)
        raise AssertionError("the signal was lost")
    assert end.value.code == 128 + number
    assert sys.unraisablehook is hook


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: free some"),
        (OSError(errno.EMFILE, "Too many open files", "a\nb"), r"a\\nb: Too many .* ulimit -n"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error: the disk"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/proc/meminfo"),
            "/proc/meminfo: .*mount",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), "a.*: .* a shorter name"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "a: Permission .*: change its"),
        (RuntimeError("can't start new thread"), r"Resource .* \(can't start.*\): .* ulimit -u"),
        (MemoryError(), r"Cannot allocate memory \(MemoryError\): other programs"),
        (
            RuntimeError(
                "unable to open shared memory object </torch_1>: Too many open files (24)"
            ),
            r"Too many open files \(unable to open shared .*\): .* ulimit -n",
        ),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "No sp"),
        (RuntimeError("received 0 items of ancdata"), "Too many open files"),
        (
            ValueError(
                "ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock, "
                'message: "Resource temporarily unavailable" }) }'
            ),
            "Resource .* ulimit -u",
        ),
        (
            caused(KeyError("a"), OSError(errno.EDQUOT, "Quota", "b")),
            "b: Disk quota exceeded: free",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_the_machine_refuses_is_one_line(error: Exception, says: str) -> None:
    """Errors of the machine, such as a full /dev/shm, end a program with one line, whichever
    library was told."""
    with pytest.raises(SystemExit) as end, program():
        raise error
    assert re.match(f"error: {says}", str(end.value.code))


def test_an_error_that_may_be_ours_keeps_its_traceback() -> None:
    with pytest.raises(FileNotFoundError), program():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")
    with pytest.raises(KeyError), program():
        try:
            raise PermissionError(errno.EACCES, "Permission denied", "x")
        except OSError:
            raise KeyError("y")  # noqa: B904


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with program():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: run"),
        ("a b", "unrecognized arguments: b"),
        ("a --day 3", "unrecognized arguments: --day 3"),
        ("a --days many", "--days: invalid int value: 'many'"),
        ("a --days", "--days: expected one argument"),
        ("a --kind z", "--kind: invalid choice: 'z'"),
    ],
)
def test_wrong_words_are_one_line(words: str, message: str) -> None:
    parser = Parser(prog="x")
    parser.add_argument("run")
    parser.add_argument("--days", type=int)
    parser.add_argument("--kind", choices=["a", "b"])
    with pytest.raises(UserError) as error:
        parser.parse_args(words.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_such_a_program(name: str) -> None:
    with pytest.raises(SystemExit, match="error: .*(--nonsense|required)"):
        cli.main([name, "--nonsense"])


@pytest.mark.parametrize(
    ("path", "alone", "launched"),
    [
        ("/clone/train.py", "python train.py", "torchrun train.py"),
        ("/env/bin/longctx", "longctx train", "torchrun -m longctx train"),
        ("/env/longctx/__main__.py", "longctx train", "torchrun -m longctx train"),
    ],
)
def test_lines_name_the_command_that_was_started(monkeypatch, path, alone, launched) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    assert (started_as(), started_as("torchrun")) == (alone, launched)


def test_what_libraries_log_moves_no_cursor(caplog) -> None:
    """Colours and lines are theirs, the rest may be a stranger's."""
    with program():
        logging.getLogger("theirs").warning("\x1b[1mkeys\x1b[0m\n\t%s", "a\x1b[2Jb\rc")
    logging.getLogger("theirs").warning("after\r")
    assert caplog.messages == ["\x1b[1mkeys\x1b[0m\n\ta\\x1b[2Jb\\rc", "after\r"]


@pytest.mark.parametrize("collects", [True, False])
def test_imports_do_not_collect_garbage(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), importing():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
