"""Engines by rank: sums by hand, on a model of small numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from longctx.constants import GIB
from longctx.cost.fitted import SHARED_LINK
from longctx.cost.machines import MACHINES
from longctx.cost.peak import LIBRARY_BYTES
from longctx.cost.sizes import Parameters
from longctx.errors import UserError
from longctx.memory.pending import Pending
from longctx.train.engines import fsdp, gathered
from longctx.train.engines.fsdp import FSDP2
from longctx.train.engines.layout import FullyShard, Layout, Zero, fully_shard_layout
from longctx.train.engines.zero_settings import zero_layout
from longctx.train.options.config import ModelArguments
from longctx.train.plan import engines as planned_engines
from longctx.train.plan.engines import ShardedStates, averaged, exchanged, shared_rows
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config

H200 = MACHINES["h200"]
P = Parameters(numels=[80, 40, 40, 10, 80], layers=[40, 40], embedding=80, head=80, hidden=4)
"""Two layers of 40, a final norm of 10: N is 250."""
TIED = Parameters(numels=[80, 40, 40, 10], layers=[40, 40], embedding=80, head=0, hidden=4)
ADAPTED = replace(P, numels=[6, 4, 6, 4], layers=[10, 10], frozen=P.numels, frozen_layers=P.layers)
"""Adapters of 10 on each layer: 20 are trained over 250."""


def sums(*buffers: dict[str, int]) -> int:
    return sum(sum(each.values()) for each in buffers)


def test_fsdp2_by_hand() -> None:
    """Two ranks: 125 parameters each, of 4 bytes and 8 of moments; the rest is gathered."""
    layout = FullyShard(processes=2)
    assert sums(layout.standing(P)) == 12 * 125
    assert layout.gradient(P, 250) == 4 * 125
    assert sums(layout.forward(P)) == 2 * 2 * 40
    assert sums(layout.loss(P)) == 2 * 2 * 80
    assert sums(layout.backward(P, 80)) == 2 * 2 * 40 + 4 * 80
    assert sums(layout.reducing(P, 80)) == 2 * 80 + 4 * 80 + 4 * 40 + 2 * 40
    gathered = 2 * (2 * 40 + 2 * 80)
    assert sum(layout.pending(P)) == (8 + 4) * 125 + 2 * gathered + 4 * 80
    assert layout.host(P) == 0
    # Half of what is gathered comes from the other rank: all in forward, all but lm_head after.
    assert layout.gathers(P, passes=3) == 3 * 2 * (250 + 170) // 2
    assert layout.reduces(P, passes=3) == 3 * 4 * 250 // 2


def test_fsdp2_with_offload_has_nothing_on_the_gpu_between_steps() -> None:
    layout = fully_shard_layout(True, processes=2)
    assert sums(layout.standing(P)) == layout.gradient(P, 250) == 0
    assert layout.host(P) == 16 * 125
    assert layout.name == "FSDP2 with CPU offload" and layout.states_on_host


@pytest.mark.parametrize(
    ("stage", "standing", "gradients"),
    [(1, 2 * 250 + 12 * 125, 2 * 250), (2, 2 * 250 + 12 * 125, 2 * 125), (3, 14 * 125, 2 * 125)],
)
def test_zero_by_hand(stage, standing, gradients) -> None:
    """Two ranks; buckets of D^2 in fp32, two of them below stage 3."""
    layout = Zero(stage=stage, processes=2)
    buckets = 4 * 16 * (1 if stage == 3 else 2)
    assert sums(layout.standing(P)) == standing + buckets
    assert layout.gradient(P, 250) == gradients
    assert layout.late(P) == 8 * 125
    whole = 2 * 250 if stage < 3 else 2 * (2 * 40 + 2 * 80)
    assert sum(layout.pending(P)) == 8 * 125 + whole
    assert Zero(stage=stage, processes=2, accumulates=True).gradient(P, 250) == 2 * gradients


def test_zero3_gathers_as_far_as_it_may() -> None:
    layout = Zero(processes=2)
    assert sums(layout.forward(P)) == 2 * 2 * 40
    assert sums(layout.loss(P)) == 2 * (80 + 2 * 40)
    assert sums(layout.backward(P, 80)) == 2 * 3 * 40
    assert sums(Zero(processes=2, max_live=90).loss(P)) == 2 * 90
    assert sums(Zero(stage=2, processes=2).loss(P)) == 0
    assert sums(layout.update(P)) == 4 * 125
    assert sums(Zero(processes=2, sub_group=100).update(P)) == 4 * 100


def test_adapters_by_hand() -> None:
    """Two ranks. Frozen weights have 2 bytes, and no states or gradients; adapters 12 and 4. What
    is gathered is frozen weights in one word each and adapters in two."""
    fsdp2, zero2, zero3 = FullyShard(processes=2), Zero(stage=2, processes=2), Zero(processes=2)
    assert fsdp2.standing(ADAPTED) == {"weights": 2 * 125 + 4 * 10, "AdamW's states": 8 * 10}
    assert sums(zero3.standing(ADAPTED)) == 2 * 125 + 12 * 10 + 4 * 16
    assert sums(zero2.standing(ADAPTED)) == 2 * 250 + 4 * 20 + 12 * 10 + 2 * 4 * 16
    for layout in (fsdp2, zero2, zero3):
        assert layout.gradient(ADAPTED, 20) == 4 * 10
        assert layout.reduces(ADAPTED, passes=3) == 3 * 4 * 20 // 2
    layer = 40 + 2 * 10
    assert sums(fsdp2.forward(ADAPTED)) == sums(zero3.forward(ADAPTED)) == 2 * 2 * layer
    assert sum(fsdp2.pending(ADAPTED)) == (8 + 4) * 10 + 2 * 2 * (2 * layer + 80)
    # Nothing goes backward through the embedding, and lm_head stays: neither comes again.
    words = 250 + 2 * 20
    assert fsdp2.gathers(ADAPTED, passes=1) == 2 * (2 * words - 80 - 80) // 2
    assert zero3.gathers(ADAPTED, passes=1) == fsdp2.gathers(ADAPTED, passes=1)
    assert zero2.gathers(ADAPTED, passes=3) == 4 * 20 // 2
    offloaded = Zero(processes=2, offloads_weights=True, offloads_states=True, pins=False)
    assert offloaded.host(ADAPTED) == 2 * 125 + (2 * 4 + 12 + 4 + 4) * 10
    assert fully_shard_layout(True, 2).host(ADAPTED) == 2 * 125 + 16 * 10
    states = ShardedStates(fsdp2, ADAPTED, layers=2, accumulates=False)
    assert states.new_gradients(0) == 4 * 10 // 2 and states.others(kept=0, unit=0) == []
    assert states.backward(1)["gradients to sum, fp32"] == 0
    found = states.embedding({"sums of the embedding's gradient": 1000})
    assert found["gradients"] == 4 * 10 and "sums of the embedding's gradient" not in found


def test_zero3_with_cpu_offload_pins_in_powers_of_two() -> None:
    """In MiB: masters and moments as they are; gradients in fp32 by groups of whole parameters,
    gradients and weights in bf16 in one block each, and weights by parameter."""
    mi = 2**20
    p = Parameters(
        numels=[3 * mi, 3 * mi, 3 * mi], layers=[3 * mi], embedding=3 * mi, head=0, hidden=4
    )
    layout = Zero(offloads_weights=True, offloads_states=True, sub_group=5 * mi)
    assert layout.host(p) == (12 * 9 + 32 + 16 + 32 + 32 + 3 * 8) * mi
    assert Zero(offloads_weights=True, offloads_states=True, pins=False).host(p) == 22 * 9 * mi
    assert sums(layout.standing(p)) == 2 * 16  # the bucket
    assert layout.gradient(p, 9 * mi) == 0


def test_settings_are_read() -> None:
    cpu = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9}
    found = zero_layout({"zero_optimization": zero}, 4, passes=2)
    assert (found.name, found.processes, found.accumulates) == ("ZeRO-3", 4, True)
    assert found.reduce_bucket is None and not found.states_on_host
    zero |= {"offload_param": cpu, "offload_optimizer": cpu}
    found = zero_layout({"zero_optimization": zero}, 1, passes=1)
    assert found.name == "ZeRO-3 with CPU offload" and found.states_on_host and found.pins
    for wrong in ({"stage": 0}, {"stage": 3, "offload_param": {"device": "nvme"}}):
        with pytest.raises(UserError, match="is not known to the plan"):
            zero_layout({"zero_optimization": wrong}, 1, passes=1)


# --- in the phases of a step -----------------------------------------------------------------


def test_gradients_of_fsdp2_come_block_by_block() -> None:
    states = ShardedStates(FullyShard(processes=2), P, layers=2, accumulates=False)
    assert states.loss_gradients() == 0
    assert states.new_gradients(1) == 4 * (80 + 10) // 2
    assert states.new_gradients(0) == 4 * (80 + 10 + 40) // 2
    assert states.new_gradients(-1) == 4 * (80 + 10 + 80) // 2
    assert states.all_gradients() == 4 * 250 // 2
    head = states.others(kept=1000, unit=7)[0].buffers
    assert head["gradients"] == 0 and head["kept activations"] == 1000
    added_up = ShardedStates(FullyShard(processes=2), P, layers=2, accumulates=True)
    assert added_up.loss_gradients() == added_up.new_gradients(1) == 4 * 125


def test_the_block_above_is_summed_beside_a_layer() -> None:
    states = ShardedStates(FullyShard(processes=2), P, layers=2, accumulates=False)
    top, below = states.backward(1), states.backward(0)
    assert top["gradients to sum, fp32"] == 4 * 80
    assert below["gradients to sum, fp32"] == 4 * 40
    assert top["libraries"] == LIBRARY_BYTES


def test_tied_weights_keep_a_whole_gradient_until_the_embedding() -> None:
    states = ShardedStates(FullyShard(processes=2), TIED, layers=2, accumulates=False)
    assert states.backward(0)["the embedding's gradient"] == 2 * 80
    assert states.others(kept=0, unit=0) == []


def test_gradients_of_zero3_stand() -> None:
    states = ShardedStates(Zero(processes=2), P, layers=2, accumulates=False)
    assert states.loss_gradients() == states.new_gradients(1) == 2 * 125


# --- whole plans -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Subject:
    model = ModelArguments(preset="llama-3.2-1b", seq_len=8192)
    config = load_config(model, vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 4, 4096
    return Subject(config)


def planned(subject: Subject, engine: Layout | None, gpus: int = 1, **options) -> Plan:
    ranks = options.pop("ranks", 1)
    asked = {"keep": "o", "offload_activations": "none", **options}
    model = ModelArguments(preset="llama-3.2-1b", seq_len=16384, **asked)
    run = PlannedRun(model=model, gpus=gpus, engine=engine, sequence_parallel_size=ranks)
    return plan(subject, run, H200, 500 * GIB)


KINDS = [
    lambda n: FullyShard(processes=n),
    lambda n: FullyShard(processes=n, offloads=True),
    lambda n: Zero(stage=1, processes=n),
    lambda n: Zero(stage=2, processes=n),
    lambda n: Zero(stage=3, processes=n),
    lambda n: Zero(stage=3, processes=n, offloads_weights=True, offloads_states=True),
]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("class_type", ["custom", "liger", "vanilla"])
def test_more_gpus_never_need_more_each(small, make, class_type) -> None:
    settings = {} if class_type == "custom" else {"class_type": class_type}
    if class_type != "custom":
        settings |= {"keep": "auto", "offload_activations": "auto"}
    plans = [planned(small, make(n), n, **settings) for n in (2, 4, 8)]
    assert all(p.fits for p in plans)
    for few, many in zip(plans, plans[1:], strict=False):
        assert many.gpu_bytes <= few.gpu_bytes
        assert many.rank_host_bytes <= few.rank_host_bytes
        assert many.step_tokens == 2 * few.step_tokens
        assert many.tokens_per_s > few.tokens_per_s


def test_a_phase_of_fsdp2_holds_what_the_layout_says(small) -> None:
    found = planned(small, FullyShard(processes=2), 2)
    p = found.parameters
    loss = next(phase for phase in found.phases if phase.name == "loss").buffers
    assert loss["gathered weights"] == 2 * 2 * p.output
    assert loss["weights"] + loss["AdamW's states"] == 12 * (p.total // 2)
    assert small.model.num_parameters() == p.total


@pytest.mark.parametrize("make", KINDS)
def test_adapters_need_less_than_all_weights(small, make) -> None:
    """Two GPUs hold half of the frozen weights each; only adapters' gradients are summed."""
    adapted = small.adapted(ModelArguments(lora_r=16))
    whole, lora = planned(small, make(2), 2), planned(adapted, make(2), 2, lora_r=16)
    assert lora.fits and lora.gpu_bytes < whole.gpu_bytes
    assert lora.rank_host_bytes <= whole.rank_host_bytes
    p = lora.parameters
    assert sum(p.frozen) == whole.parameters.total and p.total == adapted.trained
    assert (
        exchanged(make(2), p, H200, 1).backward
        < exchanged(make(2), whole.parameters, H200, 1).backward
    )
    assert sum(p.frozen_layers) + p.embedding == pytest.approx(sum(p.frozen), rel=1e-3)


