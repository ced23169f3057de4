"""Runs over bases in MXFP4 and FP8: the losses and adapters of runs over the dense weights of the
same values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_packed import saved_in_mxfp4
from small_run import logged, prepare, run

from longctx.errors import UserError
from longctx.train import cli
from longctx.train.loading import quantised
from profiling.packed_folder import in_fp8

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("plain_kernels")
LORA = ["--lora_r", "4", "--max_steps", "4", "--learning_rate", "0.02"]


@pytest.fixture(scope="module")
def flags_over(tmp_path_factory) -> Any:
    """The flags of a run over a base in a format."""
    made: dict[str, list[str]] = {}

    def flags_over(form: str) -> list[str]:
        if form not in made:
            made[form] = [*prepare(tmp_path_factory.mktemp(form)), *LORA]
            folder = base_of(made[form])
            if form == "FP8":
                in_fp8(folder, block=(8, 16))
            else:
                written = json.loads((folder / "config.json").read_text())
                names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
                sizes = {name: written[name] for name in names}
                saved_in_mxfp4(folder, intermediate_size=96, **sizes)
        return made[form]

    return flags_over


def base_of(flags: list[str]) -> Path:
    return Path(flags[flags.index("--model_name_or_path") + 1])


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


PAIRS = ["--task", "dpo", "--seq_len", "256", "--train_file", "pairs.jsonl"]


def write_pairs() -> None:
    """Writes what PAIRS names into the working directory."""
    pairs = [
        {"prompt": f"Question {i}? " * 5, "chosen": f"Yes, {i}. " * 6, "rejected": "No. " * i}
        for i in range(1, 13)
    ]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


ATTENTION = ["--lora_targets", "q_proj", "v_proj"]
RUNS = {
    "FP8": ("FP8", []),
    "FP8, on the host": ("FP8", ["--place", "host"]),
    "FP8, DoRA": ("FP8", ["--use_dora", "true"]),
    "MXFP4": ("MXFP4", []),
    "MXFP4, on the host": ("MXFP4", ["--place", "host"]),
    "FP8, pairs": ("FP8", PAIRS),
    "MXFP4, pairs": ("MXFP4", [*PAIRS, "--place", "host"]),
    "MXFP4, attention": ("MXFP4", [*ATTENTION, "--gradient_accumulation_steps", "2"]),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_learns_what_one_over_dense_weights_does(
    case, flags_over, tmp_path, monkeypatch, capsys
) -> None:
    form, more = RUNS[case]
    monkeypatch.chdir(tmp_path)
    write_pairs()
    flags, found = flags_over(form), []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(quantised, "stays_packed", lambda source, config: False)
        folder = tmp_path / str(keeps)
        losses = [line["loss"] for line in run(flags, folder, *more)]
        said = capsys.readouterr().out
        assert (f" over {form}" in said) == keeps and "Hugging Face's layers run" not in said
        assert (f"is in {form}: " in said) and ("made dense" in said) != keeps
        found.append((losses, adapter(folder / "final"), adapter(folder / "checkpoint-2")))
    # Dense experts that were packed lie transposed, so that sums of matmuls have another order.
    near = dict(rtol=1e-3, atol=1e-4) if form == "MXFP4" else dict(rtol=0, atol=0)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **near)
    assert found[0][0][-1] < found[0][0][0]


@pytest.mark.parametrize("form", ["FP8", "MXFP4"])
def test_it_is_resumed_reported_and_merged(form, flags_over, tmp_path) -> None:
    """The merged model is in 16 bits, whatever was trained over."""
    flags, whole = flags_over(form), tmp_path / "whole"
    losses = [line["loss"] for line in run(flags, whole, "--dtype", "bfloat16")]
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    for folder in ("final", "checkpoint-4"):
        shutil.rmtree(half / folder)
    run(flags, half, "--dtype", "bfloat16", "--resume_from_checkpoint", "true")
    assert [line["loss"] for line in logged(half)][-2:] == losses[-2:]
    ours, theirs = adapter(whole / "final"), adapter(half / "final")
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    card = (whole / "final" / "README.md").read_text()
    assert f"LoRA, rank 4, alpha 8, over {form}" in card
    assert json.loads((whole / "run.json").read_text())["model"]["packed"] == form
    merged = tmp_path / "merged"
    cli.run(["merge", str(whole / "final"), "--output", str(merged)])
    saved = load_file(merged / "model.safetensors")
    assert not any("scale" in n or x.element_size() < 2 for n, x in saved.items())
    assert "quantization_config" not in (merged / "config.json").read_text()


OTHERS = {
    "a teacher": ["--task", "distill", "--teacher"],
    "a reference": [*PAIRS, "--reference"],
}


@pytest.mark.parametrize("form", ["FP8", "MXFP4"])
@pytest.mark.parametrize("case", OTHERS)
def test_models_that_do_not_train_stay_packed(
    case, form, flags_over, tmp_path, monkeypatch, capsys
) -> None:
    """A student over 16 bits learns what it does beside the dense one."""
    flags, other = prepare(tmp_path / "student"), str(base_of(flags_over(form)))
    monkeypatch.chdir(tmp_path)
    write_pairs()
    words, found = [*flags, "--max_steps", "3", *OTHERS[case], other], []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(quantised, "stays_packed", lambda source, config: False)
        more = ["--cache_dir", str(tmp_path / f"cache {keeps}")]
        found.append([line["loss"] for line in run(words, tmp_path / str(keeps), *more)])
        said = capsys.readouterr().out
        assert (f"is in {form}: " in said) and ("made dense" in said) != keeps
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_weight_that_is_no_number_is_named(flags_over, tmp_path) -> None:
    """A code of FP8 that is NaN: files are read without looking at each weight."""
    flags = flags_over("FP8")
    folder = tmp_path / "model"
    shutil.copytree(base_of(flags), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 4] = 127
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    flags = [str(folder) if word == str(base_of(flags)) else word for word in flags]
    with pytest.raises(
        UserError, match=r"layers.1.mlp.up_proj.* is not finite in the model's files"
    ):
        run(flags, tmp_path / "run")
