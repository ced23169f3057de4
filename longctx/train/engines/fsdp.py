"""FSDP2: --fsdp true --fsdp_config fsdp_configs/fsdp2.json, or accelerate launch with its YAML.

Weights, gradients and Adam lie in fp32 shards over the processes; `fully_shard`'s hooks gather a
decoder layer's weights in bf16 around its call, which the model's `_no_split_modules` name. Only
the first process loads weights, and hands the others their shards.

Under adapters nothing is cast: frozen weights lie in bf16 shards, adapters in fp32 ones. Both are
gathered as they are, by one exchange of bytes, and the adapters' gradients are scattered in fp32.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from longctx.errors import UserError, shortened
from longctx.loop.collectives import become_one_process, local_shard
from longctx.memory.pending import Pending, pending_bytes
from longctx.train.engines.gathered import gathered_bytes, trained_head_numel
from longctx.train.engines.layout import Layout, fully_shard_layout, gathering_pending
from longctx.train.engines.protocol import Engine
from longctx.train.engines.zero_settings import is_true
from longctx.train.options.config import TrainArguments, read_settings
from longctx.train.options.parser import means_no

if TYPE_CHECKING:  # it imports datasets
    from transformers import Trainer


class FSDP2(Engine):
    """torch's `fully_shard` through accelerate, with or without everything in host memory."""

    name = "fsdp"
    shares_rows = True
    _offloads, _reshards = False, True

    @classmethod
    def requested(cls, options: Any) -> bool:
        return not means_no(options.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")

    @classmethod
    def saved(cls, checkpoint: Path) -> bool:
        return any(checkpoint.glob("pytorch_model_fsdp*"))

    def read(self, options: Any) -> None:
        """Reads settings by transformers' names: `fsdp_version` is `version`."""
        found = read_settings("fsdp_config", options.fsdp_config)
        self.settings = {name.removeprefix("fsdp_"): value for name, value in found.items()}
        _check_version(self.settings.get("version", 2))
        asked = not means_no(options.fsdp)
        settings = _of_words(options.fsdp) | self.settings if asked else {}
        self._offloads = is_true("fsdp_config", settings, "cpu_offload") or _launched("OFFLOAD")
        # transformers always hands accelerate a word on this one, the launcher's counts alone.
        keeps = settings.get("reshard_after_forward", True) if asked else _launched("RESHARD")
        self._reshards = str(keeps).lower() in ("true", "1", "yes", "on")

    def layout(self, processes: int, passes: int) -> Layout:
        return fully_shard_layout(self._offloads, processes, reshards=self._reshards)

    def prepare(self, flags: Namespace) -> None:
        super().prepare(flags)
        become_one_process()
        if self._offloads:
            # As accelerate's launcher does: what lies on the host is summed by gloo, next to NCCL.
            os.environ["ACCELERATE_USE_FSDP"] = os.environ["FSDP_OFFLOAD_PARAMS"] = "true"

    def check_device(self, *, use_cpu: bool) -> None:
        if use_cpu or not torch.cuda.is_available():
            raise UserError(
                "FSDP needs GPUs (on CPUs accelerate silently runs DDP instead): use DeepSpeed "
                "there (--deepspeed ds_configs/zero3_cpu.json --use_cpu), or no engine"
            )

    def start(self, args: TrainArguments) -> None:
        super().start(args)
        if args.save_only_model:
            raise UserError(
                "--save_only_model is impossible with FSDP, whose checkpoints are shards: leave it "
                "out (final/ is an ordinary model anyway)"
            )
        given = args.fsdp_plugin_args or {}
        _check_version(given.get("fsdp_version", os.environ.get("FSDP_VERSION", "2")))
        self._reshards = bool(given.get("reshard_after_forward", self._reshards))
        self._offloads = bool(given.get("cpu_offload", self._offloads))

    def share_rows(self, args: TrainArguments, attention: str | None = None) -> None:
        super().share_rows(args, attention)
        self.check_shares_rows(args.sequence_parallel_size > 1, attention is None)

    def check_shares_rows(self, shards: bool, patched: bool = True) -> None:
        if shards and not patched:
            raise UserError(
                "--class_type vanilla and liger cannot share rows with FSDP: torch's ring "
                "attention takes each row for one document; use --deepspeed ds_configs/zero3.json, "
                "or --class_type custom"
            )

    @property
    def fills_weights(self) -> bool:
        return torch.distributed.get_rank() > 0

    def random_weights(self, device: torch.device, nbytes: int) -> AbstractContextManager[Any]:
        """Makes weights on the first process's device; the others' have no memory yet."""
        if self.fills_weights:
            return init_empty_weights(include_buffers=False)
        return super().random_weights(device, nbytes)

    def reshard(self, model: Any) -> None:
        """Frees the weights of the root and of lm_head, which FSDP2 leaves gathered for a backward
        pass."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole_weight(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        if self.fills_weights:
            found = torch.empty_like(parameter.data, device=device)
        else:
            found = parameter.data.to(device)
        torch.distributed.broadcast(found, 0)
        return found

    def configure(self, trainer: Trainer, args: TrainArguments) -> None:
        """Shards weights in fp32, computes in bf16 and sums in fp32. accelerate's own policy would
        sum in bf16 and round what goes into and comes out of each module, RoPE's frequencies and
        the loss among them, to bf16."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from longctx.train.engines.scatter import GradientsTakeTurns

        super().configure(trainer, args)
        plugin: Any = trainer.accelerator.state.fsdp_plugin
        plugin.cpu_ram_efficient_loading = True  # shards come from the first process
        if plugin.transformer_cls_names_to_wrap is None:  # accelerate refuses those of no module
            model: Any = trainer.model
            there = {type(module).__name__ for module in model.modules()}
            units = getattr(model, "_no_split_modules", None) or ()
            plugin.transformer_cls_names_to_wrap = [name for name in units if name in there]
        if self.adapters:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        elif args.bf16 or args.fp16:
            dtype = torch.bfloat16 if args.bf16 else torch.float16
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        # Or each process would hold whole gradients until the last of a step's batches.
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        trainer.add_callback(GradientsTakeTurns())
        if args.process_index > 0:
            keep_shapes_only(trainer.model, mixed=args.bf16 or args.fp16)

    def clip_grad_norm(
        self, accelerator: Accelerator, parameters: Iterable[Any], max_norm: float
    ) -> Tensor | None:
        """Clips with one reduction over all processes, where torch would reduce each gradient's
        norm on its own (0.6 s for 8B).

        On the CPU torch adds up the squares of a tensor in fp32, one after another: 9 % is missing
        from the norm of 128256 x 4096 elements. Here only a row is added up so, the rows in fp64.
        Gradients within `max_norm` are not touched.
        """
        accelerator.unscale_gradients()
        gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
        rows = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in gradients]
        square = torch.stack([row.double().square().sum() for row in rows]).sum()
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        if norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / norm.item())
        return norm

    def pending_bytes(self, model: PreTrainedModel) -> Pending:
        shards = [local_shard(p) for p in model.parameters() if p.requires_grad]
        head, stay = trained_head_numel(model), 0
        if not self._reshards:  # nothing is given back between forward and backward
            stay = 2 * sum(p.numel() for p in model.parameters())
        return gathering_pending(pending_bytes(shards), gathered_bytes(model), head, stay)

    def resume_problem(self, checkpoint: Path, args: TrainArguments) -> str | None:
        # accelerate would go on with an optimizer that starts from zero.
        missing = [
            name for name in ("optimizer_*", "scheduler.pt") if not any(checkpoint.glob(name))
        ]
        if not missing:
            return None
        return f"{checkpoint} holds no {missing[0]} and cannot be resumed: start from another one"

    def checkpoint_copies(self, args: TrainArguments, dtype: torch.dtype) -> int:
        """Returns the size of a checkpoint in copies of the weights: weights and both moments are
        in fp32."""
        return 3 * (2 if args.bf16 or args.fp16 else 1)

    def whole_adapters(self, model: nn.Module) -> dict[str, Tensor]:
        """Gathers the adapters on the mesh's device, where the exchange is: shards may lie on the
        host."""
        shards: dict[str, Any] = super().whole_adapters(model)
        return {
            name: shard.to(shard.device_mesh.device_type).full_tensor().cpu()
            for name, shard in shards.items()
        }

    def save_model(self, trainer: Any, path: Path, dtype: torch.dtype) -> None:
        """Gathers the fp32 shards; Trainer would write nothing."""
        if self.adapters:
            return super().save_model(trainer, path, dtype)
        weights = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.args.should_save:
            trainer.model.config.dtype = dtype
            trainer._save(str(path), {name: w.to(dtype) for name, w in weights.items()})


