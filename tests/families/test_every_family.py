"""Every family's layers against vanilla Hugging Face, by the rule of tests/exactness.py.

The same as tests/layer/test_schedule.py has for Llama, with what the family adds (windows, norms of
q and k, scalars, fused weights) at values that matter.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import (
    EXPERTS,
    FAMILIES,
    FIRST_OF_EACH,
    KINDS_OF_LAYERS,
    MIXERS,
    WINDOW,
    choose_by_bias_,
    family_config,
    mix_documents_apart_,
)
from small_layer import (
    LADDER,
    PACKED,
    assert_no_bit_depends_on_the_ladder,
    assert_settings_train_exactly,
    assert_trains_exactly,
    batch,
    batches,
    cast,
    gradients,
    packed,
    truth_of,
)
from small_states import everything_on_gpu, nothing_on_gpu, place
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.calls.positions import keep_documents_apart
from longctx.cost.sizes import Batch
from longctx.cost.table import load
from longctx.errors import UserError
from longctx.families.families import has_windows, score_cap, windows
from longctx.families.strangers import why_not_scheduled
from longctx.patching.patch import patch_as
from longctx.runtime.costs import StepTable
from longctx.settings import PatchOptions
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config

pytestmark = pytest.mark.usefixtures("reference_kernels")
DEVICE = torch.device(DEVICE)


def trio(family: str, dtype: torch.dtype, settings=None, **changes):
    """(truth, naive, ours) with the same weights, rounded to `dtype`."""
    torch.manual_seed(0)
    naive = AutoModelForCausalLM.from_config(family_config(family, **changes)).train()
    with torch.no_grad():
        for parameter in naive.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    choose_by_bias_(naive)
    naive = cast(naive.to(DEVICE), dtype)
    truth = truth_of(naive, dtype)
    ours = copy.deepcopy(naive)
    patch_as(ours, PatchOptions(**(settings or {})), DEVICE)
    for model in (truth, naive):
        keep_documents_apart(model)
    return truth, naive, ours


CUT = dict(head_groups=2, tile_tokens=31, keep="x")
SETTINGS = {
    "fp32": (torch.float32, {}),
    "fp32, groups and tiles": (torch.float32, CUT),
    "bf16, groups and tiles": (torch.bfloat16, CUT),
    "bf16, all kept": (torch.bfloat16, dict(keep="all")),
}
WITH_FACTORS = ["gemma", "gemma2", "gemma3_text", "granite", "granitemoe", "granitemoeshared"]
WITH_FACTORS += ["granitemoehybrid", "falcon_h1"]
"""Those whose embeddings have a factor in transformers, in the embedding's module or behind it."""
WHOLE = ["olmo3", "gemma2", "phi3"]
"""Kinds of layers that bf16 has whole and with all kept, too: norms over all heads, norms after
the parts, fused weights. tests/layer/test_schedule.py has Llama's."""
VARIANTS = ["mistral-whole", "qwen2-windows", "qwen3-windows", "smollm3-windows", "exaone4-whole"]
VARIANTS += ["granite-biases", "nemotron-biases", "phi3-windows", "phi3-longrope"]
"""Families that bf16 has without what these add: another window, biases of which
tests/layer/test_schedule.py has errors in bf16, other frequencies."""


def settings_of(family: str) -> list[str]:
    whole = family in KINDS_OF_LAYERS + EXPERTS
    found = ["fp32" if whole else "fp32, groups and tiles"]
    if family not in EXPERTS + VARIANTS:
        found.append("bf16, groups and tiles")
    return found + ["bf16, all kept"] * (family in WHOLE)


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, name) for f in FAMILIES if f not in MIXERS for name in settings_of(f)],
)
def test_exactness_on_packed_rows(family, name, capsys) -> None:
    dtype, settings = SETTINGS[name]
    assert_settings_train_exactly(trio, family, dtype, settings=settings)
    assert "Hugging Face's layers" not in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_one_document_and_batched_rows(family) -> None:
    """Of layers that are plain, with windows, and with both parts in parallel."""
    models = trio(family, torch.float32)
    for lengths in ([[144]], [[5, 43], [48], [16, 16, 16]]):
        # Two batches will do: it is bf16's errors that scatter from batch to batch.
        assert_trains_exactly(models, *batches(lengths)[:2])


