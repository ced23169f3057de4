"""profiling/bench/compare.py: a row a case whatever happens, resumed where it stopped."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import open_page

from longctx.system import installed


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGCTX_COMMIT", "a" * 40)
    from profiling.bench import compare

    return compare


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine two threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(compare, monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["profiling/bench/compare.py", *words])
    compare.main()


def case(tokens: int, class_type: str, status: str = "ok") -> list[dict[str, object]]:
    if status == "oom":
        return [{"status": "oom"}]
    seconds = tokens / 1000 * (2 if class_type == "vanilla" else 1)
    parts = {"fwd_s": seconds / 3, "bwd_s": seconds / 2, "opt_s": seconds / 6, "step_s": seconds}
    return [{**parts, "tokens_per_s": tokens / seconds, "peak_host_gib": 1.5, "status": "ok"}]


def test_quick_runs_real_steps_and_the_page_shows_them(
    compare, reference_kernels, one_thread, tmp_path: Path, monkeypatch
) -> None:
    """One case in a process of its own, as users have them all; the others here, for time."""
    from profiling.bench import step_bench
    from profiling.bench.runner import run_child

    own: list[str] = []

    def child(command: list[str], timeout_s: float) -> list[dict[str, object]]:
        case = step_bench.BENCH.parsed(command[command.index("--case") + 1])
        if not own and case["class_type"] == "custom":
            own.extend(command)
            with monkeypatch.context() as environment:
                environment.setenv("TRITON_INTERPRET", "0")
                environment.setenv("CUDA_VISIBLE_DEVICES", "")
                return run_child(command, timeout_s)
        repeats = int(command[command.index("--repeats") + 1])
        flags = command[command.index("--") + 1 :]
        return step_bench.run_case(case, repeats, [*flags, "--use_cpu"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compare, "run_child", child)
    output = tmp_path / "quick"
    run(compare, monkeypatch, "--quick", "--output", str(output))
    assert own[0] == sys.executable and Path(own[1]).samefile(step_bench.__file__)
    rows = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert [(row["class_type"], row["tokens"]) for row in rows] == [
        ("vanilla", 256),
        ("custom", 256),
        ("vanilla", 512),
        ("custom", 512),
    ]
    for row in rows:
        assert row["status"] == "ok" and row["gpus"] == 0
        parts = row["fwd_s"] + row["bwd_s"] + row["opt_s"]
        assert row["step_s"] == pytest.approx(parts, abs=2e-4) and parts > 0  # each is rounded
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"], rel=0.01)
        assert not {"peak_gib", "reserved_gib", "mfu"} & row.keys()  # there is no GPU to measure
        assert row["host_free_gib"] > 0 and ("ladder" in row) == (row["class_type"] == "custom")
    with output.with_suffix(".csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4 and "peak_gib" not in table[0]
    page = output.with_suffix(".html").read_text()
    assert "without a GPU" in page and "Peak host memory" in page and "GPU memory" not in page
    assert "random weights" in page and "profiling/bench/compare.py --quick" in page
    for name in ("memory", "time", "speed"):
        assert (tmp_path / f"quick_{name}.png").stat().st_size > 5000
    opened = open_page(output.with_suffix(".html"), tmp_path)
    assert opened.console == [] and opened.svgs == 3
    assert opened.ink > 0.02 and opened.colours >= 2


def test_a_peers_settings_are_in_its_cases(compare, tmp_path: Path, monkeypatch) -> None:
    commands: list[str] = []

    def child(command: list[str], timeout_s: float) -> list[dict[str, object]]:
        commands.append(command[command.index("--case") + 1])
        return case(128, "vanilla")

    monkeypatch.setattr(compare, "run_child", child)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = ["vanilla", "vanilla:none", "vanilla:selective:offload", "custom"]
    words = ["--preset", "tiny", "--tokens", "128", "--class_types", *names]
    run(compare, monkeypatch, *words, "--output", str(tmp_path / "a"))
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(r["checkpointing"], r["offload"], r["backend"]) for r in rows] == [
        ("layers", "none", "auto"),
        ("none", "none", "auto"),
        ("selective", "all", "auto"),
        (None, "auto", "auto"),
    ]
    assert "checkpointing=none,offload=none" in commands[1]
    assert "checkpointing=selective" in commands[2] and "checkpointing" not in commands[3]
    page = (tmp_path / "a.html").read_text()
    assert "vanilla, selective, offloaded" in page and "vanilla, none" in page


def test_two_engines_side_by_side(compare, tmp_path: Path, monkeypatch, capsys) -> None:
    """A dry run shows the child of each case, and runs none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--dry_run", "--engines", "zero3_cpu", "fsdp2_offload", "--tokens", "8192"]
    words += ["--class_types", "vanilla", "custom", "--output", str(tmp_path / "c")]
    run(compare, monkeypatch, *words)
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _, _ in lines] == [
        "vanilla, layers, zero3_cpu, 8,192 tokens",
        "custom, zero3_cpu, 8,192 tokens",
        "vanilla, layers, fsdp2_offload, 8,192 tokens",
        "custom, fsdp2_offload, 8,192 tokens",
    ]
    assert all("step_bench.py --child --case" in command for _, _, command in lines)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_sweep_goes_on_and_out_of_memory_is_a_row(
    compare, tmp_path: Path, monkeypatch, capsys
) -> None:
    words = ["--preset", "tiny", "--class_types", "vanilla", "custom", "--tokens", "256", "128"]
    words += ["--output", str(tmp_path / "sweep")]
    asked: list[list[str]] = []

    def child(command: list[str], timeout_s: float) -> list[dict[str, object]]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(command)
        text = command[command.index("--case") + 1]
        tokens = int(text.split("tokens=")[1].split(",")[0])
        class_type = "vanilla" if "class_type=vanilla" in text else "custom"  # the default
        return case(tokens, class_type, "oom" if (class_type, tokens) == ("vanilla", 256) else "ok")

    monkeypatch.setattr(compare, "run_child", child)
    with pytest.raises(KeyboardInterrupt):
        run(compare, monkeypatch, *words)
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok", "oom"]
    first = list(asked)
    asked.clear()
    run(compare, monkeypatch, *words)
    assert len(first) == 3 and len(asked) == 1
    assert "3 of 4 cases are in" in capsys.readouterr().out
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [(r["class_type"], r["tokens"], r["status"]) for r in rows] == [
        ("vanilla", 128, "ok"),
        ("custom", 128, "ok"),
        ("vanilla", 256, "oom"),
        ("custom", 256, "ok"),
    ]
    assert "vanilla, layers: out of memory" in (tmp_path / "sweep.html").read_text()


