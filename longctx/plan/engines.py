"""What an engine or several GPUs make of a step: where its bytes are, and what it exchanges.

Bytes by rank are the engine's to say (engines/layout.py). Here they are put into the phases of a
step, beside the model's layers, and into the budgets that a run's ladder is chosen from: what is
free when training begins, and what the engine says that the first step adds.

Seconds are those of one rank, and what of its exchanges nothing is computed beside:

    gathers    B (n - 1) / n bytes come over the GPUs' own links, a layer ahead; the embedding's,
               the first of forward, and lm_head's wait
    sums       gradients go beside the backward of the layer below; the embedding's, the last, wait
    offload    weights come over the host's link beside the computation; in backward copies of
               weights and gradients follow one another; AdamW runs on the host
    rows       of R ranks: q, k, v and o of the first and of the last head group wait

Exchanges that run beside a computation take nothing from it, but those of shared rows.
"""

from __future__ import annotations

from typing import Any

from longctx.cost.fitted import BESIDE, CPU_ADAM
from longctx.cost.machines import Machine
from longctx.cost.peak import LIBRARY_BYTES, Buffers, Phase
from longctx.cost.seconds import Exchanged
from longctx.cost.sizes import Parameters, Sizes
from longctx.engines.layout import FP32, Layout
from longctx.model.blocks import state_blocks


def parameters_of(model: Any) -> Parameters:
    specs = state_blocks(model, movable=False)
    numels = [p.numel() for p in model.parameters() if p.requires_grad]
    by_layer = [sum(p.numel() for p in s.trained) for s in specs if s.layer is not None]
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", embedding)
    return Parameters(
        numels=numels,
        layer=max(by_layer),
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        hidden=embedding.shape[1],
    )


class ShardedStates:
    """An engine's weights, states and gradients on one GPU as a step goes on: a
    `cost.peak.Standing`."""

    def __init__(self, layout: Layout, parameters: Parameters, layers: int, accumulates: bool):
        self.layout, self.parameters = layout, parameters
        self.layers, self.accumulates = layers, accumulates
        self._standing = {**layout.standing(parameters), "libraries": LIBRARY_BYTES}
        p = parameters
        rest = p.total - layers * p.layer - p.embedding
        self._grads = {-1: p.embedding, layers: rest} | dict.fromkeys(range(layers), p.layer)
        """Parameters by the layer that they are of."""

    def _tied(self) -> Buffers:
        """Its gradient is whole from the loss to the embedding's backward."""
        if self.parameters.head:
            return {}
        return {"the embedding's gradient": self.layout.whole(self.parameters.embedding)}

    def forward(self) -> Buffers:
        return {**self._standing, **self.layout.forward(self.parameters)}

    def loss(self) -> Buffers:
        return {**self._standing, **self.layout.loss(self.parameters)}

    def backward(self, layer: int) -> Buffers:
        if layer < 0:
            return self._standing
        p = self.parameters
        above = p.layer if layer < self.layers - 1 else p.head
        return {**self._standing, **self.layout.backward(p, above), **self._tied()}

    def update(self) -> Buffers:
        return {**self._standing, **self.layout.update(self.parameters)}

    def others(self, kept: int, unit: int) -> list[Phase]:
        """lm_head's gradient is summed before the last layer's backward."""
        head = self.parameters.head
        if not head:
            return []
        buffers = {
            **self._standing,
            "gradients": self.new_gradients(self.layers - 1, summed=False),
            "kept activations": kept,
            "last layer's output, its gradient": 2 * unit,
            **self.layout.reducing(self.parameters, head),
        }
        return [Phase("lm_head's gradient", buffers)]

    def all_gradients(self) -> int:
        return self.layout.gradient(self.parameters.total)

    def loss_gradients(self) -> int:
        stand = self.accumulates or self.layout.gradients_stand
        return self.all_gradients() if stand else 0

    def old_gradients(self, layer: int) -> int:
        return self.loss_gradients()

    def new_gradients(self, layer: int, *, summed: bool = True) -> int:
        """`summed`: the block above's are."""
        if self.loss_gradients():
            return self.all_gradients()
        done = [numel for at, numel in self._grads.items() if at > layer + (not summed)]
        return self.layout.gradient(sum(done))

    def embedding(self, made: Buffers) -> Buffers:
        p = self.parameters
        gradients = {"gradients": self.new_gradients(-1)}
        made = {
            **made,
            "the embedding's gradient": self.layout.whole(p.embedding) * (1 if p.head else 2),
            **self.layout.backward(p, p.layer),
        }
        summed = self.layout.reducing(p, p.embedding)
        larger = max(made, summed, key=lambda buffers: sum(buffers.values()))
        return {**gradients, **larger}


# --- exchanges -------------------------------------------------------------------------------


def exchanged(layout: Layout, p: Parameters, machine: Machine, passes: int) -> Exchanged:
    """Of an engine."""
    peers, link, n = machine.exchange_bytes, machine.link_bytes, layout.processes
    share = (n - 1) / n
    ends = layout.gathers(p, passes) > 0
    whole = layout.whole(1) * share / peers
    gathers = layout.gathers(p, passes) / passes / peers
    forward = gathers / 2 + layout.up(p) / link
    backward = gathers / 2 + layout.reduces(p, passes) / passes / peers + layout.chain(p) / link
    coming = layout.up(p) / link / p.total
    update = layout.update_bytes * p.total / n / machine.memory_bytes
    if layout.states_on_host:
        update = p.total / CPU_ADAM
    return Exchanged(
        forward=forward,
        backward=backward,
        alone_forward=(ends * whole + coming) * (p.embedding + p.layer),
        alone_backward=FP32 * p.embedding * share / peers + layout.waits(p),
        memory_bytes=layout.moved(p),
        update=update,
        link=(layout.up(p) + layout.chain(p)) / link,
    )


def averaged(p: Parameters, machine: Machine, processes: int) -> Exchanged:
    """Of several GPUs without an engine: the mean of gradients is taken in fp32 as they come, and
    backward waits for the last block's."""
    if processes == 1:
        return Exchanged()
    a_parameter = 2 * FP32 * (processes - 1) / processes / machine.exchange_bytes
    ends = p.embedding + p.head
    alone = ends if ends < p.total else 0  # frozen, beside adapters
    return Exchanged(backward=a_parameter * p.total, alone_backward=a_parameter * alone)


def shared_rows(sizes: Sizes, tokens: int, machine: Machine) -> Exchanged:
    """Of `sizes.ranks` that share each row: what waits of each layer's exchanges, and what they
    take; `tokens` are one rank's."""
    if sizes.ranks == 1:
        return Exchanged()
    groups = sizes.cut(tokens).head_groups
    q, kv = sizes.heads * sizes.head_dim // groups, sizes.kv_heads * sizes.head_dim // groups
    sent = tokens * sizes.itemsize * (sizes.ranks - 1) / sizes.ranks
    forward, backward = q + 2 * kv + q, 3 * q + 2 * kv + q + 2 * kv
    a_number = sent * sizes.layers / machine.exchange_bytes
    return Exchanged(
        alone_forward=a_number * forward,
        alone_backward=a_number * backward,
        taken_forward=a_number * forward * groups * BESIDE,
        taken_backward=a_number * backward * groups * BESIDE,
    )
