"""The plan of `longctx train`: printed before weights are read, and compared with what was measured
when training is over.

A run that cannot fit ends here, in one line with the flags that would make it fit. The plan does
not change where a run puts its bytes: that is decided when the model is there (loop/states.py), by
the same function and mostly the same numbers. The plan covers runs of class_type custom and any in
bfloat16, of any engine, on the GPUs of one host whose rates are known; a line says why another run
is not covered. Bytes are those of one process.
"""

from __future__ import annotations

import copy
import re
import statistics
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig

from longctx.any_model.runtime import any_part, any_runtime_of
from longctx.constants import GIB
from longctx.cost.fitted import PROCESS_BYTES
from longctx.cost.kept import Ladder
from longctx.cost.machines import Machine
from longctx.cost.peak import peak
from longctx.errors import UserError, print_rank0
from longctx.images.image_sizes import image_of
from longctx.images.room_for_images import USUAL, ImageTokens
from longctx.loop.metrics import peak_memory
from longctx.memory.machine import held_host_bytes, host_share_bytes
from longctx.memory.place import Place
from longctx.train.data.pack.batches import as_arrays
from longctx.train.engines import Engine, choose_engine
from longctx.train.options.config import ModelArguments, TrainArguments
from longctx.train.plan.changes import changes
from longctx.train.plan.measure import known_machine
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.shortage import shortage
from longctx.train.plan.subject import Subject
from longctx.train.plan.written_plan import read_given
from longctx.train.report.plan_numbers import Answer, as_json
from longctx.train.report.plan_run import check_known, run_of
from longctx.train.report.plan_text import show_short
from longctx.train.start.loading import compute_dtype

DEVICE = "cuda"
"""The device on which a step is predicted."""
SAMPLED_ROWS = 16
"""Rows of the data from which the length of its documents is estimated."""
OFF = 0.05
"""The run reports a prediction that is off by more."""


def foresee(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig, engine: Engine
) -> Foreseen | None:
    """Plans the run and returns its plan; None if nothing is predicted, and on a GPU a line says
    why. Raises UserError for a run that does not fit, and for a `--plan` of another run."""
    config = copy.deepcopy(config)  # a model writes its dtype there
    if args.plan:
        check_given(args.plan, model_args, args, config)
    if args.device.type != DEVICE:
        return None
    machine = None
    why_not = why_unknown(model_args, args, engine)
    if why_not is None:
        machine = known_machine()
        why_not = why_unknown_here(machine, model_args)
    if machine is None or why_not is not None:
        print_rank0(f"nothing is predicted: {why_not}")
        return None
    try:
        subject = Subject(config, model_args, args.device, shards=engine.shards_states)
    except UserError as error:
        if model_args.class_type != "any":
            raise
        print_rank0(f"nothing is predicted: {error}")  # its layers may be code of a stranger's
        return None
    run = run_of(model_args, args, engine, args.world_size)
    host = args.world_size * host_share_bytes()
    foreseen = Foreseen(subject, machine, host, plan(subject, run, machine, host), args)
    foreseen.refuse()
    return foreseen


def check_given(
    path: str, model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig
) -> None:
    """Raises UserError for a plan of another run."""
    given = read_given(path)
    check_known(model_args, args, f"--plan {path}")
    if args.world_size > 1:
        raise UserError(f"--plan {path} is of one process, and this run has {args.world_size}")
    run = run_of(model_args, args, choose_engine(args), 1)
    if compute_dtype(model_args, args.device) != torch.bfloat16 or not run.exact:
        raise UserError(
            f"--plan {path} is of a run with exact states in bfloat16: add --dtype bfloat16, and "
            "leave out --bf16, --fp16 and --optimizer_states as_weights"
        )
    given.check(run, Subject(config, model_args).sizes(run))


def why_unknown(model_args: ModelArguments, args: TrainArguments, engine: Engine) -> str | None:
    """Returns as a short reason why such a run is not predicted; None if it is."""
    if args.world_size > (torch.cuda.device_count() or args.world_size):
        return "only runs on one host are"
    if model_args.class_type not in ("custom", "any"):
        known = f"`longctx plan` knows {model_args.class_type}"
        return f"only --class_type custom and any are; {known}"
    if not model_args.schedules and not args.gradient_checkpointing:
        return "only runs with checkpointing by layer are"
    try:
        run_of(model_args, args, engine, args.world_size)
    except UserError as unknown:
        return str(unknown)
    dtype = torch.bfloat16 if args.bf16 else compute_dtype(model_args, args.device)
    if dtype != torch.bfloat16 or (args.bf16 and engine.exact_states):
        return "only runs in bfloat16 are"
    return None


