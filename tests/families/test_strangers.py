"""What a layer is made of: a stranger among its modules is found, said once, and runs."""

from __future__ import annotations

import ast
import inspect
import pickle
import textwrap
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from small_families import family_config
from small_model import CPU, packed_batch, tiny_config
from torch import nn
from torch.utils.data import default_collate
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from longctx.errors import UserError
from longctx.families.families import FAMILIES, layer_specs
from longctx.families.family import Layer, part_of
from longctx.families.strangers import asks_for_router_logits, why_not_scheduled
from longctx.forwards.base import output_class
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.patching.patch import patch_as
from longctx.settings import PatchOptions
from longctx.train.options.config import TrainArguments
from longctx.train.trainer.trainer import LongTrainer

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Adapted(nn.Module):
    """A linear map with a LoRA adapter, as PEFT puts it in the map's place."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, rank))

    @property
    def weight(self) -> nn.Parameter:
        """PEFT's has it too: reading it drops the adapter without a word."""
        return self.base.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Vanilla and patched, with the same weights."""
    pair = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config())
        with torch.no_grad():  # fresh weights are so small that a layer hardly matters
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if patched:
            patch_as(model, PatchOptions(), CPU)
        pair.append(model.train())
    return pair[0], pair[1]


def adapt(name: str):
    def change(model: LlamaForCausalLM) -> None:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        torch.manual_seed(1)
        setattr(module, attribute, Adapted(getattr(module, attribute)))

    return change


def double(module, given, output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def hook(name: str):
    return lambda model: model.get_submodule(name).register_forward_hook(double)


def replace_forward(name: str):
    """As accelerate's hooks and many libraries do."""

    def change(model: LlamaForCausalLM) -> None:
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda *args, **kwargs: double(None, None, forward(*args, **kwargs))

    return change


def normed_hook(model: LlamaForCausalLM) -> None:
    """On the base model, whose output reaches lm_head."""

    def double_hidden(module, given, output):
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.model.register_forward_hook(double_hidden)


def backward_hook(model: LlamaForCausalLM) -> None:
    mlp = model.model.layers[0].mlp
    mlp.register_full_backward_hook(lambda module, gin, gout: (3 * gin[0],))


class OtherLayer(LlamaDecoderLayer):
    def forward(self, x, **kwargs):
        return 2 * super().forward(x, **kwargs) + 1


