"""What differs between plain PyTorch, DeepSpeed ZeRO and FSDP2, in one place.

    engine     asked for by                                             a layer's weights are whole
    plain      nothing                                                  always
    deepspeed  --deepspeed ds_configs/zero3_cpu.json, or                ZeRO-3: while the layer runs
               accelerate launch --config_file ds_configs/zero3_cpu.yaml
    fsdp       --fsdp true --fsdp_config fsdp_configs/fsdp2.json, or    while the layer runs
               accelerate launch --config_file fsdp_configs/fsdp2.yaml

An engine gathers weights in hooks around a module's call and takes gradients from the parameters,
so the schedule needs no code of its own for any of them: decoder layers, final norm and lm_head are
called as modules, and each returns whole gradients through autograd. What is left is here: the
layer is what is gathered at a time (a *leaf* module under ZeRO-3, the wrapped one under FSDP2), its
size decides how far ahead weights are fetched, gradients are summed in fp32 over processes and
accumulation steps, and a checkpoint that this run cannot read is refused.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from longctx.config import Engine, TrainArguments, installed
from longctx.errors import UserError

# --- before the model ------------------------------------------------------------------------


def start_engine(args: TrainArguments) -> None:
    """Checks that the engine can run, and starts what must be there before the model.

    Raises UserError where it would fail later, or would silently be another one.
    """
    if args.engine == "deepspeed" and not installed("deepspeed"):
        raise UserError("this run asks for DeepSpeed: pip install 'longctx[deepspeed]'")
    if args.engine == "deepspeed" and args.on_nonfinite == "skip":
        raise UserError(
            "--on_nonfinite skip is impossible with DeepSpeed, which steps by itself: use stop"
        )
    if args.engine == "fsdp" and args.device.type == "cpu":
        raise UserError(
            "FSDP needs GPUs (on CPUs accelerate silently runs DDP instead): "
            "use DeepSpeed there, or no engine"
        )
    if args.parallelism_config or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        raise UserError(
            "a parallelism_config is not supported (tensor, context, sequence or replicated data "
            "parallelism): each process trains whole rows, and engines shard over all processes"
        )
    if args.engine == "fsdp" and args.save_only_model:
        raise UserError(
            "--save_only_model is impossible with FSDP, whose checkpoints are shards: leave it "
            "out (final/ is an ordinary model anyway)"
        )
    given = args.fsdp_plugin_args or {}
    version = given.get("fsdp_version", os.environ.get("FSDP_VERSION", "2"))
    if args.engine == "fsdp" and str(version) != "2":
        raise UserError(f"FSDP{version} is not supported: set fsdp_version to 2, see fsdp_configs/")
    if args.engine == "deepspeed":
        import deepspeed

        # Torch 2.13 deprecates collectives that DeepSpeed calls many times a step.
        warnings.filterwarnings("ignore", ".*torch.distributed.*deprecated", FutureWarning)
        backend = "gloo" if args.device.type == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)  # before zero.Init asks it


def check_resume(args: TrainArguments, checkpoint: Path | None) -> None:
    """Raises UserError for a checkpoint of another engine, of ZeRO with other processes, or without
    an optimizer.

    FSDP2's sharded checkpoints are read by any number of processes.
    """
    if checkpoint is None:
        return
    saved_by = _saved_by(checkpoint)
    if saved_by == "plain" and not list(checkpoint.glob("optimizer*")):
        raise UserError(
            f"{checkpoint} holds no optimizer (--save_only_model) and cannot be resumed: start "
            "from its weights with --model_name_or_path"
        )
    if saved_by != args.engine:
        raise UserError(
            f"{checkpoint} was saved with engine {saved_by} and cannot resume with {args.engine}: "
            f"resume with {saved_by}, or start from its weights with --model_name_or_path"
        )
    if args.engine != "deepspeed":
        return
    processes = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if processes != args.world_size:
        raise UserError(
            f"{checkpoint} was saved by {processes} processes and DeepSpeed cannot resume it on "
            f"{args.world_size}: use --num_processes {processes}, or make whole weights of it "
            f"(python {checkpoint / 'zero_to_fp32.py'}) and start from those"
        )


def _saved_by(checkpoint: Path) -> Engine:
    if any(checkpoint.glob("global_step*")):
        return "deepspeed"
    return "fsdp" if any(checkpoint.glob("pytorch_model_fsdp*")) else "plain"


# --- the model -------------------------------------------------------------------------------


def filled_later(engine: Engine) -> bool:
    """Whether this process' weights come from the first one: it needs none of its own."""
    return engine == "fsdp" and torch.distributed.get_rank() > 0


def random_weights(device: torch.device, engine: Engine) -> AbstractContextManager[Any]:
    """Where a preset's weights are made: on the device, but under FSDP2 in the first process only,
    which hands the others their parts; their parameters have no memory until then."""
    if filled_later(engine):
        return init_empty_weights(include_buffers=False)
    return torch.device(device)


