"""Real engines on the CPU: DDP and DeepSpeed through train.py, FSDP2 through fsdp_on_cpu.py.

One tiny pretrained model and one corpus; the reference is vanilla in one process. Losses, gradient
norms and saved weights of every engine and number of processes are compared with it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from accelerate import init_empty_weights
from torch.utils.cpp_extension import _get_build_directory
from transformers import AutoModelForCausalLM, LlamaConfig

import train
from longctx import engine
from longctx.checkpoint import METRICS
from longctx.config import ModelArguments, TrainArguments, installed, offloads
from longctx.errors import UserError
from longctx.loading import PRESETS, load_config, load_model

ROOT = Path(__file__).parent.parent
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
STEPS = 5
ROWS_A_STEP = 4

needs_deepspeed = pytest.mark.skipif(
    not installed("deepspeed"), reason="deepspeed is not installed"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """Flags of the same training run, whatever the engine: a saved model and a few documents."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "text").mkdir()
    for i in range(30):
        words = " ".join(f"{(i * j) % 97} bottles of {j % 13}" for j in range(40 + 9 * i))
        (folder / "text" / f"{i}.txt").write_text(words)
    flags = [
        "--train_file",
        f"{folder}/text",
        "--cache_dir",
        f"{folder}/cache",
        "--use_cpu",
        "true",
    ]
    flags += ["--seq_len", "128", "--learning_rate", "0.003", "--disable_tqdm", "true"]
    flags += ["--attn_backend", "auto", "--eval_file", f"{folder}/text/29.txt"]
    start = ["--preset", "tiny", "--class_type", "vanilla", "--max_steps", "1"]
    start += ["--learning_rate", "0", "--save_strategy", "no", "--output_dir", f"{folder}/start"]
    train.main([*flags, *start])
    model = ["--model_name_or_path", f"{folder}/start/final", "--max_steps", str(STEPS)]
    return [*flags, *model]


@pytest.fixture(scope="module")
def vanilla(job: list[str], tmp_path_factory) -> Path:
    """The reference: Hugging Face's model, one process, no engine."""
    folder = tmp_path_factory.mktemp("vanilla")
    train.main([*job, "--class_type", "vanilla", "--output_dir", str(folder), *batch(1)])
    return folder


def batch(processes: int) -> list[str]:
    return ["--gradient_accumulation_steps", str(ROWS_A_STEP // processes)]


def environment(gpus: int = 0) -> dict[str, str]:
    """One thread a process: two processes with two each on two cores are slower than one."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def launch(processes: int, *words: str) -> list[str]:
    if processes == 1:
        return [sys.executable, *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc_per_node", str(processes), *words]


def run(command: list[str], gpus: int = 0) -> str:
    env = environment(gpus)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def kill_after_saving(command: list[str], folder: Path, gpus: int = 0) -> None:
    """Runs until the second step's checkpoint is there, then kills every process at once."""
    env = environment(gpus)
    log = folder.parent / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=stderr)
    while not (folder / "checkpoint-2").exists():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.05)
    launcher = psutil.Process(process.pid)
    for victim in [*launcher.children(recursive=True), launcher]:  # workers have their own session
        victim.kill()
    process.wait()
    assert not (folder / "final").exists()


@pytest.fixture
def abandoned_lock() -> Iterator[Path]:
    """As of a run that was killed while it built an extension."""
    lock = Path(_get_build_directory("longctx_killed_build", verbose=False)) / "lock"
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (0, 0))
    yield lock
    lock.unlink(missing_ok=True)
    lock.parent.rmdir()


def on_cpu(config: Path, folder: Path) -> str:
    """The published file without pinned memory, which a machine without a GPU has not."""
    path = folder / config.name
    path.write_text(config.read_text().replace('"pin_memory": true', '"pin_memory": false'))
    return str(path)


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def assert_same_run(folder: Path, vanilla: Path) -> None:
    """fp32 on both sides: they differ by the order of sums."""
    ours, theirs = lines_of(folder), lines_of(vanilla)
    # DeepSpeed's norm of the same gradients differs by 1e-4 from torch's, for vanilla as well.
    for key, rel in (("loss", 2e-5), ("eval_loss", 2e-5), ("grad_norm", 5e-4)):
        a, b = ([line[key] for line in lines if key in line] for lines in (ours, theirs))
        assert len(a) >= len(b) >= 1
        assert a[-len(b) :] == pytest.approx(b, rel=rel), key
    model, truth = (AutoModelForCausalLM.from_pretrained(f / "final") for f in (folder, vanilla))
    for (name, p), q in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4, msg=name)  # Adam moves 3e-3 a step


# --- no engine: DDP on several processes -----------------------------------------------------


