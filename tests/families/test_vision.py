"""Vision-language models, patched: their text. Images are in test_images.py.

Text is held to the rule of tests/exactness.py, with every form of positions that a model takes.
"""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from small_families import family_config, mix_documents_apart_
from small_layer import (
    DEVICE,
    PACKED,
    Autocast,
    assert_exact_run,
    assert_trains_exactly,
    batch,
    batches,
    cast,
    gradients,
    run,
    truth_of,
)
from small_vision import DENSE, FEW, KINDS, image_batch, mllama_config, vision_config, vision_model
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration, LlavaModel

import longctx
from longctx.errors import UserError
from longctx.families.families import base_of
from longctx.families.strangers import why_not_chunked, why_not_scheduled
from longctx.families.vision import at_rest, rest_, towers

pytestmark = pytest.mark.usefixtures("reference_kernels")
ROWS = [[[20, 28]], [[5, 43], [48]]]
QWENS = [kind for kind in KINDS if kind.startswith("qwen")]
HF_RUNS = "Hugging Face's layers run"


def trio(kind: str, dtype: torch.dtype = torch.float32):
    """(truth, naive, ours) with the same weights; the towers are frozen."""
    naive = cast(vision_model(kind).to(DEVICE), dtype)
    for _, tower in towers(naive):
        tower.requires_grad_(False)
    truth = truth_of(naive, dtype)
    ours = copy.deepcopy(naive)
    longctx.patch(ours, strict=True)
    for model in (truth, naive):
        mix_documents_apart_(model)
    return truth, naive, ours


def apart(inputs):
    """The batch with positions of four rows, in which all of Qwen's tell documents apart."""
    positions = inputs["position_ids"]
    return inputs | {"position_ids": positions.expand(4, *positions.shape)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        *((kind, torch.bfloat16) for kind in ("gemma3", "qwen3_vl")),
    ],
)
def test_packed_text_is_exact(kind, dtype) -> None:
    models = trio(kind, dtype)
    exact = dtype == torch.float32
    for rows in ROWS if exact else [PACKED]:
        found = batches(rows)[: 2 if exact else 4]  # bf16's errors scatter from batch to batch
        assert_trains_exactly(models, *(map(apart, found) if kind in QWENS else found))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_text_under_autocast_is_exact(kind) -> None:
    found = batches(PACKED)
    models = map(Autocast, trio(kind))
    assert_trains_exactly([*models], *(map(apart, found) if kind in QWENS else found))


@pytest.mark.parametrize("kind", FEW)
def test_padded_text_is_exact(kind) -> None:
    inputs = batch([[48], [48]])
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 31:] = 0
    inputs |= {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    del inputs["position_ids"]
    assert_trains_exactly(trio(kind), inputs)


FORMS = ["none", "2", "1", "3", "4", "4 written"]


@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("qwen2_5_vl", form) for form in FORMS), *((kind, "2") for kind in QWENS[::2])],
)
def test_every_form_of_positions_keeps_documents_apart(kind, form) -> None:
    """Hugging Face's models get the four rows in which they tell documents apart."""
    inputs = batch([[20, 28]])
    theirs, positions = apart(inputs), inputs.pop("position_ids")
    if form == "2":
        inputs["position_ids"] = positions
    elif form == "4 written":  # the three of RoPE begin at 7, and are no view of one another
        rope = (positions + 7).expand(3, *positions.shape)
        inputs["position_ids"] = torch.cat([positions[None], rope])
    elif form != "none":
        inputs["position_ids"] = positions.expand(int(form), *positions.shape)
    if form in ("none", "4 written"):
        theirs = inputs
    truth, naive, ours = trio(kind)
    assert_exact_run(run(ours, inputs), run(naive, theirs), run(truth, theirs), torch.float32)


@pytest.mark.parametrize("bounds", [False, True], ids=["positions", "bounds"])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_hugging_faces_layers_keep_documents_apart(kind, bounds) -> None:
    """They run for the sake of a hook, and read neither one row of positions nor bounds."""
    naive = vision_model(kind)
    ours = longctx.patch(copy.deepcopy(naive))
    ours.model.language_model.layers[0].mlp.register_forward_hook(lambda *a: None)
    inputs = batch([[20, 28]])
    theirs = apart(inputs) | {"use_cache": False}
    if bounds:
        del inputs["position_ids"]
        inputs["cu_seq_lens_q"] = torch.tensor([0, 20, 48], dtype=torch.int32, device=DEVICE)
    found, loss = ours(**inputs).loss, naive(**theirs).loss
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)


