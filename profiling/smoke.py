"""Runs the product's own command lines on the GPUs that are here, as a user types them.

    python profiling/smoke.py                 all cases that these GPUs can run
    python profiling/smoke.py zero3 dpo       the cases whose name has one of these words
    python profiling/smoke.py --list          the cases with their commands
    python profiling/smoke.py --output profiling/results/gpu_smoke.json
    python profiling/smoke.py --limit_s 450   those that are running by then fail
    python profiling/smoke.py --rest --output profiling/results/gpu_smoke.json
                                              those that this file does not call passed

Tests run without a GPU, and benchmarks build their trainer themselves: this alone goes through the
command line, its plan, its engines and its files on CUDA. A case is one command or several in turn.
It fails by a command's exit status, by its time, by a traceback, where a line that it must print is
missing, and where Hugging Face's layers ran in place of the schedule. Cases with a model of
published size share a GPU by its memory (three on 80 GB, fewer where one is large), beside six with
a tiny one; those that took longest in the published results begin first.

A line tells what became of each case; the exit status is 1 if one failed. Rows of the results:
case, gpus, on (which ones), outcome, s, and where a case failed, the line that says why. Cases that
`--limit_s` leaves no time to begin have no row. What commands print stays in --logs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from transformers import GPT2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from longctx.constants import GIB
from profiling.results import read_rows, results_file, write_results

ROOT = Path(__file__).resolve().parents[1]
Words = tuple[str, ...]

LIMIT_S = 300
"""Seconds that a case may take. The slowest compiles kernels and takes about 60."""
BUDGET: Words = ("--gpu_memory_gib", "18")
PLACE_GIB = 26
"""GPU memory of a case that may take BUDGET or somewhat more."""
TINY_ONES = 6
"""Cases of tiny models that share a GPU."""
PUBLISHED = ROOT / "profiling/results/gpu_smoke.json"
SEVERAL = (2, 4, 8)
"""GPUs of the cases of several."""
PORTS = count(21001)
"""For launchers that would look for a free port, which another case may take before they do. Below
those that systems give to connections."""
TINY_HEADS = 4
"""Attention heads of the tiny model, which GPUs that share a row divide among them."""

TRAIN: Words = (sys.executable, "-m", "longctx", "train")
NO_SAVES: Words = ("--save_strategy", "no", "--save_only_model")
SMALL: Words = (
    *"--preset llama-3.2-1b --seq_len 4096 --max_steps 2".split(),
    *NO_SAVES,
    *BUDGET,
)
"""A model of published size, whose final/ is written and no checkpoint."""
TINY: Words = tuple("--preset tiny --seq_len 2048 --max_steps 4".split())
SAVES: Words = ("--save_steps", "2")
LORA: Words = ("--lora_r", "4")
FSDP2_OFFLOAD: Words = ("--fsdp", "true", "--fsdp_config", "fsdp2_offload")
SCHEDULE = r"custom: \w+, "
"""The line that says what was patched."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a user does, and how it is known to have worked."""

    name: str
    commands: tuple[Words, ...]
    gpus: int = 1
    places: int = 1
    """How many cases of its size a GPU could run in its place."""
    prints: tuple[str, ...] = ()
    """Patterns, each of which a line of the output has."""
    vanilla: bool = False
    """Whether Hugging Face's layers are meant to run, or what is printed speaks of them."""

    @property
    def is_tiny(self) -> bool:
        return any("tiny" in word for command in self.commands for word in command)


def torchrun(processes: int, *words: str) -> Words:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*launcher, f"--nproc_per_node={processes}", "-m", "longctx", "train", *words)


def accelerate(processes: int, file: str, *words: str) -> Words:
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file)
    how = ("--num_processes", str(processes), "--main_process_port", str(next(PORTS)))
    return (*launcher, *how, "train.py", *words)


