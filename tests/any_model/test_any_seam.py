"""Layers as checkpoints whose input waits in the store: what callers do with them."""

from __future__ import annotations

import copy

import pytest
import torch
from small_any import config_of, errors, make, step
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import longctx
from longctx.any_model.seam import Seam
from longctx.errors import UserError
from longctx.train.lora.peft_adapters import add_adapters
from longctx.train.options.config import ModelArguments

pytestmark = pytest.mark.usefixtures("reference_kernels")
OWN = dict(any_model=True, attn_backend="sdpa")


def equal(ours: dict, own: dict) -> bool:
    return ours.keys() == own.keys() and all(torch.equal(ours[n], x) for n, x in own.items())


def patched(family: str = "gpt2", **options: object) -> tuple:
    """A model, patched with its own attention and loss, and what its step gave before."""
    model = make(family)
    own = step(model)
    longctx.patch(model, **OWN | options)
    model.longctx_any.loss = None
    return model, own


def test_inputs_lie_in_the_slab_until_backward() -> None:
    model, own = patched(offload_activations="all")
    store = model.longctx_any.store
    ids = torch.randint(10, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    kept = [saved for saved in store._alive()]
    assert [len(saved.hosted) for saved in kept] == [1, 1, 0]  # the last layer's is needed at once
    assert not any(entry.tensor is not None for s in kept[:2] for entry in s.entries.values())
    assert store.locked_bytes >= 2 * 2 * 24 * 32 * 4
    loss.backward()
    assert not store._alive() and not store.tensors_on_gpu()
    assert torch.equal(loss, own["loss"])


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_nobody_holds_inputs_that_are_in_the_slab(family, adapts) -> None:
    """Autograd holds its hooks of saved tensors as long as these, and with them what they hold; and
    leaves that want a gradient, as PEFT asks for it of a frozen embedding's output."""
    model = make(family).train()
    if adapts:
        pytest.importorskip("peft")
        model, _ = add_adapters(model, ModelArguments(class_type="any", lora_r=3, seq_len=24))
    longctx.patch(model, any_model=True, offload_activations="all")
    inside, storages = (model.get_base_model() if adapts else model), []

    def watch(module: object, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        storages.append(StorageWeakRef(x.untyped_storage()))

    for layer in inside.model.layers:
        layer.register_forward_pre_hook(watch, with_kwargs=True)
    ids = torch.randint(10, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    *below, last = (storage.expired() for storage in storages)
    assert all(below) and len(below) > 1 and not last
    loss.backward()
    assert all(storage.expired() for storage in storages[: len(below) + 1])


def test_two_forwards_before_their_backwards() -> None:
    model, _ = patched(offload_activations="all")
    plain = make("gpt2")
    ids = torch.randint(10, 100, (3, 2, 24), generator=torch.Generator().manual_seed(1))
    for one in (model, plain):
        one.zero_grad()
        torch.manual_seed(2)
        losses = [one(input_ids=x, labels=x).loss for x in ids]
        losses[0].backward()
        (losses[2] * losses[1]).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_dropped_graph_frees_its_place() -> None:
    model, own = patched(offload_activations="all")
    ids = torch.randint(10, 100, (2, 24))
    for _ in range(3):
        model(input_ids=ids, labels=ids)
    assert not model.longctx_any.store._alive()
    assert equal(step(model), own)


def test_a_second_backward_is_an_error() -> None:
    model, _ = patched()
    ids = torch.randint(10, 100, (2, 24))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph is not supported"):
        loss.backward()


def test_a_layer_that_writes_into_its_input_is_refused() -> None:
    model, _ = patched("llama")
    layer = model.model.layers[1]
    forward = type(layer.input_layernorm).forward
    layer.input_layernorm.forward = lambda x: forward(layer.input_layernorm, x.mul_(2.0))
    with pytest.raises(UserError, match="LlamaDecoderLayer writes into its input"):
        step(model)


def test_trainers_that_switch_checkpointing_on_get_ours() -> None:
    model, own = patched()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert all(isinstance(b._gradient_checkpointing_func, Seam) for b in model.transformer.h)
    assert equal(step(model), own)
    model.gradient_checkpointing_disable()
    assert equal(step(model), own)
    assert not model.longctx_any.store._alive()


def test_frozen_layers_and_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn", "c_fc"])
    model = make("gpt2")
    plain = peft.get_peft_model(copy.deepcopy(model), config)
    ours = peft.get_peft_model(longctx.patch(model, **OWN), config)
    model.longctx_any.loss = None
    ours.load_state_dict(plain.state_dict())
    assert equal(step(ours), step(plain))


def test_copies_have_a_store_of_their_own() -> None:
    model, own = patched(offload_activations="all")
    other = copy.deepcopy(model)
    assert other.longctx_any.store is not model.longctx_any.store
    seams = [one.transformer.h[0]._gradient_checkpointing_func for one in (model, other)]
    assert seams[1].runtime is other.longctx_any and seams[0].runtime is model.longctx_any
    other.longctx_any.loss = None
    assert equal(step(other), own) and equal(step(model), own)


def test_unpatch_gives_the_model_back() -> None:
    model, own = patched()
    assert longctx.unpatch(model) is model
    assert vars(model).keys() == vars(make("gpt2")).keys()
    assert not model.is_gradient_checkpointing and equal(step(model), own)


def test_options_that_any_model_has_no_use_for() -> None:
    model = make("gpt2")
    with pytest.raises(UserError, match="keep is of the schedule, and any_model runs without it"):
        longctx.patch(model, any_model=True, keep="x")
    with pytest.raises(UserError, match="patched already"):
        longctx.patch(longctx.patch(model, any_model=True), any_model=True)


def test_logits_come_when_they_are_read() -> None:
    model = make("cohere")
    ids = torch.randint(10, 100, (2, 24))
    expected = model(input_ids=ids).logits
    longctx.patch(model, **OWN)
    found = model(input_ids=ids, labels=ids)
    assert torch.allclose(found.logits, expected, atol=1e-5)
    assert torch.equal(found[0], found.loss)
    kept = model(input_ids=ids, labels=ids, logits_to_keep=ids.shape[1])
    assert torch.allclose(kept.loss, found.loss, rtol=1e-5)


def test_auxiliary_losses_are_added() -> None:
    model = make("mixtral", output_router_logits=True)
    own = step(model)
    longctx.patch(model, **OWN)
    assert model.longctx_any.loss is not None
    assert torch.allclose(step(model)["loss"], own["loss"], rtol=1e-6)


class OfAStranger(LlamaForCausalLM):
    """A model as the hub's code defines some: its forward takes a few named arguments alone."""

    past_checkpoints = False

    def forward(self, input_ids=None, labels=None, attention_mask=None) -> CausalLMOutputWithPast:
        if self.past_checkpoints:
            hidden = self.model.embed_tokens(input_ids)
            for layer in self.model.layers:
                hidden = hidden + layer.mlp(layer.input_layernorm(hidden))
        else:
            hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.lm_head(hidden)
        vocab = self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits, labels, vocab)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class PastCheckpoints(OfAStranger):
    past_checkpoints = True


def test_a_forward_of_few_arguments_gets_our_loss(capsys) -> None:
    torch.manual_seed(0)
    model = OfAStranger(config_of("llama")).train()
    own = step(model)
    longctx.patch(model, any_model=True)
    assert "our attention, lm_head + cross-entropy in chunks" in capsys.readouterr().out
    assert errors(step(model), own)["gradient_error"] < 1e-5


def test_layers_that_run_past_their_checkpoints_are_refused() -> None:
    model = longctx.patch(PastCheckpoints(config_of("llama")), any_model=True)
    with pytest.raises(UserError, match="PastCheckpoints runs its layers past"):
        step(model.train())
    model._set_gradient_checkpointing(enable=False)
    step(model)


def test_a_model_without_a_head_gets_our_attention(capsys) -> None:
    model = longctx.patch(make("llama").model, any_model=True)
    assert ", our attention, the model's own loss" in capsys.readouterr().out
    model(input_ids=torch.arange(10, 30)[None])[0].sum().backward()
