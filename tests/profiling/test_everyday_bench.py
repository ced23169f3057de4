"""profiling/bench/everyday_bench.py: our steps and those of peers, timed on the same rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from profiling.bench import everyday_bench, everyday_peers, runner, step_clock, unsloth_peer
from profiling.bench.everyday_bench import Job
from profiling.bench.everyday_peers import PEERS, Case, Peer, Setting
from profiling.results import read_rows

pytestmark = pytest.mark.usefixtures("reference_kernels")

TINY = Case(name="tiny", preset="tiny", tokens=48, rows=2, layers=2)


def job(side: str, case: Case, setting: str | None = None, **settings: Any) -> Job:
    known = dict(models="", flags=[], timed=1)
    return Job(side=side, case=case, setting=setting, **{**known, **settings})


def measured(job: Job, peers: dict[str, Peer] = PEERS) -> dict[str, Any]:
    return everyday_bench.row_of(job, peers)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch) -> None:
    monkeypatch.setattr(everyday_bench, "steps_of", lambda case, timed: (1, timed))
    monkeypatch.setattr(step_clock, "IDLE_STEPS", 1)
    for name, few in dict(DOCUMENTS=(5, 30), PROMPTS=(4, 16), ANSWERS=(2, 12)).items():
        monkeypatch.setattr(everyday_peers, name, few)
    monkeypatch.setattr(everyday_peers, "EPOCH_PAIRS", 6)


# --- the clock -------------------------------------------------------------------------------


def test_a_step_lasts_until_the_next_and_its_phases_fill_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = step_clock.Clock(warm_up=1, timed=3)
    times = iter([0, 9, 9, 9, 10, 12, 15, 16, 20, 21, 25, 27, 30, 32, 34, 35, 40, 41, 42, 43])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: float(next(times)))
    for _ in range(clock.total):
        for phase in step_clock.PHASES:
            clock.mark(phase)
    seconds = dict(step_s=10, slowest_s=10, fwd_s=2, bwd_s=3, opt_s=1, rest_s=4)
    assert clock.columns() == {**seconds, "steps": 3}
    del clock.steps[2]["backward"]  # of a step that runs as one
    found = clock.columns()
    assert found["step_s"] == 10 and not {"fwd_s", "bwd_s"} & found.keys()


@pytest.mark.parametrize("idle_steps", [None, 0])
def test_on_a_gpu_events_are_read_when_all_is_over(monkeypatch, idle_steps) -> None:
    """Its peaks are those of the timed steps, and the profiler sees only the steps after them, if
    there are any."""
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.ms = 0.0

        def record(self) -> None:
            happened.append("mark")
            self.ms = 100.0 * len(happened)

        def elapsed_time(self, end: Event) -> float:
            return end.ms - self.ms

    def note(word: str, found: Any = None) -> Any:
        return lambda *args, **kwargs: happened.append(word) or found

    kernels = [
        SimpleNamespace(
            start_ns=lambda start=start: start,
            duration_ns=lambda: 37_500_000,
            device_type=lambda: step_clock.DeviceType.CUDA,
            is_user_annotation=lambda: False,
        )
        for start in (0, 100_000_000)
    ]
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: kernels))
    profiler = SimpleNamespace(start=note("start"), stop=note("stop"), profiler=results)
    monkeypatch.setattr(step_clock, "profile", lambda activities: profiler)
    for name, fake in {
        "is_available": lambda: True,
        "Event": Event,
        "synchronize": note("wait"),
        "reset_peak_memory_stats": note("reset"),
        "max_memory_allocated": note("peak", 2**30),
        "max_memory_reserved": note("reserved", 2**31),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    clock = step_clock.Clock(warm_up=1, timed=2, idle_steps=idle_steps)
    for _ in range(max(clock.total, 4)):  # the last of three steps ends with a mark
        clock.mark("forward")
    found = clock.columns()
    profiled = "wait start wait stop" if idle_steps is None else "wait"
    assert " ".join(happened) == f"mark mark reset mark mark peak reserved {profiled}"
    assert found["step_s"] == pytest.approx(0.15) and found["slowest_s"] == pytest.approx(0.2)
    assert (found["peak_gib"], found["reserved_gib"]) == (1, 2)
    assert found.get("idle") == (pytest.approx(0.5) if idle_steps is None else None)


@pytest.mark.parametrize(
    ("busy", "covered"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(0, 4), (6, 10)], 8),
        ([(6, 10), (0, 4)], 8),
        ([(5, 14), (6, 7), (14, 15)], 10),  # copies beside a kernel
        ([(5, 6), (5, 6), (8, 9)], 2),
    ],
)
def test_what_several_intervals_cover_counts_once(busy, covered) -> None:
    assert step_clock.covered_ns(busy) == covered


# --- sides -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, dict(documents=True, lora=2), dict(task="dpo", lora=2, rows=1)]
)
def test_our_trainer_is_timed_from_step_to_step(changes) -> None:
    case = replace(TINY, **changes)
    row = measured(job("custom", case, flags=["--learning_rate=1e-4"]))
    assert row["status"] == "ok", row
    assert (row["steps"], row["flags"], row["checkpointing"]) == (1, "--learning_rate=1e-4", None)
    assert row["tokens_per_s"] == pytest.approx(case.step_tokens / row["step_s"], rel=0.01)
    phases = sum(row[name] for name in step_clock.PHASES.values())
    assert phases == pytest.approx(row["step_s"], abs=1e-3)
    assert len(row["ladder"]) and row["host_gib"] > 0


@pytest.mark.parametrize(
    ("side", "setting"),
    [
        *(("liger", word) for word in everyday_bench.SIDES["liger"]),
        ("compile", "none"),
        ("compile_loss", "none"),
    ],
)
def test_a_peer_is_timed_with_a_setting(side, setting, monkeypatch) -> None:
    """Without a GPU its layers are Hugging Face's."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    seen: list[dict[str, Any]] = []
    forward = everyday_peers.time_loop

    def watched(model: Any, batches: Any, *rest: Any) -> None:
        seen.append(batches[0])
        forward(model, batches, *rest)

    monkeypatch.setattr(everyday_peers, "time_loop", watched)
    documents = setting == "layers"
    case = replace(TINY, tokens=64, documents=documents, lora=2 if side == "liger" else 0)
    row = measured(job(side, case, setting))
    assert row["status"] == "ok" and row["opt_s"] > 0, row
    assert everyday_bench.setting_of(row) == setting
    (batch,) = seen
    assert batch["input_ids"].shape == (2, 64) and int(batch["input_ids"].max()) < 1000
    if documents:
        assert (batch["labels"] == -100).equal(batch["position_ids"] == 0)
        assert type(batch["max_length_q"]) is int and batch["cu_seq_lens_q"][-1] == 128
    elif side == "liger":
        assert batch["cu_seq_lens_q"].tolist() == [0, 64, 128] and batch["max_length_q"] == 64
    else:
        assert set(batch) == {"input_ids", "labels"}


