"""The ways out of a run that does not fit. Each is planned, and shown if it fits.

    1. flags alone        the same training: one flag, two or three together, the fastest first.
                          `auto` already looks at every place and at all that may be kept
    2. these GPUs         of several: fewer of them, a row that they share, ZeRO-3 with CPU offload
    3. LoRA, then QLoRA   other training; on several GPUs LoRA under the run's engine, too
    4. a shorter row      the longest that fits: other data. Where none does, and adapters alone do
                          not fit either, the longest under each
    5. more GPUs          2, 4 or 8 of them share each row under FSDP2
    6. a larger host

Where flags alone are enough, the others but 4 are left out, and where these GPUs are enough, 5 and
6. What a way needs of the flags of 1 is part of it. 5 and 6 are for machines that are still to be
rented.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from longctx.constants import GIB
from longctx.cost.machines import Machine
from longctx.errors import UserError
from longctx.train.engines.layout import FullyShard, Zero
from longctx.train.plan.predict import Plan, longest, plan
from longctx.train.plan.shortage import least_host_gib
from longctx.train.plan.subject import PlannedRun, Subject

MOST = 5
"""The most changes of flags alone that are shown."""
HOST_STEP_GIB = 8  # the smallest host that fits is rounded up to a size that is sold
RANK = 16
"""The rank of the adapters that are tried."""
GPUS = (2, 4, 8)
FSDP2 = "--fsdp true --fsdp_config fsdp2"
ZERO3 = "--deepspeed zero3_cpu"
_MAKES = ("lora_r", "quantize", "dropout")
"""Options that make another model."""
Options = dict[str, Any]
_SCHEDULE: Options = {"class_type": "custom", "attn_backend": "auto", "parts": None}
"""The options with which our schedule runs the layers of a model."""


class Change(NamedTuple):
    """Flags as a user types them, and the plan of the run that has them."""

    flags: str
    plan: Plan


def changes(
    subject: Subject, run: PlannedRun, machine: Machine, host_bytes: int, *, host_grows: bool
) -> list[Change]:
    """Returns the ways out, in the order above. `host_grows` says that the machine is not there
    yet: its host may be larger, and its GPUs more."""
    search = _Search(subject, run, machine, host_bytes)
    if found := search.flags_alone(host_grows):
        return found + search.shorter_rows([{}])
    here = [*search.these_gpus()]
    ways = [*here, *search.adapters()]
    ways += search.shorter_rows([{}]) or (
        [] if ways else search.shorter_rows(search.kinds_of_adapters)
    )
    if host_grows and not here:
        ways += [*search.more_gpus(), *search.larger_host()]
    return ways


@dataclass(frozen=True)
class _Search:
    subject: Subject
    run: PlannedRun
    machine: Machine
    host_bytes: int

    @cached_property
    def _subjects(self) -> dict[Any, Subject]:
        """Models with other adapters, other 4-bit weights or no dropout, by these options."""
        return {}

    def tried(self, options: Options) -> Plan:
        host = max(self.host_bytes, int((options.get("host_memory_gib") or 0) * GIB))
        subject, run = self._with(options)
        return plan(subject, run, self.machine, host)

    @cached_property
    def single(self) -> list[Options]:
        """Single flags that may need less memory, or allow more of it."""
        return [*_candidates(self.subject, self.run)]

    @cached_property
    def all_at_once(self) -> Options:
        return {name: value for part in self.single for name, value in part.items()}

    @cached_property
    def flags(self) -> list[Options]:
        """Returns the flags that a way out may need besides: none, those that decide by themselves,
        or all."""
        decided = {n: to for n, to in self.all_at_once.items() if to in ("auto", None)}
        return [{}, decided, self.all_at_once]

    def flags_alone(self, host_grows: bool) -> list[Change]:
        single = self.single
        if not host_grows and self.run.model.host_memory_gib is not None:
            single = [*single, {"host_memory_gib": None}]
        whole = {name: value for part in single for name, value in part.items()}
        if not single or not self.tried(whole).fits:
            return []
        found: list[Change] = []
        for together in (1, 2, 3):
            for chosen in combinations(single, together):
                options = {name: value for part in chosen for name, value in part.items()}
                distinct = len(options) == sum(map(len, chosen))
                if distinct and (planned := self.tried(options)).fits:
                    found.append(Change(_words(options), planned))
            if found:
                break
        found.sort(key=lambda change: (-change.plan.tokens_per_s, change.plan.host_bytes))
        return found[:MOST]

    def adapters(self) -> Iterator[Change]:
        for options in self.kinds_of_adapters:
            yield from self._way(options)

    @cached_property
    def kinds_of_adapters(self) -> list[Options]:
        """LoRA and QLoRA, as far as the run has them not yet."""
        model = self.run.model
        # each GPU has a copy of its own
        more: Options = {"engine": None, "sequence_parallel_size": 1}
        if not model.schedules and self.subject.known:
            more |= _SCHEDULE
        lora = [{**more, "lora_r": RANK}] if model.lora_r is None else []
        if lora and self.run.gpus > 1 and self.run.engine is not None:
            lora = [{"lora_r": RANK}, *lora]
        packed = {**more, "lora_r": model.lora_r or RANK, "quantize": "nf4"}
        takes = model.quantize == "none" and self.subject.takes_nf4
        return [*lora, packed] if takes else lora

    def shorter_rows(self, kinds: list[Options]) -> list[Change]:
        """Returns the longest row that fits under each of these options."""
        rows = []
        for options in kinds:
            subject, run = self._with(options)
            most = run.model.seq_len
            if found := longest(subject, run, self.machine, self.host_bytes, most):
                changed = {**self._changed(options), "seq_len": found.run.model.seq_len}
                rows.append(Change(_words(changed), found))
        return rows

    @cached_property
    def _shards(self) -> bool:
        """Whether an engine may train the run, with rows that GPUs share."""
        run = self.run
        whole = run.model.quantize == "none" and not run.model.lora_modules_to_save
        ours = run.model.schedules and not self.subject.with_tower
        return ours and run.exact and whole and run.task == "sft"

    def these_gpus(self) -> Iterator[Change]:
        """Yields the changes by which the GPUs that are there, or the most of them that can, hold
        the run together."""
        gpus = self.run.gpus
        if gpus == 1:
            return
        if self._shards:
            together = (_sharing(gpus), _offloading(gpus, 1), _offloading(gpus, gpus))
            found = [change for options in together for change in self._way(options)]
            yield from sorted(found, key=lambda change: -change.plan.tokens_per_s)
        for fewer in (*(n for n in reversed(GPUS) if n < gpus), 1):
            # each with a copy of everything, or sharing rows
            kinds = [_alone(fewer)] + ([_sharing(fewer)] if self._shards and fewer > 1 else [])
            found = [change for options in kinds for change in self._way(options)]
            yield from found[:1]
            if found:
                return

    def more_gpus(self) -> Iterator[Change]:
        """Yields the fewest GPUs of one host that can share each row."""
        for gpus in GPUS if self._shards else ():
            found = [*self._way(_sharing(gpus))] if gpus > self.run.gpus else []
            yield from found
            if found:
                return

    def larger_host(self) -> Iterator[Change]:
        """Yields the smallest host with which the run fits."""
        for flags in self.flags:
            run = self.run.having(**flags)
            least = least_host_gib(self.subject, run, self.machine, self.host_bytes)
            if least is not None:
                gib = -(-least // HOST_STEP_GIB) * HOST_STEP_GIB
                options = {**flags, "host_memory_gib": gib}
                yield Change(_words(options), self.tried(options))
                return

    def _changed(self, options: Options) -> Options:
        return {name: to for name, to in options.items() if self.run.value(name) != to}

    def _with(self, options: Options) -> tuple[Subject, PlannedRun]:
        run = self.run.having(**options)
        if (made := self._made_by(run)) == self._made_by(self.run):
            return self.subject, run
        if made not in self._subjects:
            shards = run.engine is not None
            self._subjects[made] = self.subject.adapted(run.model, shards=shards)
        return self._subjects[made], run

    def _made_by(self, run: PlannedRun) -> tuple[Any, ...]:
        """Returns what in a run's options makes its model another one."""
        source = run.model.source.under(shards=run.engine is not None)
        stays = self.subject.packed is not None and source.keeps_packed
        return *(run.value(name) for name in _MAKES), stays

    def _way(self, options: Options) -> Iterator[Change]:
        """Yields the run with these options, if need be with flags that need less memory."""
        try:
            for flags in self.flags:
                changed = self._changed({**flags, **options})
                subject, run = self._with(changed)
                planned = plan(subject, run, self.machine, self.host_bytes)
                if changed and planned.fits:
                    yield Change(_words(changed), planned)
                    return
        except UserError:  # not for this model, nor for this class of layers
            return