def gather_layers_whole(layers: nn.ModuleList) -> None:
    """Makes each decoder layer a leaf module of ZeRO-3, gathered and released as one.

    Nothing happens under other engines; FSDP2 wraps the class by the model's `_no_split_modules`.
    """
    for layer in layers:
        layer._z3_leaf = True  # type: ignore[assignment]  # deepspeed.utils.set_z3_leaf_module


def elements(parameter: Any) -> int:
    """Of the whole parameter, also where ZeRO-3 has put it away."""
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def pending_bytes(model: PreTrainedModel, engine: Engine) -> int:
    """What weights, gradients and Adam will claim on the GPU and have not before the first step.

    Plain and FSDP2 make this process' gradients and Adam's two moments in the first step. DeepSpeed
    has made its states; ZeRO-1 and 2 still make gradients. Sharded weights are gathered: the layer
    that runs, the next one, and lm_head with its gradient.
    """
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    on_gpu_bytes = sum(p.numel() * p.element_size() for p in trained if p.is_cuda)
    sharded = engine == "fsdp" or any(hasattr(p, "ds_id") for p in model.parameters())
    gathered_bytes = 0
    if sharded:
        largest = [*model.model.layers[:2].parameters(), *2 * [model.lm_head.weight]]
        gathered_bytes = sum(elements(p) for p in largest) * torch.bfloat16.itemsize
    return gathered_bytes + (1 if engine == "deepspeed" else 3) * on_gpu_bytes


def local(tensor: Any) -> Any:
    """This process' part of a tensor that FSDP2 has sharded; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- the trainer -----------------------------------------------------------------------------


def configure(trainer: Trainer, args: TrainArguments) -> None:
    """Completes the engine's settings where its file leaves them open ("auto" or absent)."""
    if args.engine == "deepspeed":
        plugin = trainer.accelerator.state.deepspeed_plugin
        _complete_deepspeed(plugin.hf_ds_config.config, trainer.model, args)
    elif args.engine == "fsdp":
        _complete_fsdp(trainer.accelerator.state.fsdp_plugin, args)
        # Or each process would hold whole gradients until the last of a step's batches.
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        if args.process_index > 0:
            keep_shapes_only(trainer.model, mixed=args.bf16 or args.fp16)


def _complete_deepspeed(config: dict[str, Any], model: Any, args: TrainArguments) -> None:
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") == 3:  # or `final/` would hold no model
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if zero.get("stage3_prefetch_bucket_size") == "auto":  # one layer ahead
        zero["stage3_prefetch_bucket_size"] = sum(map(elements, model.model.layers[0].parameters()))
    # DeepSpeed would add up gradients in bf16, over processes and over accumulation steps.
    if args.world_size > 1:
        config.setdefault("communication_data_type", "fp32")
    if args.gradient_accumulation_steps > 1:
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def _complete_fsdp(plugin: Any, args: TrainArguments) -> None:
    """fp32 weights in shards, bf16 in compute, fp32 sums. accelerate's own policy would sum in bf16
    and round what goes into and comes out of each module, RoPE's frequencies and the loss among
    them, to bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin.cpu_ram_efficient_loading = True  # shards come from the first process, see below
    if args.bf16 or args.fp16:
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def keep_shapes_only(model: Any, mixed: bool) -> None:
    """Drops the weights of a process that gets its shards from the first one.

    accelerate tells an optimizer's parameters apart by `data_ptr()`, which is 0 for all on the meta
    device: all but one would silently not be trained. It would also make an fp32 copy of bf16
    weights in every process (`mixed`). So each parameter stays, as one element that is expanded.
    """
    model.tie_weights()  # accelerate's `init_empty_weights` unties them
    shapes: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in shapes:
                dtype = torch.float32 if mixed and weight.requires_grad else weight.dtype
                element = torch.empty(1, dtype=dtype)
                shapes[weight] = nn.Parameter(element.expand(weight.shape), weight.requires_grad)
            setattr(module, name, shapes[weight])


def clip_shards(parameters: Iterable[Any], max_norm: float) -> Tensor:
    """Clips FSDP2's gradients to `max_norm` and returns their norm, over all processes.

    torch would reduce each gradient's norm on its own. And on the CPU it adds up the squares of a
    tensor in fp32, one after another: 9 % is missing from the norm of 128256 x 4096 elements. Here
    only a row is added up so, the rows in fp64, and one sum goes over the processes. Gradients
    within `max_norm` are not touched.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in gradients]
    square = torch.stack([row.double().square().sum() for row in rows]).sum()
    torch.distributed.all_reduce(square)
    norm = square.sqrt()
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm.item())
    return norm


def leave(args: TrainArguments) -> None:
    """Ends a run of several processes that went well: the last line of the program.

    gloo's threads may abort a process that is already done, and under DeepSpeed closing the group
    is not enough, so CPU processes skip the interpreter's own end.
    """
    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if args.engine == "deepspeed" and args.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