def test_settings_say_what_a_peer_does() -> None:
    found = Setting.parsed("layers+host+fp32")
    assert found == Setting(checkpointing="layers", offload=True, adapters="fp32")
    assert Setting.parsed("unsloth+tiled_mlp").tiled_mlp
    with pytest.raises(ValueError, match="disk is none of"):
        Setting.parsed("layers+disk")
    model = PEERS["compile"].load(replace(TINY, lora=0), found, Path())
    everyday_peers.cast_trained(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


PAIRS = replace(TINY, task="dpo", lora=2, rows=1)
VARIED = replace(PAIRS, peer_pairs=4)


def test_our_rows_are_packed_with_whole_pairs_of_any_length() -> None:
    """Each of an epoch once. Pairs that are alike have a row each, without padding."""
    rows = everyday_peers.packed_pairs(VARIED)
    assert sorted(n for row in rows for n in row["documents"]) == [*range(6)]
    assert {len(row["input_ids"]) for row in rows} == {48} and len(rows) < 6
    assert len({n for row in rows for n in row["lengths"]}) > 6
    alike = everyday_peers.packed_pairs(PAIRS)
    assert [[*row["lengths"]] for row in alike] == [[24, 24, 24]] * 6


def test_our_pairs_are_counted_over_one_epoch() -> None:
    row = measured(job("custom", VARIED, timed=None))
    assert row["status"] == "ok" and row["pairs"] == 6, row
    assert row["steps"] == len(everyday_peers.packed_pairs(VARIED))
    assert row["pairs_per_s"] > 0 and "tokens_per_s" not in row


def test_very_long_steps_end_with_the_timed_one(monkeypatch) -> None:
    """Nothing is profiled after them, so that the trainer's end is the last step's."""
    monkeypatch.setattr(everyday_bench, "VERY_LONG_TOKENS", 1)
    row = measured(job("custom", PAIRS, timed=1))
    assert row["status"] == "ok" and row["steps"] == 1 and row["step_s"] > 0, row


@pytest.mark.parametrize(("case", "steps", "pairs"), [(PAIRS, 1, 1), (VARIED, 2, 6)])
def test_pairs_are_timed_in_trl(case, steps, pairs, monkeypatch) -> None:
    """They are ours, token by token and in their order; TRL adds the end to each answer. Those that
    vary are padded, and an epoch of them is timed."""
    pytest.importorskip("trl")
    trainers: list[Any] = []

    def timed(trainer: Any, clock: Any) -> None:
        trainers.append(trainer)
        step_clock.time_trainer(trainer, clock)

    monkeypatch.setattr(everyday_peers, "time_trainer", timed)
    timed_steps = None if case.peer_pairs else 1
    row = measured(job("trl", case, "layers", timed=timed_steps))
    assert row["status"] == "ok" and row["bwd_s"] > 0, row
    assert (row["steps"], row["pairs"]) == (steps, pairs)
    (trainer,) = trainers
    for row in everyday_peers.packed_pairs(case):
        parts = iter(torch.from_numpy(row["input_ids"]).split(row["lengths"].tolist()))
        for number in row["documents"].tolist():
            theirs = trainer.train_dataset[number]
            for name in ("prompt", "chosen", "rejected"):
                assert theirs[f"{name}_ids"] == next(parts).tolist()
    ids = next(iter(trainer.get_train_dataloader()))["input_ids"]
    assert len(ids) == 2 * (case.peer_pairs or case.rows)
    first = everyday_peers.pairs(case)[0]
    assert ids[0].tolist()[: len(first.prompt) + 1] == [*first.prompt, first.chosen[0]]
    assert trainer.args.gradient_checkpointing


@pytest.fixture
def unsloth(monkeypatch) -> list[Any]:
    """A package that loads Hugging Face's layers; returns what it was asked for."""
    asked: list[Any] = []

    class Loader:
        @staticmethod
        def from_pretrained(folder: str, **options: Any) -> Any:
            asked.append(options)
            return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(
                folder
            )

        @staticmethod
        def get_peft_model(model: Any, **options: Any) -> Any:
            asked.append(options)
            return model

        @staticmethod
        def for_training(model: Any, use_gradient_checkpointing: Any) -> None:
            asked.append(use_gradient_checkpointing)

    fake = SimpleNamespace(FastLanguageModel=Loader, FastModel=Loader)
    monkeypatch.setitem(sys.modules, "unsloth", fake)
    return asked


def test_unsloth_reads_weights_and_keeps_its_own_or_all(unsloth, tmp_path: Path) -> None:
    peer = Peer(load=unsloth_peer.load, autocast=True)
    case = replace(TINY, lora=2, quantize="nf4")
    for chosen, setting in (
        (case, "unsloth+tiled_mlp+fp32"),
        (replace(case, lora=0, quantize="none"), "none"),
    ):
        whole = job("unsloth", chosen, setting, models=str(tmp_path))
        assert measured(replace(whole, side="weights")) == {"status": "ok"}
        assert whole.weights == tmp_path / "tiny-2"
        row = measured(whole, {"unsloth": peer})
        assert row["status"] == "ok" and everyday_bench.setting_of(row) == setting, row
    four, adapters, kept, whole_model, none = unsloth
    assert four["load_in_4bit"] and not four["full_finetuning"] and four["max_seq_length"] == 48
    assert adapters["r"] == 2 and len(adapters["target_modules"]) == 7
    assert (kept, none) == ("unsloth", False) and whole_model["full_finetuning"]
    assert four["unsloth_tiled_mlp"] and not whole_model["unsloth_tiled_mlp"]


def test_tiles_of_unsloth_keep_their_inputs() -> None:
    def fused(module: torch.nn.Module, x: str, inplace: bool = True) -> Any:
        return module, x, inplace

    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    model[1]._unsloth_forward = MethodType(fused, model[1])
    unsloth_peer.spare_inputs(model)
    bound = model[1]._unsloth_forward.__get__(model[1], type(model[1]))  # as Unsloth calls it
    assert bound("x") == (model[1], "x", False)


def test_mfu_counts_what_a_step_computes(monkeypatch) -> None:
    """6 N T and attention's 6 H d T^2 a layer, of a card of 1 TFLOP/s."""
    monkeypatch.setattr("longctx.loop.metrics.device_peak_flops", lambda device: 1e12)
    model = PEERS["compile"].load(TINY, Setting(checkpointing="none"), Path())
    numel = sum(p.numel() for p in model.parameters())
    flops = 2 * (6 * numel * 48 + 6 * 2 * 128 * 48**2)
    assert everyday_bench.mfu_of(TINY, 1, model, 0.5) == pytest.approx(flops / 0.5 / 1e12)
    packed = replace(TINY, documents=True)
    assert everyday_bench.mfu_of(packed, 1, model, 0.5) < flops / 0.5 / 1e12


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("CUDA out of memory"), "oom", "RuntimeError: CUDA out of memory"),
        (RuntimeError("no such kernel\nline"), "failed", "RuntimeError: no such kernel"),
        (OSError("no weights"), "failed", "OSError: no weights"),
    ],
)
def test_a_case_that_fails_is_a_row(error, status, reason) -> None:
    def load(case: Case, setting: Setting, folder: Path) -> Any:
        raise error

    row = measured(job("liger", TINY, "layers"), {"liger": Peer(load=load)})
    assert (row["status"], row["reason"], row["checkpointing"]) == (status, reason, "layers")


