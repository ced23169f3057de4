"""A step whose numbers the host reads while the GPU computes the next one.

The norm and the losses of a step are there when its backward has ended. If the host waits for them
then, the GPU waits in turn: for the logged line, for the next batch, for its launches, which takes
some milliseconds of a short step. The update needs no host, since a guard on the GPU leaves it out
if a number is not finite. So the numbers are read where the next step's forward has been launched,
and the line is written there, with the figures of its own step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longctx.train.trainer.nonfinite import Recorded
from longctx.train.trainer.under_way import UnderWay


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step."""

    norm: float
    losses: Sequence[float]
    """Those of its batches."""
    logged: float
    """The sum of the losses since the last line."""
    pending: float | None
    """The attended pairs since the last line, if the GPU has counted them (`Throughput`)."""


@dataclass
class LateStep:
    """A step whose update has begun, and whose numbers are under way."""

    step: int
    recorded: Recorded
    norm_and_losses: UnderWay
    totals: UnderWay
    line: Callable[[StepNumbers], None] | None = None
    """Writes the step's line; None if it has none, or none yet."""

    def read(self) -> StepNumbers:
        """Waits until the numbers are here."""
        found, totals = self.norm_and_losses.read(), self.totals.read()
        pending = totals.get("pending")
        return StepNumbers(
            norm=found["norm"][0],
            losses=found["losses"],
            logged=totals["logged"][0],
            pending=None if pending is None else pending[0],
        )
