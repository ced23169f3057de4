"""profiling/build.py: a model for forward and backward alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longctx.runtime.runtime import runtime_of
from profiling.build import VOCABULARY, build_model, build_trainer

pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.mark.parametrize("vocabulary", [None, 128])
def test_a_model_is_patched_or_has_its_peers_settings(vocabulary) -> None:
    cpu = torch.device("cpu")
    for class_type in ("custom", "vanilla"):
        case = dict(preset="tiny", class_type=class_type, tokens=64, layers=3, backend="auto")
        case |= dict(checkpointing="layers", offload="none")
        model = build_model(case, device=cpu, vocabulary=vocabulary, host_memory_gib=1)
        assert model.training and model.dtype == torch.bfloat16
        assert len(model.model.layers) == 3
        assert model.config.vocab_size == (vocabulary or VOCABULARY)
        assert (runtime_of(model) is not None) == (class_type == "custom")
        checkpointed = all(layer.gradient_checkpointing for layer in model.model.layers)
        assert checkpointed == (class_type == "vanilla")


def test_rows_of_pairs_train_a_task(tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--use_cpu", "--seq_len", "64", "--task", "dpo"]
    trainer, _ = build_trainer(
        flags, steps=2, output_dir=tmp_path, layers=1, lengths=[64, 48], answer_tokens=8
    )
    batch = trainer.data_collator([trainer.train_dataset[1]])
    assert batch["input_ids"].shape == (1, 48) and batch["tokens"].tolist() == [8, 8]
    assert batch["parents"].tolist() == [-1, 0, 0]
    trainer.train()
    assert trainer.state.global_step == 2
