"""Experts in 4 bits, under adapters: the schedule over NF4 stacks against the values of the 4 bits,
how they are read from files, what is counted, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_families import EXPERTS, family_config
from small_layer import PACKED, batch, gradients
from small_run import prepare, run
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config

import longctx
from exactness import DEVICE, relative_error
from longctx.calls.positions import keep_documents_apart
from longctx.errors import UserError
from longctx.families.blocks import state_blocks
from longctx.families.families import layers_of
from longctx.families.stand_ins import shaped_experts
from longctx.layer.packed_weights import dense, packed_state
from longctx.loop.metrics import parameters_in_matmuls
from longctx.train import cli
from longctx.train.lora import quantised_reading
from longctx.train.lora.peft_adapters import add_adapters, check_lora, expert_stacks
from longctx.train.lora.quantise import check_experts, quantise_, quantise_shapes_, round_to_nf4_
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.start.loading import load_config, load_model

peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("plain_kernels")
DEVICE = torch.device(DEVICE)
SAFE = "adapter_model.safetensors"
WIDE = (".gate.weight", ".router.weight", "_bias")
"""How the names of routers and of biases of experts end, which stay as they are."""


def arguments(**more: Any) -> ModelArguments:
    asked = dict(class_type="custom", seq_len=128, lora_r=3, quantize="nf4", dtype="float32")
    return ModelArguments(**asked | more)


def made(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(DEVICE, dtype)


def adapted(model: Any, **more: Any) -> Any:
    """Returns the model with random adapters, each of which changes what its weight gives."""
    model, _ = add_adapters(model, arguments(**more))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model.train()


def pair(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, Any]:
    """A model with the values of 4 bits, dense, and one in 4 bits, with the same adapters."""
    rounded = made(family, dtype)
    packed = copy.deepcopy(rounded)
    round_to_nf4_(rounded.model.layers)
    quantise_(packed, DEVICE)
    return adapted(rounded, **more), adapted(packed, **more)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_bits_are_those_of_dense_weights_with_these_values(family, capsys) -> None:
    """Experts in 4 bits give the loss and gradients of dense experts with the same values, bit by
    bit, and those of PEFT's own forward over the dense ones to rounding."""
    rounded, packed = pair(family)
    theirs = copy.deepcopy(rounded)
    theirs.get_base_model().config.use_cache = False
    keep_documents_apart(theirs.get_base_model())
    for model in (rounded, packed):
        longctx.patch(model, tile_tokens=31, keep="o", strict=True)
    inputs = batch(PACKED)
    loss, grads = gradients(packed, inputs)
    dense_loss, dense = gradients(rounded, inputs)
    truth_loss, truth = gradients(theirs, inputs)
    assert torch.equal(loss, dense_loss) and relative_error(loss, truth_loss) < 1e-6
    assert grads.keys() == dense.keys() == truth.keys()
    assert sum("experts" in name for name in grads) >= 4
    for name, grad in grads.items():
        assert torch.equal(grad, dense[name]), name
        assert relative_error(grad, truth[name]) < 1e-5, name
    assert "Hugging Face's layers run" not in capsys.readouterr().out


def test_adapters_on_attention_alone() -> None:
    rounded, packed = pair("mixtral", lora_targets=["q_proj", "o_proj"])
    for model in (rounded, packed):
        longctx.patch(model, strict=True)
    loss, grads = gradients(packed, batch(PACKED))
    dense_loss, dense = gradients(rounded, batch(PACKED))
    assert torch.equal(loss, dense_loss)
    assert all(torch.equal(grad, dense[name]) for name, grad in grads.items())


