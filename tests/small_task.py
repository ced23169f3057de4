"""Preference data and a model, with which train.py and TRL's trainers train in a second each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
from both import make_model, sentence
from small_tokenizer import small_tokenizer

PAIRS = 6
STEPS = 3
RATE = 1e-3


def turns(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pairs(rows: int = PAIRS) -> list[dict[str, Any]]:
    return [
        {
            "prompt": turns("user", " ".join(sentence(n + k) for k in range(3))),
            "chosen": turns("assistant", sentence(n + 3)),
            "rejected": turns("assistant", sentence(n + 5)),
        }
        for n in range(rows)
    ]


def written(rows: int = PAIRS) -> list[dict[str, Any]]:
    """The same as text."""
    return [
        {
            "prompt": row["prompt"][0]["content"],
            "chosen": " " + row["chosen"][0]["content"],
            "rejected": " " + row["rejected"][0]["content"],
        }
        for row in pairs(rows)
    ]


def rated(rows: int = PAIRS) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if n % 3 else "rejected"],
            "label": n % 3 > 0,
        }
        for n, row in enumerate(pairs(rows))
    ]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def save_model(folder: Path, model: Any = None) -> Path:
    (make_model(max_position_embeddings=4096) if model is None else model).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def flags(folder: Path, records: list[dict[str, Any]], *more: str, model: Any = None) -> list[str]:
    """Of train.py: STEPS steps of all records in one row, fp32 on the CPU."""
    save_model(folder / "model", model)
    data = write_jsonl(folder / "data.jsonl", records)
    found = ["--model_name_or_path", str(folder / "model"), "--train_file", str(data)]
    found += ["--cache_dir", str(folder / "cache"), "--use_cpu", "--disable_tqdm", "true"]
    found += ["--seq_len", "2048", "--max_steps", str(STEPS), "--save_strategy", "no"]
    found += ["--learning_rate", str(RATE), "--adam_epsilon", "1e-5", "--weight_decay", "0"]
    return [*found, "--lr_scheduler_type", "constant", *more]


def as_dataset(records: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(records)
