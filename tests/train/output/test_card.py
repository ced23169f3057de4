"""What a run leaves for people: run.json, and the card of final/ that a hub and a reader take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from small_run import logged, run
from transformers import AutoModelForCausalLM

from longctx.train.output.card import merged_card, model_card
from longctx.train.output.manifest import check_files
from longctx.train.output.record import MOST_STARTS, read_record, write_record

HOSTILE = ["a: b\n---\nlicense: mit", "x | y", "``` <script>", "[a](b)", "{{ 1 }}", "é\udce9", " "]


def read_card(text: str) -> ModelCard:
    """As the hub reads it."""
    return ModelCard(text)


def test_final_has_a_card_of_its_run(finished: Path) -> None:
    text = (finished / "final" / "README.md").read_text()
    data = read_card(text).data.to_dict()
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["longctx", "sft"],
    }
    first, *_, last = logged(finished)
    assert f"| loss | {first['loss']:.4f} (step 1), then {last['loss']:.4f} (step 4) |" in text
    assert (
        "| data | `data`; 12 documents, " in text and "| tokens | 256, padding included |" in text
    )
    assert "learning_rate: 0.003" in text and "| row length | 64 tokens |" in text
    assert str(finished) not in text and "/tmp" not in text  # no paths of this machine
    assert check_files(finished / "final")


def test_final_generates_as_its_base_does(finished: Path, flags: list[str]) -> None:
    """Trainer switches the cache off while it trains."""
    names = ("config.json", "generation_config.json")
    base = Path(flags[flags.index("--model_name_or_path") + 1])
    for name in names:
        assert json.loads((finished / "final" / name).read_text()) == json.loads(
            (base / name).read_text()
        )
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    assert model.config.use_cache and model.generation_config.use_cache is not False


def test_a_resumed_run_adds_a_start_and_keeps_what_a_person_wrote(
    flags: list[str], copy: Path, capsys: pytest.CaptureFixture
) -> None:
    before = read_record(copy)
    (copy / "final" / "README.md").write_text("mine")
    run(flags, copy, "--resume_from_checkpoint", "last", "--max_steps", "6")
    assert (copy / "final" / "README.md").read_text() == "mine" and check_files(copy / "final")
    assert "README.md was changed by hand: it stays as it is" in capsys.readouterr().out
    record = read_record(copy)
    assert record and before and record["starts"][0] == before["starts"][0]
    assert [start["step"] for start in record["starts"]] == [0, 4]
    assert "--resume_from_checkpoint last" in record["starts"][1]["command"]
    assert record["options"]["max_steps"] == 6
    assert [line["tokens"] for line in logged(copy)] == [64 * step for step in range(1, 7)]
    again = "--resume_from_checkpoint", "last", "--max_steps", "7"
    (copy / "final" / "README.md").unlink()
    run(flags, copy, *again)  # whose card is ours, with the first loss of all
    assert (
        f"{logged(copy)[0]['loss']:.4f} (step 1), then"
        in (copy / "final" / "README.md").read_text()
    )


def record(**changes: Any) -> dict[str, Any]:
    """Of a run of full size, as run.json has it."""
    options = {"seq_len": 131072, "learning_rate": 1e-5, "lr_scheduler_type": "cosine"}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "seed": 42}
    options |= {"optim": "adamw_torch_fused", "adam_beta1": 0.9, "adam_beta2": 0.999}
    options |= {"weight_decay": 0.0, "warmup_steps": 10, "max_grad_norm": 1.0}
    model = {"hub_id": "meta-llama/Llama-3.1-8B", "name": "meta-llama/Llama-3.1-8B"}
    model |= {"class": "LlamaForCausalLM", "model_type": "llama", "dtype": "bfloat16"}
    model |= {"parameters": 8_030_261_248, "trained_parameters": 8_030_261_248}
    machine = {"processes": 2, "cpu": "a CPU", "cores": 8, "host_gib": 64.0}
    machine |= {"gpu": "NVIDIA H100 80GB HBM3", "gpu_gib": 79.1}
    start = {"date": "2026-11-25T00:00:00+00:00", "step": 0, "command": "longctx train"}
    start |= {"machine": machine, "versions": {"longctx": "0.2.0", "torch": "2.13.0"}}
    data = {"dataset": "emozilla/pg19", "hub_id": "emozilla/pg19", "split": "train", "counts": {}}
    made = {"task": "sft", "model": model, "data": {"train": data}, "options": options}
    for part, values in changes.items():
        made[part] = {**made[part], **values} if isinstance(values, dict) else values
    return {"format": 1, **made, "starts": [start]}


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_of_experts_are_merged_before_they_are_served(quantize) -> None:
    options = {"lora_r": 16, **({"quantize": quantize} if quantize else {})}
    text = model_card(record(model={"adapts_experts": True}, options=options), [])
    more = f" --quantize {quantize}" if quantize else ""
    assert "which vLLM drops or refuses: merge them before" in text
    assert f"`longctx merge path/to/final --output merged{more}`" in text
    assert "vLLM" not in model_card(record(options=options), [])


def test_what_a_hub_knows_stands_in_front() -> None:
    options = {"lora_r": 16, "quantize": "nf4"}
    adapter = record(task="dpo", options=options, model={"packed": "NF4"})
    text = model_card(adapter, [])
    assert read_card(text).data.to_dict() == {
        "base_model": "meta-llama/Llama-3.1-8B",
        "datasets": ["emozilla/pg19"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["longctx", "dpo", "lora"],
    }
    assert "| adapters | LoRA, rank 16, alpha 32, over NF4 |" in text
    assert "| rows a step | 8 |" in text and "2x NVIDIA H100 80GB HBM3 (79.1 GiB)" in text
    use = text.split("```python\n")[1].split("```")[0]
    compile(use, "card", "exec")
    assert 'base = "meta-llama/Llama-3.1-8B"\n' in use and "config=" not in use
    scaled = model_card(record(options={"lora_r": 16, "rope_scaling": "yarn"}), [])
    assert "(base, config=AutoConfig.from_pretrained(name), dtype" in scaled
    rewards = read_card(model_card(record(model={"class": "LlamaForSequenceClassification"}), []))
    assert rewards.data.pipeline_tag == "text-classification"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_break_no_card(name: str, tmp_path: Path) -> None:
    """Whatever a folder is called, the front matter and the table are those of a plain name."""
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    local = {"model": {"hub_id": None, "name": str(folder)}, "options": {"run_name": name}}
    local["data"] = {"train": {"files": [str(folder), name], "counts": {"rows": 3}}}
    local["options"]["chat"] = {name: [name]}
    texts = [model_card(record(**local), []), merged_card(str(folder), folder, "X", "float32")]
    for text, lines in zip(texts, (16, 4), strict=True):
        text.encode()
        data = read_card(text).data.to_dict()
        assert not {"license", "base_model", "datasets"} & data.keys()
        title = next(line for line in text.splitlines() if line.startswith("# "))
        assert str(tmp_path) not in text and "<" not in title.replace(r"\<", "")
        table = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert len(table) == lines
        assert all(line.replace(r"\|", "").count("|") == 3 for line in table)
        assert "\n---\nlicense" not in text


def test_many_starts_and_a_damaged_record_end_no_run(tmp_path: Path) -> None:
    for step in range(MOST_STARTS + 5):
        write_record(tmp_path, {"starts": [{"step": step}]}, resumed=True)
    found = read_record(tmp_path)
    steps = [start["step"] for start in found["starts"]] if found else []
    assert steps[:2] == [0, 6] and steps[-1] == MOST_STARTS + 4 and len(steps) == MOST_STARTS
    for damaged in ("", "[1]", "{", '{"starts": 3}'):
        (tmp_path / "run.json").write_text(damaged)
        write_record(tmp_path, {"starts": [{"step": 1}]}, resumed=True)
        assert read_record(tmp_path) == {"starts": [{"step": 1}]}
    os.remove(tmp_path / "run.json")
    (tmp_path / "run.json").mkdir()
    write_record(tmp_path, {"starts": []}, resumed=False)
    assert read_record(tmp_path) is None
