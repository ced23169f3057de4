"""A plan counts the memory of a mixer's tensors (`MixerMemory`). Here mixers of published sizes run
on a CPU, where their kernels allocate their results and compute nothing."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from live_bytes import LiveBytes, no_kernel_runs
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.cost.dims import MixerMemory
from longctx.families.families import layers_of
from longctx.kernels import launch
from longctx.layer.row_documents import RowDocuments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers.mixers import ModelsMixer

TOKENS = 1024
BOUNDS = (0, 320, 384, TOKENS)
PLACES = TOKENS + 3 * 64
"""Each of the three documents ends a chunk, and has one more."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-9b": (
        "qwen3_5_text",
        dict(hidden_size=4096, linear_num_value_heads=32, layer_types=["linear_attention"]),
    ),
    "granite-4.0-h-tiny": (
        "granitemoehybrid",
        dict(
            hidden_size=1536,
            mamba_n_heads=48,
            mamba_d_state=128,
            num_local_experts=0,
            shared_intermediate_size=8,
            layer_types=["linear_attention"],
        ),
    ),
    "falcon-h1-1.5b": (
        "falcon_h1",
        dict(hidden_size=2048, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_state=256),
    ),
    "lfm2-1.2b": ("lfm2", dict(hidden_size=2048, layer_types=["conv"])),
}


def mixer(model: str) -> tuple[Any, MixerSpec]:
    family, sizes = MODELS[model]
    heads = dict(num_attention_heads=4, num_key_value_heads=1)
    config = AutoConfig.for_model(
        family, **{"intermediate_size": 8, **heads, **sizes}, vocab_size=8, num_hidden_layers=1
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train().model
    ((layer, own),) = layers_of(base)
    spec = own.part(MixerSpec)
    assert spec is not None
    return layer.get_submodule(spec.path), spec


def adapt_(module: Any) -> None:
    """Gives a mixer's linear layers adapters, over weights that rest."""
    module.requires_grad_(False)
    config = peft.LoraConfig(r=16, target_modules=r".*(in_proj|in_proj_\w+|out_proj)")
    peft.inject_adapter_in_model(config, module)


def measured(module: Any, spec: MixerSpec, *, packed: bool) -> MixerMemory:
    """Returns the bytes that are alive in forward and backward, in elements of a place and of a
    column of the mixer's linear layers. Only adapters and the input get gradients."""
    parameters = dict(module.named_parameters())
    columns = sum(len(p) for name, p in parameters.items() if p.dim() == 2 and "lora" not in name)
    hidden = parameters[next(name for name in parameters if "in_proj" in name)].shape[1]
    trained = [p for p in parameters.values() if p.requires_grad]
    n1 = torch.randn(1, TOKENS, hidden, dtype=torch.bfloat16, requires_grad=True)
    trained.append(n1)
    documents = RowDocuments(torch.tensor(BOUNDS, dtype=torch.int32), TOKENS) if packed else None
    others = [n1, *parameters.values()]
    if documents is not None:
        chunks = vars(documents.chunks).values()
        others += [documents.positions, *(x for x in chunks if isinstance(x, torch.Tensor))]

    def run() -> torch.Tensor:
        z: torch.Tensor = ModelsMixer(module, spec)(n1, (), parameters, packed=documents)[0]
        return z

    with torch.no_grad(), LiveBytes(others) as forward:
        run()
    with LiveBytes(others) as backward:
        z = run()
        graph = backward.now
        backward.most = 0
        torch.autograd.grad(z, trained, torch.empty_like(z))
    unit = n1.element_size() * (PLACES if packed else TOKENS) * columns
    found = graph - z.nbytes, forward.most, backward.most - 2 * z.nbytes
    return MixerMemory(*(nbytes / unit for nbytes in found))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_mixer_holds_no_more_than_is_counted(model, packed, monkeypatch) -> None:
    """A mixer holds no less than two thirds of what is counted, which has room for transformers
    5.17."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    no_kernel_runs(monkeypatch)
    module, spec = mixer(model)
    adapt_(module)
    counted, found = spec.holds, measured(module, spec, packed=packed)
    for name, own, most in zip(MixerMemory._fields, found, counted, strict=True):
        assert 0.66 * most <= own <= 1.02 * most, (name, found, counted)