def assert_same(naive, ours, inputs) -> None:
    """The same loss, and gradients that differ by the rounding of the loss in chunks alone."""
    (loss, grads), (found, theirs) = gradients(naive, inputs), gradients(ours, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        if grad is None:
            assert theirs[name] is None, name
        else:
            torch.testing.assert_close(theirs[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_images_that_are_seen_both_ways_in_hugging_faces_layers(capsys) -> None:
    """For the sake of a hook, of a cache, and of padding that may be read."""
    naive = vision_model("gemma3")
    ours = longctx.patch(copy.deepcopy(naive))
    inputs = image_batch("gemma3")
    hook = ours.model.language_model.layers[0].mlp.register_forward_hook(lambda *a: None)
    assert_same(naive, ours, inputs)
    assert_same(naive, ours, inputs)
    assert capsys.readouterr().out.count(HF_RUNS) == 1
    hook.remove()
    cached = [model(**inputs, use_cache=True) for model in (naive, ours)]
    assert torch.equal(*(found.logits for found in cached))
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 40:] = 0
    del inputs["labels"]
    found = [model(**inputs, attention_mask=mask).logits for model in (naive, ours)]
    assert torch.equal(*found)
    assert f"{HF_RUNS} for calls with images beside padding" in capsys.readouterr().out
    strict = longctx.patch(vision_model("gemma3"), strict=True)
    with pytest.raises(UserError, match="images beside padding that may be read"):
        strict(**inputs, attention_mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_from_images_is_that_of_hugging_face(kind) -> None:
    """The language model's has its bits. Qwen's patches are embedded by another kernel."""
    naive = vision_model(kind).eval()
    ours = longctx.patch(copy.deepcopy(naive))
    inputs = image_batch(kind)
    del inputs["labels"]
    text = {"input_ids": inputs["input_ids"][:, :5]}
    with torch.no_grad():
        for given in (inputs, text):
            exact = given is text or kind not in QWENS
            tolerance = dict(rtol=0, atol=0) if exact else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours(**given).logits, naive(**given).logits, **tolerance)
            longer = [m.generate(**given, max_new_tokens=4, do_sample=False) for m in (naive, ours)]
            assert torch.equal(*longer)


def test_features_that_the_caller_gives_are_added_after_the_first_layers() -> None:
    naive = vision_model("qwen3_vl").model.language_model
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    inputs = {"input_ids": batch([[48]])["input_ids"]}
    seen = torch.zeros(1, 48, dtype=torch.bool)
    seen[0, 3:7] = True
    states = []
    for model in (naive, ours):
        features = torch.ones(4, 128, requires_grad=True)
        given = {"visual_pos_masks": seen, "deepstack_visual_embeds": [features, features * 2]}
        state = model(**inputs, **given).last_hidden_state
        state.square().sum().backward()
        states.append((state.detach(), features.grad))
    for theirs, found in zip(*states, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_processors_and_calls_by_position(kind) -> None:
    """Token types that are all of text; arguments in the order of Hugging Face's class."""
    truth, naive, ours = trio(kind)
    inputs = batch([[48]])
    types = {"gemma3": "token_type_ids"}.get(kind, "mm_token_type_ids" if kind in QWENS else None)
    if types:
        inputs[types] = torch.zeros_like(inputs["input_ids"])
    assert_trains_exactly((truth, naive, ours), inputs)
    assert (
        list(inspect.signature(ours.forward).parameters)[:5]
        == (list(inspect.signature(naive.forward).parameters)[:5])
    )
    assert "pixel_values" in inspect.signature(ours.forward).parameters  # Trainer keeps its column
    image = image_batch(kind)
    order = list(inspect.signature(naive.forward).parameters)
    args = [image.pop(name, None) for name in order[:3]]
    with torch.no_grad():
        found = [model(*args, **image).logits for model in (naive, ours)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_patched_and_taken_away_again(kind, tmp_path) -> None:
    ours = longctx.patch(vision_model(kind))
    assert why_not_scheduled(base_of(ours)) is None and why_not_chunked(ours) is None
    ours.save_pretrained(tmp_path)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    plain.set_experts_implementation("eager")  # as in `vision_config`
    given = {"input_ids": batch([[48]])["input_ids"]}
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(**batch([[48]])).loss, ours(**batch([[48]])).loss)
    longctx.unpatch(ours)
    assert not [name for name, module in ours.named_modules() if "forward" in vars(module)]
    atol = 0.0 if kind in DENSE else 1e-6  # experts' matmuls depend on where a stack lies
    with torch.no_grad():
        found, wanted = (model.eval()(**given).logits for model in (plain, ours))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def test_a_joint_alone_is_patched() -> None:
    naive = vision_model("gemma3").model
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    inputs = {"input_ids": batch([[48]])["input_ids"]}
    found = [model(**inputs).last_hidden_state for model in (naive, ours)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert ours.train()(**inputs).last_hidden_state.grad_fn is not None


def test_a_joint_with_a_forward_of_its_own_keeps_it() -> None:
    class Louder(LlavaModel):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.last_hidden_state = 2 * found.last_hidden_state
            return found

    naive = vision_model("llava")
    naive.model.__class__ = Louder
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    assert_same(naive, ours, batch([[48]]))


@pytest.mark.parametrize("kind", KINDS)
def test_towers_at_rest_move_with_nothing(kind) -> None:
    model = vision_model(kind)
    rest_(model)
    model = copy.deepcopy(model).to(torch.bfloat16)
    resting = {p for module in at_rest(model) for p in module.parameters()}
    assert resting and all(p.dtype == torch.float32 and not p.requires_grad for p in resting)
    moved = [p for p in model.parameters() if p not in resting]
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in moved)
    assert len(moved) == len({*base_of(model).parameters(), *model.lm_head.parameters()})


def test_llama_3_2_vision_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(mllama_config())
    for part, named in (
        (model, "MllamaForConditionalGeneration, whose language model is MllamaTextModel"),
        (model.model, "MllamaModel, whose language model is MllamaTextModel"),
        (model.model.language_model, "MllamaTextModel"),
    ):
        with pytest.raises(UserError) as refused:
            longctx.patch(part)
        assert f"no family for {named}: its layers of cross-attention" in str(refused.value)
        assert "Any model trains in Hugging Face's layers" in str(refused.value)


def test_a_language_model_that_multiplies_tokens_embeddings_alone() -> None:
    """Hugging Face's joint embeds tokens by itself, without Falcon-H1's factor, also in text."""
    text = family_config("falcon_h1")
    assert text.embedding_multiplier != 1
    config = vision_config("llava")
    config.text_config = text
    torch.manual_seed(0)
    naive = LlavaForConditionalGeneration(config)
    ours = longctx.patch(copy.deepcopy(naive))
    ids = torch.arange(1, 25)[None]
    expected, found = (model(input_ids=ids, labels=ids).loss for model in (naive, ours))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
