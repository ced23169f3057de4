"""The scheduled layers against vanilla Hugging Face, by the rule of tests/exactness.py.

Truth is vanilla in fp64 (fp32 for 16 bits), naive is vanilla in the dtype under test. Loss and
every parameter's gradient are compared.
"""

from __future__ import annotations

import copy
import gc
import random
from dataclasses import replace

import pytest
import torch
from small_layer import (
    LADDER,
    PACKED,
    SHORT,
    Autocast,
    any_keep,
    assert_no_bit_depends_on_the_ladder,
    assert_running_out_of_memory_leaves_nothing,
    assert_settings_train_exactly,
    assert_settings_train_exactly_in_autocast,
    assert_trains_exactly,
    batch,
    batches,
    cast,
    gradients,
    in_turn,
    packed,
    trio,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from exactness import assert_exact, relative_error
from longctx.errors import UserError
from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.mlp import MLP
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [
        (8, 64, torch.float32),
        (8, 96, torch.bfloat16),
        (8, 128, torch.float32),
        (2, 64, torch.bfloat16),
        (2, 96, torch.float32),
        (2, 128, torch.bfloat16),
        (1, 64, torch.float32),
        (1, 96, torch.bfloat16),
        (1, 128, torch.float32),
        (1, 128, torch.bfloat16),
    ],
)
def test_gqa_and_head_dims(kv_heads, head_dim, dtype) -> None:
    """Every two meet: no code of ours asks for all three."""
    models = trio(dtype, num_key_value_heads=kv_heads, head_dim=head_dim)
    assert_trains_exactly(models, *packed(dtype))


CUTS = {
    "whole": (1, 4096),  # one group, one tile
    "ragged": (2, 7),  # neither the row nor its documents are multiples of the tile
    "finest": (4, 144),  # one kv head a group, the tile is the row
}


@pytest.mark.parametrize(
    ("dtype", "keep", "offload", "cut"),
    [
        (torch.bfloat16, "auto", "none", "whole"),
        (torch.bfloat16, "auto", "all", "ragged"),
        (torch.bfloat16, "x", "all", "finest"),
        (torch.bfloat16, "x", "auto", "whole"),
        (torch.bfloat16, "all", "auto", "ragged"),
        (torch.float32, "auto", "auto", "finest"),
        (torch.float32, "x", "none", "ragged"),
        (torch.float32, "all", "none", "finest"),
        (torch.float32, "all", "all", "whole"),
    ],
)
def test_every_setting(dtype, keep, offload, cut) -> None:
    """Every two settings meet. Three need not: no bit depends on what is kept and where, whatever
    the cut (test_no_bit_depends_on_what_is_kept_and_where)."""
    groups, tile = CUTS[cut]
    settings = dict(keep=keep, offload_activations=offload, head_groups=groups, tile_tokens=tile)
    assert_settings_train_exactly(trio, dtype, settings=settings, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("lengths", "biases"),
    [([[144]], True), ([[5, 43], [48], [16, 16, 16]], False)],
    ids=["one-document-biases", "batched-plain"],
)
def test_rows_batches_and_biases(biases, lengths) -> None:
    models = trio(torch.bfloat16, attention_bias=biases, mlp_bias=biases)
    # The errors of a bias, which has few elements, scatter more than a weight's.
    assert_trains_exactly(models, *batches(lengths, 8 if biases else 4))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_batch(left) -> None:
    inputs = batch([[48], [48]])
    mask = torch.ones_like(inputs["input_ids"])
    padded = slice(0, 11) if left else slice(30, 48)
    mask[1, padded] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    if left:
        labels[1, 11] = -100  # predicted by padding, whose output is nobody's business
    inputs |= {"attention_mask": mask, "labels": labels}
    assert_trains_exactly(trio(torch.float32), inputs)


FROZEN = {
    "layer": lambda m: m.model.layers[1].parameters(),
    "bottom": lambda m: [*m.model.embed_tokens.parameters(), *m.model.layers[0].parameters()],
    "norms": lambda m: [p for n, p in m.named_parameters() if "norm" in n],
    "attention": lambda m: [p for n, p in m.named_parameters() if "self_attn" in n],
    "some": lambda m: [p for n, p in m.named_parameters() if "k_proj" in n or "up_proj" in n],
    "all-but-top": lambda m: m.model.parameters(),
}


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
def test_frozen_parameters(frozen) -> None:
    models = trio(torch.float32, dict(offload_activations="all"))
    for model in models:
        for parameter in FROZEN[frozen](model):
            parameter.requires_grad_(False)
    assert_trains_exactly(models, *packed(torch.float32))
    assert all(p.grad is None for p in FROZEN[frozen](models[2]))