class Inputs:
    """The small data and the models that cases read, in a folder of this run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        numbers = range(64)
        self.pairs = self._write(
            "pairs",
            (
                {"prompt": f"Say {i}.", "chosen": f" It is {i}.", "rejected": " No."}
                for i in numbers
            ),
        )
        self.ratings = self._write(
            "ratings",
            (
                {"prompt": f"Say {i}.", "completion": f" It is {i}.", "label": i % 2 == 0}
                for i in numbers
            ),
        )
        self.answers = self._write(
            "answers", ({"prompt": f"Say {i}.", "completion": f" It is {i}."} for i in numbers)
        )
        self.chats = self._write("chats", (_chat(i) for i in range(512)))
        self.book = str(folder / "book.txt")
        """One document of 100,000 words."""
        sentences = [f"It was {i * i % 9973}." for i in range(33_334)]
        Path(self.book).write_text(" ".join(sentences))
        letters = (" ".join(sentences[i : i + 30 + 37 * i % 121]) for i in range(300))
        self.letters = self._write("letters", ({"text": letter} for letter in letters))
        """Documents of 150 to 750 tokens."""
        self.files = folder / "files"
        """A folder as people have it: one list of conversations in JSON, a table, and a note."""
        self.files.mkdir(exist_ok=True)
        chats, table = map(_chat, range(256)), ("text", *(f"It was {i}." for i in numbers))
        (self.files / "chats.json").write_text(json.dumps([*chats]))
        (self.files / "texts.csv").write_text("\n".join(table))
        (self.files / "README.md").write_text("These are numbers.")
        self.gpt2 = str(folder / "gpt2")
        """The configuration of a model without a family."""
        GPT2Config().save_pretrained(self.gpt2)
        self.base = str(folder / "base/final")
        """A whole model of published size, which the first case trains."""
        self.adapter = str(folder / "lora/final")

    def _write(self, name: str, records: Iterator[dict[str, Any]]) -> str:
        path = self.folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return str(path)

    def at(self, name: str) -> Words:
        """The option that sends a run to a folder of its own."""
        return ("--output_dir", str(self.folder / name))


def _chat(i: int) -> dict[str, Any]:
    answer = " ".join(f"It is {i * j % 97}." for j in range(40))
    turns = ("user", f"Say {i}."), ("assistant", answer)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def first_case(inputs: Inputs) -> Case:
    """The run whose model others read."""
    return Case(
        name="custom",
        commands=((*TRAIN, *SMALL, *inputs.at("base")),),
        prints=(SCHEDULE, "predicted and measured"),
    )


def cases(inputs: Inputs) -> Iterator[Case]:
    """All other cases of one GPU, and those of several."""
    yield from _class_types(inputs)
    yield from _memory(inputs)
    yield from _every_kth_input(inputs)
    yield from _graphs(inputs)
    yield from _engines(inputs)
    yield from _adapters(inputs)
    yield from _packed_bases(inputs)
    yield from _tasks(inputs)
    yield from _commands(inputs)
    for n in SEVERAL:
        yield from _several_gpus(inputs, n)


def _class_types(inputs: Inputs) -> Iterator[Case]:
    for kind in ("vanilla", "liger"):
        command = (*TRAIN, *SMALL, "--class_type", kind, *inputs.at(kind))
        yield Case(name=kind, commands=(command,), prints=(f"{kind}: ",), vanilla=True)
    words = ("--class_type", "vanilla", "--offload_activations", "all")
    command = (*TRAIN, *SMALL, *words, *inputs.at("vanilla_offloaded"))
    yield Case(name="vanilla_offloaded", commands=(command,), prints=("vanilla: ",), vanilla=True)
    parts = ("--parts", "rope", "rms_norm", "swiglu")
    for kind, loss in (("custom", "fused_linear_cross_entropy"), ("liger", "cross_entropy")):
        name = f"{kind}_parts"
        command = (*TRAIN, *SMALL, "--class_type", kind, *parts, loss, *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(loss,), vanilla=True)
    for preset in ("gemma-3-1b",):
        words = ("--preset", preset, "--seq_len", "4096", "--max_steps", "2", *NO_SAVES)
        command = (*TRAIN, *words, *BUDGET, *inputs.at(preset))
        yield Case(name=preset, commands=(command,), prints=(SCHEDULE,))
    yield from _experts(inputs)
    yield from _hybrids(inputs)
    yield from _any_model(inputs)
    command = (*TRAIN, "--model_name_or_path", inputs.base, "--seq_len", "4096", "--max_steps", "2")
    command = (*command, *NO_SAVES, *BUDGET, *inputs.at("from_folder"))
    yield Case(name="from_folder", commands=(command,), prints=(SCHEDULE,))


def _experts(inputs: Inputs) -> Iterator[Case]:
    """Mixtures: tiny with its checkpoints, one of published size with adapters, and two engines."""
    moe = ("--preset", "tiny-moe", "--seq_len", "2048", "--max_steps", "4")
    oss = ("--preset", "tiny-gpt-oss", *moe[2:])
    runs: dict[str, Words] = {
        "experts": (*TRAIN, *moe, *SAVES),
        "experts_lora": (*TRAIN, *moe, *LORA),
        "experts_qlora": (*TRAIN, *moe, *LORA, "--quantize", "nf4"),
        "experts_qlora_host": (*TRAIN, *moe, *LORA, "--quantize", "nf4", "--place", "host"),
        "experts_place_host": (*TRAIN, *moe, "--place", "host"),
        "experts_dpo": (*TRAIN, *moe, "--task", "dpo", "--train_file", inputs.pairs),
        "experts_zero3": torchrun(1, *moe, "--deepspeed", "zero3"),
        "experts_fsdp2": accelerate(1, "fsdp_configs/fsdp2.yaml", *moe),
        "experts_vanilla": (*TRAIN, *moe, "--class_type", "vanilla"),
        "gpt_oss": (*TRAIN, *oss, *SAVES),
        "gpt_oss_lora": (*TRAIN, *oss, *LORA),
        "gpt_oss_fsdp2": accelerate(1, "fsdp_configs/fsdp2.yaml", *oss),
    }
    for name, command in runs.items():
        vanilla = "--class_type" in command
        prints = ("vanilla: ",) if vanilla else (SCHEDULE,)
        commands = ((*command, *inputs.at(name)),)
        yield Case(name=name, commands=commands, prints=prints, vanilla=vanilla)
    own = inputs.at("experts_from_folder")
    read = ("--model_name_or_path", f"{own[1]}/final", *moe[2:], *LORA, "--place", "host")
    again = (*TRAIN, *read, *inputs.at("experts_from_folder_again"))
    yield Case(
        name="experts_from_folder",
        commands=((*TRAIN, *moe, *own), again),
        prints=(SCHEDULE, "routers are frozen"),
    )
    # Random weights are made on the GPU, 14, 27 and 42 GiB, before some of them move to the host.
    for preset, places in {
        "olmoe-1b-7b": 1,
        "qwen1.5-moe-a2.7b": 2,
        "ernie-4.5-21b-a3b": 2,
    }.items():
        words = f"--preset {preset} --seq_len 4096 --max_steps 2 --lora_r 16".split()
        command = (*TRAIN, *words, *NO_SAVES, *BUDGET, *inputs.at(preset))
        prints = (SCHEDULE, "routers are frozen")
        yield Case(name=preset, commands=(command,), places=places, prints=prints)


def _hybrids(inputs: Inputs) -> Iterator[Case]:
    """Mixers in segments: tiny, and of published sizes with adapters."""
    tiny = ("--preset", "tiny-hybrid", "--seq_len", "40000", "--max_steps", "3")
    for name, words in {"hybrid": (), "hybrid_lora": LORA}.items():
        command = (*TRAIN, *tiny, *words, *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(SCHEDULE,))
    packed = (*TRAIN, *tiny[:2], *TINY[2:], "--class_type", "vanilla", *inputs.at("hybrid_vanilla"))
    yield Case(name="hybrid_vanilla", commands=(packed,), vanilla=True)
    for preset in ("qwen3.5-9b", "lfm2-1.2b", "falcon-h1-0.5b", "granite-4.0-h-tiny"):
        words = f"--preset {preset} --seq_len 16384 --max_steps 2 --lora_r 16".split()
        command = (*TRAIN, *words, *NO_SAVES, *BUDGET, *inputs.at(preset))
        yield Case(name=preset, commands=(command,), prints=(SCHEDULE,))


def _any_model(inputs: Inputs) -> Iterator[Case]:
    """Hugging Face's layers as checkpoints of ours, whose inputs wait on the host."""
    words = ("--class_type", "any", "--offload_activations", "all")
    own = "checkpointed layers of Hugging Face's, our attention, lm_head"
    runs = {
        "any": SMALL,
        "any_lora": (*TINY, *LORA),
        "any_gpt_oss": ("--preset", "tiny-gpt-oss", *TINY[2:]),
        "any_gemma4": ("--preset", "gemma-4-default", *SMALL[2:], *LORA),
    }
    for name, more in runs.items():
        command = (*TRAIN, *more, *words, *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(own,), vanilla=True)
    plan = (sys.executable, "-m", "longctx", "plan", "--class_type", "any")
    plan = (*plan, "--model_name_or_path", inputs.gpt2, "--seq_len", "1024")
    yield Case(name="any_plan", commands=(plan,), prints=("memory, not speed",), vanilla=True)


