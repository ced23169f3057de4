"""final/README.md: the model card, as a hub reads it and as people do.

The card says what run.json and the logged lines say, without this machine's paths: a folder or file
is given by its last name. The front matter holds what a hub knows by name (a base model or a data
set of a local folder is in the text alone), and no license, which is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from longctx.errors import print_rank0
from longctx.train.output import CARD
from longctx.train.output.manifest import Damaged, read_manifest
from longctx.train.output.public import as_code, as_text, hub_id, public, public_value
from longctx.train.output.record import LOSSES, Record, counts_of, hardware, versions
from longctx.train.safety.checksum import checksums

_TEMPLATE = Path(__file__).with_suffix(".jinja")
_OF_THIS_MACHINE = (
    "output_dir overwrite_output_dir cache_dir resume_from_checkpoint allow_changed plan run_name "
    "report_to disable_tqdm"
).split()
"""Options that say nothing of the model."""
_LOADERS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForConditionalGeneration": ("AutoModelForImageTextToText", "image-text-to-text"),
}
"""Maps the ending of a class's name to transformers' auto class and the hub's name of what the
model does."""
_TITLES = {
    "sft": "fine-tuned",
    "simpo": "trained by SimPO",
    "reward": "trained as a model of rewards",
    "distill": "distilled",
}
"""Task -> how a card's title says what was done to the base model. For a task that is not here the
title has its name: trained by DPO."""


def model_card(record: Record, lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the card of a run's final/. `record` is that of run.json, `lines` are all that were
    logged, those before the run was resumed as well."""
    model, options, task = record["model"], record["options"], record["task"]
    adapter = "lora_r" in options
    base = model["hub_id"] or public(model.get("name") or f"{model['preset']} (random weights)")
    length = f"{options['seq_len']:,} tokens"
    how = _TITLES.get(task, f"trained by {task.upper()}")
    kind = "DoRA" if options.get("use_dora") else "LoRA"
    what = f"{kind} adapters of" if adapter else "The model is"
    named = "" if model["hub_id"] or "preset" in model else ", a local folder"
    version = record["starts"][-1]["versions"]["longctx"]
    known = [part["hub_id"] for part in record["data"].values() if part.get("hub_id")]
    return _render(
        model["class"],
        base_model=model["hub_id"],
        adapter=adapter,
        datasets=list(dict.fromkeys(known)),
        other_rope=bool({"rope_scaling", "extend_context"} & options.keys()),
        merge=merge_first(options.get("quantize")) if model.get("adapts_experts") else "",
        tags=["longctx", task, *(["lora"] if adapter else [])],
        title=f"{base}, {how} at {length}",
        beginning=f"{what} {as_code(base)}{named}, {how} on rows of {length} by longctx {version}.",
        heading="Training",
        facts=[*_of_run(record, base), *_of_lines(lines), *_of_start(record["starts"][-1])],
        options="As a recipe for `longctx train --config`:\n\n" + _recipe(options),
    )


def merged_card(base: str, adapter: Path, kind: str, weights: str) -> str:
    """Returns the card of `longctx merge`: of a model of class `kind` that an adapter and its base
    make."""
    known = hub_id(base)
    name = known or public(base)
    return _render(
        kind,
        base_model=known,
        adapter=False,
        datasets=[],
        tags=["longctx", "merged"],
        title=f"{name}, with the adapter {public(str(adapter))}",
        beginning=f"The model that {as_code(name)} and a LoRA adapter make, merged by longctx.",
        heading="Merge",
        facts=[
            ("base model", as_code(name)),
            ("adapter", as_code(public(str(adapter)))),
            ("weights", weights),
            ("libraries", _versions(versions())),
        ],
        options="",
    )


def _render(
    kind: str,
    *,
    base_model: str | None,
    adapter: bool,
    datasets: list[str],
    tags: list[str],
    title: str,
    other_rope: bool = False,
    merge: str = "",
    **parts: Any,
) -> str:
    ends = (found for end, found in _LOADERS.items() if kind.endswith(end))
    loader, does = next(ends, _LOADERS["ForCausalLM"])
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model,
            datasets=datasets or None,
            library_name="peft" if adapter else "transformers",
            pipeline_tag=does,
            tags=tags,
        ),
        template_str=_TEMPLATE.read_text(encoding="utf-8").replace("%}\n", "%}"),
        title=as_text(title),
        loader=loader,
        adapter=adapter,
        # adapter_config.json may name a folder of this machine.
        base=base_model,
        # The adapter's own configuration tells of RoPE that was changed for the run.
        other_rope=other_rope,
        merge=merge,
        **parts,
    )
    return str(card)


