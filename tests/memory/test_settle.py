"""The slab that states, gradients and activations share: its size, and that nothing overlaps."""

from __future__ import annotations

import random

import pytest
import torch
from cost_sizes import SETS
from small_cost import tables_of
from small_states import (
    TOKENS,
    anywhere,
    batch,
    everything_on_gpu,
    hosted,
    llama,
    nothing_on_gpu,
    place,
)
from torch import Tensor

from exactness import DEVICE
from longctx.families.blocks import state_blocks
from longctx.memory.place import Place
from longctx.memory.settle import HostRoom
from longctx.memory.slab import LINE
from longctx.memory.states import Block

pytestmark = pytest.mark.usefixtures("reference_kernels")
BF16 = torch.bfloat16
ROWS = 5
"""Of a batch whose activations take more than the gradients, 94 KB and 86 KB a layer."""


def on_host(block: Block) -> list[Tensor]:
    """What of a block lies in the slab."""
    found = [] if block.place.states else [block.exp_avg, block.exp_avg_sq, block.remainder]
    return [x for x in [*found, block.host_weight, block.host_grad] if x is not None]


def span(slab: Tensor, x: Tensor) -> tuple[int, int]:
    """The bytes of the slab that are the tensor's."""
    start = x.data_ptr() - slab.data_ptr()
    return start, start + x.nbytes


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "accumulates", "nbytes"),
    [
        (BF16, False, 2 + 2 + 4 + 4 + 2),
        (BF16, True, 2 + 2 + 4 + 4 + 4),
        (torch.float32, False, 4 + 4 + 4 + 4),
        (torch.float32, True, 4 + 4 + 4 + 4),
    ],
)
def test_bytes_of_a_parameter(dtype, accumulates, nbytes) -> None:
    model = llama(dtype)
    specs = state_blocks(model, movable=True)
    for spec in specs:
        size = spec.sizes(accumulates=accumulates)
        numel = sum(p.numel() for p in spec.parameters.values())
        assert size.weight + size.states + size.grad == numel * nbytes
    assert [spec.name for spec in specs if spec.sizes(accumulates=False).fixed] == [
        "norms and the rest"
    ]


def test_a_frozen_weight_has_neither_states_nor_gradient() -> None:
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    sizes = {s.name: s.sizes(accumulates=False) for s in state_blocks(model, movable=True)}
    frozen = model.model.layers[0].mlp.up_proj.weight.numel()
    assert sizes["layer 0"].weight == sizes["layer 1"].weight
    assert sizes["layer 0"].grad == sizes["layer 1"].grad - 2 * frozen
    assert sizes["layer 0"].states == sizes["layer 1"].states - 10 * frozen
    assert (sizes["lm_head"].states, sizes["lm_head"].grad) == (0, 0)


@pytest.mark.parametrize(
    "kept_bytes", [(), (1000, 0, 0), (10**5, 10**5, 10**5), (1000, 1000, 10**6), (1000, 10**6, 0)]
)
def test_a_layer_has_12_bytes_a_parameter_and_shares_the_rest(kept_bytes) -> None:
    """Its gradients take the room of activations. Embedding and lm_head have 14, nothing to share:
    their gradients are there before and after all activations."""
    specs = state_blocks(llama(), movable=True)
    room = HostRoom(
        specs,
        [nothing_on_gpu(spec) for spec in specs],
        accumulates=False,
        kept_bytes=kept_bytes,
    )
    sizes = [sum(p.numel() for p in spec.parameters.values()) for spec in specs[:-1]]
    embedding, *layers, head = sizes
    states = 14 * (embedding + head) + 12 * sum(layers)
    assert states <= room.states_bytes <= states + 5 * LINE * len(sizes)
    gradient, end = 2 * layers[0], 0
    for i in range(3):  # above all that lower layers keep
        end = max(end, sum(kept_bytes[:i])) + gradient
    shared = max(end, sum(kept_bytes))
    assert shared <= room.shared_bytes <= shared + 3 * LINE
    assert room.nbytes == room.states_bytes + room.shared_bytes


