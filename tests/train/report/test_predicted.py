"""What train.py foresees: shown, refused, compared; and runs of a given plan. The GPU is a fake."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from small_run import add_callback, prepare, run
from transformers import TrainerCallback

from longctx.constants import GIB
from longctx.cost.kept import in_order
from longctx.cost.machines import MACHINES
from longctx.errors import UserError
from longctx.memory.place import KINDS
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.engines.plain import Plain
from longctx.train.options.config import ModelArguments
from longctx.train.output import METRICS
from longctx.train.plan.predict import Plan, plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.report import predicted
from longctx.train.report.plan import main as plan_command
from longctx.train.report.predicted import (
    compare,
    document_tokens,
    equal_tokens,
    foresee,
    lines,
    measure,
)
from longctx.train.start.loading import load_config

pytestmark = pytest.mark.usefixtures("reference_kernels")
GPU = torch.device("cuda", 0)
OPTIONS = dict(
    plan=None,
    world_size=1,
    process_index=0,
    place="auto",
    gpu_memory_gib=None,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=1,
    task="sft",
    gradient_checkpointing=True,
    optimizer_states=None,
    save_fp32=False,
    optim="adamw_torch",
    optim_args=None,
    fp16=False,
    max_steps=-1,
    num_train_epochs=2.0,
    sequence_parallel_size=1,
    bf16=False,
)


def arguments(**options) -> SimpleNamespace:
    return SimpleNamespace(**{**OPTIONS, "device": GPU, **options})


def zero(**settings) -> DeepSpeed:
    engine = DeepSpeed()
    engine.settings = {"zero_optimization": settings}
    return engine


def model(**options) -> ModelArguments:
    return ModelArguments(**{"preset": "llama-3.2-1b", "seq_len": 32768, **options})


def foreseen(machine, args=None, engine=None, **options):
    asked = model(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicted, "known_machine", lambda: machine)
        patch.setattr(predicted, "host_share_bytes", lambda: 64 * GIB)
        config = load_config(asked, vocab_size=1)
        return foresee(asked, args or arguments(), config, engine or Plain())


def rows_of(*documents: int, rows: int = 40) -> Dataset:
    positions = [p for length in documents for p in range(length)]
    return Dataset.from_dict({"position_ids": rows * [positions]})


def unbroken(said: str) -> str:
    return " ".join(said.split())


def test_the_table_has_the_documents_and_the_data(capsys) -> None:
    found = foreseen(MACHINES["h100"])
    whole = found.planned.seconds.attention
    found.show(rows_of(*8 * [4096]))
    assert found.planned.seconds.attention == pytest.approx(whole / 8)
    said = capsys.readouterr().out
    for word in ("fits", "yes", "GPU memory", "host memory", "a step", "tokens/s"):
        assert word in said
    days = 2 * 40 * 32768 / found.planned.tokens_per_s / 86400
    assert f"{days:.3g} for 2.62e+06 tokens" in said


def test_engines_and_several_processes_are_foreseen(capsys) -> None:
    """Bytes are of one process; tokens are of all."""
    alone = foreseen(MACHINES["h100"]).planned
    zero3 = foreseen(MACHINES["h100"], arguments(world_size=2, bf16=True), zero(stage=3)).planned
    both = foreseen(MACHINES["h100"], arguments(world_size=2)).planned
    assert zero3.step_tokens == both.step_tokens == 2 * alone.step_tokens
    assert zero3.run.engine.name == "ZeRO-3" and both.run.engine is None
    assert zero3.rank_host_bytes * 2 == zero3.host_bytes
    assert capsys.readouterr().out == ""


def test_nothing_is_foreseen_without_a_gpu(capsys) -> None:
    assert foreseen(None, arguments(device=torch.device("cpu"))) is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ({"engine": zero(stage=0)}, {}, "--deepspeed: ZeRO stage 0 is not known to the plan"),
        (
            {"args": arguments(world_size=2, optimizer_states="as_weights")},
            {},
            "the plan knows several GPUs without an engine with exact states",
        ),
        (
            {},
            {"class_type": "liger"},
            "only --class_type custom and any are; `longctx plan` knows liger",
        ),
        ({}, {"dtype": "float32"}, "only runs in bfloat16 are"),
        ({}, {"attn_backend": "math"}, "--attn_backend math was not measured on this GPU"),
        ({"machine": None}, {}, "the rates of this GPU are not known; `longctx doctor` measures"),
    ],
)
def test_why_nothing_is_foreseen_is_said(capsys, args, options, says) -> None:
    assert foreseen(**{"machine": MACHINES["h100"], **args}, **options) is None
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"nothing is predicted: {says}" in said


def test_any_model_is_foreseen_by_its_measured_layers(monkeypatch, capsys) -> None:
    """Whatever attention it has: a layer was measured with it. A CPU stands for the GPU here."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        predicted, "Subject", lambda config, args, _, **kw: Subject(config, args, cpu, **kw)
    )
    options = dict(preset="tiny", seq_len=256, class_type="any", attn_backend="eager")
    found = foreseen(MACHINES["h100"], **options)
    assert found.planned.seconds.layers > 0 and found.planned.unknown is None
    found.show(rows_of(256))
    assert "memory, not speed; a layer of each kind was run" in unbroken(capsys.readouterr().out)
    assert found.planned.backend == "eager, the model's own"

    def refuse(*_: object, **__: object) -> None:
        raise UserError("transformers has no class for models of type 'x'")

    monkeypatch.setattr(predicted, "Subject", refuse)  # it may be code of the model's own
    assert foreseen(MACHINES["h100"], **options) is None
    assert "nothing is predicted: transformers has no class" in capsys.readouterr().out


