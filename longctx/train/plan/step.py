"""The step of a run as its plan sees it: the attention that computes it, the memory that it may
take, what other GPUs exchange in it, and where its states live.

Where everything lives comes from the function that decides in the run itself (memory/decide.py) or,
if an engine holds weights and states, from the engine's layout (engines.py).
"""

from __future__ import annotations

from dataclasses import replace

from longctx.attention.backends import BACKENDS, lacks
from longctx.constants import GIB
from longctx.cost.fitted import GRAPHED_TOKENS
from longctx.cost.machines import Machine
from longctx.cost.seconds import Exchanged
from longctx.cost.sizes import Batch, Sizes
from longctx.errors import UserError
from longctx.families.families import (
    has_windows,
    score_cap,
)
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.memory.decide import Decision, decide, decided, gpu_budget, keeping
from longctx.memory.ladder import Budget, Step, choose
from longctx.memory.levels import Levels, pending_levels
from longctx.memory.machine import host_budget
from longctx.memory.place import Place, usable_bytes
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import NO_SHARES, check_shares
from longctx.train.engines.layout import Layout
from longctx.train.plan.engines import (
    averaged,
    exchanged,
    shared_rows,
)
from longctx.train.plan.subject import PlannedRun, Subject


def backend_of(subject: Subject, run: PlannedRun, machine: Machine) -> str:
    """Returns the backend whose rates attention has. Raises UserError for one without rates."""
    asked, config = run.model.attn_backend, subject.config
    if subject.schedules(run):
        needs = dict(windows=has_windows(config), softcap=score_cap(config) is not None)
        unfit = {name: lacks(name, **needs) for name in machine.attention}
        if asked == "auto":
            fit = [name for name, reason in unfit.items() if reason is None]
            if not fit:
                raise UserError(
                    f"the model caps attention's scores, and of the backends that do none is timed "
                    f"on {machine.name}: no plan"
                )
            return fit[0]
        if reason := unfit.get(asked):
            raise UserError(reason)
    known = {"auto": "cudnn", "sdpa": "cudnn", "fa2": "flash"}.get(asked, asked)
    if run.model.class_type == "any" and known not in machine.attention:
        return next(iter(machine.attention))  # whose rates are of attention, which layers have
    if known not in machine.attention:
        names = ", ".join(machine.attention)
        raise UserError(
            f"--attn_backend {asked} is not known on {machine.name}: plan with auto or {names}"
        )
    return known


def budget_of(run: PlannedRun, machine: Machine, host_bytes: int) -> tuple[Budget, int]:
    """Returns the budgets of GPU and host, and the bytes that the GPU's allocator may take."""
    limit = free = machine.gpu_bytes - machine.held_bytes
    if run.gpu_memory_gib:
        if run.gpu_memory_gib > machine.gpu_gib:
            raise UserError(
                f"--gpu_memory_gib {run.gpu_memory_gib:g} is more than the {machine.gpu_gib:.1f} "
                f"GiB of {machine.name}"
            )
        limit = min(limit, int(run.gpu_memory_gib * GIB))
    gpu = gpu_budget(free, run.gpu_memory_gib)
    left = max(0, host_bytes - machine.started_bytes)
    host = host_budget(left, run.model.host_memory_gib)
    if machine.lockable_bytes is not None:
        host = min(host, machine.lockable_bytes)
    return Budget(gpu, host), limit


