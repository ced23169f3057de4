"""Buffers by name, against what torch allocates in a step of a tiny model on the CPU."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from cost_sizes import keep_of
from small_cost import PeakTracker
from small_model import tiny_config
from small_states import HOST, everything_on_gpu, llama
from transformers import AutoModelForCausalLM

from longctx.constants import GIB
from longctx.cost.kept import Keep
from longctx.cost.peak import Phase, phases
from longctx.cost.sizes import Batch
from longctx.families.blocks import state_blocks
from longctx.memory.decide import Decision, decide
from longctx.memory.ladder import Budget
from longctx.memory.place import PlacedStates
from longctx.patching.patch import patch_as
from longctx.runtime.costs import StepTable
from longctx.runtime.runtime import model_sizes
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")

T, LAYERS = 512, 3
CPU = torch.device("cpu")
X_O = keep_of("o")
OF_THE_MODEL = ("weights", "AdamW's states", "gradients", "libraries", "the embedding's gradient")


def decided(model, keep: Keep, placement: str = "gpu", accumulates: bool = False) -> Decision:
    sizes = model_sizes(model, model.longctx.args, model.dtype)
    step = replace(model.longctx.step(sizes, T), given=(LAYERS * (keep,), sizes))
    return decide(
        state_blocks(model, movable=True),
        Budget(GIB, GIB),
        placement=placement,
        accumulates=accumulates,
        step=step,
    )


def phases_of(model, keep: Keep, placement: str = "gpu", accumulates: bool = False) -> list[Phase]:
    decision = decided(model, keep, placement, accumulates)
    standing = PlacedStates(decision.blocks, decision.places, accumulates=accumulates)
    return phases(StepTable.of(decision.sizes, Batch(T, T)), LAYERS * (keep,), standing)


def activations(phase: Phase) -> int:
    return sum(nbytes for name, nbytes in phase.buffers.items() if name not in OF_THE_MODEL)


@pytest.mark.parametrize(
    ("keep", "adapters"),
    [("o", False), ("o", True), ("h", True), ("qkv", False), ("all", True), ("all", False)],
)
def test_the_peak_of_a_step(keep, adapters, monkeypatch) -> None:
    """Within a tenth. Heads in groups and few words, or the plain references would have the peak:
    torch's attention for CPUs copies keys and values for every head, its softmax the logits."""
    config = tiny_config(
        vocab_size=32, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    settings = dict(keep=keep, offload_activations="none", head_groups=4, tile_tokens=64)
    patch_as(model, PatchOptions(**settings), CPU)
    if adapters:
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear"), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(32, (1, T))
    batch = dict(input_ids=ids, labels=ids, position_ids=torch.arange(T)[None])
    track = PeakTracker._track_module_params_and_buffers
    monkeypatch.setattr(  # its hooks want gradients everywhere
        *(PeakTracker, "_track_module_params_and_buffers"),
        lambda self, module, install_grad_hooks=False: track(self, module, False),
    )
    tracker = PeakTracker()
    tracker.track_external(model)
    with tracker:
        model(**batch).loss.backward()
    found = {str(kind): n for kind, n in tracker.get_tracker_snapshot("peak")[CPU].items()}
    kinds = ("PARAM", "BUFFER", "GRAD")
    peak = found["Total"] - sum(found[f"_MemRefType.{kind}"] for kind in kinds)
    by_phase = {phase.name: activations(phase) for phase in phases_of(model, keep_of(keep))}
    planned = max(by_phase[name] for name in ("forward", "loss", "backward"))
    assert planned == pytest.approx(peak, rel=0.1)


def test_weights_states_and_gradients_of_each_phase() -> None:
    """Gradients come while activations go, and are gone in the next forward."""
    model = llama(torch.bfloat16, layers=LAYERS)
    parameters = sum(p.numel() for p in model.parameters())
    found = {phase.name: phase.buffers for phase in phases_of(model, X_O)}
    assert all(b["weights"] == 2 * parameters for b in found.values())
    assert all(b["AdamW's states"] == 10 * parameters for b in found.values())
    assert [found[name]["gradients"] for name in ("forward", "loss")] == [0, 0]
    assert found["update"]["gradients"] == 2 * parameters
    embedding = found["embedding"]
    assert embedding["gradients"] + embedding["the embedding's gradient"] == 2 * parameters
    added = {phase.name: phase.buffers for phase in phases_of(model, X_O, accumulates=True)}
    assert {b["gradients"] for name, b in added.items() if name != "embedding"} == {4 * parameters}


def test_on_the_host_three_blocks_weights_are_on_their_way() -> None:
    model = llama(torch.bfloat16, layers=LAYERS)
    decision = decided(model, keep_of("o", "o"), "host")
    assert [place for place in decision.places if place == HOST] == (LAYERS + 2) * [HOST]
    assert everything_on_gpu(decision.specs[-1]) == decision.places[-1]  # norms stay
    phases = {phase.name: phase for phase in phases_of(model, keep_of("o", "o"), "host")}
    forward, loss = phases["forward"], phases["loss"]
    sizes = [block.weight for block in decision.blocks]
    assert loss.buffers["weights"] == sizes[-1]
    assert forward.buffers["weights on their way"] == sum(sizes[1:4])  # layers are the largest
    assert loss.buffers["weights on their way"] == sum(sizes[-4:-1])  # two layers and lm_head
    assert loss.buffers["AdamW's states"] == decision.blocks[-1].states
    assert loss.buffers["gradients"] == 0
