"""Plans of eight layers of Llama-3.1-8B: budgets, more memory, longest rows, changes. All states
are 39 GiB."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from cost_sizes import SETS
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import tiny_config
from small_plan import card, eight_layers, run, whole_model
from transformers import BloomConfig

from longctx.constants import GIB
from longctx.cost.flops import squared_length
from longctx.cost.machines import MACHINES
from longctx.cost.sizes import Batch
from longctx.cost.table import load
from longctx.errors import UserError
from longctx.families.family import head_dim
from longctx.layer.specs.attention_sizes import attention_flops
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.loop.metrics import attended
from longctx.runtime.costs import StepTable
from longctx.train.options.config import ModelArguments
from longctx.train.plan.predict import Plan, longest, plan
from longctx.train.plan.shortage import shortage
from longctx.train.plan.subject import Subject
from longctx.train.start.loading import load_config


@cache
def adapted(quantize: str, *saved: str) -> Subject:
    """The same under adapters of rank 16 on all maps."""
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1)
    config.num_hidden_layers = 8
    asked = ModelArguments(lora_r=16, quantize=quantize, lora_modules_to_save=list(saved) or None)
    return Subject(config, asked)


def planned(gpu_gib: float, host_gib: int, tokens: int, **options) -> Plan:
    return plan(eight_layers(), run(tokens, **options), card(gpu_gib), host_gib * GIB)


TOKENS = st.sampled_from([512, 8192, 65536, 131072, 524288])
OPTIONS = {
    "keep": st.sampled_from(["x", "o", "all"]),
    "place": st.sampled_from(["gpu", "host"]),
    "offload_activations": st.sampled_from(["none", "all"]),
    "gradient_accumulation_steps": st.just(4),
    "exact": st.just(False),
}
GPUS, HOSTS = [5, 6, 8, 10, 12, 16, 24, 32, 48, 80], [16, 24, 32, 40, 48, 64, 96, 256]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    gpu=st.sampled_from(GPUS),
    host=st.sampled_from(HOSTS),
    tokens=TOKENS,
    options=st.fixed_dictionaries(
        {},
        optional={
            **OPTIONS,
            "class_type": st.sampled_from(["vanilla", "liger"]),
            "gpu_memory_gib": st.just(4.5),
        },
    ),
)
def test_what_fits_is_within_its_budgets(gpu, host, tokens, options) -> None:
    assert_within_budgets(planned(gpu, host, tokens, **options), options)


def assert_within_budgets(found: Plan, options: dict) -> None:
    assert found.fits == (found.problem is None)
    assert found.problem is None or "\n" not in found.problem
    decision = found.decision
    if decision.needed_bytes <= decision.budget.gpu and not decision.host_problem():
        assert found.fits, "what a run would start with is more than was decided on"
    if found.fits:
        assert max(phase.nbytes for phase in found.phases) <= found.gpu_limit
        assert found.gpu_limit <= found.machine.gpu_bytes
        assert found.decision.host.nbytes <= found.decision.budget.host
    assert min(found.seconds) >= 0
    assert all(nbytes >= 0 for phase in found.phases for nbytes in phase.buffers.values())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    gpu=st.sampled_from([1, 2, 3, 4, *GPUS]),
    host=st.sampled_from(HOSTS),
    tokens=TOKENS,
    what=st.sampled_from([("none",), ("nf4",), ("nf4", "embed_tokens", "lm_head")]),
    options=st.fixed_dictionaries(
        {},
        optional={
            **OPTIONS,
            "gpu_memory_gib": st.just(1.0),
        },
    ),
)
def test_adapters_that_fit_are_within_their_budgets(gpu, host, tokens, what, options) -> None:
    found = plan(adapted(*what), run(tokens, **options), card(gpu), host * GIB)
    assert_within_budgets(found, options)
    if found.fits and len(what) == 1 and options.get("exact", True):
        assert all(place.states and place.grad for place in found.decision.places)
        assert all(phase.buffers["buffers of the update"] == 0 for phase in found.phases)


def test_bytes_of_adapters() -> None:
    """Of a layer 218M frozen weights in 2 bytes, or in 4.127 bits; 16 (I + O) numbers of each map
    in fp32, with two moments and a gradient. Ends that are trained have 14 bytes a parameter."""
    numbers = 8 * 16 * (6 * 4096 + 14336 + 3 * 4096 + 2 * 1024 + 2 * 14336)
    layer, end = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336, 128256 * 4096
    for quantize, nbytes in (("none", 2), ("nf4", 1 / 2 + 1 / 64 + 1 / 64 / 64)):
        subject = adapted(quantize)
        found = plan(subject, run(131072), card(80), 64 * GIB)
        assert subject.trained == 8 * subject.sizes(run()).kinds[0].adapted.parameters == numbers
        blocks = found.decision.blocks
        assert [block.weight for block in blocks[1:-2]] == 8 * [pytest.approx(nbytes * layer)]
        assert [(b.states, b.grad) for b in blocks[:-1]] == 10 * [(0, 0)]
        rest = blocks[-1]
        assert rest.fixed and (rest.states, rest.grad) == (8 * numbers, 4 * numbers)
        loss = next(phase.buffers for phase in found.phases if phase.name == "loss")
        assert loss["lm_head's gradient, fp32"] == 0 and loss["logits"] == GIB
        dense = 2 * layer if quantize == "nf4" else 0
        for name in ("forward", "backward"):  # all of a layer's, while it computes
            buffers = next(phase.buffers for phase in found.phases if phase.name == name)
            assert buffers.get("a layer's dense weights", 0) == dense
    trained = plan(adapted("nf4", "embed_tokens", "lm_head"), run(131072), card(80), 64 * GIB)
    ends = [trained.decision.blocks[0], trained.decision.blocks[-2]]
    assert [(b.weight, b.states, b.grad) for b in ends] == 2 * [(4 * end, 10 * end, 2 * end)]


@pytest.mark.parametrize("options", [{"gpus": 2}, {"class_type": "vanilla"}])
def test_a_frozen_base_that_cannot_leave_does_not_fit_the_host(options) -> None:
    """As train.py, which refuses the same run. Without adapters the states can wait there."""
    asked = run(8192, place="host", **options)
    found = plan(adapted("none"), asked, MACHINES["h200"], 200 * GIB)
    assert not found.fits and "nothing of this run can wait on the host" in found.problem
    assert plan(eight_layers(), asked, MACHINES["h200"], 200 * GIB).fits


def test_experts_must_fit_the_host_while_they_are_read() -> None:
    """transformers puts them together there, also where all weights wait on the GPU afterwards."""
    config = load_config(ModelArguments(preset="qwen3-30b-a3b", seq_len=8192), vocab_size=1)
    config.num_hidden_layers = 8  # 9 GiB of experts
    machine, plans = MACHINES["h200"], {}
    for quantize, host in product(("none", "nf4"), (8, 16)):
        args = ModelArguments(lora_r=16, quantize=quantize)
        plans[quantize, host] = plan(Subject(config, args), run(4096), machine, host * GIB)
    short = plans["none", 8]
    assert short.problem is not None and "10.4 GiB of host memory are needed" in short.problem
    lacking = shortage(Subject(config, ModelArguments(lora_r=16)), short, 8 * GIB)
    assert lacking is not None and lacking.needed == 11 * GIB
    assert "(weights while they are read 10.4, left free 0.6)" in lacking.line
    assert all(found.fits for asked, found in plans.items() if asked != ("none", 8))


def test_adapters_take_less_than_all_weights() -> None:
    """Of memory and of time: a third of a layer's products are weight gradients."""
    machine, options = MACHINES["h200"], dict(keep="o", offload_activations="none")
    plans = [
        plan(subject, run(32768, **options), machine, 64 * GIB)
        for subject in (eight_layers(), adapted("none"), adapted("nf4"))
    ]
    whole, lora, qlora = plans
    assert whole.gpu_bytes > 2 * lora.gpu_bytes > 2 * qlora.gpu_bytes
    assert 0.6 < lora.seconds.products / whole.seconds.products < 0.8
    assert lora.seconds.attention == whole.seconds.attention
    assert lora.seconds.step < qlora.seconds.step < 1.02 * lora.seconds.step
    hosted = [
        plan(subject, run(32768, place="host", **options), machine, 64 * GIB)
        for subject in (adapted("none"), adapted("nf4"))
    ]
    for there, here in zip(hosted, (lora, qlora), strict=True):
        assert there.gpu_bytes < here.gpu_bytes
        blocks = there.decision.blocks
        # The embedding comes once, lm_head too, layers for backward again; nothing goes down.
        risen = sum(b.weight for b in blocks[:-1]) + sum(b.weight for b in blocks[1:-2])
        assert there.seconds.link == pytest.approx(risen / machine.link_bytes, rel=0.01)


