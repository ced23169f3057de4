"""Runs of `longctx train` up to their first step, on a CPU that passes for an H100.

    python tests/train/engines/as_on_a_gpu.py ANSWERS WORDS... -- CASE...

WORDS are options of all runs. A CASE is JSON: {"name": ..., "words": [...], "until": "data"} or
"step". Each run goes as far as its data, before which its plan is made, or as its first
step (with model, trainer and placement). The first process writes ANSWERS: JSON that says of each
case how it ended ("reached", or the line of a UserError) and what it printed. Any other exception
ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any, NoReturn

from longctx.constants import GIB
from longctx.cost.machines import MACHINES
from longctx.errors import UserError
from longctx.loop import states
from longctx.memory.decide import gpu_budget
from longctx.train.commands import train
from longctx.train.engines import fsdp
from longctx.train.report import predicted
from longctx.train.start import loading
from longctx.train.start import packing_rule as documents
from longctx.train.trainer.trainer import LongTrainer

H100 = MACHINES["h100"]
HOST_BYTES = 128 * GIB


class Reached(Exception):
    """The run came as far as it should."""


def stop(*args: Any, **kwargs: Any) -> NoReturn:
    raise Reached


def become_a_gpu() -> None:
    """Exchanges what asks for a device before the first kernel."""
    predicted.DEVICE = "cpu"
    predicted.known_machine = lambda: H100
    predicted.host_share_bytes = states.host_share_bytes = lambda: HOST_BYTES
    free = H100.gpu_bytes - H100.held_bytes
    states._gpu_budget = lambda specs, args: gpu_budget(free, args.gpu_memory_gib)
    fsdp.FSDP2.check_device = lambda *args, **given: None
    loading._check_liger = lambda args, device: None
    patch_as = documents.patch_as
    documents.patch_as = lambda model, options, device: (
        "" if options.class_type == "liger" else patch_as(model, options, device)
    )


def ends(words: list[str], until: str) -> tuple[str, str]:
    """How a run ends, and what it says until then."""
    where = (train, "set_seed") if until == "data" else (LongTrainer, "train")
    kept, said = getattr(*where), io.StringIO()
    setattr(*where, stop)
    try:
        with contextlib.redirect_stdout(said):
            train.main(words)
        return "trained", said.getvalue()
    except Reached:
        return "reached", said.getvalue()
    except UserError as error:
        return str(error), said.getvalue()
    finally:
        setattr(*where, kept)


def main(answers: str, words: list[str], cases: list[str]) -> None:
    become_a_gpu()
    found = {}
    for number, case in enumerate(map(json.loads, cases)):
        folder = ["--output_dir", f"{answers}.{number}"]
        found[case["name"]] = ends([*words, *case["words"], *folder], case["until"])
    if os.environ.get("RANK", "0") == "0":
        with open(answers, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(sys.argv[1], sys.argv[2:split], sys.argv[split + 1 :])
