"""Loads the teacher of `--task distill`: frozen, patched, its layers in host memory.

Layers come to the GPU one after the other while the ones before them compute (memory/stream.py), as
a frozen base under adapters does, so that a teacher takes two of its layers and its lm_head of the
GPU. Several processes, or a CPU, hold it whole.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.constants import GIB
from longctx.cost.sizes import Batch
from longctx.errors import UserError, many, print_rank0
from longctx.families.blocks import move_buffers, move_scales, state_blocks
from longctx.memory.decide import decide, gpu_budget
from longctx.memory.ladder import Budget, Step
from longctx.memory.machine import host_budget, host_share_bytes
from longctx.memory.settle import leaving_bytes
from longctx.memory.store import free_gpu_bytes
from longctx.memory.stream import StateStream
from longctx.runtime.costs import StepTable
from longctx.runtime.peers import idle_sizes
from longctx.runtime.runtime import NO_RATES
from longctx.train.data.pack.cache import digest
from longctx.train.data.text.tokenizer import read_tokenizer
from longctx.train.engines import Engine
from longctx.train.loading.pretrained import computed_by, weights_identity
from longctx.train.options.config import ModelArguments, TrainArguments
from longctx.train.start.loading import load_config, load_model
from longctx.train.tasks.distill import Teacher
from longctx.train.trainer.nonfinite import broken_weight


def teacher_arguments(model_args: ModelArguments, args: TrainArguments) -> ModelArguments:
    """Returns the options of a run's model for its teacher, which computes as the student does."""
    return model_args.of_another(
        args.teacher,
        class_type="custom",
        quantize=args.teacher_quantize,
        rope_scaling="none",
        extend_context=True,  # what RoPE does beyond its positions is said
    )


def check_teacher(
    model_args: ModelArguments,
    args: TrainArguments,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
) -> PretrainedConfig:
    """Returns the teacher's configuration. Raises UserError for one that cannot be read, for an
    engine, which would shard it with the student, and for a vocabulary that is not the student's:
    divergences compare entry by entry."""
    if engine.shards_states:
        raise UserError(
            "--task distill runs without an engine, where a teacher's layers wait on the host: "
            "leave out --deepspeed and --fsdp"
        )
    theirs = load_config(
        teacher_arguments(model_args, args),
        vocab_size=len(tokenizer),
        flag="--teacher",
        frozen=True,
    )
    sizes = [c.get_text_config().vocab_size for c in (theirs, config)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"--teacher {args.teacher}: its vocabulary has {sizes[0]} entries, the student's "
            f"{sizes[1]}: distillation needs two models of one vocabulary"
        )
    try:
        words = read_tokenizer(str(args.teacher), trust_remote_code=False).get_vocab()
    except UserError:  # a folder of weights alone: their sizes are all that can be compared
        return theirs
    ours = tokenizer.get_vocab()
    if differing := sorted(word for word in ours if words.get(word) != ours[word]):
        shown = ", ".join(map(repr, differing[:3]))
        raise UserError(
            f"--teacher {args.teacher}: its tokenizer gives other numbers than the student's to "
            f"{many(len(differing), 'token')} ({shown}): distillation needs two models of one "
            "vocabulary"
        )
    return theirs


def teacher_identity(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig
) -> str:
    """Returns what tells the teacher's weights and configuration from those of another one."""
    source = teacher_arguments(model_args, args).source
    return digest(weights_identity(source, config) or source.name, computed_by(config))


def load_teacher(
    model_args: ModelArguments, args: TrainArguments, config: PretrainedConfig
) -> Teacher:
    """Loads the teacher and puts it where it waits. Raises UserError where there is no room."""
    asked, device = teacher_arguments(model_args, args), args.device
    moves = device.type == "cuda" and args.world_size == 1
    model: Any = load_model(asked, config, device=device, role="teacher")
    model = model.eval().requires_grad_(False)
    if name := broken_weight(model):
        raise UserError(f"--teacher {args.teacher}: its weight {name} is not finite: get it again")
    if not moves:
        move_scales(model.to(device))
        return Teacher(model, lambda: None)
    move_buffers(model, device)
    specs = state_blocks(model, movable=True, head_movable=False)
    free = gpu_budget(free_gpu_bytes(device), args.gpu_memory_gib)
    on_host = host_share_bytes() + leaving_bytes(specs, device)
    budget = Budget(free, host_budget(on_host, model_args.host_memory_gib))
    step = Step(
        count=StepTable.of,
        sizes=idle_sizes(sum(spec.layer is not None for spec in specs)),
        batch=Batch(1, 1),
        rates=NO_RATES,
        offload="none",
    )
    decided = decide(specs, budget, placement="host", accumulates=False, step=step)
    if problem := decided.gpu_problem() or decided.host_problem():
        raise UserError(f"--teacher {args.teacher}: {problem}")
    decided.host.settle(device, None, ())
    stream = StateStream(decided.host.blocks, device)
    print_rank0(
        f"teacher: {decided.host.nbytes / GIB:.2f} GiB of its weights wait on the host, frozen"
    )
    return Teacher(model, stream.flush, stream)
