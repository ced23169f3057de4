"""A real context extension: SmolLM2-135M from 8192 to 32768 tokens, measured before and after.

    python profiling/bench/smollm2_32k.py --model models/smollm2-135m --data data/long \\
        --output profiling/results/h200_smollm2_32k.json

runs these steps, or those of `--only`, and writes each row as soon as it is known:

    base, yarn                      `longctx eval` of the model as it is (RoPE extrapolated), and
                                    with YaRN's RoPE but no training
    train-custom, train-vanilla     recipes/smollm2_32k.yaml with either class type
    train-noise                     vanilla again, a step's two rows in one batch: how far losses
                                    drift when only the order of bf16's sums changes
    train-fp32-logits               vanilla again, lm_head and cross-entropy in fp32: what bf16
                                    logits add to its losses
    truth                           the losses of the first two steps in fp32, vanilla, document by
                                    document (their learning rate is 0, the weights untouched)
    custom, vanilla                 `longctx eval` of the two fine-tuned models
    generate                        the fine-tuned model continues 30000 tokens, in transformers
    picture                         all evaluations, beside the results, as .png

Train rows: class_type, losses, tokens_per_s (median step), train_s, peak_gib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import IGNORE_INDEX
from longctx.report.evaluate import draw
from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    *("base", "yarn", "train-custom", "train-vanilla", "train-noise"),
    *("train-fp32-logits", "truth", "custom", "vanilla", "generate", "picture"),
)
FP32 = "--dtype float32 --bf16 false --tf32 false".split()
ONE_BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 1".split()
FP32_LOGITS = """
import sys, torch, train
load_model = train.load_model
def load_with_fp32_logits(*args, **kwargs):
    model = load_model(*args, **kwargs)
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), head.weight.float())
    return model
train.load_model = load_with_fp32_logits
train.main(sys.argv[1:])
"""
EVALUATE = [sys.executable, "-c", "from longctx.cli import main; main()", "eval"]


def evaluate(name: str, model: Path, args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    output = args.runs / f"eval-{name}.json"
    command = [*EVALUATE, str(model), "--name", name, "--output", str(output), *flags]
    command += ["--eval_file", str(args.data / "eval.jsonl"), "--seq_len", str(args.seq_len)]
    begun = time.monotonic()
    subprocess.run([*command, "--windows", str(args.windows)], cwd=ROOT, check=True)
    (result,) = json.loads(output.read_text())
    return {"step": name, **result, "eval_s": round(time.monotonic() - begun, 1)}


def train(
    name: str,
    args: argparse.Namespace,
    class_type: str,
    *flags: str,
    program: tuple[str, ...] = ("train.py",),
) -> dict[str, Any]:
    output = args.runs / name
    command = [sys.executable, *program, "--config", "recipes/smollm2_32k.yaml"]
    command += ["--class_type", class_type, "--output_dir", str(output), "--save_strategy", "no"]
    command += ["--overwrite_output_dir", "true", "--disable_tqdm", "true"]
    command += ["--model_name_or_path", str(args.model), "--seq_len", str(args.seq_len)]
    command += ["--train_file", str(args.data / "train.jsonl"), *args.flags, *flags]
    begun = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    return {
        "step": f"train-{name}",
        "class_type": class_type,
        "losses": [round(line["loss"], 5) for line in steps],
        "tokens_per_s": round(statistics.median(line["tokens_per_s"] for line in steps)),
        "train_s": round(time.monotonic() - begun, 1),
        "peak_gib": steps[-1].get("peak_gpu_gib"),
        "peak_host_gib": steps[-1]["peak_host_gib"],
    }


def truth(args: argparse.Namespace) -> dict[str, Any]:
    """No bf16, no packing, nothing of longctx but the rows of the training run."""
    import torch
    from torch.nn.functional import cross_entropy

    from profiling.build import build_trainer

    flags = ["--config", "recipes/smollm2_32k.yaml", "--class_type", "vanilla", *FP32]
    flags += ["--model_name_or_path", str(args.model), "--seq_len", str(args.seq_len)]
    flags += ["--train_file", str(args.data / "train.jsonl")]
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
    return {"step": "truth", "class_type": "vanilla", "dtype": "float32", "losses": losses}


def generate(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Nothing of longctx: what anyone does with the saved folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map=args.device)
    return {"step": "generate", **continued(network, tokenizer, args)}


def continued(network: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
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


def parse(document: str, name: str, steps: Sequence[str]) -> tuple[argparse.Namespace, str]:
    """The options of a script of these steps, and the command that its results record."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="of scripts/get_smollm2.py")
    parser.add_argument("--data", type=Path, required=True, help="of scripts/get_long_documents.py")
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=Path, default=Path("runs", name), help="for models")
    parser.add_argument("--seq_len", type=int, default=32768)
    parser.add_argument("--windows", type=int, default=16, help="for the loss by position")
    parser.add_argument("--only", nargs="+", choices=steps, default=steps)
    parser.add_argument("--device", default="cuda", help="for what is computed here (cuda)")
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args()
    for path in ("model", "data", "output", "runs"):  # the steps run in the repository's root
        setattr(args, path, getattr(args, path).absolute())
    args.runs.mkdir(parents=True, exist_ok=True)
    words = [f"python profiling/bench/{name}.py --model models/smollm2-135m --data data/long"]
    words += ["--output", f"profiling/results/{args.output.name}"]
    return args, " ".join([*words, *(["--", *args.flags] if args.flags else [])])


def main() -> None:
    args, command = parse(__doc__, "smollm2_32k", STEPS)
    run_step = {
        "base": lambda: evaluate("base", args.model, args),
        "yarn": lambda: evaluate("yarn", args.model, args, "--rope_scaling", "yarn"),
        "train-custom": lambda: train("custom", args, "custom"),
        "train-vanilla": lambda: train("vanilla", args, "vanilla"),
        "train-noise": lambda: train("noise", args, "vanilla", *ONE_BATCH),
        "train-fp32-logits": lambda: train(
            "fp32-logits", args, "vanilla", program=("-c", FP32_LOGITS)
        ),
        "truth": lambda: truth(args),
        "custom": lambda: evaluate("custom", args.runs / "custom" / "final", args),
        "vanilla": lambda: evaluate("vanilla", args.runs / "vanilla" / "final", args),
        "generate": lambda: generate(args.runs / "custom" / "final", args),
    }
    for step in args.only:
        if step in run_step:
            row = run_step[step]()
            print(json.dumps(row), flush=True)
            # The rows of several calls with --only stand in one file.
            write_results(args.output, [row], key=["step"], extra={"command": command})
    if "picture" in args.only:
        rows = json.loads(args.output.read_text())["rows"]
        draw([row for row in rows if "needles" in row]).savefig(
            args.output.with_suffix(".png"), dpi=120
        )


if __name__ == "__main__":
    main()