def _memory(inputs: Inputs) -> Iterator[Case]:
    options = {
        "place_host": "--place host --gradient_accumulation_steps 2",
        "small_budget": "--gpu_memory_gib 10 --seq_len 16384",
        "keep_all_on_host": "--keep all --offload_activations all",
        "no_dropout": "--dropout 0",
        "keep_o": "--keep o --offload_activations none",
        "as_weights": "--optimizer_states as_weights",
        "bf16_over_fp32": "--dtype float32 --bf16",
        "adamw_of_torch": "--optim adamw_torch_fused --optimizer_states as_weights",
    }
    for name, text in options.items():
        yield Case(
            name=name,
            commands=((*TRAIN, *SMALL, *text.split(), *inputs.at(name)),),
            prints=(SCHEDULE,),
        )


def _every_kth_input(inputs: Inputs) -> Iterator[Case]:
    """Hosts so small that layers run forward again in backward, with weights here and there."""
    long = "--seq_len 131072 --gpu_memory_gib 10"
    options = {
        "every_kth_input": f"{long} --host_memory_gib 4 --lora_r 4",
        "every_kth_place_host": f"{long} --host_memory_gib 20 --place host",
    }
    for name, text in options.items():
        command = (*TRAIN, *SMALL, *text.split(), *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(SCHEDULE, "one layer in "))


