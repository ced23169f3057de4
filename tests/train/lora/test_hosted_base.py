"""A frozen base in host memory: the peak of steps on a GPU is what the plan says."""

from __future__ import annotations

import gc

import peft
import pytest
import torch
from cost_sizes import keep_of
from small_run import logged, prepare
from small_run import run as run_train
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.cost.peak import peak, phases
from longctx.cost.sizes import Batch
from longctx.families.blocks import move_buffers, state_blocks
from longctx.memory.levels import Levels
from longctx.memory.place import PlacedStates
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import patched_part
from longctx.train.lora.quantise import quantise_
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

LAYERS = 6


def adapted(device: torch.device, quantize: str, *, tiny: bool = False, tokens: int = 64):
    config = load_config(
        ModelArguments(preset="tiny" if tiny else "llama-3.1-8b", seq_len=tokens), vocab_size=331
    )
    config.num_hidden_layers, config.tie_word_embeddings = LAYERS, False
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
        quantise_(model, device)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    settings = dict(offload_activations="all", keep="o", tile_tokens=4096)
    return longctx.patch(model, strict=True, **settings)


def planned_bytes(model, tokens: int) -> int:
    """With all that may wait on the host there."""
    patched = patched_part(model)
    sizes, batch = patched.longctx.sizes(patched), Batch(tokens, tokens)
    specs = state_blocks(model, movable=True, head_movable=False)
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    places = (levels := Levels(blocks, "host", accumulates=False)).places(len(levels) - 1)
    standing = PlacedStates(blocks, places, accumulates=False)
    ladder = (LAYERS - 1) * (keep_of("o", "o"),) + (keep_of("o"),)
    return peak(phases(StepTable.of(sizes, batch), ladder, standing)).nbytes


def run(model, device: torch.device, tokens: int, steps: int) -> tuple[list[float], int]:
    """Losses, and the GPU's peak in the last step."""
    optimizer = longctx.exact_adamw(model, lr=1e-3, tokens=tokens, place="host")
    away = [block.spec.name for block in optimizer.stream.blocks if block.streams]
    assert away == ["embedding", *(f"layer {i}" for i in range(LAYERS))]
    ids = torch.randint(331, (1, tokens), device=device)
    inputs = dict(input_ids=ids, labels=ids, position_ids=torch.arange(tokens, device=device)[None])
    losses = []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.clip(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_steps_of_a_small_model(quantize, reference_kernels) -> None:
    model = adapted(torch.device(DEVICE), quantize, tiny=True)
    losses, _ = run(model, torch.device(DEVICE), 64, steps=4)
    assert losses[-1] < losses[0] and planned_bytes(model, 64) > 0


def test_buffers_move_without_the_weights() -> None:
    model = adapted(torch.device("cpu"), "none", tiny=True)
    move_buffers(model, torch.device("meta"))
    buffers = dict(model.named_buffers())
    assert "base_model.model.model.rotary_emb.inv_freq" in buffers
    assert {x.device.type for x in buffers.values()} == {"meta"}
    assert {x.device.type for x in model.parameters()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_weights_go_from_their_files_to_the_host(quantize, tmp_path) -> None:
    """A run of train.py on a GPU, from a saved model."""
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    flags = [flag for flag in prepare(tmp_path) if flag != "--use_cpu"]
    flags += ["--lora_r", "4", "--quantize", quantize, "--dtype", "bfloat16", "--max_steps", "3"]
    found = []
    for place in ("gpu", "host"):
        run_train(flags, tmp_path / place, "--place", place, "--attn_backend", "math")
        found.append([line["loss"] for line in logged(tmp_path / place)])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_the_peak_of_llama_8b_layers(quantize) -> None:
    """Six layers at 32768 tokens, everything on the host that may be: within 3% of the plan."""
    device, tokens = torch.device("cuda"), 32768
    gc.collect()  # what the test before has left
    model = adapted(device, quantize, tokens=tokens)
    planned = planned_bytes(model, tokens)
    _, found = run(model, device, tokens, steps=3)
    assert found == pytest.approx(planned, rel=0.03)
