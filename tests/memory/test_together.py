"""Parameters on the GPU are updated together, and what changes between steps is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from small_states import everything_on_gpu, place
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from exactness import DEVICE
from longctx.kernels import adamw_many, square_sums
from longctx.kernels.adamw import adamw_reference
from longctx.memory import optimizer as optimizing
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.states import BlockSpec

SHAPES = [(16, 65), (48,), (3, 7)]
STEPS = 3


class Adapters(nn.Module):
    """Weights of both dtypes, each with a gradient that `deliver` gives it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(DEVICE, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for shape in SHAPES
        )

    def deliver(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step + 1)
        given = [torch.randn(w.shape, generator=generator).to(w) for w in self.weights]
        trained = [(w, g) for w, g in zip(self.weights, given, strict=True) if w.requires_grad]
        sum((w * g).float().sum() for w, g in trained).backward()


def alone(
    weights: Sequence[Tensor], states: Any, grads: Sequence[Tensor], options: Any, scales: Any
) -> None:
    """What `adamw_many_` does, by the reference."""
    for weight, of, grad, given, scale in zip(weights, states, grads, options, scales, strict=True):
        flat, parts = weight.data.view(-1), (of.remainder, of.exp_avg, of.exp_avg_sq)
        more = dict(scale=scale, checksums=of.checksums)
        adamw_reference(flat, *parts, grad.reshape(-1), given, **more)


def make() -> tuple[Adapters, ExactAdamW]:
    module = Adapters()
    named = dict(module.named_parameters())
    placed = place(module, everything_on_gpu, specs=[BlockSpec(name="adapters", parameters=named)])
    first, *rest = module.weights
    groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.3}]
    return module, ExactAdamW(groups, lr=1e-2, stream=placed.stream)


Change = Callable[[Adapters, ExactAdamW, int], None]