def test_rows_of_another_machine_or_sweep_are_not_mixed_in(
    compare, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(compare, "run_child", lambda command, timeout_s: case(128, "custom"))
    words = ["--preset", "tiny", "--class_types", "custom", "--output", str(tmp_path / "a")]
    run(compare, monkeypatch, *words, "--tokens", "128")
    with pytest.raises(SystemExit, match="not of this sweep"):
        run(compare, monkeypatch, *words, "--tokens", "256")
    monkeypatch.setenv("LONGCTX_COMMIT", "b" * 40)
    with pytest.raises(SystemExit, match="another commit"):
        run(compare, monkeypatch, *words, "--tokens", "128")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        run(compare, monkeypatch, *words, "--tokens", "128")
    assert "longctx did not write it" in capsys.readouterr().err


def test_a_failed_case_is_no_row_and_fails_the_sweep(compare, tmp_path: Path, monkeypatch) -> None:
    answers = iter([[], case(128, "custom")])
    monkeypatch.setattr(compare, "run_child", lambda command, timeout_s: next(answers))
    words = ["--preset", "tiny", "--class_types", "vanilla", "custom", "--tokens", "128"]
    with pytest.raises(SystemExit, match="1 of 2 cases failed"):
        run(compare, monkeypatch, *words, "--output", str(tmp_path / "a"))
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["class_type"] for row in rows] == ["custom"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--class_types", "vanila"], "unknown class type 'vanila'; did you mean vanilla?"),
        (["--class_types", "vanilla:layer"], "unknown checkpointing 'layer'; did you mean layers?"),
        (["--class_types", "vanilla:none:gpu"], "NAME, NAME:CHECKPOINTING or"),
        (["--class_types", "custom:none"], "checkpointing is for peers"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--layers", "-1"], "--layers must be at least 1"),
        (["--engines", "zero9"], "unknown engine 'zero9'; did you mean zero"),
        (["--preset", "llama"], "unknown preset 'llama'"),
    ],
)
def test_bad_input_runs_nothing(compare, words, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compare, "run_child", lambda *args: pytest.fail("a case ran"))
    with pytest.raises(SystemExit) as error:
        run(compare, monkeypatch, "--quick", *words, "--output", str(tmp_path / "a"))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_liger_without_a_gpu_is_said_before_anything_runs(compare, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compare, "run_child", lambda *args: pytest.fail("a case ran"))
    missing = "a GPU" if installed("liger_kernel") else "Liger-Kernel: pip install"
    with pytest.raises(SystemExit, match=f"--class_type liger needs {missing}"):
        run(compare, monkeypatch, "--preset", "tiny", "--output", str(tmp_path / "a"))


def test_a_name_with_dots_is_kept(compare) -> None:
    assert compare.with_ending(Path("runs/llama-3.1-8b"), ".json") == Path("runs/llama-3.1-8b.json")


def test_a_step_out_of_memory_is_a_row(compare, monkeypatch) -> None:
    from longctx.train.trainer.trainer import LongTrainer
    from profiling.bench import step_bench

    def train(self: LongTrainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 31.00 GiB")

    monkeypatch.setattr(LongTrainer, "train", train)
    case = {**step_bench.DEFAULTS, "preset": "tiny", "engine": "plain", "tokens": 64, "gpus": 0}
    rows = step_bench.run_case({**case, "layers": 2}, 1, ["--use_cpu"])
    assert [(row["tokens"], row["layers"], row["status"]) for row in rows] == [(64, 2, "oom")]
