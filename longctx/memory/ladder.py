"""The search for the fastest step: which activations layers save and where, where states live, and
how the work is cut.

All candidates of a cut are counted at once (counted.py): GPU memory at each moment, which
cost/peak.py counts by name, host memory, and seconds, by the function that also predicts them
(cost/seconds.py). Which candidates are scored does not depend on how much memory there is. So more
memory never loses a candidate that fitted, and never makes a plan slower. Ladders in which some
layers keep no input are counted only where one of them could be faster than the best of the others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from longctx.cost.fitted import GAPS
from longctx.cost.kept import Ladder, asked, hosts
from longctx.cost.launches import graph_bytes, host_waits
from longctx.cost.peak import Tables
from longctx.cost.rates import Rates
from longctx.cost.seconds import (
    NO_TRAFFIC,
    Exchanged,
    Hosted,
    Seconds,
    Traffic,
    nothing_hosted,
    of_all,
    seconds,
)
from longctx.cost.sizes import Batch, Sizes
from longctx.cost.table import INPUT, Load, load
from longctx.memory.candidates import Candidates, candidates, sets, sparse, usual
from longctx.memory.counted import Counted
from longctx.memory.levels import Levels
from longctx.memory.place import Place
from longctx.settings import Keeping, Offload

Count = Callable[[Sizes, Batch], Tables]
"""Returns the tables of a model for a cut of its work."""


class Budget(NamedTuple):
    """The bytes that a run may take."""

    gpu: int
    host: int


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The activations that layers save, how the work on them is cut, and where states live."""

    ladder: Ladder
    sizes: Sizes
    """The sizes of the model, with the cut."""
    places: list[Place]
    traffic: Traffic
    needed: Budget
    """The largest bytes of a step. If they exceed the budget, nothing fits, and this choice lacks
    the fewest."""
    seconds: float
    """The seconds of a step."""
    graph_bytes: int = 0
    """Bytes of `needed` that CUDA graphs take; 0: layers run eagerly."""
    no_graphs: str = ""
    """Says why layers run eagerly although CUDA graphs were asked for; otherwise empty."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step that is planned."""

    count: Count
    sizes: Sizes
    batch: Batch
    rates: Rates
    keep: Keeping = "auto"
    offload: Offload = "auto"
    exchanges: tuple[Exchanged, ...] = ()
    given: tuple[Ladder, Sizes] | None = None
    """The ladder and the sizes with their cut, if they were decided before."""
    graphs: bool = False
    """Whether layers run as CUDA graphs if nothing of them waits on the host."""
    recorded: bool = False
    """Whether the search is for layers that run as CUDA graphs."""
    again: bool = False
    """Whether layers can run forward again in backward, so that not each must keep its input."""
    beside_bytes: int = 0
    """Bytes of the GPU that images take while the language model computes."""


class Score(NamedTuple):
    """The score of a candidate; the smallest is the best."""

    missing_bytes: int
    """Bytes that the GPU and the host lack."""
    displayed_s: float = math.inf
    """The seconds of a step, rounded to three digits."""
    host_bytes: int = 0
    kept_bytes: int = 0
    """GPU bytes that are kept for backward."""
    seconds: float = math.inf


def choose(step: Step, levels: Sequence[Levels], budget: Budget) -> Chosen:
    """Returns the fastest candidate that fits, by seconds to three digits, and among equals the one
    with the fewest bytes on the host, then the one that keeps the fewest on the GPU. If none fits,
    returns the one that lacks the fewest bytes."""
    eager = _choose(step, levels, budget)
    if not step.graphs:
        return eager
    if reason := _why_not_recorded(step, levels):
        return replace(eager, no_graphs=reason)
    here = replace(step, offload="none", again=False, recorded=True)
    graphed = _choose(here, [levels[0].resident], budget)
    if graphed.needed.gpu > budget.gpu or hosts(graphed.ladder):
        return replace(eager, no_graphs="a step with them does not fit into the GPU's memory")
    if graphed.seconds >= eager.seconds:
        return replace(eager, no_graphs="layers would keep less for backward, and take longer")
    return graphed


