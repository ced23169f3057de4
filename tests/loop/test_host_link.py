"""Processes of one host measure their links to it together, before any of them chooses what waits
there. The link is fake; the processes are not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import on_ranks

from longctx.loop import host_link, states
from longctx.loop.host_link import shared_link_bytes
from longctx.train.trainer import callbacks
from longctx.train.trainer.callbacks import Reserve

CPU = torch.device("cpu")


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_all_copy_at_once_and_go_by_the_slowest(hosts, tmp_path: Path, monkeypatch) -> None:
    """Four processes: of one host, of two, and each of a host of its own, which has its link to
    itself. Nobody begins before all are ready, also on hosts that have fewer processes."""

    def check(rank: int, ranks: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks // hosts)
        ready = [tmp_path / f"ready {i}" for i in range(ranks)]

        def fake(device: torch.device, nbytes: int, for_s: float, begin) -> float:
            assert for_s == host_link.BESIDE_S
            ready[rank].touch()
            begin()
            assert all(path.exists() for path in ready)
            return 38e9 + rank

        monkeypatch.setattr(host_link, "link_beside_others", fake)
        assert shared_link_bytes(CPU) == (None if ranks == hosts else 38e9)
        assert ready[rank].exists() == (ranks > hosts)

    on_ranks(4, check, tmp_path)


def test_one_process_measures_nothing(monkeypatch) -> None:
    monkeypatch.setattr(host_link, "link_beside_others", None)
    assert shared_link_bytes(CPU) is None


def test_room_for_activations_is_made_by_that_rate(monkeypatch) -> None:
    said = []
    monkeypatch.setattr(callbacks, "shared_link_bytes", lambda device: said.append(device) or 38e9)
    monkeypatch.setattr(Reserve, "_covered", lambda self: True)
    runtime = SimpleNamespace(store=SimpleNamespace(host_bytes=lambda: 7), link_bytes=None)
    runtime.surround = lambda **facts: vars(runtime).update(facts)
    runtime.reserve = lambda model, tokens, room: said.append((runtime.link_bytes, room))
    gpu = torch.device("cuda", 0)
    reserve = Reserve(SimpleNamespace(longctx=runtime), 8)
    reserve.on_train_begin(SimpleNamespace(device=gpu))
    assert said == [gpu, (38e9, 7)]
    said.clear()
    runtime.link_bytes = None
    reserve.on_train_begin(SimpleNamespace(device=CPU))
    assert said == [(None, 7)]


def test_exact_states_are_placed_by_that_rate(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(states, "gpu_rates", lambda *a, **how: asked.append(how) or states.NO_RATES)
    args = SimpleNamespace(
        device=torch.device("cuda", 0), gradient_accumulation_steps=1, place="auto"
    )
    step = states._peer_step(torch.nn.Linear(4, 2), args, 8, "sft", 38e9)
    assert asked == [{"link_bytes": 38e9}] and step.rates is states.NO_RATES
