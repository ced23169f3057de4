"""Wherever states live and whenever updates run, training is the same bit by bit.

The truth of every run is the one that has everything on the GPU and updates at once; that its
numbers are AdamW's is tested in test_optimizer.py. Here nobody touches weights of a block that is
not open while forward or backward runs (which would be exact, and wait for everything); weights
that were dropped are NaN, and so is every buffer before it is filled, and the slab where nothing in
it is needed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from cost_sizes import SETS
from small_states import TOKENS, Placed, anywhere, batch, everything_on_gpu, hosted, llama, place
from torch import Tensor

from longctx.memory import guard as guarding
from longctx.memory import store as storing
from longctx.memory import stream as streaming
from longctx.memory.gradients import WatchedGradients
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.states import Block
from longctx.memory.stream import Compute, Lane
from longctx.train.lora.quantise import quantise_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 3
RUNS = {"cpu": 12, "cuda": 200}
"""Random runs of the usual kind. On a GPU lanes lag at random, too."""
RUNS_OF_A_KIND = {"cpu": 1, "cuda": 6}
"""Each kind has places of its own: the 21 kinds are as many draws. Those of several batches, whose
sums go more ways, have twice as many."""
Numbers = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("reference_kernels", "poison", "deterministic")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    leave, after, mark, settle = Block.leave, Lane.after, Compute.mark, guarding.settle
    are_seen, is_lent = WatchedGradients.are_seen, Block.is_lent
    poison = SimpleNamespace(dropped=True)
    """Whether weights that were dropped are overwritten."""

    def leave_nothing(block: Block) -> None:
        left = block.weight
        leave(block)
        if left is not None and poison.dropped:
            fill_with_nan(left)

    def settle_for_others(x: Tensor) -> None:
        assert not COMPUTING, "weights were touched while another block computes"
        settle(x)

    class Torch:
        """The stream's view of torch, with an `empty` that hides nothing."""

        @staticmethod
        def empty(*args, **kwargs):
            return fill_with_nan(torch.empty(*args, **kwargs))

        def __getattr__(self, name: str):
            return getattr(torch, name)

    draw = random.Random(0)

    @contextmanager
    def late(begin: Any, *args: Any) -> Iterator[None]:
        """A lane that lags: what does not wait for it reads what was there before."""
        with begin(*args):
            if torch.cuda.is_available() and draw.random() < 0.2:
                torch.cuda._sleep(200_000)  # cycles: 0.1 ms
            yield

    def mark_late(compute: Compute) -> Any:
        with late(nullcontext):
            return mark(compute)

    def seen_by_nobody(gradients: WatchedGradients) -> bool:
        assert not are_seen(gradients), "an update would be made at once for nobody's sake"
        return False

    def lent_to_nobody(block: Block) -> bool:
        """Graphs of dropped forwards through Hugging Face's layers hold weights on the GPU."""
        assert not (block.streams and is_lent(block)), "an update would be made at once"
        return False

    monkeypatch.setattr(WatchedGradients, "are_seen", seen_by_nobody)
    monkeypatch.setattr(Block, "is_lent", lent_to_nobody)
    monkeypatch.setattr(Lane, "after", lambda lane, *marks: late(after, lane, *marks))
    monkeypatch.setattr(Compute, "mark", mark_late)
    monkeypatch.setattr(storing, "_after_compute", partial(late, storing._after_compute))
    monkeypatch.setattr(Block, "leave", leave_nothing)
    monkeypatch.setattr(guarding, "settle", settle_for_others)
    monkeypatch.setattr(streaming, "torch", Torch())
    return poison


COMPUTING: list[bool] = []
"""Not empty while forward or backward runs."""


@contextmanager
def computing() -> Iterator[None]:
    COMPUTING.append(True)
    try:
        yield
    finally:
        COMPUTING.clear()


def fill_with_nan(x: Tensor) -> Tensor:
    """Also of bytes that are bf16, fp32, or scales."""
    x.view(-1).view(torch.uint8).fill_(255)
    return x


def poison_slab(placed: Placed, draw: random.Random) -> None:
    """Overwrites what is free of the part that activations and gradients share."""
    store = placed.module.longctx.store
    if store._alive() or draw.random() < 0.3:
        return
    free = torch.ones_like(store._slab, dtype=torch.bool)
    for block, start in placed.room._starts.items():
        if block.grad_is_on_host:
            free[start : start + block.host_grad.nbytes] = False
    if store.device.type == "cuda":
        torch.cuda.synchronize()
    store._slab[free] = 255  # NaN, in bf16 and fp32


def look(module: torch.nn.Module, args, output) -> None:
    """A hook that the schedule knows nothing of."""


