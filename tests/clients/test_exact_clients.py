"""Exact AdamW in the hands of other people's trainers and loops: the numbers are those of torch's
AdamW on the same model in fp32, whatever they do to a torch optimizer, wherever states are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_model
from small_model import packed_batch, tiny_config
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import longctx
from exactness import DEVICE
from longctx.errors import UserError
from longctx.memory import guard

pytestmark = pytest.mark.usefixtures("reference_kernels")
PLACES = ["gpu", "host"]
LR = 1e-2


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).to(DEVICE, dtype).train()


def batch() -> dict[str, Any]:
    return {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in packed_batch().items()}


def torch_adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **{"lr": LR, "eps": 1e-5} | options)


def exact(model: Any, place: str = "gpu", **options: Any) -> Any:
    return longctx.exact_adamw(model, **{"lr": LR, "eps": 1e-5} | options, tokens=96, place=place)


def backward(model: Any, scale: float = 1.0) -> Tensor:
    loss: Tensor = model(**batch()).loss
    (loss * scale).backward()
    return loss.detach()


def _given(made: list[Any], hands_over: bool) -> Any:
    return made if hands_over else made[0]


def assert_as_torch(
    train: Callable[[Any, Any], Any], place: str, *, hands_over: bool = False, **options: Any
) -> None:
    """The same loop with both optimizers; what it returns and the weights are compared. With
    `hands_over` the loop takes its optimizer out of a list, so that it may delete it: once
    torch.compile has run in a process, the frame of a caller holds an argument until the call
    returns."""
    truth, ours = make_model(), longctx.patch(make_model())
    expected = train(truth, _given([torch_adamw(truth, **options)], hands_over))
    found = train(ours, _given([exact(ours, place, **options)], hands_over))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    start = make_model().state_dict()
    found = ours.state_dict()
    for name, weight in truth.state_dict().items():
        moved = (weight - start[name]).norm()
        assert moved > 0 and (found[name].to(DEVICE) - weight).norm() <= 2e-2 * moved, name


def by_torch(model: Any, optimizer: Any, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def by_hand(model: Any, optimizer: Any, max_norm: float) -> Tensor:
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([grad.float().norm().to(DEVICE) for grad in grads]).norm()
    for grad in grads:
        grad.data.mul_((max_norm / (norm + 1e-6)).clamp(max=1).to(grad.device))
    return norm


def by_value(model: Any, optimizer: Any, max_norm: float) -> Tensor:
    nn.utils.clip_grad_value_(model.parameters(), max_norm / 100)
    return torch.stack([p.grad.abs().max().float().to(DEVICE) for p in model.parameters()]).max()


def by_largest(model: Any, optimizer: Any, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm / 50, norm_type=float("inf"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [by_torch, by_hand, by_value, by_largest])
def test_clipping_by_others(clip, place) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        norms = []
        for _ in range(4):
            backward(model)
            norms.append(float(clip(model, optimizer, 0.5)))
            optimizer.step()
            model.zero_grad()
        return norms

    assert_as_torch(train, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: CosineAnnealingLR(o, 4),
        lambda o: ExponentialLR(o, 0.5),
        lambda o: OneCycleLR(o, LR, total_steps=8),
        lambda o: ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=10.0),
        lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), CosineAnnealingLR(o, 3)], [2]),
    ],
    ids=["cosine", "exponential", "one cycle", "plateau", "sequential"],
)
def test_a_resume_goes_on_at_the_rate_it_had(schedule, place) -> None:
    """Also of betas, and in a new process, whose scheduler starts over."""

    def train(model: Any, made: list[Any]) -> list[float]:
        optimizer = made.pop()
        scheduler, rates = schedule(optimizer), []
        for step in range(6):
            if step == 3:
                states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                kind, options = type(optimizer), dict(optimizer.param_groups[0])
                del optimizer, scheduler
                make = exact if kind is not torch.optim.AdamW else torch_adamw
                optimizer = make(model, place) if make is exact else make(model)
                assert options["lr"] != LR
                scheduler = schedule(optimizer)
                optimizer.load_state_dict(states[0])
                scheduler.load_state_dict(states[1])
            loss = backward(model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
            rates += [g["lr"] for g in optimizer.param_groups]
            rates += [g["betas"][0] for g in optimizer.param_groups]
        return rates

    assert_as_torch(train, place, hands_over=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler(unscales, place) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=2)
        scales = []
        for step in range(5):
            backward(model, scaler.get_scale())
            if step == 2:  # a step that overflows is left out
                model.lm_head.weight.grad.mul_(float("inf"))
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    # `scale` itself makes a lazy tensor of the device.
    assert_as_torch(_scaled(train), place)


def _scaled(train: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A GradScaler is used once before it knows its scale."""

    def run(model: Any, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler
        scale = scaler.__init__

        def initialised(self: Any, *args: Any, **kw: Any) -> None:
            scale(self, *args, **kw)
            self.scale(torch.ones((), device=DEVICE))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scaler, "__init__", initialised)
            return train(model, optimizer)

    return run


