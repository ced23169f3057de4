"""Command lines as people type them: those that are understood, and what the others are told."""

from __future__ import annotations

import shlex

import pytest

from longctx.errors import UserError
from longctx.train import cli
from longctx.train.commands.train import QUICKSTART
from longctx.train.options.config import parse_flags
from longctx.train.report.plan import _parse
from longctx.train.start.options import parse_args

UNDERSTOOD = [
    ("--seq_len 128k", {"seq_len": 131072}),
    ("--seq_len 32K --tile_tokens 4k", {"seq_len": 32768, "tile_tokens": 4096}),
    ("--seq-len=1M", {"seq_len": 1048576}),
    ("--seq_len 0.5m", {"seq_len": 524288}),
    ("--seq_len 1e5", {"seq_len": 100000}),
    ("--seq_len 131_072", {"seq_len": 131072}),
    ("--dtype bf16", {"dtype": "bfloat16"}),
    ("--dtype BF16", {"dtype": "bfloat16"}),
    ("--dtype fp32", {"dtype": "float32"}),
    ("--preset Llama-3.1-8B", {"preset": "llama-3.1-8b"}),
    ("--preset llama3.1-8b", {"preset": "llama-3.1-8b"}),
    ("--preset meta-llama/Llama-3.3-70B", {"preset": "llama-3.3-70b"}),
    ("--preset qwen3_1.7B", {"preset": "qwen3-1.7b"}),
    ("--preset Qwen/Qwen2.5-0.5B", {"preset": "qwen2.5-0.5b"}),
    ("--preset Qwen3-VL-8B", {"preset": "qwen3-vl-8b"}),
    ("quickstart --max_steps 5", {"preset": "tiny", "max_steps": 5}),
    ("quickstart.yaml", {"preset": "tiny", "max_steps": 40}),
    ("llama-3.2-1b_32k", {"preset": "llama-3.2-1b", "seq_len": 32768}),
    ("lora --preset qwen3-8b", {"preset": "qwen3-8b", "lora_r": 16}),
    ("mine.yaml --seq_len 2k", {"preset": "llama-3.1-8b", "seq_len": 2048, "dtype": "bfloat16"}),
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch) -> None:
    """One with a recipe, a text and a model's folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("preset: Llama-3.1-8B\nseq_len: 128k\ndtype: bf16\n")
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "model").mkdir()
    (tmp_path / "lora").mkdir()


@pytest.mark.parametrize(("line", "means"), UNDERSTOOD)
def test_what_is_understood(line: str, means: dict[str, object]) -> None:
    found = parse_flags(line.split())
    assert {name: getattr(found, name) for name in means} == means


@pytest.mark.parametrize(
    ("line", "gpu", "gpus"),
    [
        ("--gpu 2x4090", "4090", 2),
        ("--gpu 8xH100 --gpus 8", "H100", 8),
        ("--gpu 4090 --gpus 2", "4090", 2),
        ("--gpu a100-40", "a100-40", 1),
        ("", None, 1),
    ],
)
def test_cards_of_a_plan(line: str, gpu: str | None, gpus: int) -> None:
    found, _ = _parse(line.split())
    assert (found.gpu, found.gpus) == (gpu, gpus)


def test_lengths_of_a_plan() -> None:
    words = "mine.yaml --document_tokens 8k --answer_tokens 1K --data_tokens 2.5B"
    found, flags = _parse(words.split())
    assert (found.document_tokens, found.answer_tokens) == (8192, 1024)
    assert found.data_tokens == 2.5e9 and flags == ["mine.yaml"]


TINY = "longctx train --preset tiny --use_cpu true "
PLAN = "longctx plan --preset llama-3.2-1b --host_memory_gib 64 "
MISTYPED = {
    # the command
    "longctx trian": "unknown command 'trian'; did you mean longctx train?",
    "longctx fine-tune": "unknown command 'fine-tune'; `longctx --help` lists all",
    "longctx --train": "unknown command '--train'; did you mean longctx train?",
    "longctx recipes quikstart": "no recipe 'quikstart'; did you mean quickstart",
    # the first word
    "longctx train book.txt": "'book.txt' is no recipe, which is a .yaml file: a model is --model_",
    "longctx train model": "'model' is no recipe",
    "longctx train mine.yml": "--config: cannot read mine.yml: no such file here",
    "longctx train mine.yaml --config quickstart": "'mine.yaml' and --config name two recipes",
    TINY + "mine.yaml": "unexpected word 'mine.yaml' on the command line; options start with --, "
    "and a recipe's name stands before them",
    "longctx train --output_dir runs/x": "no model was named: give --model_name_or_path or",
    # lengths
    TINY + "--seq_len 128kb": "--seq_len: a length is expected, as 131072, 128k or 1M, got '128kb'",
    TINY + "--seq_len 4096.5": "--seq_len: a length is expected",
    TINY + "--seq_len 131,072": "--seq_len: a length is expected",
    TINY + "--seq_len long": "--seq_len: a length is expected",
    TINY + "--seq_len": "--seq_len: expected one argument",
    TINY + "--seq_len 0": "--seq_len must be at least 1, got 0",
    TINY + "--seqlen 8k": "unknown option --seqlen; did you mean --seq_len?",
    TINY + "--max_seq_length 8k": "unknown option --max_seq_length: write --seq_len",
    PLAN + "--document_tokens 0": "--document_tokens must be at least 1, got 0",
    PLAN + "--answer_tokens few": "--answer_tokens: a length is expected",
    PLAN + "--data_tokens 2.5G": "--data_tokens: invalid number value: '2.5G'",
    "longctx eval model --eval_file book.txt --seq_len 32kb": "--seq_len: a length is expected",
    # names of models and dtypes
    TINY
    + "--preset llama-3-8b": "--preset: invalid choice: 'llama-3-8b'; did you mean llama-3.1-8b?",
    TINY + "--preset qwen3-17b": "--preset: invalid choice: 'qwen3-17b'; did you mean qwen3-1",
    TINY + "--preset Llama-3.1-8B-Instruct": "did you mean llama-3.1-8b?",
    TINY + "--preset gpt5": "--preset: invalid choice: 'gpt5'; Choose from tiny, ",
    TINY + "--dtype half": "--dtype: invalid choice: 'half'",
    TINY + "--dtype fp16": "--dtype: fp16: write --fp16, which computes in 16 bits",
    TINY + "--class_type unsloth": "--class_type: unsloth: Unsloth's kernels do not run here",
    TINY + "--task dop": "--task: invalid choice: 'dop'; did you mean dpo?",
    TINY + "--model m": "unknown option --model: write --model_name_or_path",
    # other trainers' options
    TINY
    + "--use_rslora": "unknown option --use_rslora: write --lora_alpha as ALPHA times the square",
    TINY + "--device_map auto": "unknown option --device_map: leave it out: a run takes the GPU",
    TINY + "--full_finetuning": "unknown option --full_finetuning: leave it out: without --lora_r",
    TINY + "--group_by_length": "unknown option --group_by_length: leave it out: all rows have",
    TINY + "--load_in_4bit": "unknown option --load_in_4bit: write --quantize nf4, with --lora_r",
    TINY + "--qlora": "unknown option --qlora: write --quantize nf4 and --lora_r RANK",
    TINY + "--r 16": "unknown option --r: write --lora_r RANK",
    TINY + "--packing": "unknown option --packing: leave it out: documents are always packed",
    TINY + "--lr 1e-5": "unknown option --lr: write --learning_rate",
    TINY + "--gradient_accumulation 4": "did you mean --gradient_accumulation_steps?",
    # adapters without a rank
    TINY
    + "--use_dora": "--use_dora: without --lora_r there are no adapters and the whole model is",
    TINY + "--lora_alpha 32": "--lora_alpha: without --lora_r there are no adapters",
    TINY + "--lora_alpha 32 --lora_dropout 0.1": "--lora_alpha, --lora_dropout: without --lora_r",
    TINY
    + "--quantize nf4": "--quantize rounds weights, which cannot be trained then: give --lora_r",
    PLAN + "--gpu 4090 --lora_alpha 32": "--lora_alpha: without --lora_r there are no adapters",
    # cards
    PLAN + "--gpu 2x4090 --gpus 4": "--gpu names 2 GPUs and --gpus 4: give one of the two",
    PLAN
    + "--gpu mi300x": "--gpu mi300x: this is an AMD GPU, and longctx plans and trains on NVIDIA "
    "alone: plan for b200",
    PLAN + "--gpu m2": "--gpu m2: this is a chip of Apple",
    PLAN + "--gpu v100": "computes bfloat16 without tensor cores (125 TFLOP/s in fp16",
    PLAN + "--gpu 4090-48gb": "rtx-4090 is known with 23.5 GiB",
    PLAN + "--gpu rtx4900": "no such machine is known; did you mean rtx-4090?",
    PLAN + "--gpu 24gb": "no such machine is known",
}


@pytest.mark.parametrize("line", MISTYPED)
def test_what_is_told(line: str) -> None:
    words = shlex.split(line)[1:]
    with pytest.raises(UserError) as error:
        if words[0] == "train":
            parse_args(words[1:], default_recipe=QUICKSTART)
        else:
            cli.run(words)
    assert MISTYPED[line] in str(error.value) and "\n" not in str(error.value)
