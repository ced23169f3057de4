"""SmolLM2-135M trained on long documents, in three studies, each a list of steps.

    python profiling/bench/smollm2.py --study 32k --model models/smollm2-135m --data data/long \\
        --output profiling/results/h200_smollm2_32k.json

runs the steps of a study, or those of `--only`, and writes each row as soon as it is known. All of
them train recipes/smollm2_32k.yaml. `longctx eval` reports the loss by position, and needles found.

32k: a real context extension from 8192 to 32768 tokens

    base, yarn                      `longctx eval` of the model as it is (RoPE extrapolated), and
                                    with YaRN's RoPE but no training
    train-custom, train-vanilla     the recipe with either class type
    train-noise                     vanilla again, a step's two rows in one batch: how far losses
                                    drift when only the order of bf16's sums changes
    train-fp32-logits               vanilla again, lm_head and cross-entropy in fp32: what bf16
                                    logits add to its losses
    truth                           the losses of the first two steps in fp32, vanilla, document by
                                    document (their learning rate is 0, the weights untouched)
    custom, vanilla                 `longctx eval` of the two fine-tuned models
    generate                        the fine-tuned model continues 30000 tokens, in transformers
    picture                         all evaluations, beside the results, as .png

lora: adapters of rank 16 on all linear layers, over bf16 weights (lora) and over NF4 (qlora)

    base                            `longctx eval` of the model with YaRN's RoPE, before training
    train-lora, train-qlora         the recipe with adapters; the row has the adapter's size
    lora, qlora                     `longctx merge` of the adapter, and `longctx eval` of the merged
                                    model
    generate-lora, generate-qlora   the adapter in plain PEFT, on the model in plain transformers
                                    (for qlora with its 4 bits), continues 30000 tokens

An adapter holds no RoPE, so the model it is trained for is a copy whose config.json has YaRN's.

states: why AdamW with bf16 states is not the default

    truth                           weights, states and compute in fp32, without tf32; torch's AdamW
    fp32                            bf16 weights with `--optimizer_states fp32`, the default
    as_weights                      bf16 weights with `--optimizer_states as_weights`: torch's AdamW
                                    with moments in bf16 and no masters; the gradients of a step's
                                    two batches add up in bf16
    picture                         losses, and how far the weights moved, as .png

The recipe's 50 steps have a peak learning rate of 3e-4; steps named `...-1e-5` are 20 with a
constant one of 1e-5. All start at the model's bf16 weights, and weights_moved.py says how the rows
compare the weights at the end. A step has 32768 tokens in rows of 2048: how an update rounds does
not depend on the length of rows, but in fp32 attention is plain torch, writes its scores, and takes
up to 16 times as long at 32768. The recipe's own rows are `--seq_len 32768 --rows 1`.

Train rows: class_type, losses, tokens_per_s (median step), train_s, peak_gib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.errors import UserError
from longctx.train.report.page import pyplot
from profiling.bench.smollm2_steps import CONTEXT, LORA, PICTURE, Args
from profiling.bench.weights_moved import STATES
from profiling.results import read_rows, results_file, write_results

STUDIES = {"32k": CONTEXT, "lora": LORA, "states": STATES}


def parse(argv: list[str] | None = None) -> Args:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--model", type=Path, required=True, help="of scripts/get_smollm2.py")
    parser.add_argument("--data", type=Path, required=True, help="of scripts/get_long_documents.py")
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=Path, help="for models (runs/smollm2_STUDY)")
    parser.add_argument("--only", nargs="+", help="of the study's steps, in its order")
    parser.add_argument("--seq_len", type=int, help="tokens in a row (32768; states: 2048)")
    parser.add_argument("--windows", type=int, help="for the loss by position (16)")
    parser.add_argument("--device", help="for what is computed here (cuda)")
    parser.add_argument("--rows", type=int, help="of states, in each of a step's two batches (8)")
    parser.add_argument("flags", nargs="*", help="after --: more options of train.py")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    args.runs = args.runs or Path("runs", f"smollm2_{args.study}")
    args.only = args.only or study.names
    if unknown := [name for name in args.only if name not in study.names]:
        parser.error(f"--only: {args.study} has no {unknown[0]}, but {' '.join(study.names)}")
    for name in ("seq_len", "windows", "device", "rows"):
        if getattr(args, name) is None:
            setattr(args, name, study.options.get(name))
        elif name not in study.options:
            parser.error(f"--{name} has no effect on {args.study}")
    for path in ("model", "data", "output", "runs"):  # the steps run in the repository's root
        setattr(args, path, getattr(args, path).absolute())
    return args


def command(args: Args) -> str:
    """The command that makes the whole file, in which rows of several calls with --only stand."""
    words = [f"python profiling/bench/smollm2.py --study {args.study} --model models/smollm2-135m"]
    words += [f"--data data/long --output profiling/results/{args.output.name}"]
    for name, default in STUDIES[args.study].options.items():
        if (value := getattr(args, name)) != default:
            words.append(f"--{name} {value}")
    return " ".join([*words, *(["--", *args.flags] if args.flags else [])])


def run(args: Args) -> None:
    """Runs the steps in the study's order. Raises UserError."""
    study, recorded = STUDIES[args.study], command(args)
    args.runs.mkdir(parents=True, exist_ok=True)
    if study.draw:
        pyplot()  # missing? better known now
    study.prepare(args)
    for name, step in study.steps.items():
        if name in args.only:
            row = step(name, args)
            print(json.dumps(row), flush=True)
            write_results(args.output, [row], key=study.key, extra={"command": recorded})
    if study.draw and PICTURE in args.only:
        drawn = study.draw(read_rows(args.output))
        drawn.savefig(args.output.with_suffix(".png"), dpi=110)


def main() -> None:
    args = parse()
    try:
        run(args)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