DROPS = "dropout of adapters draws another mask in each pass"
"""Why layers with adapters that have dropout cannot run as CUDA graphs."""


def _why_not_recorded(step: Step, levels: Sequence[Levels]) -> str | None:
    """Returns why layers cannot run as CUDA graphs, however much memory there is."""
    if any(kind.drops for kind in step.sizes.kinds):
        return DROPS
    if step.offload == "all" or any(placed.first for placed in levels):
        return "something of every step waits on the host"
    return None


Best = tuple[Score, Chosen | None]
"""The best score and choice so far; no choice before the first."""


def _choose(step: Step, levels: Sequence[Levels], whole: Budget) -> Chosen:
    """Returns the best choice for layers that run eagerly, or as CUDA graphs."""
    every = [step.count(sizes, step.batch) for sizes in _cuts(step)]
    best: Best = Score(sys.maxsize), None
    for tables in every:
        held = graph_bytes(tables) if step.recorded else 0
        counted = Counted(_candidates(step, tables), tables)
        best = _better(step, counted, levels, whole, best, held)
    for tables in _of_least_memory(step, every) if _may_be_sparse(step, every[0]) else ():
        if able := _worth_sparing(step, tables, levels, whole, best[0]):
            counted = Counted(_sparse(step, tables), tables)
            found = _better(step, counted, able, whole, best)
            # Layers run forward again only for fewer seconds or missing bytes, not to break a tie.
            best = found if found[0][:2] < best[0][:2] else best
    assert best[1] is not None
    return best[1]


def _better(
    step: Step,
    counted: Counted,
    levels: Sequence[Levels],
    whole: Budget,
    best: Best,
    held: int = 0,
) -> Best:
    """Returns the best of these candidates of one cut, if it is better than the best so far. CUDA
    graphs hold `held` bytes."""
    taken = gaps(step) + step.beside_bytes + held
    budget = whole._replace(gpu=whole.gpu - taken)
    for placed in levels:
        counted = counted.some(_worth_placing(step, counted, placed, budget, best[0]))
        if not len(counted.found.layers):
            break
        score, made = _best(step, counted, placed, budget)
        if score < best[0]:
            needed = made.needed._replace(gpu=made.needed.gpu + taken)
            best = score, replace(made, needed=needed, graph_bytes=held)
    return best


def gaps(step: Step) -> int:
    """Returns the bytes that torch's allocator has reserved at the peak but cannot hand out."""
    custom = step.sizes.class_type == "custom"
    return int(GAPS * step.sizes.unit(step.batch.tokens)) if custom else 0


LEAST = 256
"""If no candidate can fit, this many of those that lack the fewest bytes are scored."""


def _worth_placing(
    step: Step, counted: Counted, placed: Levels, budget: Budget, best: Score
) -> Any:  # (N,)
    """Returns the candidates that may be better than the best so far: they lack no more bytes, and
    would take no longer if copies of states took no time."""
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
    """Returns the best candidate of one cut and one order in which states leave the GPU."""
    level, missing = placed.lowest(counted.activity, budget.gpu)
    host = placed.host_bytes(level, counted.below)
    over = missing + np.maximum(0, host - budget.host)
    some = np.flatnonzero(over == over.min())
    left = counted.some(some)
    traffic = placed.traffic(level[some], left.again_layers)
    step_s = _seconds(step, left, traffic).step
    shown = displayed(step_s)
    kept = counted.on_gpu[some]
    # lexsort sorts by its last key first: displayed seconds, bytes on the host, bytes kept on the
    # GPU, exact seconds.
    k = int(np.lexsort((step_s, kept, host[some], shown))[0])
    i = int(some[k])
    chosen = Chosen(
        ladder=counted.found.ladder(i),
        sizes=counted.tables.sizes,
        places=placed.places(int(level[i])),
        traffic=placed.traffic(level[[i]], counted.some([i]).again_layers),
        needed=Budget(budget.gpu + int(missing[i]), int(host[i])),
        seconds=float(step_s[k]),
    )
    score = Score(int(over[i]), float(shown[k]), int(host[i]), int(kept[k]), float(step_s[k]))
    return score, chosen


