"""`longctx train` on a saved model with mixers: exact states wherever they live, and resumed, as of
a model with experts. transformers converts the weights of both as it reads and writes them."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_families import family_config
from small_run import prepare, run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.errors import UserError

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("reference_kernels")]


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory) -> Any:
    """Flags that train a model of a family, made once."""

    def made(family: str) -> list[str]:
        folder = tmp_path_factory.mktemp(family)
        flags = prepare(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        ends = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        config = family_config(family, hidden_size=64, intermediate_size=96, **ends)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        return [*flags, "--dtype", "bfloat16", "--max_steps", "4"]

    return cache(made)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h", "falcon_h1", "mixtral"])
def test_states_on_the_host_and_a_resumed_run_end_with_the_same_bits(
    family, flags_of, tmp_path, capsys
) -> None:
    flags = flags_of(family)
    logged = run(flags, tmp_path / "run")
    out = capsys.readouterr().out
    assert "3 scheduled decoder layers" in out and "Hugging Face's layers" not in out
    assert logged[-1]["loss"] < logged[0]["loss"]
    truth = weights(tmp_path / "run")
    run(flags, tmp_path / "hosted", "--place", "host", "--keep", "x")
    begun = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    run(flags, begun, "--resume_from_checkpoint", str(begun / "checkpoint-2"))
    for found in (weights(tmp_path / "hosted"), weights(begun)):
        assert all(torch.equal(found[name], x) for name, x in truth.items())
    final, last = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name).state_dict()
        for name in ("final", "checkpoint-4")
    )
    assert all(torch.equal(final[name], x) for name, x in last.items())


@pytest.mark.parametrize("family", ["olmo_hybrid", "nemotron_h", "falcon_h1"])
def test_adapters_on_all_maps(family, flags_of, tmp_path, capsys) -> None:
    """All but those that PEFT refuses in mixers: that is said, and asking for one is an error."""
    flags = [*flags_of(family), "--lora_r", "4"]
    logged = run(flags, tmp_path / "run")
    out = capsys.readouterr().out
    assert "3 scheduled decoder layers" in out and logged[-1]["loss"] < logged[0]["loss"]
    saved = load_file(tmp_path / "run/final/adapter_model.safetensors")
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in saved}
    assert {"q_proj", "o_proj"} <= adapted and "out_proj" not in adapted
    refused = family != "olmo_hybrid"
    assert ("out_proj of mixers has none, which PEFT refuses" in out) == refused
    if refused:
        with pytest.raises(UserError, match="PEFT refuses it in models of type"):
            run([*flags, "--lora_targets", "q_proj", "out_proj"], tmp_path / "other")
