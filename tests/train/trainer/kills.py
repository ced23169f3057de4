"""SIGKILL at random moments of one run, chained: its numbers stay those of a run that never died.

    python tests/train/trainer/kills.py --engine zero3 --kills 100 \\
        --output profiling/results/kills_zero3.json

A moment is a place in the order of what a run does, never a time, so that a slow or busy machine
changes nothing. Before every step, and before Python creates, renames or deletes anything in the
output folder or the cache, or reads a checkpoint, each process of the run announces it and waits
for the answer: go on, or SIGKILL for all. With states on the host it announces every piece that
moves and every `flush`, too. While C++ and Rust write a file nobody can ask them;
there the kernel ends a process at a byte of the file (RLIMIT_FSIZE, whose signal lets a process do
as little as SIGKILL does), and the others are killed as a launcher would.

Every run is resumed by `--resume_from_checkpoint auto`. A process that has imported everything and
computed nothing forks the processes of each, so that a run costs its own time only.

Rows: kind, at (how many of its kind came before), process, last (event), saving, s. The exit status
is 1 if any number differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from paths import ROOT
from small_run import add_callback, become_rank, import_late, logged, prepare
from transformers import TrainerCallback

from profiling.results import results_file, write_results

SAVE_STEPS = 2
AHEAD = 3
"""Whole steps of a run before it is killed at the latest: one checkpoint, no second one."""
SILENT_S = 300
"""A run that announces nothing for so long hangs. Events are milliseconds apart."""
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Python's audit events that come before a change of a folder."""
STAGING = ".incomplete-"

KINDS = {"step": AHEAD, "change": 30, "saving": 30, "resuming": 20, "tokenising": 12, "byte": 0}
"""Kind of moment -> about how many there are in a run before it is killed at the latest."""
STREAMING = {"streaming": 120}
"""With states on the host: pieces that move, of weights and of updates, and `flush`es."""
REFERENCE = {"reference": 6}
"""Of a task with a reference: parts of its pass, two rows each."""


# --- a process of the run --------------------------------------------------------------------


class Announce(TrainerCallback):
    """Announces each event and waits for the answer: None, or the size that no file may exceed."""

    reads_weights = False

    def __init__(self, output: Path, cache: Path, parent: Connection) -> None:
        self.output, self.cache, self.parent, self.pid = output, cache, parent, os.getpid()
        self.one_thread = threading.Lock()  # checksums are read by several
        sys.addaudithook(self.audit)

    def announce(self, event: str) -> None:
        with self.one_thread:
            self.parent.send(event)
            size_bytes = self.parent.recv()
        if size_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.announce("step")

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES or isinstance(args[0], int) or os.getpid() != self.pid:
            return
        path = Path(os.fsdecode(args[0]))
        if event in ("os.remove", "os.rmdir") and args[1] >= 0:  # within an open folder
            path = Path(os.readlink(f"/proc/self/fd/{args[1]}")) / path
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if path.is_relative_to(self.output) and path != self.output:
            name = path.relative_to(self.output)
            if not reads:
                self.announce(f"change: {event} {name}")
            elif name.parts[0].startswith("checkpoint-"):
                self.announce(f"resuming: {name}")
        elif path.is_relative_to(self.cache) and not reads:
            self.announce(f"tokenising: {event} {path.name}")


