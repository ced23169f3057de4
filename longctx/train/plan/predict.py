"""Plans a run: from a model, a run and a machine it predicts whether the run fits, its bytes and
its seconds. What is planned is in subject.py; the step of the run, and where everything lives in
it, are in step.py. A plan takes about 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from longctx.constants import GIB
from longctx.cost.fitted import PROCESS_BYTES
from longctx.cost.images import Images, with_images
from longctx.cost.machines import Machine
from longctx.cost.peak import Phase, peak, phases
from longctx.cost.seconds import Seconds
from longctx.cost.sizes import Parameters, Sizes
from longctx.memory.decide import Decision
from longctx.memory.ladder import Step, displayed, predicted
from longctx.memory.place import PlacedStates
from longctx.train.plan.engines import (
    ShardedStates,
)
from longctx.train.plan.step import (
    backend_of,
    budget_of,
    check_ranks,
    decision_of,
    exchanges_of,
    step_of,
)
from longctx.train.plan.subject import PlannedRun, Subject

SHORTEST = 512
"""Tokens. The longest row that fits is found as a multiple of this."""
LONGEST = 2**24
"""Tokens. The search for the longest row halves its steps from here."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prediction of a run: what it will do, and what it will take."""

    run: PlannedRun
    machine: Machine
    sizes: Sizes
    backend: str
    decision: Decision
    phases: list[Phase]
    seconds: Seconds
    gpu_limit: int
    """Bytes of the GPU that torch's allocator may take."""
    rank_host_bytes: int
    """Bytes of the host that one process holds while it trains."""
    reading_bytes: int
    """Bytes of the host that one process holds while it reads the model."""
    problem: str | None
    """One line that says why the run does not fit; None if it fits."""
    parameters: Parameters
    """The model's parameters."""
    images: Images | None = None
    """The images of a batch on one GPU."""

    unknown: str | None = None
    """Why a layer's memory and seconds are unknown; None if they are planned."""

    @property
    def fits(self) -> bool:
        """Whether all that is planned fits."""
        return self.problem is None

    @property
    def gpu_bytes(self) -> int:
        return peak(self.phases).nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host that all processes hold."""
        return self.run.gpus * self.rank_host_bytes

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all GPUs."""
        rows = self.run.per_device_train_batch_size * self.run.gradient_accumulation_steps
        groups = self.run.gpus / self.run.sequence_parallel_size
        return int(rows * self.run.model.seq_len * groups)

    @property
    def step_s(self) -> float:
        """Seconds of a step, to three digits, as they are shown and as plans are compared."""
        return float(displayed(self.seconds.step))

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.step_s


def plan(
    subject: Subject,
    run: PlannedRun,
    machine: Machine,
    host_bytes: int,
    having: Callable[[Step], Step] | None = None,
) -> Plan:
    """Returns the plan of a run. `host_bytes` are free on the host, for all processes together.
    `having` changes the step that is chosen for, as a given plan does. Raises UserError for a run
    that no machine can do."""
    if having is not None:
        return _planned(subject, run, machine, host_bytes, having)
    asked = run, machine, host_bytes
    for known, found in subject.plans:  # the ways out of a run that does not fit ask again
        if known == asked:
            return found
    found = _planned(subject, run, machine, host_bytes, lambda step: step)
    subject.plans.append((asked, found))
    return found