def _graphs(inputs: Inputs) -> Iterator[Case]:
    """Steps enough to record the layers, over whole weights, adapters, several batches a step, and
    each kind of mixer, over a row of one document and of several."""
    small = "--preset smollm2-135m"
    options = {
        "graphs": small,
        "graphs_accumulate": f"{small} --gradient_accumulation_steps 2",
        "graphs_qlora": "--lora_r 4 --quantize nf4",
        "graphs_in_8_gib": "--lora_r 4 --quantize nf4 --gpu_memory_gib 8",
        "graphs_dpo": f"--task dpo --train_file {inputs.pairs} --lora_r 4",
        "graphs_delta_net": f"--preset tiny-hybrid --lora_r 4 --train_file {inputs.book}",
        "graphs_packed": f"--preset tiny-hybrid --lora_r 4 --train_file {inputs.letters}",
        "graphs_mamba": f"--preset falcon-h1-0.5b --lora_r 4 --train_file {inputs.letters}",
        "graphs_convolution": f"--preset lfm2-1.2b --lora_r 4 --train_file {inputs.letters}",
    }
    for name, text in options.items():
        words = (*"--seq_len 2048 --max_steps 6".split(), *text.split())
        command = (*TRAIN, *SMALL, *words, *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(SCHEDULE, "run as CUDA graphs"))
    command = (*TRAIN, *SMALL, "--cuda_graphs", "off", *inputs.at("graphs_off"))
    yield Case(name="graphs_off", commands=(command,), prints=(SCHEDULE,))


def _engines(inputs: Inputs) -> Iterator[Case]:
    for zero in ("zero1", "zero2", "zero3", "zero3_cpu"):
        command = torchrun(1, *TINY, "--deepspeed", zero, *inputs.at(zero))
        yield Case(name=zero, commands=(command,), prints=(SCHEDULE,))
    for kind in ("custom", "vanilla", "liger"):
        name = f"accelerate_zero3_cpu_{kind}"
        command = accelerate(
            1, "ds_configs/zero3_cpu.yaml", *TINY, "--class_type", kind, *inputs.at(name)
        )
        yield Case(name=name, commands=(command,), prints=(f"{kind}: ",), vanilla=kind != "custom")
    folder = (
        "--model_name_or_path",
        inputs.base,
        "--seq_len",
        "4096",
        "--max_steps",
        "2",
        *NO_SAVES,
    )
    yield Case(
        name="zero3_from_folder",
        commands=(torchrun(1, *folder, "--deepspeed", "zero3", *inputs.at("zero3_from_folder")),),
        prints=(SCHEDULE,),
    )
    for file in ("fsdp2", "fsdp2_offload"):
        for kind in ("custom", "vanilla"):
            name = f"{file}_{kind}"
            command = accelerate(
                1, f"fsdp_configs/{file}.yaml", *TINY, "--class_type", kind, *inputs.at(name)
            )
            yield Case(
                name=name, commands=(command,), prints=(f"{kind}: ",), vanilla=kind != "custom"
            )
    for name, words in (
        ("fsdp_words", ("full_shard auto_wrap",)),
        ("fsdp_words_offload", ("full_shard auto_wrap offload",)),
        ("fsdp_true_file", ("true", "--fsdp_config", "fsdp_configs/fsdp2.json")),
    ):
        command = torchrun(1, *TINY, "--fsdp", *words, *inputs.at(name))
        yield Case(name=name, commands=(command,), prints=(SCHEDULE,))
    yield from _resumes(inputs)


def _resumes(inputs: Inputs) -> Iterator[Case]:
    """A run of four steps is taken up again for two more, and its checkpoints are verified."""
    launchers = {
        "plain": (*TRAIN, *TINY, *SAVES),
        "zero3": torchrun(1, *TINY, *SAVES, "--deepspeed", "zero3"),
        "fsdp2": accelerate(1, "fsdp_configs/fsdp2.yaml", *TINY, *SAVES),
        "lora": (*TRAIN, *TINY, *SAVES, *LORA),
        "zero2_lora": torchrun(1, *TINY, *SAVES, *LORA, "--deepspeed", "zero2"),
        "zero3_cpu_lora": torchrun(1, *TINY, *SAVES, *LORA, "--deepspeed", "zero3_cpu"),
        "fsdp2_offload_lora": torchrun(1, *TINY, *SAVES, *LORA, *FSDP2_OFFLOAD),
        "dora": (*TRAIN, *TINY, *SAVES, *LORA, "--use_dora"),
    }
    for name, words in launchers.items():
        yield _resumed(inputs, f"resume_{name}", words)


def _resumed(inputs: Inputs, name: str, words: Words, gpus: int = 1) -> Case:
    first = (*words, *inputs.at(name))
    again = (*first, "--max_steps", "6", "--resume_from_checkpoint", "last")
    commands = [first, again]
    for command in ("verify", "report") if name == "resume_plain" else ("verify",):
        commands.append((sys.executable, "-m", "longctx", command, str(inputs.folder / name)))
    prints = (SCHEDULE, r"checkpoint-4\b")
    return Case(name=name, commands=tuple(commands), gpus=gpus, prints=prints)


