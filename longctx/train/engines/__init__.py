"""Engines: what differs between plain PyTorch, DeepSpeed ZeRO and FSDP2, behind one protocol.

    engine     asked for by                                             a layer's weights are whole
    plain      nothing                                                  always
    deepspeed  --deepspeed ds_configs/zero3_cpu.json, or                ZeRO-3: while the layer runs
               accelerate launch --config_file ds_configs/zero3_cpu.yaml
    fsdp       --fsdp true --fsdp_config fsdp_configs/fsdp2.json, or    while the layer runs
               accelerate launch --config_file fsdp_configs/fsdp2.yaml

`protocol.py` lists the questions, a file an engine holds its answers. No other code asks for an
engine's name, and none is asked by `model` or `memory`: they are handed what they need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx.errors import UserError
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.engines.fsdp import FSDP2
from longctx.train.engines.plain import Plain
from longctx.train.engines.protocol import Engine
from longctx.train.options.config import TrainArguments

ENGINES: tuple[type[Engine], ...] = (DeepSpeed, FSDP2, Plain)
"""Engines are asked in this order; Plain takes what no other claims."""


def choose_engine(options: Any) -> Engine:
    """Returns the engine that the options (flags or TrainingArguments) or the environment ask
    for."""
    return next(kind for kind in ENGINES if kind.requested(options))()


def check_resume(engine: Engine, args: TrainArguments, checkpoint: Path | None) -> None:
    """Raises UserError for a checkpoint of another engine, or one that this engine cannot read in
    this run."""
    if checkpoint is None:
        return
    saved_by = next(kind for kind in ENGINES if kind.saved(checkpoint))
    if not isinstance(engine, saved_by):
        raise UserError(
            f"{checkpoint} was saved with engine {saved_by.name} and cannot resume with "
            f"{engine.name}: resume with {saved_by.name}, or start from its weights with "
            "--model_name_or_path"
        )
    if problem := engine.resume_problem(checkpoint, args):
        raise UserError(problem)
