"""A step that is not finite is stopped or skipped before it reaches the weights, and explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import add_callback, prepare, run
from torch import nn
from transformers import TrainerCallback

from longctx.errors import UserError
from longctx.train.data.pack.batches import collate
from longctx.train.output import METRICS
from longctx.train.trainer import nonfinite
from longctx.train.trainer.nonfinite import first_nonfinite

pytestmark = pytest.mark.usefixtures("reference_kernels")
MARK = "\N{SNOWMAN}"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("small")
    flags = prepare(folder)
    (folder / "data" / "bad.txt").write_text("The brown fox. " * 3 + MARK)
    return [*flags, "--max_steps", "40", "--save_strategy", "no", "--seq_len", "128"]


class Breaks(TrainerCallback):
    """Layer 1 gives infinity wherever the marked document's last bytes are."""

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        ids = processing_class(MARK, add_special_tokens=False)["input_ids"]
        embedding = model.get_input_embeddings()
        seen: dict[str, torch.Tensor] = {}
        embedding.register_forward_hook(lambda m, given, out: seen.update(ids=given[0]))

        def hook(module: nn.Module, given, output):
            marked = (seen["ids"] == ids[-1]).reshape(output.shape[:-1])
            return torch.where(marked[..., None], torch.inf, output)

        model.model.layers[1].register_forward_hook(hook)


@pytest.mark.parametrize(("class_type", "rows"), [("custom", 1), ("custom", 3), ("vanilla", 1)])
def test_it_stops_and_names_step_layer_token_and_document(
    flags, monkeypatch, tmp_path, class_type, rows
) -> None:
    add_callback(Breaks(), monkeypatch)
    with pytest.raises(UserError) as error:
        words = f"--class_type {class_type} --per_device_train_batch_size {rows}"
        run(flags, tmp_path / "run", *words.split())
    step = json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[-1])["step"] + 1
    message = str(error.value)
    assert message.startswith(
        f"step {step} is not finite: first in the output of model.layers.1, at token "
    )
    assert "data/bad.txt; look at the data" in message and "\n" not in message


def test_a_skipped_step_leaves_no_trace(flags, monkeypatch, tmp_path, capsys) -> None:
    add_callback(Breaks(), monkeypatch)
    lines = run(flags, tmp_path / "run", "--on_nonfinite", "skip", "--num_train_epochs", "1")
    out = capsys.readouterr().out
    assert "bad.txt; skipped" in out and "model.layers.1" in out
    assert all(torch.isfinite(w).all() for w in load_file(final(tmp_path / "run")).values())
    skipped = [
        line
        for line in map(json.loads, (tmp_path / "run" / METRICS).read_text().splitlines())
        if line.get("skipped_steps")
    ]
    assert len(skipped) == out.count("; skipped") >= 1
    assert len(lines) + len(skipped) == 40 and not any("loss" in line for line in skipped)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


def final(folder: Path) -> Path:
    return folder / "final" / "model.safetensors"


