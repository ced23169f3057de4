"""What the schedule costs, counted: FLOPs of every product, bytes kept, bytes at the peak.

The counts are torch's (FlopCounterMode, MemTracker), the expectations are the formulas of
longctx/runtime/costs.py. On a CPU attention's own op is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from cost_sizes import SETS
from pairs import pairs
from small_cost import PeakTracker, activity_peak, tables_of
from small_families import FAMILIES, MIXERS
from small_layer import every_kth
from small_model import CPU
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from longctx.attention.documents import Documents
from longctx.cost.kept import asked, run_again
from longctx.cost.table import Work, load
from longctx.kernels.norm import norm_forward
from longctx.layer import norm_spec
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

pytestmark = pytest.mark.usefixtures("reference_kernels")

LAYERS, D, F, H, K, d, V, T = 2, 64, 96, 8, 4, 8, 32, 512
KINDS = dict.fromkeys(kind for name, (kind, _) in FAMILIES.items() if name not in MIXERS)
"""tests/mixers/test_mixers.py counts those with mixers."""
NO_WINDOWS = {"layer_types": LAYERS * ["full_attention"]}
QKV, OUT, MLP = D * (H + 2 * K) * d, H * d * D, 3 * D * F  # weights of each product of a layer
GATE_UP = 2 * D * F
UNIT_BYTES = T * D * 4
LSE_BYTES = H * T * 4
O_BYTES = UNIT_BYTES + T * H * d * 4 + LSE_BYTES
QKV_BYTES = T * (H + 2 * K) * d * 4


@dataclass
class Step:
    model: LlamaForCausalLM
    batch: dict[str, torch.Tensor]

    def forward(self) -> torch.Tensor:
        return self.model(**self.batch).loss


@pytest.fixture
def step(request) -> Step:
    """A model whose settings are the fixture's parameter, and one row of T tokens."""
    return make_step(**getattr(request, "param", {}))


def make_step(kind: str = "llama", changes: dict | None = None, **settings) -> Step:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        num_key_value_heads=K,
        pad_token_id=None,
    )
    config = AutoConfig.for_model(kind, **sizes | (changes or {}))
    model = AutoModelForCausalLM.from_config(config)
    defaults = dict(tile_tokens=64, head_groups=K, offload_activations="none")
    patch_as(model, PatchOptions(**defaults | settings), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(V, (1, T))
    return Step(model, {"input_ids": ids, "labels": ids, "position_ids": torch.arange(T)[None]})


@pytest.mark.parametrize(
    ("step", "again"),
    [
        ({"keep": "x"}, 2 * QKV + OUT + GATE_UP),
        ({"keep": "o"}, QKV + OUT + GATE_UP),
        ({"keep": "o", "head_groups": 1, "tile_tokens": T}, QKV + OUT + GATE_UP),
        ({"keep": "h"}, QKV + GATE_UP),
        ({"keep": "qkv"}, GATE_UP),
        ({"keep": "all"}, 0),
    ],
    ids=["x", "o", "o, one group, one tile", "h", "qkv", "all"],
    indirect=["step"],
)
def test_every_product_is_computed_as_often_as_the_schedule_says(step: Step, again: int) -> None:
    """Forward each once; backward each gradient once, and again what is not kept, down never."""
    with FlopCounterMode(display=False) as forward:
        loss = step.forward()
    loss_flops = 6 * V * D * T
    assert forward.get_total_flops() == LAYERS * 2 * T * (QKV + OUT + MLP) + loss_flops
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == LAYERS * 2 * T * (again + 2 * (QKV + OUT + MLP))
    tables = tables_of(step.model, T)
    kept = SETS[step.model.longctx.args.keep]
    assert load(tables.kinds[0].again(kept)).at("matmul") == 2 * T * again
    assert load(tables.kinds[0].forward).at("matmul") == 2 * T * (QKV + OUT + MLP)
    assert load(tables.kinds[0].backward).at("matmul") == 2 * T * 2 * (QKV + OUT + MLP)
    assert load(tables.loss.forward).at("matmul") == loss_flops


EXPERTS = {
    "mixtral": dict(num_local_experts=5),
    "qwen3_moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=96, mlp_only_layers=[1]
    ),
    "olmoe": dict(num_experts=6, num_experts_per_tok=2, eos_token_id=None),
    "qwen2_moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=96, mlp_only_layers=[1]
    )
    | dict(shared_expert_intermediate_size=112),
    "ernie4_5_moe": dict(
        moe_num_experts=6, moe_k=3, moe_intermediate_size=96, moe_layer_start_index=1
    ),
    "glm4_moe": dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=96),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=3) | NO_WINDOWS,
}
HYBRIDS = {"qwen3_5_text": NO_WINDOWS}
CUTS = pairs(("olmo2", "cohere", "qwen3_5_text"), (1, K), ("x", "o", "all"))
CUTS += [("qwen2_moe", K, "all")]