def nothing(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    pass


def frozen_and_thawed(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    module.weights[3].requires_grad_(step != 1)
    module.weights[1].requires_grad_(step != 2)


def without_a_gradient(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    for i in (0, 4) if step % 2 else (2,):
        module.weights[i].register_post_accumulate_grad_hook(_forget)


def _forget(weight: Tensor) -> None:
    weight.grad = None


def moved(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    """Somebody puts other tensors under the parameters, one where 16 bytes are not loaded."""
    module.weights[1].data = module.weights[1].data.clone()
    odd = torch.zeros(16 * 65 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(16, 65)
    odd.copy_(module.weights[3].data)
    module.weights[3].data = odd


def other_options(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    optimizer.param_groups[step % 2]["lr"] *= 3
    optimizer.param_groups[1]["betas"] = (0.8, 0.9 + step / 100)


def written(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    """Weights, whose remainders are stale then, a moment and a count of steps."""
    with torch.no_grad():
        module.weights[3].data[3] *= 2
    if step:
        state = optimizer.state[module.weights[4]]
        state["exp_avg"].mul_(0.5)
        state["step"].add_(10)


def loaded(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    if step == 2:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_states(module.weights[0], {})


def added(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    if step == 2:
        module.weights.append(torch.ones(33, device=DEVICE))
        optimizer.add_param_group({"params": [module.weights[-1]], "lr": 0.5})


def in_another_layout(module: Adapters, optimizer: ExactAdamW, step: int) -> None:
    """A gradient that somebody replaces by a transposed one, and by one in 64 bits."""
    if step == 0:
        for i, change in ((0, lambda g: g.t().contiguous().t()), (5, lambda g: 2 * g)):
            weight = module.weights[i]
            weight.register_post_accumulate_grad_hook(lambda w, f=change: _replace(w, f(w.grad)))


def _replace(weight: Tensor, grad: Tensor) -> None:
    weight.grad = grad


CHANGES: list[Change] = [
    *(nothing, frozen_and_thawed, without_a_gradient, moved, other_options, written, loaded),
    *(added, in_another_layout),
]


HOW = ["begun", "at once", "prepared"]


@pytest.mark.parametrize(
    ("change", "how"),
    [
        *((change, HOW[i % 3]) for i, change in enumerate(CHANGES)),
        *((nothing, how) for how in HOW[1:]),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_together_as_each_alone(change: Change, how: str, monkeypatch) -> None:
    """Every second step is clipped."""
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(optimizing, "adamw_many_", alone)
            monkeypatch.setattr(square_sums, "runs_kernel", lambda *_: False)
        module, optimizer = make()
        norms = []
        for step in range(STEPS):
            change(module, optimizer, step)
            module.deliver(step)
            norms.append(optimizer.clip(0.5 if step % 2 else None))
            if together and how == "prepared":
                optimizer.prepare()
            elif together and how == "begun":
                optimizer.begin(torch.zeros((), device=DEVICE))
            optimizer.step()
            optimizer.zero_grad()
        counts = [*optimizer.steps.values()]
        states = [x for w in module.weights for x in optimizer.state[w].values()]
        found.append((counts, [*norms, *module.weights, *states]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


def _less(optimizer: ExactAdamW) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3


def _moved(optimizer: ExactAdamW) -> None:
    weight = optimizer.param_groups[1]["params"][2]
    weight.data = weight.data.clone()


def _counted(optimizer: ExactAdamW) -> None:
    state = optimizer.state[optimizer.param_groups[1]["params"][2]]
    if "step" in state:  # from the first step on
        state["step"].add_(3)


def _dropped(optimizer: ExactAdamW) -> None:
    optimizer.param_groups[1]["params"][1].grad = None


@pytest.mark.parametrize("change", [_less, _moved, _counted, _dropped])
def test_what_changes_after_it_was_prepared(change: Callable[[ExactAdamW], None]) -> None:
    found = []
    for prepares in (True, False):
        module, optimizer = make()
        for step in range(2):
            module.deliver(step)
            optimizer.clip(None)
            if prepares:
                optimizer.prepare()
            change(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*map(int, optimizer.steps.values()), *module.weights])
    assert all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(*found, strict=True)
    )


def test_a_step_that_was_begun_is_left_out_where_the_guard_says_so() -> None:
    """Weights, states and counts are those of before, and so is the step that follows."""
    found = []
    for breaks in (True, False):
        module, optimizer = make()
        for step in range(2):
            if breaks:
                module.deliver(7)
                optimizer.clip(0.5)
                before = [x.clone() for x in [*module.weights, *states(module, optimizer)]]
                optimizer.begin(torch.full((), torch.nan, device=DEVICE))
                after = [*module.weights, *states(module, optimizer)]
                assert all(map(torch.equal, before, after))
                optimizer.zero_grad()
                optimizer.step()  # without gradients
                assert all(map(torch.equal, before, [*module.weights, *states(module, optimizer)]))
            module.deliver(step)
            optimizer.clip(0.5)
            optimizer.begin(torch.zeros((), device=DEVICE))
            optimizer.step()
            optimizer.zero_grad()
        counts = [*optimizer.steps.values()]
        found.append([*map(torch.tensor, counts), *module.weights, *states(module, optimizer)])
    assert all(map(torch.equal, *found))


def test_whoever_asked_to_be_called_before_a_step_is(monkeypatch) -> None:
    _, optimizer = make()
    assert optimizer.can_begin
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert not optimizer.can_begin
    hook.remove()
    everybody = register_optimizer_step_post_hook(lambda *_: None)
    assert not optimizer.can_begin
    everybody.remove()
    assert optimizer.can_begin


def states(module: Adapters, optimizer: ExactAdamW) -> list[Tensor]:
    return [x for w in module.weights for x in optimizer.states_of(w).values()]


def test_a_gradient_that_changes_after_clip_is_refused_all_the_same() -> None:
    module, optimizer = make()
    module.deliver(0)
    optimizer.clip(0.1)
    optimizer.prepare()
    module.weights[3].grad.mul_(2)  # in 16 bits, of which the factor is remembered
    with pytest.raises(RuntimeError, match="after optimizer.clip"):
        optimizer.step()


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[int]]:
    """The number of tensors of each launch for many of them."""
    rows: list[int] = []

    def counted(*args: Any) -> Any:
        for kind, table, programs in launches(*args):
            rows.append(len(table))
            yield kind, table, programs

    launches = adamw_many.launches
    for module in (adamw_many, square_sums):
        monkeypatch.setattr(module, "launches", counted)
    yield rows


def test_a_step_has_a_norm_and_an_update_for_all(launched) -> None:
    """Whatever the shapes, groups and counts of steps; other dtypes are another launch, and so are
    sizes that are no multiples of 16."""
    module, optimizer = make()
    module.deliver(0)
    optimizer.clip(1.0)
    assert launched == [1, 2, 1, 2]  # of each dtype two sizes are multiples of 16
    launched.clear()
    optimizer.step()
    assert launched == [1, 1, 2, 2]


def test_a_weight_in_another_layout_is_refused() -> None:
    """Before anything is updated."""
    module, optimizer = make()
    module.deliver(0)
    module.weights[3].data = module.weights[3].data.t().contiguous().t()
    before = [w.detach().clone() for w in module.weights]
    with pytest.raises(ValueError, match="contiguity of a weight must be True, got False"):
        optimizer.step()
    assert all(torch.equal(w, x) for w, x in zip(module.weights, before, strict=True))
