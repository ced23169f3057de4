"""Checkpoints that stay packed under adapters: read to the bit as transformers makes them dense,
trained to the bit as the dense model is, and damage of their files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_layer import PACKED, batch, gradients
from small_packed import made_dense, saved_in_fp8, saved_in_mxfp4, vision_saved_in_fp8
from torch import nn

import longctx
from exactness import DEVICE
from longctx.errors import UserError
from longctx.families.blocks import move_scales, scales, state_blocks
from longctx.families.stand_ins import shaped_experts
from longctx.layer import dense_experts
from longctx.layer.dense_experts import PackedExperts
from longctx.layer.packed_linear import PackedLinear
from longctx.layer.packed_weights import Fp8, dense, packed_state, packed_weight
from longctx.train.loading.pretrained import packed_files, read_config, read_model
from longctx.train.options import source
from longctx.train.options.config import ModelArguments
from longctx.train.options.source import ModelSource
from longctx.train.plan.subject import Subject
from longctx.train.report.plan import main as plan
from longctx.train.start.loading import load_config, load_model
from profiling.packed_folder import FP8, MXFP4

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")

Save = Callable[[Path], Any]
FOLDERS: dict[str, tuple[Save, int]] = {
    "gpt_oss": (partial(saved_in_mxfp4, intermediate_size=96), 6),
    "llama": (partial(saved_in_fp8, family="llama"), 21),
    "llama, a scale a matrix": (partial(saved_in_fp8, family="llama", block=None), 21),
    "qwen3_moe": (partial(saved_in_fp8, family="qwen3_moe", block=(8, 16)), 19),
    "glm4_moe": (partial(saved_in_fp8, family="glm4_moe", block=(8, 8)), 25),
    "qwen3_next": (partial(saved_in_fp8, family="qwen3_next", block=(8, 8)), 19),
    "granitemoehybrid-experts": (
        partial(saved_in_fp8, family="granitemoehybrid-experts", block=(8, 8)),
        8,
    ),
    "a scale a row": (
        partial(saved_in_fp8, family="qwen3_moe", block=(1, 0), compressed=True),
        19,
    ),
    "mistral3": (partial(vision_saved_in_fp8, kind="mistral3", block=None), 21),
    "gemma3": (partial(vision_saved_in_fp8, kind="gemma3", block=(16, 8)), 21),
    "qwen3_5": (partial(vision_saved_in_fp8, kind="qwen3_5", block=(8, 8)), 15),
}
"""How a folder is made, and how many of its weights are packed; of Granite, whose files have
another name for experts, those of attention and mixers."""
DELTA_NET = ("qwen3_next", "qwen3_5")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "in_proj_qkvz")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("packed")
            FOLDERS[case][0](made[case])
        return made[case]

    return folder_of


def read(folder: Path, dtype: torch.dtype, *, keeps: bool) -> Any:
    compressed = "compressed" in (folder / "config.json").read_text()
    where = ModelSource(name=str(folder), frozen=True, keeps_packed=keeps or compressed)
    model = read_model(where, read_config(where), dtype=dtype, attention="eager").to(DEVICE)
    move_scales(model)
    return model if keeps else made_dense(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_read_are_the_dense_weights(case, dtype, folder_of, capsys) -> None:
    folder = folder_of(case)
    truth = dict(read(folder, dtype, keeps=False).named_parameters())
    if case != "a scale a row":
        assert f"{folder} is in " in (said := capsys.readouterr().out) and "made dense" in said
    model = read(folder, dtype, keeps=True)
    assert "stay so, frozen, and are dense layer by layer" in capsys.readouterr().out
    assert not hasattr(model.config, "quantization_config") and not model.is_quantized
    found = dict(model.named_parameters())
    assert found.keys() == truth.keys()
    for name, weight in found.items():
        made = dense(weight)
        assert made.dtype == dtype and torch.equal(made, truth[name]), name
    packed = [weight for weight in found.values() if packed_state(weight) is not None]
    assert len(packed) == FOLDERS[case][1] and not any(w.requires_grad for w in packed)


@pytest.mark.parametrize("block", [(1, 0), (16, 8), None])
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_fp8_of_compressed_tensors_is_read(family, block, tmp_path) -> None:
    """Such files have a scale a row, a block or a matrix; no run makes them dense."""
    truth = saved_in_fp8(tmp_path, family, block, compressed=True)
    if family == "glm4_moe" and block is None:
        with pytest.raises(UserError, match="gate_up_proj: its experts have a scale a matrix"):
            read(tmp_path, torch.float32, keeps=True)
        return
    model = read(tmp_path, torch.float32, keeps=True)
    for name, weight in model.named_parameters():
        path, _, own = name.rpartition(".")
        if packed_state(weight) is None:
            assert name not in truth
        elif own == "weight":
            assert torch.equal(dense(weight).cpu(), truth[name]), name
        else:
            parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else ("down_proj",)
            for expert, found in enumerate(dense(weight).cpu()):
                wanted = torch.cat([truth[f"{path}.{expert}.{part}.weight"] for part in parts])
                assert torch.equal(found, wanted), name
    where = ModelSource(name=str(tmp_path), frozen=True)
    with pytest.raises(UserError, match="FP8 of compressed-tensors, which stays packed and is not"):
        read_config(where)


def adapted(model: Any, *, dora: bool, experts: bool = False, **settings: Any) -> Any:
    names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    config = peft.LoraConfig(
        r=4,
        target_modules=[name for name in TARGETS if name in names],
        exclude_modules=None if experts else r".*(mlp|vision|visual).*",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"] if experts else None,
        use_dora=dora,
    )
    with shaped_experts(model):
        model = peft.get_peft_model(model, config).train()
    torch.manual_seed(1)
    for name, x in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            nn.init.normal_(x, std=0.1)
    return longctx.patch(model, strict=True, **settings)


def counted(patch: pytest.MonkeyPatch, home: Any, name: str) -> list[Any]:
    """Returns the arguments of all calls of a method from here on."""
    calls: list[Any] = []
    run = getattr(home, name)

    def noted(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    patch.setattr(home, name, noted)
    return calls


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Makes attention's backward sum dq in one order, so that a run repeats its bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", FOLDERS)
def test_adapters_train_to_the_bits_of_the_dense_model(
    case, dora, dtype, folder_of, repeatable
) -> None:
    if DEVICE == "cuda" and case in DELTA_NET and dtype == torch.float32:
        pytest.skip("on a GPU flash-linear-attention trains Gated DeltaNet in 16 bits alone")
    plain = read(folder_of(case), dtype, keeps=False)
    if case == "gpt_oss":  # sums of matmuls have the order in which packed experts lie
        plain = made_dense(read(folder_of(case), dtype, keeps=True))
    ours = read(folder_of(case), dtype, keeps=True)
    ours, plain = (adapted(model, dora=dora) for model in (ours, plain))
    lengths = {name: x for name, x in ours.named_parameters() if "magnitude" in name}
    for name, length in lengths.items():
        theirs = plain.get_parameter(name)
        # PEFT rounds the lengths of weights in 16 bits to 16 bits.
        torch.testing.assert_close(length, theirs, rtol=0.02, atol=0)
        theirs.data.copy_(length)
    (loss, grads), (truth, expected) = (gradients(m, batch(PACKED)) for m in (ours, plain))
    assert torch.equal(loss, truth) and loss.isfinite() and grads.keys() == expected.keys()
    assert len(grads) >= 6 and bool(lengths) == dora
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("keep", ["o", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe", "a scale a row"])
def test_experts_by_chunks_train_to_the_same_bits(
    case, dtype, keep, folder_of, repeatable, monkeypatch
) -> None:
    """One or two experts dense at a time, in tiles of tokens."""
    found = []
    for by_chunks in (False, True):
        monkeypatch.setattr(dense_experts, "WHOLE_BYTES", 0 if by_chunks else 2**40)
        monkeypatch.setattr(dense_experts, "CHUNK_BYTES", 2**14)
        chunks = counted(monkeypatch, PackedExperts, "dense")
        model = read(folder_of(case), dtype, keeps=True)
        model = adapted(model, dora=False, experts=True, keep=keep, tile_tokens=31)
        loss, grads = gradients(model, batch(PACKED))
        found.append({"loss": loss, **grads})
        assert bool(chunks) == by_chunks and any("experts" in name for name in grads)
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("case", ["gpt_oss", "llama", "qwen3_moe"])
def test_hugging_faces_layers_compute_with_it(case, folder_of) -> None:
    """Generation runs them, whose keys and values the schedule does not keep."""
    ids = torch.arange(3, 23, device=DEVICE)[None]
    found = []
    for keeps in (True, False):
        model = longctx.patch(read(folder_of(case), torch.float32, keeps=keeps)).eval()
        found.append(model.generate(ids, max_new_tokens=3, do_sample=False))
    assert torch.equal(*found) and found[0].shape[1] == 23


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_is_one_to_its_callers(bias) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 33, bias=bias, device=DEVICE)
    codes = torch.randint(0x28, (33, 48), device=DEVICE).byte()
    state = Fp8(plain.weight.shape, torch.float32, torch.rand(3, 3, device=DEVICE), (16, 16))
    packed = PackedLinear.like(plain)
    packed.weight = packed_weight(codes, state)
    plain.weight.data = dense(packed.weight)
    assert torch.equal(packed.dequantize(), plain.weight) and packed.weight.dtype == torch.uint8
    x = torch.randn(2, 5, 48, device=DEVICE)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, truth = packed(ours), plain(theirs)
    assert torch.equal(y, truth)
    y.square().sum().backward()
    truth.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    if bias:
        assert packed.bias is plain.bias


@pytest.mark.parametrize("case", FOLDERS)
def test_a_plan_counts_the_bytes_that_are_read(case, folder_of, monkeypatch) -> None:
    """A plan packs what our schedule trains; Hugging Face's layers get dense weights, and so do
    engines that cut weights up."""
    args = ModelArguments(
        model_name_or_path=str(folder_of(case)),
        lora_r=4,
        lora_targets=["q_proj", "v_proj"],
        seq_len=64,
        dtype="bfloat16",
    )
    config = load_config(args, vocab_size=211)
    model = load_model(args, config, device=torch.device("cpu"))
    real = state_blocks(model, movable=True)
    planned = Subject(config, args).blocks(movable=True)
    assert [block.name for block in planned] == [block.name for block in real]
    sizes = [[b.sizes(accumulates=False) for b in blocks] for blocks in (planned, real)]
    if case != "granitemoehybrid-experts":  # a plan does not look into files
        assert sizes[0] == sizes[1]
    for args_of, shards in ((replace(args, class_type="vanilla"), False), (args, True)):
        if args_of.class_type == "vanilla" and case in ("gpt_oss", "qwen3_next", "qwen3_5"):
            continue  # which no plan knows
        if case.startswith("granite") or case == "a scale a row":
            continue
        plain = Subject(config, args_of, shards=shards)
        assert not any(packed_state(p) for p in plain.model.parameters())


@pytest.mark.parametrize("case", ["llama", "gpt_oss"])
def test_a_merge_in_place_is_refused(case, folder_of) -> None:
    args = ModelArguments(model_name_or_path=str(folder_of(case)), lora_r=4, seq_len=64)
    config = load_config(args, vocab_size=211)
    model: Any = load_model(args, config, device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"adapters over (FP8|MXFP4) are not merged in place"):
        model.merge_adapter()
    with pytest.raises(UserError, match="then run longctx merge"):
        model.merge_and_unload()


def test_scales_go_where_their_weights_are(folder_of) -> None:
    model = read(folder_of("llama"), torch.float32, keeps=True)
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    linear.weight = packed_weight(linear.weight.to("meta"), linear.weight.quant_state)
    move_scales(model)
    places = {p: {part.tensor.device for part in scales(p)} for p in model.parameters()}
    assert {x.device.type for x in places} == {"meta", DEVICE}
    assert all(found <= {weight.device} for weight, found in places.items())


@pytest.mark.parametrize("settings", [MXFP4, FP8 | {"weight_block_size": [128, 128]}])
def test_presets_have_what_is_published(settings, monkeypatch, capsys) -> None:
    """Random weights in the format of the public files, for our schedule under adapters."""
    preset = "tiny-gpt-oss" if settings is MXFP4 else "tiny"
    monkeypatch.setitem(source.PUBLISHED, preset, settings)
    args = ModelArguments(preset=preset, lora_r=4, seq_len=64, dtype="bfloat16")
    config = load_config(args, vocab_size=211)
    model = load_model(args, config, device=torch.device("cpu"))
    name = "MXFP4" if settings is MXFP4 else "FP8"
    said = f"--preset {preset}: random weights in {name}, as its files are\n"
    assert said in capsys.readouterr().out
    planned, real = Subject(config, args).blocks(movable=True), state_blocks(model, movable=True)
    assert [b.sizes(accumulates=False) for b in planned] == [
        b.sizes(accumulates=False) for b in real
    ]
    for weight in model.parameters():
        made = dense(weight)
        assert (
            made.isfinite().all()
            and made.dtype == (torch.float32, torch.bfloat16)[not weight.requires_grad]
        )
        if packed_state(weight) is not None:
            assert 0.015 < made.float().std() < 0.03
    ids = torch.arange(64)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    for other in (dict(lora_r=None), dict(class_type="vanilla"), dict(quantize="nf4")):
        changed = replace(args, **other)
        form = packed_files(changed.source, config)
        assert form == (name, None)


def test_public_models_are_planned_as_published(capsys) -> None:
    words = "--lora_r 16 --seq_len 8192 --gpu h100 --host_memory_gib 128 --json".split()
    plan(["--preset", "gpt-oss-120b", *words])
    out, err = capsys.readouterr()
    assert "the public model of --preset gpt-oss-120b is in MXFP4: planned packed" in err
    assert json.loads(out)["fits"] and json.loads(out)["host_reading_gib"] < 2
    plan(["--preset", "qwen3-8b", *words])
    assert "published" not in capsys.readouterr().err


def test_experts_of_gpt_oss_120b_are_dense_by_chunks(capsys, monkeypatch) -> None:
    """So that a card of 24 GiB and a host of 60 hold it; of other mixtures all are, at once."""
    words = "--lora_r 16 --seq_len 32768 --gpu h200 --gpu_memory_gib 24 --host_memory_gib 60 --json"
    words = f"{words} --lora_targets q_proj k_proj v_proj o_proj --preset".split()

    def planned(preset: str) -> Any:
        plan([*words, preset])
        return json.loads(capsys.readouterr().out)

    def of_experts(found: Any) -> list[float]:
        name = "some experts' dense weights"
        return [p["buffers"][name] for p in found["phases"] if name in p["buffers"]]

    small, large = planned("gpt-oss-20b"), planned("gpt-oss-120b")
    assert large["fits"] and of_experts(large) == [1.0, 1.0] and of_experts(small) == []
    monkeypatch.setattr(dense_experts, "WHOLE_BYTES", 2**40)
    with pytest.raises(SystemExit):
        planned("gpt-oss-120b")
    assert not json.loads(capsys.readouterr().out)["fits"]


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Returns a copy of a folder with other tensors."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


LAYER = "model.layers.1."
EXPERTS, EXPERT = f"{LAYER}mlp.experts.", "model.layers.0.mlp.experts.2."
NO_ROOM = "has 1 weight in FP8 outside of its decoder layers .lm_head.weight.: give the model"
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (
        "llama",
        lambda x: x.pop(f"{LAYER}mlp.up_proj.weight_scale_inv"),
        rf"{LAYER}mlp.up_proj.weight is in FP8 and has no .*_scale_inv: get the files again",
    ),
    "lm_head": (
        "llama",
        lambda x: x.update(
            {
                "lm_head.weight": x["lm_head.weight"].to(torch.float8_e4m3fn),
                "lm_head.weight_scale_inv": torch.ones(7, 8),
            }
        ),
        NO_ROOM,
    ),
    "no scale of an expert": (
        "qwen3_moe",
        lambda x: x.pop(f"{EXPERT}up_proj.weight_scale_inv"),
        rf"1 of the model's weights are not in .* \({EXPERT}up_proj.weight_scale_inv\)",
    ),
    "no weight": (
        "llama",
        lambda x: x.pop(f"{LAYER}mlp.up_proj.weight"),
        rf"1 of the model's weights are not in .* \({LAYER}mlp.up_proj.weight\)",
    ),
    "no expert": (
        "qwen3_moe",
        lambda x: x.pop(f"{EXPERT}up_proj.weight"),
        rf"1 of the model's weights are not in .* \({EXPERT}up_proj.weight\)",
    ),
    "a scale that is no number": (
        "llama",
        lambda x: x[f"{LAYER}self_attn.q_proj.weight_scale_inv"].fill_(math.nan),
        r"layers.1.self_attn.q_proj.weight: a scale is no number",
    ),
    "an infinite scale of a matrix": (
        "llama, a scale a matrix",
        lambda x: x[f"{LAYER}self_attn.q_proj.weight_scale_inv"].fill_(math.inf),
        r"layers.1.self_attn.q_proj.weight: a scale is no number",
    ),
    "another grid": (
        "llama",
        lambda x: x.update({f"{LAYER}mlp.up_proj.weight_scale_inv": torch.ones(2, 8)}),
        rf"1 of the model's weights have another shape .* \({LAYER}mlp.up_proj.weight_scale_inv",
    ),
    "no scales of experts": (
        "gpt_oss",
        lambda x: x.pop(f"{EXPERTS}down_proj_scales"),
        rf"1 of the model's weights are not in .* \({EXPERTS}down_proj_scales\)",
    ),
    "no experts": (
        "gpt_oss",
        lambda x: [x.pop(f"{EXPERTS}{name}") for name in ("down_proj_scales", "down_proj_blocks")],
        rf"2 of the model's weights are not in .* \({EXPERTS}down_proj_blocks",
    ),
    "bytes for a dense weight": (
        "gpt_oss",
        lambda x: x.update({f"{LAYER}self_attn.k_proj.weight": torch.ones(16, 32).byte()}),
        rf"{LAYER}self_attn.k_proj.weight in model.safetensors holds U8, no floating point",
    ),
    "E8M0's NaN": (
        "gpt_oss",
        lambda x: x[f"{EXPERTS}down_proj_scales"][0, 3].fill_(255),
        r"layers.1.mlp.experts.down_proj: a scale is no number",
    ),
    "blocks of another model": (
        "gpt_oss",
        lambda x: x.update(
            {f"{EXPERTS}down_proj_blocks": x[f"{EXPERTS}down_proj_blocks"][:, :64].contiguous()}
        ),
        rf"1 of the model's weights have another shape .* \({EXPERTS}down_proj_blocks",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(case, folder_of, tmp_path) -> None:
    which, change, says = DAMAGED[case]
    folder = changed(folder_of(which), tmp_path / "changed", change)
    with pytest.raises(UserError, match=says) as error:
        read(folder, torch.bfloat16, keeps=True)
    assert len(str(error.value)) < 400


def test_a_block_that_gate_and_up_would_share_is_refused(tmp_path) -> None:
    saved_in_fp8(tmp_path, "qwen3_moe", (32, 16), moe_intermediate_size=48)
    says = r"layers.0.mlp.experts.gate_up_proj: 48 rows of an expert's gate are no multiple of 32"
    with pytest.raises(UserError, match=says):
        read(tmp_path, torch.bfloat16, keeps=True)
    words = ["--model_name_or_path", str(tmp_path), "--lora_r", "4", "--seq_len", "64"]
    with pytest.raises(UserError, match=says):
        plan([*words, "--gpu", "h100"])


def test_ragged_blocks_are_read(tmp_path) -> None:
    """Rows behind the last whole block have a scale of their own."""
    truth = saved_in_fp8(tmp_path, "llama", (48, 80))
    model = read(tmp_path, torch.float32, keeps=True)
    for name, wanted in truth.items():
        assert torch.equal(dense(model.get_parameter(name)).cpu(), wanted), name


def test_files_say_what_is_packed(folder_of, tmp_path) -> None:
    """A configuration forgot that a weight is in 16 bits, or says it of one in FP8."""

    def change(tensors: dict[str, Any]) -> None:
        name = f"{LAYER}mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)
        del tensors[f"{name}_scale_inv"]

    folder = changed(folder_of("llama"), tmp_path / "changed", change)
    written = json.loads((folder / "config.json").read_text())
    for names in ([], ["lm_head", "model.layers.0.mlp"]):
        written["quantization_config"]["modules_to_not_convert"] = names
        (folder / "config.json").write_text(json.dumps(written))
        model = read(folder, torch.bfloat16, keeps=True)
        for layer, packed in ((0, True), (1, False)):
            weight = model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight")
            assert (packed_state(weight) is not None) == packed
