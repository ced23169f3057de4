"""What a run that is over tells people: its losses, its speed, its files and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longctx.errors import printable, shortened
from longctx.families.adapters import adapts_experts, inside_peft
from longctx.loop.metrics import peak_memory
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.output import FINAL, METRICS
from longctx.train.output.card import merge_first
from longctx.train.program import started_as
from longctx.train.report.runs import loss_change
from longctx.train.report.sample import Sample
from longctx.train.trainer.trainer import LongTrainer

EVALUATED = {
    "eval_loss": ("evaluation loss", "{:.4f}"),
    "eval_rewards/accuracies": ("evaluation accuracy", "{:.0%}"),
    "eval_accuracy": ("evaluation accuracy", "{:.0%}"),
}


def summarise(
    trainer: LongTrainer,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainArguments,
    output_dir: Path,
    evaluated: Mapping[str, float],
    found: Sample | None,
) -> None:
    """Prints first and last loss, the evaluation, a sample, throughput, peak memory, the checkpoint
    and what to try next."""
    logged = [line for line in trainer.state.log_history if "loss" in line]
    table = Table(title="Done", show_header=False)
    if logged:
        speeds = sorted(line["tokens_per_s"] for line in logged if "tokens_per_s" in line)
        table.add_row("loss", loss_change([line["loss"] for line in logged]))
        if speeds:
            table.add_row("tokens/s", f"{speeds[len(speeds) // 2]:,.0f} (median of logged steps)")
    for name, (what, form) in EVALUATED.items():
        if name in evaluated:
            table.add_row(what, form.format(evaluated[name]))
    if found:
        for what, text in (("text begins", found.text), ("model goes on", found.continued)):
            table.add_row(what, escape(printable(f'"{shortened(text, 200)}"')))
    for name, gib in peak_memory(args.device).items():
        table.add_row(name.removesuffix("_gib").replace("_", " "), f"{gib:.2f} GiB")
    for what, name in (("checkpoint", FINAL), ("metrics", METRICS)):
        table.add_row(what, escape(printable(str(output_dir / name))))
    own = model_args.model_name_or_path and (data_args.train_file or data_args.dataset_name)
    yours = f"{started_as()} --model_name_or_path YOUR_MODEL --train_file YOUR_FILES"
    report = f"longctx report {shlex.quote(str(output_dir))}"
    if adapts_experts(inside_peft(trainer.model)):
        merge = merge_first(model_args.quantize, shlex.quote(str(output_dir / FINAL)))
        table.add_row("next", escape(printable(f"{merge} (vLLM takes no adapters of experts)")))
    table.add_row("next", escape(printable(report)) if own else yours)
    Console().print(table)