@pytest.mark.parametrize(
    ("turn", "family"),
    enumerate(
        ["olmo3", "hunyuan_v1_dense", "ministral3", "gemma3_text", "cohere2", "nemotron"]
        + ["qwen3_5_text-attention"]
    ),
)
def test_no_bit_depends_on_what_is_kept_and_where(family, turn) -> None:
    """In bf16, whose roundings show what is computed otherwise; tests/layer/test_schedule.py has
    fp32, and each Keep in all layers."""
    _, _, ours = trio(family, torch.bfloat16, LADDER | dict(head_groups=2))
    assert_no_bit_depends_on_the_ladder(ours, mixed=1, turn=turn)


@pytest.mark.parametrize("family", [*WITH_FACTORS])
def test_given_embeddings_have_the_factors_of_hugging_faces(family) -> None:
    """Some models multiply the embeddings that they make, others all embeddings."""
    _, naive, ours = trio(family, torch.float32)
    given = torch.randn(1, 40, naive.config.hidden_size, device=DEVICE) * 0.05
    expected, found = (
        model.model(inputs_embeds=given, use_cache=False).last_hidden_state
        for model in (naive, ours)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FIRST_OF_EACH)
def test_hugging_faces_layers_and_logits(family, capsys) -> None:
    """What runs without the schedule has the same embedding, scalars and loss."""
    _, naive, ours = trio(family, torch.float32)
    inputs = batch([[48]])
    alone = inputs | {"labels": None}
    torch.testing.assert_close(ours(**alone).logits, naive(**alone).logits, rtol=1e-4, atol=1e-5)
    cached = alone | {"use_cache": True}
    assert torch.equal(naive(**cached).logits, ours(**cached).logits)
    inputs["use_cache"] = True
    loss, plain = ours(**inputs).loss, naive(**inputs).loss
    assert abs(loss - plain) <= 1e-5 * plain
    assert "a key/value cache" in capsys.readouterr().out


BIAS = "e_score_correction_bias"


