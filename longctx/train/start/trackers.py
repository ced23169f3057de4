"""What --report_to's trackers call a run: the same name when it is resumed, another for a new run.

run.json keeps the name, which is the folder's with the time of the first start. --run_name shows
another one to people; an environment variable of a tracker's own wins.

    tensorboard    the folder OUTPUT_DIR/runs/NAME
    wandb          the run's id, WANDB_RUN_ID
    trackio        the run's name, by which it is continued, also by an evaluation after training
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from longctx.train.options.config import TrainArguments
from longctx.train.output.record import read_record
from longctx.train.trainer.callbacks import Reporter

_WANDB = ("WANDB_RUN_ID", "WANDB_RESUME")


def tracked_name(args: TrainArguments, *, resumed: bool) -> str:
    """Returns the name that run.json gives a resumed run; a new one for any other."""
    folder = Path(str(args.output_dir))
    known = (read_record(folder) or {}).get("tracked_as") if resumed else None
    if isinstance(known, str) and re.fullmatch(r"[\w.-]{1,128}", known, re.ASCII):
        return known
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name, flags=re.ASCII)[:64]
    return f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


@contextmanager
def tracked_as(name: str, trainer: Any) -> Iterator[None]:
    """Trackers that start within know the run by `name`."""
    args = trainer.args
    if not args.report_to:
        yield
        return
    args.run_name = args.run_name or name
    for reporter in trainer.callback_handler.callbacks:
        if isinstance(reporter, Reporter):
            reporter.write_to(Path(str(args.output_dir)) / "runs" / name)
    given = "WANDB_RUN_ID" in os.environ
    if not given:
        os.environ |= dict(zip(_WANDB, (name, "allow"), strict=True))
    try:
        yield
    finally:
        for variable in () if given else _WANDB:
            os.environ.pop(variable, None)