def _sharing(gpus: int) -> Options:
    """Returns the options by which `gpus` GPUs share rows; FSDP2 decides itself where weights and
    states are."""
    return {
        "gpus": gpus,
        "engine": FullyShard(processes=gpus),
        "sequence_parallel_size": gpus,
        "place": "auto",
        "gpu_memory_gib": None,
    }


def _alone(gpus: int) -> Options:
    """Returns the options by which each of several GPUs holds everything, or there is one."""
    return {"gpus": gpus, "engine": None, "sequence_parallel_size": 1}


def _offloading(gpus: int, ranks: int) -> Options:
    """Returns the options of ZeRO-3 with CPU offload, as zero3_cpu asks for it."""
    layout = Zero(
        name="ZeRO-3 with CPU offload", processes=gpus, offloads_weights=True, offloads_states=True
    )
    return {**_sharing(gpus), "engine": layout, "sequence_parallel_size": ranks}


def _candidates(subject: Subject, run: PlannedRun) -> Iterator[Options]:
    """Yields single changes that may need less memory, or allow more of it."""
    for known in _known(subject, run):
        options = {name: value for name, value in known.items() if run.value(name) != value}
        if options:
            yield options


def _known(subject: Subject, run: PlannedRun) -> Iterator[Options]:
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
    if not run.model.schedules:
        if subject.known:
            yield _SCHEDULE
        return
    if not subject.schedules(run):
        if subject.drops:
            yield {"dropout": 0}
        return
    yield {"offload_activations": "auto"}
    yield {"keep": "auto"}
    yield {"head_groups": subject.sizes(run).kv_heads}
    if run.model.tile_tokens is None or run.model.tile_tokens > 2048:
        yield {"tile_tokens": 2048}


def _words(options: Options) -> str:
    def said(name: str, value: Any) -> str:
        if name == "exact":
            return "--optimizer_states fp32"
        if name == "engine":
            if value is None:
                return "without --deepspeed and --fsdp"
            return ZERO3 if isinstance(value, Zero) else FSDP2
        return f"without --{name}" if value is None else f"--{name} {value}"

    return " ".join(said(name, value) for name, value in options.items())
