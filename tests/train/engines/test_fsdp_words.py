"""Every form in which FSDP2 is asked for: what transformers and accelerate understand is what the
engine and the plan understand."""

from __future__ import annotations

import os
from argparse import Namespace

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments

from longctx.errors import UserError
from longctx.train.engines.fsdp import FSDP2

FORMS = {
    "true": ("true", None, {}),
    "seed": ("full_shard auto_wrap offload", None, {}),
    "words": ("full_shard auto_wrap", None, {}),
    "offload alone": ("offload", None, {}),
    "stays gathered": ("shard_grad_op offload", None, {}),
    "a file": ("true", {"cpu_offload": True}, {}),
    "a file's names": ("true", {"fsdp_cpu_offload": True}, {}),
    "a file wins": ("full_shard offload", {"cpu_offload": False}, {}),
    "a file keeps": ("full_shard", {"reshard_after_forward": False}, {}),
    "both": ("offload", {"fsdp_version": 2, "reshard_after_forward": True}, {}),
    "launched": (None, None, {"FSDP_OFFLOAD_PARAMS": "true"}),
    "launched, kept": (None, None, {"FSDP_RESHARD_AFTER_FORWARD": "false"}),
    "launched, plain": (None, None, {"FSDP_OFFLOAD_PARAMS": "false"}),
    "launched and words": ("full_shard", None, {"FSDP_OFFLOAD_PARAMS": "true"}),
    "a word against the launcher": ("full_shard", None, {"FSDP_RESHARD_AFTER_FORWARD": "false"}),
}


@pytest.fixture
def environment(monkeypatch):
    """transformers writes into it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return os.environ


@pytest.mark.parametrize("form", FORMS)
def test_as_transformers_understands_it(environment, tmp_path, form) -> None:
    words, file, launched = FORMS[form]
    environment.update(launched, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    engine = FSDP2()
    engine.read(Namespace(fsdp=words, fsdp_config=dict(file) if file else None))
    asked = True if words == "true" else words
    given = TrainingArguments(str(tmp_path), fsdp=asked, fsdp_config=file, use_cpu=True)
    plugin = FullyShardedDataParallelPlugin(**given.fsdp_plugin_args or {"fsdp_version": 2})
    layout = engine.layout(2, 1)
    assert layout.offloads == isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert layout.reshards == bool(plugin.reshard_after_forward)


@pytest.mark.parametrize("words", ["hybrid_shard", "full_shard,offload", "yes please"])
def test_words_that_fsdp2_has_not(words) -> None:
    with pytest.raises(UserError, match="is no word of FSDP2: write --fsdp true"):
        FSDP2().read(Namespace(fsdp=words, fsdp_config=None))
