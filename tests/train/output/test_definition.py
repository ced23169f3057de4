"""A resumed run is the run that was begun: other rows or numbers are refused, the rest applied."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from small_run import logged, run

from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.engines.plain import Plain
from longctx.train.output.definition import define, differences

RESUME = ("--resume_from_checkpoint", "last", "--max_steps", "5")

REFUSED = {
    "seq_len": ("32", "seq_len 64 -> 32"),
    "seed": ("7", "seed 42 -> 7"),
    "data_seed": ("7", "data_seed None -> 7"),
    "long_documents": ("truncate", "long_documents split -> truncate"),
    "per_device_train_batch_size": ("2", "per_device_train_batch_size 1 -> 2"),
    "gradient_accumulation_steps": ("2", "gradient_accumulation_steps 1 -> 2"),
    "dtype": ("bfloat16", "dtype torch.float32 -> torch.bfloat16"),
    "lr_scheduler_type": ("cosine", "lr_scheduler_type linear -> cosine"),
    "warmup_steps": ("2", "warmup_steps 0 -> 2"),
    "optim": ("sgd", "optim adamw_torch(_fused)? -> sgd"),
    "adam_beta2": ("0.9", "adam_beta2 0.999 -> 0.9"),
    "max_grad_norm": ("3", "max_grad_norm 1 -> 3"),
    "label_smoothing_factor": ("0.1", "label_smoothing_factor 0 -> 0.1"),
    "train_file": ("OTHER", r"data \(the rows are not the same\)"),
}


TOGETHER = [
    *(["seed", "data_seed", "dtype", "lr_scheduler_type", "warmup_steps"], ["optim"]),
    *(["adam_beta2", "max_grad_norm", "label_smoothing_factor", "long_documents"], ["train_file"]),
    ["seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"],
]
"""Options that one run changes; each is named in its refusal."""


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_another_run_is_refused_by_the_difference(flags, copy, tmp_path, names) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text " * 200)
    changed = [f"--{name}={REFUSED[name][0].replace('OTHER', str(other))}" for name in names]
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="checkpoint-4 is of another run: ") as error:
        run(flags, copy, *RESUME, *changed)
    said, _, allowed = str(error.value).partition("--allow_changed ")
    for name in names:
        assert re.search(rf"[:,] {REFUSED[name][1]}", said), name
    parts = {"data" if name == "train_file" else name for name in names}
    assert {*allowed.split()} - {"data"} == parts - {"data"} and parts <= {*allowed.split()}
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_each_option_of_another_run_is_changed_once() -> None:
    assert sorted(REFUSED) == sorted(name for names in TOGETHER for name in names)


def test_a_tokenizer_that_draws_is_named_as_the_cause(flags, copy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "varies", lambda tokenizer: True)
    other = tmp_path / "other.txt"
    other.write_text("another text " * 200)
    with pytest.raises(UserError, match="the tokenizer makes other tokens of a text each time, an"):
        run(flags, copy, *RESUME, "--train_file", str(other))


def test_all_differences_are_named_and_what_is_allowed_goes_on(flags, copy) -> None:
    changes = ["--seed", "7", "--adam_beta2", "0.9"]
    with pytest.raises(UserError, match="seed 42 -> 7, adam_beta2 0.999 -> 0.9"):
        run(flags, copy, *RESUME, *changes)
    with pytest.raises(UserError, match="run: adam_beta2"):
        run(flags, copy, *RESUME, *changes, "--allow_changed", "seed")
    lines = run(flags, copy, *RESUME, *changes, "--allow_changed", "seed", "adam_beta2")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    optimizer = torch.load(copy / "checkpoint-5" / "optimizer.pt", weights_only=True)
    assert {group["betas"] for group in optimizer["param_groups"]} == {(0.9, 0.9)}


def test_an_unknown_name_is_refused(flags, copy) -> None:
    with pytest.raises(
        UserError, match="--allow_changed seeds: no such part of a run; did you mean seed"
    ):
        run(flags, copy, *RESUME, "--allow_changed", "seeds")


def test_what_is_changed_on_purpose_is_applied_and_said(flags, copy, capsys) -> None:
    """The scheduler's and the optimizer's states hold the old values; so does Trainer's own."""
    changes = "--learning_rate 0.001 --weight_decay 0.5 --save_steps 5 --logging_steps 2".split()
    lines = run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "8", *changes)
    said = capsys.readouterr().out
    for change in (
        "learning_rate 0.003 -> 0.001",
        "weight_decay 0 -> 0.5",
        "save_steps 2 -> 5",
    ):
        assert change in said
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6, 8]
    assert (copy / "checkpoint-5").is_dir() and not (copy / "checkpoint-6").exists()
    optimizer = torch.load(copy / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert sorted(group["weight_decay"] for group in optimizer["param_groups"]) == [0.0, 0.5]
    # Linear decay over 8 steps; logged is the rate of the step that was just done.
    assert [line["learning_rate"] for line in lines[-2:]] == pytest.approx(
        [0.001 * 3 / 8, 0.001 / 8]
    )


def test_unchanged_options_change_no_bit(flags, copy, finished, tmp_path) -> None:
    longer = [*flags, "--max_steps", "6"]
    whole = run(longer, tmp_path / "whole")
    run(longer, tmp_path / "again", "--save_steps", "3")
    shutil.rmtree(tmp_path / "again" / "checkpoint-6")
    resumed = run(longer, tmp_path / "again", "--resume_from_checkpoint", "last")
    for key in ("loss", "learning_rate", "grad_norm"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]


def test_a_checkpoint_of_another_program_says_nothing_to_compare(flags, copy, capsys) -> None:
    (copy / "checkpoint-4" / "manifest.json").unlink()
    run(flags, copy, *RESUME, "--max_grad_norm", "3")
    assert "does not say what it was trained with" in capsys.readouterr().out
    assert logged(copy)[-1]["step"] == 5


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_an_optimizer_that_is_not_there_is_no_start_from_zero(flags, copy, name) -> None:
    (copy / "checkpoint-4" / name).unlink()
    (copy / "checkpoint-4" / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"checkpoint-4 holds no {name.split('.')[0]}"):
        run(flags, copy, "--resume_from_checkpoint", str(copy / "checkpoint-4"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["state"].clear(), "has no states"),
        (lambda state: [group.pop("betas") for group in state["param_groups"]], "has no betas"),
    ],
    ids=["empty", "of another kind"],
)
def test_an_optimizer_of_another_kind(flags, copy, change, says) -> None:
    path = copy / "checkpoint-4" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    (copy / "checkpoint-4" / "manifest.json").unlink()
    with pytest.raises(UserError, match=rf"is not of this run's kind \({says}"):
        run(flags, copy, *RESUME)


