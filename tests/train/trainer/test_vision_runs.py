"""train.py on the text of vision-language checkpoints: towers rest, and are saved as they came."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from small_layer import batch
from small_run import prepare, run
from small_tokenizer import small_tokenizer
from small_vision import KINDS, image_batch, mllama_config, vision_config, vision_model
from transformers import AutoConfig, AutoModelForImageTextToText

from longctx.errors import UserError
from longctx.families.blocks import state_blocks
from longctx.families.classes import as_reward_model, class_of
from longctx.families.vision import at_rest, towers
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.engines.plain import Plain
from longctx.train.lora.merge import main as merge
from longctx.train.lora.peft_adapters import adapter_bytes
from longctx.train.options.config import ModelArguments
from longctx.train.plan.subject import Subject
from longctx.train.start.image_processor import check_shared_rows
from longctx.train.start.loading import load_config, load_model, weights_bytes
from longctx.train.start.options import check_towers
from longctx.train.trainer import trainer as trainer_file

VOCAB = len(small_tokenizer())
CPU = torch.device("cpu")
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("reference_kernels")]


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return prepare(tmp_path)


def save(kind: str, folder, **text) -> dict[str, torch.Tensor]:
    """Writes a vision-language checkpoint over the model in `folder`; returns its weights."""
    return written(vision_model(kind, vocab_size=VOCAB, **text), folder)


def written(model, folder) -> dict[str, torch.Tensor]:
    for old in (folder / "model").glob("*model*"):
        old.unlink()
    model.save_pretrained(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text('{"size": 16}')
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def weights(folder) -> dict[str, torch.Tensor]:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        assert torch.isfinite(model(**image_batch(model.config.model_type)).loss)
    return model.state_dict()


def is_tower(name: str, model_type: str) -> bool:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(model_type))
    return any(name.startswith(f"{path}.") for path, _ in towers(model))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_trains_and_towers_stay(kind, flags, tmp_path, monkeypatch, capsys) -> None:
    before = save(kind, tmp_path)
    trainers = []
    make = trainer_file.LongTrainer.place
    monkeypatch.setattr(
        trainer_file.LongTrainer, "place", lambda self, *a: trainers.append(self) or make(self, *a)
    )
    options = ["--max_steps", "3", "--logging_steps", "1", "--gradient_accumulation_steps", "2"]
    options += ["--dtype", "float32"]
    exact = [*options, "--optimizer_states", "fp32"]
    ours = run(flags, tmp_path / "ours", *exact, "--class_type", "custom")
    assert "Hugging Face's layers" not in capsys.readouterr().out
    model = trainers[0].model
    resting = {p for module in at_rest(model) for p in module.parameters()}
    assert resting and all(p.grad is None and not p.requires_grad for p in resting)
    assert not resting & {
        p for group in trainers[0].optimizer.param_groups for p in group["params"]
    }
    theirs = run(flags, tmp_path / "theirs", *options, "--class_type", "vanilla")
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-4 * b["loss"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-3 * b["grad_norm"]
    for folder in (tmp_path / "ours" / "final", tmp_path / "ours" / "checkpoint-2"):
        after = weights(folder)
        changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
        assert changed and not any(is_tower(name, kind) for name in changed)
        assert after.keys() == before.keys()
    assert (tmp_path / "ours" / "final" / "preprocessor_config.json").exists()
    lines = (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()
    again = run(
        flags, tmp_path / "ours", *exact, "--max_steps", "4", "--resume_from_checkpoint", "true"
    )
    assert len(again) == len([line for line in lines if "loss" in json.loads(line)]) + 1


@pytest.mark.parametrize("class_type", ["vanilla", "custom"])
def test_documents_of_our_rows_are_apart(class_type, tmp_path) -> None:
    """Qwen2.5-VL would let the documents of a packed row attend to each other."""
    prepare(tmp_path)
    save("qwen2_5_vl", tmp_path)
    args = ModelArguments(
        model_name_or_path=str(tmp_path / "model"), class_type=class_type, seq_len=64
    )
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    model = load_model(args, load_config(args, vocab_size=VOCAB), device=CPU).eval()
    inputs = batch([[20, 28]])
    positions = inputs.pop("position_ids")
    with torch.no_grad():
        found = model(**inputs, position_ids=positions).loss
        apart = plain(**inputs, position_ids=positions.expand(4, 1, 48)).loss
        joined = plain(**inputs, position_ids=positions).loss
    assert abs(found - apart) < 1e-5 < 1e-3 < abs(joined - apart)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("more", [[], ["--class_type", "vanilla", "--dtype", "float32"]])
def test_towers_stay_off_the_gpu(kind, more, flags, tmp_path, monkeypatch) -> None:
    save(kind, tmp_path)
    places = set()

    def final(self, path, card=None) -> None:
        resting = {p for module in at_rest(self.model) for p in module.parameters()}
        places.update((p in resting, p.device.type) for p in self.model.parameters())

    monkeypatch.setattr(trainer_file.LongTrainer, "save_final", final)
    flags.remove("--use_cpu")
    run(flags, tmp_path / "run", "--max_steps", "3", *more)
    assert places == {(True, "cpu"), (False, "cuda")}


def test_adapters_are_in_the_language_model_alone(flags, tmp_path) -> None:
    before = save("qwen3_vl", tmp_path)
    options = ["--max_steps", "2", "--lora_r", "4", "--logging_steps", "1", "--dtype", "float32"]
    lines = run(flags, tmp_path / "run", *options)
    assert len(lines) == 2
    final = tmp_path / "run" / "final"
    with safe_open(final / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 3 * 7
    assert all("model.language_model.layers." in name for name in names)
    args = ModelArguments(
        model_name_or_path=str(tmp_path / "model"), lora_r=4, class_type="custom", seq_len=64
    )
    config = load_config(args, vocab_size=VOCAB)
    saved = (final / "adapter_model.safetensors").stat().st_size
    assert 0 <= saved - adapter_bytes(args, config) < 8192  # the names
    merge([str(final), "--output", str(tmp_path / "merged")])
    after = weights(tmp_path / "merged")
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert len(changed) == 3 * 7 and all("language_model.layers" in name for name in changed)


def test_rope_of_a_run_is_merged(flags, tmp_path) -> None:
    """What --rope_scaling changes is in the configuration of the text."""
    save("gemma3", tmp_path)
    at = flags.index("64")
    longer = [*flags[:at], "1024", *flags[at + 1 :], "--rope_scaling", "linear"]
    run(longer, tmp_path / "run", "--max_steps", "1", "--lora_r", "4")
    merge([str(tmp_path / "run" / "final"), "--output", str(tmp_path / "merged")])
    text = AutoConfig.from_pretrained(tmp_path / "merged").get_text_config()
    assert text.max_position_embeddings == 1024
    assert text.rope_parameters["full_attention"]["factor"] == 2.0
    assert (tmp_path / "merged" / "preprocessor_config.json").exists()


def test_four_bits_are_in_the_language_model_alone(tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    prepare(tmp_path)
    save("gemma3", tmp_path)
    args = ModelArguments(
        model_name_or_path=str(tmp_path / "model"), lora_r=4, quantize="nf4", seq_len=64
    )
    config = load_config(args, vocab_size=VOCAB)
    model = load_model(args, config, device=CPU).get_base_model()
    packed = {name for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    assert len(packed) == 3 * 7 and all("language_model.layers" in name for name in packed)
    planned = Subject(config, args)
    own = {name for name, p in planned.model.named_parameters() if hasattr(p, "quant_state")}
    assert packed == own


def test_a_plan_counts_the_text_model_alone(tmp_path) -> None:
    config = vision_config("gemma3")
    args = ModelArguments(seq_len=64)
    whole, text = (Subject(c, args) for c in (config, config.get_text_config()))
    assert whole.trained == text.trained
    found = [
        [spec.sizes(accumulates=False) for spec in state_blocks(s.model, movable=True)]
        for s in (whole, text)
    ]
    assert found[0] == found[1]
    assert weights_bytes(args, config, CPU) > weights_bytes(args, text.config, CPU)


@pytest.mark.parametrize(("engine", "processes"), [(Plain(), 2), (DeepSpeed(), 1)])
def test_the_vision_tower_trains_in_one_process_without_an_engine(engine, processes) -> None:
    of_towers, args = vision_config("qwen3_vl"), ModelArguments(seq_len=64)
    trains = replace(args, train_vision=True)
    check_towers(args, of_towers, engine, processes)
    check_towers(trains, of_towers.get_text_config(), engine, processes)
    check_towers(trains, of_towers, Plain(), 1)
    with pytest.raises(UserError, match="--train_vision is for one process without an engine"):
        check_towers(trains, of_towers, engine, processes)


def test_a_model_that_sees_images_gives_no_rewards() -> None:
    with pytest.raises(UserError, match="'gemma3' see images, and --task reward trains language"):
        as_reward_model(vision_config("gemma3"))


def test_rows_with_images_that_processes_cannot_share(monkeypatch) -> None:
    def asked(ranks: int, kind: str, scores: bool) -> None:
        args = SimpleNamespace(sequence_parallel_size=ranks, task="dpo")
        check_shared_rows(args, SimpleNamespace(scores=scores), vision_config(kind))

    for ranks, kind, scores in ((1, "gemma3", True), (2, "qwen3_vl", False)):
        asked(ranks, kind, scores)
    with pytest.raises(UserError, match="2 with rows whose prompts of --task dpo have images"):
        asked(2, "qwen3_vl", True)
    with pytest.raises(UserError, match="images are seen both ways: leave it out"):
        asked(2, "gemma3", False)
    monkeypatch.setattr("longctx.families.vision.BOTH_WAYS", {"qwen3_vl"})  # as another family's
    asked(2, "gemma3", False)
    with pytest.raises(UserError, match="images are seen both ways: leave it out"):
        asked(2, "qwen3_vl", False)


def test_an_unknown_language_model_is_refused_by_name(tmp_path) -> None:
    prepare(tmp_path)
    config = vision_config("llava").to_dict()
    config["text_config"] = {"model_type": "opt"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    args = ModelArguments(
        model_name_or_path=str(tmp_path / "model"), class_type="custom", seq_len=64
    )
    with pytest.raises(UserError, match="no family for 'llava' around 'opt'. Any model"):
        load_config(args, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("kind", "named", "read_as"),
    [
        ("mllama", "MllamaForConditionalGeneration", "MllamaForConditionalGeneration"),
        ("mllama", "MllamaForCausalLM", "MllamaForCausalLM"),
        ("llava_next", "LlavaNextForConditionalGeneration", "LlavaNextForConditionalGeneration"),
        ("qwen4_exp", "Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"),
        ("gemma3n", "Gemma3nForConditionalGeneration", "Gemma3nForConditionalGeneration"),
    ],
)
def test_the_class_that_reads_all_of_a_checkpoint(kind, named, read_as) -> None:
    """Those that transformers' causal classes can read train under engines as before."""
    config = AutoConfig.for_model(kind, architectures=[named])
    assert class_of(config).__name__ == read_as
    if kind in ("qwen3_5", "qwen4_exp", "gemma3n"):
        check_towers(ModelArguments(seq_len=64), config, Plain(), 2)


def test_llama_3_2_vision_trains_unpatched_and_is_refused_by_name(flags, tmp_path) -> None:
    """Its tower and its layers for images have no gradient, and are saved as they came."""
    before = written(
        AutoModelForImageTextToText.from_config(mllama_config(vocab_size=VOCAB)), tmp_path
    )
    args = ModelArguments(model_name_or_path=str(tmp_path / "model"), seq_len=64)
    with pytest.raises(UserError, match="for 'mllama' around 'mllama_text_model': its layers of"):
        load_config(args, vocab_size=VOCAB)
    config = load_config(replace(args, class_type="vanilla"), vocab_size=VOCAB)
    with pytest.raises(UserError, match="'mllama' train in one process"):
        check_towers(args, config, Plain(), 2)
    run(flags, tmp_path / "run", "--max_steps", "2", "--class_type", "vanilla")
    final = tmp_path / "run" / "final"
    after = AutoModelForImageTextToText.from_pretrained(final).state_dict()
    assert after.keys() == before.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    text = "model.language_model"
    assert {f"{text}.layers.0.mlp.up_proj.weight", f"{text}.norm.weight"} < changed
    assert not any("vision" in name or "layers.1" in name for name in changed)
    assert (final / "preprocessor_config.json").exists()
