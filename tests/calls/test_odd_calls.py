"""Calls and models that are almost like the others: Hugging Face's numbers, or its error, or one
clear line. What would be passed by in silence is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import family_config
from small_model import ROPE, packed_batch, tiny_config
from test_door import assert_same, pair, row
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import longctx
from longctx.errors import UserError
from longctx.families.strangers import why_not_scheduled
from longctx.layer.parts import norms

pytestmark = pytest.mark.usefixtures("reference_kernels")
IDS = packed_batch()["input_ids"]


def patched_pair(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    vanilla = make().train()
    with torch.no_grad():
        for parameter in vanilla.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return vanilla, longctx.patch(copy.deepcopy(vanilla))


# --- models ----------------------------------------------------------------------------------


class TwiceTheLoss(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = 2 * output.loss
        return output


def test_a_forward_of_a_subclass_is_not_lost(scheduled, capsys) -> None:
    vanilla, ours = patched_pair(lambda: TwiceTheLoss(tiny_config()))
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96]
    assert "TwiceTheLoss, a model with a forward of its own" in capsys.readouterr().out


def test_strict_refuses_all_logits() -> None:
    _, ours = pair()
    ours.longctx.surround(strict=True)
    ours.lm_head.register_forward_hook(lambda *args: None)
    with pytest.raises(UserError, match=r"all logits .* hooks on lm_head \(strict=True\)"):
        ours(**packed_batch())
    with torch.no_grad():
        ours(**packed_batch())


@pytest.mark.parametrize("where", ["a module", "the configuration"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_attention_to_later_tokens(scheduled, capsys, family, where) -> None:
    """As text encoders made of decoders have it."""
    vanilla, ours = patched_pair(lambda: AutoModelForCausalLM.from_config(family_config(family)))
    for model in (vanilla, ours):
        for part in model.model.layers if where == "a module" else ():
            part.self_attn.is_causal = False
        if where != "a module":
            model.config.is_causal = False
    ids = IDS % 211
    assert_same(vanilla, ours, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)
    assert scheduled == [] and "attention to later tokens" in capsys.readouterr().out


def wide_norms(model: Any) -> None:
    for name, module in model.named_modules():
        if "norm" in name:
            module.float()


def wide_final_norm(model: Any) -> None:
    model.model.norm.float()


def wide_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.float()


@pytest.mark.parametrize("widen", [wide_norms, wide_final_norm, wide_layer])
def test_weights_of_two_dtypes_in_autocast(scheduled, capsys, widen) -> None:
    """Norms in fp32 over a model in bf16, as adapters' preparations leave them."""
    losses = []
    for model in pair():
        widen(model.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**packed_batch()).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-9, atol=0)
    assert scheduled == [] and "weights in torch.float32 in model." in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_of_another_dtype_in_autocast(scheduled, capsys, dtype) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    embeds, losses = torch.randn(2, 48, 64).to(other), []
    for model in pair():
        with torch.autocast("cpu", torch.bfloat16):
            output = model.to(dtype)(inputs_embeds=embeds, labels=IDS, use_cache=False)
        losses.append(output.loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-9, atol=0)
    assert scheduled == [] and f"inputs_embeds in {other} over" in capsys.readouterr().out


def test_a_loss_type_of_another_kind(scheduled, capsys) -> None:
    vanilla, ours = pair()
    for model in (vanilla, ours):
        model.loss_type = "ForMaskedLM"  # labels are not shifted
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96] and "a loss of its own" in capsys.readouterr().out


def test_a_head_without_a_weight(scheduled, capsys) -> None:
    vanilla, ours = pair()
    for model in (vanilla, ours):
        model.lm_head = nn.Sequential(model.lm_head)
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96] and "lm_head, a torch.nn" in capsys.readouterr().out


