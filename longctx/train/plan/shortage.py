"""Which memory a run lacks, how much of it, and for what.

The GPU is short if the run does not fit with a host without limits; else the host is. A plan that
does not fit lacks a little of both, in the way that needs the fewest bytes in sum, and cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longctx.constants import GIB
from longctx.cost.machines import Machine
from longctx.cost.peak import Buffers, peak
from longctx.memory.machine import host_budget
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.subject import PlannedRun, Subject

MOST_HOST_GIB = 4096  # a host of this size counts as one without limits


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory that is not there, in bytes."""

    memory: str
    """`GPU` or `host`."""
    needed: int
    """The least with which the run fits."""
    available: int
    holds: Buffers
    """The bytes that the memory would hold, by name."""
    plan: Plan
    """The plan of the run where this memory is there."""

    @property
    def line(self) -> str:
        parts = sorted(self.holds.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size > 0.05 * GIB)
        return (
            f"{self.memory} memory is short by {(self.needed - self.available) / GIB:.1f} GiB: "
            f"{self.needed / GIB:.1f} are needed ({shown}) and {self.available / GIB:.1f} are free"
        )


def shortage(subject: Subject, planned: Plan, host_bytes: int) -> Shortage | None:
    """Returns what a plan that does not fit lacks; None where no memory is the reason."""
    run, machine = planned.run, planned.machine
    roomy = _on_host(subject, run, machine, MOST_HOST_GIB)
    if not roomy.fits:
        most, decision = peak(roomy.phases), roomy.decision
        lacks = max(decision.needed_bytes - decision.budget.gpu, most.nbytes - roomy.gpu_limit)
        if lacks <= 0:
            return None
        needed = roomy.gpu_limit + lacks
        # Besides the peak: the allocator's gaps, and what an engine's first steps claim at once.
        room = "left free" if run.engine is None else "room for gathered weights and first sums"
        return Shortage(
            memory="GPU",
            needed=needed,
            available=roomy.gpu_limit,
            holds={**most.groups, room: needed - most.nbytes},
            plan=roomy,
        )
    least = least_host_gib(subject, run, machine, host_bytes)
    assert least is not None
    limits = [host_bytes, machine.lockable_bytes, _bytes(run.model.host_memory_gib)]
    enough = _on_host(subject, run, machine, least)
    holds = held_on_host(enough)
    if run.gpus * enough.reading_bytes > sum(holds.values()):
        holds = {"weights while they are read": run.gpus * enough.reading_bytes}
    return Shortage(
        memory="host",
        needed=least * GIB,
        available=min(limit for limit in limits if limit is not None),
        holds={**holds, "left free": least * GIB - sum(holds.values())},
        plan=enough,
    )


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _on_host(subject: Subject, run: PlannedRun, machine: Machine, gib: int) -> Plan:
    """Returns the plan on a host with so much free memory, all of which may be locked."""
    machine = replace(machine, lockable_bytes=None)
    return plan(subject, run.having(host_memory_gib=None), machine, gib * GIB)


def least_host_gib(
    subject: Subject, run: PlannedRun, machine: Machine, host_bytes: int
) -> int | None:
    """Returns the GiB that a host must have free for the run; None if no host is enough."""

    def fits(gib: int) -> bool:
        return _on_host(subject, run, machine, gib).fits

    lacking = plan(subject, run, machine, host_bytes)
    held = lacking.rank_host_bytes - lacking.decision.host.nbytes
    low, high = 0, MOST_HOST_GIB
    guess = -(-_with_spare(lacking.decision.host.nbytes + held) * run.gpus // GIB)
    for gib in (guess, guess - 1, high):  # the guess is right where the GPU lacked nothing
        if low < gib <= high:
            low, high = (low, gib) if fits(gib) else (gib, high)
    if low == MOST_HOST_GIB:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_spare(nbytes: int) -> int:
    """Returns the free memory of which a run may lock so many bytes."""
    low, high = nbytes, 2 * nbytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if host_budget(middle, None) >= nbytes else (middle, high)
    return high


def held_on_host(planned: Plan) -> Buffers:
    """Returns what a plan keeps in host memory, in bytes by name, of all processes."""
    run, decision = planned.run, planned.decision
    placed = [*zip(decision.blocks, decision.places, strict=True)]
    names = {"states": "AdamW's states", "weight": "weights", "grad": "gradients"}
    held = {
        name: sum(getattr(size, kind) for size, place in placed if not getattr(place, kind))
        for kind, name in names.items()
    }
    held["saved activations"] = sum(decision.kept.hosted)
    if run.engine is not None:
        held[f"states of {run.engine.name}"] = run.engine.host(planned.parameters)
    held["processes"] = planned.rank_host_bytes - decision.host.nbytes
    if run.engine is not None:
        held["processes"] -= run.engine.host(planned.parameters)
    return {name: run.gpus * nbytes for name, nbytes in held.items() if nbytes}
