"""Gives back what earlier tests have freed, before a test counts what a process takes.

glibc keeps the memory of blocks below 32 MiB that were freed between others. What a process takes
out of that later, it had before."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back_freed_memory() -> None:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
