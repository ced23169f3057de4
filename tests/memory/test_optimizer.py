"""ExactAdamW against torch's AdamW on the same gradients, and as a torch optimizer."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from small_states import (
    HOST,
    Placed,
    batch,
    everything_on_gpu,
    llama,
    nothing_on_gpu,
    place,
)
from torch import Tensor, nn

from exactness import DEVICE, assert_exact, relative_error
from longctx.kernels.adamw import split_master
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Place
from longctx.memory.states import BlockSpec

pytestmark = pytest.mark.usefixtures("reference_kernels")
PLACES = [everything_on_gpu, nothing_on_gpu]
Gradients = dict[str, Tensor | None]


class Small(nn.Module):
    """Three matrices in a row and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=DEVICE)
        self.layers = nn.ModuleList([linear(40, 33), linear(33, 50), linear(50, 40)])
        self.norm = nn.Parameter(torch.ones(40, dtype=dtype, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.norm

    def specs(self) -> list[BlockSpec]:
        layers = [
            BlockSpec(
                name=f"layer {i}",
                parameters={f"layers.{i}.weight": layer.weight},
                modules=[layer],
                layer=i,
                movable=True,
            )
            for i, layer in enumerate(self.layers)
        ]
        return [*layers, BlockSpec(name="rest", parameters={"norm": self.norm})]


def small(where=everything_on_gpu, dtype=torch.float32, module=None) -> Placed:
    module = Small(dtype) if module is None else copy.deepcopy(module)
    return place(module, where, specs=module.specs(), piece=1024)


def draw_gradients(module: nn.Module, step: int) -> Gradients:
    """Of magnitudes that differ from step to step and from weight to weight."""
    generator = torch.Generator().manual_seed(step)
    found: Gradients = {}
    for i, (name, p) in enumerate(module.named_parameters()):
        grad = torch.randn(p.shape, generator=generator) * 10.0 ** ((step + i) % 4 - 3)
        found[name] = grad.to(p.device)
    return found


def deliver(module: nn.Module, grads: Gradients) -> None:
    """A backward that gives every parameter its gradient, and none to those with None."""
    given = [(p, grads[name]) for name, p in module.named_parameters() if p.requires_grad]
    sum((p * grad.to(p.dtype)).sum() for p, grad in given if grad is not None).backward()


def torch_adamw(module: nn.Module, weight_decay: float = 0.1, **options) -> torch.optim.AdamW:
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **{"lr": 1e-3, "foreach": False} | options)


def torch_run(module: nn.Module, gradients: Sequence[Gradients], max_norm: float = 0.0, **options):
    """The module and its moments after torch's AdamW has taken all gradients, one a step."""
    optimizer = torch_adamw(module, **options)
    scheduler = warm_up(optimizer)
    for grads in gradients:
        deliver(module, grads)
        if max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=False)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return everything(module, optimizer.state)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))


