"""--offload_activations all with vanilla: transformers' checkpoints, which wait on the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import prepare, run
from transformers import modeling_utils

from longctx.train.options.config import offload_checkpoints

STEPS, LAYERS = 2, 2
VANILLA = ["--class_type", "vanilla", "--max_steps", str(STEPS), "--save_strategy", "no"]


@pytest.mark.parametrize("more", [[], ["--lora_r", "4"]], ids=["all weights", "lora"])
def test_each_layer_of_each_step_is_offloaded(tmp_path: Path, monkeypatch, more) -> None:
    """By the setting that the option makes. Pinned memory needs a GPU."""
    asked: list[dict[str, Any]] = []
    save = modeling_utils.save_on_cpu

    def unpinned(**how: Any) -> Any:
        asked.append(how)
        return save(**{**how, "pin_memory": False})

    monkeypatch.setattr(modeling_utils, "save_on_cpu", unpinned)
    words = [*prepare(tmp_path), *VANILLA, *more]
    losses = [line["loss"] for line in run(words, tmp_path / "kept")]
    on_a_cpu = run(words, tmp_path / "here", "--offload_activations", "all")
    assert not asked and [line["loss"] for line in on_a_cpu] == losses
    setting = ["--gradient_checkpointing_kwargs", '{"offload": true}']
    offloaded = run(words, tmp_path / "offloaded", *setting)
    assert [line["loss"] for line in offloaded] == losses
    assert [how["pin_memory"] for how in asked] == [True] * STEPS * LAYERS


def test_the_option_makes_the_setting_of_this_and_of_newer_transformers() -> None:
    args = SimpleNamespace(device=torch.device("cuda"), gradient_checkpointing_kwargs=None)
    offload_checkpoints(args)
    assert args.gradient_checkpointing_kwargs == {"offload": True}
    newer = SimpleNamespace(activation_checkpointing_kwargs={"every_n_layers": 2}, **vars(args))
    offload_checkpoints(newer)
    assert newer.activation_checkpointing_kwargs == {"every_n_layers": 2, "offload": True}


@pytest.mark.gpu
def test_on_a_gpu_the_inputs_of_layers_are_on_the_host(tmp_path: Path) -> None:
    """At the loss a layer's input is all that it would have kept."""
    peaks = []
    words = ["--preset", "llama-3.2-1b", "--class_type", "vanilla", "--max_steps", "1"]
    words += ["--seq_len", "16384", "--dtype", "bfloat16", "--save_strategy", "no"]
    for more in ([], ["--offload_activations", "all"]):
        torch.cuda.reset_peak_memory_stats()
        run([*words, "--cache_dir", str(tmp_path)], tmp_path / str(len(peaks)), *more)
        peaks.append(torch.cuda.max_memory_allocated())
    kept = 16 * 16384 * 2048 * 2  # 1 GiB
    assert peaks[0] - peaks[1] > 0.9 * kept
