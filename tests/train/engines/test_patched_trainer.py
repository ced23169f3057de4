"""transformers' Trainer on a patched model under DeepSpeed, on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from both import arguments, logged, make_model, sentences
from paths import ROOT
from small_job import Warm, on_cpu
from small_tokenizer import small_tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from longctx.system import installed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a model, and the numbers of its training in one process without any of this."""
    folder = tmp_path_factory.mktemp("alone")
    model = make_model()
    model.save_pretrained(folder / "model")
    rows = sentences(12).map(
        lambda row: dict(small_tokenizer()(row["text"])), remove_columns="text"
    )
    collator = DataCollatorForLanguageModeling(small_tokenizer(), mlm=False)
    args = TrainingArguments(**arguments(folder / "run"))
    trainer = Trainer(model, args=args, train_dataset=rows, data_collator=collator)
    trainer.train()
    return folder / "model", logged(trainer)


@pytest.mark.skipif(not installed("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_it_trains_as_vanilla_does_alone(stage: int, alone, warm: Warm, tmp_path: Path) -> None:
    model, truth = alone
    config = on_cpu(ROOT / "ds_configs" / f"zero{stage}.json", tmp_path)
    warm.run(2, "tests/train/engines/hf_trainer_job.py", str(model), str(tmp_path), config)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sharded"] == (stage == 3) and found["ran"] == 2 * 3  # layers, steps
    # DeepSpeed's norm of the same gradients differs by 1e-4 from torch's, for vanilla as well.
    for name, rel in (("loss", 2e-5), ("grad_norm", 5e-4)):
        assert found[name] == pytest.approx(truth[name], rel=rel) and len(found[name]) == 3, name