def test_two_processes_without_an_engine(job: list[str], vanilla: Path, tmp_path: Path) -> None:
    """Every process finds the best checkpoint, which is the last one here."""
    best = "--load_best_model_at_end true --save_steps 5 --eval_strategy steps --eval_steps 5"
    flags = ["--output_dir", f"{tmp_path}/run", *best.split(), *batch(2)]
    assert "Could not locate the best model" not in run(launch(2, "train.py", *job, *flags))
    assert_same_run(tmp_path / "run", vanilla)


# --- DeepSpeed -------------------------------------------------------------------------------


@needs_deepspeed
@pytest.mark.parametrize("config", DS_CONFIGS, ids=lambda path: path.stem)
def test_each_deepspeed_file_trains(
    config: Path, job: list[str], vanilla: Path, tmp_path: Path
) -> None:
    """By its YAML through accelerate; ZeRO-1 and 2 by the flag, on two processes, which are killed
    and resumed."""
    if "nvme" in config.stem:
        builder = pytest.importorskip("deepspeed.ops.op_builder").AsyncIOBuilder()
        if not builder.is_compatible():
            pytest.skip("DeepSpeed's asynchronous I/O needs libaio (apt install libaio-dev)")
    path = Path(on_cpu(config, tmp_path))
    path.write_text(path.read_text().replace("/local_nvme", str(tmp_path)))
    flags = [*job, "--output_dir", f"{tmp_path}/run", "--save_steps", "2"]
    if config.stem in ("zero1", "zero2"):
        command = launch(2, "train.py", *flags, "--deepspeed", str(path), *batch(2))
        kill_after_saving(command, tmp_path / "run")
        run([*command, "--resume_from_checkpoint", "last"])
    else:
        text = config.with_suffix(".yaml").read_text()
        path.with_suffix(".yaml").write_text(text.replace(f"ds_configs/{config.name}", str(path)))
        launcher = [sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", str(path.with_suffix(".yaml"))]
        run([*launcher, "train.py", *flags, *batch(1), "--save_strategy", "no"])
    assert_same_run(tmp_path / "run", vanilla)


@needs_deepspeed
def test_zero3_offload_on_two_processes_killed_and_resumed(
    job: list[str], vanilla: Path, tmp_path: Path, abandoned_lock: Path
) -> None:
    config = on_cpu(ROOT / "ds_configs" / "zero3_cpu.json", tmp_path)
    flags = [*job, "--deepspeed", config, "--output_dir", f"{tmp_path}/run", *batch(2)]
    flags += ["--save_steps", "2"]
    command = launch(2, "train.py", *flags)
    kill_after_saving(command, tmp_path / "run")
    assert not abandoned_lock.exists()  # or torch might wait for one like it for ever
    run([*command, "--resume_from_checkpoint", "last"])
    assert_same_run(tmp_path / "run", vanilla)

    alone = ["--resume_from_checkpoint", "last", "--overwrite_output_dir"]
    done = subprocess.run(
        launch(1, "train.py", *flags, *alone),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "saved by 2 processes" in done.stderr.splitlines()[-1]


# --- FSDP2 -----------------------------------------------------------------------------------


def test_fsdp_on_the_cpu_is_refused(tmp_path: Path) -> None:
    flags = ["--fsdp", "true", "--fsdp_config", "fsdp_configs/fsdp2.json", "--use_cpu", "true"]
    command = launch(1, "train.py", "--preset", "tiny", *flags, "--output_dir", f"{tmp_path}/run")
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "silently runs DDP" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("config", "start"), [("fsdp2", "preset"), ("fsdp2_offload", "saved")])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fsdp2_through_accelerate(
    device: str, config: str, start: str, job: list[str], tmp_path: Path
) -> None:
    """In fp32: killed after a save, resumed (a preset on one process), the best checkpoint loaded,
    and as vanilla without an engine."""
    script, gpus, flags = "tests/fsdp_on_cpu.py", 0, list(job)
    if device == "cuda":
        script, gpus = "train.py", min(torch.cuda.device_count(), 2)
        flags = " ".join(job).replace("--use_cpu true", "").split()
        flags += ["--dtype", "float32", "--bf16", "false", "--tf32", "false"]
    if start == "preset":
        at = flags.index("--model_name_or_path")
        flags[at : at + 2] = ["--preset", "tiny"]
    best = "--load_best_model_at_end true --save_steps 1 --eval_strategy steps --eval_steps 1"
    flags += best.split()
    alone = ["--class_type", "vanilla", "--output_dir", f"{tmp_path}/vanilla", *batch(1)]
    if gpus:
        run(launch(1, "train.py", *flags, *alone), gpus=1)
    else:
        train.main([*flags, *alone])
    sharded = [*flags, "--fsdp", "true", "--fsdp_config", f"fsdp_configs/{config}.json"]
    sharded += ["--output_dir", f"{tmp_path}/run"]
    processes = gpus or 2
    command = launch(processes, script, *sharded, *batch(processes))
    kill_after_saving(command, tmp_path / "run", gpus)
    processes = 1 if start == "preset" else processes
    resumed = [*sharded, *batch(processes), "--resume_from_checkpoint", "last"]
    said = run(launch(processes, script, *resumed), min(gpus, processes))
    assert "Could not locate the best model" not in said
    assert_same_run(tmp_path / "run", tmp_path / "vanilla")


@pytest.mark.parametrize("config", ["fsdp2", "fsdp2_offload"])
def test_accelerate_launch_with_an_fsdp_yaml(
    config: str, job: list[str], vanilla: Path, tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    launcher += ["--config_file", f"fsdp_configs/{config}.yaml", "tests/fsdp_on_cpu.py"]
    run([*launcher, *job, "--output_dir", f"{tmp_path}/run", "--save_strategy", "no", *batch(2)])
    assert_same_run(tmp_path / "run", vanilla)


def test_only_the_first_process_loads_weights_under_fsdp(job: list[str], monkeypatch) -> None:
    args = ModelArguments(model_name_or_path=job[job.index("--model_name_or_path") + 1])
    config = load_config(args, vocab_size=1)
    for rank, device in ((0, "cpu"), (1, "meta")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        model = load_model(args, config, device=torch.device("cpu"), engine="fsdp")
        assert {p.device.type for p in model.parameters()} == {device}


def test_the_norm_of_a_large_gradient_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    weight = torch.nn.Parameter(torch.zeros(2**12, 2**13))
    weight.grad = torch.full_like(weight, 1e-3)
    true_norm = 1e-3 * 2**12.5
    assert torch.linalg.vector_norm(weight.grad).item() < 0.9999 * true_norm  # why it is not used
    assert engine.clip_shards([weight], math.inf).item() == pytest.approx(true_norm, rel=1e-5)
    assert engine.clip_shards([weight], 1.0).item() == pytest.approx(true_norm, rel=1e-5)
    assert engine.clip_shards([weight], 2.0).item() == pytest.approx(1.0, rel=1e-5)


def test_a_process_without_weights_still_tells_its_parameters_apart() -> None:
    """accelerate maps an optimizer's parameters to their shards by `data_ptr()`."""
    config = LlamaConfig(**PRESETS["tiny"], vocab_size=1000)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = [p.shape for name, p in model.named_parameters() if name != "lm_head.weight"]
    engine.keep_shapes_only(model, mixed=True)
    assert [p.shape for p in model.parameters()] == shapes
    assert len({p.data_ptr() for p in model.parameters()} - {0}) == len(shapes)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * len(shapes)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- the files and the checks ----------------------------------------------------------------


def test_sharded_checkpoints_without_an_optimizer_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(TrainArguments, "engine", "fsdp")
    monkeypatch.setattr(TrainArguments, "device", torch.device("cuda"))
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, save_only_model=True)
    with pytest.raises(UserError, match="--save_only_model is impossible with FSDP"):
        engine.start_engine(args)


def test_other_parallelism_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(UserError, match="parallelism_config is not supported"):
        engine.start_engine(args)


def test_each_yaml_says_what_its_json_says() -> None:
    for path in DS_CONFIGS:
        settings = yaml.safe_load(path.with_suffix(".yaml").read_text())
        assert settings["deepspeed_config"]["deepspeed_config_file"] == f"ds_configs/{path.name}"
        stage = json.loads(path.read_text())["zero_optimization"]["stage"]
        assert settings["deepspeed_config"]["zero3_init_flag"] == (stage == 3)
    for path in (ROOT / "fsdp_configs").glob("*.json"):
        theirs = yaml.safe_load(path.with_suffix(".yaml").read_text())["fsdp_config"]
        ours = json.loads(path.read_text())
        ours["offload_params"] = ours.pop("cpu_offload")
        ours["transformer_layer_cls_to_wrap"] = ",".join(ours["transformer_layer_cls_to_wrap"])
        assert theirs == {f"fsdp_{key}": value for key, value in ours.items()}


def test_host_offload_is_seen_in_a_file_text_or_dict(tmp_path: Path) -> None:
    assert offloads(str(ROOT / "fsdp_configs/fsdp2_offload.json"))
    assert not offloads(str(ROOT / "fsdp_configs/fsdp2.json"))
    assert offloads('{"cpu_offload": true}') and offloads({"cpu_offload": True})
    assert not offloads(None)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="broken.json: not JSON"):
        offloads(str(tmp_path / "broken.json"))


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True)
    (tmp_path / "checkpoint-1" / "global_step1").mkdir(parents=True)
    with pytest.raises(UserError, match="saved with engine deepspeed .* --model_name_or_path"):
        engine.check_resume(args, tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="holds no optimizer"):
        engine.check_resume(args, tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "optimizer.pt").touch()
    engine.check_resume(args, tmp_path / "checkpoint-2")
