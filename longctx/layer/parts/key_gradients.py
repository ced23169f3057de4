"""Where dk and dv of all head groups stand, from attention's backward to the projections'.

Usually they have a tensor of their own, (T, 2 K d), into which attention writes. Where a norm
follows attention, do (T, H d) was made for all heads before the first group began, and a group's
columns of it are free when attention's backward of the group is over: dv moves there, and dk too,
if there are two query heads or more to a key/value head. That is one unit less for OLMo 2, and one
less for Gemma 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.layer.parts.heads import HeadGroup


class KeyGradients:
    """dk and dv (T, K d) of the groups. `do` (T, H d): the gradients of o, where they are held."""

    def __init__(
        self, groups: Sequence[HeadGroup], do: Tensor | None, like: Tensor, T: int
    ) -> None:
        h, k = (x.stop - x.start for x in groups[0][:2])
        inside = 0 if do is None else min(2, h // k)  # how many of dv and dk do has room for
        Kd = k * len(groups)
        self._own = like.new_empty(T, (2 - inside) * Kd)
        self._homes: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            free = self._own[:, Kd:] if do is None else do[:, group.q]
            dv = free[:, group.kv] if do is None else free[:, :k]
            dk = self._own[:, group.kv] if inside < 2 else free[:, k : 2 * k]
            self._homes.append((dk, dv))
        self._inside = inside

    def rooms(self, i: int) -> tuple[Tensor, Tensor]:  # (T, k d) each
        """Returns where attention of group i may write dk and dv while it reads do."""
        dk, dv = self._homes[i]
        return (
            torch.empty_like(dk) if self._inside == 2 else dk,
            torch.empty_like(dv) if self._inside else dv,
        )

    def put(self, i: int, dk: Tensor, dv: Tensor) -> None:
        """Moves those of group i from `rooms` to where they stand; its do is not read again."""
        for home, grad in zip(self._homes[i], (dk, dv), strict=True):
            if home.data_ptr() != grad.data_ptr():
                home.copy_(grad)

    def of(self, tile: slice) -> list[Tensor]:
        """Returns the columns of dk | dv (t, 2 K d) of a tile, in pieces."""
        if not self._inside:
            return [self._own[tile]]
        return [home[which][tile] for which in (0, 1) for home in self._homes]