def _adapters(inputs: Inputs) -> Iterator[Case]:
    lora: Words = ("--lora_r", "8")
    yield Case(
        name="lora",
        commands=(
            (*TRAIN, "--model_name_or_path", inputs.base, "--seq_len", "4096", "--max_steps", "2",
             *NO_SAVES, *BUDGET, *lora, *inputs.at("lora")),
            (sys.executable, "-m", "longctx", "merge", inputs.adapter, "--output",
             str(inputs.folder / "merged")),
        ),
        prints=(SCHEDULE,),
    )  # fmt: skip
    for name, more in (
        ("qlora", ("--quantize", "nf4")),
        ("dora", ("--use_dora",)),
        ("lora_plus", ("--loraplus_lr_ratio", "8")),
        ("qdora", ("--use_dora", "--quantize", "nf4")),
        ("lora_vanilla", ("--class_type", "vanilla")),
        ("lora_liger", ("--class_type", "liger")),
        ("qlora_vanilla", ("--quantize", "nf4", "--class_type", "vanilla")),
    ):
        command = (*TRAIN, *SMALL, *lora, *more, *inputs.at(name))
        yield Case(name=name, commands=(command,), vanilla="--class_type" in more)


def _packed_bases(inputs: Inputs) -> Iterator[Case]:
    """Adapters over checkpoints as they are published: a run, one on the host, and the merge of the
    first into 16 bits; and over FP8 that is made dense for Hugging Face's layers."""
    stays = (SCHEDULE, "stay so, frozen", "on the host: weights")
    dense = ("weights are made dense",)
    host, dora = ("--place", "host"), ("--use_dora", "true")
    vanilla = ("--class_type", "vanilla")
    for name, preset, form, kinds, prints in (
        ("fp8_lora", TINY[1], "fp8", ((), (*host, *dora)), stays),
        ("mxfp4_lora", "tiny-gpt-oss", "mxfp4", ((), host), stays),
        ("fp8_vanilla", TINY[1], "fp8", (vanilla,), dense),
    ):
        base, packed = inputs.at(f"{name}_base"), str(inputs.folder / f"{name}_model")
        over = (*TRAIN, "--model_name_or_path", packed, *TINY[2:], *LORA)
        places = [inputs.at(f"{name}_{i}") for i in range(len(kinds))]
        merge = (sys.executable, "-m", "longctx", "merge", f"{places[0][1]}/final")
        yield Case(
            name=name,
            commands=(
                (*TRAIN, "--preset", preset, *TINY[2:], *NO_SAVES, *base),
                (sys.executable, "profiling/packed_folder.py", f"{base[1]}/final", packed, form),
                *((*over, *more, *place) for more, place in zip(kinds, places, strict=True)),
                (*merge, "--output", str(inputs.folder / f"{name}_merged")),
            ),
            prints=prints,
            vanilla=vanilla in kinds,
        )


def _tasks(inputs: Inputs) -> Iterator[Case]:
    for task in ("dpo", "orpo", "simpo", "cpo", "reward", "kto"):
        data = inputs.ratings if task == "kto" else inputs.pairs
        command = (*TRAIN, *TINY, "--task", task, "--train_file", data, *inputs.at(task))
        yield Case(name=task, commands=(command,), prints=(SCHEDULE,))
    for name, more in (
        ("dpo_liger", ("--class_type", "liger")),
        ("dpo_vanilla", ("--class_type", "vanilla")),
        ("dpo_lora", ("--lora_r", "4")),
        ("dpo_qlora", ("--lora_r", "4", "--quantize", "nf4")),
    ):
        command = (
            *TRAIN,
            *TINY,
            "--task",
            "dpo",
            "--train_file",
            inputs.pairs,
            *more,
            *inputs.at(name),
        )
        yield Case(name=name, commands=(command,), vanilla="--class_type" in more)
    model = (
        "--model_name_or_path",
        inputs.base,
        "--seq_len",
        "2048",
        "--max_steps",
        "2",
        *NO_SAVES,
    )
    for name, more in (
        ("distill", ("--teacher", inputs.base, "--train_file", inputs.answers)),
        ("dpo_reference", ("--reference", inputs.base, "--train_file", inputs.pairs)),
    ):
        task = ("--task", name.partition("_")[0], *BUDGET)
        yield Case(
            name=name,
            commands=((*TRAIN, *model, *task, *more, *inputs.at(name)),),
            prints=(SCHEDULE,),
        )
    for zero in ("zero3", "zero3_cpu"):
        words = ("--task", "dpo", "--train_file", inputs.pairs, "--deepspeed", zero)
        yield Case(
            name=f"dpo_{zero}",
            commands=(torchrun(1, *TINY, *words, *inputs.at(f"dpo_{zero}")),),
            prints=(SCHEDULE,),
        )
    evaluated = ("--eval_file", inputs.chats, "--eval_strategy", "steps", "--eval_steps", "2")
    command = (*TRAIN, *TINY, "--train_file", inputs.chats, *evaluated, *inputs.at("chats"))
    yield Case(name="chats", commands=(command,), prints=(SCHEDULE, "eval loss"))
    command = (*TRAIN, *TINY, "--train_file", str(inputs.files), *inputs.at("files"))
    yield Case(name="files", commands=(command,), prints=(SCHEDULE, "passed over: README.md"))