@pytest.mark.parametrize("family", EXPERTS)
def test_hugging_faces_layers_compute_with_dense_weights(family, capsys) -> None:
    """In generation, whose keys and values the schedule does not keep, and in training where a hook
    has the schedule give way."""
    rounded, packed = pair(family)
    ids = torch.arange(3, 23, device=DEVICE)[None]
    for model in (rounded, packed):
        longctx.patch(model)
        model.eval()
    with torch.no_grad():
        wanted = rounded(ids, use_cache=True).logits
        torch.testing.assert_close(packed(ids, use_cache=True).logits, wanted)
        torch.testing.assert_close(packed(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    generated = [m.generate(ids, max_new_tokens=3, do_sample=False) for m in (rounded, packed)]
    assert torch.equal(*generated) and generated[0].shape[1] == 23
    assert "Hugging Face's layers run" not in capsys.readouterr().out
    found = []
    for model in (rounded, packed):
        inner = model.get_base_model().model
        inner.layers[0].register_forward_hook(lambda *given: None)
        found.append(gradients(model.train(), batch(PACKED)))
    (_, dense), (_, grads) = found
    assert "Hugging Face's layers run" in capsys.readouterr().out
    assert all(relative_error(grads[name], grad) < 1e-5 for name, grad in dense.items())
    stacks = expert_stacks(packed).values()
    assert all(type(stack) is bitsandbytes.nn.Params4bit for stack in stacks)
    with pytest.raises(UserError, match="packed, which Hugging Face's layers cannot read"):
        longctx.unpatch(packed)
    longctx.unpatch(rounded)


# --- reading and counting ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    """Folders of models by family, in the names of checkpoints: a tensor for each expert."""
    folders = {}
    for family in EXPERTS:
        folders[family] = str(tmp_path_factory.mktemp(family))
        made(family).save_pretrained(folders[family])
    return folders


def loaded(folder: str, **more: Any) -> Any:
    args = arguments(model_name_or_path=folder, **more)
    return load_model(args, load_config(args, vocab_size=211), device=DEVICE)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, ["float32", "bfloat16"][i % 2]) for i, family in enumerate(EXPERTS)],
)
def test_no_expert_stays_in_16_bits(family, dtype, saved) -> None:
    """A stack is quantised as one, as in memory. Routers, norms and ends stay as they are."""
    truth = made(family).to(getattr(torch, dtype))
    model = loaded(saved[family], dtype=dtype)
    whole, stacks = expert_stacks(truth), expert_stacks(model)
    assert stacks.keys() == whole.keys() and len(stacks) >= 2
    for name, stack in stacks.items():
        packed, state = bitsandbytes.functional.quantize_4bit(
            whole[name].data, quant_type="nf4", compress_statistics=True
        )
        assert torch.equal(stack.data, packed) and stack.nbytes == whole[name].numel() // 2
        assert torch.equal(stack.quant_state.absmax, state.absmax)
        assert stack.quant_state.shape == whole[name].shape and state.nested
        assert stack.quant_state.dtype == getattr(torch, dtype)
    layers: Any = model.get_base_model().model.layers
    wide = {n for n, p in layers.named_parameters() if p.dim() > 1 and p.dtype != torch.uint8}
    assert all(name.endswith(WIDE) or "lora_" in name for name in wide)