def test_parametrized_weights_are_trained_by_the_schedule(scheduled) -> None:
    class Longer(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 1.5 * weight

    vanilla, ours = pair()
    for model in (vanilla, ours):
        for module in (model.model.layers[0].mlp.gate_proj, model.lm_head):
            nn.utils.parametrize.register_parametrization(module, "weight", Longer())
    assert_same(vanilla, ours, lambda m: m(**packed_batch()).loss)
    assert scheduled == [96, 96]


class Noise(nn.Module):
    """Draws another weight at each reading."""

    readings = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.readings += 1
        generator = torch.Generator().manual_seed(self.readings)
        return weight + 0.05 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(
    "where",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_parametrized_weight_is_computed_once_a_step(scheduled, where) -> None:
    def make() -> Any:
        model = AutoModelForCausalLM.from_config(family_config("qwen2"))
        path, _, name = where.rpartition(".")
        nn.utils.parametrize.register_parametrization(model.get_submodule(path), name, Noise())
        return model.train()

    models = patched_pair(make)
    ids = IDS % 211
    for _ in range(2):
        assert_same(*models, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)
    assert scheduled
    counts = [[x.readings for x in m.modules() if isinstance(x, Noise)] for m in models]
    assert counts[0] == counts[1] == [1 + 2]  # it is computed when it is registered


@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp.up_proj"])
def test_spectral_norm_takes_the_same_steps(scheduled, where) -> None:
    models = pair()
    for model in models:
        torch.manual_seed(3)
        nn.utils.parametrizations.spectral_norm(model.get_submodule(where))
    for _ in range(3):
        assert_same(*models, lambda m: m(**packed_batch()).loss)
    vectors = [m.get_submodule(where).parametrizations.weight[0]._u for m in models]
    torch.testing.assert_close(*vectors)
    assert scheduled


def test_hooks_of_trls_offloading_on_lm_head_are_no_strangers(scheduled, capsys) -> None:
    """They keep what lm_head saves on the GPU."""
    _, ours = pair()

    def leave(*args: Any) -> None:
        return None

    leave.__module__ = "trl.models.activation_offloading"
    ours.lm_head.register_forward_pre_hook(leave)
    ours.lm_head.register_forward_hook(leave, always_call=True)
    ours(**packed_batch()).loss.backward()
    assert scheduled == [96, 96] and "custom: " not in capsys.readouterr().out


def test_an_engines_hooks_on_the_base_model_cost_no_unit(monkeypatch) -> None:
    """The loss's gradient is overwritten, unless somebody may look at the hidden states."""
    owned: list[bool] = []
    norm = norms._FinalNorm.apply
    monkeypatch.setattr(norms._FinalNorm, "apply", lambda *a: owned.append(a[4]) or norm(*a))
    _, ours = pair()

    def gather(*args: Any) -> None:
        return None

    handle = ours.model.register_forward_hook(gather)
    for home in ("deepspeed.runtime.zero.parameter_offload", "users"):
        gather.__module__ = home
        ours(**packed_batch())
    handle.remove()
    assert owned == [True]  # with a user's hook, Hugging Face's layers ran


# --- calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 53])
def test_a_mask_of_another_length(scheduled, capsys, width) -> None:
    """Hugging Face's takes what is missing or too much as padding."""
    vanilla, ours = pair()
    mask = torch.ones(2, 48).long()
    mask = mask[:, :width] if width < 48 else nn.functional.pad(mask, (0, width - 48))
    batch = dict(input_ids=IDS, labels=IDS, attention_mask=mask, use_cache=False)
    assert_same(vanilla, ours, lambda m: m(**batch).loss)
    assert scheduled == [] and "another shape" in capsys.readouterr().out


def test_a_dense_mask(scheduled, capsys) -> None:
    vanilla, ours = pair()
    mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)
    batch = dict(input_ids=IDS, labels=IDS, attention_mask=mask, use_cache=False)
    assert_same(vanilla, ours, lambda m: m(**batch).loss)
    assert scheduled == [] and "another shape" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [
        dict(token_type_ids=IDS),
        dict(logits_to_keep=5),
        dict(cache_position=torch.arange(48)),
        dict(temperature=0.5, images=None),
        dict(is_causal=True),
        dict(is_causal=None),
        dict(output_attentions=False, output_hidden_states=None, return_dict=True),
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_what_hugging_faces_base_model_ignores(scheduled, capsys, family, more) -> None:
    """As TRL's DistillationTrainer calls it, or with the neutral value."""
    vanilla, ours = patched_pair(lambda: AutoModelForCausalLM.from_config(family_config(family)))
    batch = dict(input_ids=IDS % 211, use_cache=False, **more)
    assert_same(vanilla, ours, lambda m: m.model(**batch).last_hidden_state.square().mean())
    assert len(scheduled) == 3 and "custom: " not in capsys.readouterr().out


def test_what_some_attention_of_hugging_faces_reads(scheduled, capsys) -> None:
    """Its layers run, and raise what they raise."""
    models = pair()
    for model in models:
        with pytest.raises(TypeError, match="multiple values for .*dropout"):
            model(**packed_batch(), dropout=0.5)
    assert scheduled == [] and "calls with dropout" in capsys.readouterr().out
    assert_same(*models, lambda m: m(**packed_batch(), softcap=None).loss)


@pytest.mark.parametrize("whole", [True, False], ids=["with labels", "the base model"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_attention_to_later_tokens_as_an_argument(scheduled, capsys, family, whole) -> None:
    vanilla, ours = patched_pair(lambda: AutoModelForCausalLM.from_config(family_config(family)))
    batch = dict(input_ids=IDS % 211, use_cache=False, is_causal=False)

    def loss(model: Any) -> Tensor:
        if whole:
            return model(**batch, labels=IDS % 211).loss
        return model.model(**batch).last_hidden_state.square().mean()

    assert_same(vanilla, ours, loss)
    assert scheduled == []
    assert "attention to later tokens (is_causal=False)" in capsys.readouterr().out


def test_logits_of_padding_beside_labels_are_said_where_they_are_read(scheduled, capsys) -> None:
    """Once; not where they are not read, or where nothing is padded."""
    _, ours = pair()
    mask = torch.ones_like(IDS)

    def said(mask: Tensor) -> int:
        labels = IDS.masked_fill(mask == 0, -100)
        output = ours(input_ids=IDS, attention_mask=mask, use_cache=False, labels=labels)
        assert "zero" not in capsys.readouterr().out
        output.logits.sum()
        return capsys.readouterr().out.count("its hidden states are zero")

    assert said(mask) == 0
    mask[1, 40:] = 0
    assert [said(mask), said(mask)] == [1, 0] and scheduled


NO_TRACE = "longctx.unpatch(model) first"


@pytest.mark.parametrize("part", ["whole", "base"])
@pytest.mark.parametrize("how", ["grad", "vjp", "jvp", "jacrev", "vmap", "export", "trace"])
def test_what_transforms_the_model_is_one_line(how, part) -> None:
    _, ours = pair()
    model = ours if part == "whole" else ours.model
    weights = dict(model.named_parameters())

    def loss(given: Any) -> Tensor:
        output = torch.func.functional_call(model, given, (), dict(input_ids=IDS, use_cache=False))
        return output[0].square().mean()

    with pytest.raises(UserError, match="unpatch") as error:
        if how == "export":
            torch.export.export(model, (IDS,), dict(use_cache=False), strict=False)
        elif how == "trace":
            torch.jit.trace(lambda ids: model(input_ids=ids, use_cache=False)[0], (IDS,))
        elif how == "jvp":
            torch.func.jvp(loss, (weights,), (weights,))
        elif how == "vjp":
            torch.func.vjp(loss, weights)
        elif how == "vmap":
            torch.func.vmap(lambda ids: model(input_ids=ids[None], use_cache=False)[0])(IDS)
        else:
            getattr(torch.func, how)(loss)(weights)
    assert "\n" not in str(error.value) and NO_TRACE in str(error.value)


@pytest.mark.parametrize("how", ["fullgraph", "export"])
def test_what_torch_compiles_whole_names_unpatch(how) -> None:
    """torch's own error, with our line in it."""
    _, ours = pair()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="unpatch"):
        if how == "export":
            torch.export.export(ours, (IDS,), strict=True)
        else:
            torch.compile(ours, backend="eager", fullgraph=True)(input_ids=IDS, labels=IDS)


def test_functional_call_runs_the_schedule(scheduled) -> None:
    vanilla, ours = pair()

    def loss(model: Any) -> Tensor:
        weights = {name: 1.5 * p for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (), packed_batch()).loss

    assert_same(vanilla, ours, loss)
    assert scheduled == [96, 96]


def test_autocast_to_the_other_16_bits(scheduled, capsys) -> None:
    losses = []
    for model in pair():
        with torch.autocast("cpu", torch.float16):
            losses.append(model.bfloat16()(**packed_batch()).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-9, atol=0)
    assert scheduled == [] and "in autocast to torch.float16" in capsys.readouterr().out


def test_the_base_model_in_evaluation(scheduled, capsys) -> None:
    """With gradients. Hugging Face makes a cache, which is said."""
    vanilla, ours = (model.eval() for model in pair())

    def loss(model: Any, **more: Any) -> Tensor:
        return model.model(input_ids=IDS, **more).last_hidden_state.square().mean()

    assert_same(vanilla, ours, loss)
    assert scheduled == [] and "a key/value cache" in capsys.readouterr().out
    assert_same(vanilla, ours, lambda m: loss(m, use_cache=False))
    assert scheduled == [96, 96]


def test_labels_make_no_cache() -> None:
    _, ours = pair()
    assert ours.eval()(input_ids=IDS, labels=IDS).past_key_values is None


def test_logits_to_keep_with_labels(scheduled) -> None:
    vanilla, ours = pair()
    batch = dict(input_ids=IDS, labels=IDS[:, -5:], use_cache=False, logits_to_keep=5)
    assert_same(vanilla, ours, lambda m: m(**batch).loss)
    assert scheduled == [96, 96] and ours(**batch).logits.shape == (2, 5, 331)


def test_a_label_outside_the_vocabulary() -> None:
    _, ours = pair()
    with pytest.raises(ValueError, match=r"labels must be in \[0, 331\)"):
        ours(input_ids=IDS, labels=IDS.masked_fill(IDS == IDS[0, 5], 331))


def test_masks_by_kind_of_layer(scheduled, capsys) -> None:
    """As generation prepares them."""
    vanilla, ours = patched_pair(lambda: AutoModelForCausalLM.from_config(family_config("qwen2")))
    ids = IDS % 211
    batch = dict(input_ids=ids, labels=ids, attention_mask={"full_attention": None})
    assert_same(vanilla, ours, lambda m: m(**batch, use_cache=False).loss)
    assert scheduled == [] and "another shape" in capsys.readouterr().out


@pytest.mark.parametrize("bounds", [[0, 20, 40], [5, 53], [0, 30, 20, 48], [0], []])
def test_bounds_that_are_not_the_batchs(bounds) -> None:
    _, ours = pair()
    with pytest.raises(ValueError, match="must rise from 0 to the 48 tokens of the batch, got"):
        ours(**row(cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32)))


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_padding_counts_for_rope_that_follows_the_length(scheduled, family) -> None:
    """Padded from 60 to 72 tokens; frequencies change at 64."""
    config = tiny_config(rope_parameters=ROPE["dynamic"], max_position_embeddings=64)
    if family != "llama-dynamic":
        config = family_config(family)
    vanilla, ours = patched_pair(lambda: AutoModelForCausalLM.from_config(config))
    ids = torch.randint(211, (2, 72), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[:, 60:] = 0
    batch = dict(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)
    assert_same(vanilla, ours, lambda m: m(**batch, use_cache=False).loss)
    assert scheduled and set(scheduled) == {120}
    before = ours.model.rotary_emb.inv_freq.clone()
    ours(input_ids=ids[:, :60], labels=ids[:, :60])
    assert not torch.equal(ours.model.rotary_emb.inv_freq, before)  # the test tests something


def test_a_second_backward_is_an_error() -> None:
    _, ours = pair()
    batch = {k: v for k, v in packed_batch().items() if k != "labels"}
    for loss in (ours(**packed_batch()).loss, ours.model(**batch).last_hidden_state.mean()):
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"runs once|ran twice"):
            loss.backward()


def test_second_derivatives_are_an_error() -> None:
    _, ours = pair()
    batch = {k: v for k, v in packed_batch().items() if k != "labels"}
    for loss in (ours(**packed_batch()).loss, ours.model(**batch).last_hidden_state.mean()):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, ours.model.norm.weight, create_graph=True)


@pytest.mark.parametrize("offload", ["none", "all"])
def test_embeddings_that_are_modified_before_backward(offload) -> None:
    """autograd's own check does not know of what the store keeps. A copy on the host is safe."""
    vanilla, _ = pair()
    ours = longctx.patch(copy.deepcopy(vanilla), offload_activations=offload)
    found = []
    for model in (vanilla, ours):
        embeds = model.model.embed_tokens(IDS).detach().requires_grad_()
        given = embeds * 1
        loss = model(inputs_embeds=given, labels=IDS, use_cache=False).loss
        if model is ours:
            with torch.no_grad():
                given.zero_()
        if model is ours and offload == "none":
            with pytest.raises(RuntimeError, match="modified in place"):
                loss.backward()
            return
        loss.backward()
        found.append(embeds.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-8)


def test_without_a_label_the_loss_is_zero() -> None:
    """Hugging Face's is NaN, which would end in every weight."""
    _, ours = pair()
    loss = ours(**{**packed_batch(), "labels": torch.full((2, 48), -100)}).loss
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in ours.parameters())