def test_gradients_that_add_up_share_nothing() -> None:
    """They outlive a forward, in fp32."""
    specs = state_blocks(llama(), movable=True)
    places = [nothing_on_gpu(spec) for spec in specs]
    room = HostRoom(specs, places, accumulates=True, kept_bytes=(259, 259, 259))
    numel = sum(p.numel() for spec in specs[:-1] for p in spec.parameters.values())
    assert 16 * numel <= room.states_bytes <= 16 * numel + 5 * LINE * len(specs)
    assert room.shared_bytes == 777


def test_what_is_on_the_gpu_takes_nothing_of_the_host() -> None:
    specs = state_blocks(llama(), movable=True)
    places = [Place() for _ in specs]
    assert HostRoom(specs, places, accumulates=False).nbytes == 0
    room = HostRoom(specs, places, accumulates=False, kept_bytes=(0, 10**6, 0))
    assert room.nbytes == 10**6


# --- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp32", "accumulates", "frozen", "vanilla", "tied"])
def test_nothing_overlaps_and_nothing_is_left_over(kind) -> None:
    """Every tensor in the slab is filled with a number of its own; then all are still there. The
    slab ends where the last one does, but for the rounding to lines."""
    for seed in range(10):
        model = llama(
            torch.float32 if kind == "fp32" else BF16,
            DEVICE,
            tied=kind == "tied",
            class_type="vanilla" if kind == "vanilla" else "custom",
        )
        if kind == "frozen":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("layers.1" not in name and "up_proj" not in name)
        before = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        draw = random.Random(seed)
        where = nothing_on_gpu if seed == 0 else anywhere(draw)
        placed = place(
            model, where, accumulates=kind == "accumulates", ladder=hosted(draw.randint(1, 3))
        )
        assert all(torch.equal(p.detach().cpu(), before[n]) for n, p in model.named_parameters())

        room, slab = placed.room, placed.room._slab.data
        assert slab.numel() == room.nbytes
        tensors = [x for block in room.blocks for x in on_host(block)]
        for number, x in enumerate(tensors):
            x.fill_(number)
        assert all((x == number).all() for number, x in enumerate(tensors))
        spans = sorted(span(slab, x) for x in tensors if x.numel())
        assert all(0 <= start < stop <= slab.numel() for start, stop in spans)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert all(start % LINE == 0 for start, _ in spans)
        last = max((stop for _, stop in spans if stop <= room.states_bytes), default=0)
        assert room.states_bytes - last < 5 * LINE * len(room.blocks)


@pytest.mark.parametrize("where", [everything_on_gpu, nothing_on_gpu])
def test_states_begin_at_zero_and_weights_where_they_belong(where) -> None:
    placed = place(llama(device=DEVICE), where)
    for block in placed.stream.blocks:
        assert block.is_away == block.streams
        for p, part in zip(block.parameters, block.ranges, strict=True):
            if block.streams:
                assert p.data_ptr() == block.home_at(part).data_ptr()
                assert p.device.type == "cpu" and p.is_contiguous()
        assert not any(x.any() for x in (block.exp_avg, block.exp_avg_sq, block.remainder))
        assert (block.host_grad is None) == block.place.grad
        if not block.place.all_on_gpu:
            assert block.exp_avg.device.type == "cpu"


# --- activations and gradients, one after the other ------------------------------------------


def gradients_on_host(layers_on_gpu: int = 1):
    """A model whose gradients alone live on the host, and its optimizer. Its slab has room for the
    gradients of the layers and for the activations of one forward."""

    def where(spec):
        return Place(grad=not spec.modules)

    model = llama(device=DEVICE)
    placed = place(model, where, ladder=hosted(layers_on_gpu), tokens=ROWS * TOKENS)
    return placed, placed.optimizer()


def leaving(placed) -> list[str]:
    return [name for name, block in placed.blocks.items() if block.grad_is_on_host]


def kept_on_host(placed) -> list[int]:
    """Where in the slab the activations that are alive begin."""
    alive = placed.module.longctx.store._alive()
    return [min(entry.offset for entry in s.hosted.values()) for s in alive if s.hosted]


