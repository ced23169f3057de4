"""DeepSpeed ZeRO: --deepspeed ds_configs/zero3_cpu.json, or accelerate launch with its YAML.

DeepSpeed gathers weights in hooks around a module's call and takes gradients from the parameters,
so the schedule needs no code of its own: decoder layers, final norm and lm_head are called as
modules, and each returns whole gradients through autograd. Under ZeRO-3 a decoder layer is a
*leaf*: gathered and released as one, and its size decides how far ahead weights are fetched.
Gradients are summed in fp32, over processes and over accumulation steps.

Under adapters DeepSpeed is told of no bf16, or it would round adapters and their gradients to it:
frozen weights keep their 16 bits, adapters their 32, and these are the masters that AdamW updates.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from longctx.errors import UserError
from longctx.loop.collectives import become_one_process, whole_numel
from longctx.memory.pending import Pending, trained_bytes_on_gpu
from longctx.noise import show_greeting
from longctx.packages import pip_install
from longctx.system import installed
from longctx.train.engines.builds import build_one_at_a_time
from longctx.train.engines.gathered import gathered_bytes, layers_of
from longctx.train.engines.layout import Layout, moments_bytes
from longctx.train.engines.protocol import Engine
from longctx.train.engines.zero_settings import zero_layout
from longctx.train.options.config import TrainArguments, explained_options, read_settings
from longctx.train.options.parser import means_no
from longctx.train.options.shipped import find

if TYPE_CHECKING:  # it imports datasets
    from transformers import Trainer

_LAUNCHED = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


class DeepSpeed(Engine):
    """ZeRO-1, 2 and 3, with the offloads that its file asks for."""

    name = "deepspeed"
    steps_itself = True
    shares_rows = True
    keeps_options = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    makes_moments = False
    """AdamW's come on the GPU, with the first update."""
    _stage = 0

    @classmethod
    def requested(cls, options: Any) -> bool:
        return not means_no(options.deepspeed) or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")

    @classmethod
    def saved(cls, checkpoint: Path) -> bool:
        return any(checkpoint.glob("global_step*"))

    def read(self, options: Any) -> None:
        if launched := os.environ.get(_LAUNCHED):  # by the name that the YAMLs in ds_configs/ have
            os.environ[_LAUNCHED] = str(find("deepspeed", launched))
        self.settings = read_settings("deepspeed", options.deepspeed or os.environ.get(_LAUNCHED))

    def layout(self, processes: int, passes: int) -> Layout:
        return zero_layout(self.settings, processes, passes)

    def prepare(self, flags: Namespace) -> None:
        super().prepare(flags)
        if not installed("deepspeed"):
            raise UserError(f"this run asks for DeepSpeed: {pip_install('deepspeed')}")
        show_greeting()
        become_one_process()
        build_one_at_a_time()  # transformers opens DeepSpeed's process group with its options

    def start(self, args: TrainArguments) -> None:
        super().start(args)
        if args.deepspeed == {}:
            raise UserError("--deepspeed holds no settings: see `longctx recipes zero3.json`")
        if args.on_nonfinite == "skip":
            raise UserError(
                "--on_nonfinite skip is impossible with DeepSpeed, which steps by itself: use stop"
            )
        import deepspeed

        # Torch 2.13 deprecates collectives that DeepSpeed calls many times a step.
        warnings.filterwarnings("ignore", ".*torch.distributed.*deprecated", FutureWarning)
        backend = "gloo" if args.device.type == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)  # before zero.Init asks it
        self._check_settings(args)

    def check_adapters(self, args: TrainArguments, *, quantised: bool, whole: bool) -> None:
        super().check_adapters(args, quantised=quantised, whole=whole)
        zero = self.settings.get("zero_optimization") or {}
        parts = (zero.get(part) or {} for part in ("offload_param", "offload_optimizer"))
        if any(part.get("device") == "nvme" for part in parts):
            raise UserError(
                "--lora_r with offload to NVMe: DeepSpeed swaps all weights in one dtype, and "
                "adapters have fp32 over 16 bits: offload to the CPU (zero3_cpu)"
            )
        if self.settings.get("optimizer") and args.loraplus_lr_ratio is not None:
            raise UserError(
                "--loraplus_lr_ratio gives A and B rates of their own, and the optimizer in the "
                "file of --deepspeed has one: leave `optimizer` out of the file"
            )

    def _check_settings(self, args: TrainArguments) -> None:
        """Raises UserError for what DeepSpeed would refuse when the model is there. What is still
        "auto" depends on the model."""
        settings = getattr(args, "hf_deepspeed_config", None)
        if settings is None:  # of `accelerate launch`
            return
        if settings.mismatches:
            found = "; ".join(line.strip("- ") for line in settings.mismatches)
            raise UserError(f'--deepspeed: {found}: set it to "auto" in the file')
        from deepspeed.ops.op_builder import AsyncIOBuilder
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig

        with explained_options("--deepspeed"):
            DeepSpeedConfig(without_auto(settings.config))
        kind = settings.get_value("optimizer.type") or "adamw"
        if kind.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
            raise UserError(
                f"--deepspeed: the optimizer {kind} is unknown; known: "
                f"{', '.join(DEEPSPEED_OPTIMIZERS)}"
            )
        parts = ("offload_param", "offload_optimizer")
        places = [settings.get_value(f"zero_optimization.{part}.device") for part in parts]
        if "nvme" in places and not AsyncIOBuilder().is_compatible(verbose=False):
            raise UserError("--deepspeed: offload to NVMe needs libaio: apt install libaio-dev")

    @property
    def makes_dense(self) -> bool:
        """Under ZeRO-3 transformers hands each process its part of a weight as the file has it."""
        return (self.settings.get("zero_optimization") or {}).get("stage") != 3

    def gather_whole(self, model: nn.Module, layers: nn.ModuleList) -> None:
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(layer) for layer in layers}))

    def whole_weight(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):  # does nothing to a weight that ZeRO-3 has not cut
            return parameter.data.to(device, copy=True)

    def configure(self, trainer: Trainer, args: TrainArguments) -> None:
        super().configure(trainer, args)
        state: Any = trainer.accelerator.state
        if state.parallelism_config and state.parallelism_config.cp_enabled:
            # DeepSpeed shards and averages over all processes, as without shared rows. Of its mesh
            # accelerate's data loaders know one dimension whose processes get the same rows.
            shape = args.world_size // args.sequence_parallel_size, args.sequence_parallel_size
            state.ds_device_mesh = init_device_mesh(
                args.device.type, shape, mesh_dim_names=("dp", "tp")
            )
        config = state.deepspeed_plugin.hf_ds_config.config
        zero = config.setdefault("zero_optimization", {})
        place = (zero.get("offload_optimizer") or {}).get("device", "none")
        self.makes_moments = place == "none" and args.device.type == "cuda"
        self._stage = zero.get("stage", 0)
        if self._stage == 3:  # or `final/` would hold no model
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        if zero.get("stage3_prefetch_bucket_size") == "auto":  # one layer ahead
            layer = layers_of(trainer.model)[0].parameters()
            zero["stage3_prefetch_bucket_size"] = sum(map(whole_numel, layer))
        if self.adapters and "bf16" in config:
            config["bf16"]["enabled"] = False
        # DeepSpeed would add up gradients in bf16, over processes and over accumulation steps.
        if args.world_size > 1:
            config.setdefault("communication_data_type", "fp32")
        if args.gradient_accumulation_steps > 1:
            config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")

    @property
    def needs_input_gradient(self) -> bool:
        """ZeRO-3 takes a leaf's gradients when that of its input is there. Without one it takes
        zeros before they are made, and is right only as long as their bucket is not summed."""
        return self._stage == 3

    def whole_adapters(self, model: nn.Module) -> dict[str, Tensor]:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([p for p in model.parameters() if p.requires_grad]):
            return {name: x.cpu().clone() for name, x in super().whole_adapters(model).items()}

    def cut_group(self, accelerator: Accelerator) -> Any | None:
        shared = accelerator.parallelism_config
        if not (shared and shared.sp_enabled):
            return None
        from deepspeed.utils import groups

        return groups._get_sequence_parallel_group()

    def pending_bytes(self, model: PreTrainedModel) -> Pending:
        """Returns the bytes that are still to be allocated. DeepSpeed has made its masters; AdamW's
        moments come with the first update, ZeRO-1 and 2 still make gradients, ZeRO-3 gathers."""
        parameters = list(model.parameters())
        sharded = any(hasattr(p, "ds_id") for p in parameters)
        gathered = gathered_bytes(model) if sharded else 0
        trained = sum(whole_numel(p) for p in parameters if p.requires_grad)
        moments = moments_bytes(trained, dist.get_world_size()) if self.makes_moments else 0
        return Pending(trained_bytes_on_gpu(parameters) + gathered + moments)

    def resume_problem(self, checkpoint: Path, args: TrainArguments) -> str | None:
        processes = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
        if processes == args.world_size:
            return None
        return (
            f"{checkpoint} was saved by {processes} processes and DeepSpeed cannot resume it on "
            f"{args.world_size}: use --num_processes {processes}, or make whole weights of it "
            f"(python {checkpoint / 'zero_to_fp32.py'}) and start from those"
        )

    def resumed(self, trainer: Any) -> None:
        """Restores the bias corrections of DeepSpeed's CPU Adam, which multiplies them up in fp32,
        step by step, and after loading takes a power instead, which has other last bits. So the
        steps up to the checkpoint are repeated, on a single number (a million take seconds)."""
        self.makes_moments = False  # they were loaded
        optimizer = trainer.optimizer
        while not hasattr(optimizer, "ds_opt_adam"):
            optimizer = getattr(optimizer, "optimizer", None)
            if optimizer is None:  # another optimizer
                return
        steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        group, number = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
        options = (*group["betas"], group["eps"], 0.0, group["bias_correction"])
        for step in range(1, steps + 1):
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *options, *number)

    def checkpoint_copies(self, args: TrainArguments, dtype: torch.dtype) -> int:
        """Returns the size of a checkpoint in copies of the weights, which it holds as well; all
        states are in fp32."""
        return 1 + 3 * (2 if args.bf16 or args.fp16 else 1)


def without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's settings that have a value."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto"
    }
