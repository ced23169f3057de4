"""Copied keys: o and the gradients against separate rows, and which batches have them."""

from __future__ import annotations

import random

import pytest
import torch
from by_bounds import ByBounds
from test_prefixes import as_one_mask, as_rows, documents_of, draw, random_trees, run

from exactness import DEVICE, assert_exact, relative_error
from longctx.attention import copied
from longctx.attention.backends import FlashOnCpu, choose_attention
from longctx.attention.copied import Copied, with_copies
from longctx.attention.documents import Documents, Keys

pytestmark = pytest.mark.usefixtures("reference_kernels")
cpu = pytest.mark.skipif(DEVICE == "cuda", reason="the double reads bounds on a CPU")


def copies_of(documents: Documents, attention: object = None) -> Documents:
    return with_copies(documents, attention or ByBounds(), windows=[None], key_bytes=1)


@cpu
@pytest.mark.parametrize("seed", range(25))
def test_any_tree_in_fp64(seed) -> None:
    draws = random.Random(seed)
    documents = documents_of([*random_trees(draws), (5, [3, 2])])
    H, K = draws.choice([(4, 4), (4, 2), (6, 1)])
    tensors = draw(documents, H, K, 8, torch.float64, seed)
    found = run(Copied(ByBounds()), tensors, copies_of(documents), None)
    for truth in (as_rows(tensors, documents, None), as_one_mask(tensors, documents, None)):
        for label, x, y in zip("o dq dk dv".split(), found, truth, strict=True):
            assert relative_error(x, y) < 1e-12, label


@cpu
def test_room_for_more_changes_nothing() -> None:
    """A graph's places hold empty documents and copies of other tokens behind those of a batch."""
    documents = copies_of(documents_of([(9, [4, 6]), (5, [3])]))
    tokens, bounds, places, longest = documents.keys
    roomy = Keys(
        torch.cat([tokens, tokens[:20]]),
        torch.cat([bounds, bounds[-1:].repeat(3)]),
        places,
        longest + 7,
    )
    ends = documents.cu_seqlens
    more = Documents(lengths=(40,), cu_seqlens=torch.cat([ends, ends[-1:].repeat(3)]), keys=roomy)
    tensors = draw(documents, 4, 2, 8, torch.float64)
    found = run(Copied(ByBounds()), tensors, more, None)
    assert all(map(torch.equal, found, run(Copied(ByBounds()), tensors, documents, None)))


def test_which_batches_have_copies(monkeypatch) -> None:
    pair = documents_of([(9, [4, 6])])
    assert copies_of(pair).keys.tokens.tolist() == [
        *range(9),
        *range(13),
        *range(9),
        *range(13, 19),
    ]
    assert copies_of(pair).keys.bounds.tolist() == [0, 9, 22, 37]
    assert copies_of(pair).keys.longest == 15
    assert copies_of(documents_of([(9, [])])).keys is None
    assert copies_of(documents_of([(2, 8 * [1])])).keys is None
    assert copies_of(pair, FlashOnCpu()).keys is None
    for window, there in ((15, True), (14, False)):
        found = with_copies(pair, ByBounds(), windows=[None, window], key_bytes=1)
        assert (found.keys is not None) == there
    monkeypatch.setattr(copied, "MOST_BYTES", 36 * 100)
    assert with_copies(pair, ByBounds(), windows=[], key_bytes=100).keys is None
    assert with_copies(pair, ByBounds(), windows=[], key_bytes=97).keys is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa4", "flash"])
@pytest.mark.parametrize(
    "trees", [[(1024, [1024, 1000])], [(300, [7, 129]), (1, [1, 2, 3]), (77, []), (640, [513])]]
)
def test_on_a_gpu(name, trees) -> None:
    if name == "fa4":
        pytest.importorskip("flash_attn.cute")
    attention = choose_attention(name, torch.device(DEVICE), torch.bfloat16)[1]
    documents = documents_of(trees)
    with_keys = copies_of(documents, attention)
    assert with_keys.keys is not None
    tensors = draw(documents, 8, 2, 128, torch.bfloat16)
    found = run(Copied(attention), tensors, with_keys, None)
    naive = as_rows(tensors, documents, None, attention)
    truth = as_one_mask([x.double() for x in tensors], documents, None)
    for label, x, y, z in zip("o dq dk dv".split(), found, naive, truth, strict=True):
        assert_exact(label, x, y, z)