def our_run(placed: Placed, gradients: Sequence[Gradients], max_norm: float = 0.0, **options):
    optimizer = placed.optimizer(**options)
    scheduler = warm_up(optimizer)
    for grads in gradients:
        deliver(placed.module, grads)
        if max_norm:
            optimizer.clip(max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return ours(placed.module, optimizer)


def ours(module: nn.Module, optimizer: ExactAdamW) -> dict[str, Tensor]:
    optimizer.flush()
    found = {}
    for name, p in module.named_parameters():
        found[name] = optimizer.master(p).to(DEVICE)
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{kind}"] = optimizer.states_of(p)[kind].view(p.shape).to(DEVICE)
    return {name: x.clone() for name, x in found.items()}


def everything(module: nn.Module, state) -> dict[str, Tensor]:
    found = {}
    for name, p in module.named_parameters():
        found[name] = p.detach()
        found |= {f"{name}.{kind}": state[p][kind] for kind in ("exp_avg", "exp_avg_sq")}
    return found


def assert_as_torch(found, gradients: Sequence[Gradients], **options) -> None:
    """Against torch in fp64, at most 1.1 times as far from it as torch in fp32."""
    truth = torch_run(Small().double(), gradients, **options)
    naive = torch_run(Small(), gradients, **options)
    for name, x in found.items():
        assert_exact(name, x, naive[name], truth[name])


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- the numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("max_norm", [0.0, 0.7], ids=["unclipped", "clipped"])
def test_thirty_steps_are_those_of_torchs_fp32_adamw(where, max_norm) -> None:
    """With a schedule of the learning rate, and weight decay for the matrices only."""
    placed = small(where)
    gradients = [draw_gradients(placed.module, step) for step in range(30)]
    options = dict(max_norm=max_norm, lr=3e-3, betas=(0.85, 0.98), eps=1e-6)
    assert_as_torch(our_run(placed, gradients, **options), gradients, **options)


@pytest.mark.parametrize("where", PLACES)
def test_a_parameter_without_a_gradient_is_neither_decayed_nor_counted(where) -> None:
    placed = small(where)
    gradients = [draw_gradients(placed.module, step) for step in range(8)]
    for step in (2, 3, 5):
        gradients[step]["layers.1.weight"] = None
    options = dict(weight_decay=0.5, lr=1e-2)
    assert_as_torch(our_run(placed, gradients, **options), gradients, **options)


def test_clipping_is_torchs() -> None:
    placed, plain = small(), Small()
    optimizer = placed.optimizer()
    for step in range(4):
        grads = draw_gradients(plain, step)
        deliver(plain, grads)
        deliver(placed.module, grads)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert relative_error(optimizer.clip(0.5), norm) < 1e-6
        plain.zero_grad()
        optimizer.zero_grad()


@pytest.mark.parametrize("max_norm", [None, 0.0, math.inf])
def test_without_a_limit_the_norm_is_told_and_nothing_scaled(max_norm) -> None:
    found = []
    for clips in (False, True):
        placed = small()
        optimizer = placed.optimizer()
        grads = draw_gradients(placed.module, 3)
        deliver(placed.module, grads)
        if clips:
            expected = math.sqrt(
                sum(grad.double().square().sum().item() for grad in grads.values())
            )
            assert optimizer.clip(max_norm).item() == pytest.approx(expected, rel=1e-6)
        optimizer.step()
        found.append(ours(placed.module, optimizer))
    assert same(*found)


@pytest.mark.parametrize("change", ["lr", "weight_decay", "betas", "eps"])
def test_a_late_update_takes_the_options_of_its_step(change) -> None:
    """The schedule has gone on, long before the update of the last block runs."""
    found = []
    for changes in (False, True):
        placed = small(nothing_on_gpu)
        optimizer = placed.optimizer()
        for step in range(2):
            deliver(placed.module, draw_gradients(placed.module, step))
            optimizer.clip(0.1)
            optimizer.step()
            before = [group[change] for group in optimizer.param_groups]
            for group in optimizer.param_groups if changes else ():
                group[change] = (0.1, 0.2) if change == "betas" else 1e3
            optimizer.flush()
            for group, value in zip(optimizer.param_groups, before, strict=True):
                group[change] = value
        found.append(ours(placed.module, optimizer))
    assert same(*found)


def test_updates_that_are_late_were_not_made_at_once() -> None:
    """Or the tests of late updates test nothing: three blocks are on their way, more wait."""
    placed = place(llama(), nothing_on_gpu)
    optimizer = placed.optimizer()
    placed.module(**batch(0)).loss.backward()
    optimizer.step()
    waiting = [name for name, block in placed.blocks.items() if block.update is not None]
    assert waiting == ["layer 2", "lm_head"]
    with torch.no_grad():
        placed.module(**batch(0))
    assert all(block.update is None for block in placed.stream.blocks)


@pytest.mark.parametrize("where", PLACES)
def test_16_bit_weights_move_as_torchs_fp32_weights(where) -> None:
    """With a learning rate of 1e-5, torch's AdamW on bf16 weights moves most of them nowhere: its
    updates are smaller than half a step of bf16."""
    torch.manual_seed(0)
    start = Small(torch.bfloat16)
    with torch.no_grad():
        for p in start.parameters():
            p.copy_(0.02 * torch.randn(p.shape))
    gradients = [draw_gradients(start, 0)] * 20
    gradients = [{n: g.bfloat16() for n, g in grads.items()} for grads in gradients]
    options = dict(lr=1e-5, weight_decay=0.0)
    exact = our_run(small(where, module=start), gradients, **options)
    fp32 = torch_run(copy.deepcopy(start).float(), gradients, **options)
    plain = torch_run(copy.deepcopy(start), gradients, **options)
    for name, p in start.named_parameters():
        moved = fp32[name] - p
        assert relative_error(exact[name] - p, moved) < 1e-3
        assert (plain[name] == p).float().mean() > 0.6
        assert (plain[name] - p).float().norm() < 0.7 * moved.norm()


def test_the_weight_is_its_master_rounded() -> None:
    placed = small(nothing_on_gpu, torch.bfloat16)
    found = our_run(placed, [draw_gradients(placed.module, step) for step in range(5)])
    for name, p in placed.module.named_parameters():
        assert torch.equal(p.detach().to(DEVICE), split_master(found[name])[0])


def test_tied_embeddings_are_one_parameter() -> None:
    """Trained as torch's AdamW trains them: both uses' gradients are in one step."""
    losses = []
    models = [llama(torch.float32, DEVICE, tied=True) for _ in range(2)]
    for model, where in zip(models, (None, nothing_on_gpu), strict=True):
        optimizer = place(model, where).optimizer() if where else torch_adamw(model)
        for step in range(4):
            loss = model(**batch(step, DEVICE)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    optimizer.flush()
    torch.testing.assert_close(losses[:4], losses[4:], rtol=1e-5, atol=0)
    weights = [model.lm_head.weight.detach().to(DEVICE) for model in models]
    assert models[1].lm_head.weight is models[1].model.embed_tokens.weight
    assert relative_error(weights[1], weights[0]) < 1e-5


@pytest.mark.parametrize("where", PLACES)
def test_frozen_parameters_are_as_they_were(where) -> None:
    model = llama(device=DEVICE)
    frozen = [model.lm_head.weight, model.model.norm.weight]
    frozen += [*model.model.layers[1].parameters(), model.model.layers[2].mlp.up_proj.weight]
    for p in frozen:
        p.requires_grad_(False)
    before = [p.detach().clone() for p in frozen]
    placed = place(model, where)
    optimizer = placed.optimizer()
    for step in range(2):
        model(**batch(step, DEVICE)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    for p, weight in zip(frozen, before, strict=True):
        assert torch.equal(p.detach().to(DEVICE), weight)
        assert torch.equal(optimizer.master(p).to(DEVICE), weight.float())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = sum(block.exp_avg.numel() for block in placed.stream.blocks)
    assert trained <= states < trained + 64 * 40  # none for the frozen ones


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
def test_gradients_are_those_of_their_parameters(where) -> None:
    """Wherever they are, until somebody forgets them."""
    placed = small(where)
    optimizer = placed.optimizer()
    grads = draw_gradients(placed.module, 0)
    deliver(placed.module, grads)
    for _ in range(2):  # before the step, and after it
        assert len(optimizer.gradients) == 4
        for name, p in placed.module.named_parameters():
            assert torch.equal(p.grad.clone(), grads[name])
        optimizer.step()
    placed.module.zero_grad()
    assert len(optimizer.gradients) == 0


@pytest.mark.parametrize("where", PLACES)
def test_zero_grad_forgets_them_and_their_limit(where) -> None:
    placed = small(where)
    optimizer = placed.optimizer()
    deliver(placed.module, draw_gradients(placed.module, 0))
    before = ours(placed.module, optimizer)
    optimizer.clip(1e-9)
    optimizer.zero_grad()
    assert optimizer.clip().item() == 0

    other = small(where)
    for module, taker in ((placed.module, optimizer), (other.module, other.optimizer())):
        deliver(module, draw_gradients(module, 1))
        taker.step()
    assert same(ours(placed.module, optimizer), ours(other.module, taker))
    assert not same(before, ours(other.module, taker))


def test_a_step_without_gradients_changes_nothing() -> None:
    """Nor does it count, and decay."""
    placed, optimizer = trained(nothing_on_gpu)
    before = ours(placed.module, optimizer)
    optimizer.step()
    assert same(before, ours(placed.module, optimizer))
    assert set(optimizer.steps.values()) == {3}


def test_a_limit_is_that_of_one_step() -> None:
    found = []
    for clips in (False, True):
        placed = small()
        optimizer = placed.optimizer()
        deliver(placed.module, draw_gradients(placed.module, 0))
        optimizer.clip(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        deliver(placed.module, draw_gradients(placed.module, 1))
        if clips:
            optimizer.clip(math.inf)
        optimizer.step()
        found.append(ours(placed.module, optimizer))
    assert same(*found)


def test_a_gradient_waits_for_the_update_that_reads_its_room() -> None:
    """Where a loop passes the modules by, nobody else has waited."""
    placed = small(nothing_on_gpu)
    optimizer, block = placed.optimizer(), placed.blocks["layer 0"]
    for step in range(2):
        deliver(placed.module, draw_gradients(placed.module, step))
        assert block.grad_is_on_host and not block.reads_host_grad
        optimizer.step()
        optimizer.zero_grad()
        assert block.grad_is_on_host  # for the update
    optimizer.flush()
    assert not block.grad_is_on_host


def test_a_closure_is_run_with_gradients() -> None:
    placed, other = small(nothing_on_gpu), small()
    grads = draw_gradients(placed.module, 0)

    def closure() -> float:
        deliver(placed.module, grads)
        return 1.25

    optimizer, plain = placed.optimizer(), other.optimizer()
    assert optimizer.step(closure) == 1.25
    deliver(other.module, grads)
    assert plain.step() is None
    assert same(ours(placed.module, optimizer), ours(other.module, plain))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ([], None),
        (["layers.0.weight"], "layers.0.weight"),
        (["layers.2.weight", "layers.0.weight"], "layers.2.weight"),
        (["norm", "layers.1.weight"], "norm"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_the_first_gradient_that_broke_is_named(where, broken, named, value) -> None:
    """In the order in which backward delivers them: from the last layer to the first."""
    placed = small(where)
    optimizer = placed.optimizer()
    for name in broken:
        placed.module.get_parameter(name).register_hook(lambda grad: grad.fill_(value))
    placed.module(torch.ones(2, 40, device=DEVICE)).sum().backward()
    assert optimizer.broken_gradient() == named
    assert optimizer.clip().isfinite() == (not broken)
    optimizer.zero_grad()
    assert optimizer.broken_gradient() is None


@pytest.mark.parametrize("where", PLACES)
def test_the_layer_where_backward_broke_is_named(where) -> None:
    """NaN reaches every gradient after it, layer 0's norms too."""
    model = llama(device=DEVICE)
    optimizer = place(model, where).optimizer()
    model.model.layers[1].register_full_backward_pre_hook(lambda _, grad: (grad[0] * math.nan,))
    model(**batch(0, DEVICE)).loss.backward()
    assert optimizer.broken_gradient().startswith("model.layers.1.")


# --- as a torch optimizer --------------------------------------------------------------------


def test_a_script_that_ends_with_an_optimizer_ends_quietly(monkeypatch) -> None:
    """Python sets a module's names to None while it ends, before the optimizer goes."""
    optimizer = trained()[1]
    monkeypatch.setattr("longctx.memory.optimizer.sys", None)
    optimizer.__del__()


def test_a_frozen_parameter_is_refused() -> None:
    module = Small()
    module.layers[1].weight.requires_grad_(False)
    placed = small(module=module)
    for parameter in (placed.module.layers[1].weight, torch.zeros(50, 33, device=DEVICE)):
        with pytest.raises((ValueError, TypeError), match=r"is frozen: thaw it first|Parameters"):
            ExactAdamW([parameter], stream=placed.stream)


def trained(where=everything_on_gpu, dtype=torch.float32, steps: int = 3):
    placed = small(where, dtype)
    optimizer = placed.optimizer()
    for step in range(steps):
        deliver(placed.module, draw_gradients(placed.module, step))
        optimizer.step()
        optimizer.zero_grad()
    return placed, optimizer


@pytest.mark.parametrize("where", PLACES)
def test_its_states_are_in_torchs_form(where) -> None:
    """torch's AdamW takes them and goes on as if it had been there from the start."""
    placed, optimizer = trained(where)
    states = optimizer.state_dict()
    plain = Small()
    adamw = torch_adamw(plain)
    for step in range(3):
        deliver(plain, draw_gradients(plain, step))
        adamw.step()
        adamw.zero_grad()
    expected = adamw.state_dict()
    assert states.keys() == expected.keys() and states["state"].keys() == expected["state"].keys()
    assert [g["params"] for g in states["param_groups"]] == [[0, 1, 2], [3]]
    for n, state in states["state"].items():
        assert state.keys() == expected["state"][n].keys()
        for kind, x in state.items():
            theirs = expected["state"][n][kind]
            assert x.shape == theirs.shape and x.dtype == theirs.dtype and x.device.type == "cpu"
            assert relative_error(x, theirs.cpu()) < 1e-5
    adamw.load_state_dict(states)


def test_its_states_are_copies() -> None:
    placed, optimizer = trained(nothing_on_gpu)
    states = optimizer.state_dict()["state"]
    before = copy.deepcopy(states)
    deliver(placed.module, draw_gradients(placed.module, 7))
    optimizer.step()
    optimizer.flush()
    for n, state in states.items():
        assert all(torch.equal(x, before[n][kind]) for kind, x in state.items())


def test_no_states_before_the_first_step() -> None:
    placed, optimizer = trained(steps=0)
    assert optimizer.state_dict()["state"] == {}
    _, other = trained()
    other.load_state_dict(optimizer.state_dict())
    assert other.steps == {} and other.state_dict()["state"] == {}
    assert all(not x.any() for x in other.states_of(next(iter(other._places))).values())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", PLACES)
def test_torchs_states_are_taken(where, moments) -> None:
    """A run of torch's AdamW goes on as exact AdamW; its weights are the masters."""
    plain = Small(moments)
    adamw = torch_adamw(plain)
    deliver(plain, draw_gradients(plain, 0))
    adamw.step()
    adamw.zero_grad()
    placed, optimizer = trained(where, moments)  # whose own states are forgotten
    optimizer.flush()
    with torch.no_grad():
        for p, theirs in zip(placed.module.parameters(), plain.parameters(), strict=True):
            p.copy_(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    assert set(optimizer.steps.values()) == {1}
    for p, theirs in zip(placed.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.master(p).to(DEVICE), theirs.detach().float())
        for kind in ("exp_avg", "exp_avg_sq"):
            state = optimizer.states_of(p)[kind].view(p.shape)
            assert torch.equal(state.to(DEVICE), adamw.state[theirs][kind].float())
    if moments == torch.float32:
        for module, taker in ((placed.module, optimizer), (plain, adamw)):
            deliver(module, draw_gradients(module, 1))
            taker.step()
        found, expected = ours(placed.module, optimizer), everything(plain, adamw.state)
        assert all(relative_error(x, expected[name]) < 1e-6 for name, x in found.items())


def test_options_come_with_the_states() -> None:
    """A scheduler that is resumed trusts the optimizer to have its rate."""
    placed, first = trained()
    first.param_groups[0]["lr"], first.param_groups[1]["betas"] = 0.125, (0.5, 0.75)
    optimizer = small().optimizer()
    optimizer.load_state_dict(first.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 1e-3]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.75)


def momentum(states: dict) -> None:
    for n in states["state"]:
        states["state"][n] = {"momentum_buffer": torch.zeros(3)}


def shapes(states: dict) -> None:
    states["state"][1]["exp_avg_sq"] = torch.zeros(7, 11)


def groups(states: dict) -> None:
    states["param_groups"][0]["params"].pop()


def no_step(states: dict) -> None:
    del states["state"][2]["step"]


def no_second_moment(states: dict) -> None:
    del states["state"][3]["exp_avg_sq"]


def other_weights(states: dict) -> None:
    states["state"][0]["remainder"] = torch.zeros(3, dtype=torch.int16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (momentum, "no exp_avg: they are not AdamW's"),
        (no_second_moment, "no exp_avg_sq: they are not AdamW's"),
        (no_step, "no step: they are not AdamW's"),
        (other_weights, "of weights in bfloat16, and these have 32 bits"),
        (shapes, r"exp_avg_sq has \(7, 11\), its parameter \(50, 33\)"),
        (groups, r"groups of \[3, 1\] parameters, the states are of \[2, 1\]"),
    ],
)
def test_wrong_states_are_refused(change, says) -> None:
    _, optimizer = trained()
    states = optimizer.state_dict()
    change(states)
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(states)


def test_no_states_are_those_before_the_first_step() -> None:
    placed, optimizer = trained()
    p = placed.module.norm
    optimizer.load_states(p, {})
    assert p not in optimizer.steps
    assert all(not x.any() for x in optimizer.states_of(p).values())


def test_a_loop_that_passes_the_modules_by_is_exact() -> None:
    """Its gradients come while updates are outstanding: those end first."""
    found = []
    for where in (everything_on_gpu, lambda spec: HOST if spec.modules else Place()):
        placed = small(where, torch.bfloat16)
        optimizer = placed.optimizer()
        for step in range(4):
            weights = [layer.weight for layer in placed.module.layers]
            sum((w.to(DEVICE) ** 2).sum() * (step + 1) for w in weights).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
        found.append(ours(placed.module, optimizer))
    assert same(*found)


@pytest.mark.parametrize("where", PLACES)
def test_nothing_of_a_run_that_is_over_stays(where) -> None:
    """Neither the states nor the buffers they move through."""
    placed, optimizer = trained(where)
    left = [weakref.ref(x) for x in (optimizer, placed.stream, placed.module)]
    del placed, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None, None, None]
