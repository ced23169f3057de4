"""LoRA on experts, as PEFT's `target_parameters` has it, against PEFT's own forward."""

from __future__ import annotations

import copy

import pytest
import torch
from small_families import EXPERTS
from small_layer import LADDER, PACKED, assert_no_bit_depends_on_the_ladder, batches, gradients
from test_every_family import trio

import longctx
from exactness import relative_error
from longctx.runtime.runtime import model_sizes, runtime_of
from longctx.settings import PatchOptions

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("reference_kernels")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(model, targets: list[str] | None, rank: int = 3, linears=("q_proj", "o_proj"), **more):
    """A PEFT model whose adapters add something to every weight."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=5,
        target_modules=[*linears],
        target_parameters=targets,
        task_type="CAUSAL_LM",
        **more,
    )
    model = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model.train()


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((family, STACKS) for family in EXPERTS), ("olmoe", STACKS[1:]), ("mixtral", STACKS[::-1])],
)
def test_gradients_are_pefts(family, targets, capsys) -> None:
    _, naive, _ = trio(family, torch.float32)
    assert_like_pefts(adapted(naive, targets), capsys)


SHARED = {
    "qwen2_moe": [f"shared_expert{n}" for n in (".gate_proj", ".up_proj", ".down_proj", "_gate")],
    "granitemoeshared": ["shared_mlp.input_linear", "shared_mlp.output_linear"],
}


@pytest.mark.parametrize(
    ("family", "use_dora"), [("qwen2_moe", False), ("qwen2_moe", True), ("granitemoeshared", False)]
)
def test_a_shared_expert_takes_adapters_as_other_linear_layers_do(family, use_dora, capsys) -> None:
    _, naive, _ = trio(family, torch.float32)
    stacks = STACKS[:0] if use_dora else STACKS
    theirs = adapted(naive, stacks, linears=SHARED[family], use_dora=use_dora)
    assert_like_pefts(theirs, capsys)


def assert_like_pefts(theirs, capsys) -> None:
    ours = copy.deepcopy(theirs)
    longctx.patch(ours, tile_tokens=31, keep="o", strict=True)
    for inputs in batches(PACKED, 2):
        loss, grads = gradients(theirs, inputs)
        found, own = gradients(ours, inputs)
        assert relative_error(found, loss) < 1e-6
        assert grads.keys() == own.keys() and any("lora_" in name for name in grads)
        for name, grad in grads.items():
            assert relative_error(own[name], grad) < 1e-5, name
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def test_a_disabled_adapter_adds_nothing() -> None:
    _, naive, _ = trio("mixtral", torch.float32)
    theirs = adapted(naive, STACKS)
    ours = copy.deepcopy(theirs)
    longctx.patch(ours, strict=True)
    (inputs,) = batches(PACKED, 1)
    with theirs.disable_adapter(), ours.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(ours(**inputs).loss, theirs(**inputs).loss)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_bit_depends_on_the_ladder(family) -> None:
    _, naive, _ = trio(family, torch.bfloat16)
    ours = adapted(naive, STACKS)
    longctx.patch(ours, **LADDER)
    base = ours.get_base_model()
    assert_no_bit_depends_on_the_ladder(base, mixed=0, turn=1)


def test_a_router_with_an_adapter_runs_hugging_faces_layers(capsys) -> None:
    _, naive, _ = trio("mixtral", torch.float32)
    ours = adapted(naive, ["mlp.gate.weight"])
    longctx.patch(ours)
    (inputs,) = batches(PACKED, 1)
    ours(**inputs)
    assert "mlp.gate, a peft.tuners.lora.layer.ParamWrapper" in capsys.readouterr().out


def test_a_token_meets_the_adapters_of_its_experts() -> None:
    _, naive, _ = trio("mixtral", torch.float32)
    ours = adapted(naive, STACKS, rank=3)
    sizes = model_sizes(ours.get_base_model(), PatchOptions(), torch.float32)
    (kind,) = sizes.kinds
    D, wide, inner, k = 128, 8 * 16, 160, 2
    of_attention = 3 * (D + wide) + 3 * (wide + D)
    of_experts = k * 3 * (D + 2 * inner) + k * 3 * (inner + D)
    assert kind.rank == 3
    assert kind.adapted.parameters == of_attention + of_experts
    assert runtime_of(ours.get_base_model()) is None