@pytest.mark.parametrize(
    ("family", "where", "name", "value", "says"),
    [
        ("qwen2-windows", "model.layers.2.self_attn", "sliding_window", 5, "window"),
        ("qwen2-windows", "model.layers.0.self_attn", "sliding_window", 5, "window"),
        ("smollm3", "model.layers.0.self_attn", "use_rope", 0, "RoPE where"),
        ("granite", "model.layers.1", "residual_multiplier", 3.0, "residual multiplier"),
        ("granite", "model.layers.1.self_attn", "scaling", 3.0, "attention scale"),
        ("phi3", "model.layers.1.resid_mlp_dropout", "p", 0.1, "dropout in model.layers.1.resid"),
        ("phi3", "model.layers.1.mlp", "activation_fn", torch.nn.GELU(), "activation_fn"),
        ("phi3", "model.layers.1.mlp", "down_proj", torch.nn.Identity(), "down_proj"),
        ("qwen3", "model.layers.1.self_attn.q_norm", "variance_epsilon", 1.0, "epsilon"),
        ("qwen3", "model.layers.1.self_attn", "k_norm", torch.nn.Identity(), "k_norm"),
        ("exaone4", "model.layers.0.self_attn", "is_sliding", False, "window"),
        ("exaone4", "model.layers.1", "post_feedforward_layernorm", torch.nn.Identity(), "post_f"),
        ("hunyuan_v1_dense", "model.layers.1.self_attn", "key_layernorm", torch.nn.GELU(), "key_"),
        ("gemma3_text", "model.layers.1.mlp", "act_fn", torch.nn.SiLU(), "act_fn"),
        ("gemma3_text", "model.layers.1.post_feedforward_layernorm", "eps", 1.0, "epsilon"),
        ("gemma2", "model.layers.1.self_attn", "attn_logit_softcapping", 50.0, "a cap of att"),
        ("gemma2", "model.config", "attn_logit_softcapping", None, "a cap of attention"),
        ("gemma3_text", "model.layers.1.self_attn", "attn_logit_softcapping", 5.0, "a cap of a"),
        ("gemma3_text", "model.config", "query_pre_attn_scalar", 8, "attention scale"),
        ("gemma3_text", "model.config", "use_bidirectional_attention", True, "to later tokens"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert", "act_fn", torch.nn.GELU(), "act_fn"),
        ("qwen2_moe", "model.layers.0.mlp", "shared_expert_gate", torch.nn.Identity(), "_gate"),
        ("glm4_moe", "model.layers.1.mlp.gate", BIAS, torch.zeros(3), "a weight of (3,) in model"),
        (
            "glm4_moe",
            "model.layers.1.mlp.gate",
            BIAS,
            None,
            "no weight in model.layers.1.mlp",
        ),
        ("glm4_moe", "model.layers.1.mlp.gate", "other", torch.nn.Buffer(torch.zeros(3)), "other"),
    ],
)
def test_a_stranger_of_a_family_is_found(family, where, name, value, says) -> None:
    _, _, ours = trio(family, torch.float32)
    assert why_not_scheduled(ours.model) is None
    owner = ours.config if where == "model.config" else ours.get_submodule(where)
    setattr(owner, name, value)
    assert says in str(why_not_scheduled(ours.model))


def small(family: str) -> Any:
    """A model with what the family adds, in fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    choose_by_bias_(model)
    return model


@pytest.mark.parametrize("family", FIRST_OF_EACH)
def test_checkpoints_and_generation_are_hugging_faces(family, tmp_path) -> None:
    """Saved patched and loaded without longctx, and the other way round; tokens with a cache."""
    ours = longctx.patch(small(family))
    ours.save_pretrained(tmp_path / "ours")
    theirs = "eager" if score_cap(ours.config) is not None else None
    vanilla = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation=theirs
    ).train()
    keep_documents_apart(vanilla)
    mix_documents_apart_(vanilla)
    assert type(vanilla) is type(ours)
    for (name, p), q in zip(ours.named_parameters(), vanilla.parameters(), strict=True):
        assert torch.equal(p, q), name
    vanilla.save_pretrained(tmp_path / "vanilla")
    kept = tmp_path / "vanilla"
    again = longctx.AutoLongctxModelForCausalLM.from_pretrained(kept, strict=True).train()
    inputs = batch([[30, 18]])
    losses = [model(**inputs).loss.item() for model in (ours, vanilla, again)]
    assert losses[0] == losses[2] == pytest.approx(losses[1], rel=1e-5)
    tokens = [
        model.eval().generate(
            inputs["input_ids"][:, :30], max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        for model in (vanilla, again)
    ]
    assert tokens[0].shape == (1, 35) and torch.equal(*tokens)


@pytest.mark.parametrize(
    "family", ["olmo3", "gemma2", "cohere", "glm4_moe", "ernie4_5_moe", "olmo_hybrid"]
)
def test_exact_states_on_the_host_train_bit_by_bit(family) -> None:
    """tests/memory/test_exact_states.py has plain layers, fused weights, and norms of q and k."""
    found = []
    for where in (everything_on_gpu, nothing_on_gpu):
        model = longctx.patch(cast(small(family), torch.bfloat16), strict=True)
        placed = place(model, where)
        optimizer = placed.optimizer()
        for step in (1, 2):
            model(**batch([[30, 18]], seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
    assert not all(
        torch.equal(p, q.bfloat16())
        for p, q in zip(found[0], small(family).parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("family", "class_type"),
    [
        *((name, "custom") for name in FAMILIES if name not in EXPERTS),
        *((name, "vanilla") for name in FAMILIES if name not in EXPERTS + MIXERS),
    ],
)
def test_the_plan_counts_the_parameters_of_the_model(family, class_type) -> None:
    """tests/runtime/test_cost.py has the FLOPs."""
    subject = Subject(family_config(family))
    sizes = subject.sizes(PlannedRun(model=ModelArguments(class_type=class_type)))
    model, counted = subject.model, subject.parameters
    tables = StepTable.of(sizes, Batch(1, 1)).layers
    for layer, table in zip(model.model.layers, tables, strict=True):
        matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
        assert load(table.forward).at("matmul") == 2 * matrices
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    assert counted.embedding == embedding.numel()
    assert counted.head == (0 if head is embedding else head.numel())
    assert counted.total == sum(p.numel() for p in model.parameters())


def test_windows_are_those_of_hugging_face() -> None:
    found = {family: windows(family_config(family)) for family in FAMILIES}
    W = WINDOW
    none = [None, None, None]
    expected = {
        "mistral": [W, W, W],
        "mixtral": [W, W, W],
        "ministral": [None, W, None],
        "qwen2-windows": [None, W, W],
        "qwen2_moe": [W, None, None],
        "qwen3-windows": [None, W, W],
        "smollm3-windows": [W, None, W],
        "phi3-windows": [W, W, W],
        "exaone4": [W, None, W],
        "olmo3": [None, W, None],
        "starcoder2": [W, W, W],
        "cohere2": [None, W, None],
        "gemma2": [None, W, None],
        "gpt_oss": [None, W, None],
        "gemma3_text": [None, W, None],
    }
    assert found == dict.fromkeys(FAMILIES, none) | expected
    assert has_windows(family_config("mistral"))
    assert not has_windows(family_config("mistral", max_position_embeddings=W))


def test_frozen_parts_of_fused_weights_get_no_gradient() -> None:
    for frozen in ("qkv_proj", "gate_up_proj"):
        models = trio("phi3", torch.float32)
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen not in name)
        assert_trains_exactly(models, *packed(torch.float32))
        assert all(p.grad is None for n, p in models[2].named_parameters() if frozen in n)


def test_the_gradient_of_a_fused_weight_is_one_buffer() -> None:
    _, _, ours = trio("phi3", torch.bfloat16)
    _, grads = gradients(ours, batch(PACKED))
    for name, grad in grads.items():
        if "qkv_proj" in name or "gate_up_proj" in name:
            assert grad.is_contiguous() and grad._base is None, name


def test_long_and_short_rope_in_one_step() -> None:
    """LongRoPE changes its frequencies with the longest position: two batches in forward before the
    first one's backward."""
    short, long = batch([[48]]), batch([[144]])
    _, naive, ours = trio("phi3-longrope", torch.float32)
    for model in (naive, ours):
        losses = [model(**inputs).loss for inputs in (short, long)]
        for loss in losses:
            loss.backward()
    for (name, p), q in zip(ours.named_parameters(), naive.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("qwen3-8b", {}),
        ("mistral-7b", {"sliding_window": 1024}),
        ("mistral-7b", {}),  # the published window, 4096 tokens
        ("qwen2.5-7b", {}),
        ("phi-4", {}),
        ("gemma-2-9b", {}),
        ("gemma-3-4b", {}),  # both of its layers have windows
        ("gemma-3-12b", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("exaone-4-32b", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("olmo-2-7b", {}),
        ("olmo-3-7b", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("ministral-3-8b", {}),
        ("glm-4-9b", {}),
        ("command-r7b", {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_published_dimensions_in_bf16(preset, changes, backend) -> None:
    """Two layers, a row of 8192 tokens: every gradient at most 1.1 times vanilla's error."""
    args = ModelArguments(preset=preset, seq_len=8192, extend_context=True)
    config = load_config(args, vocab_size=1)
    config.num_hidden_layers, config.vocab_size = 2, 32000
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    with torch.device("cuda"):
        # transformers 5.17 takes sdpa for Gemma 2, without the cap of its scores
        attention = None if score_cap(config) is None else "eager"
        naive = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).train()
    with torch.no_grad():
        for name, parameter in naive.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros hide what they are for
                parameter.add_(torch.randn_like(parameter) * 0.2)
    truth = cast(copy.deepcopy(naive), torch.float32)
    ours = copy.deepcopy(naive)
    settings = PatchOptions(offload_activations="all", keep="qkv", attn_backend=backend)
    if backend == "flash" and preset == "gemma-2-9b":
        with pytest.raises(UserError, match="flash has no cap of attention's scores"):
            patch_as(ours, settings, torch.device("cuda"))
        return
    patch_as(ours, settings, torch.device("cuda"))
    assert_trains_exactly((truth, naive, ours), batch([[5000, 3192]]))
    assert not ours.longctx.warned
