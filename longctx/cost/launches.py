"""The seconds in which the GPU waits for the host, and the memory of CUDA graphs, which spare them.

Eagerly, Python launches kernel after kernel: a step of short rows takes at least as long as that,
however short its kernels are. As CUDA graphs (runtime/graphs.py), a step's layers are launched at
once. This takes a copy of their gradients, and a memory pool that the loss cannot share.
"""

from __future__ import annotations

from longctx.cost.dims import LayerKind
from longctx.cost.fitted import (
    ADAPTER_LAUNCHES,
    GAP_S,
    HOST_S,
    LAUNCH_S,
    LAUNCHES,
)
from longctx.cost.peak import Tables
from longctx.cost.seconds import Numbers
from longctx.cost.table import Phase

PHASES: tuple[Phase, ...] = ("forward", "backward")


def kernels(tables: Tables) -> int:
    """Returns the kernels of a batch's layers, forward and backward."""
    sizes = tables.sizes
    return sum(_kernels_of(sizes.kinds[kind], tables) for kind in sizes.of_layer)


def _kernels_of(kind: LayerKind, tables: Tables) -> int:
    """Returns the kernels of a layer. Those of experts count once per tile and those of mixers once
    per segment, since there they are many and short."""
    dense = LAUNCHES + (ADAPTER_LAUNCHES if kind.rank else 0)
    of_tile = sum(part.tile_launches for part in kind.parts)
    of_segment = sum(part.segment_launches for part in kind.parts)
    of_tiles = tables.tiles * (dense + of_tile) if of_tile else dense
    return of_tiles + tables.segments * of_segment


def host_waits(tables: Tables, passes: int, computed_s: Numbers, *, graphs: bool) -> Numbers:
    """Returns the seconds of a step in which the GPU waits for the host, if its kernels take
    `computed_s` in all."""
    if tables.sizes.class_type != "custom":  # their launches were not counted
        return 0.0
    launched = passes * kernels(tables)
    if graphs:
        return HOST_S + launched * GAP_S
    return HOST_S + together(computed_s, launched * LAUNCH_S) - computed_s


def together(computed_s: Numbers, launched_s: float) -> Numbers:
    """Returns the seconds of kernels that take `computed_s` and that Python takes `launched_s` to
    launch. This is about the longer of the two, and 1.26 times that if both are equal, since Python
    does not always run far ahead."""
    return (computed_s**3 + launched_s**3) ** (1 / 3)


def graph_bytes(tables: Tables) -> int:
    """Returns the bytes that a step with CUDA graphs takes more than an eager one."""
    sizes = tables.sizes
    # The embedding and lm_head stay outside the graphs, and so do their gradients.
    ends = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2) * sizes.trains_head
    gradients = max(0, sizes.trained - ends) * sizes.itemsize
    works = [kind.working(phase) for kind in tables.kinds for phase in PHASES]
    layer = max(sum(buffers.values()) for buffers in works)
    loss = sum(tables.loss.during("loss").values())
    # Eagerly the loss reuses the memory in which layers compute. A graph's pool stays, so that both
    # exist at once: the sum instead of the maximum, which is the smaller one more.
    return gradients + min(layer, loss)
