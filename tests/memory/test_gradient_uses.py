"""What people do to `parameter.grad` between backward and step, wherever it is: the weights are
those of torch's AdamW in fp32, or one line refuses. Each use is a line of a table."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_states import HOST, place
from torch import Tensor, nn
from torch.utils import dlpack

from exactness import DEVICE
from longctx.errors import UserError
from longctx.memory import gradients as taking
from longctx.memory.optimizer import ExactAdamW
from longctx.memory.place import Place
from longctx.memory.states import BlockSpec

pytestmark = pytest.mark.usefixtures("reference_kernels")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(40, 33), (40, 33), (33,)]
OPTIONS = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
PLACES = {
    "gpu": Place(),
    "host": HOST,
    "states on the host": Place(states=False),
    "gradients on the host": Place(grad=False),
}


class Told(nn.Module):
    """A weight that gets the gradient that it is told."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape).to(BF16).to(DEVICE, dtype))

    def forward(self, total: Tensor, grad: Tensor) -> Tensor:
        return total + (self.weight * grad.to(self.weight)).sum()


class Loop:
    """A model, its optimizer, and the steps of a training loop. `seen` is compared."""

    def __init__(
        self,
        where: str | None,
        dtype: torch.dtype = FP32,
        batches: int = 1,
        shapes: list[tuple[int, ...]] = SHAPES,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(Told(shape, dtype) for shape in shapes)
        self.seen: list[Any] = []
        self.drawn = torch.Generator().manual_seed(1)
        groups = [{"params": [*self.model.parameters()]}]
        if where is None:
            self.optimizer: Any = torch.optim.AdamW(groups, **OPTIONS, foreach=False)
            return
        specs = [
            BlockSpec(name=n, parameters={n: x.weight}, modules=[x], layer=int(n), movable=True)
            for n, x in self.model.named_children()
        ]
        accumulates = batches > 1
        placed = place(
            self.model, lambda _: PLACES[where], specs=specs, accumulates=accumulates, piece=1024
        )
        self.optimizer = ExactAdamW(groups, **OPTIONS, stream=placed.stream)

    @property
    def w(self) -> nn.Parameter:
        return self.model[0].weight

    @property
    def other(self) -> nn.Parameter:
        return self.model[1].weight

    @property
    def g(self) -> Tensor:
        assert self.w.grad is not None
        return self.w.grad

    @property
    def mask(self) -> Tensor:
        """A tensor of somebody who says the GPU by its name."""
        return (torch.arange(40, device=DEVICE) % 2).to(self.w.dtype)[:, None]

    def backward(self) -> None:
        total = torch.zeros((), device=DEVICE, dtype=self.w.dtype)
        for layer in self.model:
            shape = layer.weight.shape
            grad = (torch.randint(-64, 65, shape, generator=self.drawn) / 32).to(DEVICE)
            total = layer(total, grad)  # in 7 bits: sums of several have 8
        total.backward()

    def step(self) -> None:
        self.optimizer.step()

    def zero(self, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def see(self, x: Any) -> None:
        self.seen.append(torch.as_tensor(x).detach().clone().float().cpu())

    def weights(self) -> list[Tensor]:
        if isinstance(self.optimizer, ExactAdamW):
            self.optimizer.flush()
            return [self.optimizer.master(p).cpu() for p in self.model.parameters()]
        return [p.detach().cpu() for p in self.model.parameters()]


Use = Callable[[Loop], Any]
NAMES = dict(copy=copy, dlpack=dlpack, io=io, nn=nn, np=np, pickle=pickle, torch=torch)
"""What lines of code may name."""


def each(use: Use) -> Use:
    """Two steps, with a use before each."""

    def loop(x: Loop) -> None:
        for _ in range(2):
            x.backward()
            use(x)
            x.step()
            x.zero()

    return loop


def lines(code: str) -> Use:
    """Two steps, with lines of code before each, of which `g` is a weight's gradient."""
    compiled = compile(code, "<use>", "exec")
    return each(lambda x: exec(compiled, {**NAMES, "x": x, "g": x.g, "w": x.w}))


GRADIENT_USES = """
g[:30] = 0
g[0].zero_()
g[3, 4] = 1.5
g[..., -1] = 0.25
g[1:-1:2].neg_()
g[[1, 5, 7]] = 0
g[g > 0] = 0
g[:, None][0].zero_()
g[:20][:10][2].zero_()
a, b = g[:20], g[10:30]; a.zero_(); b.add_(1)
g.view(-1)[5:50].fill_(0.25)
g.flatten()[::3].mul_(2)
g.reshape(-1)[7] = 0
g.reshape(20, 2, 33)[:, 1].zero_()
g.ravel()[:9].zero_()
g.t()[1].zero_()
g.T[1] = 0
g.mT[0].neg_()
g.permute(1, 0)[2].zero_()
g.movedim(0, 1)[2].zero_()
g.swapaxes(0, 1)[2].zero_()
g.transpose(0, 1).contiguous().zero_()
g.contiguous()[3].zero_()
g.chunk(2)[1].zero_()
g.split(16)[0].add_(1)
g.split([10, 30], 0)[1].zero_()
g.tensor_split(3)[1].zero_()
g.vsplit(2)[0].zero_()
g.unbind()[2].zero_()
[row.clamp_(-0.5, 0.5) for row in g]
g.narrow(0, 2, 5).zero_()
g.select(1, 3).zero_()
g.squeeze().zero_()
g.unsqueeze(0)[0, 1].zero_()
g.unflatten(0, (4, 10))[2].zero_()
g.diagonal().zero_()
g.as_strided((5, 3), (33, 1)).zero_()
g.unfold(0, 4, 4)[1].zero_()
g.expand(1, 40, 33)[0][1].zero_()
g.view_as(g)[4].zero_()
g.real.mul_(2)
torch.ops.aten.alias(g)[0].zero_()
g.data[:30] = 0
g.data.zero_()
g.data.mul_(0.5)
g.detach()[2].zero_()
g.detach().detach().data[2].zero_()
g.data = torch.full_like(g, 0.5)
y = torch.full_like(g, 0.5); g.data = y; y[3] = 0
g.data = x.other.grad.data
torch.from_dlpack(g)[1].zero_()
dlpack.from_dlpack(g.__dlpack__())[1].zero_()
g.untyped_storage().fill_(0)
torch.asarray(g)[3] = 0
torch.as_tensor(g)[3] = 0
torch.tensor(g).zero_()
g.clone().zero_()
copy.copy(g)[0] = 0
copy.deepcopy(g).zero_()
pickle.loads(pickle.dumps(g)).zero_()
torch.save(g, f := io.BytesIO()); f.seek(0); x.see(torch.load(f))
g.tolist()[0][0] = 3
x.see(g[2, 3].item())
x.see(g.sum()); x.see(g.data.norm(2)); x.see((g ** 2).mean().sqrt())
torch.mul(g, 2, out=g)
torch.add(g, x.other.grad, out=g)
torch.clamp(x.other.grad, -0.5, 0.5, out=g)
torch.add(g[:3], 1, out=g[:3])
torch.mul(g, 0.5, out=x.other.grad)
torch.aminmax(x.other.grad, dim=0, out=(g[0], g[1]))
torch.where(g > 0, g, torch.zeros_like(g), out=x.other.grad)
g.index_fill_(0, torch.tensor([1, 3], device=g.device), 0)
g.masked_fill_(g > 1, 0)
g.index_add_(0, torch.tensor([1, 3], device=g.device), torch.ones_like(g[:2]))
g.scatter_(0, torch.zeros(1, 33, dtype=torch.int64, device=g.device), 0.5)
g.put_(torch.tensor([1, 3], device=g.device), torch.zeros(2, dtype=g.dtype, device=g.device))
g.copy_(x.other.grad)
g.copy_(g.flip(0))
g.swapdims(0, 1).copy_(g.swapdims(0, 1).flip(0))
g.lerp_(x.other.grad, 0.5)
g.addcmul_(x.other.grad, x.other.grad, value=0.25)
g.sub_(g.mean(0, keepdim=True))
g.add_(g)
g.add_(x.other.grad)
g.add_(w.detach(), alpha=0.125)
g.add_(w.detach()[0])
g.addcmul_(w.detach(), x.other.detach())
x.see(w.detach().sub(g, alpha=0.125))
g.mul_(x.mask)
g.mul_(x.mask); g[3] = 0
g[3] = 0; x.other.grad.mul_(x.mask)
g.copy_(x.mask.expand(40, 33))
torch._foreach_mul_([g, x.other.grad], [x.mask, x.mask])
x.see((g * x.mask).sum()); x.see((w.detach() * g).sum()); x.see(g.norm() / w.detach().norm())
torch._foreach_mul_([g, x.other.grad], 0.5)
torch._foreach_mul_([g, x.other.grad], [0.5, 2.0])
torch._foreach_zero_([g])
torch._foreach_copy_([g], [x.other.grad])
torch._foreach_clamp_max_([g, x.other.grad], 0.5)
torch._foreach_add_([g], [x.other.grad], alpha=2)
torch._foreach_neg_([g[0], g[3]])
torch._foreach_zero_(list(g.chunk(4)[:2]))
[y.zero_() for y in torch._foreach_abs([g])]
nn.utils.clip_grad_norm_([w], 0.5, foreach=True)
nn.utils.clip_grad_norm_([w], 0.5); g[:3] = 0
g[:3] = 0; nn.utils.clip_grad_norm_([w], 0.5)
nn.utils.clip_grad_value_(x.model.parameters(), 0.5)
w.grad = g[:]
w.grad = g.view(-1).view(40, 33); g[2] = 0
w.grad = g.t().contiguous().t()
w.grad = g.clone().zero_()
for p in x.model.parameters(): p.grad = p.grad.clone()
for p in reversed([*x.model.parameters()]): p.grad = p.grad * 0.5
for p in x.model.parameters(): p.grad = torch.full_like(p, 0.25)
for p in x.model.parameters(): p.grad = torch.ones(p.shape, dtype=p.dtype, device=p.device)
for p in x.model.parameters(): p.grad = p.detach() / 8
for p in x.model.parameters(): p.grad.data = p.grad.data * 0.5
x.other.grad = g.to(x.other.device) * 0.5
w.grad, x.other.grad = x.other.grad, w.grad
x.other.grad = w.grad
w.grad = None
w.grad += 1
w.grad *= 0.5
w.grad[:5] /= 2
w.grad -= x.other.grad
y = g.detach().clone().requires_grad_(); (y ** 2).sum().backward(); g.add_(y.grad)
y = g.detach().requires_grad_(); (y[:3] ** 2).sum().backward(); g.add_(y.grad)
g.add_(torch.func.grad(lambda z: (z ** 2).sum())(g))
x.see(torch.vmap(lambda row: row.sum())(g))
torch.vmap(lambda row: row.mul_(0.5))(g)
g.copy_(torch._utils._unflatten_dense_tensors(torch._utils._flatten_dense_tensors([g]), [g])[0] / 2)
y = nn.utils.parameters_to_vector([g, x.other.grad]); y.zero_()
nn.utils.vector_to_parameters(torch.ones(1320, dtype=g.dtype, device=g.device), [g])
g.requires_grad_(False)[1].zero_()
x.see(len(g)); x.see(bool((g[0] == g[0]).all())); x.see(g.is_contiguous())
""".strip().splitlines()
NUMPY_USES = """
g.numpy()[:30] = 0
g.detach().numpy()[2] = 0
np.asarray(g)[3] = 0
np.array(g)[3] = 0
torch.from_numpy(g.numpy())[4] = 0
np.multiply(g.numpy(), 0.5, out=g.numpy())
np.from_dlpack(g)[5:6].copy()
memoryview(g.numpy())[0, 0] = 3.0
g.storage()[3] = 7.0
""".strip().splitlines()
"""Those of fp32 on a CPU."""


# --- loops -----------------------------------------------------------------------------------


def a_view_sees_the_next_batch(x: Loop) -> None:
    x.backward()
    view = x.g[:5]
    x.backward()
    x.see(view)
    view.zero_()
    x.step()


def views_of_several_weights(x: Loop) -> None:
    for _ in range(2):
        x.backward()
        views = [p.grad[:5] for p in x.model.parameters()]
        for view in views:
            view.zero_()
        x.step()
        x.see(torch.cat([view.flatten() for view in views]))
        x.zero()


def a_view_over_a_step(x: Loop) -> None:
    x.backward()
    view = x.g[0]
    x.step()
    view.zero_()  # the update has read it
    x.see(view)
    x.see(x.g)
    del view
    x.zero()
    x.backward()
    x.step()


def a_view_over_a_step_and_a_batch(x: Loop) -> None:
    x.backward()
    view = x.g[0]
    x.step()
    x.backward()
    x.see(view)
    view.zero_()
    x.step()


def a_view_over_zeros(x: Loop) -> None:
    for _ in range(2):
        x.backward()
        view = x.g[3:6]
        x.step()
        x.zero(to_none=False)
        x.see(view)
        view.fill_(1)
        x.see(x.g)
        x.step()
        x.zero(to_none=False)
        del view


def a_view_over_none(x: Loop) -> None:
    x.backward()
    view = x.g[3:6]
    x.step()
    x.zero()
    view.fill_(1)
    x.backward()
    x.see(view)
    view.fill_(2)
    x.step()


def yesterdays_gradient(x: Loop) -> None:
    """As those do who compare the directions of two steps."""
    old = None
    for _ in range(3):
        x.backward()
        if old is not None:
            x.see((old * x.g).sum())
            x.see(old.norm())
        old = x.g
        nn.utils.clip_grad_norm_(x.model.parameters(), 1.0)
        x.step()
        x.zero()


def yesterdays_gradient_changes(x: Loop) -> None:
    x.backward()
    old = x.g
    x.zero()
    x.backward()
    old.zero_()
    x.see(old)
    x.see(x.g)
    x.step()


def many_old_gradients(x: Loop) -> None:
    kept = []
    for _ in range(4):
        x.backward()
        kept.append([p.grad for p in x.model.parameters()])
        x.step()
        x.zero()
    for grads in kept:
        for grad in grads:
            x.see(grad)


def one_tensor_over_batches(x: Loop) -> None:
    x.backward()
    grad = x.g
    x.backward()
    x.see(grad)
    grad.mul_(0.5)
    x.step()


def detached_over_batches(x: Loop) -> None:
    x.backward()
    grad = x.g.detach()
    x.step()
    x.zero(to_none=False)
    x.see(grad)
    x.backward()
    x.step()


def a_hook_on_the_weight(x: Loop) -> None:
    def cut(w: Tensor) -> None:
        w.grad[:30] = 0

    x.w.register_post_accumulate_grad_hook(cut)
    each(lambda x: None)(x)


def a_hook_that_decays(x: Loop) -> None:
    def decay(p: Tensor) -> None:
        p.grad.add_(p.detach(), alpha=0.125)

    for p in x.model.parameters():
        p.register_post_accumulate_grad_hook(decay)
    each(lambda x: x.g.mul_(x.mask))(x)


def views_over_passes(x: Loop) -> None:
    """A view that is made in backward, where the weight computes, and one that is made after it."""
    views: list[Tensor] = []
    hook = x.w.register_post_accumulate_grad_hook(lambda w: views.append(w.grad[:3]))
    x.backward()
    hook.remove()
    views.append(x.g[2:5])
    views[0].fill_(0.5)
    views[1].mul_(2)
    x.g.add_(x.mask)
    for view in views:
        x.see(view)
    x.see(x.g)
    x.step()


def a_hook_on_the_gradient(x: Loop) -> None:
    x.w.register_hook(lambda grad: grad.masked_fill(grad > 0, 0))
    each(lambda x: None)(x)


def one_gradient_for_two(x: Loop) -> None:
    for _ in range(2):
        x.backward()
        x.other.grad = x.w.grad
        x.other.grad[:3] = 0
        x.step()
        x.zero()


def a_view_before_others_clip(x: Loop) -> None:
    x.backward()
    view = x.g[:3]
    nn.utils.clip_grad_norm_(x.model.parameters(), 0.5)
    x.see(view)
    view.fill_(0.25)
    x.step()


def a_view_and_then_frozen(x: Loop) -> None:
    x.backward()
    x.g[:3] = 0
    x.w.requires_grad_(False)
    x.step()
    x.zero()
    x.w.requires_grad_(True)
    x.backward()
    x.step()


def a_scaler(x: Loop) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    for _ in range(2):
        x.backward()
        scaler.scale(torch.zeros((), device=DEVICE))
        scaler.unscale_(x.optimizer)
        x.g[:3] = 0
        scaler.step(x.optimizer)
        scaler.update()
        x.zero()


def others_optimizer_reads_it(x: Loop) -> None:
    """One that keeps a copy of the weight."""
    copied = nn.Parameter(x.w.detach().clone().float())
    sgd = torch.optim.SGD([copied], lr=0.125)
    for _ in range(2):
        x.backward()
        copied.grad = x.g.float()
        sgd.step()
        x.step()
        x.zero()
    x.see(copied)


def others_step(x: Loop) -> None:
    sgd = torch.optim.SGD([x.w], lr=2**-7, foreach=True)
    x.backward()
    x.g[:30] = 0
    sgd.step()
    x.zero()


LOOPS = [
    a_view_sees_the_next_batch,
    views_of_several_weights,
    a_view_over_a_step,
    a_view_over_a_step_and_a_batch,
    a_view_over_zeros,
    a_view_over_none,
    yesterdays_gradient,
    yesterdays_gradient_changes,
    many_old_gradients,
    one_tensor_over_batches,
    detached_over_batches,
    a_hook_on_the_weight,
    a_hook_on_the_gradient,
    a_hook_that_decays,
    views_over_passes,
    one_gradient_for_two,
    a_view_before_others_clip,
    a_view_and_then_frozen,
    a_scaler,
    others_optimizer_reads_it,
    others_step,
]


REFUSED = [a_view_sees_the_next_batch, a_view_over_a_step_and_a_batch, detached_over_batches]
"""Where 16 bits have no room for the sum that a view would have to show."""


def assert_as_torchs(
    use: Use, dtype: torch.dtype, batches: int, rtol: float, places: Iterable[str] = PLACES
) -> None:
    truth = Loop(None)
    use(truth)
    for where in places:
        ours = Loop(where, dtype, batches)
        use(ours)
        seen = [*zip(ours.seen, truth.seen, strict=True)]
        for x, y in [*seen, *zip(ours.weights(), truth.weights(), strict=True)]:
            assert x.shape == y.shape and (x - y).norm() <= rtol * y.norm(), where


TWO = [
    ("gpu", "host"),
    ("states on the host", "gradients on the host"),
    ("gpu", "gradients on the host"),
    ("states on the host", "host"),
]
"""Two places each, of which one has the gradient on the GPU. The second and the fourth are those
that the one before has not."""


@pytest.mark.parametrize(("dtype", "batches"), [(FP32, 1), (BF16, 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("number", "code"), enumerate(GRADIENT_USES))
def test_a_gradient_may_be_used_as_torchs(number, code, dtype, batches) -> None:
    """Writes of others round 16-bit gradients once more, as they do on the GPU. In two places with
    each dtype, of which one has the gradient on the host; the other dtype has the other two."""
    two = TWO[2 * (number % 4 > 1) + (number + (dtype == BF16)) % 2]
    assert_as_torchs(lines(code), dtype, batches, 1e-6 if dtype == FP32 else 0.01, two)


@pytest.mark.parametrize("where", PLACES)
def test_a_gradient_is_where_its_parameter_is(where) -> None:
    """Between passes all are in one place; weights that wait on the host are on the GPU while their
    block computes."""
    loop = Loop(where, shapes=SHAPES * 2)
    home = torch.device("cpu" if where == "host" else DEVICE).type

    def check(p: nn.Parameter, *homes: str) -> None:
        assert p.grad is not None and p.device.type in homes
        for x in (p.grad, p.grad.detach(), p.grad.clone(), p.grad[:3], torch.zeros_like(p.grad)):
            assert x.device == p.device and x.is_cuda == p.is_cuda

    for p in loop.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: check(p, torch.device(DEVICE).type))
    for keeps in (False, True):
        loop.backward()
        for p in loop.model.parameters():
            check(p, home)
        loop.step()
        for p in loop.model.parameters():
            assert p.grad is not None and p.grad.device == p.device
            check(p, home, torch.device(DEVICE).type)
        loop.zero(to_none=not keeps)


def test_an_update_waits_for_its_gradient_when_a_step_is_interrupted(monkeypatch) -> None:
    """Its lane waits for marks alone, and an earlier step's says nothing of this gradient."""
    loop = Loop("gradients on the host")
    loop.backward()
    loop.other.grad = loop.w.grad
    stream, order = loop.optimizer.stream, []
    for owner, name in ((stream.compute, "mark"), (stream, "bring")):
        was = getattr(owner, name)
        heard = partial(lambda was, name, *a: (order.append(name), was(*a))[1], was, name)
        monkeypatch.setattr(owner, name, heard)
    loop.step()
    assert "bring" in order and order[0] == "mark"


@pytest.mark.skipif(DEVICE != "cpu", reason="numpy has no tensors of a GPU")
@pytest.mark.parametrize("code", NUMPY_USES)
def test_numpy_shares_its_memory(code) -> None:
    assert_as_torchs(lines(code), FP32, 1, 1e-6)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_may_keep_it(loop, dtype, batches) -> None:
    """Each dtype and each number of batches has half of its runs in two places, half in others."""
    if loop in REFUSED and dtype == BF16 and batches == 1:
        with pytest.raises(RuntimeError, match="say batches=2 or more"):
            assert_as_torchs(loop, dtype, batches, 0.01)
        return
    if loop is a_scaler and dtype == BF16 and batches == 1 and DEVICE == "cuda":
        pytest.skip("torch's GradScaler takes no bfloat16 on a GPU")
    two = TWO[(dtype == BF16) ^ (batches == 2)]
    assert_as_torchs(loop, dtype, batches, 1e-6 if dtype == FP32 else 0.01, two)


@pytest.mark.parametrize(
    ("code", "says"),
    {
        "g.t_()": "t_ would change the shape or memory of a gradient",
        "g.resize_(3, 3)": "resize_ would change",
        "g.set_(torch.ones(40, 33))": "set_ would change",
        "g.unsqueeze_(0)": "unsqueeze_ would change",
        "g.data = torch.ones(3)": r"parameter.grad.data got \(3,\) in torch.float32",
        "g.data = torch.ones(40, 33, dtype=torch.int32)": "in torch.int32 for a parameter of",
        "dlpack.to_dlpack(g)": "Cannot access data pointer",
        "g.apply_(lambda v: v / 2)": "",
        "g.map_(torch.ones(40, 33), lambda a, b: a)": "",
    }.items(),
)
def test_what_cannot_be_done_is_refused(code, says) -> None:
    """By our line, or by torch's where code in C++ asks for an address."""
    with pytest.raises((RuntimeError, ValueError, TypeError), match=says):
        lines(code)(Loop("host"))


def test_a_large_gradient_that_comes_up_is_told_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(taking, "LARGE_BYTES", 1000)
    loop = Loop("host")
    for _ in range(2):
        loop.backward()
        loop.g[:3] = 0
        loop.other.grad[:3] = 0
        loop.step()
        loop.zero()
    told = [line for line in capsys.readouterr().out.splitlines() if line[:6] == "a grad"]
    line = (
        "a gradient of (40, 33) takes 0.00 GiB more on cpu, where it stays: a view of it was made"
    )
    assert told == [line]


def test_reading_a_gradient_moves_it_once() -> None:
    """A view stays, what is computed of a gradient does not."""
    loop = Loop("host")
    loop.backward()
    loop.g.abs().max(), loop.g.data.norm(), loop.g.detach().sum(), loop.g.clamp_(-1, 1)
    assert loop.g.held.here is None
    loop.g[0].sum()
    assert loop.g.held.here is not None and loop.other.grad.held.here is None


def test_updates_that_are_not_late_are_told_once(capsys) -> None:
    """More blocks than begin to move within the step."""
    for keeps in (False, True):
        loop = Loop("host", shapes=SHAPES * 2)
        kept = loop.w.data if keeps else None
        for _ in range(3):
            loop.backward()
            loop.step()
            assert keeps == all(block.update is None for block in loop.optimizer.stream.blocks)
            loop.zero()
        told = [x for x in capsys.readouterr().out.splitlines() if "within optimizer.step" in x]
        assert len(told) == keeps and (kept is not None) == keeps


# --- states ----------------------------------------------------------------------------------


def a_count_is_reset(x: Loop) -> None:
    x.optimizer.state[x.w]["step"].zero_()


def a_count_is_counted(x: Loop) -> None:
    x.optimizer.state[x.w]["step"] += 3


def moments_are_reset(x: Loop) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        x.optimizer.state[x.w][name] *= 0.0


def rows_of_moments_are_reset(x: Loop) -> None:
    x.optimizer.state[x.w]["exp_avg"][:30].mul_(0.5)
    for states in x.optimizer.state.values():
        states["exp_avg_sq"].view(-1)[3] = 1.0


@pytest.mark.parametrize(
    "use", [a_count_is_reset, a_count_is_counted, moments_are_reset, rows_of_moments_are_reset]
)
def test_states_may_be_written(use) -> None:
    def loop(x: Loop) -> None:
        for n in range(4):
            x.backward()
            x.step()
            if n == 1:
                use(x)
            x.zero()

    assert_as_torchs(loop, FP32, 1, 1e-6)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:5], lambda x: x.detach().view(-1)[3:]])
