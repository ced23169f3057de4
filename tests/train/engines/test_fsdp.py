"""FSDP2 through accelerate: on CPUs through fsdp_on_cpu.py, and on GPUs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from small_job import (
    ACCELERATE,
    DORA,
    LORA,
    Launched,
    Warm,
    assert_adapters_alone,
    assert_near_run,
    assert_same_run,
    batch,
    of_family,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from longctx.train.commands import train
from longctx.train.engines.fsdp import FSDP2, keep_shapes_only
from longctx.train.options.config import ModelArguments
from longctx.train.options.source import PRESETS
from longctx.train.start.loading import load_config, load_model


def test_fsdp_on_the_cpu_is_refused(warm: Warm, tmp_path: Path) -> None:
    flags = ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json", "--use_cpu", "true"]
    flags += ["--preset", "tiny", "--output_dir", f"{tmp_path}/run"]
    status, said = warm.ended(1, "train.py", *flags)
    assert status == 1
    assert "silently runs DDP" in said.splitlines()[-1]


@pytest.mark.parametrize(("config", "start"), [("fsdp2", "preset"), ("fsdp2_offload", "saved")])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fsdp2_through_accelerate(
    device: str, config: str, start: str, job: list[str], warm: Warm, tmp_path: Path
) -> None:
    """In fp32: killed after a save, resumed (a preset on one process), the best checkpoint loaded,
    and as vanilla without an engine."""
    script, processes, flags = "tests/train/engines/fsdp_on_cpu.py", 2, list(job)
    runs: Warm | Launched = warm
    if device == "cuda":
        script, processes, runs = "train.py", min(torch.cuda.device_count(), 2), Launched()
        flags = " ".join(job).replace("--use_cpu true", "").split()
        flags += ["--dtype", "float32", "--bf16", "false", "--tf32", "false"]
    if start == "preset":
        at = flags.index("--model_name_or_path")
        flags[at : at + 2] = ["--preset", "tiny"]
    best = "--load_best_model_at_end true --save_steps 1 --eval_strategy steps --eval_steps 1"
    flags += best.split()
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    if device == "cuda":
        runs.run(1, "train.py", *flags, *alone)
    else:
        train.main([*flags, *alone])
    sharded = [*flags, "--fsdp", "true", "--fsdp_config", f"fsdp_configs/{config}.json"]
    sharded += ["--output_dir", f"{tmp_path}/run"]
    runs.kill_after_saving(tmp_path / "run", processes, script, *sharded, *batch(processes))
    processes = 1 if start == "preset" else processes
    resumed = [*sharded, *batch(processes), "--resume_from_checkpoint", "last"]
    resumed += ["--allow_changed", "num_processes", "gradient_accumulation_steps"]
    said = runs.run(processes, script, *resumed)
    assert "Could not locate the best model" not in said
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


def test_accelerate_launch_with_an_fsdp_yaml(
    job: list[str], vanilla: Path, warm: Warm, tmp_path: Path
) -> None:
    launcher = [ACCELERATE, "--mixed_precision", "no"]
    launcher += [
        "--config_file",
        "fsdp_configs/shared_2gpu.yaml",
        "tests/train/engines/fsdp_on_cpu.py",
    ]
    flags = ["--output_dir", f"{tmp_path}/run", "--save_strategy", "no", *batch(1)]
    warm.run(1, *launcher, *job, *flags)
    assert_same_run(tmp_path / "run", vanilla)


def test_another_family(job: list[str], warm: Warm, tmp_path: Path) -> None:
    """The file names no layer's class. Fused weights and windows."""
    flags = of_family("phi3-windows", job, tmp_path / "model")
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    train.main([*flags, *alone])
    sharded = ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json"]
    sharded += ["--output_dir", f"{tmp_path}/run", "--save_strategy", "no", *batch(2)]
    warm.run(2, "tests/train/engines/fsdp_on_cpu.py", *flags, *sharded)
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


def test_adapters(job: list[str], adapted: Path, warm: Warm, tmp_path: Path) -> None:
    """Two processes share rows until they are killed; one resumes, and loads the best checkpoint.
    As PEFT's layers train them."""
    sharded = [*job, *LORA, "--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json"]
    sharded += ["--output_dir", f"{tmp_path}/run", "--save_steps", "1", *batch(1)]
    sharded += "--load_best_model_at_end true --eval_strategy steps --eval_steps 1".split()
    script, shared = "tests/train/engines/fsdp_on_cpu.py", ["--sequence_parallel_size", "2"]
    warm.kill_after_saving(tmp_path / "run", 2, script, *sharded, *shared)
    resumed = ["--resume_from_checkpoint", "last", "--allow_changed", "num_processes"]
    warm.run(1, script, *sharded, *resumed)
    assert_same_run(tmp_path / "run", adapted)
    assert_adapters_alone(tmp_path / "run", job)


def test_adapters_over_sixteen_bits(
    job: list[str], over_sixteen_bits: Path, warm: Warm, tmp_path: Path
) -> None:
    """Frozen weights stay in bf16 and adapters in fp32 (fsdp_on_cpu.py). Only the first process has
    weights of which to take DoRA's lengths."""
    sharded = ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json", "--bf16", "true"]
    sharded += ["--output_dir", f"{tmp_path}/run", *batch(2)]
    warm.run(2, "tests/train/engines/fsdp_on_cpu.py", *job, *DORA, *sharded)
    assert_near_run(tmp_path / "run", over_sixteen_bits)


def test_only_the_first_process_loads_weights_under_fsdp(job: list[str], monkeypatch) -> None:
    args = ModelArguments(model_name_or_path=job[job.index("--model_name_or_path") + 1])
    config = load_config(args, vocab_size=1)
    for rank, device in ((0, "cpu"), (1, "meta")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        model = load_model(args, config, device=torch.device("cpu"), engine=FSDP2())
        assert {p.device.type for p in model.parameters()} == {device}


def test_the_norm_of_a_large_gradient_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    weight = torch.nn.Parameter(torch.zeros(2**12, 2**13))
    weight.grad = torch.full_like(weight, 1e-3)
    true_norm = 1e-3 * 2**12.5
    accelerator = SimpleNamespace(unscale_gradients=lambda: None)

    def clip(max_norm: float) -> torch.Tensor:
        return FSDP2().clip_grad_norm(accelerator, [weight], max_norm)

    assert torch.linalg.vector_norm(weight.grad).item() < 0.9999 * true_norm  # why it is not used
    assert clip(math.inf).item() == pytest.approx(true_norm, rel=1e-5)
    assert clip(1.0).item() == pytest.approx(true_norm, rel=1e-5)
    assert clip(2.0).item() == pytest.approx(1.0, rel=1e-5)


def test_a_process_without_weights_still_tells_its_parameters_apart() -> None:
    """accelerate maps an optimizer's parameters to their shards by `data_ptr()`."""
    config = LlamaConfig(**PRESETS["tiny"], vocab_size=1000)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = [p.shape for name, p in model.named_parameters() if name != "lm_head.weight"]
    keep_shapes_only(model, mixed=True)
    assert [p.shape for p in model.parameters()] == shapes
    assert len({p.data_ptr() for p in model.parameters()} - {0}) == len(shapes)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * len(shapes)
    assert model.lm_head.weight is model.model.embed_tokens.weight
