"""train.py end to end on the CPU: it learns, resumes exactly, saves whole, refuses bad input."""

from __future__ import annotations

import functools
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.errors import UserError
from longctx.train.commands import train
from longctx.train.output import METRICS
from longctx.train.report import sample as sampling
from longctx.train.trainer.trainer import LongTrainer

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Twelve documents of about 700 words that repeat enough to be learned in a few steps."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        sentence = f"Chapter {i}. The quick brown fox number {i} jumps over the lazy dog. "
        (folder / f"{i}.txt").write_text(sentence * 50)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(corpus: Path, cache: Path, tmp_path: Path):
    """Calls train.py's main with small defaults; returns the metrics of the logged steps."""

    def run(*flags: str, output: str = "run", data: bool = True) -> list[dict[str, float]]:
        base = ["--preset", "tiny", "--seq_len", "128", "--max_steps", "6", "--use_cpu"]
        base += ["--learning_rate", "0.003", "--cache_dir", str(cache), "--save_strategy", "no"]
        base += ["--output_dir", str(tmp_path / output), "--disable_tqdm", "true"]
        base += ["--train_file", str(corpus)] if data else []
        train.main([*base, *flags])
        return metrics(tmp_path / output)

    return run


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / METRICS).read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def losses(lines: list[dict[str, float]]) -> list[float]:
    return [line["loss"] for line in lines]


def test_it_learns_and_saves_what_transformers_loads(run, tmp_path: Path, capsys) -> None:
    lines = run("--max_steps", "20")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert losses(lines)[-1] < losses(lines)[0] - 1
    for line in lines:
        keys = {"loss", "learning_rate", "grad_norm", "tokens_per_s", "peak_host_gib", "step_s"}
        assert keys <= line.keys()
        assert all(math.isfinite(value) for value in line.values())
    final = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    ids = tokenizer("The quick brown", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4).shape[1] == ids.shape[1] + 4
    out = capsys.readouterr().out
    assert out.count("patched: 4 scheduled decoder layers") == 1
    assert "tokens/s" in out


def test_vanilla_and_custom_agree_step_by_step(run) -> None:
    vanilla = losses(run("--class_type", "vanilla", output="vanilla"))
    custom = losses(run("--class_type", "custom", output="custom"))
    assert custom == pytest.approx(vanilla, rel=2e-5)


def test_vanilla_and_single_parts_agree_step_by_step(run, capsys) -> None:
    few = ("--max_steps", "2", "--label_smoothing_factor", "0.1")
    vanilla = losses(run("--class_type", "vanilla", *few, output="vanilla"))
    for loss in ("cross_entropy", "fused_linear_cross_entropy"):
        parts = ("--parts", "rope", "rms_norm", "swiglu", loss)
        assert losses(run(*parts, *few, output=loss)) == pytest.approx(vanilla, rel=2e-5)
        said = capsys.readouterr().out
        assert f"patched: rope, rms_norm, swiglu, {loss}, in Hugging Face's layers" in said
        assert "Hugging Face's layers run" not in said


def test_label_smoothing_agrees_without_full_logits(run, monkeypatch) -> None:
    flags = ("--label_smoothing_factor", "0.1", "--gradient_accumulation_steps", "2")
    flags += ("--max_steps", "2")
    vanilla = losses(run("--class_type", "vanilla", *flags, output="vanilla"))
    monkeypatch.setattr(torch.nn.Linear, "forward", refuse_vocabulary(torch.nn.Linear.forward))
    custom = losses(run("--class_type", "custom", *flags, output="custom"))
    assert custom == pytest.approx(vanilla, rel=2e-5)


def refuse_vocabulary(forward):
    @functools.wraps(forward)  # or the schedule would not know it
    def checked(self, x):
        assert self.out_features != 8192, "lm_head was called for full logits"
        return forward(self, x)

    return checked


def test_gradient_accumulation_is_one_larger_batch(run) -> None:
    """Rows differ in trained tokens, so a mean of means would differ."""
    steps = ("--max_steps", "3")
    whole = losses(run("--per_device_train_batch_size", "2", *steps, output="whole"))
    parts = losses(run("--gradient_accumulation_steps", "2", *steps, output="parts"))
    assert parts == pytest.approx(whole, rel=2e-5)


def test_same_seed_same_losses(run) -> None:
    seeds = {"a": "1", "b": "1", "c": "2"}
    first, second, other = (
        losses(run("--seed", s, "--max_steps", "2", output=o)) for o, s in seeds.items()
    )
    assert first == second != other