def test_states_that_somebody_keeps_are_those_of_now(view) -> None:
    def loop(x: Loop) -> None:
        x.backward()
        x.step()
        states = x.optimizer.state[x.w]
        kept = [states["step"], view(states["exp_avg"]), view(states["exp_avg_sq"])]
        del states
        for factor in (1.0, 0.5):
            x.backward()
            x.step()
            for state in kept:
                x.see(state)
            kept[1].mul_(factor)
            x.zero()
        x.backward()
        x.step()

    assert_as_torchs(loop, FP32, 1, 1e-6)


# --- weights ---------------------------------------------------------------------------------


def weights_are_read(x: Loop, kept: list[Tensor]) -> None:
    for _ in range(3):
        x.backward()
        x.step()
        for weight in kept:
            x.see(weight)
        x.zero()


def weights_are_written_after_the_step(x: Loop, kept: list[Tensor]) -> None:
    for _ in range(3):
        x.backward()
        x.step()
        x.zero()
        for weight in kept:
            weight[:3] = 0.5


def weights_are_written_before_the_step(x: Loop, kept: list[Tensor]) -> None:
    for _ in range(3):
        x.backward()
        for weight in kept:
            weight.mul_(0.5)
        x.step()
        x.zero()


def weights_are_written_after_a_forward(x: Loop, kept: list[Tensor]) -> None:
    with torch.no_grad():
        for n in range(3):
            for layer, shape in zip(x.model, SHAPES, strict=True):
                ones = torch.ones(shape, device=DEVICE, dtype=x.w.dtype)
                x.see(layer(torch.zeros((), device=DEVICE), ones))
            for weight in kept:
                weight.fill_(n)


