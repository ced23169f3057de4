"""Page-locked host memory of an exact size.

The slab is mapped once, holds zeros, and is locked by `cudaHostRegister`. torch's pinned allocator
would round each block up to a power of two, and take 3 ms for each in the middle of a step. All of
torch's threads touch the pages before they are locked, large pages if the kernel has them; locking
alone would fetch them in one thread, 4 KiB at a time. A page takes no memory until it is written or
locked, so weights may move into a slab block by block before it is locked. A process that is forked
later, such as a data loader's worker, gets no copy.
Times and sizes: profiling/results/h200_slab.json.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from longctx.constants import GIB
from longctx.errors import UserError

LINE = 512
"""Each tensor in a slab begins at a multiple of this many bytes."""
PAGE = 4096


class PinnedSlab:
    """Page-locked host memory of exactly `nbytes` bytes (plain memory where there is no GPU)."""

    def __init__(self, nbytes: int, device: torch.device, *, locked: bool = True) -> None:
        """Raises UserError if the host cannot give the memory, and as `lock` does. `locked` False:
        the caller locks the slab later."""
        self.data, self._device, self._locked = _zeros(nbytes), device, False
        if locked:
            self.lock()

    def lock(self) -> None:
        """Page-locks the slab, whose data stay. Raises UserError if this is refused."""
        nbytes = self.data.nbytes
        if self._device.type != "cuda" or not nbytes:
            return
        self.data[::PAGE].bitwise_or_(0)  # touches each page without changing it
        code = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), nbytes, 0))
        if code != 0:
            raise UserError(
                f"cannot page-lock {nbytes / GIB:.1f} GiB of host memory "
                f"(cudaHostRegister: error {code}); check `ulimit -l` and free memory"
            )
        self._locked = True

    def __del__(self) -> None:
        # Memory that is freed while registered makes copies from its next owner fail.
        if self._locked and torch is not None and torch.cuda is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())


def whole_lines(nbytes: int) -> int:
    """Rounds bytes up, so that the next tensor is aligned."""
    return -(-nbytes // LINE) * LINE


def _zeros(nbytes: int) -> torch.Tensor:
    """Returns a tensor of zeros, which the kernel's fresh pages are."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(
            f"the host cannot give {nbytes / GIB:.1f} GiB of memory: {error.strerror}"
        ) from error
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
