"""What a loop does to torch.optim.AdamW it may do to exact AdamW: the numbers are those of torch's
AdamW in fp32 (docs/states.md has the contract as a table).

A state machine does to both whatever it draws: batches, clipping by anyone, views of gradients,
both kinds of zero_grad, schedulers, files, frozen layers, moving averages, evaluations. The
gradients are drawn, not computed, so that both get the same ones and nothing but the optimizer may
differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from small_states import HOST, Placed, place
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from exactness import DEVICE
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Place
from longctx.memory.states import BlockSpec

pytestmark = pytest.mark.usefixtures("reference_kernels")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(40, 33), (7,), (33, 50), (50, 40)]
OPTIONS = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)


VIEWS = [
    lambda grad: grad,
    lambda grad: grad[:3],
    lambda grad: grad.view(-1)[1::2],
    lambda grad: grad.t() if grad.dim() > 1 else grad.unsqueeze(0),
    lambda grad: grad.detach(),
    lambda grad: grad.data[1:],
    lambda grad: torch.from_dlpack(grad),
]


class Told(nn.Module):
    """A layer whose weight gets the gradient that it is told."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        start = torch.randn(shape).to(BF16)
        self.weight = nn.Parameter(start.to(DEVICE, dtype))

    def forward(self, total: Tensor, grad: Tensor) -> Tensor:
        return total + (self.weight * grad.to(self.weight)).sum()


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Told(shape, dtype) for shape in SHAPES)
        self.layers[3].weight.requires_grad_(False)

    def forward(self, grads: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=DEVICE, dtype=self.layers[0].weight.dtype)
        for layer, grad in zip(self.layers, grads, strict=True):
            total = layer(total, grad)
        return total

    def specs(self) -> list[BlockSpec]:
        specs = [
            BlockSpec(
                name=f"layer {i}",
                parameters={f"layers.{i}.weight": layer.weight},
                modules=[layer],
                layer=i,
                movable=i != 3,  # what is thawed later has no states on the host
            )
            for i, layer in enumerate(self.layers)
            if layer.weight.dim() > 1
        ]
        rest = {"layers.1.weight": self.layers[1].weight}
        return [*specs, BlockSpec(name="rest", parameters=rest)]


WHERE = {
    "gpu": lambda spec: Place(),
    "host": lambda spec: HOST if spec.movable else Place(),
    "weights on the gpu": lambda spec: Place(states=False, grad=False) if spec.movable else Place(),
    "gradients on the gpu": lambda spec: (
        Place(weight=False, states=False) if spec.movable else Place()
    ),
}


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = trained(module)
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def placed(where: str, dtype: torch.dtype, accumulates: bool = False) -> Placed:
    model = Model(dtype)
    return place(model, WHERE[where], specs=model.specs(), accumulates=accumulates, piece=1024)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


