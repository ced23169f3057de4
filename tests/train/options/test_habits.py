"""Other trainers' options are answered with ours."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from longctx.errors import UserError
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.options.habits import HABITS
from longctx.train.options.limits import NOT_OURS
from longctx.train.start.options import parse_args

OURS = {f.name for kind in (ModelArguments, DataArguments, TrainArguments) for f in fields(kind)}
NAMES = OURS - NOT_OURS.keys() | {"config"}


def test_habits_name_options_that_there_are() -> None:
    for habit, says in HABITS.items():
        assert habit not in NAMES and habit == habit.lower(), habit
        named = set(re.findall(r"--(\w+)", says))
        assert named <= NAMES, habit
        assert named or "leave it out" in says, habit


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--max_length=8192", "unknown option --max_length: write --seq_len, the tokens in one"),
        ("--packing", "unknown option --packing: leave it out: documents are always packed"),
        ("--load-in-4bit", "unknown option --load_in_4bit: write --quantize nf4, with --lora_r"),
        ("--model", "unknown option --model: write --model_name_or_path"),
        ("--learning_rat", "unknown option --learning_rat; did you mean --learning_rate?"),
        ("--hub_model", "unknown option --hub_model; --help_all lists all options"),  # refused
        ("--zzz", "unknown option --zzz; --help_all lists all options"),
    ],
)
def test_an_unknown_flag_is_answered(flag: str, answer: str) -> None:
    with pytest.raises(UserError) as error:
        parse_args(["--preset", "tiny", flag])
    assert str(error.value).startswith(answer)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--class_type custom_optimized", "write --class_type custom"),
        ("--class_type auto", "write --class_type vanilla"),
        ("--dtype fp16", "write --fp16, which computes in 16 bits over fp32 weights"),
    ],
)
def test_another_trainers_value_is_answered(flag: str, answer: str, tmp_path) -> None:
    name, value = flag.removeprefix("--").split()
    (tmp_path / "r.yaml").write_text(f"{name}: {value}\n")
    for words in (flag.split(), ["--config", str(tmp_path / "r.yaml")]):
        with pytest.raises(UserError, match=f"--{name}: {value}: {answer}") as error:
            parse_args(["--preset", "tiny", *words])
        assert "\n" not in str(error.value)


def test_the_flags_of_the_project_before_this_one() -> None:
    flags = "use_grad_ckpt num_checkpoints use_torch_profiler recording_from_beginning ds_config"
    assert {*flags.split(), "max_input_length", "fsdp_option"} <= HABITS.keys()


def test_an_unknown_key_of_a_recipe_is_answered(tmp_path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("lora_rank: 8\n")
    with pytest.raises(UserError, match="unknown key 'lora_rank': write --lora_r RANK"):
        parse_args(["--config", str(recipe)])