@pytest.mark.parametrize("class_type", ["custom", "liger"])
def test_ranks_that_share_rows_have_their_tokens_and_heads(small, class_type) -> None:
    """A peer by accelerate's Ulysses."""
    options = {"class_type": class_type}
    if class_type != "custom":
        options |= {"keep": "auto", "offload_activations": "auto"}
    alone = planned(small, FullyShard(processes=2), 2, **options)
    both = planned(small, FullyShard(processes=2), 2, ranks=2, **options)
    assert both.run.tokens == alone.run.tokens // 2
    assert both.step_tokens == alone.step_tokens // 2
    found = shared_rows(both.sizes, both.run.tokens, H200)
    attention = alone.seconds.attention / 2 + found.taken_forward + found.taken_backward
    assert both.seconds.attention == pytest.approx(attention)
    assert both.gpu_bytes < alone.gpu_bytes
    with pytest.raises(UserError, match="5 ranks cannot share a head group"):
        planned(small, FullyShard(processes=5), 5, ranks=5)


def test_several_gpus_without_an_engine_hold_everything_each(small) -> None:
    alone, both = planned(small, None), planned(small, None, 2)
    graphs = alone.decision.chosen.graph_bytes  # which several processes have not
    assert graphs and both.gpu_bytes == alone.gpu_bytes - graphs
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s, rel=0.05)
    assert both.seconds.step > alone.seconds.step


