"""EfficiencyCallback: what it counts is what was trained, under Trainer and TRL."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from both import arguments, make_model, sentence, sentences
from small_tokenizer import small_tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    MambaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import longctx
from longctx.cost.flops import step_flops
from longctx.errors import UserError
from longctx.loop import metrics
from longctx.loop.efficiency import _tokens, _trunk, _why_no_mfu
from longctx.loop.metrics import parameters_in_matmuls

pytestmark = pytest.mark.usefixtures("reference_kernels")
PEAK_TFLOPS = 1e-3


class Reporter(TrainerCallback):
    """Stands for TensorBoard: it is made before the callbacks that a user gives."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
        self.lines.append(dict(logs))


def run(model: Any, folder: Any, rows: int = 24, **settings: Any) -> tuple[Any, Reporter]:
    """Three steps of two batches of 4 rows each, an evaluation after each step."""
    tokenizer, reporter = small_tokenizer(), Reporter()
    data = sentences(rows).map(lambda row: dict(tokenizer(row["text"])), remove_columns="text")
    more = dict(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, seed=0)
    trainer = Trainer(
        model,
        args=TrainingArguments(**arguments(folder, **more | settings)),
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[reporter, longctx.EfficiencyCallback(peak_tflops=PEAK_TFLOPS)],
    )
    with redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer, reporter


def lengths(rows: int) -> list[int]:
    return [len(small_tokenizer()(sentence(n))["input_ids"]) for n in range(rows)]


def counted(line: dict[str, float], steps: int = 1) -> float:
    """The tokens behind a line's figures."""
    return line["tokens_per_s"] * line["step_s"] * steps


@pytest.mark.parametrize("patched", [False, True], ids=["vanilla", "patched"])
@pytest.mark.parametrize("every", [1, 3])
def test_tokens_and_mfu_of_padded_rows(tmp_path, patched, every) -> None:
    """All 24 rows are trained once: tokens without padding, and FLOPs by formula."""
    model = make_model()
    model = longctx.patch(model, strict=True) if patched else model
    trainer, reporter = run(model, tmp_path, logging_steps=every)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 3 // every
    tokens = sum(counted(line, every) for line in lines)
    assert tokens == pytest.approx(sum(lengths(24)), rel=1e-9)
    flops = sum(line["mfu"] * line["step_s"] * every * PEAK_TFLOPS * 1e12 for line in lines)
    squares = sum(length**2 for length in lengths(24))
    attended = squares * model.config.hidden_size * model.config.num_hidden_layers
    truth = step_flops(
        parameters=parameters_in_matmuls(model), tokens=sum(lengths(24)), attended=attended
    )
    assert flops == pytest.approx(truth, rel=1e-6)
    assert all(line["peak_host_gib"] > 0.1 and "peak_gpu_gib" not in line for line in lines)
    seen = [line for line in reporter.lines if "loss" in line]
    assert [line["tokens_per_s"] for line in seen] == [line["tokens_per_s"] for line in lines]
    assert not _trunk(model)._forward_pre_hooks  # it is gone with the run


def test_time_of_evaluations_and_saves_is_left_out(tmp_path, monkeypatch) -> None:
    """By a clock that moves by a second in each batch, trained or evaluated, and with each save."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def wait(*args: Any) -> None:
        now[0] += 1.0

    model = make_model()
    model.register_forward_pre_hook(wait)
    monkeypatch.setattr(Trainer, "_save_checkpoint", wait)
    settings = dict(save_strategy="steps", save_steps=1)
    trainer, _ = run(model, tmp_path, logging_steps=1, **settings)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step_s"] for line in lines] == [2.0] * 3  # batches of a step


def test_packed_rows_in_trls_trainer(tmp_path) -> None:
    """TRL goes around the causal model's forward; documents begin where position_ids do."""
    trl = pytest.importorskip("trl")
    model = longctx.patch(make_model(), strict=True)
    settings = arguments(tmp_path, max_steps=-1, num_train_epochs=1, logging_steps=1)
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**settings, packing=True, max_length=40),
        train_dataset=sentences(24),
        processing_class=small_tokenizer(),
        callbacks=[longctx.EfficiencyCallback(peak_tflops=PEAK_TFLOPS)],
    )
    with redirect_stdout(io.StringIO()):
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    documents = [n for row in trainer.train_dataset["seq_lengths"] for n in row]
    assert len(documents) >= 24
    assert sum(map(counted, lines)) == pytest.approx(sum(documents), rel=1e-9)
    flops = sum(line["mfu"] * line["step_s"] * PEAK_TFLOPS * 1e12 for line in lines)
    attended = sum(n**2 for n in documents) * model.config.hidden_size * 2
    parameters = parameters_in_matmuls(model)
    truth = step_flops(parameters=parameters, tokens=sum(documents), attended=attended)
    assert flops == pytest.approx(truth, rel=1e-6)


def test_adapters_and_several_processes(tmp_path, monkeypatch) -> None:
    """What another process has counted is added, and MFU is over two GPUs."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    monkeypatch.setattr(metrics, "all_reduce_sum", lambda numbers, device: [3 * n for n in numbers])
    model = peft.get_peft_model(
        longctx.patch(make_model()), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    trainer, _ = run(model, tmp_path, logging_steps=3, eval_strategy="no")
    (line,) = (line for line in trainer.state.log_history if "loss" in line)
    assert counted(line, 3) == pytest.approx(3 * sum(lengths(24)), rel=1e-9)
    squares = sum(length**2 for length in lengths(24))
    flops = step_flops(
        parameters=parameters_in_matmuls(model),
        tokens=3 * sum(lengths(24)),
        attended=3 * squares * model.config.hidden_size * 2,
    )
    found = line["mfu"] * line["step_s"] * 3 * 2 * PEAK_TFLOPS * 1e12
    assert found == pytest.approx(flops, rel=1e-6)


def test_where_documents_begin() -> None:
    """A mask, positions, bounds, or the rows."""
    ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    positions, real = _tokens({"input_ids": ids, "attention_mask": mask, "position_ids": ids})
    assert positions[mask == 1].tolist() == [0, 1, 0, 1, 2] and torch.equal(real, mask == 1)
    given = torch.tensor([[0, 1, 0, 1]])
    for inputs, expected in (
        ({"position_ids": given}, [[0, 1, 0, 1]] * 2),
        ({"position_ids": given.expand(3, 1, 4)}, [[0, 1, 0, 1]] * 2),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}, [[0, 1, 2, 0], [1, 0, 1, 2]]),
        ({}, [[0, 1, 2, 3]] * 2),
    ):
        found, real = _tokens({"input_ids": ids, **inputs})
        assert found.tolist() == expected and real is None
    embeds = torch.zeros(1, 3, 8)
    assert _tokens({"input_ids": None, "inputs_embeds": embeds})[0].tolist() == [[0, 1, 2]]


def test_what_it_refuses_and_what_it_cannot_count(tmp_path) -> None:
    with pytest.raises(UserError, match="EfficiencyCallback: peak_tflops must be .* got -1"):
        longctx.EfficiencyCallback(peak_tflops=-1)
    trainer = Trainer(
        torch.nn.Linear(2, 2),
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=[{"x": torch.zeros(2)}],
        callbacks=[longctx.EfficiencyCallback()],
    )
    with pytest.raises(UserError, match="counts models of transformers; got Linear"):
        trainer.train()
    assert _tokens({"pixel_values": torch.zeros(1, 3)}) is None
    assert "num_attention_heads" in str(_why_no_mfu(MambaConfig()))
    assert _why_no_mfu(make_model().config) is None