def why_unknown_here(machine: Machine | None, model_args: ModelArguments) -> str | None:
    if machine is None:
        return "the rates of this GPU are not known; `longctx doctor` measures them once"
    if model_args.class_type != "any" and (  # whose layers are measured
        model_args.attn_backend not in ("auto", *machine.attention)
    ):
        return f"--attn_backend {model_args.attn_backend} was not measured on this GPU"
    return None


def _seconds(change: Plan) -> str:
    return "" if change.unknown else f" ({change.seconds.step:.3g} s a step)"


def _launched(flags: str) -> str:
    """Returns flags of `longctx plan` as those of a run, whose launcher starts the processes."""
    return re.sub(r"--gpus (\d+)", r"torchrun --nproc_per_node \1", flags)


@dataclass
class Foreseen:
    """A run's prediction."""

    subject: Subject
    machine: Machine
    host_bytes: int
    """Bytes that were free on the host before the run."""
    planned: Plan
    args: TrainArguments

    def refuse(self) -> None:
        """Raises UserError where the run does not fit."""
        if self.planned.fits:
            return
        run, machine = self.planned.run, self.machine
        found = changes(self.subject, run, machine, self.host_bytes, host_grows=False)
        fixes = [_launched(flags) + _seconds(change) for flags, change in found]
        lacks = shortage(self.subject, self.planned, self.host_bytes)
        problem = lacks.line if lacks else self.planned.problem
        if declined := self.subject.declined(run):
            problem = f"{problem}; {declined}"
        fix = f"it fits with {', or '.join(fixes)}" if fixes else "no flag makes it fit"
        raise UserError(f"this run does not fit: {problem}; {fix}")

    def show(self, rows: Any, image_tokens: ImageTokens | None = None) -> None:
        """Prints the table, with documents as long as those of the data, and as many images. A line
        says if a `--plan` has fewer."""
        if image_tokens is not None and self.args.plan:
            if line := read_given(self.args.plan).fewer_images(image_tokens.most):
                print_rank0(line)
        run = replace(self.planned.run, document_tokens=document_tokens(rows))
        if image_tokens is not None and image_tokens.mean:
            image = image_of(self.subject.whole, USUAL)
            count = max(1, round(image_tokens.mean / image.features))
            run = replace(run, images=count, image=image)
        self.planned = plan(self.subject, run, self.machine, self.host_bytes)
        if self.args.process_index == 0:
            tokens = self._data_tokens(rows)
            show_short(
                as_json(Answer(plan=self.planned, host_bytes=self.host_bytes, data_tokens=tokens))
            )

    def _data_tokens(self, rows: Any) -> int | None:
        if self.args.max_steps > 0:
            return self.args.max_steps * self.planned.step_tokens
        if not isinstance(rows, Sized):
            return None
        return int(self.args.num_train_epochs * len(rows)) * self.planned.run.model.seq_len

    def compare(self, trainer: Any, first_step: int) -> None:
        """Logs predicted and measured figures of the steps after `first_step`, and says which
        differ."""
        ladder = _ladder(trainer)
        places = [block.place for block in trainer.exact.stream.blocks] if trainer.exact else None
        measured = measure(trainer, first_step)
        found = compare(self.planned, measured, as_planned(self.planned, ladder, places))
        trainer.log(
            {f"predicted_{part.key}": round(part.predicted, 4) for part in found}
            | {f"measured_{part.key}": round(part.measured, 4) for part in found}
        )
        for line in lines(found):
            print_rank0(line)


def equal_tokens(positions: np.ndarray) -> float:
    """Returns the length of equal documents whose attention costs as much: sum L^2 / sum L, by the
    formula of loop/metrics.py."""
    return float((2.0 * positions + 1).mean())


