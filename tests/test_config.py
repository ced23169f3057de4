"""Options: flags and recipes are strict, flags win, and errors name the closest valid name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from transformers import TrainingArguments

from longctx.config import DataArguments, ModelArguments, TrainArguments
from longctx.errors import UserError
from longctx.run.options import parse_args


def test_flags_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("preset: tiny\nseq_len: 512\nbf16: true\nadam_beta2: 0.95\n")
    model, _, train, _ = parse_args(["--config", str(recipe), "--seq_len", "1024", "--use_cpu"])
    assert (model.preset, model.seq_len) == ("tiny", 1024)
    assert train.adam_beta2 == 0.95
    assert train.bf16 and model.dtype == "float32"  # 16-bit compute over fp32 weights
    with pytest.raises(UserError, match="drop one of the two"):
        parse_args(["--config", str(recipe), "--dtype", "bfloat16", "--use_cpu"])


def test_one_process_uses_one_gpu(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    begin = TrainingArguments.__post_init__
    monkeypatch.setattr(
        TrainingArguments, "__post_init__", lambda self: (begin(self), setattr(self, "_n_gpu", 2))
    )
    _, _, args, engine = parse_args(["--use_cpu"])
    engine.start(args)
    assert args.n_gpu == 1
    assert "accelerate launch --num_processes 2" in capsys.readouterr().out


def test_recipe_lists_and_dicts(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "train_file: [a.txt, 'b c.txt']\nlr_scheduler_type: cosine\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\nmax_steps: null\n"
    )
    _, data, train, _ = parse_args(["--config", str(recipe)])
    assert data.train_file == ["a.txt", "b c.txt"]
    assert train.lr_scheduler_kwargs == {"num_cycles": 2}
    assert train.max_steps == -1


def test_the_default_recipe_serves_only_runs_that_name_no_job(tmp_path: Path) -> None:
    recipe = tmp_path / "quickstart.yaml"
    recipe.write_text("preset: tiny\nmax_steps: 7\n")
    assert parse_args(["--class_type", "vanilla"], default_recipe=recipe)[2].max_steps == 7
    for job in (["--preset", "tiny"], ["--train-file", "a.txt"], ["--model_name_or_path=m"]):
        assert parse_args(job, default_recipe=recipe)[2].max_steps == -1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seqlen", "8"], "unknown option --seqlen; did you mean --seq_len?"),
        (["--seq", "8"], "unknown option --seq; did you mean --"),  # no abbreviations
        (["stray"], "unexpected word 'stray'"),
        (["--class_type", "fast"], "invalid choice: 'fast'"),
        (["--seq_len", "4k"], "invalid int value: '4k'"),
        (["--seq_len", "0"], "--seq_len must be at least 1, got 0"),
        (["--seq_len", "-4096"], "got -4096"),
        (["--preset", "tiny", "--model_name_or_path", "m"], "not both"),
        (["--train_file", "a", "--dataset_name", "b"], "not both"),
        (["--streaming", "--train_file", "a"], "--streaming reads a --dataset_name"),
        (["--dataset_name", "d", "--streaming"], "--max_steps"),
        (["--peak_tflops", "0"], "--peak_tflops must be above 0"),
        (["--save_strategy", "sometimes"], "sometimes"),
        (["--use_liger_kernel", "true"], "--use_liger_kernel would replace the model's forward"),
        (["--enable_jit_checkpoint", "true"], "--enable_jit_checkpoint would handle SIGTERM"),
        (["--fsdp", "true", "--fsdp_config", "gone.json"], "cannot read gone.json: No such file"),
        (["--preset", "tiny", "--dtype", "float16"], "AdamW's eps of 1e-8 is 0"),
        (["--deepspeed", "{bad"], "--deepspeed {bad: not JSON: Expecting property name"),
        (["--fsdp_config", "{bad"], "--fsdp_config {bad: not JSON: Expecting property name"),
        (["--deepspeed", "gone.json"], "cannot read gone.json: No such file"),
        (["--config", "missing.yaml"], "cannot read missing.yaml: No such file"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_args(flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq_lenn: 8", "unknown key 'seq_lenn'; did you mean seq_len?"),
        ("seq_len: [", "is not valid YAML"),
        ("- a\n- b", "must hold `key: value` lines"),
        ("seq_len: long", "invalid int value: 'long'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("!!python/object/apply:os.system ['true']", "must hold `key: value` lines"),
    ],
)
def test_bad_recipes_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError) as error:
        parse_args(["--config", str(recipe)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_published_recipes_name_valid_options_and_files(recipe: Path) -> None:
    options = yaml.safe_load(recipe.read_text())
    classes = (ModelArguments, DataArguments, TrainArguments)
    assert options.keys() <= {field.name for c in classes for field in dataclasses.fields(c)}
    named = re.findall(r"(?:recipes|ds_configs|fsdp_configs)/[\w.-]+", recipe.read_text())
    assert all((ROOT / path).is_file() for path in named)
