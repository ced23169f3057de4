"""Rows with images under engines and by several processes: the run of one process. What sees
images is whole in each of them, and saved as it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from small_job import Warm, batch, lines_of, on_cpu

from longctx.system import installed
from longctx.train.commands import train

small = pytest.importorskip("small_images")
FSDP2 = "--fsdp true --fsdp_config fsdp_configs/fsdp2.json".split()
ON_CPU = "tests/train/engines/fsdp_on_cpu.py"


@pytest.fixture(scope="module")
def with_images(tmp_path_factory) -> list[str]:
    """Flags of a run over conversations with one image, several and none."""
    folder = tmp_path_factory.mktemp("seeing")
    small.image_model(folder / "model", "qwen3_vl")
    words = f"--model_name_or_path {folder}/model --cache_dir {folder}/cache --use_cpu true"
    words += " --seq_len 96 --learning_rate 0.003 --max_steps 3 --disable_tqdm true"
    words += " --dataloader_num_workers 0 --save_strategy no"
    return [*words.split(), "--train_file", str(small.write(folder, small.about_colours(24)))]


@pytest.fixture(scope="module")
def alone(with_images: list[str], tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train.main([*with_images, "--output_dir", str(folder), *batch(1)])
    return folder


def assert_same(folder: Path, alone: Path, with_images: list[str]) -> None:
    losses = [[line["loss"] for line in lines_of(at) if "loss" in line] for at in (folder, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5) and len(losses[0]) == 3
    ours, theirs = (load_file(at / "final" / "model.safetensors") for at in (folder, alone))
    start = load_file(
        Path(with_images[with_images.index("--model_name_or_path") + 1], "model.safetensors")
    )
    assert ours.keys() == theirs.keys() == start.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=2e-4, msg=name)
        with_images = "language_model" not in name and "lm_head" not in name
        assert torch.equal(weight, start[name]) == with_images, name


def test_two_processes(with_images, alone, warm: Warm, tmp_path) -> None:
    said = warm.run(2, "train.py", *with_images, "--output_dir", f"{tmp_path}/run", *batch(2))
    assert "the vision tower is frozen" in said
    assert_same(tmp_path / "run", alone, with_images)


def test_ddp(with_images, alone, warm: Warm, tmp_path) -> None:
    flags = [*with_images, "--optimizer_states", "as_weights", "--output_dir", f"{tmp_path}/run"]
    warm.run(2, "train.py", *flags, *batch(2))
    assert_same(tmp_path / "run", alone, with_images)


def test_fsdp2_with_rows_that_processes_share(with_images, alone, warm: Warm, tmp_path) -> None:
    flags = [*FSDP2, "--sequence_parallel_size", "2", *batch(1)]
    warm.run(2, ON_CPU, *with_images, *flags, "--output_dir", f"{tmp_path}/run")
    assert_same(tmp_path / "run", alone, with_images)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_in_16_bits(ranks: int, with_images, alone, warm: Warm, tmp_path) -> None:
    """Its shards have 32: what is gathered beside others is no stranger (`Warm.run`). Each process
    has rows of its own, or a part of each."""
    flags = [*FSDP2, "--sequence_parallel_size", str(ranks), *batch(2 // ranks), "--bf16", "true"]
    warm.run(2, ON_CPU, *with_images, *flags, "--output_dir", f"{tmp_path}/run")
    found, truth = (
        [line["loss"] for line in lines_of(at) if "loss" in line]
        for at in (tmp_path / "run", alone)
    )
    assert found == pytest.approx(truth, rel=0.02)


@pytest.mark.skipif(not installed("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_deepspeed(config: str, with_images, alone, warm: Warm, tmp_path) -> None:
    config = on_cpu(ROOT / "ds_configs" / f"{config}.json", tmp_path)
    flags = ["--deepspeed", config, "--output_dir", f"{tmp_path}/run", *batch(2)]
    warm.run(2, "train.py", *with_images, *flags)
    assert_same(tmp_path / "run", alone, with_images)


def test_adapters(with_images, warm: Warm, tmp_path) -> None:
    lora = [*with_images, "--lora_r", "4", "--max_steps", "2"]
    train.main([*lora, "--output_dir", f"{tmp_path}/alone", *batch(1)])
    warm.run(2, ON_CPU, *lora, *FSDP2, "--output_dir", f"{tmp_path}/run", *batch(2))
    lines = [lines_of(tmp_path / name) for name in ("run", "alone")]
    found = [[line["loss"] for line in each if "loss" in line] for each in lines]
    assert found[0] == pytest.approx(found[1], rel=2e-5)
    adapters, truth = (
        load_file(tmp_path / name / "final" / "adapter_model.safetensors")
        for name in ("run", "alone")
    )
    assert adapters.keys() == truth.keys()
    assert all(torch.allclose(x, truth[name], atol=2e-4) for name, x in adapters.items())


def test_text_alone(with_images, warm: Warm, tmp_path) -> None:
    """In a run whose records have no images the tower stays in host memory, and is saved."""
    file = tmp_path / "text.jsonl"
    records = [{"messages": small.exchange(f"What is {n}?", f"{n} it is.")} for n in range(40)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    at = with_images.index("--train_file") + 1
    flags = [*with_images[:at], str(file), *with_images[at + 1 :], "--max_steps", "2"]
    train.main([*flags, "--output_dir", f"{tmp_path}/alone", *batch(1)])
    said = warm.run(2, ON_CPU, *flags, *FSDP2, "--output_dir", f"{tmp_path}/run", *batch(2))
    assert "the vision tower stays in host memory" in said
    weights = [load_file(tmp_path / n / "final" / "model.safetensors") for n in ("run", "alone")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(x, weights[1][name], atol=2e-4) for name, x in weights[0].items())