@pytest.mark.parametrize("setting", ["layers", "layers+nf4"])
def test_a_peer_has_nf4_where_its_setting_says_so(setting) -> None:
    seen: list[str] = []

    def load(case: Case, setting: Setting, folder: Path) -> Any:
        seen.append(case.quantize)
        raise RuntimeError("seen")

    row = measured(job("liger", TINY, setting), {"liger": Peer(load=load)})
    nf4 = setting.endswith("nf4")
    assert seen == ["nf4" if nf4 else "none"] and row.get("nf4") == (nf4 or None)
    assert everyday_bench.setting_of(row) == setting


def test_a_process_that_measures_nothing_has_a_row(monkeypatch, tmp_path: Path) -> None:
    """Unsloth does not start without weights."""
    commands: list[list[str]] = []
    printed: list[Any] = []

    def lines(command: list[str], limit_s: float) -> tuple[list[Any], str]:
        commands.append(command)
        return printed, "exit code 1"

    monkeypatch.setattr(everyday_bench, "child_lines", lines)
    row = everyday_bench.run_job(job("liger", TINY, "layers"), None, 9)
    assert (row["checkpointing"], row["status"], row["reason"]) == (
        "layers",
        "failed",
        "exit code 1",
    )
    peer = job("unsloth", TINY, "none", models=str(tmp_path))
    row = everyday_bench.run_job(peer, "env.sh", 9)
    assert row["reason"] == "no weights: exit code 1" and row["side"] == "unsloth"
    assert len(commands) == 2
    peer.weights.mkdir()
    (peer.weights / "tokenizer.json").touch()
    printed.append([{"status": "ok"}])
    assert everyday_bench.run_job(peer, "env.sh", 9) == {"status": "ok"}
    assert commands[-1][:4] == ["bash", "-c", '. "$0" && exec "$@"', "env.sh"]
    assert Path(commands[-1][-2]).samefile(unsloth_peer.__file__)
    assert Job.parsed(commands[-1][-1]) == peer


