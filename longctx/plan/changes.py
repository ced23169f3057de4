"""The flags that would make a run fit: each is tried by planning again.

One flag is tried at a time; if none is enough, two, then three. If not even all of them together
are enough, nothing is tried. `auto` already looks at every place and at everything that may be
kept, so no flag of this kind is tried beside it. The fastest change comes first. A shorter row
comes last, since it changes the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from longctx.constants import GIB
from longctx.cost.machines import Machine
from longctx.plan.predict import Plan, Run, Subject, longest, plan

MOST = 5
"""At most so many changes are shown."""
HOST_STEP_GIB, MOST_HOST_GIB = 8, 4096
Options = dict[str, Any]


class Change(NamedTuple):
    """Flags as a user types them, and the plan of the run that has them."""

    flags: str
    plan: Plan


def changes(
    subject: Subject, run: Run, machine: Machine, host_bytes: int, *, host_grows: bool
) -> list[Change]:
    """Returns the changes that make the run fit, the fastest first. `host_grows` says that the host
    does not exist yet and may be a larger one."""

    def tried(options: Options) -> Plan:
        host = max(host_bytes, int((options.get("host_memory_gib") or 0) * GIB))
        return plan(subject, run.having(**options), machine, host)

    single = [*_candidates(subject, run)]
    if host_grows and (more := _more_host(subject, run, machine)):
        single.append(more)
    if not host_grows and run.model.host_memory_gib is not None:
        single.append({"host_memory_gib": None})
    found: list[Change] = []
    all_at_once = {name: value for part in single for name, value in part.items()}
    hopeless = not single or not tried(all_at_once).fits
    for together in () if hopeless else (1, 2, 3):
        for chosen in combinations(single, together):
            options = {name: value for part in chosen for name, value in part.items()}
            distinct = len(options) == sum(map(len, chosen))
            if distinct and (planned := tried(options)).fits:
                found.append(Change(_words(options), planned))
        if found:
            break
    found.sort(key=lambda change: (-change.plan.tokens_per_s, change.plan.host_bytes))
    shorter = longest(subject, run, machine, host_bytes)
    last = [Change(f"--seq_len {shorter.run.model.seq_len}", shorter)] if shorter else []
    return found[:MOST] + last


def _candidates(subject: Subject, run: Run) -> Iterator[Options]:
    """Yields single changes that may need less memory, or allow more of it."""
    for known in _known(subject, run):
        options = {name: value for name, value in known.items() if run.value(name) != value}
        if options:
            yield options


def _known(subject: Subject, run: Run) -> Iterator[Options]:
    if run.engine is not None and run.sequence_parallel_size == 1:
        yield {"engine": None}
    if run.gpu_memory_gib:
        yield {"gpu_memory_gib": None}
    if not run.exact and run.engine is None:
        yield {"exact": True}
    if run.per_device_train_batch_size > 1:
        passes = run.per_device_train_batch_size * run.gradient_accumulation_steps
        yield {"per_device_train_batch_size": 1, "gradient_accumulation_steps": passes}
    if run.engine is None:
        yield {"place": "auto"}
    if run.model.class_type != "custom":
        yield {"class_type": "custom", "attn_backend": "auto"}
        return
    yield {"offload_activations": "auto"}
    yield {"keep": "auto"}
    yield {"head_groups": subject.sizes(run).kv_heads}
    if run.model.tile_tokens is None or run.model.tile_tokens > 2048:
        yield {"tile_tokens": 2048}


def _more_host(subject: Subject, run: Run, machine: Machine) -> Options | None:
    """Returns the smallest host with which the run fits unchanged; None if no host is enough."""

    def fits(gib: int) -> bool:
        return plan(subject, run.having(host_memory_gib=gib), machine, gib * GIB).fits

    if not fits(MOST_HOST_GIB):
        return None
    low, high = 0, MOST_HOST_GIB // HOST_STEP_GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * HOST_STEP_GIB) else (middle, high)
    return {"host_memory_gib": high * HOST_STEP_GIB}


def _words(options: Options) -> str:
    def said(name: str, value: Any) -> str:
        if name == "exact":
            return "--optimizer_states fp32"
        if name == "engine":
            return "without --deepspeed and --fsdp"
        return f"without --{name}" if value is None else f"--{name} {value}"

    return " ".join(said(name, value) for name, value in options.items())
