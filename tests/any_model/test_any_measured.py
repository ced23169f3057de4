"""Layers of any model, measured one of each kind: what they are, and the peak they foretell."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_any import config_of, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longctx
from longctx.any_model import measured
from longctx.any_model.measured import Point, measured_layers, own_weights
from longctx.any_model.specimen import Specimen, kind_of, outline
from longctx.cost.dims import MeasuredLayer, Spent
from longctx.cost.peak import LIBRARY_BYTES, peak, phases
from longctx.cost.sizes import Batch
from longctx.families.blocks import decoder_layers, state_blocks
from longctx.families.classes import class_of
from longctx.memory.place import Place, PlacedStates
from longctx.runtime.costs import StepTable
from longctx.runtime.peers import as_measured, peer_sizes

pytestmark = pytest.mark.usefixtures("reference_kernels")
CPU = torch.device("cpu")
ROW = 1024
MORE: dict[str, Any] = dict(n_positions=ROW, max_position_embeddings=ROW)
LENGTHS = 128, 512
"""Half of a row at most: the row is an extrapolation."""


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that are made on a CPU while it is on, and live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakKeyDictionary[Any, None]()

    def hold(self, tensors: Any) -> None:
        """Leaves out what is there already."""
        for x in tensors:
            self._seen[x.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.hold(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self._seen:
                self._seen[storage] = None
                weakref.finalize(storage, self._free, storage.nbytes())
                self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return out

    def begin(self) -> None:
        self.most = self.now

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """Layers are measured on a CPU as on a GPU, whose allocator counts."""
    monkeypatch.setitem(measured.LENGTHS, "cpu", LENGTHS)
    with Meter() as meter:
        monkeypatch.setattr(measured.Allocator, "now", lambda self: meter.now)
        monkeypatch.setattr(measured.Allocator, "most", lambda self: meter.most)
        monkeypatch.setattr(measured.Allocator, "begin", lambda self: meter.begin())
        yield meter


def layers_of(
    family: str, trained: bool = True, attention: str | None = None, **more: object
) -> Any:
    config = config_of(family, **MORE, **more)
    return measured_layers(config, class_of(config), attention, torch.float32, CPU, trained)


def held(model: Any, layers: tuple[MeasuredLayer, ...], meter: Meter) -> tuple[int, int]:
    """The bytes of a step's largest phase that are no weights, as planned and as a step holds."""
    sizes = as_measured(peer_sizes(model, "any", 4, chunks_loss=True), layers)
    specs = state_blocks(model, movable=False)
    blocks = [spec.sizes(accumulates=False) for spec in specs]
    standing = PlacedStates(blocks, [Place() for _ in specs], accumulates=False)
    ids = torch.randint(10, 100, (1, ROW))
    before = meter.now
    meter.begin()
    model(input_ids=ids, labels=ids).loss.backward()
    tables = StepTable.of(sizes, Batch(ROW, ROW))
    most = peak(phases(tables, model.longctx_any.store.ladder, standing)).buffers
    beside = LIBRARY_BYTES + most["weights"] + most["AdamW's states"]
    return sum(most.values()) - beside, meter.most - before


SHARED: dict[str, Any] = dict(layer_types=["sliding_attention", "full_attention"] * 2)


@pytest.mark.parametrize(
    ("family", "kinds", "attention", "more"),
    [
        ("llama", 1, "sdpa", {}),
        ("llama", 1, "eager", {}),
        ("gpt2", 1, "sdpa", {}),
        ("bloom", 1, "eager", dict(n_head=16)),
        ("gemma3_text", 2, "sdpa", dict(num_hidden_layers=4, sliding_window=64, **SHARED)),
        ("deepseek_v3", 2, "auto", {}),
    ],
)
def test_a_step_holds_what_is_planned(family, kinds, attention, more, meter) -> None:
    """Eager attention's scores grow as the square of a row, and are found to. GPT-2 drops out."""
    torch.manual_seed(0)
    model = make(family, **MORE, **more)
    if attention != "auto":
        model.set_attn_implementation(attention)
    longctx.patch(model, any_model=True, attn_backend=attention, offload_activations="none")
    layers = layers_of(family, attention=model.config._attn_implementation, **more)
    assert len(layers) == len([*decoder_layers(model)])
    planned, found = held(model, layers, meter)
    assert len({*layers}) == kinds
    assert planned == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gemma4_text"])