def test_gradients_accumulate_and_hooks_run() -> None:
    truth, naive, ours = trio(torch.float32)
    seen: list[str] = []
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    for model in (truth, naive, ours):
        for seed in (1, 2):
            model(**batch(PACKED, seed)).loss.backward()
    assert sorted(seen) == sorted([n for n, _ in ours.named_parameters()] * 2)
    for (name, p), q, r in zip(
        ours.named_parameters(), naive.parameters(), truth.parameters(), strict=True
    ):
        assert_exact(name, p.grad, q.grad, r.grad)


def test_autograd_grad_of_embeddings_and_weights() -> None:
    models = trio(torch.float32)
    inputs = batch(PACKED)
    ids = inputs.pop("input_ids")
    found = []
    for model in models:
        embeds = model.model.embed_tokens(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embeds, **inputs).loss
        weights = [embeds, model.model.layers[1].self_attn.k_proj.weight, model.model.norm.weight]
        found.append(torch.autograd.grad(loss, weights))
        assert model.lm_head.weight.grad is None
    for i, (true, plain, our) in enumerate(zip(*found, strict=True)):
        assert_exact(str(i), our, plain, true)


def test_a_second_backward_is_an_error_not_a_wrong_gradient() -> None:
    _, _, ours = trio(torch.float32)
    loss = ours(**batch(PACKED)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once|ran twice"):
        loss.backward()


@pytest.mark.usefixtures("deterministic")
def test_repeated_runs_are_identical() -> None:
    _, _, ours = trio(torch.bfloat16)
    (loss, first), (again, second) = (gradients(ours, batch(PACKED)) for _ in range(2))
    assert torch.equal(loss, again)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_keeps_nothing() -> None:
    truth, _, ours = trio(torch.float32, dict(offload_activations="all"))
    with torch.no_grad():
        loss = ours.eval()(**batch(PACKED)).loss
    assert ours.longctx.store._alive() == []
    assert relative_error(loss, truth(**batch(PACKED)).loss) < 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, i: i.update(output_attentions=True), "output_attentions"),
        (lambda m, i: i.update(use_cache=True), "cache"),
        (
            lambda m, i: setattr(m.model.layers[0].self_attn, "attention_dropout", 1e-9),
            "attention dropout",
        ),
    ],
    ids=["output_attentions", "cache", "dropout"],
)
def test_what_the_schedule_does_not_cover_runs_hugging_faces_layers(change, says, capsys) -> None:
    truth, _, ours = trio(torch.float32)
    inputs = batch([[48]])
    truth_loss = truth(**inputs).loss
    ours.config._attn_implementation = "eager"  # output_attentions needs it
    change(ours.train(), inputs)
    for _ in range(2):
        loss = ours(**inputs).loss
    assert relative_error(loss, truth_loss) < 1e-5
    assert capsys.readouterr().out.count("Hugging Face's layers run") == 1


def test_head_groups_must_divide_the_kv_heads() -> None:
    _, _, ours = trio(torch.float32, dict(head_groups=3))
    with pytest.raises(UserError, match="--head_groups 3 must divide"):
        ours(**batch(PACKED))


@pytest.mark.parametrize(
    ("lengths", "keep"), [(PACKED, "auto"), (PACKED, "x"), ([[5, 43], [48]], "all")]
)
def test_autocast_over_fp32_weights(keep, lengths, capsys) -> None:
    settings = dict(keep=keep, offload_activations="all", tile_tokens=31, head_groups=2)
    model, how = (trio, torch.float32), dict(settings=settings, mlp_bias=True)
    ours = assert_settings_train_exactly_in_autocast(*model, lengths=lengths, **how)
    assert ours.longctx.dtype == torch.bfloat16 and "custom: " not in capsys.readouterr().out
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


def test_no_bit_depends_on_what_is_kept_in_autocast() -> None:
    """tests/families/test_autocast_families.py has the third turn."""
    _, _, ours = trio(torch.float32, LADDER)
    inputs, model = batch(SHORT), Autocast(ours)
    model(**inputs)
    found = []
    for ladder in in_turn(1) + in_turn(2):
        ours.longctx.store.ladder = ladder
        found.append(gradients(model, inputs)[1])
        found[-1] = {name: grad.clone() for name, grad in found[-1].items()}
    for grads in found:
        assert [n for n in grads if not torch.equal(grads[n], found[0][n])] == []


@pytest.mark.parametrize(("dtype", "turn"), [(torch.float32, None), (torch.bfloat16, 0)])
def test_no_bit_depends_on_what_is_kept_and_where(dtype, turn) -> None:
    """Every rung, on the GPU, on the host and partly there, in all layers or in one; then a layer
    each at random."""
    _, _, ours = trio(dtype, LADDER)
    assert_no_bit_depends_on_the_ladder(ours, mixed=10, turn=turn)


