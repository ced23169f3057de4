"""The steps of smollm2.py's studies: what is trained, evaluated and generated, each a row.

A step is called with its name and the options. It works in the runs' folder: `train-NAME` trains
into NAME, and `NAME/final` is what is evaluated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longctx.constants import IGNORE_INDEX
from longctx.train.lora.merge import merge
from longctx.train.options.config import ModelArguments
from longctx.train.report.evaluate import draw as draw_evaluations
from longctx.train.start.loading import load_config
from profiling.bench.runner import ROOT, Row, train_lines

Args = argparse.Namespace
Step = Callable[[str, Args], Row]
RECIPE = ["--config", str(ROOT / "recipes/smollm2_32k.yaml")]
FP32 = "--dtype float32 --bf16 false --tf32 false".split()
ONE_BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 1".split()
FP32_LOGITS = """
import sys, torch
from longctx.train.commands import train
load_model = train.load_model
def load_with_fp32_logits(*args, **kwargs):
    model = load_model(*args, **kwargs)
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), head.weight.float())
    return model
train.load_model = load_with_fp32_logits
train.main(sys.argv[1:])
"""
EVALUATE = [sys.executable, "-c", "from longctx.train.cli import main; main()", "eval"]


def evaluate(
    name: str, args: Args, *, model: Path | str | None = None, flags: Sequence[str] = ()
) -> Row:
    """`longctx eval` of a folder, relative to the runs' folder, or of the model itself."""
    output = args.runs / f"eval-{name}.json"
    folder = args.runs / model if model else args.model
    command = [*EVALUATE, str(folder), "--name", name, "--output", str(output), *flags]
    command += ["--eval_file", str(args.data / "eval.jsonl"), "--seq_len", str(args.seq_len)]
    begun = time.monotonic()
    subprocess.run([*command, "--windows", str(args.windows)], cwd=ROOT, check=True)
    (result,) = json.loads(output.read_text())
    return {"step": name, **result, "eval_s": round(time.monotonic() - begun, 1)}


def train(
    name: str,
    args: Args,
    *,
    class_type: str = "custom",
    flags: Sequence[str] = (),
    program: Sequence[str] = ("train.py",),
) -> Row:
    """Trains into the folder of the runs that has the step's name without `train-`."""
    begun = time.monotonic()
    words = [*inputs(args), "--class_type", class_type, "--overwrite_output_dir", "true"]
    words += [*args.flags, *flags]
    steps = train_lines(words, args.runs / name.removeprefix("train-"), program)
    return {
        "step": name,
        "class_type": class_type,
        "losses": [round(line["loss"], 5) for line in steps],
        "tokens_per_s": round(statistics.median(line["tokens_per_s"] for line in steps)),
        "train_s": round(time.monotonic() - begun, 1),
        "peak_gib": steps[-1].get("peak_gpu_gib"),
        "peak_host_gib": steps[-1]["peak_host_gib"],
    }


def inputs(args: Args) -> list[str]:
    """train.py's flags of the recipe, the model and the rows."""
    words = [*RECIPE, "--model_name_or_path", str(args.model), "--seq_len", str(args.seq_len)]
    return [*words, "--train_file", str(args.data / "train.jsonl")]


def truth(name: str, args: Args) -> Row:
    """No bf16, no packing, nothing of longctx but the rows of the training run."""
    import torch
    from torch.nn.functional import cross_entropy

    from profiling.build import build_trainer

    flags = [*inputs(args), "--class_type", "vanilla", *FP32]
    flags += ["--use_cpu", "true"] if args.device == "cpu" else []
    trainer, _ = build_trainer([*flags, *args.flags], steps=2, output_dir=args.runs / "truth")
    trainer.args.train_sampling_strategy = "random"  # as train.py's, not build_trainer's
    model, losses = trainer.model, []
    batches = iter(trainer.get_train_dataloader())
    with torch.no_grad():
        for _ in range(2):
            total, count = 0.0, 0
            for _ in range(trainer.args.gradient_accumulation_steps):
                batch = next(batches)
                ids, positions, labels = (
                    batch[name][0] for name in ("input_ids", "position_ids", "labels")
                )
                ends = torch.nonzero(positions == 0).flatten().tolist()[1:]
                for start, end in zip([0, *ends], [*ends, len(ids)], strict=True):
                    hidden = model.model(ids[None, start:end], use_cache=False).last_hidden_state[0]
                    targets = labels[start + 1 : end]
                    for h, target in zip(hidden[:-1].split(4096), targets.split(4096), strict=True):
                        logits = model.lm_head(h)
                        total += cross_entropy(logits, target, reduction="sum").item()
                        count += int((target != IGNORE_INDEX).sum())
            losses.append(round(total / count, 5))
    return {"step": name, "class_type": "vanilla", "dtype": "float32", "losses": losses}