def live_bytes() -> int:
    """The bytes of all floating point tensors that Python holds, with one size a storage."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found
                if x.is_floating_point() and not x.is_meta}  # fmt: skip
    return sum(storages.values())


@pytest.mark.parametrize("how", ["read", "in memory"])
def test_one_stack_at_a_time_is_there_in_16_bits(how, tmp_path, monkeypatch) -> None:
    """While a model of 4 layers is read, or quantised in memory, one stack of experts at a time is
    there in 16 bits."""
    model = AutoModelForCausalLM.from_config(family_config("mixtral", num_hidden_layers=4))
    model.save_pretrained(tmp_path)
    stacks = [stack.nbytes for stack in expert_stacks(model).values()]
    largest, began, seen = max(stacks), live_bytes(), []
    pack = quantised_reading.in_nf4

    def watched(weight: Any, device: Any) -> Any:
        if weight.dim() == 3:
            seen.append(live_bytes())
        return pack(weight, device)

    module = "quantised_reading" if how == "read" else "quantise"
    monkeypatch.setattr(f"longctx.train.lora.{module}.in_nf4", watched)
    if how == "read":
        loaded(str(tmp_path))
        assert len(seen) == 8 and max(seen) - began < 3 * largest
    else:
        quantise_(model, DEVICE)
        freed = [before - after for before, after in zip(seen, seen[1:], strict=False)]
        assert len(seen) == 8 and freed == pytest.approx(stacks[:-1], rel=0.05)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_plan_counts_the_bytes_of_the_run(family, saved) -> None:
    """A plan counts each block's packed weights with their scales as the run has them, and MFU is
    of the weights before they were packed."""
    model = loaded(saved[family], dtype="bfloat16")
    config = family_config(family)
    found = state_blocks(model, movable=True)
    planned = Subject(config, arguments()).blocks(movable=True)
    assert [block.name for block in found] == [block.name for block in planned]
    for real, count in zip(found, planned, strict=True):
        if real.layer is not None:
            ours, theirs = (b.sizes(accumulates=False).weight for b in (real, count))
            assert ours == theirs > 0
            assert len(real.parameters) == len(count.parameters)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    numel = parameters_in_matmuls(whole)
    quantise_shapes_(whole)
    assert parameters_in_matmuls(whole) == numel


def test_a_published_mixture_has_4_13_bits_a_weight() -> None:
    args = arguments(preset="qwen3-30b-a3b", lora_r=16)
    config = load_config(args, vocab_size=1)
    subject = Subject(config, args)
    layer = next(b for b in subject.blocks(movable=True) if b.layer == 0)
    bits = 8 * layer.sizes(accumulates=False).frozen
    numel = 2048 * (2 * 4096 + 2 * 512) + 128 * 3 * 2048 * 768
    router = 128 * 2048
    assert (bits - 16 * router) / numel == pytest.approx(4.127, abs=0.001)
    (kind,) = subject.sizes(PlannedRun(model=args)).kinds
    assert kind.dense_bytes == 2 * numel


# --- runs --------------------------------------------------------------------------------------


def test_runs_are_resumed_hosted_and_merged(tmp_path, capsys) -> None:
    """By `longctx train`, with the same bits wherever the experts wait. Merged into the values of
    4 bits, the adapters give what was trained."""
    flags = prepare(tmp_path)
    folder = tmp_path / "model"
    known = AutoConfig.from_pretrained(folder)
    ids = {name: getattr(known, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    experts = dict(num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **ids, **sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    flags += ["--lora_r", "4", "--max_steps", "4", "--learning_rate", "0.02"]
    flags += ["--quantize", "nf4", "--dtype", "bfloat16"]
    losses = [line["loss"] for line in run(flags, tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.1
    final = tmp_path / "run" / "final"
    trained = load_file(final / SAFE)
    assert sum("experts" in name for name in trained) == 8
    again = ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]
    run(flags, tmp_path / "run", *again)
    run(flags, tmp_path / "hosted", "--place", "host")
    out = capsys.readouterr().out
    assert "over NF4" in out and re.search(r"on the host: weights \S+, states", out)
    assert "Hugging Face's layers" not in out
    lines = " ".join(re.sub("[│ ]+", " ", out).split())  # of the table that ends a run
    assert (
        "longctx merge" in lines and "--quantize nf4 (vLLM takes no adapters of experts)" in lines
    )
    assert (
        "longctx merge path/to/final --output merged --quantize nf4"
        in (final / "README.md").read_text()
    )
    for found in (load_file(final / SAFE), load_file(tmp_path / "hosted" / "final" / SAFE)):
        assert all(torch.equal(found[name], x) for name, x in trained.items())
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantise_(base, DEVICE)
    with shaped_experts(base):
        network = peft.PeftModel.from_pretrained(base, str(final))
    longctx.patch(network, strict=True)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        wanted = network(tokens).logits.float()

        def error(name: str, *words: str) -> float:
            cli.run(["merge", str(final), "--output", str(tmp_path / name), *words])
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / name).float()
            return float((merged(tokens).logits - wanted).abs().mean())

        rounded = error("rounded", "--quantize", "nf4", "--dtype", "bfloat16")
        assert rounded < 0.2 * error("whole")


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{"class_type": "vanilla"}, {"class_type": "liger"}, {"parts": ["rms_norm"]}]
)
def test_experts_in_4_bits_are_for_the_schedule(more) -> None:
    config = family_config("mixtral")
    with pytest.raises(UserError, match="experts.*only --class_type custom without --parts"):
        check_experts(arguments(**more), config)
    check_experts(replace(arguments(**more), quantize="none"), config)
    check_experts(arguments(**more), family_config("llama"))


def in_4_bits(folder: str) -> Any:
    """The model as transformers quantises it: its experts stay as they are."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": DEVICE}
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_a_checkpoint_in_4_bits_are_quantised_as_they_come(
    family, saved, tmp_path
) -> None:
    """bitsandbytes leaves them in 16: the run has what it makes of the whole checkpoint."""
    whole = loaded(saved[family], dtype="float32")
    in_4_bits(saved[family]).save_pretrained(tmp_path)
    model = loaded(str(tmp_path), dtype="float32")
    found, wanted = dict(model.named_parameters()), dict(whole.named_parameters())
    assert found.keys() == wanted.keys()
    packed = [name for name, x in found.items() if packed_state(x) is not None]
    assert packed == [name for name, x in wanted.items() if packed_state(x) is not None]
    experts = [name for name in packed if ".experts." in name]
    assert len(experts) >= 4
    assert all(torch.equal(dense(found[name]), dense(wanted[name])) for name in experts)
    args = arguments(model_name_or_path=str(tmp_path), dtype="bfloat16")
    subject = Subject(load_config(args, vocab_size=211), args)
    in_16_bits = 2 * sum(math.prod(found[name].quant_state.shape) for name in experts)
    assert subject.reading_bytes(2**40) > in_16_bits


def test_patch_takes_a_model_whose_experts_are_in_16_bits(saved) -> None:
    model = in_4_bits(saved["mixtral"]).train()
    ours = longctx.patch(copy.deepcopy(model), strict=True)
    inputs = batch(PACKED)
    with torch.no_grad():
        assert relative_error(ours(**inputs).loss, model(**inputs).loss) < 1e-6


def test_experts_that_bitsandbytes_dequantises_are_left_to_hugging_face(capsys) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = made("mixtral").requires_grad_(False)
    for layer, _ in layers_of(model.model):
        replace_parameter_4bit(layer.mlp.experts, "down_proj", quant_type="nf4")
    naive = copy.deepcopy(model)
    longctx.patch(model)
    assert "Hugging Face's layers run" in (said := capsys.readouterr().out)
    assert "mlp.experts" in said
    with torch.no_grad():
        inputs = batch(PACKED)
        assert relative_error(model(**inputs).loss, naive(**inputs).loss) < 1e-6


def test_a_stack_of_another_shape_is_named(capsys) -> None:
    model = made("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data[:, :, :96].contiguous())
    quantise_(model, DEVICE)
    longctx.patch(model)
    assert "a weight of (5, 128, 96) in model.layers.1.mlp.experts" in capsys.readouterr().out


def test_a_model_without_a_list_of_layers_has_no_experts() -> None:
    config = GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    args = arguments(class_type="vanilla")
    check_experts(args, config)
    check_lora(args, config)