@pytest.mark.parametrize("tokens", [8192, 131072])
def test_more_memory_makes_no_plan_slower(tokens) -> None:
    """As its seconds are shown, to three digits."""
    which = slice(tokens > 8192, None, 2)
    memory = product(GPUS[which], HOSTS[which])
    plans = {(gpu, host): planned(gpu, host, tokens) for gpu, host in memory}
    for less, more in product(plans, repeat=2):
        if plans[less].fits and less[0] <= more[0] and less[1] <= more[1]:
            assert plans[more].fits, (less, more)
            assert plans[more].step_s <= plans[less].step_s, (less, more)


def test_gradients_have_no_room_in_the_first_layers_activations() -> None:
    """Those are back on the GPU, x o h q k v of 4.5 GiB, when all other gradients are there."""
    found = planned(18, 256, 131072, keep="qkv", offload_activations="all")
    backward = next(phase for phase in found.phases if phase.name == "backward")
    assert found.fits and backward.buffers["kept activations"] > 4.5 * GIB
    assert backward.nbytes <= found.decision.budget.gpu + 2**26  # cuBLAS's are spare


def test_with_everything_on_the_gpu_nothing_is_waited_for() -> None:
    found = planned(80, 64, 8192)
    assert found.seconds.waits < 0.05 * found.seconds.step and found.seconds.link == 0
    assert found.decision.host.nbytes == 0
    assert found.host_bytes < 3 * GIB


