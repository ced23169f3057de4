"""Rows over two and four ranks (gloo): o and the gradients of attention are those of one process,
bit by bit; but for those of a key/value head that several ranks read, which are rounded for each of
them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pairs import pairs
from small_run import on_ranks
from torch import Tensor

from exactness import relative_error
from longctx.attention.backends import Math
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall, take_turns
from longctx.attention.sharded import Sharded
from longctx.attention.shards import Shards
from longctx.attention.sinks import Sinks

S = 48
ROWS = {
    "borders within shards": [[5, 19, 24]],
    "a document a shard": [[12, 12, 12, 12]],
    "one document": [[48]],
    "documents of one token": [[1, 46, 1]],
    "two rows": [[5, 43], [30, 18]],
    "three rows": [[48], [1, 47], [24, 24]],
}


def run(
    attention: Attention, tensors: list[Tensor], documents: Documents, window: int | None
) -> dict[str, Tensor]:
    q, k, v, do = tensors
    o = torch.empty_like(q)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[1], len(q), dtype=wide)
    qkv = QKV(q, k, v)
    call = AttentionCall(qkv, documents, 0.3, o, lse, window)
    attention.forward(call)
    grads = attention.backward(do, call)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True))


def draw(rows: list[list[int]], heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [heads, kv_heads, kv_heads, heads]
    return [torch.randn(len(rows) * S, n, 16, dtype=torch.float64).to(dtype) for n in shapes]


def own(x: Tensor, rows: int, rank: int, ranks: int) -> Tensor:
    """This rank's tokens of every row."""
    return x.unflatten(0, (rows, ranks, -1))[:, rank].flatten(0, 1)


def compare(rank: int, ranks: int) -> None:
    dtypes = torch.float32, torch.bfloat16
    for rows, kv_heads, window, dtype in pairs([*ROWS.values()], (1, 2, 4), (None, 7), dtypes):
        documents = Documents.of([n for row in rows for n in row])
        tensors = draw(rows, 8, kv_heads, dtype)
        whole = run(Math(), tensors, documents, window)
        truth = run(Math(), [x.double() for x in tensors], documents, window)
        mine = [own(x, len(rows), rank, ranks) for x in tensors]
        sharded = Sharded(Math(), Shards(dist.group.WORLD), rows=len(rows))
        found = run(sharded, mine, documents, window)
        for name, x in found.items():
            naive, true = (own(y[name], len(rows), rank, ranks) for y in (whole, truth))
            assert x.dtype == naive.dtype
            if kv_heads >= ranks or name in ("o", "dq"):
                assert torch.equal(x, naive), name
            else:
                assert relative_error(x, true) <= 2 * relative_error(naive, true)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_attend_as_one(ranks, tmp_path) -> None:
    on_ranks(ranks, compare, tmp_path)


def attended(attention: Attention, tensors: list[Tensor], documents: Documents) -> list[Tensor]:
    """o, dq, dk, dv and the gradient of sinks, as a layer gets them."""
    q, k, v, do = tensors
    sinks = Sinks(torch.linspace(-1, 3, q.shape[1]), torch.zeros(q.shape[1]))
    o, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    call = AttentionCall(QKV(q, k, v), documents, 0.3, o, lse, None, sinks)
    take_turns([attention.forward_in_turns(call)])
    out = QKV(*map(torch.empty_like, (q, k, v)))
    take_turns([attention.backward_in_turns(do, call, out)])
    return [o, *out, sinks.grad]


def compare_sinks(rank: int, ranks: int) -> None:
    rows = ROWS["two rows"]
    documents, tensors = (
        Documents.of([n for row in rows for n in row]),
        draw(rows, 8, 2, torch.float32),
    )
    *whole, of_sinks = attended(Math(), tensors, documents)
    sharded = Sharded(Math(), Shards(dist.group.WORLD), rows=len(rows))
    *found, own_part = attended(
        sharded, [own(x, len(rows), rank, ranks) for x in tensors], documents
    )
    for x, y in zip(found, whole, strict=True):
        assert torch.equal(x, own(y, len(rows), rank, ranks))
    dist.all_reduce(own_part)
    assert torch.equal(own_part, of_sinks)


def test_a_rank_has_the_sinks_of_its_heads(tmp_path) -> None:
    on_ranks(2, compare_sinks, tmp_path)


def test_the_next_group_is_sent_before_this_one_attends() -> None:
    done: list[str] = []

    def group(i: int) -> Iterator[None]:
        done.append(f"send {i}")
        yield
        done.append(f"attend {i}")
        yield
        done.append(f"receive {i}")

    take_turns(map(group, range(3)))
    assert done == [
        *("send 0", "send 1", "attend 0", "send 2", "attend 1", "receive 0"),
        *("attend 2", "receive 1", "receive 2"),
    ]


def test_turns_begin_when_they_are_advanced() -> None:
    """On a backend of one process as on ranks that share rows."""

    class Said(Attention):
        writes_gradients = True

        def forward(self, *args, **kwargs):
            done.append("forward")

        def backward(self, *args, **kwargs):
            done.append("backward")

    done: list[str] = []
    nothing = torch.empty(0)
    qkv = QKV(nothing, nothing, nothing)
    call = AttentionCall(qkv, Documents.of([]), 1.0, nothing, nothing)
    forward = Said().forward_in_turns(call)
    backward = Said().backward_in_turns(nothing, call, qkv)
    assert done == []
    take_turns([forward])
    take_turns([backward])
    assert done == ["forward", "backward"]


def test_what_never_pauses_has_the_memory_alone() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def group() -> Iterator[None]:
        assert not any(x() is not None for x in alive)
        alive.append(weakref.ref(held := torch.ones(1)))
        yield from iter(())
        del held

    take_turns(group() for _ in range(3))
    assert len(alive) == 3
