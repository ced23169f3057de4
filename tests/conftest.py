"""Without a GPU, Triton kernels run in Triton's interpreter and tests marked `gpu` are skipped."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import replace_once_a_launch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    replace_once_a_launch()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism asks of cuBLAS
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the hub; a lookup would hang offline
torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32 would have 10 bits on a GPU
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each are slower than one
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile", choices=["sample", "all"], default="sample", help="cases of tests/hostile"
    )


FIRST = ("tests/train/engines/", "tests/test_package.py")
"""Take minutes and 20 s: as the last ones they would leave the other worker without work."""


def pytest_configure(config: pytest.Config) -> None:
    """xdist would begin with the files of many tests, and end with one worker in
    tests/train/engines."""
    config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives one worker all files of tests/train/engines, and not each worker some: their reference
    runs and their warm process are made once a worker, and take 20 s of a core."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/train/engines" if file.startswith("tests/train/engines/") else file

    return ByFile(config, log)


HERE = Path(__file__).parent
OUTSIDE = ("clients", "docs", "hostile", "profiling")
"""Folders of tests of both houses at once, or of neither."""
LATER = ("docs", "hostile", "profiling")
"""Folders whose tests are all marked `ci`: pages, runs in processes of their own, benchmarks."""


def house_of(path: Path) -> str | None:
    """The house whose tests a file has: `program` for tests/train, `library` for the other
    rooms."""
    folder = path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""
    if folder == "train":
        return "program"
    return None if folder in OUTSIDE or not (HERE / folder).is_dir() else "library"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:
        if house := house_of(item.path):
            item.add_marker(getattr(pytest.mark, house))
        if item.path.parent.name in LATER or "warm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ci)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a parameter may be called so, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Runs end without a sample of text, of a forward pass a token.
    tests/train/report/test_sample.py makes some."""
    if sample := sys.modules.get("longctx.train.report.sample"):
        sample.TOKENS = 0


SLOW_SECONDS = 5.0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the tests that took long, fixtures included, and have no mark `ci`. Nothing fails for
    it, as no test depends on how fast a machine is."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and "ci" not in report.keywords:
                seconds[report.nodeid] += report.duration
    slow = [(name, s) for name, s in seconds.most_common() if s > SLOW_SECONDS]
    if slow:
        terminalreporter.section(f"over {SLOW_SECONDS:.0f} s without the mark ci")
    for name, s in slow:
        terminalreporter.write_line(f"{s:.1f}s {name}")


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """A run collects garbage by itself, over all objects that there are. Those that torch,
    transformers and TRL have imported take longer than a tiny run, and none of them is garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def nothing_is_flushed() -> Iterator[None]:
    """No test cuts the power. A saved run flushes 20 to 40 files, 4 to 6 ms each on a plain disk.
    A descriptor that is not open is still an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture
def heard_signals() -> Iterator[None]:
    """Signals end this process and those that a test starts, as in a terminal. A shell starts a job
    in the background with SIGINT ignored, and `nohup` with SIGHUP, and both stay so in children."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """On a GPU fa4's dq is summed with atomics unless torch is told to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the plain torch references, as they do for users. The interpreter would take
    seconds a layer; the kernels have tests of their own."""
    from longctx.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", False)


@pytest.fixture(scope="module")
def plain_kernels() -> Iterator[None]:
    """The same for a file whose fixtures train."""
    from longctx.kernels import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED", False)
        yield


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every layer that the schedule runs."""
    from longctx.forwards import modules

    tokens: list[int] = []
    run = modules.scheduled_layer

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        tokens.append(len(x))
        return run(x, *args)

    monkeypatch.setattr(modules, "scheduled_layer", counted)
    return tokens


@pytest.fixture(autouse=True)
def launcher_variables() -> Iterator[None]:
    """What a run with DeepSpeed sets for itself must not reach later tests: their processes would
    all listen on one port."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if torch.distributed.is_initialized():  # a run that finds one ends its process with os._exit
        torch.distributed.destroy_process_group()
    if deepspeed := sys.modules.get("transformers.integrations.deepspeed"):
        # Or a model of a later test would be made for it, until the garbage collector has been.
        deepspeed.unset_hf_deepspeed_config()
