"""Input that is broken in some way: one clear line, no traceback, nothing left behind.

Each case changes the small run of small_run.py: it writes something and returns the flags that
point at it (later flags win), and names what the line must say.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small_run import prepare, run

import train
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")

Make = Callable[[Path], list[str]]
OK = '{"text": "a good line of text that is long enough to train on"}\n'
USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "2"]


def line(text: str | bytes) -> Make:
    """The second line of a JSONL file."""

    def make(folder: Path) -> list[str]:
        data = text.encode() if isinstance(text, str) else text
        (folder / "f.jsonl").write_bytes(OK.encode() + data)
        return ["--train_file", str(folder / "f.jsonl")]

    return make


def record(**fields: object) -> Make:
    return line(json.dumps(fields))


def file(name: str, data: bytes) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(data)
        return ["--train_file", str(folder / name)]

    return make


def path(name: str) -> Make:
    return lambda folder: ["--train_file", str(folder / name)]


def link(name: str, to: str) -> Make:
    def make(folder: Path) -> list[str]:
        (folder / name).symlink_to(folder / to)
        return ["--train_file", str(folder / name)]

    return make


def fifo(folder: Path) -> list[str]:
    os.mkfifo(folder / "fifo.txt")
    return ["--train_file", str(folder / "fifo.txt")]


def only_links(folder: Path) -> list[str]:
    (folder / "loop").mkdir()
    (folder / "loop" / "again").symlink_to(folder / "loop")
    (folder / "loop" / "self.txt").symlink_to(folder / "loop" / "self.txt")
    return ["--train_file", str(folder / "loop")]


def model(change: Callable[[Path], object], *more: str) -> Make:
    """A copy of the model's folder with something wrong in it."""

    def make(folder: Path) -> list[str]:
        copy = shutil.copytree(folder / "model", folder / "broken")
        change(copy)
        return ["--model_name_or_path", str(copy), *more]

    return make


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def own_code(folder: Path) -> None:
    edit_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})(folder)
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\n")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(folder / "ran")))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def reshape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:7].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def recipe(text: str | bytes) -> Make:
    def make(folder: Path) -> list[str]:
        data = text.encode() if isinstance(text, str) else text
        (folder / "r.yaml").write_bytes(data.replace(b"FOLDER", str(folder).encode()))
        return ["--config", str(folder / "r.yaml")]

    return make


def given(*words: str) -> Make:
    return lambda folder: [word.replace("FOLDER", str(folder)) for word in words]


def dataset(change: Callable[[Path], object], *more: str) -> Make:
    def make(folder: Path) -> list[str]:
        from datasets import Dataset

        saved = folder / "saved"
        Dataset.from_dict({"text": ["a long text " * 20] * 9}).save_to_disk(saved)
        change(saved)
        return ["--dataset_name", str(saved), *more]

    return make