@pytest.mark.parametrize("place", PLACES)
def test_moving_averages_and_best_weights(place) -> None:
    """torch's own average, and weights that are loaded back while updates are outstanding."""

    def train(model: Any, optimizer: Any) -> list[Tensor]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(4):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            if step == 1:
                best = copy.deepcopy(model.state_dict())
            if step == 2:
                model.load_state_dict(best)
        return [float(p.detach().norm()) for p in average.module.parameters()]

    assert_as_torch(train, place)


@pytest.mark.parametrize("place", PLACES)
def test_a_layer_that_is_thawed(place) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        model.model.embed_tokens.weight.requires_grad_(False)
        losses = []
        for step in range(4):
            if step == 2:
                model.model.embed_tokens.weight.requires_grad_(True)
            losses.append(float(backward(model)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    truth, ours = make_model(), longctx.patch(make_model())
    expected = train(truth, torch_adamw(truth))
    found = train(ours, exact(ours, place))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_layer_that_joins_later() -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(4):
            if step == 2:
                layer = model.model.layers[0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
            losses.append(float(backward(model)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    truth, ours = make_model(), longctx.patch(make_model())
    for model in (truth, ours):
        model.model.layers[0].requires_grad_(False)
    expected = train(truth, torch_adamw(truth))
    torch.testing.assert_close(train(ours, exact(ours)), expected, rtol=1e-4, atol=1e-6)


def test_what_was_thawed_and_nobody_trains_is_warned_of() -> None:
    ours = longctx.patch(make_model())
    ours.model.layers[0].requires_grad_(False)
    optimizer = exact(ours)
    ours.model.layers[0].requires_grad_(True)
    backward(ours)
    with pytest.warns(UserWarning, match=r"9 parameters .* thawed .*add_param_group"):
        optimizer.step()


@pytest.mark.parametrize("clips", ["ours", "theirs"])
@pytest.mark.parametrize("first", [0.1, 0.5])
def test_two_limits_are_the_smaller_one(first, clips) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        norms = []
        for _ in range(3):
            backward(model)
            for limit in (first, 0.6 - first):
                ours = clips == "ours" and hasattr(optimizer, "clip")
                norm = optimizer.clip(limit) if ours else by_torch(model, optimizer, limit)
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    for place in PLACES:
        assert_as_torch(train, place)


# --- accelerate and transformers -------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_accelerate_prepares_clips_and_saves(place, tmp_path) -> None:
    def train(model: Any, optimizer: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=DEVICE == "cpu")
        scheduler = CosineAnnealingLR(optimizer, 8)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        numbers = []

        def steps(count: int) -> None:
            for _ in range(count):
                loss = model(**batch()).loss
                accelerator.backward(loss)
                numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                numbers.append(float(loss))

        steps(2)
        accelerator.save_state(str(tmp_path / "state"))
        steps(2)
        accelerator.load_state(str(tmp_path / "state"))
        steps(2)
        return [*numbers, *(group["lr"] for group in optimizer.param_groups)]

    assert_as_torch(train, place)


@pytest.mark.parametrize("place", PLACES)
def test_trainer_clips_and_resumes(place, tmp_path) -> None:
    """transformers' own Trainer, with its defaults, resumed at the rate that it logs."""

    def rows(count: int) -> list[dict[str, Any]]:
        whole = packed_batch(count)
        names = ("input_ids", "labels", "position_ids")
        return [{name: whole[name][i] for name in names} for i in range(count)]

    def trainer(model: Any, optimizer: Any, folder: Any, **more: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            learning_rate=LR,
            lr_scheduler_type="cosine",
            save_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=DEVICE == "cpu",
            disable_tqdm=True,
            **{"num_train_epochs": 1} | more,
        )
        optimizers = (optimizer, None)
        return Trainer(model, arguments, train_dataset=rows(12), optimizers=optimizers)

    def train(kind: str) -> tuple[list[Any], dict[str, Tensor]]:
        def make() -> tuple[Any, Any]:
            AcceleratorState._reset_state(reset_partial_state=True)
            if kind == "torch":
                model = make_model()
                return model, torch_adamw(model)
            model = longctx.patch(make_model())
            return model, exact(model, place)

        folder = tmp_path / kind
        trainer(*make(), folder).train()
        model, optimizer = make()
        again = trainer(model, optimizer, folder)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        log = [x for x in again.state.log_history if "grad_norm" in x]
        rates = [group["lr"] for group in optimizer.param_groups]
        numbers = [[x["loss"], float(x["grad_norm"]), x["learning_rate"]] for x in log]
        return [*numbers, rates], {n: w.clone() for n, w in model.state_dict().items()}

    (expected, truth), (found, ours) = train("torch"), train("exact")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    for name, weight in truth.items():
        assert (ours[name].to(DEVICE) - weight).norm() <= 1e-2 * weight.norm(), name


# --- files and other modules -----------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_of_the_model(dtype, place, tmp_path) -> None:
    """Of its own weights, updated, and nothing of the memory around them."""
    ours = longctx.patch(make_model(dtype))
    optimizer = exact(ours, place)
    backward(ours)
    optimizer.step()
    save_model(ours, str(tmp_path / "model.safetensors"))
    optimizer.zero_grad()
    backward(ours)
    optimizer.step()
    torch.save(ours, tmp_path / "whole.pt")
    torch.save(ours.state_dict(), tmp_path / "weights.pt")
    expected = {name: weight.cpu().clone() for name, weight in ours.state_dict().items()}
    first = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(first["lm_head.weight"], expected["lm_head.weight"])
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    for found in (torch.load(tmp_path / "weights.pt"), whole.state_dict()):
        assert all(torch.equal(found[name].cpu(), weight) for name, weight in expected.items())
    nbytes = sum(weight.nbytes for weight in expected.values())
    for name in ("weights.pt", "whole.pt"):
        assert (tmp_path / name).stat().st_size < 1.2 * nbytes + 2**16
    backward(whole.to(DEVICE))  # its hooks are none
    assert copy.deepcopy(ours).state_dict().keys() == expected.keys()


def test_several_models_in_one_module() -> None:
    def make(patched: bool) -> nn.ModuleList:
        models = [make_model(), make_model()]
        return nn.ModuleList(map(longctx.patch, models) if patched else models)

    def train(models: nn.ModuleList, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            for model in models:
                losses.append(float(backward(model, step + 1)))
            nn.utils.clip_grad_norm_(models.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    truth = make(False)
    expected = train(truth, torch_adamw(truth))
    for place in PLACES:
        ours = make(True)
        found = train(ours, exact(ours, place))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_any_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.inner, self.head = model, nn.Linear(64, 1, device=DEVICE)

        def forward(self, **batch: Any) -> Tensor:
            hidden = self.inner.model(batch["input_ids"]).last_hidden_state
            return self.head(hidden).square().mean()

    losses = []
    for kind in ("torch", *PLACES):
        torch.manual_seed(0)
        module = Wrapper(make_model() if kind == "torch" else longctx.patch(make_model()))
        torch.manual_seed(1)
        nn.init.normal_(module.head.weight)
        optimizer = torch_adamw(module) if kind == "torch" else exact(module, kind)
        for _ in range(3):
            loss = module(**batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    for place in (1, 2):
        torch.testing.assert_close(losses[3 * place : 3 * place + 3], losses[:3], rtol=1e-4, atol=0)
    plain = nn.Linear(3, 3, device=DEVICE)
    optimizer = exact(plain)
    plain(torch.ones(3, device=DEVICE)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2


# --- what is refused, and what it costs --------------------------------------------------------


def test_a_second_optimizer_is_refused_while_the_first_is_there() -> None:
    ours = longctx.patch(make_model())
    first = exact(ours)
    with pytest.raises(UserError, match="has an exact AdamW already"):
        exact(ours)
    scheduler = CosineAnnealingLR(first, 3)
    del first, scheduler
    backward(ours)
    ours.zero_grad()
    exact(ours, "host")


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_other_adamws_are_refused(option) -> None:
    ours, truth = longctx.patch(make_model()), make_model()
    optimizer = exact(ours)
    other = torch_adamw(truth, **{option: True})
    backward(truth)
    other.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"has no {option}"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before


def test_the_optimizer_itself_is_not_copied() -> None:
    optimizer = exact(longctx.patch(make_model()))
    for copies in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="save optimizer.state_dict"):
            copies(optimizer)


def test_nothing_is_trained() -> None:
    with pytest.raises(UserError, match="no parameter of the model requires gradients"):
        exact(make_model().requires_grad_(False))


@pytest.mark.parametrize("place", PLACES)
def test_a_plain_loop_waits_for_nothing(place, monkeypatch) -> None:
    """Updates stay late: nobody touches what is on its way."""
    touched = []
    settle = guard.settle
    monkeypatch.setattr(guard, "settle", lambda x: (touched.append(x.shape), settle(x)))
    ours = longctx.patch(make_model(torch.bfloat16))
    optimizer = exact(ours, place)
    scheduler = CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        backward(ours)
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ours.zero_grad()
    assert not touched
    weight = ours.lm_head.weight + 0
    assert bool(touched) == (place == "host") and type(weight) is Tensor