def test_the_longest_row_that_fits() -> None:
    subject, machine = eight_layers(), card(12)
    found = longest(subject, run(), machine, 256 * GIB)
    assert found is not None and found.fits
    tokens = found.run.model.seq_len
    assert tokens > 65536 and tokens % 512 == 0
    assert not planned(12, 256, tokens + 512).fits
    assert longest(subject, run(), card(3), 256 * GIB) is None


# --- seconds that nobody measured --------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MACHINES if not MACHINES[name].measured])
def test_every_card_plans_a_step(name) -> None:
    """No faster than the peak allows, and not ten times slower."""
    machine = MACHINES[name]
    found = plan(eight_layers(), run(32768), machine, 256 * GIB)
    assert found.fits and found.gpu_bytes < machine.gpu_bytes
    least = 6 * eight_layers().parameters.total * 32768 / machine.peak_flops
    assert least < found.step_s < 10 * least


@pytest.mark.parametrize(
    ("name", "tokens", "published_s"),
    [
        *(("rtx-5090", 131072, 192.6), ("rtx-5090", 262144, 777.5)),
        *(("rtx-3090", 32768, 54), ("rtx-3090", 65536, 167), ("rtx-3090", 131072, 705)),
    ],
)
def test_published_steps_of_another_trainer_are_in_the_range(name, tokens, published_s) -> None:
    """ml_dataflow's, Llama-3.1-8B: docs/plan_notes.md."""
    found = plan(whole_model(), run(tokens), MACHINES[name], 512 * GIB)
    least, most = (times * found.step_s for times in found.machine.spread)
    assert least < published_s < most


# --- what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu_memory_gib": 30.0}, "--gpu_memory_gib 30 is more than the 24.0 GiB of rtx-4090"),
        ({"attn_backend": "fa4"}, "--attn_backend fa4 is not known on rtx-4090: plan with auto or"),
    ],
)
def test_what_no_machine_can_run(options, says) -> None:
    with pytest.raises(UserError, match=says):
        planned(24, 128, 8192, **options)


def test_a_config_without_the_numbers() -> None:
    with pytest.raises(UserError, match="config has no intermediate_size, which the plan needs"):
        Subject(BloomConfig())


# --- counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 7, 20, 100])
def test_squared_lengths_are_those_of_the_metrics(window) -> None:
    config = tiny_config("mistral", num_hidden_layers=1, sliding_window=window)
    for tokens in (1, 7, 20, 64):
        wide = config.num_attention_heads * head_dim(config)
        assert wide * squared_length(tokens, window) == attended(config, torch.arange(tokens)[None])


def test_attention_by_documents() -> None:
    sizes = eight_layers().sizes(run())
    kind = sizes.kinds[0].one(AttentionSpec)
    whole = attention_flops(sizes, kind, Batch(131072, 131072))
    assert whole == 2 * 131072**2 * 4096
    assert attention_flops(sizes, kind, Batch(131072, 8192)) == whole / 16
    ragged = attention_flops(sizes, kind, Batch(100, 64))
    assert ragged == 2 * 4096 * (64**2 + 36**2)
    asked = run(131072, keep="o")
    short = plan(eight_layers(), asked.having(document_tokens=8192), MACHINES["h200"], 256 * GIB)
    long = plan(eight_layers(), asked, MACHINES["h200"], 256 * GIB)
    assert short.seconds.attention == pytest.approx(long.seconds.attention / 16)


def test_head_groups_norm_once_more_each() -> None:
    """Forward: 2 units a group; in backward too, unless q, k, v were kept."""
    unit, batch = 131072 * 4096 * 2, Batch(131072, 131072)

    def nbytes(groups: int, keep: str) -> tuple[float, float]:
        layer = StepTable.of(eight_layers().sizes(run(head_groups=groups)), batch).kinds[0]
        again = load(layer.again(SETS[keep])).nbytes
        return load(layer.forward).nbytes, load(layer.backward).nbytes + again

    pairs = zip(nbytes(1, "o"), nbytes(8, "o"), strict=True)
    assert [most - fewer for fewer, most in pairs] == [14 * unit, 14 * unit]
    assert nbytes(1, "qkv")[1] == nbytes(8, "qkv")[1]