def merge_first(quantize: str | None, final: str = "path/to/final") -> str:
    """Returns the command that makes an ordinary model of adapters of experts: vLLM takes no
    `target_parameters`."""
    more = " --quantize nf4" if quantize == "nf4" else ""
    return f"longctx merge {final} --output merged{more}"


Facts = list[tuple[str, str]]


def _of_run(record: Record, base: str) -> Facts:
    model, options = record["model"], record["options"]
    whole, trained = model["parameters"], model["trained_parameters"]
    found = [("base model", as_code(base)), ("task", as_code(record["task"]))]
    for name, what in (("train", "data"), ("eval", "evaluation data")):
        if name in record["data"]:
            found.append((what, _data(record["data"][name])))
    found += [
        ("row length", f"{options['seq_len']:,} tokens"),
        ("parameters", f"{whole:,}" + f", {trained:,} of them trained" * (trained != whole)),
        ("dtype", str(model["dtype"])),
    ]
    if "lora_r" in options:
        alpha = options.get("lora_alpha") or 2 * options["lora_r"]
        over = f", over {model['packed']}" if "packed" in model else ""
        kind = "DoRA" if options.get("use_dora") else "LoRA"
        found.append(("adapters", f"{kind}, rank {options['lora_r']}, alpha {alpha:g}{over}"))
    processes = record["starts"][-1]["machine"]["processes"]
    ranks_a_row = options.get("sequence_parallel_size", 1)
    rows = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    betas = f"betas {options['adam_beta1']:g} and {options['adam_beta2']:g}"
    return [
        *found,
        ("rows a step", f"{rows * processes // ranks_a_row}"),
        ("optimizer", f"{options['optim']}, {betas}, weight decay {options['weight_decay']:g}"),
        ("learning rate", f"{options['learning_rate']:g}, {options['lr_scheduler_type']}"),
        ("warmup", f"{options['warmup_steps']:g} steps"),
        ("largest gradient norm", f"{options['max_grad_norm']:g}"),
        ("seed", str(options["seed"])),
    ]


def _data(part: Mapping[str, Any]) -> str:
    names = [part["dataset"]] if "dataset" in part else part["files"]
    shown = [as_code(part.get("hub_id") or public(name)) for name in names[:5]]
    more = [f"{len(names) - 5} more"] if len(names) > 5 else []
    split = [as_code(part["split"])] if part.get("split") else []
    held_out = [f"{100 * part['held_out']:g}% held out"] if part.get("held_out") else []
    counted = counts_of(part["counts"])
    named = [*shown, *more, *split]
    return "; ".join(filter(None, [", ".join(named), *held_out, ", ".join(counted)]))


def _of_lines(lines: Sequence[Mapping[str, Any]]) -> Facts:
    last = max((line.get("step", 0) for line in lines), default=0)
    found = [("steps", f"{last:,}")]
    if tokens := max((line.get("tokens", 0) for line in lines), default=0):
        found.append(("tokens", f"{tokens:,}, padding included"))
    for key, what in LOSSES.items():
        if logged := [line for line in lines if key in line]:
            first, newest = logged[0], logged[-1]
            at = f"{newest[key]:.4f} (step {newest.get('step', last)})"
            if first.get("step") != newest.get("step"):
                at = f"{first[key]:.4f} (step {first.get('step')}), then {at}"
            found.append((what, at))
    return found


def _of_start(start: Mapping[str, Any]) -> Facts:
    return [
        ("hardware", as_text(hardware(start["machine"]))),
        ("date", start["date"][:10]),
        ("libraries", _versions(start["versions"])),
    ]


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _recipe(options: Mapping[str, Any]) -> str:
    """Returns the options as YAML, without those of this machine, between marks that end nowhere in
    it."""
    shown = {k: public_value(v) for k, v in options.items() if k not in _OF_THIS_MACHINE}
    text = yaml.safe_dump(shown, sort_keys=False, width=100)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}"


def write_card(card: str, folder: Path, published: Path) -> None:
    """Writes the card into `folder`, which will be `published`. A card that a person has written or
    changed there since the run saved it stays."""
    if (by_hand := _by_hand(published)) is not None:
        print_rank0(f"{published / CARD} was changed by hand: it stays as it is")
        (folder / CARD).write_bytes(by_hand)
        return
    (folder / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")


def _by_hand(folder: Path) -> bytes | None:
    """Returns a folder's card if it was edited by hand; None if it is as it was saved, or there is
    none."""
    path = folder / CARD
    if path.is_symlink() or not path.is_file():
        return None
    try:
        manifest = read_manifest(folder)
    except Damaged:
        return None
    if manifest is None:
        return None
    saved = manifest["files"].get(CARD)
    if saved is not None and saved[1] == checksums([path], "Checksums")[0]:
        return None
    return path.read_bytes()