def test_skipping_without_end_is_an_error(flags, monkeypatch, tmp_path) -> None:
    class Always(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
            model.model.norm.weight.data.fill_(torch.nan)

    add_callback(Always(), monkeypatch)
    with pytest.raises(UserError, match="the weight model.norm.weight was broken.*the 9 steps"):
        run(flags, tmp_path / "run", "--on_nonfinite", "skip")


def test_a_broken_gradient_names_its_parameter_and_the_rows(flags, monkeypatch, tmp_path) -> None:
    class Gradient(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
            for i in (0, 1):
                weight = model.model.layers[i].mlp.up_proj.weight
                weight.register_hook(lambda grad: grad * torch.inf)

    add_callback(Gradient(), monkeypatch)
    with pytest.raises(UserError) as error:
        run(flags, tmp_path / "run", "--gradient_accumulation_steps", "2")
    message = str(error.value)
    assert "step 1 is not finite: first in the gradient of model.layers.1.mlp.up_proj" in message
    assert "in the row of" in message and "data/" in message


def test_a_finite_step_costs_no_forward_and_no_hook(flags, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(nonfinite, "explain", None)
    hooks = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
            found = [h for m in model.modules() for h in m._forward_hooks.values()]
            hooks.extend(h for h in found if h.__module__ == "longctx.train.trainer.nonfinite")

    add_callback(Look(), monkeypatch)
    run([*flags, "--max_steps", "3"], tmp_path / "run")
    assert hooks == []


def test_only_the_loss(monkeypatch) -> None:
    class Model(nn.Module):
        def forward(self, input_ids, **kwargs):
            return type("Output", (), {"loss": torch.tensor(torch.nan)})

    row = {name: [0, 1] for name in ("input_ids", "labels", "position_ids", "documents")}
    assert first_nonfinite(Model(), collate([row])) == ("the loss", None)


class Overshoots(TrainerCallback):
    """The update of step `step` itself makes a weight infinite: its loss and gradient were fine."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step + 1 == self.step:
            model.model.norm.weight.data[3] = torch.inf


@pytest.mark.parametrize(("step", "saved"), [(4, ["checkpoint-2"]), (3, ["checkpoint-2"])])
def test_the_last_update_is_checked_and_no_broken_weight_saved(
    flags, monkeypatch, tmp_path, step, saved
) -> None:
    """By the save after it, or by the end of the run."""
    add_callback(Overshoots(step), monkeypatch)
    text = f"step {step} broke the weight model.norm.weight: it is not finite after the update"
    with pytest.raises(UserError, match=text):
        words = ["--max_steps", str(step), "--save_strategy", "steps", "--save_steps", "2"]
        run(flags, tmp_path / "run", *words)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == saved
    assert not (tmp_path / "run" / "final").exists()


class BreaksAtMark(TrainerCallback):
    """A layer of the language model gives infinity where the marked document's last bytes are."""

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        ids = processing_class(MARK, add_special_tokens=False)["input_ids"]
        seen: dict[str, torch.Tensor] = {}
        base = model.model
        base.register_forward_pre_hook(
            lambda m, args, given: seen.update(ids=given["input_ids"]), with_kwargs=True
        )

        def hook(module: nn.Module, given, output):
            marked = (seen["ids"] == ids[-1]).reshape(output.shape[:-1])
            return torch.where(marked[..., None], torch.inf, output)

        base.language_model.layers[1].register_forward_hook(hook)


class BreaksTower(TrainerCallback):
    """Patches of images become infinite."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        embed = model.model.visual.patch_embed
        embed.register_forward_hook(lambda module, given, output: output * torch.inf)


@pytest.fixture
def image_flags(tmp_path) -> list[str]:
    small = pytest.importorskip("small_images")
    model = small.image_model(tmp_path / "model", "qwen3_vl")
    records = [*small.about_colours(4), small.asked("red.png", "blue.png", answer=MARK)]
    flags = ["--model_name_or_path", str(model), "--seq_len", "160", "--use_cpu"]
    flags += ["--train_file", str(small.write(tmp_path, records)), "--dtype", "float32"]
    return [*flags, "--cache_dir", str(tmp_path / "cache"), "--save_strategy", "no"]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_with_images_names_its_documents(rows, image_flags, monkeypatch, tmp_path) -> None:
    """Rows of such a batch cannot be run by themselves: those of two name all their documents."""
    add_callback(BreaksAtMark(), monkeypatch)
    with pytest.raises(UserError) as error:
        run(image_flags, tmp_path / "run", "--per_device_train_batch_size", str(rows))
    message = str(error.value)
    assert "first in the output of model.language_model.layers.1, " in message
    at = "at token " if rows == 1 else "in the row of "
    assert at in message and "pictures.jsonl:5" in message and "\n" not in message
    assert ("pictures.jsonl:2" in message) == (rows == 2)


def test_what_sees_is_named_with_its_row(image_flags, monkeypatch, tmp_path) -> None:
    add_callback(BreaksTower(), monkeypatch)
    with pytest.raises(UserError) as error:
        run(image_flags, tmp_path / "run", "--seq_len", "96")
    assert "first in the output of model.visual.patch_embed, in the row of " in str(error.value)


def test_patches_are_no_tokens() -> None:
    """Also where an image has as many patches as its row has tokens."""
    small = pytest.importorskip("small_vision")
    model = small.vision_model("gemma3")
    batch = small.image_batch("gemma3", tokens=16)
    layer = next(m for n, m in model.named_modules() if n.endswith("vision_tower.encoder.layers.1"))
    layer.register_forward_hook(lambda module, given, out: out * torch.inf)
    name, token = first_nonfinite(model, batch)
    assert name.endswith("vision_tower.encoder.layers.1") and token is None