def step_of(subject: Subject, run: PlannedRun, machine: Machine, backend: str) -> Step:
    """Returns the step that the runtime of a patched model would choose for
    (runtime/runtime.py)."""
    sizes, document = subject.sizes(run), min(run.tokens, run.model.seq_len)
    images = subject.images(run, machine)
    writes = run.sequence_parallel_size == 1 and BACKENDS[backend].writes_gradients
    fuses = BACKENDS[backend].fuses_sinks
    sizes = replace(sizes, writes_gradients=writes, fuses_sinks=fuses)
    in_images = run.per_device_train_batch_size * run.image_tokens
    batch = Batch(
        run.tokens, document, run.gradient_accumulation_steps, run.scored_tokens, in_images
    )
    rates = machine.rates(backend, document, *sizes.scores)
    step = Step(count=StepTable.of, sizes=sizes, batch=batch, rates=rates, offload="none")
    if run.model.class_type == "any":
        return replace(step, keep="x", offload=run.model.offload_activations)
    if not subject.schedules(run):
        return step
    graphs = run.model.cuda_graphs == "auto" and run.tokens <= GRAPHED_TOKENS
    if images is not None and images.tower.deepstack:
        graphs = False  # layers that add features of images run eagerly
    alone = run.engine is None and run.sequence_parallel_size == 1
    of_images = 0
    if images is not None:  # exact states have a block of the tower's weights
        placed = run.engine is None and run.exact
        of_images = images.batch_bytes if placed else images.forward_bytes
    return replace(
        step,
        keep=run.model.keep,
        offload=run.model.offload_activations,
        graphs=graphs and run.gpus == 1 and run.engine is None,
        again=alone,
        beside_bytes=of_images,
    )


def decision_of(
    subject: Subject, step: Step, run: PlannedRun, machine: Machine, budget: Budget
) -> Decision:
    """Returns where weights, states and activations live, and what layers keep."""
    if run.engine is not None:
        return _decide_sharded(subject, step, run, machine, budget, run.engine)
    if not run.exact:
        return _as_weights(subject, step, run, budget)
    specs = subject.blocks(
        movable=subject.schedules(run) and run.gpus == 1,
        head_movable=run.task == "sft",  # whose loss is done with lm_head in forward
        with_tower=run.image is not None,
    )
    return decide(
        specs,
        budget,
        placement=run.place,
        accumulates=run.gradient_accumulation_steps > 1,
        several=run.gpus > 1,
        step=step,
    )


def _as_weights(subject: Subject, step: Step, run: PlannedRun, budget: Budget) -> Decision:
    """Returns the decision for torch's AdamW: all states are on the GPU, and activations get what
    is left."""
    specs = subject.blocks(movable=False)
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    blocks = [replace(block, states=2 * block.grad) for block in blocks]
    levels = Levels(blocks, "gpu", accumulates=step.batch.passes > 1)
    chosen = choose(step, [levels], budget)
    return decided(specs, blocks, chosen, budget, keeping(step, chosen), False)


def _decide_sharded(
    subject: Subject, step: Step, run: PlannedRun, machine: Machine, budget: Budget, engine: Layout
) -> Decision:
    """Returns the decision under an engine, which holds weights and states: activations get what is
    free when training begins."""
    p = subject.parameters
    stand = engine.gradient(p, p.total) if engine.gradients_stand else 0
    taken = sum(engine.standing(p).values()) - engine.late(p) + stand
    budget = Budget(
        usable_bytes(machine.gpu_bytes - machine.held_bytes - taken),
        budget.host - engine.host(p),
    )
    pending = engine.pending(p)
    levels = pending_levels(step.sizes.layers, *pending, accumulates=step.batch.passes > 1)
    chosen = choose(step, [levels], Budget(budget.gpu, max(0, budget.host)))
    specs = subject.blocks(movable=False)
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    chosen = replace(chosen, places=[Place() for _ in specs])
    return decided(specs, blocks, chosen, budget, keeping(step, chosen), False)


def exchanges_of(
    subject: Subject, sizes: Sizes, run: PlannedRun, machine: Machine
) -> tuple[Exchanged, ...]:
    passes, p = run.gradient_accumulation_steps, subject.parameters
    if run.engine is None:
        return (averaged(p, machine, run.gpus),)
    found = exchanged(run.engine, p, machine, passes)
    return found, shared_rows(sizes, run.tokens, machine)


def check_ranks(sizes: Sizes, tokens: int) -> None:
    """Raises UserError for layers whose heads the GPUs that share rows cannot share."""
    if sizes.ranks > 1:
        groups = sizes.cut(tokens).head_groups
        for kind in sizes.kinds:
            if kind.runs_modules:
                raise UserError(NO_SHARES)
            spec = kind.one(AttentionSpec)
            check_shares(spec.heads, spec.kv_heads, groups, sizes.ranks)