@pytest.mark.parametrize(
    ("kind", "head_groups", "keep"), dict.fromkeys([*((kind, K, "o") for kind in KINDS), *CUTS])
)
def test_the_table_has_every_product_of_a_family(kind, head_groups, keep) -> None:
    changes = {"sliding_window": None} | NO_WINDOWS if kind == "exaone4" else {}
    changes |= {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    changes |= EXPERTS.get(kind, {}) | HYBRIDS.get(kind, {})
    if kind == "gemma2":
        changes |= {"attn_logit_softcapping": None}  # attention with one is matmuls, counted here
    settings = dict(keep=keep, head_groups=head_groups, tile_tokens=T // 2)
    step = make_step(kind, changes | {"head_dim": d}, **settings)
    tables = tables_of(step.model, T)
    with FlopCounterMode(display=False) as forward:
        loss = step.forward()
    layers = sum(products(layer.forward) for layer in tables.layers)
    assert forward.get_total_flops() == layers + load(tables.loss.forward).at("matmul")
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    works = [(*layer.backward, *layer.again(asked(keep, layer))) for layer in tables.layers]
    assert backward.get_total_flops() == sum(map(products, works))


def products(works: Iterable[Work]) -> float:
    """FLOPs of matmuls, and of experts' grouped ones."""
    return sum(load(works).at(rate) for rate in ("matmul", "grouped"))


@pytest.mark.parametrize(
    ("step", "kept_bytes"),
    [
        ({"keep": "x"}, UNIT_BYTES),
        ({"keep": "o"}, O_BYTES),
        ({"keep": "h"}, O_BYTES + UNIT_BYTES),
        ({"keep": "qkv"}, O_BYTES + UNIT_BYTES + QKV_BYTES),
        ({"keep": "all"}, O_BYTES + UNIT_BYTES + QKV_BYTES + 2 * T * F * 4),
    ],
    ids=["x", "o", "h", "qkv", "all"],
    indirect=["step"],
)
def test_a_layer_keeps_what_the_plan_counts(step: Step, kept_bytes: int) -> None:
    loss = step.forward()
    held = step.model.longctx.store.tensors_on_gpu()
    assert sum(t.untyped_storage().nbytes() for t in held) == LAYERS * kept_bytes
    planned = tables_of(step.model, T).kinds[0].kept_bytes(SETS[step.model.longctx.args.keep])
    assert kept_bytes <= planned <= kept_bytes + 512 * (6 + K)
    del loss


def test_nothing_else_lives_between_forward_and_backward(step: Step) -> None:
    """The last layer's output (for the final norm) and the loss's gradients: two units."""
    tracker = PeakTracker()
    tracker.track_external(step.model)
    with tracker:
        loss = step.forward()
        alive = tracker.get_tracker_snapshot("current")[CPU]
    del loss
    kept = LAYERS * (2 * UNIT_BYTES + LSE_BYTES)
    assert kept <= activations(alive) <= kept + 2 * UNIT_BYTES + 4 * V * D + 64 * T


@pytest.mark.parametrize("groups", [1, 2])
def test_the_peak_is_what_the_plan_leaves_room_for(groups) -> None:
    step = make_step(head_groups=groups)
    tracker = PeakTracker()
    tracker.track_external(step.model)
    with tracker:
        step.forward().backward()
    peak = activations(tracker.get_tracker_snapshot("peak")[CPU])
    planned = activity_peak(step.model, T)
    # torch's flash op for CPUs wants k and v for every query head, and returns gradients of each.
    repeated = 3 * UNIT_BYTES // groups
    assert planned <= peak <= planned + repeated + 16 * T


# --- layers of which only the lowest of every k keeps its input --------------------------------


def every_kth_of(k: int, layers: int, kind: str = "llama", **settings: Any) -> Step:
    step = make_step(kind, {"num_hidden_layers": layers, "head_dim": d}, **settings)
    step.model.longctx.reserve(step.model, T)
    step.model.longctx.store.ladder = every_kth(k, layers, hosted=False)
    return step


@pytest.mark.parametrize("k", [2, 3, 5])
def test_layers_that_keep_no_input_cost_what_the_plan_counts(k: int) -> None:
    """Five layers: FLOPs of backward, and bytes between forward and backward."""
    step = every_kth_of(k, 5)
    ladder = step.model.longctx.store.ladder
    loss = step.forward()
    held = step.model.longctx.store.tensors_on_gpu()
    assert sum(x.nbytes for x in held) == -(-5 // k) * UNIT_BYTES
    del held
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    tables = tables_of(step.model, T)
    again = sum(
        load(layer.again(keep.kept, twice=twice)).at("matmul")
        for layer, keep, twice in zip(tables.layers, ladder, run_again(ladder), strict=True)
    )
    more = 2 * T * (OUT + MLP) * sum(run_again(ladder))  # than where each keeps its input
    assert again == 5 * 2 * T * (2 * QKV + OUT + GATE_UP) + more
    assert backward.get_total_flops() == again + 5 * load(tables.kinds[0].backward).at("matmul")


@pytest.mark.parametrize(
    ("k", "kind", "groups", "tiles"),
    [
        *((2, "llama", 1, 0), (4, "llama", K, 0)),
        *((2, "olmo2", K, 0), (3, "cohere", K, 1)),
    ],
)
def test_the_peak_of_layers_that_run_again(k: int, kind: str, groups: int, tiles: int) -> None:
    """In the backward of the highest, as far from the plan as where every layer keeps its input."""
    repeated = 3 * UNIT_BYTES // groups  # torch's flash op for CPUs, as below
    of_tiles = tiles * 64 * D * 4  # plain torch's LayerNorm
    assert (
        0
        <= over_plan(every_kth_of(k, 4, kind, head_groups=groups))
        <= (repeated + 16 * T + of_tiles)
    )


def test_forward_needs_less_than_backward() -> None:
    """So that layers which run forward again do not add to the peak (cost/peak.py)."""
    for kind in KINDS:
        changes = ({"head_dim": d} if kind != "phi3" else {}) | HYBRIDS.get(kind, {})
        for layer in tables_of(make_step(kind, changes).model, T).kinds:
            forward, backward = (layer.working(phase) for phase in ("forward", "backward"))
            made = layer.by_name["o"].aligned
            assert sum(forward.values()) <= sum(backward.values()) - backward["dy"] + made


@pytest.mark.parametrize(
    ("lengths", "groups"), [([448, 40, 24], K), ([64, *[56] * 8], 1)], ids=["a pair", "8 answers"]
)
def test_a_shared_prompt_needs_a_copy_of_its_answers_o(lengths, groups) -> None:
    """Of one head group, with lse, beside what the same documents need that share nothing; no
    product is computed for another token."""
    peaks, flops = [], []
    for parents in (None, [None] + [0] * (len(lengths) - 1)):
        step = make_step(head_groups=groups)
        documents = Documents.of(lengths, parents)
        firsts = documents.cu_seqlens[:-1].long()
        labels = step.batch["labels"].index_fill(1, firsts, -100)
        step.batch |= documents.arguments() | dict(labels=labels)
        tracker = PeakTracker()
        tracker.track_external(step.model)
        with tracker:
            step.forward().backward()
        peaks.append(activations(tracker.get_tracker_snapshot("peak")[CPU]))
        with FlopCounterMode(display=False) as counter:
            step.forward().backward()
        flops.append(counter.get_total_flops())
    answers = sum(lengths[1:])
    assert peaks[1] - peaks[0] <= answers * (H * d + H) * 4 // groups
    assert flops[0] == flops[1] > 0


def test_rows_with_one_prompt_cost_its_tokens_once() -> None:
    """Rows P + A and P + B are P + A + B in every layer; beside it a few numbers of tokens."""
    P, A, B = 300, 140, 72
    assert P + A + B == T
    ids = torch.randint(V, (T,))
    found, rows = torch.cat([ids[: P + A], ids[:P], ids[P + A :]]), Documents.of([P + A, P + B])
    given = Documents.of([P, A, B], [None, 0, 0])
    labels = ids.masked_fill(torch.arange(T) < P, -100)
    labels[[P, P + A]] = -100  # of another document than the token before it
    batches = (
        dict(
            input_ids=found[None],
            labels=found.masked_fill(rows.position_ids() <= P, -100)[None],
            position_ids=rows.position_ids()[None],
        ),
        dict(input_ids=ids[None], labels=labels[None]) | given.arguments(),
    )
    kept, peaks, flops = [], [], []
    for batch in batches:
        step = make_step(keep="all", share_prefixes=batch is batches[0])
        step.batch = batch
        with FlopCounterMode(display=False) as counter:
            loss = step.forward()
            held = step.model.longctx.store.tensors_on_gpu()
            kept.append(sum(x.untyped_storage().nbytes() for x in held))
            del held
            loss.backward()
        flops.append(counter.get_total_flops())
        tracker = PeakTracker()
        tracker.track_external(step.model)
        with tracker:
            step.forward().backward()
        peaks.append(activations(tracker.get_tracker_snapshot("peak")[CPU]))
    assert kept[0] == kept[1] and flops[0] == flops[1]
    assert abs(peaks[0] - peaks[1]) <= 6 * 8 * len(found)


NEEDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": d},  # copies of q and k
    "phi3": {},  # fused weights
    "exaone4": {"head_dim": d, "sliding_window": None} | NO_WINDOWS,
    "olmo2": {"head_dim": d},
    "cohere": {"head_dim": d},
    "nemotron": {"head_dim": d},
    "hunyuan_v1_dense": {"head_dim": d},
    "granite": {"residual_multiplier": 0.2, "embedding_multiplier": 2.0},
    "qwen3_5_text": {"head_dim": d} | NO_WINDOWS,
}
SOME_CUTS = [("x", K), ("o", 1), ("all", K)]


@pytest.mark.parametrize(
    ("kind", "keep", "head_groups"),
    [
        *(("olmo2", *cut) for cut in SOME_CUTS),
        *((kind, *SOME_CUTS[i % 3]) for i, kind in enumerate(NEEDS) if kind != "olmo2"),
    ],
)
def test_the_plan_knows_what_other_families_need(kind, keep, head_groups) -> None:
    """Their peak is as far from the plan as Llama's with these settings."""
    settings = dict(keep=keep, head_groups=head_groups)
    over = over_plan(make_step(kind, NEEDS[kind], **settings)) - llamas_over_plan(**settings)
    roots = T * H * 4  # torch's reference of the norm holds one for each row
    copies = T * (H + K) * d * 4 // head_groups  # counted, and the peak may lie elsewhere
    # A norm after the MLP has that of a tile more, and plain torch's LayerNorm holds four.
    tiles = 64 * D * 4 * {"exaone4": 1, "olmo2": 1, "cohere": 4}.get(kind, 0)
    assert -copies - tiles <= over <= 1.5 * roots + tiles


@cache  # tracking memory takes a second
def llamas_over_plan(**settings: Any) -> int:
    return over_plan(make_step(**settings))


def over_plan(step: Step) -> int:
    tracker = PeakTracker()
    tracker.track_external(step.model)
    with tracker:
        step.forward().backward()
    planned = activity_peak(step.model, T)
    return activations(tracker.get_tracker_snapshot("peak")[CPU]) - planned


def test_n1_is_computed_for_every_head_group(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the schedule's docstring says: G times in forward, G + 1 times in backward."""
    tokens: list[int] = []

    def count(x, weight, eps, **how):
        tokens.append(len(x) if weight is norm1 else 0)
        return norm_forward(x, weight, eps, **how)

    norm1 = step.model.model.layers[0].input_layernorm.weight
    monkeypatch.setattr(norm_spec, "norm_forward", count)
    loss = step.forward()
    assert sum(tokens) == K * T
    loss.backward()
    assert sum(tokens) == (2 * K + 1) * T


def activations(snapshot: dict) -> int:
    """All but weights and gradients."""
    known = {str(kind): nbytes for kind, nbytes in snapshot.items()}
    return known["Total"] - sum(
        known[f"_MemRefType.{kind}"] for kind in ("PARAM", "BUFFER", "GRAD")
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("head_groups", "limit_gib"), [(8, 2.2), (1, 3.1)])
def test_the_peak_of_llama_8b_layers_on_a_gpu(head_groups: int, limit_gib: float) -> None:
    """Two layers of Llama-3.1-8B at 32768 tokens, one in host memory: the allocator's peak over
    weights and gradients, in backward. A unit is 0.25 GiB.

    With 8 groups the MLP's backward has the peak: 3 units, 0.72 GiB of fp32 weight gradients and a
    tile of 4096 tokens, 2.11 GiB in all (H200). With one group it is attention's: 3 units, q, k, v,
    do and their gradients, and flash-attn-4's fp32 dq, 3.00 GiB.
    """
    tokens, device = 32768, torch.device("cuda")
    config = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=tokens), vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 2, 1024
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    args = PatchOptions(offload_activations="all", head_groups=head_groups, tile_tokens=4096)
    patch_as(model, args, device)
    ids = torch.randint(1024, (1, tokens), device=device)
    batch = dict(input_ids=ids, labels=ids, position_ids=torch.arange(tokens, device=device)[None])
    for _ in range(2):  # the first compiles kernels and makes the gradients
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(**batch).loss.backward()
    peak_gib = (torch.cuda.max_memory_allocated() - before_bytes) / 2**30
    assert peak_gib < limit_gib, f"{peak_gib:.2f} GiB"
