"""A mixer's residual block: a module of the model's own in the place of attention, as
Gated DeltaNet, Mamba 2 or a short convolution.

    n1 = rms_norm(x)              z, s = module(n1, s)              h = x + r z         (T, D)

The module runs as transformers and PEFT have it, with the parameters that it is given, over one
segment of tokens after the other (segments.py). s is the state that it hands from one segment to
the next. Forward has no graph, writes z, and keeps the states with which segments begin. Backward
runs after the MLP's has turned dy into dh, the last segment first:

    per segment   run the module again, with a graph; dn1, ds at its beginning and the parameters'
                  gradients, from r dh and from ds at its end; dx = dh + rms_norm'(x, dn1)

So there is never more than one segment's graph, whatever the row's length: by count 1.7 GiB instead
of 26 for 262144 tokens of Qwen3.5-9B. Gradients of parameters are summed over segments in fp32 and
rounded once. Without z, which the MLP's backward needs to make h again, forward runs once more.

In short rows that run as CUDA graphs forward may make the graphs and keep them (the keepable
"graph"), if no segment begins with the state of another. Backward then runs no module.

With attention beside it (beside.py), its backward leaves dn1 to that of attention.

The letters are those of layer/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from longctx.cost.table import INPUT
from longctx.kernels.annotate import annotated, each
from longctx.layer.parts.norms import Norm
from longctx.layer.parts.protocol import NOTHING, Kept, OverRow
from longctx.layer.parts.segment_graphs import KeptGraph, Leaves, SegmentGraph, Sums, add_to
from longctx.layer.passes import Pass
from longctx.layer.row_documents import RowDocuments
from longctx.layer.segments import Segment, kept_states
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.layer.weights import MIXER

State = tuple[Tensor, ...]
"""The tensors of a mixer's state behind a token, (rows, ...) each; there are none where a document
begins."""


class Mixes(Protocol):
    """A model's module, as this part calls it."""

    @property
    def drops(self) -> bool:
        """Whether something in it draws random numbers: the dropout of an adapter."""

    def __call__(
        self,
        n: Tensor,  # (rows, t, D)
        begin: State,
        parameters: Mapping[str, Tensor],
        *,
        ends: bool,
        packed: RowDocuments | None,
    ) -> tuple[Tensor, State]:  # (rows, t, D), the state behind the last token
        """Runs the module with these parameters, by their names in it. `ends`: whether the state
        behind the last token is asked for. `packed`: the documents of a single row that has
        several, of which no state is asked for."""