def _commands(inputs: Inputs) -> Iterator[Case]:
    """Everything that is not a run of `longctx train`, the quick start, and recipes."""
    longctx: Words = (sys.executable, "-m", "longctx")
    plan = str(inputs.folder / "plan.json")
    planned = ("--preset", "llama-3.2-1b", "--seq_len", "8192", "--gpu_memory_gib", "16")
    yield Case(name="doctor", commands=((*longctx, "doctor"),))
    yield Case(
        name="plan",
        commands=(
            ("bash", "-c", f"{shlex.join((*longctx, 'plan', *planned, '--json'))} > {plan}"),
            (
                *TRAIN,
                *planned,
                "--plan",
                plan,
                "--max_steps",
                "2",
                *NO_SAVES,
                *inputs.at("planned"),
            ),
        ),
        prints=(SCHEDULE,),
    )
    yield Case(
        name="quick_start",
        commands=((sys.executable, "train.py", "--max_steps", "5"),),
        prints=(SCHEDULE,),
    )
    pages = ((*longctx, "help"), (*longctx, "help", "lora"))
    yield Case(name="help", commands=pages, vanilla=True)
    recipe = ("llama-3.2-1b_32k", "--seq_len", "32k", "--max_steps", "2", *NO_SAVES)
    yield Case(
        name="recipe",
        commands=((*TRAIN, *recipe, "--gpu_memory_gib", "30", *inputs.at("recipe")),),
        places=2,
        prints=(SCHEDULE,),
    )
    script = (sys.executable, "recipes/trl_sft.py", inputs.base, inputs.chats)
    command = (*script, str(inputs.folder / "trl"), "--max_length", "2048", "--max_steps", "2")
    yield Case(name="trl_sft", commands=(command,), prints=("longctx patched: ",))
    script = (sys.executable, "recipes/trl_dpo.py", inputs.base, inputs.pairs)
    command = (*script, str(inputs.folder / "trl_dpo"), "--max_length", "2048", "--max_steps", "2")
    yield Case(name="trl_dpo", commands=(command,), prints=("longctx patched: ",))
    sees = inputs.folder / "pictures"
    make = (sys.executable, "profiling/pictures_to_read.py", str(sees))
    script = (sys.executable, "recipes/trl_images.py", str(sees / "model"))
    command = (*script, str(sees / "pictures.jsonl"), str(sees / "out"), "--max_steps", "3")
    yield Case(
        name="trl_images",
        commands=(make, (*command, "--train_vision"), command),
        prints=("longctx patched: ",),
    )
    yield from _images(inputs)
    read = ("--eval_file", "README.md", "--seq_len", "2048", "--windows", "2", "--repeats", "1")
    yield Case(name="eval", commands=((*longctx, "eval", inputs.base, *read),))
    profiled = ("--preset", "llama-3.2-1b", "--seq_len", "8192", *BUDGET)
    command = (sys.executable, "profiling/profile_step.py", "--from_beginning", *profiled)
    yield Case(
        name="profile", commands=((*command, "--profile_dir", str(inputs.folder / "profile")),)
    )


def _images(inputs: Inputs) -> Iterator[Case]:
    """`longctx train` on conversations and pairs with pictures."""
    own, out = WithImages(inputs, "images"), inputs.folder
    merge = (sys.executable, "-m", "longctx", "merge", str(out / "images_lora/final"))
    runs = {
        "images": own.flags(),
        "images_trained": own.flags("--train_vision"),
        "images_lora": own.flags("--lora_r", "8", "--train_vision"),
        "images_prompts": own.flags(file="prompts"),
    }
    yield Case(
        name="images",
        commands=(
            own.make,
            *((*TRAIN, *flags, *inputs.at(name)) for name, flags in runs.items()),
            (*merge, "--output", str(out / "images_merged")),
        ),
        prints=(SCHEDULE, FROZEN, "the vision tower is trained, too"),
    )
    own = WithImages(inputs, "images_vanilla")
    vanilla = (*TRAIN, *own.flags("--class_type", "vanilla"), *inputs.at("images_vanilla"))
    yield Case(name="images_vanilla", commands=(own.make, vanilla), vanilla=True)
    own = WithImages(inputs, "images_dpo")
    pairs = own.flags("--task", "dpo", "--lora_r", "8", file="pairs")
    yield Case(
        name="images_dpo",
        commands=(own.make, (*TRAIN, *pairs, *inputs.at("images_dpo"))),
        prints=(SCHEDULE, FROZEN, "and 10 images"),
    )
    own = WithImages(inputs, "hybrid_images", model="qwen3_5")
    trained = (*TRAIN, *own.flags("--train_vision"), *inputs.at("hybrid_images"))
    prints = (SCHEDULE, "the vision tower is trained, too")
    yield Case(name="hybrid_images", commands=(own.make, trained), prints=prints)