def test_what_cannot_fit_is_refused_with_what_would_fit(monkeypatch) -> None:
    with pytest.raises(UserError) as error:
        foreseen(MACHINES["rtx-4090"], seq_len=131072, keep="all", offload_activations="none")
    said = str(error.value)
    assert re.match(r"this run does not fit: GPU memory is short by [\d.]+ GiB: ", said)
    assert "; it fits with --" in said and "s a step)" in said and "\n" not in said
    monkeypatch.setattr(predicted, "changes", lambda *_, **__: [])
    with pytest.raises(UserError, match="no flag makes it fit"):
        foreseen(replace(MACHINES["rtx-4090"], gpu_gib=1.0))


def test_documents_of_one_length_whose_attention_costs_as_much() -> None:
    assert equal_tokens(np.arange(100)) == 100
    assert document_tokens(rows_of(64, 64)) == 64
    assert document_tokens(rows_of(96, 32)) == (96**2 + 32**2) / 128
    assert document_tokens(iter([])) is None


# --- predicted beside measured ---------------------------------------------------------------


def planned(tokens: int = 32768) -> Plan:
    asked = model(seq_len=tokens)
    subject = Subject(load_config(asked, vocab_size=1))
    return plan(subject, PlannedRun(model=asked), MACHINES["h100"], 64 * GIB)


def said_of(found: Plan, as_planned: bool = True, **times: float) -> list[str]:
    measured = {
        "gpu_gib": found.gpu_bytes / GIB * times.get("gpu", 1),
        "host_gib": found.host_bytes / GIB * times.get("host", 1),
        "step_s": found.seconds.step * times.get("step", 1),
    }
    return lines(compare(found, measured, as_planned))


def test_what_is_off_is_said_with_its_part() -> None:
    found = planned()
    assert len(said_of(found, gpu=1.04, step=0.97)) == 1
    assert "GPU" in said_of(found)[0] and "(+0.0%)" in said_of(found)[0]
    slow = said_of(found, step=1.2)
    assert len(slow) == 2
    assert slow[1].startswith("a step: the plan is off by 17%: most of it was planned for")
    assert "the peak was planned in " in said_of(found, gpu=0.5)[1]
    assert len(said_of(found, host=1.3)) == 1, "less than 1 GiB"
    assert "the process itself had 4.2 instead of 1.4" in said_of(found, host=3)[1]
    assert "other free memory" in said_of(found, as_planned=False, gpu=2)[1]
    guessed = replace(found, machine=replace(found.machine, measured=False))
    assert "no rate of this card was measured" in said_of(guessed, step=1.2)[1]


def test_the_first_logged_step_compiles(monkeypatch) -> None:
    log = [{"step": i, "step_s": float(i)} for i in range(1, 8)]
    trainer = SimpleNamespace(args=arguments(), state=SimpleNamespace(log_history=log))
    assert measure(trainer, 0)["step_s"] == 4.5  # of 2 to 7
    assert measure(trainer, 4)["step_s"] == 6.5  # 5 was the first of the resumed run
    assert "step_s" not in measure(trainer, 6)


@pytest.mark.parametrize("more", [[], ["--lora_r", "4"]], ids=["whole", "lora"])
def test_a_run_from_its_prediction_to_the_comparison(tmp_path, monkeypatch, capsys, more) -> None:
    monkeypatch.setattr(predicted, "DEVICE", "cpu")
    monkeypatch.setattr(predicted, "known_machine", lambda: MACHINES["h100"])
    flags = [*prepare(tmp_path), "--dtype", "bfloat16", "--max_steps", "3", *more]
    run(flags, tmp_path / "run")
    said = capsys.readouterr().out
    assert ("fp32 adapters over frozen weights" in said) == bool(more)
    assert "a step  " in said and said.count("predicted and measured: host") == 1
    last = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    found = next(line for line in last if "predicted_step_s" in line)
    assert found["measured_step_s"] > 0 and found["predicted_host_gib"] >= 1.4


# --- --plan ----------------------------------------------------------------------------------