class Mixer(OverRow):
    """The block in one pass. `kept` has z (T, D) and the states, together the keepable "o", if
    forward keeps them. Without a second block, z is not kept: nothing reads it in backward."""

    def __init__(self, p: Pass, kept: Kept = NOTHING) -> None:
        assert p.mixes is not None
        self._pass, self._mixes, self._cut = p, p.mixes, p.schedule.segments
        self._norm, self._scale = Norm(p, "norm1"), p.spec.one(MixerSpec).factor
        self._parameters = p.weights.of_mixer
        self._kept_states = kept_states(self._cut)
        self._z: Tensor | None = kept.get("z")  # (T, D)
        self._states = [kept[name] for name in _names(kept)]
        """All states with which segments begin, (segments, ...) each."""
        self._kept_graph: KeptGraph | None = None if p.saved is None else p.saved.graph

    # --- forward ---------------------------------------------------------------------------

    def normed(self, x: Tensor) -> Tensor:  # (t, D) -> (t, D)
        """Returns n1, which an MLP beside the mixer reads, too."""
        return self._norm.forward(x).to(self._pass.schedule.dtype)

    def begin(self, x: Tensor) -> None:  # (T, D)
        """Computes z, the states and graphs, and keeps them if they are to be kept."""
        leaves = None
        if self._pass.keeps("graph") and not self._kept_states:
            leaves = Leaves(self._parameters, lambda name: self._parameters[name].requires_grad)
        graphs = self._forward(x, leaves)
        if leaves is not None:
            assert self._pass.saved is not None
            self._pass.saved.graph = KeptGraph(leaves, graphs)
        if self._pass.keeps("o"):
            assert self._z is not None
            states = {f"state{i}": state for i, state in enumerate(self._states)}
            z = {"z": self._z} if self._pass.spec.between else {}
            self._pass.keep("o", {**z, **states}, whole=[*states])

    @annotated("mixer")
    def _forward(self, x: Tensor, leaves: Leaves | None = None) -> list[SegmentGraph]:  # (T, D)
        """Computes z and the states. Returns the segments' graphs, if they are to have leaves."""
        ends: dict[int, State] = {}
        graphs = []

        def run(i: int, segment: Segment) -> None:
            n1 = segment.batch(self._norm.forward(segment.read(x)))
            if leaves is None:
                begin = () if segment.begins is None else ends[segment.begins]
                is_kept = i in self._kept_states
                z, end = self._called(i, n1, begin, self._parameters, ends=is_kept)
                if is_kept:
                    ends[i] = end
            else:
                z, graph = self._with_graph(i, n1, [], leaves)
                graphs.append(graph)
            if self._z is None:
                self._z = z.new_empty(x.shape)
            segment.write(self._z, segment.unbatch(z))

        self._z = None
        for i, segment in enumerate(each("segment", self._cut)):
            run(i, segment)
        made = [ends[i] for i in self._kept_states]
        self._states = [torch.cat(states) for states in zip(*made, strict=True)]
        return graphs

    def _with_graph(
        self, i: int, n1: Tensor, begin: list[Tensor], leaves: Leaves, outputs: int = 1
    ) -> tuple[Tensor, SegmentGraph]:
        """Runs the module over segment i. Returns z, and the graph of the first `outputs` of z and
        the state's tensors."""
        n1.requires_grad_()
        begin = [state.requires_grad_() for state in begin]
        with torch.enable_grad():
            # A view: counters of FLOPs put hooks on a module's input, and torch allows none on
            # leaves while a gradient is computed.
            given = n1.view_as(n1), tuple(begin), leaves.all
            z, end = self._called(i, *given, ends=outputs > 1)
            made = [get_gradient_edge(x) for x in (z, *end)[:outputs]]
        return z.detach(), SegmentGraph(n1, begin, made, z.dtype)

    def _called(
        self, i: int, n1: Tensor, begin: State, parameters: Mapping[str, Tensor], *, ends: bool
    ) -> tuple[Tensor, State]:
        """Runs the module over segment i. A state (1, ...) is the beginning of every row."""
        s, kind = self._pass.schedule, n1.device.type
        begin = tuple(state.expand(len(n1), *state.shape[1:]) for state in begin)
        # Each segment has random numbers of its own, the same ones whenever it runs.
        seed = hash((s.seed, self._pass.layer, i)) if self._mixes.drops else None
        # In autocast n1 is fp32 as the weights are, and the module casts as in their layers. A
        # cache would keep its casts alive, and a replayed CUDA graph would read those of the step
        # that was recorded.
        casts = dict(enabled=n1.dtype != s.dtype, cache_enabled=False)
        with torch.autocast(kind, s.dtype, **casts), _seeded(n1.device, seed):
            return self._mixes(n1, begin, parameters, ends=ends, packed=self._cut[i].packed)

    def output(self, x: Tensor, tile: slice) -> Tensor:
        """Returns h of a tile, (t, D)."""
        assert self._z is not None
        z = self._z[tile]
        return x[tile] + (z if self._scale == 1.0 else z * self._scale)

    # --- backward --------------------------------------------------------------------------

    def again(self, x: Tensor) -> None:
        """Makes ready what backward reads of z and the states, kept or else recomputed from all of
        x."""
        reads_z = self._pass.spec.between and self._z is None
        if reads_z or len(self._kept_states) > 0 == len(self._states):
            for tile in self._pass.schedule.tiles(len(x)):
                self._pass.schedule.store.wait(tile)
            self._forward(x)

    def output_backward(
        self, dh: Tensor, held: Tensor | None, tile: slice, *, goes_on: bool
    ) -> None:
        self._pass.retire(tile, "z")  # it is read no more

    def reaches(self, wants_dx: bool) -> bool:
        return wants_dx or self._pass.grads.wanted("norm1", MIXER)

    def backward_(self, dh: Tensor, x: Tensor, dn: Tensor | None, wants_dx: bool) -> None:
        tiles = self._pass.schedule.tiles(len(x))
        lasts = _last_uses(tiles, self._cut)

        def norm(i: int, segment: Segment, dn1: Tensor) -> None:
            if wants_dx or self._norm.trained:
                read, own = segment.read(x), segment.read(dh)
                dn1 = segment.unbatch(dn1).to(x.dtype)
                dn1 = dn1 if dn is None else dn1 + segment.read(dn)
                self._norm.backward(dn1, read, onto=own, out=own)
                if segment.places is not None:  # else it is a view of dh
                    segment.write(dh, own)
            # What the last segment leaves comes up when the layer below begins, so that the link
            # stays free between two layers (memory/store.py). The states stay: a tile that is not
            # needed any more says nothing of them.
            for tile, last in zip(tiles, lasts, strict=True):
                if i and last == i:
                    self._pass.retire(tile, INPUT)

        self._module_backward(dh, x, norm)
        self._norm.finish()

    def normed_grad(self, dh: Tensor, x: Tensor, dn: Tensor | None) -> Tensor:  # (T, D)
        """Runs backward of the module without that of its norm, for a part beside it that reads n1,
        too. Returns the gradient of n1, added to `dn` (T, D) if given, in the matmuls' dtype."""
        made = torch.empty_like(x, dtype=self._pass.schedule.dtype)

        def put(i: int, segment: Segment, dn1: Tensor) -> None:
            dn1 = segment.unbatch(dn1).to(made.dtype)
            segment.write(made, dn1 if dn is None else dn1 + segment.read(dn))

        self._module_backward(dh, x, put)
        return made

    @annotated("mixer")
    def _module_backward(
        self,
        dh: Tensor,  # (T, D)
        x: Tensor,  # (T, D)
        give: Callable[[int, Segment, Tensor], None],
    ) -> None:
        """Runs the module's backward and finishes its parameters' gradients. `give` gets dn1 of
        each segment, (rows, t, D), the last one first."""
        grads, self._z = self._pass.grads, None
        leaves, graphs = self._kept_graph or KeptGraph(self._leaves(), [])
        sums = Sums(leaves.names, len(self._cut))
        d_ends: dict[int, list[Tensor]] = {}

        def run(i: int, segment: Segment) -> None:
            d_end = d_ends.pop(i, None) or []
            if graphs:
                graph = graphs.pop()  # the last segment's, which is let go before the next one's
            else:
                n1, begin = segment.batch(self._norm.forward(segment.read(x))), self._begin(segment)
                graph = self._with_graph(i, n1, begin, leaves, outputs=1 + len(d_end))[1]
            dz = segment.read(dh)
            dz = dz if self._scale == 1.0 else dz * self._scale
            wanted = [graph.n1, *graph.begin, *leaves.trained]
            d_out = [segment.batch(dz.to(graph.dtype)), *d_end]
            dn1, *found = torch.autograd.grad(graph.made, wanted, d_out, allow_unused=True)
            d_begin, of_parameters = found[: len(graph.begin)], found[len(graph.begin) :]
            if segment.begins is not None:
                add_to(d_ends, segment.begins, graph.begin, d_begin)
            sums.add(of_parameters)
            give(i, segment, dn1)

        for i, segment in each("segment", reversed([*enumerate(self._cut)])):
            run(i, segment)
        for name, grad in sums.finish():
            grads.put(name, grad)

    def _leaves(self) -> Leaves:
        return Leaves(self._parameters, lambda name: self._pass.grads.wants(f"{MIXER}.{name}"))

    def _begin(self, segment: Segment) -> list[Tensor]:  # (1, ...) each
        """Returns copies of the state with which a segment begins, as leaves of its graph."""
        if segment.begins is None:
            return []
        at = self._kept_states.index(segment.begins)
        return [states[at : at + 1].detach() for states in self._states]


def _names(kept: Kept) -> list[str]:
    """Returns the names of the kept states, in their order."""
    return sorted(name for name in kept if name.startswith("state"))


def _last_uses(tiles: Sequence[slice], cut: Sequence[Segment]) -> list[int]:
    """Returns for each tile the first segment that reads some of it: backward's last one."""
    found = [len(cut)] * len(tiles)
    tokens = tiles[0].stop if tiles else 1
    for i, segment in enumerate(cut):
        for row in segment.rows:
            for at in range(row.start // tokens, -(-row.stop // tokens)):
                found[at] = min(found[at], i)
    return found


@contextmanager
def _seeded(device: torch.device, seed: int | None) -> Iterator[None]:
    """A context whose random numbers begin with this seed, if there is one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield
