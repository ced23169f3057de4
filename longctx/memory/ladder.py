"""The search: what layers keep from forward to backward, where it waits, where states live, and how
the work is cut, so that a step takes least.

All candidates of a cut are counted in one go (candidates.py): GPU memory at each moment, which
cost/peak.py has by name, host memory, and seconds by the function that predicts them
(cost/seconds.py). What is looked at does not depend on how much memory there is. So with more of
it nothing that fitted is lost, and no plan becomes slower.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.fitted import GAPS
from longctx.cost.kept import Ladder, runs
from longctx.cost.peak import Tables
from longctx.cost.rates import Rates
from longctx.cost.seconds import NO_TRAFFIC, Exchanged, Seconds, Traffic, seconds
from longctx.cost.sizes import Batch, Sizes
from longctx.memory.candidates import Candidates, Counted, candidates, sets
from longctx.memory.levels import Levels
from longctx.memory.place import Place
from longctx.options import Keeping, Offload

Count = Callable[[Sizes, Batch], Tables]
"""The tables of a model, by how its work is cut."""


class Budget(NamedTuple):
    """Bytes that a run may take."""

    gpu: int
    host: int


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What layers keep, how the work on them is cut, and where states live."""

    ladder: Ladder
    sizes: Sizes
    """With the cut."""
    places: list[Place]
    traffic: Traffic
    needed: Budget
    """Bytes, at most: where that is more than there is, nothing fits, and this is what lacks
    least."""
    seconds: float
    """Of a step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is to be planned."""

    count: Count
    sizes: Sizes
    batch: Batch
    rates: Rates
    keep: Keeping = "auto"
    offload: Offload = "auto"
    exchanges: tuple[Exchanged, ...] = ()
    given: tuple[Ladder, Sizes] | None = None
    """What is kept and how the work is cut, if that is decided."""


class Score(NamedTuple):
    """Of a candidate; the least is the best."""

    missing_bytes: int
    """Of the GPU and the host."""
    displayed_s: float = math.inf
    host_bytes: int = 0
    seconds: float = math.inf


def choose(step: Step, levels: Sequence[Levels], budget: Budget) -> Chosen:
    """The fastest of all that fit, to three digits; of those the one with least on the host. Where
    none does, what lacks least."""
    best, chosen = Score(sys.maxsize), None
    budget = budget._replace(gpu=budget.gpu - gaps(step))
    for sizes in _cuts(step):
        tables = step.count(sizes, step.batch)
        counted = Counted(_candidates(step, tables), tables)
        for placed in levels:
            counted = counted.some(_worth_placing(step, counted, placed, budget, best))
            if not len(counted.found.layers):
                break
            score, made = _best(step, counted, placed, budget)
            if score < best:
                best, chosen = score, made
    assert chosen is not None
    needed = chosen.needed._replace(gpu=chosen.needed.gpu + gaps(step))
    return replace(chosen, needed=needed)


def gaps(step: Step) -> int:
    """Bytes that torch's allocator has reserved at the peak and nobody can use."""
    custom = step.sizes.class_type == "custom"
    return int(GAPS * step.sizes.unit(step.batch.tokens)) if custom else 0


LEAST = 256
"""Of candidates that cannot fit, so many that lack least are looked at."""


def _worth_placing(
    step: Step, counted: Counted, placed: Levels, budget: Budget, best: Score
) -> Any:  # (N,)
    """Which candidates may be better than the best so far: they lack no more, and take no longer,
    if states were nowhere in their way."""
    needed = counted.on_gpu + counted.loss_bytes + placed.least_bytes
    lacks = np.maximum(0, needed - budget.gpu)
    lacks += np.maximum(0, counted.hosted.nbytes - budget.host)
    if best.missing_bytes == 0:
        fastest = displayed(_seconds(step, counted, NO_TRAFFIC).step)
        return np.flatnonzero((lacks == 0) & (fastest <= best.displayed_s))
    if lacks.min() == 0:
        return np.flatnonzero(lacks == 0)
    some = np.argsort(lacks, kind="stable")[:LEAST]
    return some[lacks[some] < best.missing_bytes]


def _best(step: Step, counted: Counted, placed: Levels, budget: Budget) -> tuple[Score, Chosen]:
    """Of one cut, and one order in which states leave."""
    level, missing = placed.lowest(counted.activity, budget.gpu)
    host = placed.host_bytes(level, counted.below)
    over = missing + np.maximum(0, host - budget.host)
    some = np.flatnonzero(over == over.min())
    traffic = placed.traffic(level[some])
    step_s = _seconds(step, counted.some(some), traffic).step
    shown = displayed(step_s)
    k = int(np.lexsort((step_s, host[some], shown))[0])
    i = int(some[k])
    chosen = Chosen(
        ladder=counted.found.ladder(i),
        sizes=counted.tables.sizes,
        places=placed.places(int(level[i])),
        traffic=placed.traffic(level[[i]]),
        needed=Budget(budget.gpu + int(missing[i]), int(host[i])),
        seconds=float(step_s[k]),
    )
    return Score(int(over[i]), float(shown[k]), int(host[i]), float(step_s[k])), chosen


def displayed(seconds: Any) -> Any:
    """To three digits, as seconds are shown: faster by less is not faster."""
    digits = np.floor(np.log10(seconds)) - 2
    return np.round(seconds / 10**digits) * 10**digits


def _cuts(step: Step) -> Iterable[Sizes]:
    if step.given is not None:
        return [step.given[1]]
    tokens = step.batch.tokens
    cuts = [*step.sizes.cuts(tokens)]
    if step.sizes.class_type != "custom":
        return cuts[:1]
    if step.offload == "all":  # little memory: only logits may be fewer
        return [cut for cut in cuts if cut.cut(tokens)[:2] == cuts[0].cut(tokens)[:2]]
    return cuts


def _candidates(step: Step, tables: Tables) -> Candidates:
    if step.given is not None:
        return Candidates.of([runs(step.given[0])])
    return candidates(step.sizes.layers, sets(tables.layer, step.rates), step.keep, step.offload)


def _seconds(step: Step, counted: Counted, traffic: Traffic) -> Seconds:
    return seconds(
        counted.tables,
        layers=step.sizes.layers,
        passes=step.batch.passes,
        again=counted.again,
        hosted=counted.hosted,
        traffic=traffic,
        rates=step.rates,
        exchanges=step.exchanges,
    )


def host_bytes(step: Step, chosen: Chosen) -> int:
    """What its saved activations need of the host."""
    layer = step.count(chosen.sizes, step.batch).layer
    return sum(layer.kept_bytes(keep.hosted) for keep in chosen.ladder)


def predicted(step: Step, chosen: Chosen) -> Seconds:
    """Of what was chosen, on another batch or with other exchanges than it was chosen for."""
    tables = step.count(chosen.sizes, step.batch)
    counted = Counted(Candidates.of([runs(chosen.ladder)]), tables)
    found = _seconds(step, counted, chosen.traffic)
    return Seconds(*(float(np.reshape(x, -1)[0]) for x in found))