def document_tokens(rows: Any) -> int | None:
    """Returns the length of equal documents whose attention costs as much as that of some rows of
    the data, evenly chosen; None for a stream, which is not read yet."""
    if not isinstance(rows, Sized):
        return None
    array: Any = as_arrays(rows)  # type: ignore[arg-type]
    chosen = range(0, len(rows), -(-len(rows) // SAMPLED_ROWS))
    found = [equal_tokens(np.asarray(array[i]["position_ids"])) for i in chosen]
    return max(1, round(statistics.mean(found)))


# --- predicted and measured ------------------------------------------------------------------


class PlanPart(NamedTuple):
    key: str
    what: str
    unit: str
    predicted: float
    measured: float
    least: float
    """A difference up to this says nothing."""
    why: str
    """A possible cause of a difference."""

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured - 1

    @property
    def is_off(self) -> bool:
        far = abs(self.predicted - self.measured) > self.least
        return far and abs(self.error) > OFF


def measure(trainer: Any, first_step: int) -> dict[str, float]:
    """Returns what a finished run took, by `PlanPart`'s keys. A run's first logged step
    compiles."""
    memory = peak_memory(trainer.args.device)
    held = held_host_bytes() / trainer.args.world_size
    found = {"gpu_gib": memory.get("peak_gpu_gib", 0.0), "host_gib": held / GIB}
    logged = [line for line in trainer.state.log_history if line.get("step", 0) > first_step]
    steps = [line["step_s"] for line in logged if "step_s" in line][1:]
    return found | ({"step_s": statistics.median(steps)} if steps else {})


def _ladder(trainer: Any) -> Ladder:
    """Returns what layers kept, in whichever store."""
    inputs = any_part(trainer.model)
    runtime = any_runtime_of(inputs) if inputs is not None else trainer.runtime
    return runtime.store.ladder if runtime is not None else ()


def as_planned(planned: Plan, ladder: Ladder, places: list[Place] | None) -> bool:
    """Whether the run keeps what it was planned to keep, where it was planned."""
    decision = planned.decision
    same = places is None or places == [*decision.places]
    if planned.sizes.class_type not in ("custom", "any"):
        return same  # Hugging Face's layers keep their inputs, and no store has them
    return same and tuple(ladder) == tuple(decision.kept.ladder)


_EXTRAPOLATED = "layers were measured at two lengths, and memory is what is promised of them"


def compare(planned: Plan, measured: dict[str, float], as_planned: bool) -> list[PlanPart]:
    most, seconds = peak(planned.phases), planned.seconds
    largest = max(most.buffers, key=lambda name: most.buffers[name])
    parts = ("products", "attention", "memory", "layers", "waits")
    slowest = max(parts, key=lambda name: getattr(seconds, name))
    locked = planned.rank_host_bytes / GIB - PROCESS_BYTES / GIB
    whys = {
        "gpu_gib": f"the peak was planned in {most.name}, most of it {largest}",
        "step_s": f"most of it was planned for {slowest}, {getattr(seconds, slowest):.3g} s",
    }
    if not planned.machine.measured:
        whys["step_s"] = "no rate of this card was measured: `longctx doctor` does, once"
    if "host_gib" in measured:
        whys["host_gib"] = (
            f"{locked:.1f} GiB are locked, as planned, so that the process itself had "
            f"{measured['host_gib'] - locked:.1f} instead of {PROCESS_BYTES / GIB:.1f}"
        )
    if planned.unknown:
        measured = {name: x for name, x in measured.items() if name == "host_gib"}
    elif planned.sizes.class_type == "any":
        whys["gpu_gib"] += f"; {_EXTRAPOLATED}"
        whys["step_s"] = _EXTRAPOLATED
    if not as_planned:
        other = "the run placed states and activations by other free memory than was planned with"
        whys = dict.fromkeys(whys, other)
    rows = (
        ("gpu_gib", "GPU", "GiB", planned.gpu_bytes / GIB, 0.1),
        ("host_gib", "host", "GiB", planned.rank_host_bytes / GIB, 1.0),
        ("step_s", "a step", "s", seconds.step, 0.01),
    )
    return [
        PlanPart(key, what, unit, predicted, measured[key], least, whys[key])
        for key, what, unit, predicted, least in rows
        if measured.get(key)
    ]


def lines(found: list[PlanPart]) -> list[str]:
    """Returns lines: one of all parts, and one for each that is off."""
    both = ", ".join(
        f"{p.what} {p.predicted:.3g} and {p.measured:.3g} {p.unit} ({p.error:+.1%})" for p in found
    )
    return [
        f"predicted and measured: {both}",
        *(f"{p.what}: the plan is off by {abs(p.error):.0%}: {p.why}" for p in found if p.is_off),
    ]
