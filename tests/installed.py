"""Tries longctx where it is installed, away from its repository: `python installed.py` in an empty
folder.

Imports every module, shows commands and a plan, trains a patched model for two steps, and goes from
the quick start to a merged adapter. Ends with status 0 and a line of JSON, or with an error.
tests/test_package.py and scripts/try_versions.sh run it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import runpy
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

EXTRAS = {"longctx.train.lora": "peft"}
"""Rooms that need an extra, and its package."""


def modules() -> list[str]:
    """Imports every module whose extra is there."""
    import longctx

    folder = Path(longctx.__file__).parent
    files = [file.relative_to(folder.parent).with_suffix("") for file in folder.rglob("*.py")]
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    names -= {"longctx", "longctx.__main__"}
    names = {name for name in names if not name.startswith("longctx.share.")}  # scripts
    for room, package in EXTRAS.items():
        if not importlib.util.find_spec(package):
            names = {name for name in names if not name.startswith(room)}
    for name in sorted(names):
        importlib.import_module(name)
    return sorted(names)


def printed(*argv: str) -> str:
    """What a command prints."""
    from longctx.train import cli

    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(argv)
    return out.getvalue()


def losses() -> list[float]:
    """Of a patched model and of Hugging Face's, two steps each."""
    import copy

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import longctx

    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    vanilla = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    ids, found = torch.randint(128, (1, 64)), []
    for model in (longctx.patch(copy.deepcopy(vanilla), strict=True), vanilla):
        exact = model is not vanilla
        optimizer = (
            longctx.exact_adamw(model, lr=1e-3, weight_decay=0.0, tokens=64)
            if exact
            else torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        )
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def trains() -> dict[str, str]:
    """What commands print from the quick start to a merged adapter and a run of TRL, where their
    packages are installed. They write into the current folder."""
    small = "--seq_len 512 --max_steps 2 --cache_dir cache --disable_tqdm true".split()
    base = "runs/quickstart/final"
    Path("text.jsonl").write_text(json.dumps({"text": "A brown fox jumps over it. " * 200}) + "\n")
    said = {"quickstart": printed("train", *small)}
    if importlib.util.find_spec("peft"):
        data = "--train_file text.jsonl --output_dir runs/lora --lora_r 2".split()
        said["lora"] = printed("train", "--model_name_or_path", base, *data, *small)
        said["merge"] = printed("merge", "runs/lora/final", "--output", "merged")
        base = "merged"
    said["eval"] = printed(
        "eval", base, "--eval_file", "text.jsonl", *"--seq_len 512 --repeats 1".split()
    )
    if importlib.util.find_spec("trl"):
        script = Path("sft.py")
        script.write_text(printed("recipes", "trl_sft.py"))
        words = [str(script), base, "text.jsonl", "trl", "--max_length", "256", "--max_steps", "1"]
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(sys, "argv", words):
            runpy.run_path(str(script), run_name="__main__")
    return said


def main() -> None:
    found = modules()
    import longctx

    spec = importlib.util.find_spec("kernels")  # Hugging Face's
    report = {
        "file": longctx.__file__,
        "version": [longctx.__version__, version(longctx.__distribution__)],
        "modules": found,
        "templates": sorted(p.name for p in Path(longctx.__file__).parent.rglob("*.jinja")),
        "help": printed("--help"),
        "doctor": printed("doctor"),
        "plan": printed(
            *("plan", "--preset", "llama-3.1-8b", "--seq_len", "32768", "--gpu", "rtx-4090"),
            *("--host_memory_gib", "128", "--json"),
        ),
        "losses": losses(),
        "trains": trains(),
        "kernels": spec and spec.origin,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
