"""LoRA+: the rates of PEFT's optimizer, in every optimizer step of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from both import make_model
from safetensors.torch import load_file
from small_run import prepare, run

import longctx
from longctx.errors import UserError
from longctx.kernels import adamw_many
from longctx.train.trainer.exact import ExactTrainer

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")
RATE, RATIO = 1e-2, 8.0
PLUS = ["--lora_r", "4", "--max_steps", "4", "--learning_rate", str(RATE)]
PLUS += ["--loraplus_lr_ratio", str(RATIO)]


def adapted(**options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(make_model(), config)


def theirs_of(model: Any, **options: Any) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    given = dict(lr=RATE, loraplus_lr_ratio=RATIO, **options)
    return create_loraplus_optimizer(model, torch.optim.AdamW, **given)


@pytest.mark.parametrize("use_dora", [False, True])
def test_exact_adamw_makes_pefts_updates(use_dora: bool, monkeypatch) -> None:
    """Given the same gradients, updates equal PEFT's; one launch updates all weights."""
    launched: list[int] = []
    update = adamw_many.adamw_many_

    def count(weights: Any, *more: Any) -> None:
        launched.append(len(weights))
        update(weights, *more)

    monkeypatch.setattr("longctx.memory.optimizer.adamw_many_", count)
    truth, ours = (adapted(use_dora=use_dora) for _ in range(2))
    theirs = theirs_of(truth)
    settings = dict(lr=RATE, weight_decay=0.0, tokens=64)
    optimizer = longctx.exact_adamw(ours, loraplus_lr_ratio=RATIO, **settings)
    trained = [
        (name, p, q)
        for (name, p), q in zip(truth.named_parameters(), ours.parameters(), strict=True)
        if p.requires_grad
    ]
    start = {name: p.detach().clone() for name, p, _ in trained}
    schedules = [torch.optim.lr_scheduler.ExponentialLR(of, 0.5) for of in (theirs, optimizer)]
    for step in range(3):
        torch.manual_seed(step)
        for _, p, q in trained:
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for of, schedule in zip((theirs, optimizer), schedules, strict=True):
            of.step()
            schedule.step()
    for name, p, q in trained:
        moved = float((p.detach() - start[name]).abs().max())
        rate = RATE if "lora_A" in name else RATIO * RATE
        assert 0.9 * rate < moved < 2 * rate, name  # three steps are 1, 1/2 and 1/4 of it
        torch.testing.assert_close(q, p, rtol=0, atol=1e-4 * rate, msg=name)
    assert launched == [len(trained)] * 3


def test_a_run_trains_as_with_pefts_optimizer(tmp_path: Path, monkeypatch, capsys) -> None:
    """By exact AdamW, whose adapters are fp32 over bfloat16 weights."""
    words = [*prepare(tmp_path), *PLUS, "--use_dora", "--dtype", "bfloat16"]
    words += ["--lr_scheduler_type", "cosine", "--warmup_steps", "1"]
    run(words, tmp_path / "ours")
    said = "LoRA+: the learning rate of each adapter's B is 8 times that of its A"
    assert capsys.readouterr().out.count(said) == 1

    def create(self: ExactTrainer, model: Any = None) -> Any:
        self.optimizer = theirs_of(self.model, betas=(0.9, 0.999), eps=1e-8)
        return self.optimizer

    monkeypatch.setattr(ExactTrainer, "create_optimizer", create)
    monkeypatch.setattr(ExactTrainer, "place", lambda *args: None)
    run([*words, "--optimizer_states", "as_weights"], tmp_path / "theirs")
    ours, truth = (
        load_file(tmp_path / name / "final/adapter_model.safetensors")
        for name in ("ours", "theirs")
    )
    for name, x in truth.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=2e-2 * RATE, msg=name)


def test_resumed_bit_by_bit_and_refused_with_another_ratio(tmp_path: Path) -> None:
    words = [*prepare(tmp_path), *PLUS, "--dtype", "bfloat16"]
    whole = run(words, tmp_path / "run")
    resume = ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]
    again = run(words, tmp_path / "run", *resume)
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert whole[0]["learning_rate"] == pytest.approx(RATE)  # A's
    resume[1] = str(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(UserError, match="is of another run: loraplus_lr_ratio 8 -> 4"):
        run(words, tmp_path / "run", *resume, "--loraplus_lr_ratio", "4")
    run(words, tmp_path / "run", *resume, *"--loraplus_lr_ratio 4 --allow_changed".split(),
        "loraplus_lr_ratio")  # fmt: skip


def test_what_has_no_adapters() -> None:
    with pytest.raises(UserError, match="loraplus_lr_ratio is of LoRA adapters"):
        longctx.exact_adamw(make_model(), tokens=64, loraplus_lr_ratio=4)
    with pytest.raises(UserError, match="loraplus_lr_ratio must be above 0"):
        longctx.exact_adamw(adapted(), tokens=64, loraplus_lr_ratio=0)