@pytest.mark.parametrize("view", [lambda p: p.data, lambda p: p.detach().view(-1)[3:]])
@pytest.mark.parametrize(
    "use",
    [
        weights_are_read,
        weights_are_written_after_the_step,
        weights_are_written_before_the_step,
        weights_are_written_after_a_forward,
    ],
)
def test_weights_that_somebody_keeps_are_those_of_now(use, view) -> None:
    def loop(x: Loop) -> None:
        use(x, [view(p) for p in x.model.parameters()])

    assert_as_torchs(loop, FP32, 1, 1e-6)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.__setitem__("exp_avg", torch.zeros(40, 33)),
        lambda states: states.update(step=torch.zeros(())),
        lambda states: states.pop("step"),
        lambda states: states.clear(),
        lambda states: states.setdefault("max_exp_avg_sq", torch.zeros(40, 33)),
    ],
)
def test_a_state_is_not_replaced(change) -> None:
    loop = Loop("host")
    loop.backward()
    loop.step()
    for parameter in (loop.w, nn.Parameter(torch.ones(3))):
        states = loop.optimizer.state[parameter]
        before = dict(states)
        try:
            change(states)
        except UserError as error:
            assert "optimizer.load_states(parameter, states)" in str(error)
        except KeyError:  # of no states, as a dict's
            assert not before
        assert dict(loop.optimizer.state[parameter]).keys() == before.keys()


def test_a_parameter_without_states_is_refused() -> None:
    """DeepSpeed's ZeRO puts flat fp32 partitions into the groups of its client's optimizer."""
    loop = Loop("host")
    loop.backward()
    before = [x.clone() for x in loop.weights()]
    flat = nn.Parameter(torch.ones(1320, device=DEVICE))
    flat.grad = torch.ones_like(flat)
    loop.optimizer.param_groups[0]["params"].append(flat)
    for refused in (
        loop.optimizer.step,
        lambda: loop.optimizer.load_states(flat, {}),
        lambda: loop.optimizer.states_of(flat),
        lambda: loop.optimizer.state.update({flat: {}}),
    ):
        with pytest.raises(UserError, match=r"no states for a parameter of \(1320,\).*ZeRO"):
            refused()
    assert all(map(torch.equal, loop.weights(), before)) and not loop.optimizer.steps
