"""`longctx merge`: adapters, models and tokenizers of strangers, and the folder that is made."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import peft  # noqa: F401  before the server forks: each case would take a second more
import torch
from safetensors.torch import load_file, save_file

from hostile.cases import (
    at,
    before,
    closed_pipe,
    ends,
    fails,
    limit,
    prints,
    send,
    setting,
    table,
)
from hostile.files import Change, Make, Payload, base, edit, halve, in_file, remove, write
from hostile.judge import CANARY

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.v_proj": (16, 32),
    "mlp.down_proj": (32, 64),
}
"""Of the shared model's maps: what comes out and what goes in."""
RANK = 4
HANGS = "(([a-z_.0-9]+)+)+!"
SOON = setting("longctx.train.lora.foreign.REHEARSE_S", 2.0)
MERGED = prints("merged: the merged model")


def write_adapter(folder: Path, model: Path) -> None:
    """An adapter as PEFT saves it, of the three maps of both layers."""
    folder.mkdir()
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in SHAPES.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.full((RANK, columns), 0.01)
            tensors[f"{path}.lora_B.weight"] = torch.full((rows, RANK), 0.01)
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8}
    said |= {"target_modules": [name.rpartition(".")[2] for name in SHAPES]}
    said |= {"base_model_name_or_path": str(model)}
    (folder / CONFIG).write_text(json.dumps(said))


def merge(
    change: Change = lambda adapter: None, words: str = "", *, to: str = "FOLDER/merged"
) -> Make:
    """Merges an adapter in which something is changed into the shared model."""

    def make(folder: Path) -> list[str]:
        write_adapter(folder / "adapter", base(folder) / "model")
        change(folder / "adapter")
        command = ["longctx", "merge", str(folder / "adapter"), "--output", to]
        return command + shlex.split(words)

    return make


def into(change: Change, words: str = "") -> Make:
    """Merges an adapter into a copy of the model in which something is changed."""

    def make(folder: Path) -> list[str]:
        model = shutil.copytree(base(folder) / "model", folder / "theirs")
        change(model)
        return merge(words=f"--model {model} {words}")(folder)

    return make


def says(**values: Any) -> Change:
    return edit(CONFIG, **values)


def holds(change: Any) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS, {"format": "pt"})

    return rewrite


def planted(name: str, **said: Any) -> Change:
    """A file that names a stranger's code, and the code."""

    def plant(folder: Path) -> None:
        path = folder / name
        held = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(held | said))
        ran = folder.parent / CANARY
        (folder / "theirs.py").write_text(f"import os; os.mkdir({str(ran)!r})")

    return plant


def pickle(data: Any) -> Change:
    def replace(folder: Path) -> None:
        (folder / TENSORS).unlink()
        torch.save(data(folder), folder / "adapter_model.bin")

    return replace


class Asks:
    """Asks for memory when it is unpickled."""

    def __reduce__(self) -> Any:
        return bytearray, (9 * 10**9,)