class Contract(RuleBasedStateMachine):
    where, dtype, accumulates = "gpu", FP32, False

    def __init__(self) -> None:
        super().__init__()
        self.placed = placed(self.where, self.dtype, self.accumulates)
        self.model, self.truth = self.placed.module, Model(FP32)
        self.optimizer = ExactAdamW(groups(self.model), **OPTIONS, stream=self.placed.stream)
        self.adamw = torch.optim.AdamW(groups(self.truth), **OPTIONS, foreach=False)
        self.scheduler, self.schedule = schedule(self.optimizer), schedule(self.adamw)
        self.average = [[x.detach().clone() for x in self.model.parameters()] for _ in range(2)]
        self.saved: list[tuple[Any, ...]] = []
        self.views: list[tuple[Tensor, Tensor]] = []
        """Views of gradients that somebody keeps, ours and theirs."""
        self.clipped = False
        self.batches = 0

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.parameters(), self.truth.parameters(), strict=True))

    def changed_in_place(self) -> None:
        """Of bf16 gradients `clip` remembers a factor, and says so where one changes after it."""
        assume(not (self.clipped and self.dtype == BF16))

    # --- gradients -------------------------------------------------------------------------

    @precondition(lambda self: trained(self.truth))
    @rule(magnitude=st.integers(-2, 1))
    def backward(self, magnitude: int) -> None:
        if self.dtype == BF16 and not self.accumulates:
            self.views.clear()  # which have no room for the sum
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        grads = [torch.randn(shape, generator=generator) * 10.0**magnitude for shape in SHAPES]
        grads = [grad.to(DEVICE, BF16) for grad in grads]
        self.model(grads).backward()
        self.truth([grad.float() for grad in grads]).backward()

    @rule(max_norm=st.sampled_from([0.1, 3.0, 1e9]))
    def clip(self, max_norm: float) -> None:
        ours = self.optimizer.clip(max_norm)
        theirs = nn.utils.clip_grad_norm_(self.truth.parameters(), max_norm, foreach=False)
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=self.rtol, atol=1e-30)
        self.clipped = True

    @rule(max_norm=st.sampled_from([0.1, 3.0]))
    def clip_by_torch(self, max_norm: float) -> None:
        self.changed_in_place()
        ours, theirs = (
            nn.utils.clip_grad_norm_(m.parameters(), max_norm, foreach=False)
            for m in (self.model, self.truth)
        )
        torch.testing.assert_close(ours.float().cpu(), theirs.cpu(), rtol=self.rtol, atol=1e-30)

    @precondition(lambda self: any(p.grad is not None for p in self.truth.parameters()))
    @rule(limit=st.sampled_from([0.125, 4.0]))
    def clip_values(self, limit: float) -> None:
        self.changed_in_place()
        for model in (self.model, self.truth):
            nn.utils.clip_grad_value_(model.parameters(), limit, foreach=False)

    @rule(factor=st.sampled_from([0.5, 2.0]), divides=st.booleans())
    def scale(self, factor: float, divides: bool) -> None:
        self.changed_in_place()
        for pair in self.pairs:
            for p in pair:
                if p.grad is not None:
                    p.grad.div_(factor) if divides else p.grad.mul_(factor)

    @rule(by_model=st.booleans(), to_none=st.booleans())
    def zero_grad(self, by_model: bool, to_none: bool) -> None:
        (self.model if by_model else self.optimizer).zero_grad(set_to_none=to_none)
        (self.truth if by_model else self.adamw).zero_grad(set_to_none=to_none)
        self.clipped = False

    @rule(number=st.integers(0, 2))
    def grad_by_hand(self, number: int) -> None:
        ours, theirs = self.pairs[number]
        if theirs.requires_grad:
            ours.grad, theirs.grad = torch.ones_like(ours), torch.ones_like(theirs)

    @rule(number=st.integers(0, 2), how=st.sampled_from(VIEWS))
    def view(self, number: int, how: Callable[[Tensor], Tensor]) -> None:
        ours, theirs = self.pairs[number]
        # One that is set by hand has 16 bits beside sums in fp32: another batch is refused while a
        # view of it is kept (docs/states.md), and `clip` does not show in it.
        by_hand = self.accumulates and getattr(ours.grad, "dtype", None) == BF16
        if theirs.grad is not None and not by_hand:
            self.changed_in_place()  # a 16-bit gradient shows what it was before `clip`
            self.views.append((how(ours.grad), how(theirs.grad)))

    @precondition(lambda self: self.views)
    @rule(data=st.data(), factor=st.sampled_from([0.0, 0.5, -2.0]))
    def write_into_a_view(self, data: Any, factor: float) -> None:
        self.changed_in_place()
        for view in data.draw(st.sampled_from(self.views)):
            view.mul_(factor)

    @rule()
    def let_go_of_views(self) -> None:
        self.views.clear()

    # --- steps -----------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        self.optimizer.step()
        self.adamw.step()

    @rule()
    def schedules(self) -> None:
        self.scheduler.step()
        self.schedule.step()
        rates = [[g["lr"] for g in o.param_groups] for o in (self.optimizer, self.adamw)]
        assert rates[0] == rates[1]

    @rule(decay=st.sampled_from([0.0, 0.5]))
    def other_options(self, decay: float) -> None:
        for optimizer in (self.optimizer, self.adamw):
            optimizer.param_groups[0]["weight_decay"] = decay

    @rule()
    def evaluate(self) -> None:
        grads = [torch.ones(shape, device=DEVICE) for shape in SHAPES]
        with torch.no_grad():
            ours, theirs = self.model(grads), self.truth(grads)
        if self.dtype == FP32:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)

    # --- layers come and go ----------------------------------------------------------------

    @rule(number=st.integers(0, 2), trains=st.booleans())
    def freeze_or_thaw(self, number: int, trains: bool) -> None:
        for p in self.pairs[number]:
            p.requires_grad_(trains)

    @precondition(lambda self: len(self.optimizer.param_groups) == 2)
    @rule()
    def new_group(self) -> None:
        for p, optimizer in zip(self.pairs[3], (self.optimizer, self.adamw), strict=True):
            p.requires_grad_(True)
            p.grad = None
            optimizer.add_param_group({"params": [p], "lr": 3e-3})
        for scheduler in (self.scheduler, self.schedule):
            scheduler.base_lrs.append(3e-3)
            scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])

    # --- weights of others -----------------------------------------------------------------

    @rule(reads_data=st.booleans())
    def average_weights(self, reads_data: bool) -> None:
        for i, pair in enumerate(self.pairs):
            for average, p in zip(self.average, pair, strict=True):
                weight = p.data if reads_data else p.detach()
                average[i].lerp_(weight.to(average[i]), 0.25)
        self.compare_weights(self.average[0], self.average[1])

    @rule()
    def swap_in_the_average_and_back(self) -> None:
        stored = [[p.detach().clone() for p in pair] for pair in self.pairs]
        for i, pair in enumerate(self.pairs):
            for average, p in zip(self.average, pair, strict=True):
                p.data.copy_(average[i])
        self.evaluate()
        for before, pair in zip(stored, self.pairs, strict=True):
            for x, p in zip(before, pair, strict=True):
                p.data.copy_(x)

    @rule(how=st.sampled_from(["data", "no_grad", "put", "state_dict"]))
    def overwrite(self, how: str) -> None:
        """Best weights, say, are loaded back: they are the masters from then on."""
        weights = [average.clone() for average in self.average[0]]
        for (p, q), weight in zip(self.pairs, weights, strict=True):
            with torch.no_grad():
                if how == "data":
                    p.data.copy_(weight)
                elif how == "no_grad":
                    p.copy_(weight)
                elif how == "put":
                    p.data = weight.to(p.device)
                else:
                    name = next(n for n, x in self.model.named_parameters() if x is p)
                    self.model.load_state_dict({name: weight}, strict=False)
                q.copy_(weight.float())
        # What changed is its own master; what did not has kept its own.
        for p, q in self.pairs:
            if self.dtype == BF16 and p in self.optimizer._places:
                self.optimizer.flush()
                with torch.no_grad():
                    q.copy_(self.optimizer.master(p))
                assert torch.equal(q.to(BF16).to(p.device), p.detach())

    # --- files -----------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        of_model = {name: x.clone() for name, x in self.model.state_dict().items()}
        ours = of_model, self.optimizer.state_dict(), self.scheduler.state_dict()
        masters = copy.deepcopy(self.truth.state_dict())
        theirs = masters, copy.deepcopy(self.adamw.state_dict()), self.schedule.state_dict()
        self.saved.append((*ours, *copy.deepcopy(theirs)))

    @precondition(lambda self: self.saved)
    @rule(weights_first=st.booleans(), anew=st.booleans(), data=st.data())
    def load(self, weights_first: bool, anew: bool, data: Any) -> None:
        weights, states, scheduler, w, s, c = data.draw(st.sampled_from(self.saved))
        assume(len(states["param_groups"]) == len(self.optimizer.param_groups))
        if anew and len(self.optimizer.param_groups) == 2:
            self.placed = placed(self.where, self.dtype, self.accumulates)
            self.model, self.truth = self.placed.module, Model(FP32)
            self.optimizer = ExactAdamW(groups(self.model), **OPTIONS, stream=self.placed.stream)
            self.adamw = torch.optim.AdamW(groups(self.truth), **OPTIONS, foreach=False)
            self.scheduler, self.schedule = schedule(self.optimizer), schedule(self.adamw)
            self.clipped = False
        if weights_first:
            self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(states))
        if not weights_first:
            self.model.load_state_dict(weights)
        self.truth.load_state_dict(w)
        self.adamw.load_state_dict(copy.deepcopy(s))
        self.scheduler.load_state_dict(scheduler)
        self.schedule.load_state_dict(c)
        self.check()

    # --- what must hold --------------------------------------------------------------------

    @property
    def rtol(self) -> float:
        """Others' clipping rounds bf16 gradients to 8 bits."""
        return 1e-5 if self.dtype == FP32 else 0.02

    def compare_weights(self, ours: list[Tensor], theirs: list[Tensor]) -> None:
        for x, y in zip(ours, theirs, strict=True):
            x, y = x.float().cpu(), y.float().cpu()
            assert x.isfinite().all() and (x - y).norm() <= self.rtol * y.norm()

    @rule()
    def check(self) -> None:
        for view, truth in self.views:
            ours, theirs = view.float().cpu(), truth.cpu()
            assert (ours - theirs).norm() <= self.rtol * theirs.norm()
        for p, q in self.pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and p.requires_grad and not self.clipped:
                ours, theirs = p.grad.clone().float().cpu(), q.grad.cpu()
                assert (ours - theirs).norm() <= self.rtol * theirs.norm()
        state, theirs = self.optimizer.state, self.adamw.state
        for p, q in self.pairs:
            assert (p in state) == bool(theirs.get(q))
            if p in state:
                assert float(state[p]["step"]) == float(theirs[q]["step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    self.compare_weights([state[p][name]], [theirs[q][name]])
        masters = [self.optimizer.master(p) for p, _ in self.pairs]
        self.compare_weights(masters, [q.detach() for _, q in self.pairs])

    def teardown(self) -> None:
        self.check()


@pytest.mark.parametrize(
    ("where", "dtype", "accumulates"),
    [
        (where, dtype, (i + j) % 2 > 0)
        for i, where in enumerate(WHERE)
        for j, dtype in enumerate((FP32, BF16))
    ],
)
def test_whatever_a_loop_does(where, dtype, accumulates) -> None:
    kind = type("Contract", (Contract,), dict(where=where, dtype=dtype, accumulates=accumulates))
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


AFTER_A_CLIP: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "a batch": [("backward", {"magnitude": 0})],
    "batches": [("backward", {"magnitude": 0}), ("backward", {"magnitude": -1})],
    "zeros": [("zero_grad", {"by_model": True, "to_none": False})],
    "zeros and a batch": [
        ("zero_grad", {"by_model": False, "to_none": False}),
        ("backward", {"magnitude": 0}),
    ],
    "none and a batch": [
        ("zero_grad", {"by_model": False, "to_none": True}),
        ("backward", {"magnitude": 0}),
    ],
    "a step": [("step", {})],
    "a step and a batch": [("step", {}), ("backward", {"magnitude": 0})],
    "a gradient by hand": [("grad_by_hand", {"number": 0})],
    "a frozen layer": [
        ("freeze_or_thaw", {"number": 0, "trains": False}),
        ("backward", {"magnitude": 0}),
    ],
}


@pytest.mark.parametrize("then", AFTER_A_CLIP)
@pytest.mark.parametrize("where", WHERE)
def test_what_follows_a_clip(where, then) -> None:
    """Twice, with another clip and a step behind it: in 16 bits `clip` remembers a factor."""
    machine = type("Contract", (Contract,), dict(where=where, dtype=BF16))()
    machine.backward(magnitude=0)
    for _ in range(2):
        machine.clip(max_norm=0.1)
        for name, given in AFTER_A_CLIP[then]:
            getattr(machine, name)(**given)
        machine.clip(max_norm=3.0)
        machine.step()
    machine.check()