class OtherNorm(LlamaRMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class OtherHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def other_class(name: str, kind: type[nn.Module]):
    return lambda model: setattr(model.get_submodule(name), "__class__", kind)


def setting(name: str, attribute: str, value):
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def one_token(module, given, output):
    """Of (B, S, D) one token is changed, where the schedule's (T, D) would make it a channel."""
    return torch.cat([output[:, :10], 3 * output[:, 10:11], output[:, 11:]], 1)


def other_loss(model: LlamaForCausalLM) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()


def one_layer(model: LlamaForCausalLM) -> None:
    model.config.num_hidden_layers = 1  # Hugging Face runs so many of them


def one_bias(model: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    model.model.layers[0].self_attn.v_proj.bias = nn.Parameter(torch.randn(32))


def zero_attention(model: LlamaForCausalLM) -> None:
    def zero(module, q, k, v, mask, **kwargs):
        return 0 * q.transpose(1, 2), None

    AttentionInterface.register("longctx_test_zero", zero)
    model.set_attn_implementation("longctx_test_zero")


STRANGERS = [
    pytest.param(other_class("model.layers.0", OtherLayer), "does not know", id="layer-class"),
    pytest.param(other_class("model.norm", OtherNorm), "does not know", id="norm-class"),
    pytest.param(other_class("lm_head", OtherHead), "lm_head, a ", id="head-class"),
    pytest.param(setting("model.layers.0.mlp", "act_fn", nn.GELU()), "act_fn", id="activation"),
    pytest.param(hook("model.layers.0.mlp.act_fn"), "act_fn", id="activation-hook"),
    pytest.param(hook("lm_head"), "hooks on lm_head", id="head-hook"),
    pytest.param(
        lambda model: model.model.layers[0].register_forward_hook(one_token),
        "hooks on model.layers.0",
        id="layer-hook",
    ),
    pytest.param(
        lambda model: model.model.norm.register_forward_hook(partial(one_token)),
        "hooks on model.norm",
        id="final-norm-hook",
    ),
    pytest.param(
        setting("model.layers.1.input_layernorm", "variance_epsilon", 9.0), "epsilon", id="epsilon"
    ),
    pytest.param(setting("model.layers.0.self_attn", "scaling", 1.0), "scale", id="scale"),
    pytest.param(one_layer, "2 layers where the configuration has 1", id="fewer-layers"),
    pytest.param(zero_attention, "longctx_test_zero", id="attention"),
    pytest.param(one_bias, "biases on some of q, k, v", id="one-bias"),
    pytest.param(other_loss, "a loss of its own", id="loss"),
    pytest.param(adapt("model.layers.1.self_attn.q_proj"), "does not know", id="q_proj"),
    pytest.param(adapt("model.layers.0.self_attn.o_proj"), "does not know", id="o_proj"),
    pytest.param(adapt("model.layers.0.mlp.down_proj"), "does not know", id="down_proj"),
    pytest.param(hook("model.layers.1.mlp"), "hooks on model.layers.1.mlp", id="mlp-hook"),
    pytest.param(hook("model.layers.0.input_layernorm"), "hooks on", id="norm-hook"),
    pytest.param(hook("model.layers.0.self_attn"), "hooks on", id="attention-hook"),
    pytest.param(hook("model.rotary_emb"), "hooks on model.rotary_emb", id="rotary-hook"),
    pytest.param(normed_hook, "hooks on model", id="base-model-hook"),
    pytest.param(backward_hook, "hooks on model.layers.0.mlp", id="backward-hook"),
    pytest.param(replace_forward("model.layers.0.mlp.up_proj"), "up_proj", id="forward"),
    pytest.param(replace_forward("model.layers.0"), "does not know", id="layer"),
    pytest.param(replace_forward("model.norm"), "does not know", id="final-norm"),
    pytest.param(adapt("lm_head"), "lm_head, a ", id="lm_head"),
]


@pytest.mark.parametrize(("change", "says"), STRANGERS)
def test_a_stranger_runs_and_is_said_once(change, says: str, capsys) -> None:
    """Loss and gradients are vanilla's with the same change, and not those without it."""
    vanilla, ours = models()
    plain_loss = vanilla(**packed_batch()).loss
    for model in (vanilla, ours):
        change(model)
    losses = []
    for _ in range(2):
        for model in (vanilla, ours):
            model.zero_grad()
            loss = model(**packed_batch()).loss
            loss.backward()
            losses.append(loss.item())
    assert losses[0] != pytest.approx(plain_loss.item(), rel=1e-4) or change is backward_hook
    assert losses[1] == losses[3] == pytest.approx(losses[0], rel=1e-6)
    for (name, p), q in zip(ours.named_parameters(), vanilla.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name
    out = capsys.readouterr().out
    assert out.count("for calls with") == 1 and says in out


def test_peft_adapters_train_through_the_schedule(capsys) -> None:
    peft = pytest.importorskip("peft")
    losses, gradients = [], []
    for model in models():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        loss = adapted(**packed_batch()).loss
        loss.backward()
        losses.append(loss.item())
        grads = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        gradients.append(grads)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 7 * 2
    for name, truth in gradients[0].items():
        assert (gradients[1][name] - truth).norm() <= 1e-5 * truth.norm(), name
    assert "custom: " not in capsys.readouterr().out


def family_model(kind: str, **changes: Any) -> Any:
    small = dict(hidden_size=32, intermediate_size=48, head_dim=8, num_attention_heads=4)
    small["vocab_size"] = 331
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family_config(kind, **small | changes)).train()


CAUSAL = [kind for kind in FAMILIES if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def family_strangers(model: Any, spec: Layer) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """(owner, name of an attribute, a value that is a stranger, what the line says), of the
    last layer"""
    owners = {"model": model.model}
    layer = model.model.layers[-1]
    for path in spec.children:
        owners[f"model.layers.2.{path}".rstrip(".")] = part_of(layer, path) if path else layer
    for where, owner in owners.items():
        yield owner, "extra", nn.LayerNorm(8), f"{where}.extra, which"
        yield owner, "factor", nn.Parameter(torch.ones(3)), f"{where}.factor, which"
        yield owner, "embedding_dropout", 0.1, f"embedding dropout in {where}"
    for path in spec.in_layer:
        owner, name = part_of(layer, path), path.rpartition(".")[2]
        yield owner, "forward", owner.forward, f"{path}, a "
        parent = part_of(layer, path.rpartition(".")[0]) if "." in path else layer
        yield parent, name, nn.Hardtanh(), f"{path}, a "
    if (mixer := spec.part(MixerSpec)) is not None:
        yield layer, mixer.path, nn.Hardtanh(), f"{mixer.path}, a "
    if (attends := spec.part(AttentionSpec)) is not None:
        attention = part_of(layer, attends.path)
        where = f"model.layers.2.{attends.path}"
        yield attention, "attention_dropout", 0.1, f"attention dropout in {where}"
        for name in ("scaling", "head_dim", "num_key_value_groups"):
            yield attention, name, getattr(attention, name) + 1, "in model.layers.2"
        yield attention, "is_causal", False, "attention to later tokens in model.layers.2"
    for path in spec.norms.values():
        yield part_of(layer, path), spec.family.norm.epsilon, 0.5, "epsilon"
    for path, factor in spec.factors.items():
        path, _, name = path.rpartition(".")
        yield part_of(layer, path) if path else layer, name, factor + 1, f"{name} {factor + 1:g}, "


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_stranger_of_any_family_is_found(kind: str) -> None:
    model = family_model(kind)
    spec = layer_specs(model.config)[2]
    patch_as(model, PatchOptions(), CPU)
    assert why_not_scheduled(model.model) is None
    for owner, name, value, says in family_strangers(model, spec):
        had = hasattr(owner, name) and name != "forward"
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        assert says in str(why_not_scheduled(model.model)), (name, says)
        setattr(owner, name, before) if had else delattr(owner, name)
    for path in spec.in_layer:
        handle = part_of(model.model.layers[-1], path).register_forward_hook(double)
        assert why_not_scheduled(model.model) == f"hooks on model.layers.2.{path}"
        handle.remove()
    assert why_not_scheduled(model.model) is None


SEEN = {
    *("attention_dropout", "embedding_dropout", "residual_dropout"),  # _dropouts
    *(
        "config",
        "scaling",
        "attn_logit_softcapping",
        "head_dim",
        "is_sliding",
        "sliding_window",
        "use_rope",
        "block_type",
        "is_attention_layer",
    ),
    *("residual_multiplier", "embedding_multiplier", "logit_scale", "vocab_size"),
    *("attention_in_multiplier", "attn_out_multiplier", "ssm_out_multiplier"),  # _other_factors
    *("key_multiplier", "gate_multiplier", "down_multiplier"),
    *("variance_epsilon", "eps", "weight", "bias", "inv_freq", "attention_scaling"),
    *("model", "lm_head", "loss_function", "layers", "norm", "embed_tokens", "rotary_emb"),
}
"""Attributes that strangers.py compares, or that the schedule itself reads."""
ELSEWHERE = {
    *("training", "layer_idx"),
    *("has_experts", "block_sparse_moe", "shared_mlp"),  # Granite's, which _undeclared finds
    "input_size",  # the last dimension of what Granite's experts read
    "has_sliding_layers",  # which masks are made, not which a layer gets
    "num_key_value_heads",  # Phi3's, beside num_key_value_groups
    "normalized_shape",  # compared as the weight's shape
    *("use_qk_norm", "q_norm", "k_norm"),  # Cohere's, which _undeclared finds
    *("num_experts", "num_experts_per_tok", "router_aux_loss_coef"),  # of the auxiliary loss
    *("num_local_experts", "top_k", "hidden_dim", "norm_topk_prob", "jitter_noise"),  # routers'
    *("num_group", "topk_group", "routed_scaling_factor", "norm_min"),  # routers', too
    "_norm",  # Gemma's norm, a method
    "_apply_gate",  # GPT-OSS's experts, a method, whose numbers ExpertsSpec.differs compares
    "_deepstack_process",  # Qwen3-VL's images
    "linear_attn",  # of a hybrid's other layers, which _undeclared finds in these
    "recomposition_frequencies",  # of three equal rows of positions nothing is left
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_forwards_read_no_attribute_that_nobody_looks_at(kind: str) -> None:
    """Of these versions of transformers: a family's next setting is found when they are raised."""
    config = family_config(kind) if kind in CAUSAL else AutoConfig.for_model(kind)
    family, every = FAMILIES[kind], layer_specs(config)
    names = (names for spec in every for names in spec.children.values())
    modules = {name for spec in every for part in spec.parts for name in part.modules.values()}
    known = (SEEN | ELSEWHERE | {family.embedding, family.last_norm}).union(*names)
    parts = ("Model", "DecoderLayer", family.rotary, "ForCausalLM", *sorted(modules))
    for path in [name for part in parts for name in family.known(part)] + [*family.norm_classes]:
        module, _, name = path.rpartition(".")
        owner = getattr(import_module(module), name, None)  # VL text models have no causal class
        if owner is None:
            continue
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(owner.forward))))
        nodes = [node for node in ast.walk(code) if isinstance(node, ast.Attribute)]
        read = {x.attr for x in nodes if isinstance(x.value, ast.Name) and x.value.id == "self"}
        assert read <= known, f"{path}: {sorted(read - known)}"


def test_coheres_norms_of_q_and_k_run_hugging_faces_layers(scheduled, capsys) -> None:
    losses = []
    for patched in (False, True):
        model = family_model("cohere", use_qk_norm=True)
        if patched:
            patch_as(model, PatchOptions(), CPU)
        losses.append(model(**packed_batch()).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and not scheduled
    assert "model.layers.0.self_attn.q_norm, which" in capsys.readouterr().out


def test_a_factor_of_what_biased_projections_read_is_a_stranger() -> None:
    """It becomes one of scores and of attention's output, which a bias would not have."""
    said = []
    for attention_bias in (False, True):
        how = dict(mamba_d_ssm=96, attention_bias=attention_bias)
        model = family_model("falcon_h1", **how, attention_in_multiplier=1.5)
        patch_as(model, PatchOptions(), CPU)
        said.append(why_not_scheduled(model.model))
    where = "where the schedule has 1, in model.layers.0"
    assert said == [None, f"attention_in_multiplier 1.5, {where}"]


def test_a_scale_of_logits_that_was_changed_on_the_model() -> None:
    losses = []
    for patched in (False, True):
        model = family_model("cohere2")
        if patched:
            patch_as(model, PatchOptions(), CPU)
        model.logit_scale = 7.0
        losses.append(model(**packed_batch()).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_label_smoothing_is_not_dropped_with_an_adapted_head() -> None:
    _, ours = models()
    adapt("lm_head")(ours)
    ours.longctx.surround(label_smoothing=0.1)
    with pytest.raises(UserError, match="--label_smoothing_factor is impossible with lm_head"):
        ours(**packed_batch())


def test_without_strangers_the_schedule_runs_in_silence(capsys, monkeypatch) -> None:
    _, ours = models()
    for layer in ours.model.layers:
        monkeypatch.setattr(layer.self_attn, "q_proj", layer.self_attn.q_proj)  # no new module
    ours(**packed_batch()).loss.backward()
    assert "custom: " not in capsys.readouterr().out
    handle = ours.model.layers[0].mlp.register_forward_hook(double)
    assert why_not_scheduled(ours.model) == "hooks on model.layers.0.mlp"
    handle.remove()
    assert why_not_scheduled(ours.model) is None


def test_an_engines_own_hooks_are_no_strangers() -> None:
    """ZeRO-3 hooks every module, to gather its weights."""
    _, ours = models()

    def gather(module, given):
        return None

    ours.model.register_forward_pre_hook(gather)
    assert why_not_scheduled(ours.model) == "hooks on model"
    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    assert why_not_scheduled(ours.model) is None


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [(LlamaMLP, "forward", "model.layers.0.mlp"), (LlamaRMSNorm, "forward", "model.norm")],
)
def test_a_class_that_is_changed_for_the_whole_process(owner, name, says, monkeypatch) -> None:
    _, ours = models()
    forward = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, x: 2 * forward(self, x))
    assert says in str(why_not_scheduled(ours.model))


def test_hooks_on_all_modules() -> None:
    _, ours = models()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert why_not_scheduled(ours.model) == "hooks on all modules"
    finally:
        handle.remove()
    assert why_not_scheduled(ours.model) is None


@pytest.mark.parametrize("before", [other_class("model.layers.0", OtherLayer), adapt("lm_head")])
def test_what_was_changed_before_patching_is_not_lost(before) -> None:
    losses = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config())
        before(model)
        if patched:
            patch_as(model, PatchOptions(), CPU)
        losses.append(model.train()(**packed_batch()).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_forward_that_would_be_lost_is_refused() -> None:
    model = LlamaForCausalLM(tiny_config())
    model.forward = model.forward
    with pytest.raises(UserError, match="has exchanged the forward .* patch before you build"):
        patch_as(model, PatchOptions(), CPU)


def test_the_schedule_runs_again_after_hidden_states_were_asked_for() -> None:
    """transformers leaves its hooks installed."""
    _, ours = models()
    assert ours.eval()(**packed_batch(), output_hidden_states=True).hidden_states
    assert why_not_scheduled(ours.model) is None


@pytest.mark.parametrize("configured", [False, True])
def test_an_auxiliary_loss_of_routers_is_not_lost(configured, capsys) -> None:
    """Hugging Face's forward adds it, so it runs, whatever asks for it; also where it would add
    nothing. A call may say no."""
    _, ours = models()
    ours.config.output_router_logits = configured
    more = {} if configured else {"output_router_logits": True}
    ours(**packed_batch(), **more).loss.backward()
    out = capsys.readouterr().out
    assert out.count("for calls with output_router_logits") == 2  # the layers and the loss
    assert not asks_for_router_logits(ours.config, {"output_router_logits": False})
    ours.longctx.surround(strict=True)
    with pytest.raises(UserError, match=r"output_router_logits.*\(strict=True\)"):
        ours(**packed_batch(), **more)


def test_a_base_models_output_has_the_class_that_its_own_forward_returns() -> None:
    class Mixture:
        def forward(self):
            pass

    Mixture.forward.__annotations__["return"] = tuple | MoeModelOutputWithPast
    assert output_class(Mixture) is MoeModelOutputWithPast
    for family in FAMILIES.values():
        home = import_module(family.home)
        kind = getattr(home, family.known("Model")[0].rpartition(".")[2])
        is_mixture = family.balances or family.output == "MoeModelOutputWithPast"
        # GLM's routers have no auxiliary loss, and some of Nemotron-H's models have experts.
        is_mixture = is_mixture or family.kind in ("glm4_moe", "nemotron_h")
        mixture = MoeModelOutputWithPast if is_mixture else BaseModelOutputWithPast
        assert output_class(kind) is mixture
    assert (
        type(models()[1].model(packed_batch()["input_ids"], use_cache=False))
        is BaseModelOutputWithPast
    )


@pytest.mark.parametrize("name", ["", "layers.1", "layers.1.self_attn", "layers.0.mlp"])
def test_a_buffer_of_a_modules_own_is_a_stranger(name) -> None:
    """The bias by which GLM-4's router chooses is one: no gradient reaches it."""
    ours = models()[1].model
    assert why_not_scheduled(ours) is None
    ours.get_submodule(name).register_buffer("e_score_correction_bias", torch.zeros(4))
    where = f"model.{name}".rstrip(".")
    said = f"{where}.e_score_correction_bias, which the schedule does not know"
    assert why_not_scheduled(ours) == said


def test_without_use_cache_the_fallback_still_sees_documents() -> None:
    vanilla, ours = models()
    ours.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    batch = {name: value for name, value in packed_batch().items() if name != "use_cache"}
    expected = vanilla(**batch, use_cache=False).loss
    assert ours(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_patched_model_can_be_pickled() -> None:
    _, ours = models()
    assert pickle.dumps(ours)


def test_long_trainer_takes_adapters(tmp_path, capsys) -> None:
    peft = pytest.importorskip("peft")
    _, ours = models()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    row = {name: value[0] for name, value in packed_batch(rows=1).items() if name != "use_cache"}
    args = TrainArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=1, disable_tqdm=True)
    trainer = LongTrainer(
        model=peft.get_peft_model(ours, config),
        args=args,
        seq_len=48,
        train_dataset=[row] * 2,
        data_collator=default_collate,
    )
    trainer.train()
    assert "Hugging Face's layers" not in capsys.readouterr().out
    assert ours.longctx.adopted.tokens == 48


def test_a_layer_of_a_familys_other_class_is_a_stranger() -> None:
    model = family_model("olmo_hybrid")
    patch_as(model, PatchOptions(), CPU)
    assert why_not_scheduled(model.model) is None
    kinds = {type(layer): layer for layer in model.model.layers}
    assert len(kinds) == 2
    (one, layer), (other, _) = kinds.items()
    layer.__class__ = other
    where = f"model.layers.{[*model.model.layers].index(layer)}"
    said = str(why_not_scheduled(model.model))
    assert said.startswith(f"{where}, a ") and other.__name__ in said
    layer.__class__ = one
    assert why_not_scheduled(model.model) is None