def make(
    draw: random.Random | None,
    device: str,
    *,
    accumulates: bool = False,
    frozen: str = "",
    hooked: bool = False,
    adapter: bool = False,
    lora: tuple[str, ...] | None = None,  # modules_to_save
    nf4: bool = False,
    rows: int = 1,
    batches: int = 1,
    **kind,
):
    """A model in random places; without `draw` all on the GPU."""
    model = llama(device=device, **kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    if hooked:
        model.model.layers[1].mlp.register_forward_hook(look)
        model.lm_head.register_forward_hook(look)
    if hooked and lora is not None:
        model.enable_input_require_grads()
    where = anywhere(draw) if draw else everything_on_gpu
    ladder = hosted(draw.randint(1, 3), draw.choice(list(SETS))) if draw else None
    if adapter:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
        peft.inject_adapter_in_model(config, model)
    if nf4:
        quantise_(model, torch.device(device))
    if lora is not None:
        torch.manual_seed(0)
        options = dict(r=2, target_modules="all-linear", modules_to_save=list(lora) or None)
        model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
    tokens = rows * TOKENS
    placed = place(model, where, accumulates=accumulates, ladder=ladder, tokens=tokens)
    return placed, placed.optimizer()


def numbers_of(model: torch.nn.Module, optimizer: ExactAdamW) -> Numbers:
    """Masters and moments."""
    optimizer.flush()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = optimizer.master(parameter).cpu().clone()
        if parameter.requires_grad:
            states = optimizer.states_of(parameter)
            found |= {f"{name}.{kind}": x.cpu().clone() for kind, x in states.items()}
    return found


def train(
    draw: random.Random | None,
    device: str = "cpu",
    *,
    steps: int = STEPS,
    resumed: bool = False,
    **kind,
) -> Numbers:
    """A run's losses, norms, masters and moments; with `draw` in random places and disturbed."""
    placed, optimizer = make(draw, device, **kind)
    model, found = placed.module, {}

    def happens(chance: float) -> bool:
        return draw is not None and draw.random() < chance

    def forward(n: int) -> Tensor:
        if draw and hasattr(model, "longctx"):
            poison_slab(placed, draw)
        with computing():
            return model(**batch(n, device, kind.get("rows", 1))).loss

    for step in range(steps):
        if draw is None or happens(0.3):
            with torch.no_grad():
                found[f"evaluation {step}"] = forward(100 + step)
        if happens(0.1):  # a step that is skipped
            forward(200).backward()
            optimizer.clip(1.0)
            optimizer.zero_grad()
        dropped = [forward(201) for _ in range(happens(0.2))]
        for n in range(kind.get("batches", 1)):
            loss = forward(2 * step + n)
            if happens(0.5):
                dropped.clear()
            with computing():
                loss.backward()
            found[f"loss {step}.{n}"] = loss.detach()
        found[f"norm {step}"] = optimizer.clip(1.0)
        optimizer.step()
        (model if happens(0.5) else optimizer).zero_grad(set_to_none=not happens(0.1))
        if happens(0.2):
            optimizer.state_dict()
        if draw is None or happens(0.3):
            optimizer.flush()
        if resumed and happens(0.5):
            optimizer.flush()
            weights, states = model.state_dict(), optimizer.state_dict()
            placed, optimizer = make(draw, device, **kind)
            model = placed.module
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
    if hasattr(model, "longctx"):
        assert bool(model.longctx.warned) == bool(kind.get("hooked"))
    found = {name: x.cpu() for name, x in found.items()}
    return found | numbers_of(model, optimizer)


@cache
def truth(device: str, **kind) -> Numbers:
    return train(None, device, **kind)


def assert_same(found: Numbers, device: str, what: str, **kind) -> None:
    expected = truth(device, **kind)
    assert found.keys() <= expected.keys()
    for name, x in found.items():
        assert x.isfinite().all() and torch.equal(x, expected[name]), f"{what}: {name}"


@pytest.mark.parametrize("device", DEVICES)
def test_many_runs_are_one_run(device) -> None:
    """Random places of every block's weights, states and gradients and of activations; evaluations,
    saves, skipped steps, dropped forwards and flushes between the steps."""
    for seed in range(RUNS[device]):
        assert_same(train(random.Random(seed), device), device, f"run {seed}")


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_run_is_the_same_run(device) -> None:
    steps = RUNS[device] // 2
    found = train(random.Random(0), device, steps=steps)
    assert_same(found, device, f"run of {steps} steps", steps=steps)


KINDS = {
    "fp32": dict(dtype=torch.float32),
    "activations-larger-than-gradients": dict(rows=5),
    "more-large-batches-than-planned": dict(batches=2, rows=5),
    "norms-of-q-and-k": dict(family="qwen3"),
    "norms-after-parts": dict(family="gemma3_text", tied=True),
    "fused-accumulates": dict(family="phi3", accumulates=True, batches=2),
    "fused-resumed": dict(family="phi3", resumed=True),
    "vanilla": dict(class_type="vanilla"),
    "hugging-faces-layers": dict(hooked=True),
    "adapter": dict(adapter=True),
    "lora-accumulates": dict(lora=(), accumulates=True, batches=2),
    "lora-and-ends": dict(lora=("embed_tokens", "lm_head")),
    "nf4-fused": dict(lora=(), nf4=True, family="phi3"),
    "nf4-and-ends": dict(lora=("embed_tokens", "lm_head"), nf4=True),
    "nf4-hugging-faces-layers": dict(lora=(), nf4=True, hooked=True),
    "accumulates-tied": dict(accumulates=True, batches=2, tied=True),
    "frozen-layer": dict(frozen="layers.1."),
    "frozen-embedding": dict(frozen="embed_tokens"),
    "frozen-attention": dict(frozen="self_attn"),
    "frozen-norms": dict(frozen="norm"),
    "resumed-accumulates": dict(resumed=True, accumulates=True, batches=2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_runs(kind, device, poison) -> None:
    settings = KINDS[kind]
    if "nf4" in settings:
        pytest.importorskip("bitsandbytes")
    # Autograd holds what Hugging Face's layers read, a view of the weights, until their backward.
    poison.dropped = not settings.get("hooked")
    for n in range(RUNS_OF_A_KIND[device] * settings.get("batches", 1)):
        found = train(random.Random(f"{kind} {n}"), device, **settings)
        assert_same(found, device, f"run {n}", **settings)
