"""LoRA in runs of train.py: what is trained, saved, resumed, merged, and refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from small_run import logged, prepare, run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from longctx.errors import UserError
from longctx.families.blocks import scales
from longctx.train import cli
from longctx.train.commands import train
from longctx.train.lora import quantise
from longctx.train.lora.peft_adapters import Reached, adapter_bytes, check_lora
from longctx.train.lora.quantise import quantise_shapes_, quantised_loading
from longctx.train.options.config import ModelArguments
from longctx.train.output.manifest import read_manifest, write_manifest
from longctx.train.start.loading import check_request, load_config

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")
LORA = ["--lora_r", "4", "--max_steps", "4", "--learning_rate", "0.02"]
KINDS = {
    "fp32": [],
    "vanilla": ["--class_type", "vanilla"],
    "bf16": ["--dtype", "bfloat16"],
    "bf16, on the host": ["--dtype", "bfloat16", "--place", "host"],
    "dropout": ["--dtype", "bfloat16", "--lora_dropout", "0.3"],
    "some": ["--lora_targets", "v_proj", "o_proj", "down_proj", "--lora_alpha", "16"],
    "vanilla dropout": ["--class_type", "vanilla", "--lora_dropout", "0.3"],
}
NF4 = ["--quantize", "nf4", "--dtype", "bfloat16"]
OF_4_BITS = {"nf4": NF4, "nf4, vanilla": [*NF4, "--class_type", "vanilla"]}


@pytest.fixture(scope="module")
def flags(plain_kernels, tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), *LORA]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    """The folder of a run of that kind, made when it is first asked for; read only."""

    @cache
    def finished(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "run"
        run(flags, folder, *(KINDS | OF_4_BITS)[kind])
        return folder

    return finished


def base_of(flags: list[str]) -> str:
    return flags[flags.index("--model_name_or_path") + 1]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_adapters_alone_are_saved(finished, kind) -> None:
    losses = [line["loss"] for line in logged(finished(kind))]
    assert losses[-1] < losses[0] - 0.1
    for folder in ("checkpoint-4", "final"):
        weights = adapter(finished(kind) / folder)
        assert all("lora_" in name for name in weights)
        assert {x.dtype for x in weights.values()} == {torch.float32}
        assert any(x.any() for name, x in weights.items() if "lora_B" in name)
        assert not list((finished(kind) / folder).glob("model*.safetensors"))


def test_the_class_types_train_the_same(finished) -> None:
    ours, theirs = (adapter(finished(kind) / "final") for kind in ("fp32", "vanilla"))
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 7 * 2
    for name, x in theirs.items():
        assert (ours[name] - x).norm() <= 1e-4 * x.norm(), name
    losses = [[line["loss"] for line in logged(finished(kind))] for kind in ("fp32", "vanilla")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_schedule_ran(flags, tmp_path, capsys) -> None:
    run(flags, tmp_path / "run", "--max_steps", "1")
    out = capsys.readouterr().out
    assert "LoRA of rank 4 on 14 maps" in out and "Hugging Face's layers" not in out


def test_places_change_no_bit(finished) -> None:
    for folder in ("checkpoint-2", "final"):
        ours, other = (adapter(finished(k) / folder) for k in ("bf16", "bf16, on the host"))
        assert all(torch.equal(ours[name], other[name]) for name in other)


@pytest.mark.parametrize("kind", ["fp32", "bf16, on the host", "dropout", "vanilla dropout"])
def test_resumed_bit_by_bit(flags, finished, tmp_path, kind) -> None:
    begun = Path(shutil.copytree(finished(kind), tmp_path / "run"))
    resume = ["--resume_from_checkpoint", str(begun / "checkpoint-2")]
    run(flags, begun, *KINDS[kind], *resume)
    for name in ("checkpoint-4", "final"):
        ours, truth = adapter(begun / name), adapter(finished(kind) / name)
        assert all(torch.equal(ours[n], x) for n, x in truth.items()), name
    states = sorted((finished(kind) / "checkpoint-4").glob("optimizer.*.safetensors"))
    assert bool(states) == ("bf16" in " ".join(KINDS[kind]) or "bfloat16" in KINDS[kind])
    for path in states:
        assert path.read_bytes() == (begun / "checkpoint-4" / path.name).read_bytes()
    losses = [[line["loss"] for line in logged(f)] for f in (begun, finished(kind))]
    assert losses[0] == losses[1]


LOST: dict[str, tuple[Any, str]] = {
    "q_proj alone": (
        lambda c: _keep(c, lambda name: "q_proj" in name),
        "24 tensors its file lacks",
    ),
    "a tensor too many": (
        lambda c: _keep(c, lambda name: True, extra=torch.zeros(3)),
        r"1 tensor no module of the model takes \(extra\)",
    ),
    "another adapter within": (
        lambda c: ((c / "within").mkdir(), (c / "within/adapter_config.json").write_text("{}")),
        "holds an adapter that no run saves, in within",
    ),
}


def _keep(folder: Path, wanted: Any, **more: torch.Tensor) -> None:
    kept = {name: x for name, x in adapter(folder).items() if wanted(name)}
    save_file(kept | more, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("case", LOST)
def test_a_checkpoint_of_other_adapters_is_refused(flags, finished, tmp_path, case) -> None:
    """PEFT would leave what is missing at its random beginning, without a word."""
    change, says = LOST[case]
    begun = Path(shutil.copytree(finished("fp32"), tmp_path / "run"))
    (begun / "checkpoint-2" / "manifest.json").unlink()
    change(begun / "checkpoint-2")
    with pytest.raises(UserError, match=says):
        run(flags, begun, "--resume_from_checkpoint", str(begun / "checkpoint-2"))


def test_another_rank_is_another_run(flags, finished, tmp_path) -> None:
    begun = shutil.copytree(finished("fp32"), tmp_path / "run")
    with pytest.raises(UserError, match="lora_r 4 -> 8"):
        run(flags, begun, "--lora_r", "8", "--resume_from_checkpoint", "last")


def test_another_base_is_another_run(flags, finished, tmp_path, capsys) -> None:
    """Of the same configuration: one bit of its weights differs. Its folder may have moved."""
    begun = Path(shutil.copytree(finished("fp32"), tmp_path / "run"))
    moved, other = (Path(shutil.copytree(base_of(flags), tmp_path / n)) for n in ("moved", "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    last = ["--resume_from_checkpoint", "last", "--model_name_or_path"]
    with pytest.raises(
        UserError, match=r"base \(the frozen weights, xxh3 .* -> xxh3 .*changed base"
    ):
        run(flags, begun, *last, str(other))
    run(flags, begun, *last, str(moved))
    assert "nothing was left to train" in capsys.readouterr().out
    run(flags, begun, *last, str(other), "--allow_changed", "base")
    assert "resuming with other options (then and now): base" in capsys.readouterr().out
    definition = read_manifest(begun / "checkpoint-4")["run"]
    assert definition.pop("base").startswith("xxh3 ")
    write_manifest(begun / "checkpoint-4", definition)  # as an earlier version did
    run(flags, begun, *last, str(other))
    assert "does not say which weights its adapters were trained over" in capsys.readouterr().out


def test_peft_loads_it_and_merging_gives_the_same_model(flags, finished, tmp_path) -> None:
    final = finished("fp32") / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base_of(flags) and config["lora_alpha"] == 8
    assert json.loads((final / "config.json").read_text())["use_cache"]  # as the base's
    card = ModelCard((final / "README.md").read_text())  # not PEFT's
    assert card.data.library_name == "peft" and card.data.base_model is None
    assert "LoRA adapters of `model`, a local folder, fine-tuned on rows of 64" in card.text
    plain = AutoModelForCausalLM.from_pretrained(base_of(flags)).eval()
    ids = torch.arange(5, 25)[None]
    before = plain(ids).logits
    adapted = peft.PeftModel.from_pretrained(plain, str(final)).eval()
    logits = adapted(ids).logits
    assert (logits - before).abs().max() > 0.1
    assert adapted.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 23)
    cli.run(["merge", str(final), "--output", str(tmp_path / "new" / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
    assert not list((tmp_path / "new").glob(".incomplete*"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new" / "merged")
    assert len(tokenizer) == merged.config.vocab_size
    assert cli.run(["verify", str(tmp_path / "new" / "merged")]) is None
    card = ModelCard((tmp_path / "new" / "merged" / "README.md").read_text())
    assert card.data.tags == ["longctx", "merged"] and "| adapter | `final` |" in card.text


def test_dora(flags, tmp_path, capsys) -> None:
    """Trained by the schedule, resumed bit by bit, merged; the option defines the run."""
    dora = [*flags, "--use_dora"]
    run(dora, tmp_path / "run", *KINDS["fp32"])
    out = capsys.readouterr().out
    assert "DoRA of rank 4 on 14 maps" in out and "Hugging Face's layers" not in out
    whole = adapter(tmp_path / "run/final")
    assert sum("magnitude" in name for name in whole) == 14
    assert "DoRA, rank 4" in (tmp_path / "run/final/README.md").read_text()
    begun = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    resume = ["--resume_from_checkpoint", str(begun / "checkpoint-2")]
    with pytest.raises(UserError, match="use_dora True -> False"):
        run(flags, begun, *KINDS["fp32"], *resume)
    run(dora, begun, *KINDS["fp32"], *resume)
    assert all(torch.equal(adapter(begun / "final")[name], x) for name, x in whole.items())
    args = ModelArguments(lora_r=4, use_dora=True, model_name_or_path=base_of(flags), seq_len=64)
    held = sum(x.nbytes for x in whole.values())
    assert adapter_bytes(args, load_config(args, vocab_size=1)) == held
    cli.run(["merge", str(begun / "final"), "--output", str(tmp_path / "merged")])
    ids = torch.arange(3, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(base_of(flags)).eval()
    trained = peft.PeftModel.from_pretrained(base, str(begun / "final")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_merged_model_has_the_rope_of_the_run(flags, tmp_path) -> None:
    """Which no adapter holds, and its model's files do not say."""
    limit = AutoConfig.from_pretrained(base_of(flags)).max_position_embeddings
    scaled = ["--rope_scaling", "yarn", "--seq_len", str(2 * limit), "--max_steps", "1"]
    run(flags, tmp_path / "run", *scaled)
    final = tmp_path / "run" / "final"
    for name, words in (("same", []), ("wider", ["--dtype", "float32"])):
        cli.run(["merge", str(final), "--output", str(tmp_path / name), *words])
        config = AutoConfig.from_pretrained(tmp_path / name)
        assert config.max_position_embeddings == 2 * limit
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["factor"] == 2
    assert AutoConfig.from_pretrained(base_of(flags)).max_position_embeddings == limit


