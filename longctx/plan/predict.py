"""The plan of a run: a model, a run and a machine in; fits or not, bytes and seconds out. Where
everything lives is asked of the function that decides in the run (decide.py), or, where an engine
has weights and states, of its layout (engines.py).

The model has its parameters' shapes and no storage (`meta`), which takes 10 ms a layer; a plan
takes about 20 ms then.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.config import ModelArguments
from longctx.engines.layout import Layout, Parameters
from longctx.errors import UserError, one_line
from longctx.lora.adapters import with_lora
from longctx.lora.quantise import quantise_shapes_
from longctx.memory.ladder import Batch, Chosen, States, choose_beside
from longctx.memory.machine import host_budget
from longctx.memory.plan import GIB, Place, Placement, Sizes, usable_bytes
from longctx.memory.settle import HostRoom
from longctx.model.adapters import inside_peft
from longctx.model.blocks import state_blocks
from longctx.model.families import base_of, head_dim, kv_heads, layer_adapters
from longctx.model.runtime import check_shares, model_sizes
from longctx.plan.buffers import Phase, other_phases, peak, scheduled_phases
from longctx.plan.decide import (
    Budget,
    Decision,
    Kept,
    decide,
    estimated_work,
    gpu_budget,
    keeping,
)
from longctx.plan.engines import Exchanged, Sharded, averaged, exchanged, parameters_of, shared_rows
from longctx.plan.machines import Machine
from longctx.plan.seconds import Adapted, Seconds, Task, seconds

DTYPE = torch.bfloat16
PROCESS_BYTES = int(2.5 * GIB)
"""Of the host: Python, torch and CUDA."""
SHORTEST = 512
"""Tokens: rows that fit are found to a multiple of it."""
LONGEST = 2**24


@dataclass(frozen=True, kw_only=True)
class Run:
    """What of a run's options decides about memory and time, by their names."""

    model: ModelArguments
    place: Placement = "auto"
    gpu_memory_gib: float | None = None
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    exact: bool = True
    """fp32 states and masters; else torch's AdamW, with states in the weights' dtype."""
    document_tokens: int | None = None
    """Of a document; None: as long as a row."""
    gpus: int = 1
    """A process each."""
    sequence_parallel_size: int = 1
    """Of them share each row."""
    engine: Layout | None = None

    @property
    def tokens(self) -> int:
        """Of a batch, on one GPU."""
        rows = self.per_device_train_batch_size * self.model.seq_len
        return -(-rows // self.sequence_parallel_size)

    def value(self, option: str) -> Any:
        return getattr(self if option in _OF_RUN else self.model, option)

    def having(self, **options: Any) -> Run:
        """With other options."""
        model = {name: value for name, value in options.items() if name not in _OF_RUN}
        rest = {name: value for name, value in options.items() if name in _OF_RUN}
        return replace(self, model=replace(self.model, **model), **rest)


_OF_RUN = {field.name for field in fields(Run)}
"""All other options are the model's."""


class Subject:
    """A model without storage."""

    def __init__(self, config: PretrainedConfig, args: ModelArguments | None = None) -> None:
        """With the adapters, and the 4 bits under them, that `args` ask for. Raises UserError for a
        configuration of which no model can be made, or that the plan cannot read."""
        text = config.get_text_config()
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*needed, "vocab_size"):
            if not isinstance(getattr(text, name, None), int):
                raise UserError(f"the model's config has no {name}, which the plan needs")
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
            raise UserError("the model has experts, whose plan is not known")
        self.config = text
        try:
            with torch.device("meta"):
                self.model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        except Exception as error:  # a file's values raise as many types as there are checks
            raise UserError(f"no model can be made of this config: {one_line(error)}") from error
        if args is not None and args.quantize != "none":
            quantise_shapes_(self.model)
        if args is not None and args.lora_r is not None:
            with torch.device("meta"):
                self.model = with_lora(self.model, args)
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.adapted = self._adapted()
        self.parameters = parameters_of(self.model)

    def _adapted(self) -> Adapted:
        base = base_of(inside_peft(self.model))
        layers = [] if base is None else base.layers
        found = [x for layer in layers for x in layer_adapters(layer).values()]
        a, b = [x.a for x in found], [x.b for x in found]
        return Adapted(
            inputs=sum(x.shape[1] for x in a),
            outputs=sum(len(x) for x in b),
            parameters=sum(x.numel() for x in (*a, *b)),
        )

    def sizes(self, run: Run) -> Sizes:
        if run.model.class_type == "custom":
            sizes = model_sizes(inside_peft(self.model), run.model, DTYPE)
            return replace(sizes, ranks=run.sequence_parallel_size)
        config = self.config
        return Sizes(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads(config),
            head_dim=head_dim(config),
            vocab=config.vocab_size,
            itemsize=DTYPE.itemsize,
            ranks=run.sequence_parallel_size,
            head_groups=1,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do and take."""

    run: Run
    machine: Machine
    sizes: Sizes
    backend: str
    decision: Decision
    phases: list[Phase]
    seconds: Seconds
    gpu_limit: int
    """Bytes that torch's allocator may take."""
    problem: str | None
    """Why it does not fit, in one line."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def gpu_bytes(self) -> int:
        return peak(self.phases).nbytes

    rank_host_bytes: int
    """Of the host, of one process."""
    parameters: Parameters
    """Of the model."""

    @property
    def host_bytes(self) -> int:
        """Of all processes."""
        return self.run.gpus * self.rank_host_bytes

    @property
    def step_tokens(self) -> int:
        """Of all GPUs."""
        rows = self.run.per_device_train_batch_size * self.run.gradient_accumulation_steps
        groups = self.run.gpus / self.run.sequence_parallel_size
        return int(rows * self.run.model.seq_len * groups)

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens / self.seconds.step


def plan(subject: Subject, run: Run, machine: Machine, host_bytes: int) -> Plan:
    """`host_bytes` are what the host has free, for all processes. Raises UserError for what no
    machine can run."""
    backend = _backend(run, machine)
    sizes, passes = subject.sizes(run), run.gradient_accumulation_steps
    writes = run.sequence_parallel_size == 1 and BACKENDS[backend].writes_gradients
    sizes = replace(sizes, writes_gradients=writes)
    engine, states = run.engine, None
    budget, limit = _budget(run, machine, host_bytes // run.gpus)
    if engine is None:
        decision = _decide(subject, sizes, run, machine, budget)
    else:
        decision = _decide_sharded(subject, sizes, run, machine, budget, engine)
        states = Sharded(engine, subject.parameters, sizes.layers, passes > 1)
    sizes = decision.sizes or sizes
    if run.model.class_type == "custom":
        _check_ranks(sizes, run.tokens)
        phases = scheduled_phases(decision, sizes, run.tokens, passes > 1, states)
    else:
        kind = run.model.class_type
        phases = other_phases(decision, sizes, run.tokens, passes > 1, kind, states)
    task = Task(
        sizes=sizes,
        tokens=run.tokens,
        document=min(run.document_tokens or run.model.seq_len, run.model.seq_len),
        class_type=run.model.class_type,
        ladder=decision.kept.ladder,
        trained=subject.trained,
        exact=run.exact,
        adapted=subject.adapted,
        exchanges=_exchanges(subject, sizes, run, machine),
    )
    process, held = PROCESS_BYTES, 0
    if engine is not None:
        process, held = int(engine.process_gib * GIB), engine.host(subject.parameters)
    return Plan(
        run=run,
        machine=machine,
        sizes=sizes,
        backend=backend,
        decision=decision,
        phases=phases,
        seconds=seconds(task, decision, machine, backend, passes),
        gpu_limit=limit,
        problem=_problem(decision, phases, limit, held)
        or (decision.placement_problem(run.place) if run.exact else None),
        rank_host_bytes=decision.host.nbytes + process + held,
        parameters=subject.parameters,
    )


def longest(subject: Subject, run: Run, machine: Machine, host_bytes: int) -> Plan | None:
    """The plan of the longest row that fits, up to LONGEST; None if none does."""
    found, step = None, LONGEST
    while step >= SHORTEST:
        length = step + (found.run.model.seq_len if found else 0)
        if length <= LONGEST:
            tried = plan(subject, run.having(seq_len=length), machine, host_bytes)
            found = tried if tried.fits else found
        step //= 2
    return found


def _backend(run: Run, machine: Machine) -> str:
    asked = run.model.attn_backend
    if asked == "auto" and run.model.class_type == "custom":
        return next(iter(machine.attention))
    known = {"auto": "cudnn", "sdpa": "cudnn", "fa2": "flash"}.get(asked, asked)
    if known not in machine.attention:
        names = ", ".join(machine.attention)
        raise UserError(
            f"--attn_backend {asked} is not known on {machine.name}: plan with auto or {names}"
        )
    return known


def _budget(run: Run, machine: Machine, host_bytes: int) -> tuple[Budget, int]:
    """And what the GPU's allocator may take."""
    limit = free = machine.gpu_bytes - machine.held_bytes
    if run.gpu_memory_gib:
        if run.gpu_memory_gib > machine.gpu_gib:
            raise UserError(
                f"--gpu_memory_gib {run.gpu_memory_gib:g} is more than the {machine.gpu_gib:.1f} "
                f"GiB of {machine.name}"
            )
        limit = min(limit, int(run.gpu_memory_gib * GIB))
    gpu = gpu_budget(free, run.gpu_memory_gib)
    host = host_budget(host_bytes, run.model.host_memory_gib)
    if machine.lockable_bytes is not None:
        host = min(host, machine.lockable_bytes)
    return Budget(gpu, host), limit


def _decide(subject: Subject, sizes: Sizes, run: Run, machine: Machine, budget: Budget) -> Decision:
    tokens, passes = run.tokens, run.gradient_accumulation_steps
    custom = run.model.class_type == "custom"
    specs = state_blocks(subject.model, movable=custom and run.gpus == 1)
    choose = partial(_choose, sizes, run, machine)
    if not run.exact:
        return _as_weights(specs, run, budget, choose if custom else None)
    needs = (
        choose
        if custom
        else estimated_work(
            tokens,
            layers=sizes.layers,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            vocab=sizes.vocab,
            itemsize=sizes.itemsize,
            liger=run.model.class_type == "liger",
        )
    )
    return decide(
        specs,
        budget,
        tokens=tokens,
        placement=run.place,
        accumulates=passes > 1,
        several=run.gpus > 1,
        needs=needs,
    )


def _choose(
    sizes: Sizes, run: Run, machine: Machine, gpu: int, host: int, states: States
) -> Chosen:
    """As the runtime of a patched model does (model/runtime.py)."""
    passes = run.gradient_accumulation_steps
    return choose_beside(
        sizes,
        Batch(run.tokens, min(run.tokens, run.model.seq_len), passes),
        gpu,
        host,
        machine.rates,
        keep=run.model.keep,
        offload=run.model.offload_activations,
        states=states,
    )


def _as_weights(specs: Any, run: Run, budget: Budget, choose: Any | None) -> Decision:
    """With torch's AdamW everything is on the GPU, and activations have what is left."""
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    blocks = [replace(block, states=2 * block.grad) for block in blocks]
    weights, trained = (sum(getattr(b, kind) for b in blocks) for kind in ("weight", "grad"))
    states = States(gradients=trained, moments=2 * trained)
    chosen = choose(budget.gpu - weights, budget.host, states) if choose else None
    kept = keeping(chosen.sizes, run.tokens, chosen.ladder) if chosen else Kept()
    places = [Place() for _ in specs]
    host = HostRoom(specs, places, accumulates=False, kept_bytes=kept.hosted)
    return Decision(
        specs=specs,
        blocks=blocks,
        places=places,
        kept=kept,
        host=host,
        budget=budget,
        needed_bytes=0,  # the phases' peak tells
        sizes=chosen.sizes if chosen else None,
    )


def _decide_sharded(
    subject: Subject, sizes: Sizes, run: Run, machine: Machine, budget: Budget, engine: Layout
) -> Decision:
    """An engine has weights and states; activations get what is free when training begins."""
    p = subject.parameters
    pending = engine.pending(p)
    stand = engine.gradient(p.total) if engine.gradients_stand else 0
    taken = sum(engine.standing(p).values()) - engine.late(p) + stand
    budget = Budget(
        usable_bytes(machine.gpu_bytes - machine.held_bytes - taken),
        budget.host - engine.host(p),
    )
    kept, chosen = Kept(), None
    if run.model.class_type == "custom":
        states = States(gradients=pending.gradients, moments=pending.states)
        chosen = _choose(sizes, run, machine, budget.gpu, max(0, budget.host), states)
        kept = keeping(chosen.sizes, run.tokens, chosen.ladder)
    specs = state_blocks(subject.model, movable=False)
    places = [Place() for _ in specs]
    return Decision(
        specs=specs,
        blocks=[spec.sizes(accumulates=False) for spec in specs],
        places=places,
        kept=kept,
        host=HostRoom(specs, places, accumulates=False, kept_bytes=kept.hosted),
        budget=budget,
        needed_bytes=0,  # the phases' peak tells
        sizes=chosen.sizes if chosen else None,
    )


def _exchanges(subject: Subject, sizes: Sizes, run: Run, machine: Machine) -> list[Exchanged]:
    passes, p = run.gradient_accumulation_steps, subject.parameters
    if run.engine is None:
        return [averaged(p, machine, run.gpus)]
    found = exchanged(run.engine, p, machine, passes)
    return [found, shared_rows(sizes, run.tokens, machine)]


def _check_ranks(sizes: Sizes, tokens: int) -> None:
    if sizes.ranks > 1:
        groups = sizes.cut(tokens).head_groups
        check_shares(sizes.heads, sizes.kv_heads, groups, sizes.ranks)


def _problem(decision: Decision, phases: list[Phase], limit: int, held: int) -> str | None:
    """`held` bytes of the host are an engine's."""
    if held and decision.budget.host < decision.host.nbytes:
        needed, free = held + decision.host.nbytes, held + decision.budget.host
        return (
            f"{needed / GIB:.1f} GiB of host memory are needed in each process for states and "
            f"activations and {free / GIB:.1f} GiB may be used"
        )
    too_small = decision.gpu_problem() if decision.needed_bytes else None
    if problem := too_small or decision.host_problem():
        return problem
    most = peak(phases)
    if most.nbytes <= limit:
        return None
    return (
        f"{most.nbytes / GIB:.1f} GiB of GPU memory are needed in {most.name} and "
        f"{limit / GIB:.1f} GiB may be used"
    )