def cut_arrow(folder: Path) -> None:
    arrow = next(folder.glob("*.arrow"))
    os.truncate(arrow, arrow.stat().st_size // 2)


NO_FILE = "does not exist"
CASES: dict[str, tuple[Make, str]] = {
    # JSONL lines
    "truncated JSON": (line('{"text": "cut of'), r"f\.jsonl:2 is not JSON"),
    "a word": (line("hello"), r"f\.jsonl:2 is not JSON"),
    "two objects": (line(OK.strip() + OK), r"f\.jsonl:2 is not JSON \(Extra data"),
    "single quotes": (line("{'text': 'a'}"), r"f\.jsonl:2 is not JSON"),
    "a list": (line('["a"]'), r"f\.jsonl:2: expected an object .* found a list"),
    "a number": (line("17"), r"f\.jsonl:2: expected an object .* found a number"),
    "a string": (line('"text"'), r"f\.jsonl:2: expected an object .* found a string"),
    "null": (line("null"), r"f\.jsonl:2: expected an object .* found nothing"),
    "an empty object": (line("{}"), r"f\.jsonl:2: expected an object|found nothing"),
    "nested too deeply": (line("[" * 200_000), r"f\.jsonl:2 is not JSON \(nested too deeply"),
    "a huge broken line": (line('{"text": "' + "x" * 9_000_000), r"f\.jsonl:2 is not JSON"),
    "a huge number": (line('{"text": ' + "9" * 10_000 + "}"), r"f\.jsonl:2"),
    "a NUL byte": (line(b'{"text": "a\0b"}'), r"binary|f\.jsonl:2"),
    "a NUL byte far in": (
        line(OK.encode() * 300 + b'{"text": "a\0b"}'),
        r"f\.jsonl:302 is not JSON \(Invalid control",
    ),
    "a bare tab": (line(b'{"text": "a\tb"}'), r"f\.jsonl:2 is not JSON"),
    # records
    "unknown keys": (record(body="x"), r"f\.jsonl:2: expected `text`.* found `body`"),
    "text is a number": (record(text=1), r"f\.jsonl:2: `text` must be a string, found a number"),
    "text is a list": (record(text=["a"]), r"f\.jsonl:2: `text` must be a string, found a list"),
    "text is null": (record(text=None), r"f\.jsonl:2: expected `text`"),
    "text is NaN": (line('{"text": NaN}'), r"f\.jsonl:2: `text` must be a string"),
    "text is true": (record(text=True), r"f\.jsonl:2: .* found a boolean"),
    "a prompt alone": (record(prompt="p"), r"f\.jsonl:2: expected .* found `prompt`"),
    "an empty completion": (
        record(prompt="p", completion=" "),
        r"f\.jsonl:2: `completion` is empty",
    ),
    "a completion of objects": (
        record(prompt="p", completion={}),
        r"f\.jsonl:2: `completion` must",
    ),
    "messages is a string": (record(messages="hi"), r"f\.jsonl:2: `messages` must be a list"),
    "no messages": (record(messages=[]), r"f\.jsonl:2: `messages` must be a list"),
    "a turn is a string": (record(messages=["hi"]), r"f\.jsonl:2: turn 1 .* must be an object"),
    "an unknown role": (
        record(messages=[{"role": "robot", "content": "x"}]),
        r"f\.jsonl:2: turn 1 of `messages` has the unknown role 'robot'",
    ),
    "a role is a list": (record(messages=[{"role": [], "content": "x"}]), r"f\.jsonl:2: turn 1"),
    "no role": (record(messages=[{"content": "x"}]), r"f\.jsonl:2: turn 1 .* unknown role None"),
    "no assistant": (record(messages=[USER]), r"f\.jsonl:2: no assistant turn"),
    "content is a number": (
        record(messages=[USER, {"role": "assistant", "content": 3}]),
        r"f\.jsonl:2: turn 2 of `messages` needs a string as `content`",
    ),
    "an image": (
        record(messages=[{"role": "user", "content": [{"type": "image"}]}, ANSWER]),
        r"f\.jsonl:2: turn 1 .* not text",
    ),
    "tools are a number": (record(messages=[USER, ANSWER], tools=3), r"f\.jsonl:2: `tools` must"),
    "tools are no JSON": (
        record(messages=[USER, ANSWER], tools="{"),
        r"f\.jsonl:2: `tools` is not",
    ),
    "ShareGPT without value": (
        record(conversations=[{"from": "human"}, {"from": "gpt", "value": "a"}]),
        r"f\.jsonl:2: turn 1 of `conversations` needs a string as `value`",
    ),
    # files
    "a missing file": (path("none.txt"), NO_FILE),
    "a missing folder": (path("none/"), NO_FILE),
    "an unknown user's file": (given("--train_file", "~nobody-here/a.txt"), NO_FILE),
    "a pattern without files": (path("*.nothing"), "matches no non-empty file"),
    "an empty file": (file("e.txt", b""), r"e\.txt is empty"),
    "an empty document": (file("b.txt", b" \n\t\n"), "no readable text"),
    "blank lines": (file("b.jsonl", b"\n\n \n"), "no readable text"),
    "one character": (file("o.txt", b"x"), None),  # trains: the character and its end
    "binary": (file("b.txt", bytes(range(256))), r"b\.txt is binary or UTF-16"),
    "UTF-16": (file("u.txt", "hello".encode("utf-16")), r"u\.txt is binary or UTF-16"),
    "JSON that is no JSONL": (file("a.json", b"[]"), r"a\.json: JSON is read line by line"),
    "a link to itself": (link("self.txt", "self.txt"), r"cannot read .*self\.txt"),
    "a link to nothing": (link("dead.txt", "nowhere"), NO_FILE),
    "a folder of link loops": (only_links, "no readable text in the folder"),
    "a pipe": (fifo, "is not a regular file"),
    "a device": (given("--train_file", "/dev/null"), "is not a regular file"),
    "a name too long": (path("x" * 300), "cannot read"),
    "a NUL in the name": (path("a\0b"), NO_FILE),
    "mixed encodings": (file("m.txt", "né ".encode() * 50 + "né ".encode("latin-1") * 50), None),
    # models
    "no such model": (given("--model_name_or_path", "/no/such/model"), "/no/such/model"),
    "an empty model folder": (given("--model_name_or_path", "FOLDER/empty"), "empty"),
    "half a config": (model(cut("config.json")), "broken"),
    "a config that is a list": (model(write("config.json", "[]")), "broken"),
    "a config that is null": (model(write("config.json", "null")), "broken"),
    "no heads": (model(edit_config(num_attention_heads=0)), "broken"),
    "layers of words": (model(edit_config(num_hidden_layers="many")), "broken"),
    "an unknown architecture": (model(edit_config(model_type="none")), "broken"),
    "negative layers": (model(edit_config(num_hidden_layers=-1)), "broken"),
    "a layer size of words": (model(edit_config(hidden_size="big")), "broken"),
    "heads that do not divide": (model(edit_config(num_key_value_heads=3)), "broken"),
    "half the weights": (model(cut("model.safetensors")), "broken"),
    "weights of another shape": (model(reshape), "broken"),
    "no weights": (model(lambda f: (f / "model.safetensors").unlink()), "broken"),
    "weights that run code": (model(pickled), "damaged or would run code"),
    "half a tokenizer": (model(cut("tokenizer.json")), "no tokenizer could be loaded"),
    "a broken chat template": (
        model(write("chat_template.jinja", "{% for m in"), "--train_file", "CHAT"),
        "chat template",
    ),
    "a model with code of its own": (model(own_code), "trust_remote_code"),
    "a GGUF file of text": (given("--model_name_or_path", "FOLDER/bad.gguf"), r"bad\.gguf"),
    # recipes and flags
    "a missing recipe": (given("--config", "FOLDER/none.yaml"), "cannot read the recipe"),
    "half a recipe": (recipe("seq_len: [1,\nfoo"), "is not valid YAML"),
    "a recipe that is a list": (recipe("- a\n- b"), "must hold `key: value` lines"),
    "an unknown key": (recipe("seq_length: 4"), "unknown key 'seq_length'; did you mean seq_len"),
    "a key that is a list": (recipe("? [a]\n: 1"), "YAML|unknown key"),
    "a word for a number": (recipe("seq_len: many"), "seq_len"),
    "a binary recipe": (recipe(b"\xff\xfe\0\0"), "is not valid YAML"),
    "a recipe that runs code": (
        recipe("seq_len: !!python/object/apply:os.mkdir ['FOLDER/ran']"),
        "is not valid YAML",
    ),
    "no tokens": (given("--seq_len", "0"), "--seq_len must be at least 1"),
    "an unknown flag": (given("--seqlen", "5"), "unknown option --seqlen; did you mean --seq_len"),
    "a choice that is none": (given("--class_type", "fast"), "class_type"),
    # datasets, caches, outputs
    "a missing dataset": (given("--dataset_name", "./none"), "the dataset ./none does not exist"),
    "half a dataset": (dataset(cut_arrow), "cannot load the dataset"),
    "a dataset's broken state": (dataset(write("state.json", "{")), "cannot load the dataset"),
    "a dataset without the key": (
        dataset(lambda f: None, "--dataset_split", "gone"),
        None,  # a saved Dataset has no splits
    ),
    "a cache that is a file": (given("--cache_dir", "FOLDER/bad.gguf"), "--cache_dir"),
    "an output that is a file": (given("--output_dir", "FOLDER/bad.gguf"), "--output_dir"),
    "an output under a file": (given("--output_dir", "FOLDER/bad.gguf/x"), "--output_dir"),
    "no checkpoint to resume": (given("--resume_from_checkpoint", "last"), "nothing to resume"),
}


@pytest.mark.parametrize(("make", "message"), CASES.values(), ids=CASES)
def test_one_clear_line(flags, tmp_path, make, message, capsys) -> None:
    shutil.copytree(Path(flags[1]), tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_text("not a model")
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [USER, ANSWER]}))
    words = [str(chat) if word == "CHAT" else word for word in make(tmp_path)]
    base = flags
    if "--dataset_name" in words:
        base = [word for i, word in enumerate(flags) if "--train_file" not in flags[i - 1 : i + 1]]
    command = [*base, "--output_dir", str(tmp_path / "run"), *words]
    if message is None:
        train.main(command)
        return
    with pytest.raises(UserError, match=message) as error:
        train.main(command)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "ran").exists() and not (tmp_path / "broken" / "ran").exists()
    left = {p.name for p in (tmp_path / "run").glob("*")} | {p.name for p in tmp_path.glob("run*")}
    assert left <= {"run", ".lock"}


def test_an_unreadable_file(flags, tmp_path) -> None:
    """Root reads everything, so this test becomes nobody for a moment."""
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    secret.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="cannot read .*Permission denied"):
            run([*flags, "--train_file", str(secret)], tmp_path / "run")
    finally:
        if root:
            os.seteuid(0)


def test_there_are_fifty() -> None:
    assert len(CASES) >= 50
