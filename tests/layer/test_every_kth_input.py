"""Layers that keep no input, for which those below run forward again: no bit depends on it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from small_families import family_config
from small_layer import (
    REPEATABLE,
    SHORT,
    assert_running_out_of_memory_leaves_nothing,
    batch,
    cast,
    every_kth,
    gradients,
)
from small_states import anywhere, llama, nothing_on_gpu, place
from small_states import batch as row
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.cost.kept import Keep, Ladder
from longctx.errors import UserError
from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.mlp import MLP
from longctx.memory.store import ActivationStore
from longctx.memory.stream import StateStream

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("reference_kernels")
LAYERS = 5
SETTINGS: dict[str, Any] = dict(
    offload_activations="all", keep="all", tile_tokens=31, head_groups=2, attn_backend=REPEATABLE
)
LADDERS = {
    "pairs": every_kth(2, LAYERS),  # k does not divide the layers
    "threes, on the GPU": every_kth(3, LAYERS, hosted=False),
    "threes, then x and o": every_kth(3, LAYERS, last=1),
    "all": every_kth(LAYERS, LAYERS),
    "all, of one rung": (Keep(frozenset()),),
}
KEEP_X: Ladder = (Keep(frozenset({"x"})),)


def made(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = family_config(family, num_hidden_layers=LAYERS, **changes)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return cast(model.to(DEVICE), dtype)


def patched(model: Any, inputs: dict[str, Any] | None = None) -> Any:
    """Patches the model and runs a batch, so that the slab has room for all that layers may keep,
    whatever ladder a test sets afterwards."""
    found = longctx.patch(model, strict=True, **SETTINGS)
    found(**(inputs or batch(SHORT)))
    return found


def found(model: Any, ladder: Ladder, inputs: Any = None) -> list[Tensor]:
    """The loss, and all gradients."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.longctx.store.ladder = ladder
    torch.manual_seed(7)
    loss, grads = gradients(model, inputs or batch(SHORT))
    assert inner.longctx.store.tensors_on_gpu() == []
    return [loss.detach(), *(grad.clone() for grad in grads.values() if grad is not None)]


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected) > LAYERS
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


FEW = ["llama", "gemma2", "olmo2", "cohere", "phi3", "qwen3"]
"""Norms after the parts are gemma2's, norms over all heads olmo2's, the MLP beside attention
cohere's."""


@pytest.mark.parametrize(("turn", "family"), enumerate(FEW))
def test_families_train_bit_by_bit(family, turn) -> None:
    """Llama has every ladder, the others two each."""
    layers = {"layer_types": LAYERS * ["full_attention"]} if family == "gemma2" else {}
    model = patched(made(family, **layers))
    expected = found(model, KEEP_X)
    ladders = [*LADDERS.values()]
    for ladder in ladders if turn == 0 else (ladders * 2)[turn - 1 : turn + 1]:
        assert_equal(found(model, ladder), expected)


