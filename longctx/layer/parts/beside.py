"""Attention and a mixer side by side in one residual block, as in Falcon-H1:

    n1 = rms_norm(x)              o, lse = attention(n1)       z, s = module(n1, s)
    h = x + r_m z + r_a o Wo'                                  (T, D)

Each part is what it is alone (attention.py, mixer.py), with a factor r of its own. Forward runs
attention over the row, then the mixer; h is made tile by tile, and only o's matmul rounds the sum
of attention and what it is added to. What both make of the row, o, lse, z and the states, is one
keepable, since h needs all of it.

Backward, after the MLP's has turned dy into dh, runs the mixer first. It leaves its part of dn1, in
a tensor (T, D), for attention's, which adds its own inside a matmul and passes the sum back through
the norm that both read.
"""

from __future__ import annotations

from torch import Tensor

from longctx.layer.parts.attention import SelfAttention
from longctx.layer.parts.mixer import Mixer
from longctx.layer.parts.protocol import NOTHING, Kept, OverRow
from longctx.layer.passes import Pass


class AttentionAndMixer(OverRow):
    """The block in one pass. `kept` has what both parts keep."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        assert "post1" not in p.weights.given, "a norm after the block would need both outputs"
        self._attention, self._mixer = SelfAttention(p, kept), Mixer(p, kept)

    def begin(self, x: Tensor) -> None:  # (T, D)
        self._attention.begin(x)
        self._mixer.begin(x)

    def normed(self, x: Tensor) -> Tensor:  # (t, D) -> (t, D)
        return self._attention.normed(x)

    def output(self, x: Tensor, tile: slice) -> Tensor:
        """Returns h of a tile, (t, D), and writes what forward keeps of it."""
        return self._attention.output(x, tile, onto=self._mixer.output(x, tile))

    def again(self, x: Tensor) -> None:
        self._attention.again(x)
        self._mixer.again(x)

    def output_again(self, x: Tensor, tile: slice) -> tuple[Tensor, Tensor | None]:
        h = self._attention.h
        return (self.output(x, tile) if h is None else h[tile]), None

    def reaches(self, wants_dx: bool) -> bool:
        return self._attention.reaches(wants_dx) or self._mixer.reaches(wants_dx)

    def output_backward(
        self, dh: Tensor, held: Tensor | None, tile: slice, *, goes_on: bool
    ) -> None:
        for part in (self._attention, self._mixer):
            part.output_backward(dh, held, tile, goes_on=goes_on)

    def finish_output(self) -> None:
        self._attention.finish_output()

    def backward_(self, dh: Tensor, x: Tensor, dn: Tensor | None, wants_dx: bool) -> None:
        if self._mixer.reaches(wants_dx):
            dn = self._mixer.normed_grad(dh, x, dn)
        if self._attention.reaches(wants_dx):
            self._attention.backward_(dh, x, dn, wants_dx)
