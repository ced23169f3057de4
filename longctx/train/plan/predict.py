"""Plans a run: from a model, a run and a machine it predicts whether the run fits, its bytes and
its seconds. Where everything lives comes from the function that decides in the run itself
(decide.py) or, if an engine holds weights and states, from the engine's layout (engines.py).

The model has parameters without storage (`meta`). Making it takes 10 ms per layer; a plan of it
then takes about 20 ms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from longctx.any_model.declined import is_dropout, set_dropout_
from longctx.attention.backends import BACKENDS, lacks
from longctx.constants import GIB
from longctx.cost.fitted import GRAPHED_TOKENS, PROCESS_BYTES
from longctx.cost.images import Image, Images, Tower, with_images
from longctx.cost.machines import Machine
from longctx.cost.peak import Phase, peak, phases
from longctx.cost.seconds import Exchanged, Seconds
from longctx.cost.sizes import Batch, Parameters, Sizes
from longctx.errors import UserError, one_line
from longctx.families.adapters import inside_peft
from longctx.families.blocks import decoder_layers, state_blocks, tower_block
from longctx.families.classes import is_classifier, without_storage
from longctx.families.families import (
    base_of,
    family_of,
    has_windows,
    known_family,
    mixes,
    score_cap,
)
from longctx.families.family import MLP_WIDTH
from longctx.families.matrices import stack_names, stacks
from longctx.families.strangers import why_not_scheduled
from longctx.families.vision import PREFIXES, rest_
from longctx.images.image_sizes import tower_sizes
from longctx.images.tower import trained_patches
from longctx.memory.decide import Decision, decide, decided, gpu_budget, keeping
from longctx.memory.ladder import Budget, Step, choose, displayed, predicted
from longctx.memory.levels import Levels, pending_levels
from longctx.memory.machine import host_budget
from longctx.memory.place import Place, PlacedStates, Placement, usable_bytes
from longctx.memory.states import BlockSpec
from longctx.runtime.costs import StepTable
from longctx.runtime.peers import peer_kind, peer_sizes
from longctx.runtime.runtime import NO_SHARES, check_shares, chunks_loss, model_sizes
from longctx.settings import LABELLED, PatchOptions, TaskName, scored_tokens
from longctx.system import installed
from longctx.train.engines.layout import Layout
from longctx.train.loading.pretrained import made_dense
from longctx.train.lora.adapters import with_lora
from longctx.train.lora.quantise import packed_bytes, quantise_shapes_, waits_on_host
from longctx.train.lora.shapes import with_lora_shapes
from longctx.train.options.config import ModelArguments
from longctx.train.plan.any_layers import AnyLayers
from longctx.train.plan.engines import (
    ShardedStates,
    averaged,
    exchanged,
    parameters_of,
    shared_rows,
)

DTYPE = torch.bfloat16
SHORTEST = 512
"""Tokens. The longest row that fits is found as a multiple of this."""
LONGEST = 2**24


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of a run that decide about memory and time, by their names."""

    model: ModelArguments
    place: Placement = "auto"
    gpu_memory_gib: float | None = None
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    exact: bool = True
    """Whether AdamW has fp32 states and masters; else it is torch's, in the weights' dtype."""
    document_tokens: int | None = None
    """Tokens of a document; None: as many as a row's."""
    task: TaskName = "sft"
    answer_tokens: int | None = None
    """Tokens of each of a prompt's two answers, which end a row; None: half of a row each."""
    images: int = 0
    """Images in each row."""
    image: Image | None = None
    """What the model makes of each of them."""
    gpus: int = 1
    """The number of GPUs, with one process each."""
    sequence_parallel_size: int = 1
    """How many GPUs share each row."""
    engine: Layout | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a batch on one GPU."""
        rows = self.per_device_train_batch_size * self.model.seq_len
        return -(-rows // self.sequence_parallel_size)

    @property
    def image_tokens(self) -> int:
        """The tokens of a row that are of images."""
        return 0 if self.image is None else self.images * self.image.tokens

    @property
    def scores(self) -> bool:
        """Whether the loss is made of log-probabilities of answers."""
        return self.task not in LABELLED

    @property
    def scored_tokens(self) -> int | None:
        """Tokens of a batch on one GPU of whose log-probabilities the loss is made; None: its
        labels' loss."""
        row = self.model.seq_len
        answers = row if self.answer_tokens is None else min(2 * self.answer_tokens, row)
        rows = self.per_device_train_batch_size * answers
        return scored_tokens(self.task, -(-rows // self.sequence_parallel_size))

    def value(self, option: str) -> Any:
        return getattr(self if option in _OF_RUN else self.model, option)

    def having(self, **options: Any) -> Run:
        """Returns the run with other options."""
        model = {name: value for name, value in options.items() if name not in _OF_RUN}
        rest = {name: value for name, value in options.items() if name in _OF_RUN}
        return replace(self, model=replace(self.model, **model), **rest)


_OF_RUN = {field.name for field in fields(Run)}
"""The names of a run's own options. All others are the model's."""


class Subject:
    """A model without storage, of which runs are planned."""

    def __init__(
        self,
        config: PretrainedConfig,
        args: ModelArguments | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Makes the model, with the adapters and the 4-bit weights that `args` ask for. `device` is
        the GPU that will train, where it is here: layers of --class_type any are measured on it.
        Raises UserError for a configuration of which no model can be made, or that the plan cannot
        read."""
        self.device = device
        if args is not None and args.dropout is not None:
            config = copy.deepcopy(config)
            set_dropout_(config, args.dropout)
        text = config.get_text_config()
        family = family_of(text)
        width = MLP_WIDTH if family is None else family.width
        needed = ("hidden_size", "num_hidden_layers", "vocab_size")
        wants_any = args is not None and args.class_type == "any"
        for name in needed if wants_any else (*needed, width, "num_attention_heads"):
            if not isinstance(getattr(text, name, None), int):
                raise UserError(f"the model's config has no {name}, which the plan needs")
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
        self.config, self.whole = text, config
        try:
            self.model: Any = without_storage(config, DTYPE)
        except Exception as error:  # a file's values raise as many types as there are checks
            raise UserError(f"no model can be made of this config: {one_line(error)}") from error
        if self.model is None:
            raise UserError(f"transformers has no class for models of type {config.model_type!r}")
        if args is None or not args.train_vision:
            rest_(self.model)
        base = base_of(self.model)
        self.why_not = None if base is None else why_not_scheduled(base, training=True)
        """Why Hugging Face's layers would run under --class_type custom; None where ours do."""
        ours = base is not None and self.why_not is None and (args is None or args.schedules)
        self.uncounted = _uncounted(base, bool(experts))
        """The parts that nobody has counted in Hugging Face's layers; None if all are."""
        if not ours and not wants_any and self.uncounted:
            raise UserError(
                f"the model has {self.uncounted}, whose plan in Hugging Face's layers is unknown"
            )
        self.known = base is not None
        """Whether longctx knows the model's family."""
        self._chunks_loss = chunks_loss(self.model)
        self._made_of, self._kind = self.model.config, type(self.model)
        self._any: dict[str, AnyLayers] = {}
        self.packed = None if args is None else made_dense(args.source, config)
        """MXFP4 or FP8 if weights of such files are made dense while they are read."""
        gguf = args is not None and str(args.model_name_or_path).endswith(".gguf")
        self.takes_nf4 = not (self.packed or gguf)
        """Whether --quantize nf4 takes the model's files."""
        self.quantised = args is not None and args.quantize != "none"
        if self.quantised:
            quantise_shapes_(self.model)
            self._in_4_bits = packed_bytes(self.model)
        if args is not None and args.lora_r is not None:
            # PEFT copies what is trained as a whole; its layers are six times slower to make.
            whole = args.lora_modules_to_save or is_classifier(config)
            adapt = with_lora if whole and installed("peft") else with_lora_shapes
            with torch.device("meta"):
                self.model = adapt(self.model, args)
        self.count()

    def count(self) -> None:
        """Counts parameters, in blocks. To be called again if others of the model's are trained."""
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._blocks: dict[tuple[bool, bool, bool], list[BlockSpec]] = {}
        self.parameters = parameters_of(self.model, self.blocks(movable=False))
        self.plans: list[tuple[tuple[Run, Machine, int], Plan]] = []
        """The plans that were made of it."""

    def blocks(
        self, *, movable: bool, head_movable: bool = True, with_tower: bool = False
    ) -> list[BlockSpec]:
        """Returns the model's `state_blocks`, also of the vision tower. A plan that does not fit
        is made 30 times, and the blocks of 512 layers take 0.1 s."""
        asked = movable, head_movable, with_tower
        if asked not in self._blocks:
            found = state_blocks(self.model, movable=movable, head_movable=head_movable)
            if with_tower:  # what is frozen is at rest here, and in none of these
                names = {p: name for name, p in self.model.named_parameters()}
                block = tower_block(self.model, names, movable=movable)
                found[1:1] = [block] if block else []
            self._blocks[asked] = found
        return self._blocks[asked]

    def reading_bytes(self, gpu_bytes: int) -> int:
        """Bytes of the host that reading takes, beside a GPU with so many free: those of weights
        that transformers makes there, and all of a model in 4 bits that such a GPU does not hold.
        """
        if not self.quantised:
            return self._made_bytes
        packed = self._in_4_bits
        waits = waits_on_host(packed, gpu_bytes)
        return packed.nbytes + packed.largest if waits else 0

    @cached_property
    def _made_bytes(self) -> int:
        """Bytes of the weights that transformers makes in host memory: those of experts, which it
        puts together from several tensors of a checkpoint, and all of a model in FP8. It maps
        others from their files."""
        layers: Any = decoder_layers(inside_peft(self.model))
        if self.packed == "FP8":
            return sum(x.nbytes for x in layers.parameters() if not x.requires_grad)
        return sum(
            owner.get_parameter(name).nbytes
            for owner in stacks(layers).values()
            for name in stack_names(owner)
        )

    @cached_property
    def tower(self) -> Tower | None:
        """The sizes of the vision tower, which a plan of text alone does not ask for; None where
        nothing does."""
        return tower_sizes(inside_peft(self.model))

    def images(self, run: Run, machine: Machine) -> Images | None:
        """Returns the images of a run's batch on one GPU; None where rows have text alone."""
        if run.image is None or self.tower is None:
            return None
        gib = min(machine.gpu_gib, run.gpu_memory_gib or machine.gpu_gib)
        return Images(
            tower=replace(self.tower, trained_group=trained_patches(int(gib * GIB))),
            image=run.image,
            count=run.per_device_train_batch_size * run.images,
            trained=run.model.train_vision,
        )

    def unknown(self, run: Run) -> str | None:
        """Returns why nobody knows what a layer of a run takes; None if its plan has it."""
        found = self.any_layers(run)
        return found.why_unknown(self.sizes(run)) if found else None

    @property
    def with_tower(self) -> bool:
        """Whether it is a vision-language model."""
        return self.whole.model_type in PREFIXES

    def adapted(self, args: ModelArguments) -> Subject:
        """Returns the same model with other adapters and 4-bit weights."""
        return Subject(self.whole, args, self.device)

    def schedules(self, run: Run) -> bool:
        """Whether our schedule runs the layers, by the run's options and the configuration."""
        return run.model.schedules and self.why_not is None

    def declined(self, run: Run) -> str | None:
        """Returns what is said of a run of class_type custom whose layers are Hugging Face's."""
        if not run.model.schedules or self.why_not is None:
            return None
        ours = "; with --dropout 0 ours do" if self.drops else ""
        return f"Hugging Face's layers run for calls with {self.why_not}{ours}"

    @cached_property
    def drops(self) -> bool:
        """Whether our schedule would run without the configuration's dropouts."""
        return self.why_not is not None and is_dropout(self.whole, self.why_not)

    @cached_property
    def _scheduled(self) -> Sizes:
        """The dimensions that the schedule sees, whatever the options of a run."""
        return model_sizes(inside_peft(self.model), PatchOptions(), DTYPE)

    def any_layers(self, run: Run) -> AnyLayers | None:
        """Returns what is known of layers of --class_type any; None for a run of another."""
        if run.model.class_type != "any":
            return None
        backend = run.model.attn_backend
        if backend not in self._any:
            self._any[backend] = AnyLayers(
                config=self._made_of,
                kind=self._kind,
                backend=backend,
                device=self.device,
                counts=self.known and self.uncounted is None,
                dtype=DTYPE,
            )
        return self._any[backend]

    def sizes(self, run: Run) -> Sizes:
        if self.schedules(run):
            model = run.model
            sizes = replace(
                self._scheduled, tile_tokens=model.tile_tokens, head_groups=model.head_groups
            )
        else:
            class_type, chunks = peer_kind(run.model.patch_options)
            found = self.any_layers(run)
            chunks = chunks and (found.chunks_loss if found else self._chunks_loss)
            sizes = peer_sizes(self.model, class_type, DTYPE.itemsize, chunks_loss=chunks)
            sizes = found.sizes(sizes) if found else sizes
        return replace(sizes, ranks=run.sequence_parallel_size, exact=run.exact)


def _uncounted(base: Any, experts: bool) -> str | None:
    """Returns the parts that nobody has counted in Hugging Face's layers (`base` is None for a
    model of no known family); None if all are."""
    if base is not None and mixes(base.config):
        return "mixers"
    if not experts:
        return None
    if base is None or known_family(base).router is None:
        return "experts"
    if "sinks" in known_family(base).parameters:  # its attention in plain torch holds all scores
        return "attention sinks"
    return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prediction of a run: what it will do, and what it will take."""

    run: Run
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
    """Why nobody knows what a layer takes, neither its memory nor its seconds; None if they are
    planned."""

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
    run: Run,
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
    subject: Subject, run: Run, machine: Machine, host_bytes: int, having: Callable[[Step], Step]
) -> Plan:
    alone, machine = machine, machine.among(run.gpus)
    backend = _backend(subject, run, machine)
    budget, limit = _budget(run, machine, host_bytes // run.gpus)
    step, engine = having(_step(subject, run, machine, backend)), run.engine
    images = subject.images(run, machine)
    accumulates = run.gradient_accumulation_steps > 1
    if engine is not None:
        decision = _decide_sharded(subject, step, run, machine, budget, engine)
    elif run.exact:
        movable = subject.schedules(run) and run.gpus == 1
        head_movable = run.task == "sft"  # whose loss is done with lm_head in forward
        with_tower = run.image is not None
        specs = subject.blocks(movable=movable, head_movable=head_movable, with_tower=with_tower)
        decision = decide(
            specs,
            budget,
            placement=run.place,
            accumulates=accumulates,
            several=run.gpus > 1,
            step=step,
        )
    else:
        decision = _as_weights(subject, step, run, budget)
    chosen = decision.chosen
    _check_ranks(chosen.sizes, run.tokens)
    standing = (
        PlacedStates(decision.blocks, decision.places, accumulates=accumulates)
        if engine is None
        else ShardedStates(engine, subject.parameters, step.sizes.layers, accumulates)
    )
    document = min(run.document_tokens or run.model.seq_len, run.model.seq_len)
    timed = replace(
        step,
        batch=step.batch._replace(document=document),
        rates=machine.rates(backend, document, *step.sizes.scores),
        exchanges=_exchanges(subject, chosen.sizes, run, machine),
    )
    process, held = PROCESS_BYTES, 0
    if engine is not None:
        process, held = int(engine.process_gib * GIB), engine.host(subject.parameters)
    found = phases(step.count(chosen.sizes, step.batch), chosen.ladder, standing)
    if images is not None:
        placed = zip(decision.specs, decision.places, strict=True)
        images = replace(images, away=any(not p.weight for spec, p in placed if spec.tower))
        found = with_images(found, images, standing)
    on_gpu = alone.gpu_bytes - alone.held_bytes
    reading = process + (subject.reading_bytes(on_gpu) if engine is None else 0)
    if more := chosen.graph_bytes:
        found = [Phase(name, {**buffers, "CUDA graphs": more}) for name, buffers in found]
    return Plan(
        run=run,
        machine=alone,
        sizes=chosen.sizes,
        backend=(known := subject.any_layers(run)) and known.said() or backend,
        decision=decision,
        phases=found,
        seconds=_with_tower(predicted(timed, chosen), images, step),
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


def _reading_problem(subject: Subject, reading_bytes: int, host_bytes: int) -> str | None:
    """Returns why the model cannot be read into the free memory of the host; None if it can."""
    if reading_bytes <= host_bytes:
        return None
    what, way = "the experts, which transformers puts together", _BY_LAYER
    if subject.packed:
        what, way = "the weights, which transformers makes dense", f"a copy in bfloat16 and {way}"
    if subject.quantised:
        what, way = (
            "the weights in 4 bits, which the GPU does not hold",
            "a GPU that holds them all",
        )
    return (
        f"{reading_bytes / GIB:.1f} GiB of host memory are needed to read {what} there, and "
        f"{host_bytes / GIB:.1f} are free: {way}"
    )


_BY_LAYER = "--quantize nf4 reads them layer by layer"


def _with_tower(found: Seconds, images: Images | None, step: Step) -> Seconds:
    """Returns the seconds of a step with those in which images are seen."""
    if images is None:
        return found
    return found._replace(images=step.batch.passes * images.seconds(step.rates))


def longest(
    subject: Subject, run: Run, machine: Machine, host_bytes: int, most: int = LONGEST
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


def _backend(subject: Subject, run: Run, machine: Machine) -> str:
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


def _budget(run: Run, machine: Machine, host_bytes: int) -> tuple[Budget, int]:
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


def _step(subject: Subject, run: Run, machine: Machine, backend: str) -> Step:
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
    beside = 0
    if images is not None:  # exact states have a block of the tower's weights
        placed = run.engine is None and run.exact
        beside = images.batch_bytes if placed else images.forward_bytes
    return replace(
        step,
        keep=run.model.keep,
        offload=run.model.offload_activations,
        graphs=graphs and run.gpus == 1 and run.engine is None,
        again=alone,
        beside_bytes=beside,
    )


def _as_weights(subject: Subject, step: Step, run: Run, budget: Budget) -> Decision:
    """Returns the decision for torch's AdamW: all states are on the GPU, and activations get what
    is left."""
    specs = subject.blocks(movable=False)
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    blocks = [replace(block, states=2 * block.grad) for block in blocks]
    levels = Levels(blocks, "gpu", accumulates=step.batch.passes > 1)
    chosen = choose(step, [levels], budget)
    return decided(specs, blocks, chosen, budget, keeping(step, chosen), False)


def _decide_sharded(
    subject: Subject, step: Step, run: Run, machine: Machine, budget: Budget, engine: Layout
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


def _exchanges(subject: Subject, sizes: Sizes, run: Run, machine: Machine) -> tuple[Exchanged, ...]:
    passes, p = run.gradient_accumulation_steps, subject.parameters
    if run.engine is None:
        return (averaged(p, machine, run.gpus),)
    found = exchanged(run.engine, p, machine, passes)
    return found, shared_rows(sizes, run.tokens, machine)


def _check_ranks(sizes: Sizes, tokens: int) -> None:
    if sizes.ranks > 1:
        groups = sizes.cut(tokens).head_groups
        for kind in sizes.kinds:
            if kind.mixer is not None:
                raise UserError(NO_SHARES)
            check_shares(kind.heads, kind.kv_heads, groups, sizes.ranks)


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