class Places(TrainerCallback):
    """What a run has placed where when it begins."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self.places = [block.place for block in inner.stream.blocks]
        self.ladder = model.longctx.store.ladder if hasattr(model, "longctx") else ()


CUSTOM = ["--place", "host", "--offload_activations", "all", "--keep", "qkv"]


@pytest.fixture
def written(tmp_path, capsys, request):
    """The flags of a small run, and a plan of it with everything on the host."""
    flags = [*prepare(tmp_path), "--dtype", "bfloat16", "--max_steps", "2"]
    flags += getattr(request, "param", CUSTOM)
    capsys.readouterr()  # saving the model imports DeepSpeed, which may say so
    plan_command([*flags, "--gpu", "rtx-4090", "--host_memory_gib", "16", "--json"])
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    return flags, path


@pytest.mark.parametrize(
    "written", [CUSTOM, ["--class_type", "vanilla", "--place", "host"]], indirect=True, ids=str
)
def test_a_given_plan_is_run(tmp_path, monkeypatch, written) -> None:
    flags, path = written
    callback = Places()
    add_callback(callback, monkeypatch)
    free = run(flags, tmp_path / "free")
    given = run([*flags, "--plan", str(path)], tmp_path / "given")
    plan_of = json.loads(path.read_text())["plan"]
    on_gpu = [[kind for kind in KINDS if getattr(p, kind)] for p in callback.places]
    assert on_gpu == plan_of["blocks_on_gpu"]
    kept = [[in_order(k.kept), in_order(k.hosted)] for k in callback.ladder]
    stored = "vanilla" not in flags  # whose layers keep their inputs in nobody's store
    assert kept == (plan_of["layers"] if stored else [])
    assert [line["loss"] for line in given] == [line["loss"] for line in free]


def test_a_given_plan_whose_layers_keep_no_input(tmp_path, monkeypatch, written, capsys) -> None:
    """But for the first: the losses, and the weights that wait on the host, are the same."""
    flags, path = written
    planned, flags = json.loads(path.read_text()), [*flags[:-1], "auto"]
    planned["plan"]["run"]["keep"] = "auto"
    layers = planned["plan"]["layers"]
    planned["plan"]["layers"] = [[["x"], ["x"]], *[[[], []] for _ in layers[1:]]]
    path.write_text(json.dumps(planned))
    callback = Places()
    add_callback(callback, monkeypatch)
    free = run(flags, tmp_path / "free")
    capsys.readouterr()
    given = run([*flags, "--plan", str(path)], tmp_path / "given")
    assert f"x, one layer in {len(layers)}" in capsys.readouterr().out
    assert [bool(keep.kept) for keep in callback.ladder] == [True, *(len(layers) - 1) * [False]]
    assert [line["loss"] for line in given] == [line["loss"] for line in free]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--seq_len", "128"], "--seq_len 64, and this one has --seq_len 128"),
        (["--dtype", "float32"], "a run with exact states in bfloat16: add --dtype bfloat16"),
        (["--lora_r", "4"], "of a run with no --lora_r, and this one has --lora_r"),
        (["--plan", "nowhere.json"], "--plan: cannot read nowhere.json"),
    ],
)
def test_a_plan_of_another_run_is_refused(tmp_path, written, more, says) -> None:
    flags, path = written
    with pytest.raises(UserError, match=says):
        run([*flags, "--plan", str(path), *more], tmp_path / "run")
    assert not (tmp_path / "run" / METRICS).exists()


def test_a_plan_of_fewer_images_than_a_row_has(tmp_path, monkeypatch, capsys) -> None:
    """It is run, and a line says so: only the data say how many there are."""
    small = pytest.importorskip("small_images")
    monkeypatch.setattr(predicted, "DEVICE", "cpu")
    monkeypatch.setattr(predicted, "known_machine", lambda: MACHINES["h100"])
    flags = ["--model_name_or_path", str(small.image_model(tmp_path / "model", "qwen3_vl"))]
    flags += ["--train_file", str(small.write(tmp_path, small.about_colours(3)))]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--seq_len", "256", "--dtype", "bfloat16"]
    flags += ["--use_cpu", "--max_steps", "1", "--disable_tqdm", "true"]
    flags += ["--dataloader_num_workers", "0", "--place", "host"]
    capsys.readouterr()
    images = ["--images", "2", "--image_pixels", "16x16", "--gpu", "rtx-4090"]
    plan_command([*flags, *images, "--host_memory_gib", "16", "--json"])
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    run([*flags, "--plan", str(path)], tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "rows with 2 images of 16 x 16, 8 tokens, and one here has 18 tokens of images" in said
    assert (tmp_path / "run" / "final").exists()


@pytest.mark.gpu
def test_on_a_gpu_a_run_says_what_was_predicted(tmp_path, capsys) -> None:
    predicted_on = [word for word in prepare(tmp_path) if word != "--use_cpu"]
    run([*predicted_on, "--max_steps", "3"], tmp_path / "run")
    said = capsys.readouterr().out
    assert "predicted and measured: GPU" in said or "nothing is predicted: the rates" in said
