"""Limits of containers count as the machine's own memory does: cgroup v1 and v2, at every level."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from cost_sizes import keep_of
from freed_memory import give_back_freed_memory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from longctx.constants import GIB
from longctx.errors import UserError
from longctx.memory import machine
from longctx.memory.settle import leaving_bytes
from longctx.memory.states import BlockSpec
from longctx.memory.store import ActivationStore

MIB = 2**20


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch):
    """cgroups(lines of /proc/self/cgroup, (root, mount point, type, options)s, files by name)."""

    def write(lines: str, mounts: list[tuple[str, str, str, str]], files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(lines)
        described = [
            f"31 23 0:28 {root} {tmp_path}{mounted} rw,nosuid shared:9 - {kind} none {options}\n"
            for root, mounted, kind, options in mounts
        ]
        (tmp_path / "mountinfo").write_text("".join(described))
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(machine, "PROC", tmp_path)

    return write


V2 = [("/", "/fs", "cgroup2", "rw,nsdelegate")]
V1 = [
    ("/", "/fs/cpu", "cgroup", "rw,cpu"),
    ("/docker/abc", "/fs/memory", "cgroup", "rw,memory"),
]

CASES = {
    "v2": ("0::/job\n", V2, {"fs/job/memory.max": "500", "fs/job/memory.current": "200"}, 300),
    "v2 page cache is given back": (
        "0::/job\n",
        V2,
        {
            "fs/job/memory.max": "500",
            "fs/job/memory.current": "450",
            "fs/job/memory.stat": "anon 100\nactive_file 150\ninactive_file 200\nshmem 20\n",
        },
        400,
    ),
    "v2 throttled before it is killed": (
        "0::/job\n",
        V2,
        {
            "fs/job/memory.max": "500",
            "fs/job/memory.high": "400",
            "fs/job/memory.current": "200",
        },
        200,
    ),
    "v2 a level above is narrower": (
        "0::/slurm/job/step\n",
        V2,
        {
            "fs/slurm/job/step/memory.max": "max",
            "fs/slurm/job/step/memory.current": "10",
            "fs/slurm/job/memory.max": "300",
            "fs/slurm/job/memory.current": "250",
        },
        50,
    ),
    "v2 in a container of its own": (
        "0::/\n",
        V2,
        {"fs/memory.max": "900", "fs/memory.current": "100"},
        800,
    ),
    "v2 seen from outside its namespace": (
        "0::/../other\n",
        [("/kubepods/pod", "/fs", "cgroup2", "rw")],
        {"fs/memory.max": "900", "fs/memory.current": "300"},
        600,
    ),
    "v1": (
        "5:cpu:/docker/abc\n4:memory:/docker/abc/job\n",
        V1,
        {
            "fs/memory/job/memory.limit_in_bytes": "700",
            "fs/memory/job/memory.usage_in_bytes": "300",
            "fs/memory/job/memory.stat": "active_file 1\ntotal_active_file 5\n"
            "total_inactive_file 6\n",
            "fs/memory/memory.limit_in_bytes": "9223372036854771712",
            "fs/memory/memory.usage_in_bytes": "800",
        },
        411,
    ),
    "used up": ("0::/job\n", V2, {"fs/job/memory.max": "5", "fs/job/memory.current": "9"}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_limit_counts(cgroups, name) -> None:
    lines, mounts, mebibytes, room_mib = CASES[name]

    def in_bytes(text: str) -> str:
        return re.sub(r"\b\d{1,5}\b", lambda number: str(int(number[0]) * MIB), text)

    cgroups(lines, mounts, {file: in_bytes(text) for file, text in mebibytes.items()})
    assert machine.available_host_bytes() == room_mib * MIB


@pytest.mark.parametrize("limit", [GIB, 9223372036854771712])
def test_the_process_own_limit(cgroups, limit) -> None:
    """cgroup v1 has a number where there is none."""
    files = {"fs/memory/job/memory.limit_in_bytes": str(limit)}
    cgroups("4:memory:/docker/abc/job\n", V1, files)
    assert machine.cgroup_limit_bytes() == (GIB if limit == GIB else None)


@pytest.mark.parametrize("lines", ["", "0::/job\n", "4:memory:/gone\n"])
def test_without_a_limit_the_machine_counts(cgroups, lines, monkeypatch) -> None:
    cgroups(lines, [], {})
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert machine.available_host_bytes() == memory.available


def test_the_store_is_told(cgroups) -> None:
    cgroups(*CASES["v2"][:2], {"fs/job/memory.max": str(GIB), "fs/job/memory.current": "0"})
    store = ActivationStore(torch.device("cpu"))
    with pytest.raises(UserError, match="host memory is 1.1 GiB short of the 2.0 GiB"):
        store.reserve((keep_of("o"),), 2 * GIB)


def test_what_the_run_holds() -> None:
    """Its own pages and its children's; not those of files that are mapped."""
    give_back_freed_memory()
    before = machine.held_host_bytes()
    taken = b"x" * (256 << 20)
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * (256 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        grown = machine.held_host_bytes() - before
        assert 450 << 20 < grown < 750 << 20
    finally:
        child.communicate(b"\n")
    assert len(taken) == 256 << 20
    assert machine.held_host_bytes() - before < 350 << 20


def test_weights_give_back_memory_of_their_own(tmp_path) -> None:
    """And not the pages of files, which count as free before. The largest block is there twice."""
    file = tmp_path / "weights.safetensors"
    save_file({"mapped": torch.zeros(3 * MIB, dtype=torch.uint8)}, file)
    with safe_open(file, "pt") as opened:
        mapped = opened.get_tensor("mapped")
    own = [torch.zeros(n * MIB, dtype=torch.uint8) for n in (1, 4, 2)]
    assert machine.own_bytes([mapped]) == 0
    assert machine.own_bytes([mapped, *own, torch.empty(5, device="meta")]) == 7 * MIB
    blocks = [
        BlockSpec(name=str(i), parameters={"w": nn.Parameter(x, requires_grad=False)})
        for i, x in enumerate([mapped, *own])
    ]
    assert leaving_bytes(blocks, torch.device("cuda")) == 3 * MIB
    assert leaving_bytes(blocks, torch.device("cpu")) == 0
