"""What a plan is made of: a model without storage, and the options of a run that decide about
memory and time.

The model has parameters on `meta`. Making it takes 10 ms per layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from longctx.any_model.declined import is_dropout, set_dropout_
from longctx.constants import GIB
from longctx.cost.images import Image, Images, Tower
from longctx.cost.machines import Machine
from longctx.cost.sizes import Sizes
from longctx.errors import UserError, one_line
from longctx.families.adapters import inside_peft
from longctx.families.blocks import decoder_layers, state_blocks, tower_block
from longctx.families.classes import is_classifier, without_storage
from longctx.families.families import (
    base_of,
    experts_of,
    family_of,
    layer_specs,
    mixes,
)
from longctx.families.matrices import stack_names, stacks
from longctx.families.strangers import why_not_scheduled
from longctx.families.vision import PREFIXES, rest_
from longctx.images.image_sizes import tower_sizes
from longctx.images.tower import trained_patches
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mlp_spec import MLP_WIDTH
from longctx.memory.place import Placement
from longctx.memory.states import BlockSpec
from longctx.runtime.peers import peer_kind, peer_sizes
from longctx.runtime.runtime import chunks_loss, model_sizes
from longctx.settings import LABELLED, PatchOptions, TaskName, scored_tokens
from longctx.system import installed
from longctx.train.engines.layout import Layout
from longctx.train.loading.packed_formats import Mxfp4Files, pack_shapes_
from longctx.train.loading.pretrained import packed_files
from longctx.train.lora.peft_adapters import with_lora
from longctx.train.lora.quantise import (
    leaves_experts,
    packed_bytes,
    quantise_shapes_,
    waits_on_host,
)
from longctx.train.lora.shapes import with_lora_shapes
from longctx.train.options.config import ModelArguments
from longctx.train.plan.any_layers import AnyLayers
from longctx.train.plan.engines import (
    parameters_of,
)

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
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
    """The number of images in each row."""
    image: Image | None = None
    """The size and the tokens of each image."""
    gpus: int = 1
    """The number of GPUs, with one process each."""
    sequence_parallel_size: int = 1
    """The number of GPUs that share each row."""
    engine: Layout | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a batch on one GPU."""
        rows = self.per_device_train_batch_size * self.model.seq_len
        return -(-rows // self.sequence_parallel_size)

    @property
    def image_tokens(self) -> int:
        """The number of a row's tokens that stand for images."""
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

    def having(self, **options: Any) -> PlannedRun:
        """Returns the run with other options."""
        model = {name: value for name, value in options.items() if name not in _OF_RUN}
        rest = {name: value for name, value in options.items() if name in _OF_RUN}
        return replace(self, model=replace(self.model, **model), **rest)


_OF_RUN = {field.name for field in fields(PlannedRun)}
"""The names of a run's own options. All others are the model's."""


class Subject:
    """A model without storage, of which runs are planned."""

    def __init__(
        self,
        config: PretrainedConfig,
        args: ModelArguments | None = None,
        device: torch.device | None = None,
        *,
        shards: bool = False,
    ) -> None:
        """Makes the model, with the adapters and the packed weights that `args` ask for, or their
        files, under an engine that `shards` weights or without one. `device` is the GPU that will
        train, where it is here: layers of --class_type any are measured on it.
        Raises UserError for a configuration of which no model can be made, or that the plan cannot
        read."""
        self.device = device
        if args is not None and args.dropout is not None:
            config = copy.deepcopy(config)
            set_dropout_(config, args.dropout)
        self.config, self.whole = config.get_text_config(), config
        wants_any = args is not None and args.class_type == "any"
        self._check_config(wants_any)
        self.model: Any = self._made(train_vision=args is not None and args.train_vision)
        base = base_of(self.model)
        self.why_not = None if base is None else why_not_scheduled(base, training=True)
        """Why Hugging Face's layers would run under --class_type custom; None if ours run."""
        ours = base is not None and self.why_not is None and (args is None or args.schedules)
        self.uncounted = _uncounted(base, self.config)
        """The parts of Hugging Face's layers whose cost is not counted; None if all are counted."""
        if not ours and not wants_any and self.uncounted:
            raise UserError(
                f"the model has {self.uncounted}, whose plan in Hugging Face's layers is unknown"
            )
        self.known = base is not None
        """Whether longctx knows the model's family."""
        self._chunks_loss = chunks_loss(self.model)
        self._made_of, self._kind = self.model.config, type(self.model)
        self._any: dict[str, AnyLayers] = {}
        source = None if args is None else args.source.under(shards=shards)
        self.packed = None if source is None else packed_files(source, config)
        """The packed weights of the model's files, in MXFP4 or FP8; None if they have none."""
        gguf = args is not None and str(args.model_name_or_path).endswith(".gguf")
        self.takes_nf4 = not (self.packed or gguf)
        """Whether --quantize nf4 takes the model's files."""
        self.quantised = args is not None and args.quantize != "none"
        if args is not None:
            self._adapt(args)
        self.count()

    def _check_config(self, wants_any: bool) -> None:
        """Raises UserError for a configuration without the sizes that the plan reads."""
        needed = ["hidden_size", "num_hidden_layers", "vocab_size"]
        if not wants_any:
            needed += ["num_attention_heads", *([] if family_of(self.config) else [MLP_WIDTH])]
        lacking = [n for n in needed if not isinstance(getattr(self.config, n, None), int)]
        if not (lacking or wants_any):
            lacking = [*_lacking_widths(self.config)]
        for name in lacking:
            raise UserError(f"the model's config has no {name}, which the plan needs")

    def _made(self, *, train_vision: bool) -> Any:
        """Returns the model without storage, its vision tower at rest unless that is trained."""
        try:
            model = without_storage(self.whole, DTYPE)
        except Exception as error:  # a file's values raise as many types as there are checks
            raise UserError(f"no model can be made of this config: {one_line(error)}") from error
        if model is None:
            kind = self.whole.model_type
            raise UserError(f"transformers has no class for models of type {kind!r}")
        if not train_vision:
            rest_(model)
        return model

    def _adapt(self, args: ModelArguments) -> None:
        """Gives the model the packed weights and the adapters that a run asks for."""
        if self.packed and self.packed.form:
            try:
                pack_shapes_(self.model, self.packed.form)
            except ValueError as error:
                raise UserError(f"{args.model_name_or_path}: {error}") from error
        if self.quantised:
            self.experts_bytes = self._made_bytes if leaves_experts(self.whole) else 0
            """Bytes of experts that a checkpoint in 4 bits has in 16."""
            quantise_shapes_(self.model)
            self._in_4_bits = packed_bytes(self.model)
        if args.lora_r is not None:
            # PEFT copies what is trained as a whole; its layers are six times slower to make.
            whole = args.lora_modules_to_save or is_classifier(self.whole)
            adapt = with_lora if whole and installed("peft") else with_lora_shapes
            with torch.device("meta"):
                self.model = adapt(self.model, args)

    def count(self) -> None:
        """Counts parameters, in blocks. Call it again if other parameters are trained."""
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._blocks: dict[tuple[bool, bool, bool], list[BlockSpec]] = {}
        self.parameters = parameters_of(self.model, self.blocks(movable=False))
        self.plans: list[tuple[tuple[PlannedRun, Machine, int], Any]] = []
        """The plans that were made of it (predict.py), each with what was asked for."""

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
        """Returns the bytes of the host that reading takes with `gpu_bytes` free on the GPU: those
        of weights that transformers makes there, and all of a model in 4 bits that the GPU does not
        hold."""
        if not self.quantised:
            return self._made_bytes
        packed = self._in_4_bits
        if self.experts_bytes:
            return self.experts_bytes + packed.nbytes
        waits = waits_on_host(packed, gpu_bytes)
        return packed.nbytes + packed.largest if waits else 0

    @cached_property
    def _made_bytes(self) -> int:
        """Bytes of the weights that transformers makes in host memory: those of experts, which it
        puts together from several tensors of a checkpoint, and all of a model in FP8 that it makes
        dense. It maps others from their files."""
        layers: Any = decoder_layers(inside_peft(self.model))
        form = self.packed.form if self.packed else None
        if self.packed and self.packed.name == "FP8" and form is None:
            return sum(x.nbytes for x in layers.parameters() if not x.requires_grad)
        if isinstance(form, Mxfp4Files):
            return 0  # a layer's experts are one tensor in the files
        return sum(
            owner.get_parameter(name).nbytes
            for owner in stacks(layers).values()
            for name in stack_names(owner)
        )

    @cached_property
    def tower(self) -> Tower | None:
        """The sizes of the vision tower, which a plan of text alone does not ask for; None if there
        is none."""
        return tower_sizes(inside_peft(self.model))

    def images(self, run: PlannedRun, machine: Machine) -> Images | None:
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

    def unknown(self, run: PlannedRun) -> str | None:
        """Returns why the cost of a layer of a run is unknown; None if its plan has it."""
        found = self.any_layers(run)
        return found.why_unknown(self.sizes(run)) if found else None

    @property
    def with_tower(self) -> bool:
        """Whether it is a vision-language model."""
        return self.whole.model_type in PREFIXES

    def adapted(self, args: ModelArguments, *, shards: bool = False) -> Subject:
        """Returns the same model with other adapters and packed weights."""
        return Subject(self.whole, args, self.device, shards=shards)

    def schedules(self, run: PlannedRun) -> bool:
        """Whether our schedule runs the layers, by the run's options and the configuration."""
        return run.model.schedules and self.why_not is None

    def declined(self, run: PlannedRun) -> str | None:
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

    def any_layers(self, run: PlannedRun) -> AnyLayers | None:
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

    def sizes(self, run: PlannedRun) -> Sizes:
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


def _lacking_widths(config: PretrainedConfig) -> Iterator[str]:
    """Yields the names of sizes that the parts of a known family's layers lack."""
    try:
        parts = [part for layer in layer_specs(config) for part in layer.parts]
    except AttributeError as error:  # of the configuration, which names what it has not
        yield error.name or str(error)
        return
    if not all(isinstance(getattr(part, "width", 1), int) for part in parts):
        yield MLP_WIDTH


def _uncounted(base: Any, config: PretrainedConfig) -> str | None:
    """Returns the parts of Hugging Face's layers whose cost is not counted; None if all are
    counted. `base` is None for a model of no known family."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if base is not None and mixes(base.config):
        return "mixers"
    if not experts:
        return None
    if base is None or experts_of(base.config) is None:
        return "experts"
    attends = (layer.part(AttentionSpec) for layer in layer_specs(base.config))
    if any(spec.sinks for spec in attends if spec):  # attention in plain torch holds all scores
        return "attention sinks"
    return None
