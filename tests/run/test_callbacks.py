"""What is done around a step."""

from __future__ import annotations

import time

import torch
from small_model import tiny_config
from small_run import on_ranks
from transformers import LlamaForCausalLM

from longctx.config import TrainArguments
from longctx.memory import store
from longctx.model.patch import patch_as
from longctx.options import PatchOptions
from longctx.run import callbacks
from longctx.run.callbacks import Reserve

TOKENS = 4096
FREE_BYTES = 5_000_000
"""Enough for x and o of both processes, not of one after the other took its own."""
MAY_LOCK = FREE_BYTES // 2 * 9 // 10


def test_processes_share_out_what_their_host_had_free(tmp_path, monkeypatch) -> None:
    """One that comes later would see less, and keep less than the other."""
    taken = tmp_path / "taken"
    taken.touch()

    class Slab(store.PinnedSlab):
        def __init__(self, nbytes: int, device: torch.device) -> None:
            super().__init__(nbytes, device)
            with taken.open("a") as file:
                file.write(f"{nbytes}\n")

    def share_bytes() -> int:
        return (FREE_BYTES - sum(map(int, taken.read_text().split()))) // 2

    def check(rank: int, processes: int) -> None:
        model = LlamaForCausalLM(tiny_config())
        patch_as(model, PatchOptions(offload_activations="all"), torch.device("cpu"))
        time.sleep(0.3 * rank)
        said: list[str] = []
        monkeypatch.setattr(callbacks, "print_rank0", said.append)
        Reserve(model, TOKENS).on_train_begin(TrainArguments(output_dir=str(tmp_path)))
        locked = model.longctx.store.locked_bytes
        assert "x o on the host" in said[0] and 0 < locked <= MAY_LOCK
        assert f"; {locked}.0 of {MAY_LOCK}.0 GiB of host memory" in said[0]

    monkeypatch.setattr(store, "host_share_bytes", share_bytes)
    monkeypatch.setattr(store, "PinnedSlab", Slab)
    monkeypatch.setattr(callbacks, "GIB", 1)
    on_ranks(2, check, tmp_path)