def occupied(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("x")


def lack(part: str) -> Change:
    """Weights without those of this name."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: x for name, x in tensors.items() if part not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return change


HALF = "run/.incomplete-merged"
AUTO = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
ENDLESS = "does not end within 2 s: look at its patterns and ranks"

MERGES = {
    "an adapter": (merge(), MERGED),
    "in bfloat16": (merge(words="--dtype bfloat16"), MERGED),
    "a folder of folders that are new": (merge(to="FOLDER/a/b/merged"), MERGED),
    "no words": (lambda f: ["longctx", "merge"], fails("required")),
    "--help": (lambda f: ["longctx", "merge", "--help"], prints("usage: longctx merge")),
    "an unknown option": (merge(words="--nonsense"), fails("--nonsense")),
    "--trust_remote_code": (merge(words="--trust_remote_code"), fails("--trust_remote_code")),
    "--allow_changed seed": (merge(words="--allow_changed seed"), fails("--allow_changed")),
    # patterns
    **{
        f"{name} that hangs": (merge(says(**values)), fails(ENDLESS), SOON)
        for name, values in {
            "target_modules": {"target_modules": HANGS},
            "exclude_modules": {"exclude_modules": HANGS},
            "rank_pattern": {"rank_pattern": {HANGS: RANK}},
            "alpha_pattern": {"alpha_pattern": {HANGS: 8}},
            "layers_pattern": {"layers_to_transform": [0], "layers_pattern": [HANGS]},
        }.items()
    },
    "a pattern of a megabyte": (
        merge(says(target_modules="(a|" * 10**5 + ")" * 10**5)),
        fails("cannot merge|does not end"),
    ),
    "a name of a terminal": (
        merge(says(target_modules=["\x1b[2J"])),
        fails(r"cannot merge .*\\x1b\[2J|cannot merge"),
    ),
    # what would be another model
    "LoHa over LoRA's tensors": (merge(says(peft_type="LOHA")), fails("LORA alone is merged")),
    "q_proj alone": (
        merge(holds(lambda t: [t.pop(n) for n in list(t) if "q_proj" not in n])),
        fails("8 tensors its file lacks"),
    ),
    "half of its targets": (
        merge(says(target_modules=["q_proj"])),
        fails("8 tensors no module of the model takes"),
    ),
    "a rank of a million": (merge(says(r=10**6)), fails("12 tensors of another shape are")),
    "a rank of 10^18": (merge(says(r=10**18)), fails("the rank r must be a whole number")),
    "alpha is NaN": (merge(says(lora_alpha=float("nan"))), fails("must be a number above 0")),
    "replicated layers": (merge(says(layer_replication=[[0, 10**9]])), fails("layer_replication")),
    "a module to import": (
        merge(says(megatron_config={"a": 1}, megatron_core="theirs")),
        fails("its megatron_config is"),
    ),
    "tensors of NaN": (
        merge(holds(lambda t: [x.fill_(float("nan")) for x in t.values()])),
        fails("cannot merge .*NaN"),
    ),
    "a layer that the model lacks": (
        into(edit("config.json", num_hidden_layers=1)),
        fails("6 tensors no module of the model takes"),
    ),
    "a model that lacks a layer": (
        into(lack("layers.1.")),
        fails("9 of the model's weights are not in .*theirs"),
    ),
    "a model of more layers": (
        into(edit("config.json", num_hidden_layers=3)),
        fails("6 tensors its file lacks"),
    ),
    "a quantised model": (
        into(edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4})),
        fails("theirs is quantised .gptq"),
    ),
    "a model of half its weights": (into(in_file("model.safetensors", halve)), fails("theirs")),
    # code and pickles
    "code that the model names": (
        into(planted("config.json", model_type="theirs", auto_map=AUTO)),
        fails("theirs: it ships code of its own, which runs with --trust_remote_code alone"),
    ),
    "code beside a known model": (into(planted("config.json", auto_map=AUTO)), MERGED),
    "code that the adapter's config.json names": (
        merge(planted("config.json", model_type="theirs", auto_map=AUTO)),
        fails("its config.json"),
    ),
    "code that the tokenizer names": (
        merge(
            planted(
                "tokenizer_config.json",
                tokenizer_class="Theirs",
                auto_map={"AutoTokenizer": ["theirs.Tokenizer", None]},
            )
        ),
        fails("no tokenizer could be loaded from .*remove its tokenizer's files"),
    ),
    "code that adapter_config.json names": (
        merge(planted(CONFIG, auto_map=AUTO)),
        fails("its auto_map is"),
    ),
    "a pickle that runs code": (
        merge(pickle(lambda f: Payload(f.parent / CANARY))),
        fails("cannot merge"),
    ),
    "a pickle that asks for 9 GB": (
        merge(pickle(lambda f: Asks())),
        fails("adapter_model.bin takes more than .* GiB of memory"),
    ),
    # files
    "tensors that are a pipe": (
        merge(lambda f: (remove(TENSORS)(f), os.mkfifo(f / TENSORS))),
        fails("adapter_model.safetensors is not a regular file"),
    ),
    "a tokenizer that never ends": (
        merge(lambda f: (f / "tokenizer.json").symlink_to("/dev/zero")),
        fails("tokenizer.json is not a regular file"),
    ),
    "half a tokenizer": (
        merge(
            lambda f: (
                shutil.copy(base(f.parent) / "model/tokenizer.json", f),
                shutil.copy(base(f.parent) / "model/tokenizer_config.json", f),
                halve(f / "tokenizer.json"),
            )
        ),
        fails("no tokenizer could be loaded"),
    ),
    "a configuration of half a file": (
        merge(in_file(CONFIG, halve)),
        fails("adapter_config.json is unreadable"),
    ),
    "a configuration of deep lists": (
        merge(write(CONFIG, "[" * 10**6)),
        fails("adapter_config.json is unreadable"),
    ),
    # the folder
    "a folder in a file": (merge(to="BASE/data/1.txt/merged"), fails("cannot create .*merged")),
    "a folder that is there": (
        merge(lambda f: occupied(f.parent / "merged")),
        fails("merged exists: give --output a new folder"),
    ),
    "a name too long": (merge(to="FOLDER/" + "x" * 300), fails("File name too long")),
    "a name that colours": (
        merge(to="FOLDER/\x1b[31mmerged"),
        prints(r"\\x1b\[31mmerged: the merged model"),
    ),
    "a planted link in the place of what is half done": (
        merge(
            lambda f: ((f.parent / "run").mkdir(), (f.parent / HALF).symlink_to(f)),
            to="FOLDER/run/merged",
        ),
        MERGED,
    ),
    "a merge that was killed": (
        merge(
            lambda f: ((f.parent / "run").mkdir(), occupied(f.parent / HALF)),
            to="FOLDER/run/merged",
        ),
        MERGED,
    ),
    "files that grow too large": (
        merge(),
        fails("merged could not be written: File too large"),
        at(before("longctx.train.lora.merge.require_space"), limit(20_000)),
    ),
    **{
        f"{name} in the middle": (
            merge(),
            ends(status, ""),
            at(before("longctx.train.lora.merge.publish"), send(name)),
        )
        for name, status in (("TERM", 143), ("INT", 130), ("HUP", 129))
    },
    "output that nobody reads": (merge(), prints(), closed_pipe(1, 2)),
    **{
        f"an output of {to!r}": (merge(to=to), fails("exists: give --output a new folder"))
        for to in (".", "..", "/", "./", "FOLDER/adapter/..", "")
    },
    "two at once": (
        merge(),
        prints("the merged model"),
        "PROGRAM & PROGRAM; wait; test -e FOLDER/merged/model.safetensors",
    ),
}

CASES = table("merges", MERGES)