def displayed(seconds: Any) -> Any:
    """Rounds seconds to three digits, as they are printed. A smaller difference does not count."""
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
        return Candidates.one(step.given[0], step.sizes.of_layer)
    kinds, chosen = tables.kinds, None
    if step.keep != "auto":
        chosen = tuple(asked(step.keep, layer, recorded=step.recorded) for layer in kinds)
    kept = sets(kinds, step.rates, recorded=step.recorded)
    return candidates(step.sizes.of_layer, kept, step.offload, chosen)


# --- layers that keep no input -----------------------------------------------------------------


def _may_be_sparse(step: Step, tables: Tables) -> bool:
    """Whether some layers may keep no input: if no layer must keep anything else."""
    free = step.again and step.given is None and step.keep == "auto" and step.sizes.layers > 1
    return free and all(layer.always == {INPUT} for layer in tables.kinds)


def _of_least_memory(step: Step, every: Sequence[Tables]) -> Iterable[Tables]:
    """Yields the tables of the first cut, and of those that differ from it by fewer logits only."""
    tokens = step.batch.tokens
    least = every[0].sizes.cut(tokens)[:2]
    return (tables for tables in every if tables.sizes.cut(tokens)[:2] == least)


def _sparse(step: Step, tables: Tables) -> Candidates:
    return sparse(step.sizes.of_layer, sets(tables.kinds, step.rates), step.offload)


def _worth_sparing(
    step: Step, tables: Tables, levels: Sequence[Levels], whole: Budget, best: Score
) -> Sequence[Levels]:
    """Returns the levels with which a ladder where some layers keep no input could be better than
    the best so far. Such a ladder takes at least as much GPU memory as if no layer kept anything,
    and as much time as if each kept its usual set."""
    if best.missing_bytes:
        return levels
    each = zip(tables.kinds, usual(sets(tables.kinds, step.rates))[0], strict=True)
    again = of_all(tables, [load(layer.again(names)) for layer, names in each])

    def is_slower(traffic: Traffic) -> bool:
        found = _timed(step, tables, again, nothing_hosted(tables), traffic)
        return bool(displayed(np.min(found.step)) >= best.displayed_s)

    if is_slower(NO_TRAFFIC):
        return []
    idle = Counted(Candidates.bare(step.sizes.of_layer), tables).activity
    gpu = whole.gpu - gaps(step) - step.beside_bytes
    lowest = ((placed, placed.lowest(idle, gpu)[0]) for placed in levels)
    return [placed for placed, level in lowest if not is_slower(placed.traffic(level))]


def _seconds(step: Step, counted: Counted, traffic: Traffic) -> Seconds:
    return _timed(step, counted.tables, counted.again, counted.hosted, traffic)


def _timed(step: Step, tables: Tables, again: Load, hosted: Hosted, traffic: Traffic) -> Seconds:
    found = seconds(
        tables,
        passes=step.batch.passes,
        again=again,
        hosted=hosted,
        traffic=traffic,
        rates=step.rates,
        exchanges=step.exchanges,
    )
    waits = host_waits(tables, step.batch.passes, found.step, graphs=step.recorded)
    return found._replace(waits=found.waits + waits)


def host_bytes(step: Step, chosen: Chosen) -> int:
    """Returns the host bytes of a choice's saved activations."""
    return sum(hosted_bytes(step.count(chosen.sizes, step.batch), chosen.ladder))


def hosted_bytes(tables: Tables, ladder: Ladder) -> tuple[int, ...]:
    """Returns the bytes that each layer keeps on the host."""
    layers = zip(tables.layers, ladder, strict=True)
    return tuple(layer.kept_bytes(keep.hosted) for layer, keep in layers)


def predicted(step: Step, chosen: Chosen) -> Seconds:
    """Returns the seconds of a choice, on another batch or with other exchanges than those that it
    was chosen for."""
    step = replace(step, recorded=chosen.graph_bytes > 0)
    tables = step.count(chosen.sizes, step.batch)
    counted = Counted(Candidates.one(chosen.ladder, chosen.sizes.of_layer), tables)
    found = _seconds(step, counted, chosen.traffic)
    return Seconds(*(float(np.reshape(x, -1)[0]) for x in found))