def test_a_process_that_was_started_ahead_imports_and_waits(monkeypatch) -> None:
    """Another row is measured meanwhile. The line comes when its turn is there."""
    happened: list[str] = []

    def started(command: list[str]) -> str:
        happened.append(f"start {Job.parsed(command[-2]).setting}")
        assert command[-1] == "--ahead"
        return happened[-1].split()[-1]

    def lines(child: str, limit_s: float) -> tuple[list[Any], str]:
        happened.append(f"turn of {child}")
        return [], "exit code 1"

    monkeypatch.setattr(everyday_bench, "start_child", started)
    monkeypatch.setattr(everyday_bench, "lines_of", lines)
    monkeypatch.setattr(everyday_bench, "child_lines", lambda *_: lines("first", 9))
    words = ["--case", "qlora:2048", "--side", "liger", "--setting", "none,layers,selective"]
    with pytest.raises(SystemExit, match="3 of 3 rows failed"):
        everyday_bench.main([*words, "--ahead"])
    assert happened == [
        *("start layers", "turn of first"),
        *("start selective", "turn of layers"),
        "turn of selective",
    ]


def test_a_child_waits_for_its_turn(monkeypatch) -> None:
    """It has imported what is there of what its side needs, and ends without a turn if the bench
    has ended."""
    name, lines = everyday_bench.IMPORTS_OF["custom"][-1], ["\n", ""]
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(everyday_bench, "IMPORTS", ("no_such_package", "json"))
    monkeypatch.setitem(everyday_bench.IMPORTS_OF, "custom", (name,))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lambda: lines.pop(0)))
    everyday_bench.wait_for_turn("custom")
    assert name in sys.modules and lines == [""]
    with pytest.raises(SystemExit, match="the bench has ended"):
        everyday_bench.wait_for_turn("custom")


