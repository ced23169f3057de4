"""Trainer with exact AdamW (longctx/memory): it is made where its states belong, saved and loaded
block by block, and no reader sees an update that still waits for its block's next forward.

Such an update ends, `flush`, before weights are saved or looked at as a whole, and before a
callback that is neither transformers' nor longctx's (callbacks.py). A forward, of an evaluation
too, needs no flush: each block's update ends before its module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME

from longctx.constants import GIB
from longctx.errors import UserError, print_rank0
from longctx.families.adapters import inside_peft
from longctx.families.blocks import move_buffers, move_scales
from longctx.families.vision import at_rest
from longctx.loop.lora_plus import has_adapters, with_rates
from longctx.loop.states import limit_gpu, place_states
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.store import free_gpu_bytes
from longctx.settings import TaskName
from longctx.train.lora.foreign import check_resumed
from longctx.train.options.config import TrainArguments
from longctx.train.options.exact_states import uses_exact_states
from longctx.train.output.resume import (
    apply_learning_rate,
    check_states,
    explained_damage,
    require_whole_best,
)
from longctx.train.output.state_files import read_states, state_files, write_states
from longctx.train.plan.written_plan import read_given

SHARD_BYTES = 4 * 10**9
SCHEDULED = "longctx_groups"
"""The key of what schedulers change of the optimizer's groups besides their own state: they trust
the optimizer's states to have it, which are written by weights."""
Method = TypeVar("Method", bound=Callable[..., Any])


def overrides(method: Method) -> Method:
    """Marks a method that stands in for one of Trainer's own; one that is gone there would silently
    never be called, so that is an error when this file is imported."""
    if not callable(getattr(Trainer, method.__name__, None)):
        raise ImportError(
            f"transformers {transformers.__version__} has no Trainer.{method.__name__}, which "
            "longctx overrides: install the version that pyproject.toml names"
        )
    return method