def test_four_gpus_of_a_host_share_its_memory(small) -> None:
    """On an H100's host, where that was measured, copies of each of four take longer than those of
    each of two; the plan is of the machine as it was asked for."""

    def link_s(gpus: int) -> float:
        layout = FullyShard(processes=gpus)
        model = ModelArguments(
            preset="llama-3.2-1b", seq_len=8192, offload_activations="all", keep="o"
        )
        run = PlannedRun(model=model, gpus=gpus, engine=layout)
        found = plan(small, run, MACHINES["h100"], 800 * GIB)
        assert found.fits and found.machine is MACHINES["h100"]
        return found.seconds.link

    assert link_s(4) == pytest.approx(link_s(2) / SHARED_LINK, rel=0.01)


def test_a_host_that_is_too_small_is_refused(small) -> None:
    layout = Zero(processes=2, offloads_weights=True, offloads_states=True)
    model = ModelArguments(preset="llama-3.2-1b", seq_len=8192)
    found = plan(small, PlannedRun(model=model, gpus=2, engine=layout), H200, 4 * GIB)
    assert found.problem and "host memory are needed in each process" in found.problem


def test_seconds_of_exchanges() -> None:
    peers = H200.exchange_bytes
    found = exchanged(FullyShard(processes=2), P, H200, passes=1)
    assert found.forward == pytest.approx(2 * (250 + 170) / 2 / 2 / peers)
    assert found.alone_backward == pytest.approx(4 * 80 / 2 / peers)
    offloaded = exchanged(Zero(offloads_weights=True, offloads_states=True), P, H200, passes=1)
    assert offloaded.backward == pytest.approx(10 * 250 / H200.link_bytes)
    assert offloaded.update == pytest.approx(250 / planned_engines.CPU_ADAM)
    assert averaged(P, H200, 1) == planned_engines.Exchanged()
    assert averaged(P, H200, 2).backward == pytest.approx(8 * 250 / 2 / peers)


