"""What a layer is made of: a stranger among its modules is found, said once, and runs."""

from __future__ import annotations

import pytest
import torch
from small_model import CPU, packed_batch, tiny_config
from torch import nn
from transformers import LlamaForCausalLM

from longctx.config import ModelArguments
from longctx.errors import UserError
from longctx.model.families import why_not_scheduled
from longctx.model.patch import patch

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Adapted(nn.Module):
    """A linear map with a LoRA adapter, as PEFT puts it in the map's place."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, rank))

    @property
    def weight(self) -> nn.Parameter:
        """PEFT's has it too: reading it drops the adapter without a word."""
        return self.base.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Vanilla and patched, with the same weights."""
    pair = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config())
        with torch.no_grad():  # fresh weights are so small that a layer hardly matters
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if patched:
            patch(model, ModelArguments(), CPU)
        pair.append(model.train())
    return pair[0], pair[1]


def adapt(name: str):
    def change(model: LlamaForCausalLM) -> None:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        torch.manual_seed(1)
        setattr(module, attribute, Adapted(getattr(module, attribute)))

    return change


def double(module, given, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def hook(name: str):
    return lambda model: model.get_submodule(name).register_forward_hook(double)


def replace_forward(name: str):
    """As accelerate's hooks and many libraries do."""

    def change(model: LlamaForCausalLM) -> None:
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda *args, **kwargs: double(None, None, forward(*args, **kwargs))

    return change


def normed_hook(model: LlamaForCausalLM) -> None:
    """On the base model, whose output reaches lm_head."""

    def double_hidden(module, given, output):
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.model.register_forward_hook(double_hidden)


def backward_hook(model: LlamaForCausalLM) -> None:
    mlp = model.model.layers[0].mlp
    mlp.register_full_backward_hook(lambda module, gin, gout: (3 * gin[0],))


STRANGERS = [
    pytest.param(adapt("model.layers.1.self_attn.q_proj"), "a forward of its own", id="q_proj"),
    pytest.param(adapt("model.layers.0.self_attn.o_proj"), "a forward of its own", id="o_proj"),
    pytest.param(adapt("model.layers.0.mlp.down_proj"), "a forward of its own", id="down_proj"),
    pytest.param(hook("model.layers.1.mlp"), "hooks on model.layers.1.mlp", id="mlp-hook"),
    pytest.param(hook("model.layers.0.input_layernorm"), "hooks on", id="norm-hook"),
    pytest.param(hook("model.layers.0.self_attn"), "hooks on", id="attention-hook"),
    pytest.param(hook("model.rotary_emb"), "hooks on model.rotary_emb", id="rotary-hook"),
    pytest.param(normed_hook, "hooks on model", id="base-model-hook"),
    pytest.param(backward_hook, "hooks on model.layers.0.mlp", id="backward-hook"),
    pytest.param(replace_forward("model.layers.0.mlp.up_proj"), "up_proj", id="forward"),
    pytest.param(replace_forward("model.layers.0"), "replaced after patching", id="layer"),
    pytest.param(replace_forward("model.norm"), "replaced after patching", id="final-norm"),
    pytest.param(adapt("lm_head"), "an lm_head with a forward of its own", id="lm_head"),
]


@pytest.mark.parametrize(("change", "says"), STRANGERS)
def test_a_stranger_runs_and_is_said_once(change, says: str, capsys) -> None:
    """Loss and gradients are vanilla's with the same change, and not those without it."""
    vanilla, ours = models()
    plain_loss = vanilla(**packed_batch()).loss
    for model in (vanilla, ours):
        change(model)
    losses = []
    for _ in range(2):
        for model in (vanilla, ours):
            model.zero_grad()
            loss = model(**packed_batch()).loss
            loss.backward()
            losses.append(loss.item())
    assert losses[0] != pytest.approx(plain_loss.item(), rel=1e-4) or change is backward_hook
    assert losses[1] == losses[3] == pytest.approx(losses[0], rel=1e-6)
    for (name, p), q in zip(ours.named_parameters(), vanilla.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name
    out = capsys.readouterr().out
    assert out.count("Hugging Face's layers run") == 1 and says in out


def test_peft_adapters_train_through_hugging_faces_layers(capsys) -> None:
    peft = pytest.importorskip("peft")
    losses, gradients = [], []
    for model in models():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        loss = adapted(**packed_batch()).loss
        loss.backward()
        losses.append(loss.item())
        grads = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        gradients.append(grads)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 7 * 2
    for name, truth in gradients[0].items():
        assert (gradients[1][name] - truth).norm() <= 1e-5 * truth.norm(), name
    assert "peft.tuners.lora" in capsys.readouterr().out


def test_label_smoothing_is_not_dropped_with_an_adapted_head() -> None:
    _, ours = models()
    adapt("lm_head")(ours)
    ours.longctx.label_smoothing = 0.1
    with pytest.raises(UserError, match="--label_smoothing_factor needs an lm_head without"):
        ours(**packed_batch())


def test_without_strangers_the_schedule_runs_in_silence(capsys, monkeypatch) -> None:
    _, ours = models()
    for layer in ours.model.layers:
        monkeypatch.setattr(layer.self_attn, "q_proj", layer.self_attn.q_proj)  # no new module
    ours(**packed_batch()).loss.backward()
    assert capsys.readouterr().out == ""
    handle = ours.model.layers[0].mlp.register_forward_hook(double)
    assert why_not_scheduled(ours) == "hooks on model.layers.0.mlp"
    handle.remove()
    assert why_not_scheduled(ours) is None


def test_an_engines_own_hooks_are_no_strangers() -> None:
    """ZeRO-3 hooks every module, to gather its weights."""
    _, ours = models()

    def gather(module, given):
        return None

    ours.model.register_forward_pre_hook(gather)
    assert why_not_scheduled(ours) == "hooks on model"
    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    assert why_not_scheduled(ours) is None
