"""Mamba 2's scan, against autograd through the recurrence in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import DEVICE, assert_exact
from longctx.kernels import state_space
from longctx.kernels.state_space import CHUNK, has_kernels, scan, scan_reference

SHAPES = [
    # rows, T, H, G, P, N
    (1, 37, 1, 1, 16, 16),  # less than a chunk
    (2, 128, 4, 2, 48, 48),  # rows of whole chunks, groups, sizes that are no power of two
    (2, 70, 2, 1, 24, 40),  # of which there are no kernels
    (1, 70, 3, 1, 16, 144),  # heads in parts of one (`few`), two blocks of the state
]
GPU_SHAPES = [(1, 16384, 48, 1, 64, 128), (2, 1000, 128, 8, 64, 128), (1, 3000, 24, 1, 128, 256)]
NAMES = ("x", "dt", "A", "B", "C", "D", "begin")


@pytest.fixture
def few(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program goes through at most two heads where a group has three, as through at most 16 where
    a model has 17: they are in parts of one."""
    if shape == SHAPES[3]:
        monkeypatch.setattr(state_space, "MOST_HEADS", 2)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments, in which the decay is slow enough for a leak between chunks to show."""
    rows, T, H, G, P, N = shape
    torch.manual_seed(T)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE)

    given = {"x": normal(rows, T, H, P).to(dtype), "dt": normal(rows, T, H).exp() / 20}
    given |= {"A": -torch.rand(H, device=DEVICE) - 0.1}
    given |= {name: normal(rows, T, G, N).to(dtype) for name in "BC"}
    return given | {"D": normal(H), "begin": normal(rows, H, P, N)}


def by_token(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, begin: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, a token at a time."""
    keys, queries = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (B, C))
    state, found = begin, []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        own = (step * x[:, t])[..., None] * keys[:, t, :, None]
        state = (A[:, None] * step).exp()[..., None] * state + own
        found.append((state @ queries[:, t, ..., None])[..., 0] + D[:, None] * x[:, t])
    return torch.stack(found, dim=1), state


def with_gradients(function: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what a scan gives, and the gradients of all its arguments, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    y, end = function(**leaves)
    torch.manual_seed(1)
    dy, d_end = (torch.randn(found.shape, device=found.device) for found in (y, end))
    torch.autograd.backward([y, end], [dy.to(given["x"].dtype).to(y.dtype), d_end.to(end.dtype)])
    return {"y": y.detach(), "end": end.detach()} | {f"d{n}": x.grad for n, x in leaves.items()}


def compare(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = draw(shape, dtype)
    truth = with_gradients(scan_reference, {name: x.double() for name, x in given.items()})
    plain = with_gradients(scan_reference, given)
    for name, own in with_gradients(scan, given).items():
        assert own.dtype == plain[name].dtype, name
        # dA has one number a head, in which most terms cancel: the error of a few says nothing.
        if name != "dA" or own.numel() > 16:
            assert_exact(name, own, plain[name], truth[name], dtype)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_by_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(shape, dtype)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_equations(shape: tuple[int, ...]) -> None:
    given = {name: x.double() for name, x in draw(shape, torch.float64).items()}
    truth = with_gradients(by_token, given)
    for name, own in with_gradients(scan, given).items():
        torch.testing.assert_close(
            own, truth[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m
        )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_heads_of_released_models(shape: tuple[int, ...]) -> None:
    """Granite 4.0 Tiny's, Nemotron-H-8B's and Falcon-H1-34B's."""
    compare(shape, torch.bfloat16)


def test_rows_without_a_state_and_a_skip() -> None:
    """A scan without D and a first state is one with zeros; its tokens may be a part of a wider
    tensor."""
    given = draw((2, 70, 2, 1, 16, 16), torch.bfloat16)
    rows, tokens, H, P = given["x"].shape
    wide = torch.cat([given["x"].flatten(2), given["B"].flatten(2), given["C"].flatten(2)], dim=-1)
    x, B, C = wide.split([H * P, 16, 16], dim=-1)
    cut = x.unflatten(-1, (H, P)), given["dt"], given["A"], B.unsqueeze(2), C.unsqueeze(2)
    zeros = {name: torch.zeros_like(given[name]) for name in ("D", "begin")}
    for own, true in zip(scan(*cut), scan(**given | zeros), strict=True):
        assert torch.equal(own, true)


@pytest.mark.parametrize("chunks", [1, 5])
def test_spare_chunks_change_no_bit(chunks: int) -> None:
    """A CUDA graph has room for more documents than a row has (layer/row_documents.py)."""
    given = draw((2, 2 * CHUNK, 3, 1, 16, 32), torch.bfloat16)
    found: list[list[Tensor]] = []
    for spare in (0, chunks * CHUNK):
        longer = {name: _with_tokens(x, spare) if x.dim() > 2 else x for name, x in given.items()}
        longer |= {"begin": given["begin"], "dt": _with_tokens(given["dt"], spare, 0.0)}
        leaves = {name: x.detach().requires_grad_() for name, x in longer.items()}
        y, _ = scan(**leaves)
        torch.manual_seed(1)
        y.backward(_with_tokens(torch.randn_like(y[:, : 2 * CHUNK]), spare, 0.0))
        by_token = [y.detach(), *(leaves[name].grad[:, : 2 * CHUNK] for name in ("x", "dt", *"BC"))]
        found.append([x[:, : 2 * CHUNK] for x in by_token] + [leaves[name].grad for name in "AD"])
    assert all(map(torch.equal, *found))


def _with_tokens(x: Tensor, more: int, value: float = 1.0) -> Tensor:
    return torch.cat([x, x.new_full((len(x), more, *x.shape[2:]), value)], dim=1)


def test_sizes_of_the_kernels() -> None:
    """Triton 3.6 compiles them wrongly for heads of 24 columns with states of 40."""
    sizes = (24, 40), (24, 48), (48, 40), (48, 80), (128, 256), (144, 16)
    assert [has_kernels(*x) for x in sizes] == [False, False, False, True, True, False]


def test_what_is_refused() -> None:
    given = draw(SHAPES[0], torch.bfloat16)
    with pytest.raises(ValueError, match="dt must have shape"):
        scan(**given | {"dt": given["dt"][:, :1]})
    with pytest.raises(ValueError, match="dtype of B and C"):
        scan(**given | {"B": given["B"].float()})
    with pytest.raises(ValueError, match="multiple of 2 groups"):
        scan(**given | {name: given[name].expand(-1, -1, 2, -1) for name in "BC"})