def test_only_shared_rows_exchange_heads(small) -> None:
    found = planned(small, FullyShard(processes=2), 2)
    assert shared_rows(found.sizes, 100, H200) == planned_engines.Exchanged()


def test_fewer_head_groups_wait_for_more_and_exchange_as_much(small) -> None:
    alone = planned(small, FullyShard(processes=2), 2).sizes
    one, two = (
        shared_rows(replace(alone, ranks=2, head_groups=groups), 100, H200) for groups in (1, 2)
    )
    assert one.alone_backward == 2 * two.alone_backward > 0
    assert one.taken_backward == two.taken_backward > one.taken_forward > 0


# --- as a run counts -------------------------------------------------------------------------


def nbytes(tensors) -> int:
    return sum(x.nbytes for x in tensors)


class Tiny(nn.Module):
    """P, as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 10, bias=False) for _ in range(2))
        self.norm = nn.Linear(10, 1, bias=False)

    def get_decoder(self):
        return SimpleNamespace(layers=self.layers)

    def get_output_embeddings(self):
        return self.head


def test_the_run_counts_what_is_pending_as_the_plan_does(monkeypatch) -> None:
    """FSDP2's shards are of fp32, and on the GPU."""
    model = Tiny()
    monkeypatch.setattr(fsdp, "local_shard", lambda p: torch.zeros(p.numel() // 2))
    whole = lambda shards: Pending(2 * nbytes(shards), nbytes(shards))  # noqa: E731
    monkeypatch.setattr(fsdp, "pending_bytes", whole)
    assert gathered.gathered_bytes(model) == 2 * (2 * 40 + 2 * 80)
    assert FSDP2().pending_bytes(model) == FullyShard(processes=2).pending(P)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.adapter = nn.Linear(2, 5, bias=False)
    assert gathered.gathered_bytes(model) == 2 * (2 * (40 + 20) + 80)
    assert FSDP2().pending_bytes(model) == FullyShard(processes=2).pending(ADAPTED)


def test_parameters_are_those_of_the_model(small) -> None:
    p, config = small.parameters, small.config
    assert p.head == 0 and p.embedding == 4096 * config.hidden_size
    assert p.total == sum(x.numel() for x in small.model.parameters())
    assert 4 * p.layer + p.embedding + config.hidden_size == pytest.approx(p.total, rel=1e-3)