def generate(name: str, args: Args, *, model: str) -> Row:
    """Nothing of longctx: what anyone does with the saved folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = args.runs / model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=args.device)
    return {"step": name, **continued(network, tokenizer, args)}


def continued(network: Any, tokenizer: Any, args: Args) -> Row:
    """What the model writes after most of a row of the longest text."""
    lines = (args.data / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    ids = tokenizer(max(texts, key=len), return_tensors="pt").input_ids
    ids = ids[:, : args.seq_len * 30000 // 32768]
    written = network.generate(ids.to(network.device), max_new_tokens=48, do_sample=False)
    return {
        "prompt_tokens": ids.shape[1],
        "prompt_end": tokenizer.decode(ids[0, -60:]),
        "text": tokenizer.decode(written[0, ids.shape[1] :]),
    }


# --- adapters --------------------------------------------------------------------------------

ADAPTERS = "--rope_scaling none --learning_rate 1e-3 --lora_r 16".split()
NF4 = ["--quantize", "nf4"]


def scale(args: Args) -> None:
    """The model becomes a copy with RoPE for `--seq_len`, made once."""
    folder: Path = args.runs / "model"
    if not folder.exists():
        asked = ModelArguments(
            model_name_or_path=str(args.model), seq_len=args.seq_len, rope_scaling="yarn"
        )
        shutil.copytree(args.model, folder)
        load_config(asked, vocab_size=1).save_pretrained(folder)
    args.model = folder


def train_adapter(name: str, args: Args, *, flags: Sequence[str]) -> Row:
    row = train(name, args, flags=[*ADAPTERS, *flags])
    adapter = args.runs / name.removeprefix("train-") / "final" / "adapter_model.safetensors"
    return row | {"lora_r": 16, "adapter_mib": round(adapter.stat().st_size / 2**20, 2)}


def evaluate_merged(name: str, args: Args) -> Row:
    merged = args.runs / f"{name}-merged"
    if merged.exists():  # of an adapter that was trained before
        shutil.rmtree(merged)
    merge(args.runs / name / "final", merged)
    return evaluate(name, args, model=merged)


def generate_adapted(name: str, args: Args, *, flags: Sequence[str]) -> Row:
    """Nothing of longctx: what anyone does with the saved adapter."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    adapter = args.runs / name.removeprefix("generate-") / "final"
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": args.device}
    if flags == NF4:
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(args.model, **how)
    network = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    return {"step": name, **continued(network, tokenizer, args)}


def adapter_steps(name: str, flags: Sequence[str]) -> dict[str, Step]:
    return {
        f"train-{name}": partial(train_adapter, flags=flags),
        name: evaluate_merged,
        f"generate-{name}": partial(generate_adapted, flags=flags),
    }


# --- studies ---------------------------------------------------------------------------------

PICTURE = "picture"


@dataclass(frozen=True, kw_only=True)
class Study:
    steps: Mapping[str, Step]
    """Each is called with its own name and the options."""
    options: Mapping[str, Any]
    """Those that the study has besides paths, with their defaults."""
    key: Sequence[str] = ("step",)
    """Columns that tell a row from others."""
    prepare: Callable[[Args], None] = lambda args: None
    """Called before the first step. Raises UserError."""
    draw: Callable[[list[Row]], Any] | None = None
    """The picture of all rows, where the study has one."""

    @property
    def names(self) -> list[str]:
        return [*self.steps, *([PICTURE] if self.draw else [])]


EVALUATED = {"seq_len": 32768, "windows": 16, "device": "cuda"}
CONTEXT = Study(
    steps={
        "base": evaluate,
        "yarn": partial(evaluate, flags=["--rope_scaling", "yarn"]),
        "train-custom": train,
        "train-vanilla": partial(train, class_type="vanilla"),
        "train-noise": partial(train, class_type="vanilla", flags=ONE_BATCH),
        "train-fp32-logits": partial(train, class_type="vanilla", program=("-c", FP32_LOGITS)),
        "truth": truth,
        "custom": partial(evaluate, model="custom/final"),
        "vanilla": partial(evaluate, model="vanilla/final"),
        "generate": partial(generate, model="custom/final"),
    },
    options=EVALUATED,
    draw=lambda rows: draw_evaluations([row for row in rows if "needles" in row]),
)
LORA = Study(
    steps={"base": evaluate, **adapter_steps("lora", []), **adapter_steps("qlora", NF4)},
    options=EVALUATED,
    prepare=scale,
)