def _planned(
    subject: Subject,
    run: PlannedRun,
    machine: Machine,
    host_bytes: int,
    having: Callable[[Step], Step],
) -> Plan:
    alone, machine = machine, machine.among(run.gpus)
    backend = backend_of(subject, run, machine)
    budget, limit = budget_of(run, machine, host_bytes // run.gpus)
    step, engine = having(step_of(subject, run, machine, backend)), run.engine
    decision = decision_of(subject, step, run, machine, budget)
    chosen = decision.chosen
    check_ranks(chosen.sizes, run.tokens)
    found, images = _phases(subject, run, machine, step, decision)
    process, held = PROCESS_BYTES, 0
    if engine is not None:
        process, held = int(engine.process_gib * GIB), engine.host(subject.parameters)
    on_gpu = alone.gpu_bytes - alone.held_bytes
    reading = process + (subject.reading_bytes(on_gpu) if engine is None else 0)
    return Plan(
        run=run,
        machine=alone,
        sizes=chosen.sizes,
        backend=(known := subject.any_layers(run)) and known.attention_line() or backend,
        decision=decision,
        phases=found,
        seconds=_seconds(subject, run, machine, step, decision, images),
        gpu_limit=limit,
        problem=_problem(decision, found, limit, held)
        or (decision.placement_problem(run.place) if run.exact else None)
        or _reading_problem(subject, reading, host_bytes // run.gpus),
        rank_host_bytes=decision.host.nbytes + process + held,
        reading_bytes=reading,
        parameters=subject.parameters,
        images=images,
        unknown=subject.unknown(run),
    )


def _phases(
    subject: Subject, run: PlannedRun, machine: Machine, step: Step, decision: Decision
) -> tuple[list[Phase], Images | None]:
    """Returns the buffers of the GPU in each phase of the step, and the images of its batch."""
    chosen, accumulates = decision.chosen, run.gradient_accumulation_steps > 1
    standing = (
        PlacedStates(decision.blocks, decision.places, accumulates=accumulates)
        if run.engine is None
        else ShardedStates(run.engine, subject.parameters, step.sizes.layers, accumulates)
    )
    found = phases(step.count(chosen.sizes, step.batch), chosen.ladder, standing)
    images = subject.images(run, machine)
    if images is not None:
        placed = zip(decision.specs, decision.places, strict=True)
        images = replace(images, away=any(not p.weight for spec, p in placed if spec.tower))
        found = with_images(found, images, standing)
    if more := chosen.graph_bytes:
        found = [Phase(name, {**buffers, "CUDA graphs": more}) for name, buffers in found]
    return found, images


def _seconds(
    subject: Subject,
    run: PlannedRun,
    machine: Machine,
    step: Step,
    decision: Decision,
    images: Images | None,
) -> Seconds:
    """Returns the seconds of the step. Attention's are those of documents, which may be shorter
    than the rows for which the memory is counted."""
    chosen, document = decision.chosen, run.model.seq_len
    if run.document_tokens:
        document = min(run.document_tokens, document)
    timed = replace(
        step,
        batch=step.batch._replace(document=document),
        rates=machine.rates(backend_of(subject, run, machine), document, *step.sizes.scores),
        exchanges=exchanges_of(subject, chosen.sizes, run, machine),
    )
    found = predicted(timed, chosen)
    if images is None:
        return found
    return found._replace(images=step.batch.passes * images.seconds(step.rates))


def _reading_problem(subject: Subject, reading_bytes: int, host_bytes: int) -> str | None:
    """Returns why the model cannot be read into the free memory of the host; None if it can."""
    if reading_bytes <= host_bytes:
        return None
    what, way = "the experts, which transformers puts together", _BY_LAYER
    if subject.packed:
        way = f"a copy in bfloat16 and {way}"
    if subject.packed and not subject.packed.form:
        what = "the weights, which transformers makes dense"
    if subject.quantised and subject.experts_bytes:
        what = "the 16-bit experts of this 4-bit checkpoint"
        way = f"the model that it was made from: {_BY_LAYER}"
    elif subject.quantised:
        what, way = (
            "the weights in 4 bits, which the GPU does not hold",
            "a GPU that holds them all",
        )
    return (
        f"{reading_bytes / GIB:.1f} GiB of host memory are needed to read {what} there, and "
        f"{host_bytes / GIB:.1f} are free: {way}"
    )


_BY_LAYER = "--quantize nf4 reads them layer by layer"


def longest(
    subject: Subject, run: PlannedRun, machine: Machine, host_bytes: int, most: int = LONGEST
) -> Plan | None:
    """Returns the plan of the longest row that fits, up to `most` tokens; None if no row fits that
    has room for its images."""
    least = max(1, -(-run.image_tokens // SHORTEST)) * SHORTEST

    def at(length: int) -> Plan:
        return plan(subject, run.having(seq_len=length), machine, host_bytes)

    if not at(least).fits:
        return None
    found, step = 0, LONGEST
    while step >= SHORTEST:
        length = found + step
        if length <= most and (length <= least or at(length).fits):
            found = length
        step //= 2
    return at(found) if found >= least else None


def _problem(decision: Decision, phases: list[Phase], limit: int, held: int) -> str | None:
    """Returns one line that says why the run does not fit; None if it does. An engine holds `held`
    bytes of the host."""
    if held and decision.budget.host < decision.host.nbytes:
        needed, free = held + decision.host.nbytes, held + decision.budget.host
        return (
            f"{needed / GIB:.1f} GiB of host memory are needed in each process for states and "
            f"activations and {free / GIB:.1f} GiB may be used"
        )
    most = peak(phases)
    fits = decision.needed_bytes <= decision.budget.gpu
    if problem := (None if fits else decision.gpu_problem()) or decision.host_problem():
        return problem
    if most.nbytes <= limit:
        return None
    return (
        f"{most.nbytes / GIB:.1f} GiB of GPU memory are needed in {most.name} and "
        f"{limit / GIB:.1f} GiB may be used"
    )
