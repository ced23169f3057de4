"""What is done around a step."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import torch
from small_model import tiny_config
from small_run import on_ranks
from transformers import LlamaForCausalLM

from longctx.memory import store
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import TrainArguments
from longctx.train.trainer import callbacks
from longctx.train.trainer.callbacks import Console, Lines, Reserve, console

LINE = re.compile(r"\d\d:\d\d:\d\d  step  3/40  loss 2.5000      12 tok/s\n")


def test_a_step_is_a_line_with_a_time_in_a_file_and_a_bar_on_a_terminal(monkeypatch, capsys):
    bars, none = SimpleNamespace(disable_tqdm=False), SimpleNamespace(disable_tqdm=True)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=40)
    shown = console(bars)
    shown.on_log(bars, state, None, {"loss": 2.5, "tokens_per_s": 12.3})
    shown.on_log(bars, state, None, {"train_runtime": 1.0})
    state.is_world_process_zero = False
    shown.on_log(bars, state, None, {"loss": 2.5})
    assert LINE.fullmatch(capsys.readouterr().out)
    monkeypatch.setattr(callbacks, "on_terminal", lambda: True)
    assert isinstance(console(bars), Console) and isinstance(console(none), Lines)


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
        assert "layers 0 to 1: x o;" in said[0] and 0 < locked <= MAY_LOCK
        assert f"; {locked}.0 of {MAY_LOCK}.0 GiB of host memory" in said[0]

    monkeypatch.setattr(store, "host_share_bytes", share_bytes)
    monkeypatch.setattr(store, "PinnedSlab", Slab)
    monkeypatch.setattr(callbacks, "GIB", 1)
    on_ranks(2, check, tmp_path)