def test_what_is_measured_are_the_models_layers(family, monkeypatch) -> None:
    """Each kind once at each length, with as many weights, none of which shares memory with
    another; a specimen of Gemma 4 has all layers."""
    ran: list[tuple[type, int]] = []
    own = measured.own_weights

    def noted(layer: Any, trained: bool) -> Any:
        ran.append((type(layer), sum(p.numel() for p in layer.parameters())))
        return own(layer, trained)

    monkeypatch.setattr(measured, "own_weights", noted)
    config = config_of(family, **MORE, vocab_size=96)  # nobody has asked for it
    layers = measured_layers(config, class_of(config), None, torch.float32, CPU, True)
    model = outline(config, class_of(config), None, torch.float32)
    real = [(type(x), sum(p.numel() for p in x.parameters())) for x in decoder_layers(model)]
    kinds = [kind_of(layer) for layer in decoder_layers(model)]
    firsts = [real[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
    assert ran == 2 * firsts
    assert len(layers) == len(real) and all(x.backward.seconds[0] > 0 for x in layers)
    assert [layers.index(x) for x in layers] == [kinds.index(kind) for kind in kinds]


def test_weights_of_a_layer_are_its_own_while_it_is_measured() -> None:
    config = config_of("llama", hidden_size=512, intermediate_size=1024)
    specimen = Specimen(outline(config, class_of(config), None, torch.float32), CPU)
    layer = decoder_layers(specimen.model)[0]
    before = dict(layer.named_parameters())
    shared = {p.untyped_storage().data_ptr() for p in before.values()}
    assert len(shared) < len(before)  # views of the specimen's noise
    with own_weights(layer, trained=False):
        inside = dict(layer.named_parameters())
        assert len({p.untyped_storage().data_ptr() for p in inside.values()}) == len(before)
        assert all(torch.equal(p, before[name]) for name, p in inside.items())
        assert not any(p.requires_grad for p in inside.values())
    assert dict(layer.named_parameters()) == before


def test_frozen_layers_have_no_gradients_of_weights(meter) -> None:
    trained, frozen = (layers_of("llama", trained=trained)[0] for trained in (True, False))
    assert trained.forward.nbytes == frozen.forward.nbytes
    long = [x.backward.nbytes_of(ROW, ROW) for x in (trained, frozen)]
    assert long[0] > long[1]


def test_random_numbers_go_on_and_answers_are_remembered(monkeypatch) -> None:
    config = config_of("gpt2", **MORE, vocab_size=88)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = measured_layers(config, class_of(config), None, torch.float32, CPU, True)
    assert torch.equal(torch.rand(2), expected)
    monkeypatch.setattr(measured, "of_specimen", None)  # it would raise an error
    config.architectures, config.dtype = ["GPT2LMHeadModel"], torch.bfloat16  # as a model does
    assert measured_layers(config, class_of(config), None, torch.float32, CPU, True) is first
    other = measured_layers(config, class_of(config), None, torch.float32, CPU, False)
    assert isinstance(other, str) and "cannot be tried" in other and "\n" not in other


def test_what_cannot_be_measured_has_one_line(monkeypatch) -> None:
    said = layers_of("openai-gpt")
    assert said.startswith("OpenAIGPTLMHeadModel has no layers that transformers could checkpoint")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measured, "of_specimen", full)
    assert layers_of("llama", vocab_size=80) == "a layer does not fit beside what is on the GPU"


def test_curves_go_through_what_was_measured() -> None:
    lengths = 100, 400
    linear = measured._fitted(lengths, [Point(3.0, 1300), Point(24.0, 4300)])
    assert linear == Spent(pytest.approx((0.02, 0.0001)), (300.0, 10.0, 0.0))
    for n, s, nbytes in ((100, 3.0, 1300), (400, 24.0, 4300), (1000, 120.0, 10300)):
        assert linear.seconds_of(n, n) == pytest.approx(s) and linear.nbytes_of(n, n) == nbytes
    assert linear.seconds_of(400, 100) == pytest.approx(12.0)  # four documents
    square = measured._fitted(lengths, [Point(1.0, 12000), Point(2.0, 168000)])
    assert square.nbytes == (0.0, 20.0, 1.0) and square.seconds == (0.005, 0.0)


@pytest.mark.parametrize("positions", [4, 16, 64, 4096])
def test_rows_have_fewer_tokens_than_a_model_has_positions(positions) -> None:
    short, long = measured._lengths(config_of("roberta", max_position_embeddings=positions), CPU)
    assert 1 <= short < long <= max(2, positions // 2)
