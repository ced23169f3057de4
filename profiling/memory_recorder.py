"""Records the allocations of one training step, or of all that comes before it and the first step:
what torch's snapshot needs to be read by category.

A snapshot holds addresses and Python stacks. What they are for follows from what these callbacks
write down beside it: where the parameters and optimizer states lie, where the gradients lie when
the optimizer starts, and when each phase begins.
"""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from longctx.loop.collectives import local_shard
from longctx.train.trainer.trainer import LongTrainer
from profiling import memory_timeline
from profiling.memory_categories import Marks

_RECORDED = 1_000_000
"""Allocations and frees of a recording; a record takes about 1 KB of host memory."""


class _Recorder(TrainerCallback):
    """Writes STEM.pickle and STEM.json.gz when a step ends that it has recorded. `description` says
    what ran and goes into the timeline."""

    reads_weights = False
    trainer: LongTrainer
    description: dict[str, Any]
    stem: Path

    def __init__(self) -> None:
        self.marks = Marks(phases=[])
        self.recording = False

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            max_entries=_RECORDED, context="alloc", stacks="python"
        )
        self.recording = True

    def mark(self, name: str) -> None:
        if not self.recording:
            return
        now_us = _now_us()
        if name == "optimizer":
            gradients: list[Any] = [p.grad for p in self.trainer.model.parameters()]
            if self.trainer.exact:
                gradients += self.trainer.exact.gradients.tensors()
            self.marks.gradients = dict.fromkeys(map(_address, gradients), now_us)
        if name == "end":
            self._write()
        else:
            self.marks.phases.append((name, now_us))

    def held(self) -> dict[int, str]:
        """Address -> category of what lives from step to step."""
        model: Any = self.trainer.model
        parameters = list(model.parameters())
        states = (getattr(self.trainer.optimizer, "state", None) or {}).values()
        held = {_address(p.grad): "gradients" for p in parameters}
        if self.trainer.exact:
            blocks = self.trainer.exact.stream.blocks
            held |= {_address(t): "optimizer" for block in blocks for t in block.tensors()}
        held |= {_address(t): "optimizer" for state in states for t in state.values()}
        shards = [getattr(p, "ds_tensor", None) for p in parameters]  # ZeRO-3's
        held |= {_address(t): "weights" for t in [*parameters, *model.buffers(), *shards]}
        held.pop(None, None)
        return held

    def _write(self) -> None:
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        self.recording = False
        with self.stem.with_suffix(".pickle").open("wb") as file:
            pickle.dump(snapshot, file)
        timeline = memory_timeline.record(
            snapshot, self.marks, self.description, torch.cuda.current_device()
        )
        memory_timeline.save(timeline, self.stem.with_suffix(".json.gz"))


class RecordMemory(_Recorder):
    """Records the allocations of step `step` (from 0)."""

    def __init__(
        self, trainer: LongTrainer, step: int, description: dict[str, Any], stem: Path
    ) -> None:
        super().__init__()
        self.trainer, self.step, self.description, self.stem = trainer, step, description, stem

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            torch.cuda.synchronize()
            self.marks.before = self.held()
            self.start()


class RecordBeginning(_Recorder):
    """Records from the moment when it is made, before a model is there, to the end of the first
    step. Its phases before that are `loading` and `engine`, which makes the optimizer, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.init()  # or nothing would be recorded
        self.start()
        self.mark("loading")

    def loaded(self, trainer: LongTrainer, description: dict[str, Any], stem: Path) -> None:
        self.trainer, self.description, self.stem = trainer, description, stem
        self.mark("engine")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look()

    def mark(self, name: str) -> None:
        if name == "end":  # torch's AdamW has made its states by now
            self._look()
        super().mark(name)

    def _look(self) -> None:
        if self.recording:
            self.marks.seen.append((_now_us(), self.held()))


def _now_us() -> int:
    return time.time_ns() // 1000


def _address(tensor: Any) -> int | None:
    """Where the tensor's memory on the GPU starts; None for anything else."""
    tensor = local_shard(tensor)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    return tensor.untyped_storage().data_ptr()
