"""train.py with accelerate's FSDP2 on CPUs, where accelerate itself would silently run DDP.

What differs from GPUs is the device, gloo and that nothing is pinned; the rest is what a user's run
goes through: accelerate wraps the model, hands out the weights, saves and loads shards.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from longctx.errors import UserError
from longctx.families.vision import tower_parameters
from longctx.train.commands import train
from longctx.train.engines import fsdp
from longctx.train.engines.scatter import ScatterFromCompute
from longctx.train.trainer.trainer import LongTrainer

begin = AcceleratorState.__init__


def begin_as_on_gpus(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if fsdp_plugin.cpu_offload:
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


scattered: list[Any] = []
allocate = ScatterFromCompute.allocate


def allocate_and_note(self: Any, size: Any, **kwargs: Any) -> Any:
    scattered.append(size)
    return allocate(self, size, **kwargs)


class CheckedTrainer(LongTrainer):
    """Every parameter is sharded, and in the optimizer if it is trained, and our own code gives
    gradients memory: any of it could silently be otherwise."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        outside = tower_parameters(model)
        assert all(isinstance(p, DTensor) != (p in outside) for p in model.parameters())
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        assert trained == {id(p) for p in model.parameters() if p.requires_grad}
        if self.engine.adapters:
            dtypes = {(p.requires_grad, p.dtype) for p in {*model.parameters()} - outside}
            assert dtypes == {(True, torch.float32), (False, self._dtype)}
        loss = super().training_step(model, *args, **kwargs)
        assert scattered
        return loss


AcceleratorState.__init__ = begin_as_on_gpus
ScatterFromCompute.allocate = allocate_and_note  # type: ignore[method-assign]
train.LongTrainer = CheckedTrainer
fsdp.FSDP2.check_device = lambda *args, **given: None

if __name__ == "__main__":
    try:
        train.main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
