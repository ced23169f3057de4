"""Weights that bitsandbytes has quantised to NF4, under LoRA adapters: the schedule against PEFT.

Truth is the model with the dequantised weights, in fp64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_families import family_config
from small_layer import (
    LADDER,
    PACKED,
    assert_exact_run,
    assert_no_bit_depends_on_the_ladder,
    batch,
    cast,
    finer,
    gradients,
    run,
)
from test_adapters import lora, many, peak_of_llama_8b_layers
from torch import nn
from transformers import AutoModelForCausalLM

import longctx
from exactness import DEVICE
from longctx.cost.dims import LayerSpec
from longctx.errors import UserError
from longctx.families.strangers import why_not_scheduled
from longctx.layer.linear import stacked
from longctx.layer.specs.attention_spec import AttentionSpec
from longctx.layer.weights import Weights
from longctx.train.options.config import ModelArguments
from longctx.train.start.loading import load_config

peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("reference_kernels")
DEVICE = torch.device(DEVICE)


def quantised(model: Any) -> dict[str, torch.Tensor]:
    """Quantises the decoder layers' linear maps in place; their weights, dequantised."""
    found = {}
    for path, linear in list(model.model.layers.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        dtype = linear.weight.dtype
        made = bnb.nn.Linear4bit(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            compute_dtype=dtype,
            quant_type="nf4",
        )
        weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        made.weight, made.bias = weight, linear.bias
        made = made.to(DEVICE)
        found[path] = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
        parent, _, name = path.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), name, made)
    model.is_loaded_in_4bit = True
    return found


def trio(family: str, dtype: torch.dtype, settings: Any = None, **changes: Any):
    """(truth, naive, ours)"""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    truth = cast(model.to(DEVICE), dtype)
    naive = copy.deepcopy(truth)
    for path, weight in quantised(naive).items():
        truth.model.layers.get_submodule(path).weight.data = weight
    adapted = []
    for base in (truth, naive):
        torch.manual_seed(1)
        made = peft.get_peft_model(base, lora(**changes))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.2)
        adapted.append(made)
    truth, naive = adapted
    ours = longctx.patch(copy.deepcopy(naive), strict=True, **(settings or {}))
    return cast(truth, finer(dtype)), naive, ours


