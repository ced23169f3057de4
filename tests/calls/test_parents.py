"""Patched models over rows of a prompt and its answers, `parents` beside `cu_seq_lens_q`: hidden
states and every gradient are those of vanilla Hugging Face on separate rows [prompt + answer]."""

from __future__ import annotations

from typing import Any

import pytest
import small_layer
import test_every_family
import torch
import torch.distributed as dist
from small_layer import KEEPS, LADDER, assert_exact_run, separate_rows
from small_run import on_ranks
from torch import Tensor
from transformers import PreTrainedModel

from exactness import DEVICE, assert_exact
from longctx.attention.documents import Documents
from longctx.attention.shards import Shards
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")

DOCUMENTS = Documents.of(
    [40, 30, 1, 9, 17, 1, 2, 44], [None, 0, 0, 0, None, None, 5, 5], device=DEVICE
)
"""Answers longer than the window and of one token; a prompt without answers, and one of one token:
144 tokens."""


def draw(vocab: int, dtype: torch.dtype, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (1, T), and the gradient of their hidden states."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(DOCUMENTS.lengths)
    ids = torch.randint(vocab, (1, T), generator=generator).to(DEVICE)
    return ids, torch.randn(1, T, hidden, generator=generator).to(DEVICE, dtype)


Found = tuple[Tensor, dict[str, Tensor]]


def found_of(model: PreTrainedModel, hidden: Tensor) -> Found:
    grads = {n: p.grad for n, p in model.model.named_parameters()}
    assert not (missing := [name for name, grad in grads.items() if grad is None]), missing
    return hidden.detach(), grads


def shared(model: PreTrainedModel, ids: Tensor, d_hidden: Tensor, **arguments: Any) -> Found:
    model.zero_grad()
    arguments = DOCUMENTS.arguments() | arguments
    hidden = model.model(input_ids=ids, use_cache=False, **arguments).last_hidden_state
    hidden.backward(d_hidden)
    return found_of(model, hidden)


def separate(model: PreTrainedModel, ids: Tensor, d_hidden: Tensor) -> Found:
    """The prompt's hidden states are those of its first row."""
    model.zero_grad()
    whole = torch.zeros_like(d_hidden)
    for tokens, known in separate_rows(DOCUMENTS):
        row = model.model(input_ids=ids[:, tokens], use_cache=False).last_hidden_state
        row[:, known:].backward(d_hidden[:, tokens[known:]].to(row.dtype))
        whole[:, tokens[known:]] = row.detach()[:, known:].to(whole.dtype)
    return found_of(model, whole)


def assert_as_separate_rows(models, **arguments: Any) -> None:
    truth, naive, ours = models
    sizes, dtype = naive.config, naive.dtype
    runs: list[list[Found]] = [[], [], []]
    for seed in (1, 2):
        ids, d_hidden = draw(sizes.vocab_size, dtype, sizes.hidden_size, seed)
        for found, (run, model) in zip(
            runs, ((separate, truth), (separate, naive), (shared, ours)), strict=True
        ):
            given = arguments if run is shared else {}
            dy = d_hidden.double() if model is truth else d_hidden
            found.append(run(model, ids, dy, **given))
    true, plainly, own = (_stacked(found) for found in runs)
    assert_exact("hidden", own[0], plainly[0], true[0])
    assert own[1].keys() == true[1].keys()
    for name in true[1]:
        assert_exact(name, own[1][name], plainly[1][name], true[1][name])


def _stacked(found: list[Found]) -> Found:
    grads = {n: torch.stack([each[n] for _, each in found]) for n in found[0][1]}
    return torch.stack([hidden for hidden, _ in found]), grads


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in ("llama", "gemma3_text", "gemma2")),
        *((family, torch.float32) for family in ("llama", "gemma2", "olmo2", "qwen3", "mistral")),
        *((family, torch.float32) for family in ("cohere2", "qwen3_5_text-attention")),
    ],
)
def test_families_as_separate_rows(family, dtype, capsys) -> None:
    """tests/mixers/test_mixers.py has the families with mixers."""
    models = test_every_family.trio(family, dtype, dict(head_groups=2, tile_tokens=31))
    assert_as_separate_rows(models)
    assert "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_no_bit_depends_on_what_is_kept(family) -> None:
    """In tiles of two sizes; forward's bits do not depend on the tiles either."""
    outputs = []
    for tile_tokens, keeps in ((31, KEEPS[::4]), (144, KEEPS[::11])):
        *_, ours = test_every_family.trio(
            family, torch.float32, LADDER | dict(tile_tokens=tile_tokens)
        )
        ids, d_hidden = draw(ours.config.vocab_size, torch.float32, ours.config.hidden_size, 1)
        first: Found | None = None
        for keep in keeps:
            ours.longctx.store.ladder = (keep,)
            hidden, grads = shared(ours, ids, d_hidden)
            copied = hidden, {name: grad.clone() for name, grad in grads.items()}
            first = first or copied
            assert torch.equal(hidden, first[0]), keep
            assert [n for n in grads if not torch.equal(grads[n], first[1][n])] == [], keep
        outputs.append(first[0])
    assert torch.equal(*outputs)


