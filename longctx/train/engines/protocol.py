"""What an engine is asked by the rest of longctx; the answers here are plain PyTorch's.

read, layout  the plan                                     what its file says, and means in bytes
prepare, check_device   before transformers opens the      the environment, defaults of options
                        process group
start      before the model is made                        checks, what must run by then
makes_dense, random_weights, fills_weights, gather_whole, whole_weight
                                                           while the model is made
adapters, needs_input_gradient, whole_adapters             of adapters over frozen weights
reshard    after passes without gradients
configure, clip_grad_norm, pending_bytes                   around a step
saved, resume_problem, resumed, checkpoint_copies, save_model       checkpoints
shutdown   the last line of a run that went well
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from longctx.errors import UserError
from longctx.loop.collectives import destroy_process_group
from longctx.memory.pending import Pending, pending_bytes
from longctx.train.engines.layout import Layout
from longctx.train.engines.row_sharing import asked_parallelism, share_rows
from longctx.train.options.config import TrainArguments
from longctx.train.options.limits import non_defaults

if TYPE_CHECKING:  # it imports datasets
    from transformers import Trainer


class Engine(ABC):
    """Lays out weights, gradients and optimizer states over processes and memory."""

    name: ClassVar[str]
    shards_states: ClassVar[bool] = True
    """Weights are kept in fp32 by the engine, over processes or in host memory."""
    steps_itself: ClassVar[bool] = False
    """The optimizer runs inside `backward`: a step cannot be skipped or run again."""
    keeps_options: ClassVar[tuple[str, ...]] = ()
    """Options that a resumed run has from its checkpoint, whatever is asked for."""
    exact_states: ClassVar[bool] = False
    """longctx's own optimizer places and updates the states."""
    shares_rows: ClassVar[bool] = False
    """Several processes may share each row."""
    hooks_layers: ClassVar[bool] = True
    """Whether it runs hooks around layers, which gather weights."""
    maps_optimizer: ClassVar[bool] = False
    """A checkpoint's optimizer is read by `torch.load`, which may map the file."""
    adapters: bool = False
    """The run trains adapters alone, over frozen weights: its trainer says so."""

    @classmethod
    @abstractmethod
    def requested(cls, options: Any) -> bool:
        """Whether the options (flags or TrainingArguments), or `accelerate launch` through the
        environment, ask for this engine."""

    def read(self, options: Any) -> None:
        """Reads its file, which the options name, or `accelerate launch`. Raises UserError."""
        return None

    def layout(self, processes: int, passes: int) -> Layout | None:
        """Returns where it keeps a model's bytes, by what it read; None if longctx's own optimizer
        decides. Raises UserError for what no plan knows."""
        return None

    # --- before the model --------------------------------------------------------------------

    def prepare(self, flags: Namespace) -> None:
        """Sets what must stand in the environment before transformers opens the process group,
        and the defaults of options that depend on the engine."""
        self.read(flags)
        if flags.bf16 is None:
            on_gpu = torch.cuda.is_available() and not flags.use_cpu
            flags.bf16 = self.shards_states and on_gpu and not flags.fp16

    def check_device(self, *, use_cpu: bool) -> None:
        """Raises UserError where the run's processes cannot train on the devices that there are.
        Without --use_cpu transformers opens no group of processes on CPUs: each would believe that
        it is the only one. Asked before it would."""
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes not in ("", "0", "1") and not (torch.cuda.is_available() or use_cpu):
            raise UserError(
                f"{processes} processes were started and torch finds no GPU: add --use_cpu to "
                "train on CPUs (`longctx doctor` says what this machine has)"
            )

    def start(self, args: TrainArguments) -> None:
        """Checks that the engine can run, and starts what must be there before the model.

        Raises UserError where it would fail later, or would silently be another one.
        """
        self.share_rows(args)
        self.check_options(args)

    def check_options(self, args: TrainArguments) -> None:
        """Raises UserError for options of longctx's own optimizer, where that is not this one's."""
        ours = ("optimizer_states", "place", "gpu_memory_gib", "plan", "save_fp32")
        if not self.exact_states and (asked := [f"--{n}" for n in ours if n in non_defaults(args)]):
            raise UserError(
                f"{', '.join(asked)}: {self.name} keeps fp32 states itself and decides where: "
                "leave it out, or run without an engine"
            )

    def check_adapters(self, args: TrainArguments, *, quantised: bool, whole: bool) -> None:
        """Raises UserError for adapters that it cannot train: over `quantised` weights, or beside
        `whole` modules that are trained as well."""
        if not self.shards_states:
            return
        if quantised:
            raise UserError(
                "--quantize nf4 is for runs without an engine, which would have to shard packed "
                "bytes with their scales: leave it out, or leave out --deepspeed and --fsdp"
            )
        if whole:
            raise UserError(
                "--lora_modules_to_save and --task reward train whole modules beside adapters, "
                "whose dtype differs from theirs under an engine: leave out --lora_r or what is "
                "trained as a whole, or leave out --deepspeed and --fsdp"
            )
        if args.fp16:
            raise UserError(
                "--fp16 with --lora_r under an engine would scale and cast fp32 adapters: use "
                "--bf16"
            )

    def share_rows(self, args: TrainArguments, attention: str | None = None) -> None:
        """Tells accelerate which processes share rows; `attention` is Hugging Face's name of it in
        a model that is not patched. Raises UserError where they cannot."""
        asked = asked_parallelism(args.parallelism_config)
        shards = args.sequence_parallel_size > 1 or (asked is not None and asked.total_size > 1)
        self.check_shares_rows(shards)
        share_rows(args, attention)

    def check_shares_rows(self, shards: bool, patched: bool = True) -> None:
        """Raises UserError where processes are to share rows and no engine lets them, of a model
        that is patched or of Hugging Face's own."""
        if shards and not self.shares_rows:
            raise UserError(
                "--sequence_parallel_size and a parallelism_config need an engine that shards "
                "weights and states: add --fsdp true --fsdp_config fsdp_configs/fsdp2.json"
            )

    # --- the model ---------------------------------------------------------------------------

    @property
    def makes_dense(self) -> bool:
        """Whether weights that a checkpoint has packed can be made dense while they are read."""
        return True

    @property
    def fills_weights(self) -> bool:
        """Whether this process' weights come from the first one: it needs none of its own."""
        return False

    def random_weights(self, device: torch.device, nbytes: int) -> AbstractContextManager[Any]:
        """Returns the context in which a preset's weights are made, given their bytes."""
        return torch.device(device)

    @property
    def needs_input_gradient(self) -> bool:
        """Whether its hooks around the first layer wait for the gradient of the layer's input, also
        where nothing below is trained."""
        return False

    def reshard(self, model: nn.Module) -> None:
        """Takes back what forward passes without a backward one have gathered and left."""
        return None

    def gather_whole(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Makes each decoder layer the unit whose weights are gathered and released as one."""
        return None

    def whole_weight(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Returns all of a weight that the engine is not to have, on a device. Every process calls
        it."""
        return parameter.data.to(device)

    # --- the trainer -------------------------------------------------------------------------

    def configure(self, trainer: Trainer, args: TrainArguments) -> None:
        """Completes the engine's settings where its file leaves them open ("auto" or absent)."""
        # The schedule exchanges tokens itself: accelerate would patch attention for a ring.
        trainer.accelerator._prepare_cp = lambda *prepared: prepared

    def row_group(self, accelerator: Accelerator) -> Any | None:
        """Returns the process group of those that share each row with this one: accelerate's for
        context parallelism."""
        mesh, shared = accelerator.torch_device_mesh, accelerator.parallelism_config
        return mesh["cp"].get_group() if shared and shared.cp_enabled else None

    def cut_group(self, accelerator: Accelerator) -> Any | None:
        """Returns the group of those that share rows which accelerate has cut for them."""
        return None

    def clip_grad_norm(
        self, accelerator: Accelerator, parameters: Iterable[Any], max_norm: float
    ) -> Tensor | None:
        """Clips gradients to `max_norm` and returns their norm; None: accelerate does it well."""
        return None

    def pending_bytes(self, model: PreTrainedModel) -> Pending:
        """Returns what weights, gradients and Adam will claim on the GPU in step 1."""
        return pending_bytes(model.parameters())

    # --- checkpoints -------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def saved(cls, checkpoint: Path) -> bool:
        """Whether this engine wrote the checkpoint."""

    def resume_problem(self, checkpoint: Path, args: TrainArguments) -> str | None:
        """Returns why this run cannot resume from the engine's own checkpoint, and what to do
        instead."""
        return None

    def resumed(self, trainer: Any) -> None:
        """Called when a checkpoint's states are loaded: restores what they do not hold."""
        return None

    def checkpoint_copies(self, args: TrainArguments, dtype: torch.dtype) -> int:
        """Returns the size of a checkpoint in copies of the model's weights, of `dtype`: themselves
        and Adam's moments."""
        return 3

    def whole_adapters(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the trained weights, whole, by name. Every process calls it."""
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def save_model(self, trainer: Any, path: Path, dtype: torch.dtype) -> None:
        """Writes the whole model as Hugging Face does, in `dtype`. Every process calls it."""
        trainer.save_model(str(path))

    # --- the end -----------------------------------------------------------------------------

    def shutdown(self, args: TrainArguments) -> None:
        """Ends a run that went well: the last line of the program.

        On CPUs with several processes it does not return: what is freed afterwards waits for gloo's
        thread, which may wait for Python's lock, for ever; or that thread aborts the process.
        """
        if destroy_process_group() and args.device.type == "cpu":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