def test_store_under_stress(monkeypatch) -> None:
    """40 steps of random lengths, settings and ladders mixed, every buffer poisoned before use:
    gradients are those of a store that is switched off. Some graphs are dropped without a
    backward."""
    from longctx.memory import store as offload

    def poisoned(*args, **kwargs):
        x = torch.empty(*args, **kwargs)
        return x.fill_(255 if x.dtype == torch.uint8 else float("nan"))

    class Torch:
        """The store's view of torch, with an `empty` that hides nothing."""

        empty = staticmethod(poisoned)

        def __getattr__(self, name: str):
            return getattr(torch, name)

    monkeypatch.setattr(offload, "torch", Torch())
    draw = random.Random(0)
    _, _, plain = trio(torch.float32, dict(offload_activations="none"))
    _, _, ours = trio(torch.float32, dict(offload_activations="all", keep="all"))
    for step in range(40):
        lengths = [[draw.randint(1, 40) for _ in range(draw.randint(1, 3))]]
        inputs = batch(lengths, seed=step)
        inputs["labels"] = inputs["input_ids"]
        settings = dict(tile_tokens=draw.choice([5, 16, 64]), head_groups=draw.choice([1, 2]))
        for model in (plain, ours):
            model.longctx.args = replace(model.longctx.args, **settings)
        if draw.random() < 0.1:
            dropped = ours(**inputs).loss  # its graph lives on through the next forward
        store = ours.longctx.store
        ours.longctx.reserve(ours, inputs["input_ids"].numel())
        store.ladder = tuple(any_keep(draw) for _ in range(draw.randint(1, 3)))
        if not store._alive():
            store._slab.fill_(255)
        (loss, grads), (our, our_grads) = gradients(plain, inputs), gradients(ours, inputs)
        if draw.random() < 0.5:
            dropped = None  # noqa: F841
        assert torch.equal(loss, our)
        for name, grad in grads.items():
            if grad is not None:
                assert torch.equal(grad, our_grads[name]), f"step {step}: {name}"


@pytest.mark.parametrize(
    ("part", "layer", "offload"),
    [
        *(((MLP, "backward"), 0, "none"), ((MLP, "backward"), 2, "all")),
        *(((SelfAttention, "backward_"), 0, "all"), ((SelfAttention, "backward_"), 1, "none")),
        ((SelfAttention, "input_backward_"), 1, "all"),
        ((SelfAttention, "input_backward_"), 2, "none"),
    ],
)
def test_nothing_of_a_step_that_ran_out_of_memory_stays(offload, part, layer) -> None:
    """Wherever backward fails, no activation outlives its graph, and the next step is exact."""
    _, _, ours = trio(torch.float32, dict(offload_activations=offload, tile_tokens=16))
    inputs = batch(PACKED)
    expected = gradients(ours, inputs)[1]
    expected = {name: grad.clone() for name, grad in expected.items()}
    before = _activations()
    tiles = 9 if part[0] is MLP else 1  # of 16 tokens
    assert_running_out_of_memory_leaves_nothing(ours, inputs, part, (2 - layer) * tiles)
    ours.zero_grad()
    assert _activations() <= before
    for name, grad in gradients(ours, inputs)[1].items():
        assert torch.equal(grad, expected[name]), name


def _activations() -> int:
    """Bytes of the tensors alive that are neither parameters nor the slab's."""
    gc.collect()
    kept = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype is torch.float32]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values()
    )


def test_host_memory_that_is_too_small_is_named_before_the_first_step() -> None:
    settings = dict(offload_activations="all", host_memory_gib=1e-6)
    _, _, ours = trio(torch.float32, settings)
    with pytest.raises(UserError, match="host memory is .* GiB short.*--keep x"):
        ours(**batch(PACKED))


@pytest.mark.gpu
def test_llama_8b_dimensions_in_bf16() -> None:
    """Two layers of Llama-3.1-8B, 8192 tokens: every gradient at most 1.1 times vanilla's error."""
    big = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1)
    big.num_hidden_layers = 2
    torch.manual_seed(0)
    with torch.device("cuda"):
        naive = LlamaForCausalLM._from_config(big, dtype=torch.bfloat16)
    truth = cast(copy.deepcopy(naive), torch.float32)
    ours = copy.deepcopy(naive)
    patch_as(ours, PatchOptions(offload_activations="all"), torch.device("cuda"))
    assert_trains_exactly((truth, naive, ours), batch([[5000, 3192]]))
