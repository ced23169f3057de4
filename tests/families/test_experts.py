"""Layers with experts against vanilla Hugging Face: routing, auxiliary loss, bits.

Which experts a token goes to is a step function of its hidden state. In 16 bits some choices flip,
which costs more than all roundings, so that the rule of tests/exactness.py is asked with the same
experts on all sides. tests/families/test_every_family.py has fp32, with the routers' own choice.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from small_families import EXPERTS, family_config
from small_layer import (
    LADDER,
    PACKED,
    assert_exact_run,
    assert_no_bit_depends_on_the_ladder,
    batch,
    batches,
    gradients,
    run,
)
from test_every_family import trio
from transformers import GraniteMoeForCausalLM

from exactness import DEVICE, relative_error
from longctx.cost.sizes import Batch
from longctx.cost.table import load
from longctx.errors import UserError
from longctx.families.families import layer_specs, layers_of
from longctx.families.family import part_of
from longctx.families.strangers import why_not_scheduled
from longctx.layer.router import weights_of
from longctx.layer.specs.experts_spec import ExpertsSpec
from longctx.runtime.costs import StepTable
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import PlannedRun, Subject

pytestmark = pytest.mark.usefixtures("reference_kernels")
FAMILIES = EXPERTS
RECORDED = "router_logits" in GraniteMoeForCausalLM._can_record_outputs
BALANCED = [
    family
    for family in FAMILIES
    if family != "glm4_moe" and (RECORDED or not family.startswith("granite"))
]
"""Those whose causal models have an auxiliary loss. Granite's fail before transformers 5.18, as
their base models return no logits of routers there."""
DENSE_TOO = ["qwen3_moe", "qwen2_moe", "glm4_moe", "ernie4_5_moe"]
"""Those with an MLP in some layers."""
COEFFICIENT = 0.5


def routers(model):
    specs = (layer.part(ExpertsSpec) for layer in layer_specs(model.config.get_text_config()))
    return [spec.router for spec in specs if spec is not None]


def gates(model) -> list[torch.nn.Module]:
    """The modules of routers."""
    return [
        part_of(layer, spec.held["router"].rpartition(".")[0])
        for layer, spec in layers_of(model.model)
        if spec.part(ExpertsSpec)
    ]


def chosen(model, rows: tuple[int, int], seed: int = 0) -> torch.Tensor:  # (L, B, S, k)
    """Experts for each token of a batch: all different, and some experts with few tokens."""
    draw = torch.Generator().manual_seed(seed)
    each = routers(model)
    scores = torch.rand(len(each), *rows, each[0].experts, generator=draw)
    scores *= torch.linspace(0.2, 1, each[0].experts)
    return scores.topk(each[0].chosen).indices.to(DEVICE)


def follow(model, ids: torch.Tensor) -> None:
    """Has Hugging Face's routers choose these experts."""
    for gate, router, own in zip(gates(model), routers(model), ids.flatten(1, 2), strict=True):

        def forward(hidden, gate=gate, own=own, router=router):
            hidden, sums = hidden.reshape(-1, hidden.shape[-1]), router.score == "sigmoid"
            wide = torch.promote_types(hidden.dtype, torch.float32)
            dtype = wide if sums or router.in_fp32 else hidden.dtype
            bias = getattr(gate, "bias", None)
            logits = F.linear(
                hidden.to(dtype), gate.weight.to(dtype), None if bias is None else bias.to(dtype)
            )
            weights = weights_of(logits.to(wide), router, own)
            return logits, weights.to(wide if sums else hidden.dtype), own

        gate.forward = forward


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "keep"),
    [
        *(("qwen3_moe", "all"), ("olmoe", "x"), ("gpt_oss", "x")),
        *(("qwen2_moe", "all"), ("glm4_moe", "x"), ("ernie4_5_moe", "x")),
    ],
)
def test_the_same_experts_train_exactly_in_16_bits(family, keep) -> None:
    """Mixtral's layers round as Qwen3's, whose weights of experts add up to 1, too."""
    settings = dict(keep=keep, tile_tokens=31, head_groups=2)
    if family == "gpt_oss" and DEVICE == "cpu":  # where sinks round o a second time otherwise
        settings["attn_backend"] = "math"
    truth, naive, ours = trio(family, torch.bfloat16, settings)
    few = {"gpt_oss": "routers' biases have 6 numbers", "ernie4_5_moe": "k's biases cancel"}
    given = batches(PACKED, 24 if family in few else 8)
    ids = chosen(ours, given[0]["input_ids"].shape)
    for model in (truth, naive):
        follow(model, ids)
    runs = [run(model, *given) for model in (truth, naive)]
    found = run(ours, *({**inputs, "expert_ids": ids} for inputs in given))
    assert_exact_run(found, runs[1], runs[0], torch.bfloat16)