def announce_streaming(announce: Announce) -> None:
    """Before each piece moves, and before all that is outstanding ends."""
    from longctx.memory.stream import StateStream

    def announced(name: str) -> Any:
        method = getattr(StateStream, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            announce.announce(f"streaming: {name.strip('_')}")
            return method(*args, **kwargs)

        return call

    for name in ("_move", "flush"):
        setattr(StateStream, name, announced(name))


def announce_reference(announce: Announce) -> None:
    """Before each part of the reference pass."""
    from longctx.train.tasks import reference

    reference.PART_ROWS = 2
    score = reference.ReferencePass._scored

    def call(*args: Any) -> Any:
        announce.announce("reference: part")
        return score(*args)

    reference.ReferencePass._scored = call  # type: ignore[method-assign]


def run_and_exit(
    flags: list[str], where: Run, rank: int, port: int, parent: Connection
) -> NoReturn:
    """Never returns to the code of the process it was forked from."""
    status = 1
    try:
        log = os.open(where.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(1, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # remakes torch's pool; several threads at once would race for it
        if where.processes > 1 or "--deepspeed" in flags or "--fsdp" in flags:
            become_rank(rank, where.processes, port)
        announce = Announce(where.output, where.cache, parent)
        add_callback(announce)
        if where.engine.streams:
            announce_streaming(announce)
        if where.engine.refers:
            announce_reference(announce)
        where.engine.main()(flags)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


# --- its parent ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    processes: int
    flags: Callable[[Path], list[str]]
    main: Callable[[], Any]
    """Imports the program; called once before anything is forked."""
    streams: bool = False
    """States wait on the host and move while steps run."""
    refers: bool = False
    """A reference model's log-probabilities are computed before training."""

    @property
    def kinds(self) -> dict[str, int]:
        streaming = STREAMING if self.streams else {}
        return KINDS | streaming | (REFERENCE if self.refers else {})


def _train() -> Any:
    from longctx.train.commands import train

    return train.main


def _train_with_deepspeed() -> Any:
    import deepspeed  # noqa: F401

    return _train()


def _train_with_fsdp_on_cpu() -> Any:
    from engines import fsdp_on_cpu

    return fsdp_on_cpu.train.main


def _zero3(folder: Path) -> list[str]:
    text = (ROOT / "ds_configs" / "zero3_cpu.json").read_text()
    path = folder / "zero3_cpu.json"
    path.write_text(text.replace('"pin_memory": true', '"pin_memory": false'))
    return ["--deepspeed", str(path)]


def _fsdp(folder: Path) -> list[str]:
    return ["--fsdp", "true", "--fsdp_config", str(ROOT / "fsdp_configs" / "fsdp2_offload.json")]


def _dpo(folder: Path) -> list[str]:
    from small_task import pairs, write_jsonl

    data = write_jsonl(folder / "pairs.jsonl", pairs(24))
    return ["--task", "dpo", "--train_file", str(data), "--seq_len", "400"]


def _fp8(folder: Path) -> list[str]:
    from profiling.packed_folder import in_fp8

    in_fp8(folder / "model", block=(8, 16))
    return LORA


def _mxfp4(folder: Path) -> list[str]:
    from small_packed import saved_in_mxfp4

    written = json.loads((folder / "model/config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    saved_in_mxfp4(folder / "model", intermediate_size=96, **{n: written[n] for n in names})
    return LORA[:2]  # experts' adapters have no dropout


EXACT = ["--dtype", "bfloat16", "--place", "host"]
TWO_BATCHES = ["--gradient_accumulation_steps", "2"]
LORA = ["--lora_r", "4", "--lora_dropout", "0.1"]
ENGINES = {
    "plain": Engine(1, lambda folder: [], _train),
    "exact": Engine(1, lambda folder: EXACT, _train, streams=True),
    "accumulates": Engine(1, lambda folder: [*EXACT, *TWO_BATCHES], _train, streams=True),
    "lora": Engine(1, lambda folder: LORA, _train),
    "fp8": Engine(1, _fp8, _train),
    "mxfp4": Engine(1, _mxfp4, _train),
    "dpo": Engine(1, _dpo, _train, refers=True),
    "ddp": Engine(2, lambda folder: [], _train),
    "zero3": Engine(2, _zero3, _train_with_deepspeed),
    "fsdp2": Engine(2, _fsdp, _train_with_fsdp_on_cpu),
}


@dataclass(frozen=True)
class Run:
    """Where a run writes."""

    engine: Engine
    output: Path
    cache: Path

    @property
    def processes(self) -> int:
        return self.engine.processes

    def log(self, rank: int) -> Path:
        return self.output.with_name(f"{self.output.name}-{rank}.log")


@dataclass
class Moment:
    """When to kill: before event `at` (from 0) of its kind, in whichever process it comes, while it
    waits or else when it has just been told to go on. `saving`: of the changes from the first save
    on. `byte`: when a file of that save has `at` bytes."""

    kind: str
    at: int
    waiting: bool = True
    saves: bool = False
    seen: dict[str, int] = field(default_factory=dict)

    def has_come(self, event: str, rank: int) -> bool:
        kind = event.split(":")[0]
        self.saves |= f"mkdir {STAGING}checkpoint" in event
        kinds = [kind, "saving"] if kind == "change" and self.saves else [kind]
        for name in kinds:
            before = self.seen.get(name, 0)
            if name != "step" or rank == 0:
                self.seen[name] = before + 1
            if self.kind == name and before == self.at:
                return True
        return self.seen.get("step", 0) > AHEAD

    @property
    def file_bytes(self) -> int | None:
        return self.at if self.kind == "byte" and self.saves else None


def fork_run(flags: list[str], where: Run, moment: Moment | None) -> dict[str, Any]:
    """Runs train.py in children. How it ended: `status` (None: killed), after which `events`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parents: dict[Any, int] = {}
    children = []
    for rank in range(where.processes):
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            run_and_exit(flags, where, rank, port, theirs)
        theirs.close()
        parents[ours] = rank
        children.append(pid)
    events: list[str] = []
    killed_in, hangs, open_pipes = None, False, dict(parents)
    while open_pipes and killed_in is None and not hangs:
        ready: list[Any] = wait(list(open_pipes), SILENT_S)
        hangs = not ready
        for pipe in ready:
            try:
                events.append(pipe.recv())
                if moment is not None and moment.has_come(events[-1], open_pipes[pipe]):
                    killed_in = open_pipes[pipe]
                if killed_in is None or not moment or not moment.waiting:
                    pipe.send(moment.file_bytes if moment else None)
            except (EOFError, ConnectionError):
                rank = open_pipes.pop(pipe)
                if _died(children[rank]) and moment is not None:
                    killed_in = rank
            if killed_in is not None:
                break
    statuses = []
    for pid in children:
        if killed_in is not None or hangs:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        statuses.append(os.waitstatus_to_exitcode(status))  # negative: by a signal
    for pipe in parents:
        pipe.close()
    ended = next((status for status in statuses if status), 0)
    status = "hangs" if hangs else None if killed_in is not None else ended
    return {"status": status, "killed_in": killed_in, "events": events}


def _died(pid: int) -> bool:
    """Whether the process was ended by a signal; it is left for `waitpid`."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return info is not None and info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)


# --- the chain -------------------------------------------------------------------------------


def draw(seed: int, kills: int, kinds: dict[str, int], largest_bytes: int) -> list[Moment]:
    """As many moments of each kind, in random order."""
    drawn = random.Random(seed)
    moments = []
    for number in range(kills):
        kind = list(kinds)[number % len(kinds)]
        at = drawn.randrange(largest_bytes if kind == "byte" else kinds[kind] + 1)
        moments.append(Moment(kind, at, drawn.random() < 0.5))
    drawn.shuffle(moments)
    return moments


def torture(engine: Engine, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills one run `kills` times and lets it end. {"rows", "problems"}."""
    steps = SAVE_STEPS * (kills + 1)  # so many that no run that is to be killed reaches the end
    flags = [*prepare(folder), *engine.flags(folder), "--save_steps", str(SAVE_STEPS)]
    flags += ["--max_steps", str(steps), "--lr_scheduler_type", "cosine"]
    flags += ["--gradient_accumulation_steps", "2", "--resume_from_checkpoint", "auto"]

    def start(name: str, moment: Moment | None) -> dict[str, Any]:
        where = Run(engine, folder / name, folder / f"cache-{name}")
        words = ["--output_dir", str(where.output), "--cache_dir", str(where.cache)]
        return fork_run([*flags, *words], where, moment)

    def logs(name: str) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob(f"{name}-*.log")))

    whole = start("whole", None)
    if whole["status"] != 0:
        return {"rows": [], "problems": [f"without a kill: {whole['status']}\n{logs('whole')}"]}
    last = folder / "whole" / f"checkpoint-{steps}"
    largest_bytes = max(path.stat().st_size for path in last.rglob("*") if path.is_file())
    rows, problems = [], []
    for moment in draw(seed, kills, engine.kinds, largest_bytes):
        if moment.kind in ("tokenising", "reference"):
            shutil.rmtree(folder / "cache-run", ignore_errors=True)
        begun = time.perf_counter()
        ended = start("run", moment)
        row = {"kind": moment.kind, "at": moment.at, "process": ended["killed_in"]}
        row |= {"last": ended["events"][-1] if ended["events"] else None}
        row |= {"saving": any((folder / "run").glob(f"{STAGING}*"))}
        rows.append({**row, "s": round(time.perf_counter() - begun, 2)})
        if ended["status"] is not None:
            problems.append(f"kill {len(rows)} ({row}): {ended['status']}\n{logs('run')}")
            return {"rows": rows, "problems": problems}
    if (ended := start("run", None))["status"] != 0:
        problems.append(f"the end: {ended['status']}\n{logs('run')}")
        return {"rows": rows, "problems": problems}
    return {"rows": rows, "problems": differences(folder, last.name)}


def differences(folder: Path, last: str) -> list[str]:
    """What of the killed run is not as in the whole one: logs, weights, exact states, what lies
    around."""
    found = []
    for key in ("step", "loss", "grad_norm", "learning_rate"):
        expected, ours = ([line[key] for line in logged(folder / n)] for n in ("whole", "run"))
        if ours != expected:
            found.append(f"{key}: {ours} instead of {expected}")
    for name in ("final", last):
        for path in (folder / "whole" / name).glob("*model.safetensors"):  # an adapter's, too
            if path.read_bytes() != (folder / "run" / name / path.name).read_bytes():
                found.append(f"the weights in {name}")
    for path in (folder / "whole" / last).glob("optimizer.*.safetensors"):
        if path.read_bytes() != (folder / "run" / last / path.name).read_bytes():
            found.append(f"the states in {last}/{path.name}")
    found += [f"left: {path.name}" for path in (folder / "run").glob(f"{STAGING}*")]
    found += [f"left: {path.name}" for path in (folder / "cache-run").glob("*.tmp")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--output", type=results_file, help="JSON file to write")
    args = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    engine = ENGINES[args.engine]
    engine.main()
    import_late()
    torch.set_num_threads(1)
    gc.freeze()  # a run's own gc.collect() is twice as long as all else that it does before step 1
    with tempfile.TemporaryDirectory() as folder:
        outcome = torture(engine, args.kills, args.seed, Path(folder))
    said = {"engine": args.engine, "processes": engine.processes, "seed": args.seed}
    said |= {"kills": len(outcome["rows"]), "problems": outcome["problems"]}
    print(json.dumps(said | {"by_kind": _counts(outcome["rows"], engine.kinds)}))
    if args.output:
        write_results(args.output, outcome["rows"], extra=said)
    sys.exit(bool(outcome["problems"]))


def _counts(rows: list[dict[str, Any]], kinds: dict[str, int]) -> dict[str, int]:
    return {kind: sum(row["kind"] == kind for row in rows) for kind in kinds}


if __name__ == "__main__":
    main()
