"""DeepSpeed through train.py on the CPU: each published file trains as vanilla does."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import ROOT
from small_job import (
    ACCELERATE,
    DORA,
    LORA,
    Warm,
    assert_adapters_alone,
    assert_near_run,
    assert_same_run,
    batch,
    of_family,
    on_cpu,
)

from longctx.system import installed
from longctx.train.commands import train

DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
KILLED = "zero3_cpu"
"""Is trained, killed and resumed by a test of its own."""

needs_deepspeed = pytest.mark.skipif(
    not installed("deepspeed"), reason="deepspeed is not installed"
)


@needs_deepspeed
@pytest.mark.parametrize(
    "config", [c for c in DS_CONFIGS if c.stem != KILLED], ids=lambda c: c.stem
)
def test_each_deepspeed_file_trains(
    config: Path, job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    """By its YAML through accelerate; ZeRO-1 and 2 by the flag, on two processes, which for ZeRO-2
    are killed and resumed."""
    if "nvme" in config.stem:
        builder = pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder()
        if not builder.is_compatible():
            pytest.skip("DeepSpeed's asynchronous I/O needs libaio (apt install libaio-dev)")
    path = Path(on_cpu(config, tmp_path))
    path.write_text(path.read_text().replace("/local_nvme", str(tmp_path)))
    flags = [*job, "--output_dir", f"{tmp_path}/run", "--save_steps", "2"]
    if config.stem in ("zero1", "zero2"):
        words = ["train.py", *flags, "--deepspeed", str(path), *batch(2)]
        if config.stem == "zero2":
            warm.kill_after_saving(tmp_path / "run", 2, *words)
            words += ["--resume_from_checkpoint", "last"]
        warm.run(2, *words)
    else:
        text = config.with_suffix(".yaml").read_text()
        path.with_suffix(".yaml").write_text(text.replace(f"ds_configs/{config.name}", str(path)))
        launcher = [ACCELERATE, "--config_file", str(path.with_suffix(".yaml"))]
        warm.run(1, *launcher, "train.py", *flags, *batch(1), "--save_strategy", "no")
    assert_same_run(tmp_path / "run", vanilla)


@needs_deepspeed
def test_another_family(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """Norms of q and k, and a gate of attention's output, gathered with their layer."""
    flags = of_family("qwen3_5_text-attention", job, tmp_path / "model")
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    train.main([*flags, *alone])
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    flags += ["--deepspeed", config, "--output_dir", f"{tmp_path}/run", "--save_strategy", "no"]
    warm.run(2, "train.py", *flags, *batch(2))
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


@needs_deepspeed
def test_prompts_that_documents_share(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """Are computed once: each rank has prompts of its own."""
    prompt = " ".join(f"{i % 7} bottles of {i % 5}" for i in range(20))
    (tmp_path / "text").mkdir()
    for i in range(16):
        tail = " ".join(f"{i * j % 11} of {j % 3}" for j in range(5 + i))
        (tmp_path / "text" / f"{i}.txt").write_text(f"{prompt} {tail}")
    flags = [*job, "--train_file", f"{tmp_path}/text", "--seq_len", "768", "--save_strategy", "no"]
    flags += ["--max_steps", "3"]
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    train.main([*flags, *alone])
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    flags += ["--deepspeed", config, "--output_dir", f"{tmp_path}/run", "--share_prefixes"]
    said = warm.run(2, "train.py", *flags, *batch(2))
    assert "is computed once" in said
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


@needs_deepspeed
def test_adapters(job: list[str], adapted: Path, warm: Warm, tmp_path: Path) -> None:
    """ZeRO-3 killed and resumed, as PEFT's layers train them."""
    config = on_cpu(ROOT / "ds_configs" / "zero3.json", tmp_path)
    flags = [*job, *LORA, "--deepspeed", config, "--output_dir", f"{tmp_path}/run", *batch(2)]
    flags += ["--save_steps", "1"]
    warm.kill_after_saving(tmp_path / "run", 2, "train.py", *flags)
    warm.run(2, "train.py", *flags, "--resume_from_checkpoint", "last")
    assert_same_run(tmp_path / "run", adapted)
    assert_adapters_alone(tmp_path / "run", job)


@needs_deepspeed
@pytest.mark.parametrize(("zero", "processes"), [("zero2", 1), ("zero3", 2)])
def test_adapters_over_sixteen_bits(
    zero: str, processes: int, job: list[str], over_sixteen_bits: Path, warm: Warm, tmp_path: Path
) -> None:
    """DeepSpeed itself would round fp32 adapters, or their gradients, to bf16."""
    config = on_cpu(ROOT / "ds_configs" / f"{zero}.json", tmp_path)
    flags = ["--deepspeed", config, "--bf16", "true", "--output_dir", f"{tmp_path}/run"]
    warm.run(processes, "train.py", *job, *DORA, *flags, *batch(processes))
    assert_near_run(tmp_path / "run", over_sixteen_bits)


@needs_deepspeed
def test_zero3_offload_on_two_processes_killed_and_resumed(
    job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    config = on_cpu(ROOT / "ds_configs" / f"{KILLED}.json", tmp_path)
    flags = [*job, "--deepspeed", config, "--output_dir", f"{tmp_path}/run", *batch(2)]
    flags += ["--save_steps", "2"]
    warm.kill_after_saving(tmp_path / "run", 2, "train.py", *flags)
    warm.run(2, "train.py", *flags, "--resume_from_checkpoint", "last")
    assert_same_run(tmp_path / "run", vanilla)

    alone = ["--resume_from_checkpoint", "last", "--overwrite_output_dir"]
    status, said = warm.ended(1, "train.py", *flags, *alone)
    assert status == 1
    assert "saved by 2 processes" in said.splitlines()[-1]
