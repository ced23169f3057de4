"""Prompts that are found in a batch: what is chosen, and that nothing but the work changes."""

from __future__ import annotations

import copy
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from small_families import family_config
from small_model import CPU, tiny_config
from small_run import on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import longctx
from longctx.attention.documents import Documents
from longctx.calls import shared_prefixes
from longctx.calls.shared_prefixes import best_groups, found, spread
from longctx.forwards import modules
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions

pytestmark = pytest.mark.usefixtures("reference_kernels")
VOCAB = 64


# --- which documents share which prompt --------------------------------------------------------


def in_common(rows: list[list[int]]) -> list[list[int]]:
    def first(a: list[int], b: list[int]) -> int:
        same = [x == y for x, y in zip(a, b, strict=False)]
        return same.index(False) if False in same else len(same)

    return [[first(a, b) for b in rows] for a in rows]


def most_saved(rows: list[list[int]], least: int) -> int:
    """By trying every partition of the rows into groups."""
    common = in_common(rows)

    def best(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        head, *rest = left
        saved = best(tuple(rest))
        for size in range(1, len(rest) + 1):
            for others in combinations(rest, size):
                depth = min(common[i][j] for i, j in combinations((head, *others), 2))
                if depth >= least:
                    remaining = tuple(i for i in rest if i not in others)
                    saved = max(saved, size * depth + best(remaining))
        return saved

    return best(tuple(range(len(rows))))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_groups_save_more(seed) -> None:
    draws = random.Random(seed)
    rows = [draws.choices(range(2), k=draws.choice([0, 2, 5, 9])) for _ in range(6)]
    for least in (1, 3):
        groups = best_groups(in_common(rows), least)
        saved = sum((len(group.members) - 1) * group.tokens for group in groups)
        assert saved == most_saved(rows, least)
        taken = [i for group in groups for i in group.members]
        assert len(taken) == len(set(taken))
        for group in groups:
            assert len({tuple(rows[i][: group.tokens]) for i in group.members}) == 1
            assert group.tokens >= least and len(group.members) > 1


def test_the_longest_prompt_of_three_levels_wins() -> None:
    rows = [[1] * 9, [1] * 8 + [2], [1] * 4 + [3] * 5, [1] * 4 + [3] * 4]
    assert best_groups(in_common(rows), 2) == [((0, 1), 8), ((2, 3), 8)]


# --- what is computed ----------------------------------------------------------------------------


def tokens_of(lengths: list[int], prompt: int, seed: int = 0) -> list[Tensor]:
    """Documents that begin with the same tokens."""
    torch.manual_seed(seed)
    rows = [torch.randint(1, VOCAB, (n,)) for n in lengths]
    for row in rows:
        row[:prompt] = rows[0][:prompt]
    for i, row in enumerate(rows):  # and differ after them
        row[prompt : prompt + 1] = i + 1
    return rows


def sharing_of(rows: list[Tensor], positions: Tensor | None = None, **how: Any) -> Any:
    documents = Documents.of([len(row) for row in rows])
    positions = documents.position_ids() if positions is None else positions
    return found(torch.cat(rows), positions, documents, least=4, **how)


def test_a_prompt_and_its_answers() -> None:
    sharing = sharing_of([*tokens_of([9, 6, 8], 6), torch.arange(5)])
    assert sharing.documents.lengths == (6, 3, 2, 5)
    assert sharing.documents.parents == (None, 0, 0, None)
    assert sharing.kept.tolist() == [*range(9), 21, 22, *range(23, 28)]
    assert sharing.source.tolist() == [*range(9), *range(6), *range(6), 9, 10, *range(11, 16)]
    assert sharing.prompts == [(slice(0, 6), [0, 9, 15])] and sharing.shift is None


@pytest.mark.parametrize("lengths", [[7, 7, 7], [7, 7]])
def test_identical_documents_are_one(lengths) -> None:
    sharing = sharing_of([tokens_of([7], 7)[0]] * len(lengths))
    assert sharing.documents.lengths == (7,) and sharing.documents.parents == ()
    assert sharing.source.tolist() == [*range(7)] * len(lengths)


def test_short_prompts_and_other_positions_are_left_alone() -> None:
    assert sharing_of(tokens_of([9, 8], 3)) is None
    assert sharing_of([torch.arange(9), torch.arange(9) + 1]) is None
    rows = tokens_of([9, 8], 6)
    positions = torch.cat([torch.arange(9), torch.arange(8) + 3])
    assert sharing_of(rows, positions, absolute=True) is None
    assert sharing_of(rows, positions).shift.tolist() == [0] * 9 + [-3] * 2
    positions[4] = 7
    assert sharing_of(rows, positions) is None


def test_gradients_of_a_shared_token_add_up_in_fp32(monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "PIECE", 8)
    sharing = sharing_of(tokens_of([9, 6, 8], 6))
    where = torch.arange(30)[torch.arange(30) % 4 != 3]  # seven are padding
    x = torch.randn(len(sharing.kept), 4, dtype=torch.bfloat16, requires_grad=True)
    y = spread(x, sharing, where, 30)
    assert torch.equal(y[where], x[sharing.source]) and not y[3::4].any()
    dy = torch.randn_like(y)
    y.backward(dy)
    truth = torch.zeros(x.shape).index_add(0, sharing.source, dy[where].float())
    assert torch.equal(x.grad, truth.to(torch.bfloat16))


# --- a whole model -------------------------------------------------------------------------------


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """A batch with -100 as the labels of prompts' first half and of padding."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        part = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, part], mask[i, part], labels[i, part] = row, 1, row
        labels[i, part][:4] = -100
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    documents = Documents.of([len(row) for row in rows])
    labels = torch.cat([torch.cat([torch.full((4,), -100), row[4:]]) for row in rows])
    ids = torch.cat(rows)
    return dict(
        input_ids=ids[None], labels=labels[None], position_ids=documents.position_ids()[None]
    )


ROWS = tokens_of([31, 26, 40], 24) + tokens_of([9, 33], 0, seed=1) + [tokens_of([31], 31)[0]]
BATCHES = {
    "right": padded(ROWS, "right"),
    "left": padded(ROWS, "left"),
    "packed": packed(ROWS),
    "whole": padded(tokens_of([40] * 3, 24), "right"),
}


@pytest.fixture
def short_prompts(monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 8)


def pair(config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    sharing = copy.deepcopy(plain)
    settings = dict(head_groups=1, tile_tokens=64) | options
    patch_as(plain, PatchOptions(**settings), CPU)
    patch_as(sharing, PatchOptions(**settings, share_prefixes=True), CPU)
    return plain, sharing


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(plain: Any, sharing: Any, batch: dict[str, Tensor], most: float = 1e-5) -> None:
    with torch.no_grad():
        outputs = [model(**batch) for model in (plain, sharing)]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=most, atol=0)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    a, b = (output.logits[real] for output in outputs)
    assert (a - b).norm() <= most * a.norm()
    assert_close(gradients(sharing, batch), gradients(plain, batch), most)


def assert_close(ours: dict[str, Tensor], truths: dict[str, Tensor], most: float = 1e-5) -> None:
    assert ours.keys() == truths.keys()
    for name, truth in truths.items():
        assert (ours[name] - truth).norm() <= most * truth.norm(), name


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.usefixtures("short_prompts")
def test_loss_logits_and_gradients_are_those_of_separate_rows(batch, capsys) -> None:
    config = tiny_config(vocab_size=VOCAB)
    assert_alike(*pair(config), batch)
    assert capsys.readouterr().out.count("is computed once") == 1


@pytest.mark.parametrize("family", ["mistral", "gemma2", "olmo2", "ministral3", "qwen3", "cohere2"])
@pytest.mark.usefixtures("short_prompts")
def test_families(family) -> None:
    config = family_config(family, vocab_size=VOCAB)
    for batch in (BATCHES["right"], BATCHES["packed"]):
        assert_alike(*pair(config), batch, 3e-5)


NOTHING_SHARED = padded(tokens_of([12, 30], 0, seed=2), "right")


def labels_of(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.usefixtures("short_prompts")
def test_gradients_accumulate() -> None:
    """Of batches with prompts and without, each with its part of all labels."""
    plain, sharing = pair(tiny_config(vocab_size=VOCAB))
    batches = [BATCHES["left"], NOTHING_SHARED, BATCHES["packed"]]
    labels = sum(map(labels_of, batches))
    for model in (plain, sharing):
        for batch in batches:
            model(**batch, num_items_in_batch=labels).loss.backward()
    assert_close(*({n: p.grad for n, p in model.named_parameters()} for model in (sharing, plain)))


@pytest.mark.usefixtures("short_prompts")
def test_a_process_whose_batch_shares_nothing_beside_one_whose_does(tmp_path: Path) -> None:
    """Under DDP, which averages the gradients of two backwards."""
    plain, sharing = pair(tiny_config(vocab_size=VOCAB))
    batches = [[BATCHES["right"], NOTHING_SHARED], [NOTHING_SHARED, BATCHES["packed"]]]
    found = [[gradients(plain, batch) for batch in step] for step in batches]
    truths = [{n: (g + other[n]) / 2 for n, g in first.items()} for first, other in found]

    def check(rank: int, processes: int) -> None:
        ours = DistributedDataParallel(sharing)
        for step, truth in zip(batches, truths, strict=True):
            ours.zero_grad()
            ours(**step[rank]).loss.backward()
            assert_close({n: p.grad for n, p in sharing.named_parameters()}, truth)

    on_ranks(2, check, tmp_path)


@pytest.mark.usefixtures("short_prompts")
def test_fewer_tokens_run_through_the_layers(capsys, monkeypatch) -> None:
    _, sharing = pair(tiny_config(vocab_size=VOCAB))
    tokens: list[int] = []
    layer = modules.scheduled_layer
    monkeypatch.setattr(
        modules, "scheduled_layer", lambda x, *rest: tokens.append(len(x)) or layer(x, *rest)
    )
    sharing(**BATCHES["packed"])
    once = 24 + (7 + 2 + 16 + 7) + 9 + 33
    assert set(tokens) == {once}
    said = capsys.readouterr().out
    assert f"170 tokens of the first such batch, in which 4 documents share 1, are {once}" in said


def test_what_cannot_be_shared_is_said_once(capsys) -> None:
    plain, sharing = pair(tiny_config(vocab_size=VOCAB))
    batch = dict(BATCHES["whole"])
    embeds = plain.model.embed_tokens(batch.pop("input_ids")).detach()
    for _ in range(2):
        sharing(inputs_embeds=embeds, **batch)
    assert capsys.readouterr().out.count("prompts are not shared: the call has inputs_em") == 1


def test_prompts_below_a_few_hundred_tokens_are_left_alone(capsys) -> None:
    model = longctx.patch(
        AutoModelForCausalLM.from_config(tiny_config(vocab_size=VOCAB)), share_prefixes=True
    )
    model(**BATCHES["whole"]).loss.backward()
    assert "is computed once" not in capsys.readouterr().out