FROZEN = "the vision tower is frozen"


class WithImages:
    """A case's own tiny model that sees images, with conversations and pairs about some."""

    def __init__(self, inputs: Inputs, name: str, model: str = "qwen3_vl") -> None:
        self._folder = inputs.folder / f"{name}_data"
        words = ("profiling/pictures_to_read.py", str(self._folder), "--model", model)
        self.make: Words = (sys.executable, *words)

    def flags(self, *words: str, file: str = "pictures") -> Words:
        model, data = self._folder / "model", self._folder / f"{file}.jsonl"
        read = ("--model_name_or_path", str(model), "--train_file", str(data))
        steps = "--eval_share 0.2 --seq_len 512 --max_steps 4".split()
        return (*read, *steps, *words)


def _several_gpus(inputs: Inputs, n: int) -> Iterator[Case]:
    """Runs of n processes, one a GPU."""
    share = ("--sequence_parallel_size", str(min(n, TINY_HEADS)))
    fsdp2, shared = "fsdp_configs/fsdp2.yaml", f"fsdp_configs/shared_{share[1]}gpu.yaml"
    dpo = ("--task", "dpo", "--train_file", inputs.pairs)
    words = {
        "ddp": torchrun(n, *TINY),
        "zero3": torchrun(n, *TINY, "--deepspeed", "zero3"),
        "zero3_cpu": torchrun(n, *TINY, "--deepspeed", "zero3_cpu"),
        "fsdp2": accelerate(n, fsdp2, *TINY),
        "fsdp_words_offload": torchrun(n, *TINY, "--fsdp", "full_shard auto_wrap offload"),
        "shared_row": accelerate(n, shared, *TINY, *share),
        "zero3_shared_row": torchrun(n, *TINY, "--deepspeed", "zero3", *share),
        "vanilla": torchrun(n, *TINY, "--class_type", "vanilla"),
        "lora": torchrun(n, *TINY, *LORA),
        "zero3_lora": torchrun(n, *TINY, *LORA, "--deepspeed", "zero3"),
        "fsdp2_lora": accelerate(n, fsdp2, *TINY, *LORA),
        "fsdp2_lora_shared_row": accelerate(n, shared, *TINY, *LORA, *share),
        "fsdp2_dora": accelerate(n, fsdp2, *TINY, *LORA, "--use_dora"),
        "dpo_zero3": torchrun(n, *TINY, *dpo, "--deepspeed", "zero3"),
        "dpo_shared_row": accelerate(n, shared, *TINY, *dpo, *share),
    }
    for name, command in words.items():
        name, vanilla = f"x{n}_{name}", "--class_type" in command
        yield Case(name=name, commands=((*command, *inputs.at(name)),), gpus=n, vanilla=vanilla)
    for name, command in {
        "ddp": torchrun(n, *TINY, *SAVES),
        "zero3": torchrun(n, *TINY, *SAVES, "--deepspeed", "zero3"),
        "shared_row": accelerate(n, shared, *TINY, *SAVES, *share),
    }.items():
        yield _resumed(inputs, f"x{n}_resume_{name}", command, gpus=n)
    for name, more in {
        "images": (),
        "images_zero3": ("--deepspeed", "zero3"),
        "images_shared_row": ("--fsdp", "true", "--fsdp_config", "fsdp2", *share),
    }.items():
        name = f"x{n}_{name}"
        own = WithImages(inputs, name)
        run = torchrun(n, *own.flags("--seq_len", "64", *more), *inputs.at(name))
        yield Case(name=name, commands=(own.make, run), gpus=n, prints=(SCHEDULE, FROZEN))