def test_a_child_has_its_line_from_the_bench() -> None:
    child = runner.start_child([sys.executable, "-c", "input(); print('[{\"n\": 1}]')"])
    assert runner.lines_of(child, 60) == ([[{"n": 1}]], "exit code 0")


def test_the_shell_file_sets_the_environment(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export PYTHONPATH=/of/unsloth\n")
    *shell, _, _, _ = everyday_bench.command(job("unsloth", TINY), str(tmp_path / "env.sh"))
    words = [*shell, "printenv", "PYTHONPATH"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "/of/unsloth\n"


# --- the command -----------------------------------------------------------------------------


def test_words_select_cases_and_sides(capsys) -> None:
    def listed(*words: str) -> list[str]:
        everyday_bench.main(["--list", *words])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    words = ("--case", "qlora:2048@8,qlora:1024,qlora:2048", "--side", "custom,unsloth")
    assert listed(*words, "--setting", "unsloth+fp32") == [
        "custom qlora:1024",
        "custom qlora:2048",
        "custom qlora:2048@8",
        "unsloth qlora:1024 unsloth+fp32",
        "unsloth qlora:2048 unsloth+fp32",
    ]
    assert listed("--case", "dpo", "--side", "trl,compile") == [
        "trl dpo:2048 none",
        "trl dpo:2048 layers",
    ]
    whole = listed("--case", "documents", "--side", "unsloth")
    assert [line.split()[-1] for line in whole] == ["unsloth", "none", "unsloth+tiled_mlp"]
    longest = listed("--case", "longest:262144@79", "--side", "liger", "--setting", "layers+host")
    assert longest == ["liger longest:262144@79 layers+host"]
    texts = [case.text for case in everyday_bench.CASES]
    assert len(texts) == len(set(texts)) and len(listed()) > len(texts)
    for word, known in (("--case", "qlora:77"), ("--side", "ours"), ("--setting", "none+disk")):
        with pytest.raises(SystemExit):
            everyday_bench.main([word, known])
        assert "is none of" in capsys.readouterr().err


def test_the_command_writes_rows_and_prints_a_table(monkeypatch, tmp_path, capsys) -> None:
    def lines(command: list[str], limit_s: float) -> tuple[list[Any], str]:
        """The child, in this process."""
        done = Job.parsed(command[-1])
        small = dict(preset="tiny", layers=1, tokens=48, lora=0, quantize="none")
        row = measured(replace(done, case=replace(done.case, **small)))
        return [[{**row, "case": done.case.text}]], "exit code 0"

    monkeypatch.setenv("LONGCTX_COMMIT", "a" * 40)
    monkeypatch.setattr(everyday_bench, "child_lines", lines)
    output = tmp_path / "rows.json"
    words = ["--case", "qlora:2048", "--side", "custom", "--steps", "1", "--output", str(output)]
    for _ in range(2):
        everyday_bench.main([*words, "--", "--learning_rate=1e-4"])
    (row,) = read_rows(output)
    assert (row["case"], row["side"], row["status"]) == ("qlora:2048", "custom", "ok")
    table = capsys.readouterr().out.splitlines()[-2:]
    assert table[0].split()[:4] == ["case", "side", "setting", "step_s"]
    assert f"{row['step_s']:.3f}" in table[1]