BOTH = ("llama", "phi3")
FP32 = (
    "qwen3-windows",
    "granite-biases",
    "olmo2",
    "cohere2",
    "nemotron-biases",
    "qwen3_5_text-attention",
)
"""Families whose matrices are those of others; rounding in 16 bits is tested with theirs."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in BOTH + FP32]
    + [(family, torch.bfloat16) for family in BOTH],
)
def test_exactness_on_packed_rows(family, dtype) -> None:
    settings = dict(tile_tokens=31, head_groups=2)
    truth, naive, ours = (run(m, *many(dtype)) for m in trio(family, dtype, settings))
    assert_exact_run(ours, naive, truth, dtype)


def test_some_targets() -> None:
    models = trio("llama", torch.float32, target_modules=["q_proj", "down_proj"])
    truth, naive, ours = (run(m, *many(torch.float32)) for m in models)
    assert_exact_run(ours, naive, truth, torch.float32)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_same_bits_as_dense_weights(family) -> None:
    """Dequantised once a pass, exactly as bitsandbytes does."""
    truth, _, ours = trio(family, torch.bfloat16)
    dense = copy.deepcopy(ours)
    for path, module in list(dense.get_base_model().model.layers.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            weight = truth.get_base_model().model.layers.get_submodule(path).weight
            linear.weight = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)
            linear.bias = module.bias
            parent, _, name = path.rpartition(".")
            setattr(dense.get_base_model().model.layers.get_submodule(parent), name, linear)
    loss, grads = gradients(ours, batch(PACKED))
    dense_loss, dense_grads = gradients(dense, batch(PACKED))
    assert torch.equal(loss, dense_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, dense_grads[name.replace("longctx.", "")]), name


def test_no_bit_depends_on_what_is_kept_and_where() -> None:
    *_, ours = trio("llama", torch.bfloat16, LADDER | dict(head_groups=2))
    ours.get_base_model().longctx.surround(strict=False)
    assert_no_bit_depends_on_the_ladder(ours.get_base_model(), mixed=0, turn=2)


def test_norms_train_beside() -> None:
    models = trio("qwen3", torch.float32)
    for model in models:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.requires_grad_(True)
    truth, naive, ours = (run(m, *many(torch.float32)) for m in models)
    assert_exact_run(ours, naive, truth, torch.float32)


def test_no_evaluation_lays_out_the_weights_anew() -> None:
    """bitsandbytes does so in place on processors with AVX512-BF16, with scales of 8 bits fewer."""
    _, naive, ours = trio("llama", torch.float32)
    for module in naive.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    late = longctx.patch(copy.deepcopy(naive), strict=True)
    loss, grads = gradients(ours, batch(PACKED))
    with torch.no_grad():
        late.eval()(torch.arange(3, 23, device=DEVICE)[None], use_cache=True)
    again = gradients(late.train(), batch(PACKED))
    assert torch.equal(again[0], loss)
    assert all(torch.equal(again[1][name], grad) for name, grad in grads.items())
    weight = late.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight
    weight.quant_state.packing_format_for_cpu = True
    why = why_not_scheduled(late.get_base_model().model)
    assert "a weight that bitsandbytes has laid out for this processor" in str(why)


def test_products_in_another_dtype_are_left_to_hugging_face() -> None:
    *_, ours = trio("llama", torch.bfloat16)
    base = ours.get_base_model().model
    assert why_not_scheduled(base) is None
    base.layers[1].mlp.up_proj.base_layer.compute_dtype = torch.float16
    assert "products in torch.float16" in str(why_not_scheduled(base))
    with pytest.raises(UserError, match="Hugging Face's layers run"):
        ours(**batch(PACKED))


@pytest.mark.gpu
def test_llama_8b_dimensions_in_bf16() -> None:
    """Two layers of Llama-3.1-8B, 8192 tokens, r = 16 on all seven projections over NF4: every
    gradient at most 1.1 times PEFT's error."""
    big = load_config(ModelArguments(preset="llama-3.1-8b", seq_len=8192), vocab_size=1)
    big.num_hidden_layers = 2
    torch.manual_seed(0)
    with torch.device("cuda"):
        truth = AutoModelForCausalLM.from_config(big, dtype=torch.bfloat16).train()
    naive = copy.deepcopy(truth)
    for path, weight in quantised(naive).items():
        truth.model.layers.get_submodule(path).weight.data = weight
    models = []
    for base in (truth, naive):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(base, lora(r=16, lora_alpha=32)))
        with torch.no_grad():
            for name, parameter in models[-1].named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.2)
    truth, naive = models
    ours = longctx.patch(copy.deepcopy(naive), strict=True, offload_activations="all")
    inputs = batch([[5000, 3192]])
    found = [run(m, inputs) for m in (ours, naive, cast(truth, torch.float32))]
    assert_exact_run(*found, torch.bfloat16)


@pytest.mark.gpu
def test_the_peak_of_llama_8b_layers_on_a_gpu() -> None:
    """Two layers at 32768 tokens: that of adapters over bf16, and one layer's dense weights, 0.41
    GiB, in the place of the fp32 sums of weight gradients."""
    peak_gib = peak_of_llama_8b_layers(quantised)
    assert peak_gib < 2.2, f"{peak_gib:.2f} GiB"


def test_weights_of_one_matmul_are_made_dense_one_under_the_other() -> None:
    """So that q, k and v need no copy; a weight in 16 bits stays where it is."""
    _, naive, _ = trio("llama", torch.bfloat16)
    layer = naive.get_base_model().model.layers[0]
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
    given = {name: layer.get_submodule(path).base_layer.weight for name, path in names.items()}
    sizes = dict(hidden=4, heads=1, kv_heads=1, head_dim=4)
    spec = AttentionSpec(**sizes, scale=0.5, linears=dict.fromkeys("qkv", ""))
    layer = LayerSpec(parts=(spec,))
    made = Weights.of(given, layer, {}, torch.bfloat16)
    weights = [made[name].weight for name in names]
    assert stacked(weights).data_ptr() == weights[0].data_ptr()
    for weight, packed in zip(weights, given.values(), strict=True):
        expected = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
        assert torch.equal(weight, expected)
    mixed = Weights.of(given | {"k": given["k"].new_zeros(4, 4)}, layer, {}, torch.bfloat16)
    assert mixed["q"].weight.untyped_storage().nbytes() == mixed["q"].weight.nbytes