def test_a_batch_of_rows_is_one_row(capsys) -> None:
    """Documents are those of the flattened batch; in evaluation, where nobody says use_cache."""
    *_, ours = small_layer.trio(torch.float32)
    ids, _ = draw(211, torch.float32, 128, 1)
    arguments = DOCUMENTS.arguments()
    halves = arguments | dict(position_ids=arguments["position_ids"].view(2, -1))
    bounds = {name: arguments[name] for name in ("cu_seq_lens_q", "parents")}
    ours.eval()
    found = [ours.model(ids.view(2, -1), **given).last_hidden_state for given in (halves, bounds)]
    found.append(ours.model(ids, **arguments).last_hidden_state.view_as(found[0]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert capsys.readouterr().out == ""


def test_the_loss_of_a_pair() -> None:
    """Labels as packed documents have them; positions that are given are those that are made."""
    truth, naive, ours = small_layer.trio(torch.float32)
    documents = Documents.of([40, 30, 20], [None, 0, 0], device=DEVICE)
    ids = torch.randint(211, (1, 90), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = ids.clone()
    labels[0, 70] = -100
    arguments = documents.arguments()

    def vanilla(model) -> Tensor:
        pair = (slice(0, 70), torch.tensor([*range(40), *range(70, 90)], device=DEVICE))
        total = torch.zeros((), dtype=model.dtype, device=DEVICE)
        for tokens, untrained in zip(pair, (0, 41), strict=True):
            row = labels[:, tokens].clone()
            row[:, :untrained] = -100
            total = total + model(input_ids=ids[:, tokens], labels=row, num_items_in_batch=88).loss
        return total

    losses = []
    for given in (arguments, {k: x for k, x in arguments.items() if k != "position_ids"}):
        loss = ours(input_ids=ids, labels=labels, num_items_in_batch=88, **given).loss
        losses.append(loss.detach())
        ours.zero_grad()
        loss.backward()
    assert torch.equal(*losses)
    expected = []
    for model in (truth, naive):
        loss = vanilla(model)
        loss.backward()
        expected.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    found = losses[0], {n: p.grad for n, p in ours.named_parameters()}
    assert_exact_run(found, expected[1], expected[0], torch.float32)


IDS = torch.arange(8, device=DEVICE)[None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(parents=[None, 0]), "parents number the documents of cu_seq_lens_q: give both"),
        (
            dict(cu_seq_lens_q=[0, 4, 8], parents=[None, 0], attention_mask=torch.ones(1, 8)),
            "give both, and no attention_mask",
        ),
        (dict(cu_seq_lens_q=[0, 4, 8], parents=[None]), "parents has 1 value for 2 documents"),
        (
            dict(
                cu_seq_lens_q=[0, 4, 8], parents=[None, 0], position_ids=torch.arange(8)[None] % 4
            ),
            r"position_ids of a document with a parent must go on .* longctx.Documents.of",
        ),
        (
            dict(cu_seq_lens_q=[0, 4, 6, 8], parents=[-1, 0, 0], labels=IDS),
            "the first token of a prompt's second answer, .* set its label to -100",
        ),
        (
            dict(cu_seq_lens_q=[0, 4, 8], parents=[None, 0], use_cache=True),
            "parents need the schedule, and this call has a key/value cache",
        ),
        (
            dict(cu_seq_lens_q=[0, 4, 8], parents=[None, 0], output_attentions=True),
            "parents need the schedule, and this call has output_attentions",
        ),
    ],
)
def test_what_is_refused(arguments, message) -> None:
    *_, ours = small_layer.trio(torch.float32)
    if "cu_seq_lens_q" in arguments:
        bounds = torch.tensor(arguments["cu_seq_lens_q"], dtype=torch.int32, device=DEVICE)
        arguments = arguments | dict(cu_seq_lens_q=bounds)
    arguments = {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in arguments.items()}
    with pytest.raises(UserError, match=message):
        ours(input_ids=IDS, **{"use_cache": False} | arguments)


def check_shared_rows(rank: int, ranks: int) -> None:
    """Two ranks that share the row have its bounds and parents whole."""
    *_, ours = small_layer.trio(torch.float32, num_key_value_heads=4)
    ids, d_hidden = draw(211, torch.float32, 128, 1)
    whole = shared(ours, ids, d_hidden)
    expected = whole[0], {n: grad.clone() for n, grad in whole[1].items()}
    shards = Shards(dist.group.WORLD)
    ours.longctx.surround(shards=shards)
    for given in ({}, dict(position_ids=None)):
        if not given:
            given = dict(position_ids=shards.own(DOCUMENTS.arguments()["position_ids"]))
        hidden, grads = shared(ours, shards.own(ids), shards.own(d_hidden), **given)
        assert torch.equal(hidden, shards.own(expected[0]))
        for name, grad in grads.items():
            dist.all_reduce(grad)
            torch.testing.assert_close(grad, expected[1][name], rtol=1e-4, atol=1e-5)


def test_rows_that_ranks_share(tmp_path) -> None:
    on_ranks(2, check_shared_rows, tmp_path)
