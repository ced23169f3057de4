"""profiling/build.py: a model for forward and backward alone."""

from __future__ import annotations

import pytest
import torch

from longctx.config import ModelArguments
from longctx.model.runtime import runtime_of
from profiling.build import VOCABULARY, build_model


@pytest.mark.parametrize("vocabulary", [None, 128])
def test_a_model_is_patched_or_has_its_peers_settings(vocabulary) -> None:
    cpu = torch.device("cpu")
    for class_type in ("custom", "vanilla"):
        args = ModelArguments(preset="tiny", class_type=class_type, seq_len=64)
        case = dict(class_type=class_type, checkpointing="layers", offload="none", backend="auto")
        model = build_model(args, case, device=cpu, layers=3, vocabulary=vocabulary)
        assert model.training and model.dtype == torch.bfloat16
        assert len(model.model.layers) == 3
        assert model.config.vocab_size == (vocabulary or VOCABULARY)
        assert (runtime_of(model) is not None) == (class_type == "custom")
        checkpointed = all(layer.gradient_checkpointing for layer in model.model.layers)
        assert checkpointed == (class_type == "vanilla")
