"""Under accelerate's FSDP all processes but the first have no weights when they patch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from both import make_model
from paths import PYTHONPATH, ROOT

import longctx
from longctx.errors import UserError

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


def train(source: Path, folder: Path) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node", "2", "tests/clients/fsdp_job.py"]
    here = Path(__file__).parent
    rooms = [PYTHONPATH, here, here.parent / "engines", os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, rooms))
    env = os.environ | FSDP | {"FSDP_VERSION": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    words = [*command, str(source), str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_script_that_patches_in_every_process(tmp_path: Path) -> None:
    """Trains as vanilla, sharded alike, and runs the schedule in both; with prompts once, too."""
    make_model().save_pretrained(tmp_path / "model")
    found = train(tmp_path / "model", tmp_path / "run")
    vanilla, patched, shared = (found[name] for name in ("vanilla", "patched", "shared"))
    assert patched["meta"][0] == 0 < patched["meta"][1] and vanilla["ran"] == [0, 0]
    for ours in (patched, shared):
        assert ours["ran"] == [2 * 3, 2 * 3]
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(vanilla[name], rel=2e-5) and len(ours[name]) == 3
    for ours, others in zip(shared["tokens"], patched["tokens"], strict=True):
        assert 0 < ours < 0.9 * others


def test_elsewhere_a_model_without_weights_is_one_line() -> None:
    with pytest.raises(UserError, match="load them and patch then"):
        longctx.patch(make_model().to("meta"))
