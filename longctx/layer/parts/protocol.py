"""What the schedule asks of a layer's parts. There are two roles, and a layer has at most one part
of each; the classes here are the parts of a layer that lacks the role.

`OverRow`, as attention or a mixer: it needs all tokens of a row, so it begins before the tiles and
ends after them. `OverTiles`, as the MLP: all that it does for a token needs this token alone. One
loop over tiles runs the end of the first part and all of the second, so that h, between them,
exists for one tile only.

A part is made once in forward and once in backward, and then has what forward kept, by name. It
hands what it keeps to `Pass.keep`, and its parameters' gradients to `Pass.grads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from longctx.layer.passes import Pass

Kept = Mapping[str, Tensor]
NOTHING: Kept = MappingProxyType({})


class Part:
    """The base class of both roles, made once for each pass through a layer."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        self._pass = p


class OverRow(Part):
    """A block h = x + f(x) over whole rows, x (T, D); here h = x."""

    def begin(self, x: Tensor) -> None:
        """Runs what needs the whole row, in forward, and keeps of it what forward keeps."""

    def normed(self, x: Tensor) -> Tensor:  # (t, D) -> (t, D)
        """Returns what the part reads of x, which a part beside it reads, too."""
        return x

    def output(self, x: Tensor, tile: slice) -> Tensor:
        """Returns h of a tile, (t, D), in forward."""
        return x[tile]

    def again(self, x: Tensor) -> None:
        """Makes ready in backward what `begin` made, kept or else computed again."""

    def output_again(self, x: Tensor, tile: slice) -> tuple[Tensor, Tensor | None]:
        """Returns h of a tile in backward, and what `output_backward` is to be given of it."""
        return self.output(x, tile), None

    def reaches(self, wants_dx: bool) -> bool:
        """Whether backward goes on before `output`: to parameters, or to x, if dx is wanted."""
        return wants_dx

    def output_backward(
        self, dh: Tensor, held: Tensor | None, tile: slice, *, goes_on: bool
    ) -> None:
        """Runs backward of a tile's `output`, from dh (t, D), which stays."""

    def finish_output(self) -> None:
        """Finishes the gradients that are complete after the last tile."""

    def backward_(self, dh: Tensor, x: Tensor, dn: Tensor | None, wants_dx: bool) -> None:
        """Runs what is left, if it `reaches` anything; dh (T, D) becomes dx, if wanted. `dn` (T, D)
        is the gradient of `normed` from a part beside this one."""


class OverTiles(Part):
    """A block y = h + f(h) over tiles of tokens; here y = h."""

    def keep(self, x: Tensor) -> None:
        """Allocates what forward keeps for all tokens, of which x (T, D) is the layer's input."""

    def forward(self, h: Tensor, tile: slice, *, onto: Tensor, out: Tensor) -> None:
        """Writes f(h) of a tile, added to `onto`, into `out`, (t, D) each."""
        out.copy_(onto)

    def backward(
        self, dy: Tensor, h: Tensor, tile: slice, *, onto: Tensor | None = None, out: Tensor
    ) -> None:
        """Writes the gradient of h through f, added to `onto` if given, into `out`, which may be
        dy. Adds to the parameters' gradients."""
        if onto is not out:
            out.copy_(onto) if onto is not None else out.zero_()

    def finish(self) -> None:
        """Finishes the parameters' gradients."""