@pytest.mark.parametrize(("turn", "family"), enumerate(["mixtral", "qwen2_moe"]))
def test_no_bit_depends_on_what_is_kept_and_where(family, turn) -> None:
    _, _, ours = trio(family, torch.bfloat16, LADDER | dict(head_groups=2))
    ours.config.output_router_logits = True
    assert_no_bit_depends_on_the_ladder(ours, mixed=1, turn=turn)


def test_routing_is_kept_and_may_wait_on_the_host() -> None:
    _, _, ours = trio("mixtral", torch.float32, LADDER)
    ours(**batch(PACKED))
    assert all({"routing"} <= keep.kept for keep in ours.longctx.store.ladder)


PADDED = torch.tensor([[1] * 48, [1] * 30 + [0] * 18], device=DEVICE)
ASKED = {
    "by argument": dict(output_router_logits=True),
    "padded": dict(output_router_logits=True, attention_mask=PADDED),
    "by configuration": {},
}


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        *(("mixtral", asked) for asked in ASKED),
        *((family, "padded") for family in BALANCED if family != "mixtral"),
    ],
)
def test_the_auxiliary_loss_and_its_gradients(family, asked) -> None:
    models = trio(family, torch.float32, dict(tile_tokens=31), router_aux_loss_coef=COEFFICIENT)
    ids = torch.randint(211, (2, 48), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = dict(input_ids=ids, labels=ids.masked_fill(PADDED == 0, -100), **ASKED[asked])
    for model in models:
        model.config.output_router_logits = asked == "by configuration"
    truth, naive, ours = (run(model, inputs) for model in models)
    assert_exact_run(ours, naive, truth, torch.float32)
    found = [model(**inputs) for model in models]
    torch.testing.assert_close(found[2].aux_loss, found[0].aux_loss.float())
    assert found[2].aux_loss > 1
    for model in models:
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(models[2](**inputs).loss, models[1](**inputs).loss)


@pytest.mark.parametrize(
    ("family", "padded"),
    [("mixtral", True), *((family, i % 2 > 0) for i, family in enumerate(BALANCED))],
)
def test_logits_of_routers_for_a_caller_of_the_base_model(family, padded, capsys) -> None:
    """Who makes a loss of them has its gradients, in tiles and with padding left out."""
    _, naive, ours = trio(family, torch.float32, dict(tile_tokens=31))
    ids = torch.randint(211, (2, 48), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = dict(input_ids=ids, use_cache=False, output_router_logits=True)
    if padded:
        inputs["attention_mask"] = PADDED
    seen = PADDED.flatten().bool() if padded else slice(None)
    found = []
    for model in (naive, ours):
        out = model.model(**inputs)
        logits = [each[seen] for each in out.router_logits]
        draw = torch.Generator().manual_seed(2)
        weights = torch.randn(logits[0].shape, generator=draw).to(DEVICE)
        hidden = out.last_hidden_state.flatten(0, 1)[seen]
        (hidden.sum() + sum((each.float() * weights).sum() for each in logits)).backward()
        grads = [p.grad for p in model.model.parameters() if p.requires_grad]
        found.append(([each.float() for each in logits], grads))
    (wanted, wanted_grads), (said, grads) = found
    assert len(said) == len(wanted)
    for one, other in zip(said + grads, wanted + wanted_grads, strict=True):
        assert relative_error(one, other) < 1e-5
    assert padded or "Hugging Face's layers" not in capsys.readouterr().out


def test_a_family_without_an_auxiliary_loss_gets_none(capsys) -> None:
    """GLM-4.5's model returns the logits of its routers, and adds nothing to its loss."""
    _, naive, ours = trio("glm4_moe", torch.float32, use_qk_norm=False)
    inputs = batch([[48]])
    wanted, found = gradients(naive, inputs), gradients(ours, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)
    assert "Hugging Face's layers" not in capsys.readouterr().out
    torch.testing.assert_close(ours(**inputs, output_router_logits=True).loss, wanted[0])
    assert "calls with output_router_logits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "setting", "path"),
    [
        ("ernie4_5_moe", "moe_num_shared_experts", "mlp.shared_experts"),
        ("granitemoeshared", "shared_intermediate_size", "shared_mlp"),
    ],
)
def test_a_shared_expert_is_a_setting(family, setting, path, capsys) -> None:
    models = trio(family, torch.float32, **{setting: 0})
    assert part_of(models[2].model.layers[2], path) is None
    truth, naive, ours = (run(model, batch([[48]])) for model in models)
    assert_exact_run(ours, naive, truth, torch.float32)
    assert "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "width"),
    [
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("glm4_moe", "n_shared_experts"),
        ("qwen3_moe", "moe_intermediate_size"),
    ],
)
def test_experts_of_width_0_run_hugging_faces_layers(family, width, capsys) -> None:
    _, naive, ours = trio(family, torch.float32, **{width: 0})
    inputs = batch([[48]])
    expected, found = (gradients(model, inputs) for model in (naive, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert "calls with a weight without elements (model.layers." in capsys.readouterr().out


def test_hugging_faces_layers_have_the_auxiliary_loss_too(capsys) -> None:
    """Where a hook keeps the schedule away, Hugging Face's layers return the routers' logits, of
    which the auxiliary loss is made."""
    _, naive, ours = trio("mixtral", torch.float32, router_aux_loss_coef=COEFFICIENT)
    inputs = batch([[48]]) | dict(output_router_logits=True)
    ours.model.layers[0].register_forward_hook(lambda *_: None)
    wanted, found = gradients(naive, inputs), gradients(ours, inputs)
    assert "Hugging Face's layers run" in capsys.readouterr().out
    torch.testing.assert_close(found[0], wanted[0])
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_shared_prompt_counts_as_often_as_it_has_answers(family) -> None:
    """In the auxiliary loss, as in rows of which each has its own prompt."""
    changes = dict(router_aux_loss_coef=COEFFICIENT)
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(211, (40,), generator=draw)
    rows = [torch.cat([prompt, torch.randint(211, (9,), generator=draw)]) for _ in range(3)]
    ids = torch.stack(rows).to(DEVICE)
    inputs = dict(input_ids=ids, labels=ids, output_router_logits=True)
    _, apart, _ = trio(family, torch.float32, {}, **changes)
    _, _, ours = trio(family, torch.float32, dict(share_prefixes=True), **changes)
    wanted, found = gradients(apart, inputs), gradients(ours, inputs)
    torch.testing.assert_close(found[0], wanted[0])
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_a_caller_chose(family) -> None:
    """The routers' own choice, given back, changes no bit; another one changes the loss."""
    _, _, ours = trio(family, torch.float32, dict(tile_tokens=31))
    inputs, seen = batch([[48]]), []
    hooks = [g.register_forward_hook(lambda *given: seen.append(given[2][2])) for g in gates(ours)]
    with torch.no_grad():
        ours(**inputs | {"labels": None, "use_cache": True})  # Hugging Face's layers
    for hook in hooks:
        hook.remove()
    own = torch.stack(seen)[:, None]  # of the whole row
    loss, grads = gradients(ours, inputs)
    grads = {name: grad.clone() for name, grad in grads.items()}
    again, same = gradients(ours, inputs | {"expert_ids": own})
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    other = chosen(ours, inputs["input_ids"].shape)
    assert not torch.equal(loss, ours(**inputs, expert_ids=other).loss)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda ids: ids[:1], r"shape \(2, 1, 144, 3\).*got \(1, 1, 144, 3\)"),
        (lambda ids: ids.float(), "must be integers"),
        (lambda ids: ids + 5, "must be from 0 to 6"),
        (lambda ids: [1], "got list"),
    ],
)
def test_experts_that_cannot_be(change, problem) -> None:
    _, _, ours = trio("qwen3_moe", torch.float32)
    inputs = batch(PACKED)
    ids = change(chosen(ours, inputs["input_ids"].shape))
    with pytest.raises(UserError, match=problem):
        ours(**inputs, expert_ids=ids)


