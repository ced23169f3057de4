"""The seconds in which the GPU waits for the host, and what is spent to spare them.

Eagerly, Python launches kernel after kernel: a step of short rows takes as long as that, however
short its kernels are. As CUDA graphs (runtime/graphs.py), a step's layers are launched at once, for
a copy of their gradients, and for memory of their own that the loss cannot share with them.
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
from longctx.cost.sizes import Sizes
from longctx.cost.table import Phase

PHASES: tuple[Phase, ...] = ("forward", "backward")


def kernels(tables: Tables) -> int:
    """Returns the kernels of a batch's layers, forward and backward."""
    sizes = tables.sizes
    return sum(_kernels_of(sizes.kinds[kind], tables) for kind in sizes.of_layer)


def _kernels_of(kind: LayerKind, tables: Tables) -> int:
    """Tiles and segments count where kernels are many and short: of experts, and of mixers."""
    dense = LAUNCHES + (ADAPTER_LAUNCHES if kind.rank else 0)
    of_tile = sum(part.tile_launches for part in kind.parts)
    of_segment = sum(part.segment_launches for part in kind.parts)
    of_tiles = tables.tiles * (dense + of_tile) if of_tile else dense
    return of_tiles + tables.segments * of_segment


def host_waits(tables: Tables, passes: int, computed_s: Numbers, *, graphs: bool) -> Numbers:
    """Returns the seconds of a step in which the GPU waits for the host, of kernels that take
    `computed_s`."""
    if tables.sizes.class_type != "custom":  # whose launches nobody has counted
        return 0.0
    launched = passes * kernels(tables)
    if graphs:
        return HOST_S + launched * GAP_S
    return HOST_S + together(computed_s, launched * LAUNCH_S) - computed_s


def together(computed_s: Numbers, launched_s: float) -> Numbers:
    """Returns the seconds of kernels that take `computed_s`, and that Python takes `launched_s` to
    launch: the longer of the two, and more where they are alike, since Python does not always run
    far ahead."""
    return (computed_s**3 + launched_s**3) ** (1 / 3)


def layer_gradients(sizes: Sizes) -> int:
    """Returns the bytes of the gradients of all layers."""
    ends = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2) * sizes.trains_head
    return max(0, sizes.trained - ends) * sizes.itemsize


def graph_bytes(tables: Tables) -> int:
    """Returns the bytes that a step with CUDA graphs takes besides those of an eager one."""
    works = [kind.working(phase) for kind in tables.kinds for phase in PHASES]
    layer = max(sum(buffers.values()) for buffers in works)
    loss = sum(tables.loss.during("loss").values())
    return layer_gradients(tables.sizes) + min(layer, loss)
