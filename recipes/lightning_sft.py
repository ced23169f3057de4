"""Lightning's Trainer with longctx's schedule: packed documents at any length that fits.

pip install lightning
longctx recipes lightning_sft.py > lightning_sft.py
python lightning_sft.py meta-llama/Llama-3.2-1B notes.txt runs/lightning --seq_len 32768
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import longctx


class Finetune(lightning.LightningModule):
    """A causal language model on rows of tokens."""

    def __init__(self, name: str, learning_rate: float) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        longctx.patch(self.model.train(), strict=True)
        self.learning_rate = learning_rate

    def training_step(self, ids: torch.Tensor, step: int) -> torch.Tensor:  # (B, S)
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def rows(name: str, path: str, seq_len: int) -> torch.Tensor:  # (rows, S)
    """A text as whole rows of tokens; what is left over makes no row."""
    text = Path(path).read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(name)(text)["input_ids"])
    return ids[: len(ids) // seq_len * seq_len].view(-1, seq_len)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("text", help="a file of text")
    parser.add_argument("output", help="a folder for the trained model")
    parser.add_argument("--seq_len", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    args = parser.parse_args(argv)

    settings: dict[str, Any] = dict(accelerator="auto", devices=1, max_epochs=1)
    trainer = lightning.Trainer(
        **settings,
        max_steps=args.max_steps,
        # autocast over fp32 weights: no update is rounded away
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        gradient_clip_val=1.0,
        default_root_dir=args.output,
        enable_checkpointing=False,
        logger=False,
        log_every_n_steps=1,
    )
    module = Finetune(args.model, args.learning_rate)
    data = rows(args.model, args.text, args.seq_len)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1, shuffle=True))
    module.model.save_pretrained(args.output)


if __name__ == "__main__":
    main()
