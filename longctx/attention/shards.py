"""The ranks that share rows: each holds consecutive tokens of every row.

Each rank does token-wise work, activations and the loss for its own tokens. Two integers per token
are gathered from all ranks once per batch: positions (for documents) and labels (to shift them).
Attention's exchange is in sharded.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.constants import IGNORE_INDEX


@dataclass(frozen=True)
class Shards:
    """One rank's view of shared rows. `group` is the process group of their ranks, in order."""

    group: Any

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def whole(self, own: Tensor) -> Tensor:  # (B, S / R) -> (B, S)
        """Gathers the tensors of all ranks and concatenates them along each row."""
        parts = own.new_empty(self.ranks * len(own), own.shape[1])
        dist.all_gather_into_tensor(parts, own.contiguous(), group=self.group)
        return parts.unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1)

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:  # (B, S) -> (B, S / R)
        """Returns this rank's part of each row, whose tokens are dimension `dim`. Raises ValueError
        for a row length not divisible by the ranks: ranks with different numbers of tokens would
        wait for each other for ever."""
        if (tokens := whole.shape[dim]) % self.ranks:
            raise ValueError(f"{self.ranks} ranks cannot share rows of {tokens} tokens")
        return whole.chunk(self.ranks, dim=dim)[self.rank]

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's part of a batch: (*, B, S / R) of each (*, B, S), and all of a tensor
        that is not one number per token, such as pixels. Rows are padded with a document without
        labels."""
        shape = batch["input_ids"].shape
        length = shape[1]
        missing = -length % self.ranks

        def filled(name: str, x: Tensor) -> Tensor:
            if not missing:
                return x
            value = IGNORE_INDEX if name in ("labels", "shift_labels") else 0
            x = torch.nn.functional.pad(x, (0, missing), value=value)
            if name == "position_ids":
                x[..., length:] = torch.arange(missing, device=x.device)
            return x

        rows = {name for name, x in batch.items() if x.shape[-2:] == shape}
        return {
            name: self.own(filled(name, x), -1) if name in rows else x for name, x in batch.items()
        }

    def shifted(self, labels: Tensor, ignored: int) -> Tensor:  # (B, S / R), both
        """Returns labels in which each token has the label of the next one, which may be on another
        rank."""
        return self.own(torch.nn.functional.pad(self.whole(labels)[:, 1:], (0, 1), value=ignored))

    def total(self, count: Tensor) -> Tensor:  # (), both
        """Returns the sum of `count` over the ranks."""
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, found: Any) -> list[Any]:
        """Gathers a Python object from each rank, in order. It is too slow for a step."""
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, found, group=self.group)
        return everyone

    def exchange(self, sent: Tensor) -> Exchange:  # (R, ...)
        """Starts to send part r to rank r; computation may go on until `received` is called."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return Exchange(work, sent, received)


class Exchange:
    """An exchange under way. It holds both tensors, whose memory must not be reused yet."""

    def __init__(self, work: Any, sent: Tensor, received: Tensor) -> None:
        self._under_way: tuple[Any, Tensor, Tensor] | None = (work, sent, received)

    def received(self) -> Tensor:  # (R, ...)
        """Returns the parts from each rank, once only. On a GPU the stream waits, not the host."""
        assert self._under_way is not None
        work, _, received = self._under_way
        work.wait()
        self._under_way = None
        return received
