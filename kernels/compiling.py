"""Kernels are compiled when a run first needs them and kept on disk for later runs. That is said
once, in the first process, when a kernel is really compiled; a run that finds all of its kernels
says nothing:

    compiling kernels, kept for later runs in ~/.triton/cache (Triton)

Triton tells of a kernel when it is ready, so the line comes after the first one.
"""

from __future__ import annotations

from typing import Any

from longctx.errors import print_rank0
from longctx.kernels.launch import HAS_TRITON, triton


class Notice:
    """The folders in which the compilers keep kernels, and whether the line was printed."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        """Compiler -> folder; one whose kernels are not kept has none."""
        self.wanted = False
        """A program that trains says it, a library does not."""

    def compiled(self) -> None:
        """A kernel was not found, wherever its compiler keeps them."""
        if self.wanted:
            self.wanted = False
            kept = " and ".join(f"{folder} ({name})" for name, folder in self.folders.items())
            print_rank0(f"compiling kernels{kept and ', kept for later runs in '}{kept}")


NOTICE = Notice()


def announce_compiling() -> None:
    """Prints one line when the first kernel is compiled from now on."""
    NOTICE.wanted = True
    if HAS_TRITON and "Triton" not in NOTICE.folders:
        NOTICE.folders["Triton"] = triton.knobs.cache.dir
        triton.knobs.compilation.listener = _listener(triton.knobs.compilation.listener)


def _listener(before: Any) -> Any:
    """Triton's CompilationListener; one that was there before hears as much as it did."""

    def listener(*, cache_hit: bool, **compiled: Any) -> None:
        if not cache_hit:
            NOTICE.compiled()
        if before is not None:
            before(cache_hit=cache_hit, **compiled)

    return listener
