"""A new part touches its file and its table: here a second part over tiles that keeps a tensor and
a part over the row that doubles its input, each with a spec; and layers without attention or
without an MLP. Their numbers are compared with autograd's in fp64."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from paths import ROOT
from torch import Tensor

import longctx.layer
from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.cost.dims import LayerSpec
from longctx.cost.kept import Keep
from longctx.layer.adapters.dora import Dora
from longctx.layer.adapters.lora import Lora
from longctx.layer.norm_spec import NormSpec
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.protocol import NOTHING, Kept, OverRow, OverTiles
from longctx.layer.parts.table import PARTS, parts_of
from longctx.layer.passes import Pass, Rope, Schedule
from longctx.layer.schedule import scheduled_layer
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mlp_spec import MlpSpec
from longctx.layer.specs.part_spec import PartSpec
from longctx.memory.store import ActivationStore

pytestmark = pytest.mark.usefixtures("reference_kernels")
D, T, TILE = 16, 21, 8
X = Keep(frozenset({"x"}))


@dataclass(frozen=True, kw_only=True)
class SameSpec(PartSpec):
    """Of `Same`."""


class Same(OverRow):
    """A mixer that is the identity: h = x + x."""

    def output(self, x: Tensor, tile: slice) -> Tensor:
        return 2 * x[tile]

    def backward_(self, dh: Tensor, x: Tensor, dn: Tensor | None, wants_dx: bool) -> None:
        dh.mul_(2)
        if dn is not None:
            dh.add_(dn)


@dataclass(frozen=True, kw_only=True)
class SquaresSpec(PartSpec):
    """Of `Squares`."""

    over_tiles: ClassVar[bool] = True


class Squares(OverTiles):
    """y = h + (norm(h) first')^2 second', which may keep what it squares."""

    read: list[bool] = []

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        super().__init__(p)
        self._first, self._second, self._norm = (
            p.weights["first"],
            p.weights["second"],
            Norm(p, "n"),
        )
        self._made = kept.get("squared")
        if p.gradients is not None:
            self._grads = {name: p.gradients.projection(name) for name in ("first", "second")}
            self.read.append(self._made is not None)

    def keep(self, x: Tensor) -> None:
        if self._pass.keeps("squared"):
            self._made = x.new_empty(len(x), len(self._first.weight))
            self._pass.keep("squared", {"squared": self._made}, of_tiles=True)

    def forward(self, h: Tensor, tile: slice, *, onto: Tensor, out: Tensor) -> None:
        room = None if self._made is None else self._made[tile]
        made = self._first(self._norm.forward(h), tile, out=room)
        self._second.added(onto, made.square(), tile, out=out)

    def backward(
        self, dy: Tensor, h: Tensor, tile: slice, *, onto: Tensor | None = None, out: Tensor
    ) -> None:
        n = self._norm.forward(h)
        made = self._first(n, tile) if self._made is None else self._made[tile]
        v = self._second.inner_grad(dy)
        self._grads["second"].add(dy, made.square(), v, tile)
        dmade = 2 * made * self._second.input_grad(dy, v, tile)
        v = self._first.inner_grad(dmade)
        self._grads["first"].add(dmade, n, v, tile)
        self._norm.backward(self._first.input_grad(dmade, v, tile), h, onto=onto, out=out)

    def finish(self) -> None:
        for name, grad in self._grads.items():
            self._pass.grads.finish(name, grad)
        self._norm.finish()


@pytest.fixture(autouse=True)
def parts(monkeypatch) -> None:
    """All that a new part touches besides its own file."""
    monkeypatch.setitem(PARTS, SameSpec, Same)
    monkeypatch.setitem(PARTS, SquaresSpec, Squares)
    monkeypatch.setattr(Squares, "read", [])


def linear(*names: str) -> dict[str, str]:
    return {name: name for name in names}


SAME = SameSpec(hidden=D)
SQUARES = SquaresSpec(hidden=D, linears=linear("first", "second"))
ATTENDS = AttentionSpec(
    hidden=D, heads=2, kv_heads=1, head_dim=4, scale=0.5, linears=linear(*"qkvo")
)
GATED = MlpSpec(hidden=D, width=24, linears=linear("gate", "up", "down"), norms={})


def schedule(parts: Any, keep: Keep = X) -> Schedule:
    store = ActivationStore(torch.device("cpu"))
    store.reserve((keep,), 2**20)
    positions = torch.arange(T)
    documents, _ = Documents.of_batch(positions[None], None, None, None)
    return Schedule(
        layers=(LayerSpec(parts=parts),),
        documents=documents,
        position_ids=positions,
        ropes={"all": Rope(torch.tensor([1.0, 0.1]), 1.0)},
        query_scale=None,
        head_dim=4,
        norm=NormSpec(eps=1e-6),
        attention=choose_attention("math", torch.device("cpu"), torch.float32)[1],
        store=store,
        tile_tokens=TILE,
        head_groups=1,
        dtype=torch.float32,
    )


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: (0.3 * torch.randn(shape)).requires_grad_() for name, shape in shapes.items()}


def ours(parts: Any, w: dict[str, Tensor], adapters: Any, keep: Keep = X) -> list[Tensor]:
    x, dy = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    y = scheduled_layer(x, schedule(parts, keep), 0, w, adapters)
    return [y, *torch.autograd.grad(y, [x, *w.values()], dy)]


def truths(f: Any, w: dict[str, Tensor]) -> list[Tensor]:
    x, dy = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1)).double()
    x.requires_grad_()
    wide = {name: p.detach().double().requires_grad_() for name, p in w.items()}
    y = f(x, wide)
    return [y, *torch.autograd.grad(y, [x, *wide.values()], dy, allow_unused=True)]


def squares(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    n = x if "n" not in w else x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w["n"]
    first = w["first"]
    if "first.magnitude" in w:
        first = first.detach() + 0.5 * w["first.b"] @ w["first.a"]
        first = first * (w["first.magnitude"] / first.norm(dim=1).detach())[:, None]
    second = w["second"] + (2 * w["second.b"] @ w["second.a"] if "second.a" in w else 0)
    return (n @ first.t()).square() @ second.t()


PLAIN = dict(first=(24, D), second=(D, 24), n=(D,))
DORA = {"first.a": (3, D), "first.b": (24, 3), "first.magnitude": (24,)}
LORA = {"second.a": (2, 24), "second.b": (D, 2)}


@pytest.mark.parametrize(
    "keep",
    [X, Keep(frozenset({"x", "squared"})), Keep(*2 * [frozenset({"x", "squared"})])],
    ids=["nothing", "its own tensor", "on the host"],
)
def test_a_part_of_ones_own_and_a_mixer_that_is_the_identity(keep) -> None:
    w = drawn(**PLAIN)
    expected = truths(lambda x, w: 2 * x + squares(2 * x, w), w)
    found = ours((SAME, SQUARES), w, {}, keep)
    close(found, expected)
    assert Squares.read == ["squared" in keep.kept]


def test_side_by_side() -> None:
    w = drawn(first=(24, D), second=(D, 24))
    close(
        ours((SAME, replace(SQUARES, beside=True)), w, {}),
        truths(lambda x, w: 2 * x + squares(x, w), w),
    )


def test_adapters_of_both_kinds() -> None:
    w = drawn(**PLAIN, **DORA, **LORA)
    w["first"].requires_grad_(False)
    adapters = {"first": Dora(scale=0.5), "second": Lora(scale=2.0)}
    trained = {name: p for name, p in w.items() if p.requires_grad}
    x, dy = torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))
    y = scheduled_layer(x, schedule((SQUARES,)), 0, w, adapters)
    found = [y, *torch.autograd.grad(y, [*trained.values()], dy)]
    y, _, *grads = truths(lambda x, w: x + squares(x, w), w)
    close(found, [y, *(g for g, name in zip(grads, w, strict=True) if name in trained)])


def test_a_layer_without_attention_and_one_without_an_mlp() -> None:
    mlp = dict(gate=(24, D), up=(24, D), down=(D, 24))
    w = drawn(**mlp)

    def gated(x: Tensor, w: dict[str, Tensor]) -> Tensor:
        gate = torch.nn.functional.silu(x @ w["gate"].t())
        return x + (gate * (x @ w["up"].t())) @ w["down"].t()

    close(ours((GATED,), w, {}), truths(gated, w))
    attention = drawn(q=(8, D), k=(4, D), v=(4, D), o=(D, 8), norm1=(D,))
    both = attention | drawn(**mlp)
    with torch.no_grad():
        both["down"].zero_()
    alone, beside = (
        ours(parts, w, {}) for parts, w in (((ATTENDS,), attention), ((ATTENDS, GATED), both))
    )
    assert all(map(torch.equal, alone, beside[: len(alone)]))


def test_a_layer_with_two_parts_of_a_role_is_refused() -> None:
    with pytest.raises(AssertionError, match="two parts over tiles"):
        parts_of(LayerSpec(parts=(ATTENDS, GATED, SQUARES)))
    with pytest.raises(AssertionError, match="a row's part is the first"):
        parts_of(LayerSpec(parts=(GATED, ATTENDS)))


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, truth in zip(found, expected, strict=True):
        assert (ours - truth).norm() <= 1e-5 * truth.norm()


def test_the_room_says_where_the_next_thing_goes() -> None:
    """The six answers of the room's docstring name files and tables that there are."""
    text = longctx.layer.__doc__ or ""
    table = text[text.index("Where the next thing goes") : text.index("Letters:")]
    answers = re.findall(r"^    (\S.*?)  +(.*)$", table, re.MULTILINE)
    assert len(answers) == 6
    homes = [
        *(ROOT / "longctx/layer").rglob("*.py"),
        *(ROOT / "longctx/families").glob("famil*.py"),
    ]
    homes += [ROOT / "longctx/families/adapters.py", *(ROOT / "longctx/cost").glob("*.py")]
    code = "\n".join(path.read_text() for path in homes)
    for _, answer in answers:
        for name in re.findall(r"`([A-Za-z_.]+)`", answer):
            last = name.rpartition(".")[2]
            assert re.search(rf"\b(class|def) {last}\b|^\s*{last}\b.* =", code, re.MULTILINE), name
        for path in re.findall(r"[a-z_/]+\.py", answer):
            base = ROOT / "longctx" / ("" if path.startswith(("cost/", "families/")) else "layer")
            assert (base / path).is_file(), path
