"""TRL's `activation_offloading=True`: hooks on whatever autograd saves. What the schedule keeps is
its store's and no saved tensor, so that little is left for TRL. TRL needs an accelerator, with a
patched model or without (an AttributeError else): on the CPU these tests stand in for one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from both import arguments, assert_same_run, logged, make_model, sentences, trained
from small_tokenizer import small_tokenizer

import longctx

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("reference_kernels")


def make_trainer(folder: Any, model: Any, **settings: Any) -> Any:
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**arguments(folder, activation_offloading=True, **settings)),
        train_dataset=sentences(12),
        processing_class=small_tokenizer(),
    )


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is copied out."""
    if torch.cuda.is_available():
        pytest.skip("has one")
    from trl.models import activation_offloading as offloading
    from trl.trainer import sft_trainer

    def make(**options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            return get_context(**options, use_pin_memory=False, use_streams=False)

    get_context = offloading.get_act_offloading_ctx_manager
    monkeypatch.setattr(sft_trainer, "get_act_offloading_ctx_manager", make)
    # TRL asks its device for it where bitsandbytes is installed, and a CPU has none.
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    shapes: list[tuple[int, ...]] = []
    empty_like = torch.empty_like

    def counted(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            shapes.append(tuple(x.shape))
        return empty_like(x, **options)

    monkeypatch.setattr(torch, "empty_like", counted)
    return shapes


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_it_trains_as_vanilla(accelerator, scheduled, capsys, tmp_path, bf16) -> None:
    train = trained(lambda model: make_trainer(tmp_path, model, bf16=bf16))
    bars = dict(rel=2e-2, bar=0.1) if bf16 else {}
    assert_same_run(train, scheduled, capsys, passes=3, **bars)


def test_nothing_that_layers_keep_is_offloaded(accelerator, scheduled, tmp_path) -> None:
    """But the final norm's input, and what TRL's own loss keeps of its output."""
    settings = dict(gradient_checkpointing=False)
    make_trainer(tmp_path, make_model(), **settings).train()
    vanilla, shapes = len(accelerator), accelerator
    shapes.clear()
    make_trainer(tmp_path, longctx.patch(make_model()), **settings).train()
    wide = [shape for shape in shapes if shape[2:] or shape[1:] > (64,)]
    assert len(scheduled) == 2 * 3 and wide == [] and len(shapes) < vanilla / 5, shapes


@pytest.mark.gpu
def test_it_trains_as_vanilla_on_a_gpu(scheduled, tmp_path) -> None:
    """With TRL's own streams."""
    vanilla = make_model(head_dim=64)
    losses = []
    for model in (vanilla, longctx.patch(copy.deepcopy(vanilla))):
        trainer = make_trainer(tmp_path, model, use_cpu=False, bf16=True)
        trainer.train()
        losses.append(logged(trainer)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and len(scheduled) == 2 * 3
