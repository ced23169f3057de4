"""The ranks that share rows: each holds consecutive tokens of every row.

Token-wise work, activations and the loss are a rank's own. What needs its neighbours is small,
integers of a token each, and gathered once per batch: positions (for documents) and labels (to
shift them). Attention's exchange is in sharded.py.
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
    """Of one rank. `group` is the process group of the ranks that share rows, in their order."""

    group: Any

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def whole(self, own: Tensor) -> Tensor:  # (B, S / R) -> (B, S)
        """The same of all ranks, one after the other along each row."""
        parts = own.new_empty(self.ranks * len(own), own.shape[1])
        dist.all_gather_into_tensor(parts, own.contiguous(), group=self.group)
        return parts.unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1)

    def own(self, whole: Tensor) -> Tensor:  # (B, S) -> (B, S / R)
        """Raises ValueError for rows of another length than the ranks divide: ranks with different
        numbers of tokens would wait for each other for ever."""
        if whole.shape[1] % self.ranks:
            raise ValueError(f"{self.ranks} ranks cannot share rows of {whole.shape[1]} tokens")
        return whole.chunk(self.ranks, dim=1)[self.rank]

    def cut(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:  # (B, S) -> (B, S / R) each
        """Rows are filled up with a document that nobody is trained on."""
        length = next(iter(batch.values())).shape[1]
        missing = -length % self.ranks

        def filled(name: str, x: Tensor) -> Tensor:
            if not missing:
                return x
            value = IGNORE_INDEX if name in ("labels", "shift_labels") else 0
            x = torch.nn.functional.pad(x, (0, missing), value=value)
            if name == "position_ids":
                x[:, length:] = torch.arange(missing, device=x.device)
            return x

        return {name: self.own(filled(name, x)) for name, x in batch.items()}

    def shifted(self, labels: Tensor, ignored: int) -> Tensor:  # (B, S / R), both
        """Each token's label is that of the next one, which may be another rank's."""
        return self.own(torch.nn.functional.pad(self.whole(labels)[:, 1:], (0, 1), value=ignored))

    def total(self, count: Tensor) -> Tensor:  # (), both
        """The sum over the ranks."""
        total = count.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, found: Any) -> list[Any]:
        """Of each rank, in their order. Python objects: not for a step."""
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, found, group=self.group)
        return everyone

    def exchange(self, sent: Tensor) -> Exchange:  # (R, ...)
        """Sends part r to rank r, beside what is computed until `received` is called."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return Exchange(work, sent, received)


class Exchange:
    """Under way. It holds both tensors: their memory may be used again only after it."""

    def __init__(self, work: Any, sent: Tensor, received: Tensor) -> None:
        self._under_way: tuple[Any, Tensor, Tensor] | None = (work, sent, received)

    def received(self) -> Tensor:  # (R, ...)
        """What came from each rank; can be asked once. On a GPU the stream waits, not the host."""
        assert self._under_way is not None
        work, _, received = self._under_way
        work.wait()
        self._under_way = None
        return received