def test_experts_are_chosen_where_there_are_some() -> None:
    _, _, ours = trio("llama", torch.float32)
    with pytest.raises(UserError, match="this one has none"):
        ours(**batch([[48]]), expert_ids=torch.zeros(3, 1, 48, 2).long())


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_gets_all(family) -> None:
    """And most get none: every token is a tie, which torch.topk breaks the same way on all
    sides."""
    models = trio(family, torch.float32, dict(tile_tokens=31))
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if name.endswith((".gate.weight", ".router.weight", ".router.bias")):
                    parameter.zero_()
    truth, naive, ours = (run(model, *batches(PACKED, 2)) for model in models)
    assert_exact_run(ours, naive, truth, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_all_parameters_and_the_products_of_chosen_experts(family) -> None:
    config = family_config(family)
    subject = Subject(config)
    sizes = subject.sizes(PlannedRun(model=ModelArguments(class_type="custom")))
    trained = [p for p in subject.model.parameters() if p.requires_grad]  # not ERNIE's bias
    assert subject.parameters.total == sum(p.numel() for p in trained)
    assert not subject.parameters.adapters
    kinds = StepTable.of(sizes, Batch(1, 1)).kinds
    specs = [kind.part(ExpertsSpec) for kind in sizes.kinds]
    assert {spec is None for spec in specs} == {False, *([True] * (family in DENSE_TOO))}
    for spec, table in zip(specs, kinds, strict=True):
        chosen = config.num_experts_per_tok if spec else 0
        stack = 3 * config.hidden_size * spec.width if spec else 0
        assert load(table.forward).at("grouped") == 2 * chosen * stack


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda base: setattr(base.layers[0].mlp, "jitter_noise", 0.1), "jitter noise"),
        (lambda base: setattr(base.config, "clip_qkv", 8.0), "a clip of q, k and v"),  # OLMoE's
        (
            lambda base: base.layers[0].mlp.gate.register_buffer("bias", torch.zeros(5)),
            "mlp.gate.bias, which the schedule does not know",
        ),
        (
            lambda base: setattr(
                base.layers[1].mlp.experts,
                "down_proj",
                torch.nn.Parameter(torch.zeros(5, 128, 32)),
            ),
            r"a weight of \(5, 128, 32\) in model.layers.1.mlp.experts.down_proj",
        ),
    ],
)
def test_what_experts_have_beside(spoil, reason, capsys) -> None:
    _, _, ours = trio("mixtral", torch.float32)
    spoil(ours.model)
    try:
        ours(**batch([[48]]))
    except RuntimeError:
        pass  # Hugging Face's layers cannot compute with such a weight either
    assert re.search(reason, capsys.readouterr().out)


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_another_activation_of_experts(name) -> None:
    _, _, ours = trio("gpt_oss", torch.float32)
    assert why_not_scheduled(ours.model) is None
    setattr(ours.model.layers[1].mlp.experts, name, 1.25)
    found = str(why_not_scheduled(ours.model))
    assert "another activation of experts than the configuration's in model.layers.1" in found
