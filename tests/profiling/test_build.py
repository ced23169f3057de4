"""profiling/build.py: a model for forward and backward alone."""

from __future__ import annotations

import pytest
import torch

from longctx.model.runtime import runtime_of
from profiling.build import VOCABULARY, build_model


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