def _outside_gpu(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that are not on a GPU, but for those of towers at rest."""
    resting = {p for module in at_rest(model) for p in module.parameters()}
    return (p for p in model.parameters() if p not in resting and not p.is_cuda)


class ExactTrainer(Trainer):
    """Trains with `ExactAdamW` where the options ask for it, else as Trainer does."""

    args: TrainArguments
    counted_task: TaskName = "sft"
    """The task by whose loss a step's memory is counted."""
    head_movable = True
    """Whether lm_head may wait on the host: not if the loss reads its weight in backward, too."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainArguments,
        exact: bool,
        row_tokens: int,
        host_memory_gib: float | None = None,
        **kw: Any,
    ) -> None:
        """`exact` allows exact states (an engine may have its own); `row_tokens` are those of the
        largest batch; `host_memory_gib` may be taken of the host where the model is not patched."""
        self._host_memory_gib = host_memory_gib
        self._wants_exact = exact and uses_exact_states(args, model.dtype)
        self.row_tokens = row_tokens
        super().__init__(model=model, args=args, **kw)
        in_4_bits = getattr(
            model, "is_loaded_in_4bit", False
        )  # Trainer leaves it where it was read
        if in_4_bits and args.device.type == "cuda" and next(_outside_gpu(model), None) is not None:
            self._move_model_to_device(model, args.device)

    @property
    def exact(self) -> ExactAdamW | None:
        """The run's optimizer if it is ours; None for one of torch's or an engine's."""
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        return found if isinstance(found, ExactAdamW) else None

    @overrides
    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None and self._wants_exact:
            given = read_given(self.args.plan) if self.args.plan else None
            stream = place_states(
                *(self.model, self.args, self.row_tokens, given),
                task=self.counted_task,
                head_movable=self.head_movable,
                host_memory_gib=self._host_memory_gib,
            )
            last = self.accelerator.gradient_state
            self.optimizer_cls_and_kwargs = (
                ExactAdamW,
                dict(
                    lr=self.args.learning_rate,
                    betas=(self.args.adam_beta1, self.args.adam_beta2),
                    eps=self.args.adam_epsilon,
                    stream=stream,
                    is_last=lambda: last.sync_gradients,
                ),
            )
            if self.args.world_size > 1 or any(block.streams for block in stream.blocks):
                self._keep_from_accelerate()
        elif self.optimizer is None:
            limit_gpu(self.args.device, self.args.gpu_memory_gib)
        ratio = self.args.loraplus_lr_ratio
        if self.optimizer is None and ratio is not None:
            self._learn_faster(self.model if model is None else model, ratio)
        return super().create_optimizer(model)

    def _learn_faster(self, model: Any, ratio: float) -> None:
        """Has Trainer take the groups of LoRA+ instead of its own."""
        if not has_adapters(model):
            return
        decaying = {*self.get_decay_parameter_names(model)}
        trained = [(name in decaying, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for decays, p in trained if decays],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for decays, p in trained if not decays], "weight_decay": 0.0},
        ]
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, model
        )
        groups = with_rates(groups, model, lr=self.args.learning_rate, ratio=ratio)
        self.optimizer_cls_and_kwargs = kind, {**options, "params": groups}
        print_rank0(
            f"LoRA+: the learning rate of each adapter's B is {ratio:g} times that of its A"
        )

    def place(self, resume: Path | None = None) -> None:
        """Makes the optimizer and moves weights and states to their places before `train` would:
        what is impossible shows while an earlier run is still untouched. Raises UserError."""
        if resume is not None:
            self._check_optimizer(resume)
        if self._wants_exact:
            self.create_optimizer()

    def _check_optimizer(self, checkpoint: Path) -> None:
        if state_files(checkpoint) and not self._wants_exact:
            raise UserError(
                f"{checkpoint} holds exact fp32 states: resume with --optimizer_states fp32"
            )

    def _keep_from_accelerate(self) -> None:
        """Keeps the model from accelerate, which would bring all weights to the GPU, and from DDP,
        which would make a second copy of all gradients; ours are averaged as they are taken."""
        if self.args.bf16 or self.args.torch_compile:
            raise UserError(
                "--bf16 and --torch_compile wrap the model, which is impossible with exact states "
                "of several processes or with weights on the host: leave them out"
            )
        model: Any = self.model
        model._is_accelerate_prepared = True

    @overrides
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Weights that are too large for the GPU go from host memory to their places directly."""
        needed = sum(p.nbytes for p in _outside_gpu(model))
        alone = device.type == "cuda" and self._wants_exact and self.args.world_size == 1
        limit = (self.args.gpu_memory_gib or inf) * GIB
        if alone and (self.args.place == "host" or needed >= min(free_gpu_bytes(device), limit)):
            move_buffers(model, device)
        else:
            super()._move_model_to_device(model, device)
            move_scales(model)

    def flush(self) -> None:
        """Ends updates that wait for their block's next forward: weights may be read."""
        if self.exact:
            self.exact.flush()

    def load_exact(self, checkpoint: Path) -> None:
        self._check_optimizer(checkpoint)
        assert self.exact is not None and self.lr_scheduler is not None
        base_lrs = list(getattr(self.lr_scheduler, "base_lrs", ()))
        with explained_damage(checkpoint):
            read_states(self.exact, checkpoint)
            state = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
            scheduled = state.pop(SCHEDULED, [{"lr": rate} for rate in state.get("_last_lr", [])])
            self.lr_scheduler.load_state_dict(state)
            check_states(self.exact, self.lr_scheduler)
            scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
            if not isinstance(scheduler, LambdaLR):  # whose rates this run's options say
                for group, options in zip(self.exact.param_groups, scheduled, strict=False):
                    betas = options.get("betas", group["betas"])
                    group |= {"lr": float(options["lr"]), "betas": tuple(map(float, betas))}
            apply_learning_rate(self.lr_scheduler, base_lrs)

    def check_taken(self, checkpoint: Path) -> None:
        """Says which weights got no states from torch's AdamW. Raises UserError if none did."""
        assert self.exact is not None
        weights = [p for group in self.exact.param_groups for p in group["params"]]
        without = sum(weight not in self.exact.counts for weight in weights)
        if without == len(weights):
            raise UserError(
                f"the optimizer in {checkpoint} has no states: give the --optim it was trained "
                "with, or start from its weights with --model_name_or_path"
            )
        if without:
            print_rank0(
                f"the optimizer in {checkpoint} has no moments for {without} of {len(weights)} "
                "weights: they start from zero"
            )

    @overrides
    def _load_best_model(self) -> None:
        """Loads the best model with its states: an update that waits, or the rest of another
        checkpoint's masters, would change its weights."""
        self.flush()
        best = Path(str(self.state.best_model_checkpoint))
        require_whole_best(best)
        with explained_damage(best):
            if inside_peft(self.model) is not self.model:
                check_resumed(best, self.accelerator.unwrap_model(self.model))
            super()._load_best_model()
            if self.exact:
                read_states(self.exact, best)

    @overrides
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.exact is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            assert self.lr_scheduler is not None
            write_states(self.exact, Path(output_dir))
            groups = self.exact.param_groups
            scheduled = [{"lr": group["lr"], "betas": group["betas"]} for group in groups]
            state = self.lr_scheduler.state_dict() | {SCHEDULED: scheduled}
            torch.save(state, Path(output_dir) / SCHEDULER_NAME)

    @overrides
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves in shards: what lies on the GPU is copied to the host a shard at a time."""
        model: Any = self.model
        if self.exact is None or not isinstance(model, PreTrainedModel):
            return super()._save(output_dir, state_dict)
        sharded: Any = partial(model.save_pretrained, max_shard_size=SHARD_BYTES)
        vars(model)["save_pretrained"] = sharded
        try:
            super()._save(output_dir, state_dict)
        finally:
            del vars(model)["save_pretrained"]