def test_modules_to_save(flags, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_of(flags))
    model.config.tie_word_embeddings = False
    untied = type(model)(model.config)
    untied.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(base_of(flags)).save_pretrained(tmp_path / "model")
    flags = [*flags, "--model_name_or_path", str(tmp_path / "model"), "--dtype", "bfloat16"]
    more = ["--lora_modules_to_save", "lm_head", "embed_tokens"]
    run(flags, tmp_path / "run", *more)
    truth = adapter(tmp_path / "run" / "final")
    whole = [x for name, x in truth.items() if "lora_" not in name]
    assert [x.dtype for x in whole] == [torch.bfloat16] * 2
    more += ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]
    run(flags, tmp_path / "run", *more)
    again = adapter(tmp_path / "run" / "final")
    assert all(torch.equal(again[name], x) for name, x in truth.items())
    run(flags, tmp_path / "hosted", *more[:3], "--place", "host")
    hosted = adapter(tmp_path / "hosted" / "final")
    assert all(torch.equal(hosted[name], x) for name, x in truth.items())
    cli.run(["merge", str(tmp_path / "run" / "final"), "--output", str(tmp_path / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    head = next(x for name, x in truth.items() if "lm_head" in name)
    assert torch.equal(merged.lm_head.weight.to(head.dtype), head)


def test_qlora(flags, finished, tmp_path, capsys) -> None:
    """Both class types train the same adapters over the same 4 bits; a preset has them too."""
    pytest.importorskip("bitsandbytes")
    found = [[line["loss"] for line in logged(finished(kind))] for kind in OF_4_BITS]
    truth = adapter(finished("nf4") / "final")
    begun = Path(shutil.copytree(finished("nf4"), tmp_path / "run"))
    capsys.readouterr()
    run(flags, begun, *NF4, "--resume_from_checkpoint", str(begun / "checkpoint-2"))
    assert all(torch.equal(adapter(begun / "final")[n], x) for n, x in truth.items())
    out = capsys.readouterr().out
    run(flags, tmp_path / "hosted", *NF4, "--place", "host")
    hosted = adapter(tmp_path / "hosted" / "final")
    assert all(torch.equal(hosted[name], x) for name, x in truth.items())
    assert "on the host: weights" in capsys.readouterr().out
    assert "over NF4" in out and "Hugging Face's layers" not in out
    assert found[0] == pytest.approx(found[1], rel=0.02) and found[0][-1] < found[0][0] - 0.1
    at = flags.index("--model_name_or_path")
    base = ["--preset", "tiny", "--tokenizer_name", base_of(flags), "--quantize", "nf4"]
    flags = [*flags[:at], *flags[at + 2 :], *base]
    losses = [line["loss"] for line in run(flags, tmp_path / "preset", "--max_steps", "2")]
    assert losses[1] < losses[0]
    assert "Hugging Face's layers" not in capsys.readouterr().out


def in_4_bits(flags: list[str], folder: Path, **changes: Any) -> list[str]:
    """The flags with the model in a checkpoint that bitsandbytes has quantised."""
    bits = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    config = BitsAndBytesConfig(**bits | dict(bnb_4bit_compute_dtype=torch.bfloat16) | changes)
    base = AutoModelForCausalLM.from_pretrained(
        base_of(flags), quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    base.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_of(flags)).save_pretrained(folder)
    return [str(folder) if flag == base_of(flags) else flag for flag in flags]


@pytest.mark.parametrize("kind", ["custom", "vanilla"])
def test_a_checkpoint_in_4_bits_is_read_as_it_is(flags, tmp_path, capsys, kind) -> None:
    """As the run quantises the checkpoint that it was made from, whatever dtype computes."""
    pytest.importorskip("bitsandbytes")
    packed = in_4_bits(flags, tmp_path / "packed")
    more = ["--class_type", kind, "--quantize", "nf4", "--dtype", "float32"]
    losses = [
        [line["loss"] for line in run(words, tmp_path / name, *more)]
        for name, words in (("whole", flags), ("run", packed))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert "Hugging Face's layers" not in capsys.readouterr().out
    resume = ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]
    truth = adapter(tmp_path / "run" / "final")
    run(packed, tmp_path / "run", *more, *resume)
    assert all(torch.equal(adapter(tmp_path / "run" / "final")[n], x) for n, x in truth.items())


def test_so_is_one_whose_scales_and_some_maps_are_not(flags, tmp_path, capsys) -> None:
    pytest.importorskip("bitsandbytes")
    changes = dict(
        bnb_4bit_use_double_quant=False, llm_int8_skip_modules=["lm_head", "layers.0.mlp"]
    )
    packed = in_4_bits(flags, tmp_path / "packed", **changes)
    losses = [line["loss"] for line in run(packed, tmp_path / "run", "--quantize", "nf4")]
    assert losses[-1] < losses[0]
    assert "Hugging Face's layers" not in capsys.readouterr().out


BITS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.mark.gpu
def test_weights_that_waited_on_the_host_train_to_the_same_bits(
    tmp_path, monkeypatch, capsys
) -> None:
    steps = "--seq_len 512 --max_steps 3 --save_strategy no".split()
    cli.run(["train", "--preset", "tiny", *steps, "--output_dir", str(tmp_path / "base")])
    base = ("--model_name_or_path", str(tmp_path / "base/final"))
    found = []
    for waits in (False, True):
        monkeypatch.setattr(quantise, "waits_on_host", lambda packed, gpu_bytes, to=waits: to)
        folder = tmp_path / str(waits)
        nf4 = ("--lora_r", "4", "--quantize", "nf4", "--output_dir", str(folder))
        cli.run(["train", *base, *steps, *nf4])
        found.append(adapter(folder / "final"))
    assert "wait in host memory until they are placed" in capsys.readouterr().out
    assert all(x.equal(found[1][name]) for name, x in found[0].items())


def test_a_plan_knows_a_checkpoints_4_bits() -> None:
    config = AutoConfig.for_model("llama", hidden_size=256, intermediate_size=512, vocab_size=64)
    config.num_hidden_layers = 2
    found = {}
    for name, changes in {
        "double": {"bnb_4bit_use_double_quant": True},
        "plain": {},
        "some": {"llm_int8_skip_modules": ["layers.1.mlp"]},
    }.items():
        config.quantization_config = BITS | changes
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        quantise_shapes_(model)
        maps = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
        scaled = [part.tensor.nbytes for m in maps for part in scales(m.weight)]
        found[name] = sum(m.weight.nbytes for m in maps), sum(scaled)
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    assert found["double"] == (weights // 2, weights // 64 + weights // 64 // 256 * 4)
    assert found["plain"] == (weights // 2, weights // 64 * 4)
    whole = 3 * 256 * 512
    assert found["some"] == ((weights - whole) // 2 + whole * 4, (weights - whole) // 64 * 4)


def test_merging_into_the_4_bits_gives_what_was_trained(flags, finished, tmp_path) -> None:
    """But for the rounding to 16 bits; over whole weights it is another model."""
    pytest.importorskip("bitsandbytes")
    final, ids = finished("nf4") / "final", torch.arange(5, 25)[None]
    args = ModelArguments(quantize="nf4")
    packed = quantised_loading(args, torch.bfloat16, torch.device("cpu"))
    base = AutoModelForCausalLM.from_pretrained(base_of(flags), dtype=torch.bfloat16, **packed)
    network = peft.PeftModel.from_pretrained(base, str(final), is_trainable=True)
    network.train()  # bitsandbytes takes no maps as small as these for inference on CPUs
    trained = network(ids).logits.float()

    def error(name: str, *words: str) -> float:
        cli.run(["merge", str(final), "--output", str(tmp_path / name), *words])
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name).float()
        return float((merged(ids).logits - trained).abs().mean())

    assert error("rounded", "--quantize", "nf4", "--dtype", "bfloat16") < 0.2 * error("whole")


def test_quantising_needs_adapters_and_bitsandbytes(flags, tmp_path, monkeypatch) -> None:
    at = flags.index("--lora_r")
    with pytest.raises(UserError, match="--quantize rounds weights.*--lora_r"):
        run([*flags[:at], *flags[at + 2 :]], tmp_path / "run", "--quantize", "nf4")
    monkeypatch.setattr("longctx.train.lora.quantise.installed", lambda name: False)
    with pytest.raises(UserError, match="needs bitsandbytes: pip install"):
        run(flags, tmp_path / "run", "--quantize", "nf4")


REFUSED: dict[str, tuple[list[str], str]] = {
    "rank": (["--lora_r", "0"], "--lora_r must be at least 1"),
    "dropout": (["--lora_dropout", "1"], "--lora_dropout must be below 1"),
    "target": (["--lora_targets", "q_pro"], "q_pro: .*did you mean q_proj or .*All: "),
    "one of targets": (["--lora_targets", "q_proj", "w1"], "--lora_targets w1: the model has no"),
    "all and one": (["--lora_targets", "all-linear", "q_proj"], "leave out the rest"),
    "head": (["--lora_targets", "lm_head"], "--lora_modules_to_save lm_head"),
    "embedding": (["--lora_targets", "embed_tokens"], "--lora_modules_to_save embed_tokens"),
    "module": (["--lora_modules_to_save", "head"], "did you mean lm_head"),
    "tied": (["--lora_modules_to_save", "lm_head"], "lm_head is its embedding"),
    "fp32": (["--save_fp32"], "--save_fp32 is of whole models"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_read(flags, tmp_path, case) -> None:
    more, says = REFUSED[case]
    with pytest.raises(UserError, match=says) as error:
        train.main([*flags, "--output_dir", str(tmp_path / "run"), *more])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "checkpoint-2").exists()


def test_a_frozen_base_that_cannot_leave_the_gpu_is_said(flags, tmp_path) -> None:
    more = ["--class_type", "vanilla", "--dtype", "bfloat16", "--place", "host"]
    with pytest.raises(UserError, match="--place host: nothing .* --class_type custom") as error:
        run(flags, tmp_path / "run", *more)
    assert "\n" not in str(error.value)


def test_without_peft(monkeypatch) -> None:
    """A run is refused before its data is read; what a plan checks needs no PEFT."""
    monkeypatch.setattr("longctx.train.lora.peft_adapters.installed", lambda name: False)
    args = ModelArguments(lora_r=2)
    check_lora(args, load_config(ModelArguments(), vocab_size=64))
    with pytest.raises(UserError, match="pip install '?peft"):
        check_request(args, torch.device("cpu"))


def test_the_size_of_an_adapter(finished, flags) -> None:
    args = ModelArguments(lora_r=4, model_name_or_path=base_of(flags), seq_len=64)
    config = load_config(args, vocab_size=1)
    held = sum(x.nbytes for x in adapter(finished("fp32") / "final").values())
    assert adapter_bytes(args, config) == held


def test_an_adapter_that_is_not_reached_is_an_error() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    reached = Reached(model)
    model[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserError, match=r"does not reach 2 of .*: 1.weight, 1.bias$"):
        reached.on_optimizer_step(model=model)


def test_the_best_adapter_becomes_final(flags, finished, tmp_path) -> None:
    begun = Path(shutil.copytree(finished("fp32"), tmp_path / "run"))
    path = begun / "checkpoint-4" / "trainer_state.json"
    told = {"best_model_checkpoint": "/gone/checkpoint-2", "best_metric": 1e-9}
    path.write_text(json.dumps(json.loads(path.read_text()) | told | {"best_global_step": 2}))
    (begun / "checkpoint-4" / "manifest.json").unlink()
    best = adapter(begun / "checkpoint-2")
    text = flags[flags.index("--train_file") + 1] + "/0.txt"
    words = ["--eval_file", text, "--eval_strategy", "steps", "--load_best_model_at_end"]
    words += ["--eval_steps", "2", "--max_steps", "6", "--resume_from_checkpoint", "last"]
    run(flags, begun, *words)
    final = adapter(begun / "final")
    assert final.keys() == best.keys() and all(torch.equal(final[n], x) for n, x in best.items())