def test_resume_continues_with_identical_losses(run, tmp_path: Path, capsys) -> None:
    save = ("--save_strategy", "steps", "--save_steps", "3", "--lr_scheduler_type", "cosine")
    whole = run(*save, output="whole")
    run(*save, output="parts")
    checkpoint = tmp_path / "parts" / "checkpoint-3"
    before = load_file(tmp_path / "parts" / "final" / "model.safetensors")
    with (tmp_path / "parts" / METRICS).open("a") as file:
        file.write('{"step": 7, "lo')  # killed while it wrote a line
    resumed = run(*save, "--resume_from_checkpoint", str(checkpoint), output="parts")
    said = capsys.readouterr().out
    assert f"resuming from {checkpoint}, after step 3" in said
    assert said.count(f"\nsaved {checkpoint} (0.") == 1  # and checkpoint-6, twice
    assert said.count(f"\nsaved {checkpoint.with_name('checkpoint-6')} (0.") == 2
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]
    after = load_file(tmp_path / "parts" / "final" / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_run_killed_while_saving_leaves_no_checkpoint(run, tmp_path: Path, monkeypatch) -> None:
    def dies(self, output_dir: str) -> None:
        assert (Path(output_dir) / "model.safetensors").exists()  # the weights are there already
        raise KeyboardInterrupt

    save = ("--save_strategy", "steps", "--save_steps", "2", "--max_steps", "4")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LongTrainer, "_save_rng_state", dies)
        run(*save)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    with pytest.raises(UserError, match="holds no checkpoint"):
        run(*save, "--resume_from_checkpoint", "last")
    run(*save, "--overwrite_output_dir")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint-2", "checkpoint-4", "final"} <= names
    assert not any(name.startswith(".incomplete") for name in names)


def test_old_checkpoints_are_rotated(run, tmp_path: Path) -> None:
    save = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2")
    run(*save, "--max_steps", "4")
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-3", "checkpoint-4"]


def test_best_checkpoint_is_found_after_the_rename(run, corpus, tmp_path, capsys) -> None:
    """What its step evaluated is what "Done" shows: no evaluation is made twice."""
    run(
        *("--eval_file", str(corpus / "0.txt"), "--eval_strategy", "steps", "--eval_steps", "2"),
        *("--save_strategy", "steps", "--save_steps", "2", "--load_best_model_at_end"),
        *("--max_steps", "4"),
    )
    newest = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    best = json.loads(newest.read_text())["best_model_checkpoint"]
    assert Path(best).is_dir()
    assert "incomplete" not in best
    lines = map(json.loads, (tmp_path / "run" / METRICS).read_text().splitlines())
    evaluated = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert [*evaluated] == [2, 4]
    out = capsys.readouterr().out
    assert out.count("eval loss") == 2
    assert f"evaluation loss │ {min(evaluated.values()):.4f}" in out


def test_chat_data_and_evaluation(run, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sampling, "TOKENS", 8)
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    chat.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(60)))
    flags = ("--train_file", str(chat), "--eval_file", str(chat))
    lines = run(*flags, "--num_train_epochs", "3", data=False)
    assert losses(lines)[-1] < losses(lines)[0]
    text = (tmp_path / "run" / METRICS).read_text()
    assert text.count('"eval_loss"') == 1
    out = capsys.readouterr().out
    assert re.search('text begins *│ ".*Hi', out) and re.search('model goes on *│ "', out)


def test_a_saved_model_is_trained_further(run, tmp_path: Path) -> None:
    first = losses(run(output="first"))
    flags = ("--model_name_or_path", str(tmp_path / "first" / "final"))
    with pytest.raises(UserError, match="not both"):
        run(*flags, output="second")
    recipe = tmp_path / "second.yaml"
    recipe.write_text(f"model_name_or_path: {tmp_path / 'first' / 'final'}\npreset: null\n")
    base = ["--seq_len", "128", "--max_steps", "2", "--use_cpu", "--save_strategy", "no"]
    base += ["--train_file", str(tmp_path / "first" / "final" / "x.txt")]
    (tmp_path / "first" / "final" / "x.txt").write_text("The quick brown fox jumps. " * 100)
    base += ["--output_dir", str(tmp_path / "second"), "--cache_dir", str(tmp_path / "c")]
    train.main(["--config", str(recipe), *base])
    assert losses(metrics(tmp_path / "second"))[0] < first[0]


def test_short_host_memory_is_named_before_the_first_step(run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GiB short.*--keep x"):
        run("--offload_activations", "all", "--host_memory_gib", "0.0001")
    assert not (tmp_path / "run" / METRICS).exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file", "/no/such/file.txt"], "/no/such/file.txt"),
        (["--class_type", "liger"], "liger"),
        (["--attn_backend", "cudnn"], "--attn_backend cudnn needs a GPU"),
        (["--seq_len", "999999999"], "--extend_context"),
        (["--resume_from_checkpoint", "/no/such/folder"], "no such folder"),
    ],
)
def test_bad_input_ends_before_any_output(run, tmp_path: Path, flags, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(*flags)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / METRICS).exists()


def test_an_error_is_one_line_and_a_failing_exit(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--seq_length", "5"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert end.value.code == (
        "error: unknown option --seq_length: write --seq_len, the tokens in one packed row"
    )
    assert capsys.readouterr().err == ""
