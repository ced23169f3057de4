"""Hostile files: small functions that write them into a case's folder and return the flags that
point at them.

In flags FOLDER stands for the case's folder and BASE for the one that all cases share, which
holds `model`, `data`, `long.txt` and `run`, an earlier run of four steps with checkpoint-2 and
checkpoint-4.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.cases import Make
from hostile.judge import CANARY

Change = Callable[[Path], object]
"""Changes a folder or a file."""


def given(words: str) -> Make:
    """Flags as they stand on the command line."""
    return lambda folder: shlex.split(words)


WITHOUT = "without "
"""Before an option's name: the small run leaves it out."""


def with_words(flags: list[str], words: list[str]) -> list[str]:
    """The flags of the small run, changed as a case says."""
    flags = list(flags)
    replaced = {"--dataset_name": "--train_file", "--preset": "--model_name_or_path"}
    dropped = [old for new, old in replaced.items() if new in words]
    dropped += [word.removeprefix(WITHOUT) for word in words if word.startswith(WITHOUT)]
    for name in {*dropped} & {*flags}:
        del flags[flags.index(name) : flags.index(name) + 2]
    return [*flags, *(word for word in words if not word.startswith(WITHOUT))]


def both(*makes: Make) -> Make:
    return lambda folder: [word for make in makes for word in make(folder)]


EVAL = "longctx eval BASE/model --eval_file BASE/long.txt --seq_len 1024 --windows 1 --repeats 1"


# --- data ------------------------------------------------------------------------------------

GOOD_LINE = b'{"text": "a good line of text that is long enough to train on"}\n'


def file(name: str, data: str | bytes, flag: str = "--train_file") -> Make:
    def make(folder: Path) -> list[str]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return [flag, str(path)]

    return make


def folder_of(name: bytes, data: bytes) -> Make:
    """A folder to train on with one file, whose name may be any bytes."""

    def make(folder: Path) -> list[str]:
        path = Path(os.fsdecode(bytes(folder / "given") + b"/" + name))
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return ["--train_file", str(folder / "given")]

    return make


def line(text: str | bytes) -> Make:
    """The second line of a JSONL file whose first is good."""
    return file("f.jsonl", GOOD_LINE + (text.encode() if isinstance(text, str) else text))


def record(**fields: Any) -> Make:
    return line(json.dumps(fields))


# --- models ----------------------------------------------------------------------------------


def base(folder: Path) -> Path:
    return folder.parent / "base"


def model(change: Change, *words: str) -> Make:
    """A copy of the model with something wrong in it."""

    def make(folder: Path) -> list[str]:
        copy = shutil.copytree(base(folder) / "model", folder / "broken")
        change(copy)
        return ["--model_name_or_path", str(copy), *words]

    return make


def cut(name: str) -> Change:
    """Half of a file."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def write(name: str, data: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(
        data.encode() if isinstance(data, str) else data
    )


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def edit(name: str, **changes: Any) -> Change:
    """Other values in a JSON file; `...` takes a key out."""

    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | changes
        found = {key: value for key, value in found.items() if value is not ...}
        (folder / name).write_text(json.dumps(found))

    return change


def config(**changes: Any) -> Make:
    return model(edit("config.json", **changes))


# --- payloads --------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def payload(folder: Path) -> bytes:
    return pickle.dumps(Payload(folder / CANARY))


# --- recipes ---------------------------------------------------------------------------------


def recipe(data: str | bytes) -> Make:
    """A recipe, for a run whose flags say nothing about its keys (they would win)."""

    def make(folder: Path) -> list[str]:
        text = data.encode() if isinstance(data, str) else data
        keys = re.findall(rb"^\W*(\w+):", text, re.M) + re.findall(rb"\{(\w+):", text)
        names = [f"{WITHOUT}--{key.decode()}" for key in keys]
        return names + file(
            "r.yaml",
            text.replace(b"FOLDER", bytes(folder)).replace(b"BASE", bytes(base(folder))),
            "--config",
        )(folder)

    return make


def bomb_of_aliases(depth: int = 9) -> str:
    """A few lines of YAML that stand for 10^depth values."""
    lines = ["lr_scheduler_kwargs:", " a0: &a0 {k: v}"]
    for i in range(depth):
        lines.append(f" a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]")
    return "\n".join(lines)


# --- datasets --------------------------------------------------------------------------------


def dataset(columns: dict[str, Any], change: Change = lambda folder: None, words: str = "") -> Make:
    """A dataset of `save_to_disk`, then changed."""

    def make(folder: Path) -> list[str]:
        from datasets import Dataset

        Dataset.from_dict(columns).save_to_disk(folder / "saved")
        change(folder / "saved")
        return ["--dataset_name", str(folder / "saved"), *shlex.split(words)]

    return make


def texts(count: int = 9) -> dict[str, list[str]]:
    return {"text": ["a long text " * 20] * count}


def plain_dataset(name: str, data: str | bytes, words: str = "") -> Make:
    """A folder that `load_dataset` reads by the endings of its files."""

    def make(folder: Path) -> list[str]:
        file(f"plain/{name}", data)(folder)
        return ["--dataset_name", str(folder / "plain"), *shlex.split(words)]

    return make


def arrow(change: Change) -> Change:
    """Changes the Arrow file of a saved dataset."""
    return lambda folder: change(next(folder.glob("*.arrow")))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path, at: float = 0.5) -> None:
    """One bit of a file, at a share of its length."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 1
    path.write_bytes(data)


def chat(*turns: dict[str, Any], **more: Any) -> Make:
    return record(messages=list(turns), **more)