def test_adapters_draw_their_masks_again() -> None:
    config = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.3)
    model = patched(peft.get_peft_model(made("llama"), config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    expected = found(model, KEEP_X)
    for ladder in LADDERS.values():
        assert_equal(found(model, ladder), expected)


def test_frozen_layers_below_have_nothing_to_make() -> None:
    model = patched(made("llama"))
    for parameter in [*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()]:
        parameter.requires_grad_(False)
    expected = found(model, KEEP_X)
    for ladder in LADDERS.values():
        assert_equal(found(model, ladder), expected)


def test_other_forwards_come_in_between() -> None:
    """Evaluation, another batch whose backward comes first, and one that is dropped."""
    model = patched(made("llama", torch.float32))
    inputs, other = batch(SHORT), batch([[60, 30]], seed=2)

    def both(ladder: Ladder, last_first: bool) -> list[Tensor]:
        model.longctx.store.ladder = ladder
        model.zero_grad()
        losses = [model(**inputs).loss]
        with torch.no_grad():
            model(**other)
        losses.append(model(**other).loss)
        model(**inputs)
        for loss in losses[:: -1 if last_first else 1]:
            loss.backward()
        assert model.longctx.store.tensors_on_gpu() == []
        return [*(x.detach() for x in losses), *(p.grad.clone() for p in model.parameters())]

    for last_first in (False, True):
        expected = both(KEEP_X, last_first)
        for ladder in [*LADDERS.values()][last_first::2]:
            assert_equal(both(ladder, last_first), expected)


def watching(seen: list[Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, y: Tensor) -> None:
        seen.append(y)

    hook.__module__ = "torch.utils.watch"  # others' hooks make Hugging Face's layers run
    return hook


def test_a_gradient_that_comes_from_between() -> None:
    """Backward begins at the output of an inner layer, which may keep no input; the layers above it
    have no backward."""
    model = patched(made("llama", torch.float32))
    expected: Any = None
    for ladder in (KEEP_X, *LADDERS.values()):
        model.longctx.store.ladder = ladder
        seen: list[Tensor] = []
        handle = model.model.layers[3].register_forward_hook(watching(seen))
        loss = model(**batch(SHORT)).loss
        handle.remove()
        weight = model.model.layers[1].mlp.up_proj.weight
        grad = torch.autograd.grad(seen.pop().square().sum(), weight)[0]
        expected = grad if expected is None else expected
        assert torch.equal(grad, expected)
        del loss


@pytest.mark.parametrize(("k", "accumulates"), [(2, True), (3, False), (6, True)])
def test_weights_and_states_that_wait_on_the_host(k, accumulates) -> None:
    """Two steps of exact AdamW, with all on the host, or with anything anywhere."""
    trained = []
    for ladder, where in (
        (6 * KEEP_X, nothing_on_gpu),
        (every_kth(k, 6), nothing_on_gpu),
        (every_kth(k, 6, last=1), anywhere(random.Random(k))),
    ):
        model = llama(layers=6)
        placed = place(model, where, ladder=ladder, accumulates=accumulates)
        optimizer, losses = placed.optimizer(), []
        for step in range(2):
            for part in range(1 + accumulates):
                loss = model(**row(step + 7 * part)).loss
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        trained.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for other in trained[1:]:
        assert_equal(other, trained[0])


@pytest.mark.parametrize("k", [3, 4])
def test_weights_come_up_once_more_and_no_more_of_them_at_a_time(k, monkeypatch) -> None:
    """The count takes one more copy of each layer's weights (Levels.traffic)."""
    brought, most = [0], [0]
    bring = StateStream.bring

    def counted(stream: StateStream, block: Any) -> None:
        brought[0] += block.is_away and block.spec.layer is not None
        bring(stream, block)
        most[0] = max(most[0], sum(b.streams and not b.is_away for b in stream.blocks))

    monkeypatch.setattr(StateStream, "bring", counted)
    copies = []
    for ladder in (12 * KEEP_X, every_kth(k, 12)):
        model = llama(layers=12)
        place(model, nothing_on_gpu, ladder=ladder)
        brought[0] = 0
        model(**row(0)).loss.backward()
        copies.append(brought[0])
    assert copies[0] <= copies[1] <= copies[0] + 12
    assert most[0] <= 3


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize(
    ("part", "calls"),
    [((MLP, "forward"), 6), ((SelfAttention, "forward"), 7), ((MLP, "backward"), 2)],
    ids=["mlp again", "attention again", "backward"],
)
def test_nothing_of_a_step_that_ran_out_of_memory_stays(part, calls, hosted) -> None:
    model, inputs = patched(made("llama", torch.float32)), batch([[20]])
    ladder = every_kth(3, LAYERS, hosted=hosted)
    expected = found(model, ladder, inputs)
    assert_running_out_of_memory_leaves_nothing(model, inputs, part, calls)
    assert_equal(found(model, ladder, inputs), expected)


# --- what cannot be ----------------------------------------------------------------------------


def test_an_input_that_was_changed_is_an_error() -> None:
    model = patched(made("llama", torch.float32))
    model.longctx.store.ladder = every_kth(5, LAYERS, hosted=False)
    inputs = batch(SHORT)
    embeds = model.model.embed_tokens(inputs.pop("input_ids")).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, **inputs).loss
    with torch.no_grad():
        embeds.add_(1.0)
    with pytest.raises(RuntimeError, match="input was modified in place before its backward"):
        loss.backward()


@pytest.mark.parametrize("exchanged", [False, True])
def test_an_input_that_others_have_changed_cannot_be_made_again(exchanged) -> None:
    store = ActivationStore(torch.device("cpu"))
    store.reserve(every_kth(2, 2), 0)
    below, y = store.open(1, torch.ones(3, 2)), torch.ones(3, 2)
    store.release(below, y)
    assert store.open(0, y).below is below
    x = y.clone() if exchanged else y.add_(1.0)
    with pytest.raises(UserError, match="not what the layer below returned.*--keep x"):
        store.open(0, x)


def gathering() -> Any:
    def hook(module: nn.Module, args: Any) -> None: ...

    hook.__module__ = "torch.distributed.fsdp"
    return hook


def test_weights_that_an_engine_gathers_for_a_call() -> None:
    model = patched(made("llama", torch.float32))
    assert model.longctx.can_run_again(model)
    model.longctx.store.ladder = LADDERS["pairs"]
    model.model.layers[2].register_forward_pre_hook(gathering())
    assert not model.longctx.can_run_again(model)  # so that the search does not choose it
    loss = model(**batch(SHORT)).loss
    with pytest.raises(UserError, match="an engine gathers each layer's weights for a call"):
        loss.backward()


def test_a_second_backward_is_an_error() -> None:
    model = patched(copy.deepcopy(made("llama", torch.float32)))
    model.longctx.store.ladder = LADDERS["all"]
    loss = model(**batch(SHORT)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once|ran twice"):
        loss.backward()