def test_what_an_engine_keeps_from_the_checkpoint_cannot_be_changed(flags, copy, monkeypatch):
    monkeypatch.setattr(Plain, "keeps_options", ("weight_decay",))
    changed = [*RESUME, "--weight_decay", "0.5", "--allow_changed", "weight_decay"]
    with pytest.raises(UserError, match=r"weight_decay 0 -> 0.5 .* cannot be changed: this engine"):
        run(flags, copy, *changed)
    run(flags, copy, *RESUME, "--learning_rate", "0.001")


@pytest.mark.parametrize(
    ("name", "what"),
    [("base", "frozen weights"), ("reference", "reference"), ("teacher", "teacher")],
)
def test_models_that_no_checkpoint_holds_are_compared(name: str, what: str) -> None:
    """Only where both say which one it was: what an earlier version saved did not."""
    same = {"dtype": "x", "data": "y", "model": {}, "num_processes": 1}
    before, now = (define([], **same, **{name: word}) for word in ("one", "two"))
    changed = differences(before, now)
    assert list(changed) == [name]
    assert f"{name} (the {what}" in changed[name] and "one -> two" in changed[name]
    assert not differences(define([], **same), now)


def test_images_that_changed_are_named() -> None:
    """Of runs that both say which they had, unless other rows say more."""
    now = {"data": "x", "model": {}, "pictures": "b"}
    assert [*differences({**now, "pictures": "a"}, now)] == ["pictures"]
    assert not differences({"data": "x", "model": {}}, now)
    assert [*differences({**now, "data": "y", "pictures": "a"}, now)] == ["data"]
    assert [*differences({**now, "seed": 1, "pictures": "a"}, {**now, "seed": 2})] == ["seed"]
