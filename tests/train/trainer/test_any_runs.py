"""`longctx train --class_type any`: as vanilla trains, with exact states anywhere, adapters, resume
and the lines that say what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_any import make
from small_run import prepare, run
from small_tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM

from longctx.any_model import probe
from longctx.errors import UserError
from longctx.train.commands import train

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("reference_kernels")]

STEPS = ["--max_steps", "3", "--logging_steps", "1", "--lr_scheduler_type", "constant"]
DROPOUTS = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)


def flags_of(folder: Path, family: str, **more: object) -> list[str]:
    """Flags of a run of a tiny model of a family."""
    flags = prepare(folder)
    for old in (folder / "model").glob("*model*"):
        old.unlink()
    tokenizer = small_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    sizes = dict(n_positions=256, max_position_embeddings=256, vocab_size=len(tokenizer))
    model = make(family, **sizes, **ids, bos_token_id=tokenizer.bos_token_id, **DROPOUTS, **more)
    model.save_pretrained(folder / "model")
    return [*flags, *STEPS]


def losses(flags: list[str], output: Path, *more: str) -> list[float]:
    return [line["loss"] for line in run(flags, output, *more)]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt2", "--place host --dtype float32 --offload_activations all"),
        ("gpt2", "--dtype float32 --lora_r 4 --gradient_accumulation_steps 2"),
        ("falcon_h1", "--place host --dtype float32 --per_device_train_batch_size 2"),
        ("deepseek_v3", "--dtype float32 --optimizer_states as_weights"),
    ],
)
def test_it_trains_as_vanilla_does(family, more, tmp_path, capsys) -> None:
    flags = [*flags_of(tmp_path, family), *more.split()]
    place = ["--place", "auto", "--offload_activations", "auto"]
    expected = losses(flags, tmp_path / "vanilla", "--class_type", "vanilla", *place)
    capsys.readouterr()
    found = losses(flags, tmp_path / "any", "--class_type", "any")
    said = capsys.readouterr().out
    assert found == pytest.approx(expected, rel=2e-5)
    assert "3 checkpointed layers of Hugging Face's" in said and "kept for backward: " in said
    assert ("each row holds one document" in said) == (family == "falcon_h1")
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()]
    if "--lora_r" not in flags:
        both = (tmp_path / name / "final" for name in ("vanilla", "any"))
        weights += [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in both]
        start, theirs, ours = weights
        moved = sum(float((theirs[n] - x).norm()) ** 2 for n, x in start.items()) ** 0.5
        apart = sum(float((theirs[n] - x).norm()) ** 2 for n, x in ours.items()) ** 0.5
        assert 0 < moved and apart < 0.02 * moved


def test_states_of_all_layers_wait_on_the_host(tmp_path, capsys) -> None:
    """GPT-2's layers are called `h`."""
    flags = flags_of(tmp_path, "gpt2")
    losses(flags, tmp_path / "any", "--class_type", "any", "--place", "host", "--dtype", "bfloat16")
    assert "on the host: states" in capsys.readouterr().out


def test_a_run_resumes(tmp_path) -> None:
    """GPT-NeoX's lm_head and embeddings have names of their own."""
    flags = [*flags_of(tmp_path, "gpt_neox"), "--class_type", "any", "--dtype", "bfloat16"]
    whole = losses(flags, tmp_path / "whole", "--max_steps", "4")
    losses(flags, tmp_path / "run", "--max_steps", "2")
    again = ["--max_steps", "4", "--resume_from_checkpoint", "true"]
    assert losses(flags, tmp_path / "run", *again) == whole
    ends = (tmp_path / name / "final" for name in ("whole", "run"))
    whole, resumed = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ends)
    assert all(torch.equal(resumed[name], x) for name, x in whole.items())


@pytest.mark.parametrize("shares", [False, True])
def test_a_model_trains_whose_heads_differ_by_layer(tmp_path, shares) -> None:
    """transformers has an error of its own for who asks Gemma 4 how large a head is, or the largest
    one how many key/value heads there are."""
    more: dict[str, object] = dict(global_head_dim=16, vocab_size_per_layer_input=8192)
    if shares:
        heads = dict(num_global_key_value_heads=1, attention_k_eq_v=True)
        more |= dict(**heads, num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    flags = [*flags_of(tmp_path, "gemma4_text", **more), "--dtype", "bfloat16"]
    for class_type in ("any", "vanilla"):
        found = losses(flags, tmp_path / class_type, "--class_type", class_type)
        assert len(found) == 3 and found[-1] < found[0]


def test_a_run_tries_attention_and_loss_once(tmp_path, monkeypatch) -> None:
    """Though the packing of rows and the patch of the model want to know the same."""
    tried: list[str] = []

    def noted(name: str, look: Any) -> Any:
        return lambda specimen: tried.append(name) or look(specimen)

    for name in ("_why_other_states", "_compared"):
        monkeypatch.setattr(probe, name, noted(name, getattr(probe, name)))
    flags = flags_of(tmp_path, "olmo", hidden_size=48)  # nobody has asked for it
    losses(flags, tmp_path / "any", "--class_type", "any")
    assert sorted(tried) == ["_compared", "_why_other_states"]


def test_what_is_refused(tmp_path, capsys) -> None:
    flags = [*flags_of(tmp_path, "openai-gpt"), "--class_type", "any"]
    for task in ("dpo", "kto", "reward"):
        with pytest.raises(UserError, match=f"--task {task}: .* trains --task sft"):
            losses(flags, tmp_path / "run", "--task", task)
    assert "parameters in" not in capsys.readouterr().out  # before weights are read
    with pytest.raises(UserError, match="no layers that transformers could checkpoint"):
        losses(flags, tmp_path / "run")
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "model" / "config.json").write_text(str(config).replace("'", '"'))
    with pytest.raises(UserError, match="--class_type any: 't5' is an encoder-decoder"):
        losses(flags, tmp_path / "run")
    with pytest.raises(UserError, match="--parts is for --class_type custom and liger"):
        train.main([*flags, "--parts", "rope", "--output_dir", str(tmp_path / "run")])
    shared = ["--sequence_parallel_size", "2", "--output_dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match="any has no --sequence_parallel_size"):
        train.main([*flags, *shared])


def test_an_unknown_family_is_sent_here(tmp_path) -> None:
    with pytest.raises(UserError, match="--class_type any, any_model=True"):
        losses(flags_of(tmp_path, "gpt2"), tmp_path / "run")
