"""What a run that is over tells people: its losses, its speed, its files and what to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longctx.config import DataArguments, ModelArguments, TrainArguments
from longctx.errors import printable
from longctx.output import FINAL, METRICS
from longctx.program import started_as
from longctx.run.metrics import peak_memory
from longctx.run.trainer import LongTrainer

EVALUATED = {
    "eval_loss": "evaluation loss",
    "eval_rewards/accuracies": "evaluation accuracy",
    "eval_accuracy": "evaluation accuracy",
}


def summarise(
    trainer: LongTrainer,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainArguments,
    output_dir: Path,
) -> None:
    """Prints first and last loss, throughput, peak memory, the checkpoint and what to try next."""
    logged = [line for line in trainer.state.log_history if "loss" in line]
    table = Table(title="Done", show_header=False)
    if logged:
        first, last = logged[0], logged[-1]
        speeds = sorted(line["tokens_per_s"] for line in logged if "tokens_per_s" in line)
        table.add_row("loss", f"{first['loss']:.4f} -> {last['loss']:.4f}")
        if speeds:
            table.add_row("tokens/s", f"{speeds[len(speeds) // 2]:,.0f} (median of logged steps)")
    evaluated = {name: x for line in trainer.state.log_history for name, x in line.items()}
    for name, what in EVALUATED.items():
        if name in evaluated:
            table.add_row(what, f"{evaluated[name]:.4f}")
    for name, gib in peak_memory(args.device).items():
        table.add_row(name.removesuffix("_gib").replace("_", " "), f"{gib:.2f} GiB")
    for what, name in (("checkpoint", FINAL), ("metrics", METRICS)):
        table.add_row(what, escape(printable(str(output_dir / name))))
    own = model_args.model_name_or_path and (data_args.train_file or data_args.dataset_name)
    yours = f"{started_as()} --model_name_or_path YOUR_MODEL --train_file YOUR_FILES"
    report = f"longctx report {shlex.quote(str(output_dir))}"
    table.add_row("next", escape(printable(report)) if own else yours)
    Console().print(table)