# --- running them ------------------------------------------------------------------------------


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """What a command is started with: the GPUs that it sees, and the tree that is tested."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def problem_of(case: Case, status: int, said: str) -> str | None:
    """Returns the line that says why a case failed; None if it passed."""
    if status:
        printed = [line for line in said.splitlines() if line and not line.startswith("$ ")]
        errors = [line for line in printed if re.search(r"[Ee]rror", line)]
        return (errors or printed[-1:] or ["nothing was printed"])[0][:300]
    if "Traceback (most recent call last)" in said:
        return "it printed a traceback, and exit status 0"
    if not case.vanilla and "Hugging Face's layers run" in said:
        return "Hugging Face's layers ran in place of the schedule"
    missing = [pattern for pattern in case.prints if not re.search(pattern, said)]
    return f"no line has {missing[0]!r}" if missing else None


def run(case: Case, gpus: Sequence[int], logs: Path, end: float = math.inf) -> dict[str, Any]:
    """Runs a case's commands on these GPUs, and returns its row. No command runs after `end`, by
    time.monotonic, and a case that would begin then has the outcome "not begun"."""
    begin, said, status = time.monotonic(), "", 0
    if begin >= end:
        return {"case": case.name, "gpus": case.gpus, "outcome": "not begun"}
    end = min(end, begin + LIMIT_S)
    for command in case.commands:
        status, output = _output(command, gpus, end - time.monotonic())
        said += f"$ {shlex.join(command)}\n{output}\n"
        if status:
            break
    (logs / f"{case.name}.log").write_text(said)
    problem = problem_of(case, status, said)
    row: dict[str, Any] = {"case": case.name, "gpus": case.gpus, "on": list(gpus)}
    row["outcome"] = "failed" if problem else "passed"
    row["s"] = round(time.monotonic() - begin, 1)
    return row | ({"problem": problem} if problem else {})


def _output(command: Words, gpus: Sequence[int], limit_s: float) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as file:  # a pipe would stay open in processes left behind
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(gpus),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            status = process.wait()
            file.write(f"\nerror: it took more than {max(0.0, limit_s):.0f} s\n")
        file.seek(0)
        return status, file.read()


class Lanes:
    """Threads that each run a case at a time, on the GPUs that have most room for one more."""

    def __init__(self, gpus: int, of_each: int, logs: Path, end: float) -> None:
        self.logs, self.end = logs, end
        self._pool = ThreadPoolExecutor(gpus * of_each)
        self._free, self._changed = Counter({gpu: of_each for gpu in range(gpus)}), Condition()

    def start(self, cases: Iterable[Case]) -> list[Future[dict[str, Any]]]:
        return [self._pool.submit(self._run, case) for case in cases]

    def _run(self, case: Case) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._with_room(case) >= case.gpus)
            taken = {gpu: case.places for gpu, _ in self._free.most_common(case.gpus)}
            self._free.subtract(taken)
        try:
            return run(case, sorted(taken), self.logs, self.end)
        finally:
            with self._changed:
                self._free.update(taken)
                self._changed.notify_all()

    def _with_room(self, case: Case) -> int:
        return sum(free >= case.places for free in self._free.values())


def places_of(gpu: int) -> int:
    """Returns how many cases with a model of published size share this GPU."""
    return max(1, int(torch.cuda.get_device_properties(gpu).total_memory / GIB / PLACE_GIB))


def run_all(
    first: Case, others: Sequence[Case], gpus: int, logs: Path, end: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yields a row a case, as they end. Those of published size wait for the model of `first`."""
    took = {row["case"]: row["s"] for row in read_rows(PUBLISHED)}
    others = sorted(others, key=lambda case: -took.get(case.name, LIMIT_S))
    running = Lanes(gpus, TINY_ONES, logs, end).start(case for case in others if case.is_tiny)
    row = run(first, [0], logs, end)
    yield row
    if row["outcome"] == "passed":  # or others have no model to read
        large = (case for case in others if not case.is_tiny)
        running += Lanes(gpus, places_of(0), logs, end).start(large)
    for done in as_completed(running):
        yield done.result()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="run cases whose name has one of these words")
    parser.add_argument("--output", type=results_file, help="JSON file to write")
    parser.add_argument("--logs", type=Path, help="folder for what commands print")
    parser.add_argument("--limit_s", type=float, default=math.inf, help="seconds for all of them")
    parser.add_argument(
        "--rest", action="store_true", help="run cases that OUTPUT does not call passed"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args(argv)
    if args.rest and not args.output:
        parser.error("--rest reads --output: name the file of the run that it completes")
    gpus = torch.cuda.device_count()
    if not gpus and not args.list:
        sys.exit(
            "error: this machine has no GPU, on which alone these command lines mean something"
        )
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        inputs = Inputs(Path(folder))
        first, others = first_case(inputs), cases(inputs)
        named = [case for case in others if not args.words or _named(case, args.words)]
        if args.rest:
            done = {row["case"] for row in read_rows(args.output) if row["outcome"] == "passed"}
            named = [case for case in named if case.name not in done]
        if args.list:
            for case in (first, *named):
                print(case.name, *(f"    {shlex.join(words)}" for words in case.commands), sep="\n")
            return
        logs = args.logs or Path(tempfile.mkdtemp(prefix="smoke-"))
        logs.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        runnable = [case for case in named if case.gpus <= gpus]
        order = {case.name: place for place, case in enumerate((first, *runnable))}
        end = time.monotonic() + args.limit_s
        key = ("case", "gpus") if args.words or args.rest else None
        for row in run_all(first, runnable, gpus, logs, end):
            if row["outcome"] == "not begun":
                continue
            rows = sorted([*rows, row], key=lambda row: order[row["case"]])
            print(
                f"{row['outcome']:6} {row['case']:28} {row['s']:5.0f} s {row.get('problem', '')}",
                flush=True,
            )
            if args.output:
                write_results(args.output, rows, key=key)
    failed = sum(row["outcome"] == "failed" for row in rows)
    left = len(order) - len(rows)
    print(f"{len(rows) - failed} passed, {failed} failed, {left} not begun; output in {logs}")
    sys.exit(bool(failed or left))


def _named(case: Case, words: Sequence[str]) -> bool:
    return any(word in case.name for word in words)


if __name__ == "__main__":
    main()