# --- chat templates --------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "u v w"}, {"role": "assistant", "content": "an answer"}]


def template(text: str | bytes, *turns: dict[str, Any]) -> Make:
    """A model with this chat template, and a conversation for it."""

    def make(folder: Path) -> list[str]:
        conversation = json.dumps({"messages": list(turns) or CHAT}) + "\n"
        words = file("chat.jsonl", conversation * 3)(folder)
        data = text.encode() if isinstance(text, str) else text
        data = data.replace(b"FOLDER", bytes(folder))
        return [*words, *model(write("chat_template.jinja", data))(folder)]

    return make


# --- weights ---------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"


def weights(change: Callable[[dict[str, Any]], object]) -> Make:
    """A model whose tensors are changed, in a file that is whole."""

    def edit_tensors(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return model(edit_tensors)


def header(change: Callable[[dict[str, Any]], object]) -> Make:
    """A model whose weights file says something else about its bytes."""

    def edit_header(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(data[:8], "little")
        said = json.loads(data[8 : 8 + size])
        other = change(said)
        text = json.dumps(said if other is None else other).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return model(edit_header)


def pytorch_bin(data: bytes | Callable[[Path], bytes], name: str = "pytorch_model.bin") -> Make:
    """A model with these bytes in place of its weights."""

    def replace(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(data(folder) if callable(data) else data)

    return model(replace)


# --- checkpoints -----------------------------------------------------------------------------


def earlier(change: Change = lambda run: None, words: str = "") -> Make:
    """A copy of the earlier run (four steps, checkpoint-2 and checkpoint-4), changed."""

    def make(folder: Path) -> list[str]:
        run = shutil.copytree(base(folder) / "run", folder / "run", symlinks=True)
        change(run)
        return shlex.split(words)

    return make


def resume(change: Change = lambda checkpoint: None, words: str = "", step: int = 4) -> Make:
    """Continues the earlier run to step 6 from a checkpoint in which something is changed."""
    name = f"checkpoint-{step}"
    how = f"--max_steps 6 --resume_from_checkpoint FOLDER/run/{name} {words}"
    return earlier(lambda run: change(run / name), how)


def last(change: Change, words: str = "--resume_from_checkpoint last") -> Make:
    """Continues to step 6 from the newest checkpoint that is whole; checkpoint-4 is changed."""
    return earlier(lambda run: change(run / "checkpoint-4"), f"--max_steps 6 {words}")


def unlisted(name: str, change: Change) -> Change:
    """Changes a file of a checkpoint and takes its manifest away, as whoever plants one would."""

    def plant(checkpoint: Path) -> None:
        change(checkpoint / name)
        (checkpoint / "manifest.json").unlink()

    return plant


def forged(**content: Any) -> Change:
    """Other parts of a checkpoint's manifest, whose own checksum is right."""

    def forge(checkpoint: Path) -> None:
        from longctx.train.output.manifest import _digest

        path = checkpoint / "manifest.json"
        said = json.loads(path.read_text()) | content
        said.pop("xxh3", None)
        path.write_text(json.dumps(said | {"xxh3": _digest(said)}))

    return forge


def remade(change: Change) -> Change:
    """Changes a checkpoint and writes a manifest that agrees with it."""

    def remake(checkpoint: Path) -> None:
        from longctx.train.output.manifest import read_manifest, write_manifest

        run = (read_manifest(checkpoint) or {}).get("run")
        change(checkpoint)
        write_manifest(checkpoint, run)

    return remake


def instead(name: str, make: Change) -> Change:
    """Something else in the place of a file."""
    return lambda folder: ((folder / name).unlink(missing_ok=True), make(folder / name))


def asking(name: str, size_bytes: int = 9 * 10**9) -> Change:
    """A file of torch.save of some bytes, which asks for gigabytes when it is read."""

    class Asks:
        def __reduce__(self) -> Any:
            return bytearray, (size_bytes,)

    def write_it(folder: Path) -> None:
        import torch

        torch.save(Asks(), folder / name)

    return write_it


def in_file(name: str, change: Change) -> Change:
    return lambda folder: change(folder / name)


def saved_tensors(name: str, change: Callable[[Any], Any]) -> Change:
    """Other contents of a file of torch.save, in a checkpoint without a manifest."""

    def edit_states(checkpoint: Path) -> None:
        import torch

        states = torch.load(checkpoint / name, weights_only=False)  # ours
        torch.save(change(states) or states, checkpoint / name)
        (checkpoint / "manifest.json").unlink()

    return edit_states


def planted(name: str, legacy: bool = False) -> Change:
    """A file of a checkpoint that makes a folder when it is unpickled."""

    def plant(checkpoint: Path) -> None:
        import torch

        ran = Payload(checkpoint.parent / CANARY)
        if name == "pytorch_model.bin":
            (checkpoint / WEIGHTS).unlink()
        if legacy:
            (checkpoint / name).write_bytes(pickle.dumps(ran))
        else:
            torch.save(ran, checkpoint / name)
        (checkpoint / "manifest.json").unlink()

    return plant


def moved(path: Path) -> None:
    """As people do when a disk is full: the folder lies elsewhere, a link is in its place."""
    disk = path.parent.with_name("bigger disk")
    disk.mkdir(exist_ok=True)
    path.rename(disk / path.name)
    path.symlink_to(disk / path.name)


def immutable(path: Path) -> None:
    """Not even root deletes it."""
    subprocess.run(["chattr", "+i", str(path)], check=True)
