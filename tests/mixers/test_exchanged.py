"""Every submodule of a layer of every family, exchanged for a stranger or robbed of what it has:
Hugging Face's layers run and say why, or the schedule's numbers are Hugging Face's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from small_families import family_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import longctx

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("reference_kernels")
SIZES = dict(hidden_size=32, intermediate_size=48, head_dim=8)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=31)
IDS = torch.randint(31, (1, 9), generator=torch.Generator().manual_seed(0))


class Wrapper(nn.Module):
    """Another class around the module, as PEFT's `modules_to_save` puts there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def renamed(module: nn.Module) -> nn.Module:
    """The same forward in a class of another name, which calls its parent's."""
    kind = type(module)

    class Renamed(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    module.__class__ = Renamed
    return module


def with_a_child(module: nn.Module) -> nn.Module:
    module.stranger = nn.Linear(3, 5)
    return module


class Unchanged(Exception):
    """There is nothing to exchange in this module."""


def without(name: str) -> Callable[[nn.Module], nn.Module]:
    def rob(module: nn.Module) -> nn.Module:
        if not hasattr(module, name):
            raise Unchanged
        delattr(module, name)
        return module

    return rob


def nothing(name: str) -> Callable[[nn.Module], nn.Module]:
    def empty(module: nn.Module) -> nn.Module:
        if not hasattr(module, name):
            raise Unchanged
        setattr(module, name, None)
        return module

    return empty


def pruned(module: nn.Module) -> nn.Module:
    """A linear map of fewer outputs, as pruning leaves it."""
    if not isinstance(module, nn.Linear):
        raise Unchanged
    module.weight = nn.Parameter(module.weight[:-2])
    return module


EXCHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a wrapper": Wrapper,
    "a subclass": renamed,
    "Identity": lambda module: nn.Identity(),
    "None": lambda module: None,
    "a Sequential": nn.Sequential,
    "a ModuleList": lambda module: nn.ModuleList([module]),
    "one more child": with_a_child,
    "no weight": without("weight"),
    "weight None": nothing("weight"),
    "no bias": without("bias"),
    "no epsilon": without("variance_epsilon"),
    "no scaling": without("scaling"),
    "scaling None": nothing("scaling"),
    "no is_causal": without("is_causal"),
    "no head_dim": without("head_dim"),
    "no groups": without("num_key_value_groups"),
    "no frequencies": without("inv_freq"),
    "no attention_scaling": without("attention_scaling"),
    "no dropout": without("attention_dropout"),
    "pruned": pruned,
    "another Linear": lambda module: nn.Linear(5, 3),
    "another Norm": lambda module: nn.LayerNorm(32),
    "a hook": lambda module: (module.register_forward_hook(lambda *args: None), module)[1],
}


def small(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(kind, **SIZES)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def result(model: Any) -> tuple[Tensor, dict[str, Tensor]] | type[BaseException]:
    """Loss and gradients, or the kind of error."""
    try:
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    except Exception as error:
        return type(error)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def exchanged(model: Any, where: str, by: Callable[[nn.Module], Any]) -> Iterator[None]:
    """A copy of the submodule is what changes: the model is whole again afterwards."""
    parent, _, name = where.rpartition(".")
    owner = model.get_submodule(parent)
    kept = owner._modules[name]
    owner._modules[name] = by(copy.deepcopy(kept))
    model.zero_grad()
    try:
        yield
    finally:
        owner._modules[name] = kept


SOME = ("a wrapper", "None", "scaling None")
OTHERS = ["gemma2", "olmo2", "starcoder2", "cohere", "qwen2_moe", "glm4_moe", "gpt_oss"]
"""Families with submodules that llama, qwen3 and phi3 have not."""
CASES = [
    *((kind, name) for kind in ("llama", "phi3") for name in EXCHANGES),
    *(("qwen3", name) for name in (*SOME, "Identity", "one more child", "no epsilon", "a hook")),
    *((kind, name) for kind in OTHERS for name in SOME[:2]),
    *((kind, "scaling None") for kind in ("gemma2", "starcoder2")),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_submodule_exchanged(scheduled, capsys, kind: str, name: str) -> None:
    whole = small(kind)
    inside = [path for path, _ in whole.model.layers[1].named_modules()]
    for path in ("norm", "rotary_emb", *(f"layers.1.{path}".rstrip(".") for path in inside)):
        with suppress(Unchanged), exchanged(whole, f"model.{path}", EXCHANGES[name]):
            assert_like_hugging_faces(whole, scheduled, capsys, path)


def assert_like_hugging_faces(vanilla: Any, scheduled: Any, capsys: Any, where: str) -> bool:
    """A patched copy gives the same numbers, or the same error. Whether the schedule ran."""
    capsys.readouterr()
    ours = longctx.patch(copy.deepcopy(vanilla))  # which says it, too
    scheduled.clear()
    truth, found = result(vanilla), result(ours)
    said = capsys.readouterr().out.count("Hugging Face's layers run")
    assert said == (not scheduled), f"{where}: said {said} times"
    if isinstance(truth, type):  # such a model does not run: the error is Hugging Face's
        assert found == truth, f"{where}: {found}, Hugging Face's is {truth}"
        return bool(scheduled)
    assert not isinstance(found, type), f"{where}: {found}"
    torch.testing.assert_close(found[0], truth[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == truth[1].keys(), where
    for parameter, grad in truth[1].items():
        error = (found[1][parameter] - grad).norm()
        assert error <= 1e-4 * grad.norm() + 1e-6, f"{where}: {parameter}"
    return bool(scheduled)


SAVED = ("mlp", "input_layernorm", "norm", "q_proj", "act_fn")
TUNERS: dict[str, Any] = {
    **{
        f"saved {part}": peft.LoraConfig(target_modules=["v_proj"], modules_to_save=[part])
        for part in (*SAVED, "embed_tokens", "lm_head")
    },
    "AdaptionPrompt": peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2
    ),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM"),
    "LNTuning": peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "a LoRA of a parameter": peft.LoraConfig(
        target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]
    ),
    "LoRA": peft.LoraConfig(target_modules=["q_proj", "down_proj"]),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("name", TUNERS)
def test_what_peft_exchanges(scheduled, capsys, name: str) -> None:
    tuned = peft.get_peft_model(small("llama"), copy.deepcopy(TUNERS[name]))
    ran = assert_like_hugging_faces(tuned, scheduled, capsys, name)
    assert ran == (name in ("LoRA", "saved embed_tokens", "saved lm_head"))
