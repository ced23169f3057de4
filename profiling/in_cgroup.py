"""Runs a command within a part of this machine's memory, as on a smaller one.

    python profiling/in_cgroup.py --gib 124 -- python profiling/bench/step_bench.py ...

The command runs in a control group of its own (cgroup v2) with `memory.max` of so many GiB and no
swap: the kernel gives it no more, and kills it where it asks for more. Needs root. What it holds at
most is printed at its end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GIB = 2**30


def make_group(gib: float, root: Path = ROOT) -> Path:
    """A new control group under `root` that holds at most so much. Exits with a line where this
    machine makes none."""
    group = root / f"longctx-{os.getpid()}"
    try:
        if "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / "memory.max").write_text(str(int(gib * GIB)))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        sys.exit(
            f"error: no control group of {gib:g} GiB can be made ({error.strerror}: "
            f"{error.filename}): run as root where {root} is a writable cgroup v2, or on a machine "
            "of that size"
        )
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, required=True, help="memory of the group")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    args = parser.parse_args()
    group = make_group(args.gib)
    try:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        status = subprocess.run(args.command, preexec_fn=enter).returncode
        peak = group / "memory.peak"
        held = f"{int(peak.read_text()) / GIB:.1f} GiB" if peak.exists() else "an unknown amount"
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        killed = "; the kernel killed it for more" if int(events.get("oom_kill", 0)) else ""
        print(f"held {held} of {args.gib:g} GiB at most, with files' pages{killed}")
    finally:
        group.rmdir()
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