def assert_places_change_nothing(accumulate) -> None:
    """Losses, norms and masters of two steps of `accumulate(model)`, which gives losses, are those
    of a model that has everything on the GPU."""
    found = []
    on_gpu = place(llama(device=DEVICE))
    for placed, optimizer in ((on_gpu, on_gpu.optimizer()), gradients_on_host()):
        numbers: list[Tensor] = []
        for _ in range(2):
            numbers += accumulate(placed.module)
            numbers.append(optimizer.clip(1.0))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        numbers += [optimizer.master(p) for p in placed.module.parameters()]
        found.append([x.detach().to(DEVICE) for x in numbers])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_gradients_take_the_room_of_their_activations() -> None:
    placed, optimizer = gradients_on_host()
    layer_bytes = tables_of(placed.module, ROWS * TOKENS).kinds[0].kept_bytes(SETS["o"])
    for step in range(3):
        loss = placed.module(**batch(3 * step, DEVICE, ROWS)).loss
        assert len(kept_on_host(placed)) == 2 and leaving(placed) == []
        loss.backward()
        assert kept_on_host(placed) == []
        assert leaving(placed) == ["embedding", "layer 0", "layer 1", "layer 2", "lm_head"]
        shared = placed.room.states_bytes
        for i in range(3):
            [grad] = on_host(placed.blocks[f"layer {i}"])
            start, stop = span(placed.room._slab.data, grad)
            assert shared + i * layer_bytes <= start and stop <= placed.room.nbytes
        optimizer.step()
        optimizer.zero_grad()
        assert leaving(placed) != []  # for the updates
        optimizer.flush()
        assert leaving(placed) == []


def test_activations_are_not_written_over_a_gradient_that_waits() -> None:
    """A second forward before the step: its activations stay on the GPU."""
    placed, _ = gradients_on_host()
    placed.module(**batch(0, DEVICE, ROWS)).loss.backward()
    loss = placed.module(**batch(0, DEVICE, ROWS)).loss
    assert kept_on_host(placed) == []
    assert len(placed.module.longctx.store._alive()) == 3
    loss.backward()

    def accumulate(model) -> list[Tensor]:
        losses = []
        for n in range(2):
            losses.append(model(**batch(n, DEVICE, ROWS)).loss)
            losses[-1].backward()
        return losses

    assert_places_change_nothing(accumulate)


def test_a_gradient_does_not_leave_over_activations_that_are_kept() -> None:
    """Two forwards are alive; the second one's backward runs first."""
    placed, _ = gradients_on_host()
    first = placed.module(**batch(0, DEVICE, ROWS)).loss
    second = placed.module(**batch(0, DEVICE, ROWS)).loss
    # Of the second's, a layer and an input are where layer 2's gradient goes.
    assert len(kept_on_host(placed)) == 4
    second.backward()
    assert leaving(placed) == ["embedding", "lm_head"]
    first.backward()
    assert leaving(placed) == []  # the two came back to be added to

    for order in ((0, 1), (1, 0)):

        def accumulate(model, order=order) -> list[Tensor]:
            losses = [model(**batch(n, DEVICE, ROWS)).loss for n in range(2)]
            for n in order:
                losses[n].backward()
            return losses

        assert_places_change_nothing(accumulate)


def test_a_forward_that_is_dropped_holds_nothing_up() -> None:
    placed, _ = gradients_on_host()
    dropped = placed.module(**batch(0, DEVICE, ROWS)).loss
    del dropped
    loss = placed.module(**batch(0, DEVICE, ROWS)).loss
    loss.backward()
    assert leaving(placed) == ["embedding", "layer 0", "layer 1", "layer 2", "lm_head"]


@pytest.mark.parametrize("where", [everything_on_gpu, nothing_on_gpu])
def test_a_batch_that_is_longer_than_planned_gets_a_slab_of_its_own(where) -> None:
    """Which gradients share no more."""
    found = []
    for placement in (everything_on_gpu, where):
        settings = dict(offload_activations="all")
        placed = place(llama(device=DEVICE, **settings), placement, ladder=hosted(1))
        optimizer = placed.optimizer()
        numbers = []
        for step in (0, 1, 2):
            inputs = batch(3 * step, DEVICE, rows=1 + step)
            loss = placed.module(**inputs).loss
            assert len(kept_on_host(placed)) == 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(loss.detach())
        optimizer.flush()
        numbers += [optimizer.master(p).to(DEVICE) for p in placed.module.parameters()]
        found.append(numbers)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