def test_checkpointing_around_the_model(scheduled) -> None:
    vanilla, ours = pair()

    def loss(model: Any) -> Tensor:
        def run(ids: Tensor) -> Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return torch.utils.checkpoint.checkpoint(run, IDS, use_reentrant=False)

    assert_same(vanilla, ours, loss)
    assert scheduled == 4 * [96]


@pytest.mark.parametrize("how", ["whole", "in place", "layers"])
def test_under_torch_compile_the_schedule_runs(scheduled, capsys, how) -> None:
    vanilla, ours = pair()
    model = ours
    if how == "whole":
        model = torch.compile(ours, backend="eager")
    else:
        for module in [ours] if how == "in place" else ours.model.layers:
            module.compile(backend="eager")
    assert_same(vanilla, ours, lambda m: (model if m is ours else m)(**packed_batch()).loss)
    assert scheduled == [96, 96] and "custom: " not in capsys.readouterr().out


def test_data_parallel_is_one_line() -> None:
    """Trainer takes it where it sees several GPUs and was not launched."""
    _, ours = pair()
    with pytest.raises(UserError, match="accelerate launch"):
        ours.model._replicate_for_data_parallel()
    assert longctx.unpatch(ours).model._replicate_for_data_parallel() is not ours.model


# --- the door --------------------------------------------------------------------------------


def test_unpatching_the_base_model_unpatches_the_whole(scheduled) -> None:
    vanilla, ours = pair()
    longctx.unpatch(ours.model)
    assert torch.equal(ours(**packed_batch()).loss, vanilla(**packed_batch()).loss)
    assert scheduled == []


def test_from_pretrained_takes_strict(tmp_path) -> None:
    pair()[0].save_pretrained(tmp_path)
    model = longctx.AutoLongctxModelForCausalLM.from_pretrained(tmp_path, strict=True, keep="o")
    assert model.longctx.around.strict and model.longctx.args.keep == "o"
    assert why_not_scheduled(model.model) is None
