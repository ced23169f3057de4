"""Padding that somebody reads: the loss and every gradient are Hugging Face's, and the schedule
runs wherever it can."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import FIRST_OF_EACH, MIXERS, family_config
from small_model import tiny_config
from test_door import assert_same, pair
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import longctx
from exactness import DEVICE, relative_error
from longctx.calls import read_padding
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")
S = 40
IDS = torch.randint(1, 200, (4, S), generator=torch.Generator().manual_seed(1))
PADS = {
    "left": [(9, 0), (0, 0), (30, 0), (1, 0)],
    "right": [(0, 0), (0, 15), (0, 5), (0, 39)],
    "both": [(9, 0), (0, 15), (25, 5), (0, 0)],
}
SAID = "padding is computed"


def mask_of(kind: str) -> Tensor:
    mask = torch.ones(4, S).long()
    for row, (left, right) in zip(mask, PADS[kind], strict=True):
        row[:left] = 0
        row[S - right :] = 0
    return mask


def batch_of(kind: str, **more: Any) -> dict[str, Any]:
    return dict(input_ids=IDS, attention_mask=mask_of(kind), use_cache=False, **more)


def over_all_logits(model: Any, batch: dict[str, Any]) -> Tensor:
    logits = model(**batch).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


LOSSES = {
    "over all logits": over_all_logits,
    "last logits": lambda m, b: m(**b, logits_to_keep=3).logits.exp().mean(),
    "mean(1)": lambda m, b: m.model(**b).last_hidden_state.mean(1).exp().mean(),
    "[:, -1]": lambda m, b: m.model(**b).last_hidden_state[:, -1].exp().mean(),
    "embeddings": lambda m, b: over_all_logits(
        m, dict(inputs_embeds=m.model.embed_tokens(b["input_ids"]), **without(b, "input_ids"))
    ),
    "labels everywhere": lambda m, b: m(**b, labels=IDS).loss,
    "labels that padding predicts": lambda m, b: (
        m(**b, labels=IDS.masked_fill(b["attention_mask"] == 0, -100)).loss
    ),
    "labels of some logits": lambda m, b: m(**b, labels=IDS[:, -3:], logits_to_keep=3).loss,
    "in a checkpoint": lambda m, b: torch.utils.checkpoint.checkpoint(
        over_all_logits, m, b, use_reentrant=False
    ),
}


def without(batch: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != name}


def models(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    vanilla = make().train()
    with torch.no_grad():
        for parameter in vanilla.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return vanilla, longctx.patch(copy.deepcopy(vanilla))


@pytest.mark.parametrize("side", PADS)
@pytest.mark.parametrize("name", LOSSES)
def test_whoever_reads_it(scheduled, name, side) -> None:
    vanilla, ours = pair()
    assert_same(vanilla, ours, lambda m: LOSSES[name](m, batch_of(side)))
    left_out = name == "labels that padding predicts" and side == "right"
    assert set(scheduled) == {int(mask_of(side).sum()) if left_out else 4 * S}


@pytest.mark.parametrize("family", FIRST_OF_EACH)
def test_every_family(scheduled, capsys, family) -> None:
    """Windows are of 23 tokens: some padding on the right sees nothing in them."""
    vanilla, ours = models(lambda: AutoModelForCausalLM.from_config(family_config(family)))
    assert_same(vanilla, ours, lambda m: over_all_logits(m, batch_of("both")))
    if family in MIXERS:
        assert scheduled == [] and "may be read, beside mixers" in capsys.readouterr().out
        return
    if vanilla.config._attn_implementation == "eager":
        assert scheduled == [] and "eager attention lets see" in capsys.readouterr().out
        assert_same(vanilla, ours, lambda m: over_all_logits(m, right_alone(10)))
    assert set(scheduled) == {4 * S}


def right_alone(tokens: int) -> dict[str, Any]:
    mask = torch.ones(4, S).long()
    mask[1, S - tokens :] = 0
    return dict(input_ids=IDS, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("case", ["hole", "eager", "nothing real"])
def test_what_runs_hugging_faces_layers(scheduled, capsys, case) -> None:
    vanilla, ours = pair()
    batch = batch_of("left")
    if case == "hole":
        batch["attention_mask"][0, 20:22] = 0
    elif case == "eager":
        for model in (vanilla, ours):
            model.set_attn_implementation("eager")
    else:
        batch["attention_mask"][:] = 0
    assert_same(vanilla, ours, lambda m: over_all_logits(m, batch))
    assert scheduled == [] and "may be read" in capsys.readouterr().out
    ours.longctx.surround(strict=True)
    with pytest.raises(UserError, match=r"may be read.* \(strict=True\)"):
        ours(**batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_sdpa_that_lets_padding_see_all_tokens(scheduled, capsys, monkeypatch, side) -> None:
    """As cuDNN's in torch 2.11, to whom a row that is masked as a whole is one without a mask."""

    def without_a_mask(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(read_padding, "scaled_dot_product_attention", without_a_mask)
    vanilla, ours = pair()
    assert_same(vanilla, ours, lambda m: over_all_logits(m, batch_of(side)))
    assert bool(scheduled) == (side == "right")  # where all padding sees a real token
    assert ("sdpa lets see all tokens" in capsys.readouterr().out) == (side == "left")


def test_a_hole_counts_in_windows(scheduled, capsys) -> None:
    """Of real tokens, too: Hugging Face's windows are of places in the row."""
    vanilla, ours = models(lambda: AutoModelForCausalLM.from_config(family_config("mistral")))
    batch = right_alone(8)
    batch["attention_mask"][2, 10:16] = 0
    labels = IDS.masked_fill(batch["attention_mask"] == 0, -100)
    labels[2, 16] = -100
    assert_same(vanilla, ours, lambda m: m(**batch, labels=labels).loss)
    assert scheduled == [] and "counts in sliding windows" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_without_gradients(scheduled, mode) -> None:
    """As with them: a model is evaluated as it was trained."""
    for model in (models_ := pair()):
        getattr(model, mode)()
    with torch.no_grad():
        for side in PADS:
            truth, found = (m(**batch_of(side)).logits for m in models_)
            torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    assert set(scheduled) == {4 * S}


def test_generation_and_caches_are_hugging_faces(scheduled) -> None:
    vanilla, ours = (model.eval() for model in pair(pad_token_id=0))
    batch = without(batch_of("left"), "use_cache")
    texts = [m.generate(**batch, max_new_tokens=4, do_sample=False) for m in (vanilla, ours)]
    assert torch.equal(*texts) and scheduled == []


def test_16_bits_are_as_exact() -> None:
    """In the sum over all weights, since errors of one scatter."""
    vanilla, ours = pair()
    truth, naive = copy.deepcopy(vanilla), vanilla.bfloat16()
    truth.load_state_dict(naive.state_dict())
    ours = ours.bfloat16()
    found = []
    for model in (truth.double(), naive, ours):
        logits = model(**batch_of("both")).logits.double()
        nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    errors = [sum(relative_error(x[name], found[0][name]) for name in x) for x in found[1:]]
    assert errors[1] <= 1.1 * errors[0]


# --- heads -----------------------------------------------------------------------------------

SPANS = dict(
    start_positions=torch.tensor([9, 2, 32, 0]), end_positions=torch.tensor([12, 3, 33, 0])
)
TOKENS = IDS % 2
CLASSES = torch.tensor([0, 1, 1, 0])


def head(auto: Any, **changes: Any) -> Any:
    config = tiny_config(pad_token_id=0, **changes)
    config.classifier_dropout = 0.0
    return models(lambda: auto.from_config(config))


@pytest.mark.parametrize("side", PADS)
def test_question_answering(scheduled, side) -> None:
    vanilla, ours = head(AutoModelForQuestionAnswering)
    for model in (vanilla, ours):
        model.qa_outputs.bias.requires_grad_(False)  # its gradient is 0, but for rounding
    batch = without(batch_of(side), "use_cache")
    assert_same(vanilla, ours, lambda m: m(**batch, **SPANS).loss)
    assert set(scheduled) == {4 * S}


@pytest.mark.parametrize("labels", ["of all tokens", "of real tokens", "none"])
def test_a_classifier_of_tokens(scheduled, labels) -> None:
    vanilla, ours = head(AutoModelForTokenClassification)
    mask = mask_of("both")
    given = TOKENS.masked_fill((mask == 0) & (labels == "of real tokens"), -100)

    def loss(model: Any) -> Tensor:
        if labels == "none":
            return model(**batch_of("both")).logits.exp().mean()
        return model(**batch_of("both"), labels=given).loss

    assert_same(vanilla, ours, loss)
    assert set(scheduled) == {int(mask.sum()) if labels == "of real tokens" else 4 * S}


@pytest.mark.parametrize("side", PADS)
@pytest.mark.parametrize("padded_with", ["padding", "another token", "embeddings"])
def test_a_classifier_of_sequences(scheduled, padded_with, side) -> None:
    """It reads the last token that is not the padding token, whatever the mask says."""
    vanilla, ours = head(AutoModelForSequenceClassification)
    mask, ids = mask_of(side), IDS
    if padded_with == "padding":
        ids = IDS.masked_fill(mask == 0, 0)

    def loss(model: Any) -> Tensor:
        given = ids if padded_with != "embeddings" else None
        embeds = model.model.embed_tokens(ids) if given is None else None
        return model(given, mask, inputs_embeds=embeds, use_cache=False, labels=CLASSES).loss

    assert_same(vanilla, ours, loss)
    read = side != "left" and padded_with != "padding"
    assert set(scheduled) == {4 * S if read else int(mask.sum())}


def test_a_classifier_is_unpatched_and_saved() -> None:
    _, ours = head(AutoModelForSequenceClassification)
    assert copy.deepcopy(ours)(IDS, mask_of("left"), labels=CLASSES).loss.isfinite()
    assert "forward" not in vars(longctx.unpatch(ours))


# --- who masks it ----------------------------------------------------------------------------


def called_from(module: str) -> Any:
    """A function of another module that calls a model."""
    names: dict[str, Any] = {"__name__": module}
    exec("def call(model, batch): return model(**batch)", names)
    return names["call"]


@pytest.mark.parametrize(
    ("caller", "masks"),
    [
        ("trl.trainer.sft_trainer", True),
        ("trl.experimental.orpo.orpo_trainer", True),
        ("trl.models.modeling_value_head", False),  # called by this test
        ("transformers.trainer", False),
        ("my_trainer", False),
    ],
)
@pytest.mark.parametrize("part", ["whole", "base"])
def test_callers_that_mask_it_do_not_pay(scheduled, capsys, caller, masks, part) -> None:
    _, ours = pair()
    called_from(caller)(ours if part == "whole" else ours.model, batch_of("both"))
    assert set(scheduled) == {int(mask_of("both").sum()) if masks else 4 * S}
    assert capsys.readouterr().out.count(SAID) == (not masks)


def test_means_of_logits_in_trl_are_over_real_tokens(capsys) -> None:
    """As ORPO's and CPO's `logits/chosen` and `logits/rejected`."""
    vanilla, ours = pair()
    batch, real = batch_of("both"), mask_of("both").bool()
    logits = called_from("trl.experimental.cpo.cpo_trainer")(ours, batch).logits
    truth = vanilla(**batch).logits
    for half in (slice(0, 2), slice(2, 4)):
        torch.testing.assert_close(logits[half].mean(), truth[half][real[half]].mean())
    assert "means over real tokens" in capsys.readouterr().out
    gathered = logits[real].square().mean()
    gathered.backward()
    truth[real].square().mean().backward()
    for ours_, theirs in zip(ours.parameters(), vanilla.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, theirs.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_of_logits_beside_labels(masked) -> None:
    """Logits of a call with labels have no padding: a loss that reads it ends in one line."""
    _, ours = pair()
    mask = mask_of("right")
    output = ours(**batch_of("right"), labels=IDS.masked_fill(mask == 0, -100))
    loss = output.logits.exp().mean(-1)
    loss = loss[mask.bool()].mean() if masked else loss.mean()
    if masked:
        return (loss + output.loss).backward()
    with pytest.raises(UserError, match="a loss reads logits of padding"):
        (loss + output.loss).backward()


def test_prompts_are_not_shared_where_padding_is_computed(scheduled, capsys) -> None:
    vanilla, _ = pair()
    ours = longctx.patch(copy.deepcopy(vanilla), share_prefixes=True)
    assert_same(vanilla, ours, lambda m: over_all_logits(m, batch_of("right")))
    assert "prompts are not shared: padding is computed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("side", PADS)
def test_on_a_gpu(side, dtype) -> None:
    """Whatever kernel torch takes there, and whatever that gives tokens that see nothing."""
    vanilla, ours = (model.to(DEVICE, dtype) for model in pair())
    batch = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in batch_of(side).items()}
    truth, found = (m(**batch).logits.float() for m in (vanilla, ours))
    assert relative_error(found, truth) < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    kernels = torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION, torch.nn.attention.SDPBackend.MATH
    with torch.nn.attention.sdpa_kernel(list(kernels)):  # which give 0: the schedule runs
        truth = vanilla(**batch).logits.float()
        ours.longctx.surround(strict=True)
        found = ours(**batch).logits.float()
    assert relative_error(found, truth) < (2e-2 if dtype == torch.bfloat16 else 1e-5)
