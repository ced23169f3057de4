"""What an engine or several GPUs change in a step: where its bytes live, and what it exchanges.

train/engines/layout.py declares the bytes of each rank. Here they become part of a step's phases,
beside the model's layers, and of the budgets from which a run's ladder is chosen: what is free when
training begins, and what the first step adds.

The seconds are those of one rank. They count the exchanges during which nothing is computed:

    gathers    B (n - 1) / n bytes come over the links between GPUs, one layer ahead. The gathers of
               the embedding, the first of forward, and of lm_head are waited for.
    sums       gradients are summed beside the backward of the layer below. The embedding's, the
               last ones, are waited for.
    offload    weights come over the host's link beside the computation. In backward the copies of
               weights and gradients follow one another. AdamW runs on the host.
    rows       where ranks share rows, the exchanges of the first and the last head group are waited
               for: q, k, v and attention's output.

Exchanges that run beside a computation do not slow it down, except those of shared rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longctx.cost.fitted import BESIDE, CPU_ADAM
from longctx.cost.machines import Machine
from longctx.cost.peak import LIBRARY_BYTES, Buffers, Phase
from longctx.cost.seconds import Exchanged
from longctx.cost.sizes import Parameters, Sizes
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.memory.states import BlockSpec
from longctx.train.engines.layout import FP32, Layout


def parameters_of(model: Any, specs: Sequence[BlockSpec]) -> Parameters:
    parameters, layers = [*model.parameters()], [s for s in specs if s.layer is not None]
    frozen = [p.numel() for p in parameters if not p.requires_grad]
    by_layer = [sum(p.numel() for p in s.trained) for s in layers]
    all_of_layers = [sum(p.numel() for p in s.parameters.values()) for s in layers]
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", embedding)
    return Parameters(
        numels=[p.numel() for p in parameters if p.requires_grad],
        layers=by_layer,
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        hidden=embedding.shape[1],
        frozen=frozen,
        frozen_layers=[
            whole - trained for whole, trained in zip(all_of_layers, by_layer, strict=True)
        ],
    )


class ShardedStates:
    """An engine's weights, states and gradients on one GPU in the course of a step, as a
    `cost.peak.Standing`."""

    def __init__(self, layout: Layout, parameters: Parameters, layers: int, accumulates: bool):
        self.layout, self.parameters = layout, parameters
        self.layers, self.accumulates = layers, accumulates
        self._standing = {**layout.standing(parameters), "libraries": LIBRARY_BYTES}
        p = parameters
        rest = p.total - sum(p.layers) - p.trained_embedding
        self._grads = {-1: p.trained_embedding, layers: rest} | dict(enumerate(p.layers))
        """Maps layers to their numbers of parameters; -1 is the embedding, `layers` the rest."""

    def _tied(self) -> Buffers:
        """Returns a tied embedding's gradient, which is whole from the loss to the embedding's
        backward."""
        if self.parameters.head or self.parameters.adapters:
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
        above = p.layers[layer + 1] if layer < self.layers - 1 else p.trained_head
        return {**self._standing, **self.layout.backward(p, above), **self._tied()}

    def update(self) -> Buffers:
        return {**self._standing, **self.layout.update(self.parameters)}

    def others(self, kept: int, unit: int) -> list[Phase]:
        """Returns the moment in which lm_head's gradient is summed, before the last layer's
        backward."""
        head = self.parameters.trained_head
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
        return self.layout.gradient(self.parameters, self.parameters.total)

    def loss_gradients(self) -> int:
        stand = self.accumulates or self.layout.gradients_stand
        return self.all_gradients() if stand else 0

    def old_gradients(self, layer: int) -> int:
        return self.loss_gradients()

    def new_gradients(self, layer: int, *, summed: bool = True) -> int:
        """Returns the gradients when backward reaches this layer. `summed` says whether those of
        the block above have been summed over the ranks."""
        if self.loss_gradients():
            return self.all_gradients()
        done = [numel for at, numel in self._grads.items() if at > layer + (not summed)]
        return self.layout.gradient(self.parameters, sum(done))

    def embedding(self, made: Buffers) -> Buffers:
        p = self.parameters
        gradients = {"gradients": self.new_gradients(-1)}
        if not p.trained_embedding:
            return {**gradients, **self.layout.backward(p, p.layers[0])}
        made = {
            **made,
            "the embedding's gradient": self.layout.whole(p.embedding) * (1 if p.head else 2),
            **self.layout.backward(p, p.layers[0]),
        }
        summed = self.layout.reducing(p, p.embedding)
        larger = max(made, summed, key=lambda buffers: sum(buffers.values()))
        return {**gradients, **larger}


# --- exchanges -------------------------------------------------------------------------------


def exchanged(layout: Layout, p: Parameters, machine: Machine, passes: int) -> Exchanged:
    """Returns the exchanges of an engine."""
    peers, link, n = machine.exchange_bytes, machine.link_bytes, layout.processes
    share = (n - 1) / n
    ends = layout.gathers(p, passes) > 0
    whole = layout.whole(1) * share / peers
    gathers = layout.gathers(p, passes) / passes / peers
    forward = gathers / 2 + layout.up(p) / link
    backward = gathers / 2 + layout.reduces(p, passes) / passes / peers + layout.chain(p) / link
    coming = layout.up(p) / link / p.words
    update = layout.update_bytes * p.total / n / machine.memory_bytes
    if layout.states_on_host:
        update = p.total / CPU_ADAM
    return Exchanged(
        forward=forward,
        backward=backward,
        alone_forward=(ends * whole + coming) * (p.embedding + p.layer_words[0]),
        alone_backward=FP32 * (p.trained_embedding or p.layers[0]) * share / peers
        + layout.waits(p),
        memory_bytes=layout.moved(p),
        update=update,
        link=(layout.up(p) + layout.chain(p)) / link,
    )


def averaged(p: Parameters, machine: Machine, processes: int) -> Exchanged:
    """Returns the exchanges of several GPUs without an engine: gradients are averaged in fp32 as
    they are made, and backward waits for those of the last block."""
    if processes == 1:
        return Exchanged()
    a_parameter = 2 * FP32 * (processes - 1) / processes / machine.exchange_bytes
    ends = p.embedding + p.head
    alone = ends if ends < p.total else 0  # frozen, beside adapters
    return Exchanged(backward=a_parameter * p.total, alone_backward=a_parameter * alone)


def shared_rows(sizes: Sizes, tokens: int, machine: Machine) -> Exchanged:
    """Returns the exchanges of `sizes.ranks` ranks that share each row. `tokens` are those of one
    rank."""
    if sizes.ranks == 1:
        return Exchanged()
    groups = sizes.cut(tokens).head_groups
    sent = tokens * sizes.itemsize * (sizes.ranks - 1) / sizes.ranks / machine.exchange_bytes
    each = zip(sizes.kinds, sizes.counts, strict=True)
    of_kinds = [(kind.one(AttentionSpec), n) for kind, n in each]
    q = sum(n * (spec.wide // groups) for spec, n in of_kinds)
    kv = sum(n * (spec.narrow // groups) for spec, n in of_kinds)
    forward, backward = q + 2 * kv + q, 3 * q + 2 * kv + q + 2 * kv
    return Exchanged(
        alone_forward=sent * forward,
        alone_backward=sent * backward,
        taken_forward=sent * forward * groups * BESIDE,
        taken_backward=sent * backward * groups * BESIDE,
    )
