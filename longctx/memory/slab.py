"""Page-locked host memory of an exact size, which no forked process has.

Mapped once and locked by `cudaHostRegister`: torch's pinned allocator rounds each block up to a
power of two, and takes 3 ms for each in the middle of a step. A fork copies locked pages at once
instead of sharing them, so a data loader's workers would each take as much again:
MADV_DONTFORK leaves the slab out of them.
"""

from __future__ import annotations

import mmap

import torch

from longctx.errors import UserError
from longctx.memory.plan import GIB


class PinnedSlab:
    """Page-locked host memory of exactly `nbytes` bytes (plain memory where there is no GPU)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._locked = False
        if nbytes == 0:
            return
        pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_DONTFORK"):  # Linux
            pages.madvise(mmap.MADV_DONTFORK)
        self.data = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), nbytes, 0))
            if code != 0:
                raise UserError(
                    f"cannot page-lock {nbytes / GIB:.1f} GiB of host memory for activations "
                    f"(cudaHostRegister: error {code}); check `ulimit -l` and free memory"
                )
            self._locked = True

    def __del__(self) -> None:
        # Memory that is freed while registered makes copies from its next owner fail.
        if self._locked and torch is not None and torch.cuda is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
