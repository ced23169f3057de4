"""--class_type any under engines, on two processes on the CPU: as vanilla trains without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from small_job import Warm, assert_same_run, batch, on_cpu

from longctx.system import installed


@pytest.mark.parametrize("engine", ["fsdp2", "zero3", "ddp"])
def test_any_model_trains_as_vanilla(
    engine: str, job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    script, flags = "train.py", [*job, "--class_type", "any", "--output_dir", f"{tmp_path}/run"]
    if engine == "fsdp2":
        script = "tests/train/engines/fsdp_on_cpu.py"
        flags += ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json"]
    elif engine == "zero3":
        if not installed("deepspeed"):
            pytest.skip("deepspeed is not installed")
        flags += ["--deepspeed", on_cpu(ROOT / "ds_configs/zero3.json", tmp_path)]
    warm.run(2, script, *flags, *batch(2), "--save_strategy", "no")
    assert_same_run(tmp_path / "run", vanilla)