def _launched(setting: str) -> bool:
    """Returns whether the YAML of `accelerate launch` turns a setting on."""
    names = {"OFFLOAD": "FSDP_OFFLOAD_PARAMS", "RESHARD": "FSDP_RESHARD_AFTER_FORWARD"}
    return bool(parse_flag_from_env(names[setting], setting == "RESHARD"))


_WORDS = {
    "full_shard": {"reshard_after_forward": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "auto_wrap": {},
}
"""The settings that transformers reads from the words of `--fsdp` under FSDP2. A setting in
fsdp_config wins."""


def _of_words(asked: Any) -> dict[str, bool]:
    """Returns the settings that `--fsdp "full_shard auto_wrap offload"` asks for. Raises UserError
    for a word that FSDP2 has not."""
    if asked is True or str(asked).lower() == "true":
        return {}
    words = [getattr(word, "value", word) for word in asked] if isinstance(asked, list) else None
    found: dict[str, bool] = {}
    for word in words or str(asked).split():
        if word not in _WORDS:
            raise UserError(
                f"--fsdp: {shortened(str(word), 40)} is no word of FSDP2: write --fsdp true, or of "
                f"{', '.join(_WORDS)}"
            )
        found |= {name: value for name, value in _WORDS[word].items() if name not in found}
    return found


def _check_version(version: Any) -> None:
    if str(version) != "2":
        raise UserError(
            f"FSDP{shortened(str(version), 40)} is not supported: set fsdp_version to 2, as "
            "`longctx recipes fsdp2.yaml` does"
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
