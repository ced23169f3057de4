"""No rank outlives another: one that is killed or fails ends every rank of its machine in seconds.

NCCL waits for a lost rank until --ddp_timeout, half an hour; gloo notices a broken connection and
says so in words about sockets. So while a run trains each rank has a thread that sleeps until the
process of another one has ended (the kernel wakes it: a pidfd, no polling, no heartbeat that a busy
rank could miss). Who lives on gets a few seconds to say why by itself, and ends with one line.

Ranks of other machines are their launcher's, or end by --ddp_timeout.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from longctx.errors import UserError, one_line, say

GRACE_S = 3.0
"""A rank whose collective fails says more than that another one is gone."""
CLEANING_UP_S = 20
"""NCCL may wait for ever for a communicator that others have left."""


@contextmanager
def end_with_peers() -> Iterator[None]:
    """Ends this rank, within, when another one of its machine ends. Every rank must enter and leave
    it. Raises UserError where a collective lost the others."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    with _watched(_peers()):
        try:
            yield
        except Exception as error:
            atexit.register(_end_within, CLEANING_UP_S)
            if not _is_lost(error):
                raise
            raise UserError(
                f"rank {dist.get_rank()} lost the others: one of them ended or does not answer "
                f"({one_line(error, 160)}); its own last words say why"
            ) from error


def _peers() -> dict[int, int]:
    """Returns the descriptors of the processes of other ranks that this kernel knows, by rank."""
    link = "/proc/self/ns/pid"  # ranks in other containers have other numbers
    where = os.uname().nodename, os.readlink(link) if os.path.islink(link) else ""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (where, os.getpid()))
    found: dict[int, int] = {}
    for rank, (there, pid) in enumerate(everyone):
        if there == where and rank != dist.get_rank() and hasattr(os, "pidfd_open"):  # Linux
            with suppress(OSError):  # a sandbox that forbids the call
                found[rank] = os.pidfd_open(pid)
    return found


@contextmanager
def _watched(peers: dict[int, int]) -> Iterator[None]:
    reader, writer = os.pipe()
    thread = threading.Thread(target=_watch, args=(peers, reader), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(writer, b"!")  # to close it would not do: forked workers of data loaders have it
        thread.join()
        for descriptor in (reader, writer, *peers.values()):
            os.close(descriptor)


def _watch(peers: dict[int, int], over: int) -> None:
    """Watches the other ranks until `over` becomes readable, when this rank is done."""
    ended = select.select([over, *peers.values()], [], [])[0]
    if over in ended or select.select([over], [], [], GRACE_S)[0]:
        return
    lost = next(rank for rank, descriptor in peers.items() if descriptor in ended)
    say(
        f"error: rank {dist.get_rank()} ends because rank {lost} did, which said why if it was not "
        "killed",
        file=sys.stderr,
    )
    os._exit(1)  # the main thread may wait for the lost rank in a collective


def _is_lost(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _end_within(seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
