"""Input that is broken in some way: one clear line, no traceback, nothing left behind.

Each case changes the small run of small_run.py: it writes something and returns the flags that
point at it (later flags win), and names what the line must say.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small_run import logged, prepare, run

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


def config_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


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


CASES: dict[str, tuple[Make, str]] = {
    # JSONL lines
    "truncated JSON": (line('{"text": "cut of'), r"f\.jsonl:2 is not JSON \(Unterminated string"),
    "a word": (line("hello"), r"f\.jsonl:2 is not JSON \(Expecting value"),
    "two objects": (line(OK.strip() + OK), r"f\.jsonl:2 is not JSON \(Extra data"),
    "single quotes": (line("{'text': 'a'}"), r"f\.jsonl:2 is not JSON \(Expecting property name"),
    "a list": (line('["a"]'), r"f\.jsonl:2: expected an object .* found a list"),
    "a number": (line("17"), r"f\.jsonl:2: expected an object .* found a number"),
    "a string": (line('"text"'), r"f\.jsonl:2: expected an object .* found a string"),
    "null": (line("null"), r"f\.jsonl:2: expected an object .* found nothing"),
    "an empty object": (line("{}"), r"f\.jsonl:2: expected `text`.* found nothing"),
    "nested too deeply": (line("[" * 200_000), r"f\.jsonl:2 is not JSON \(nested too deeply"),
    "a huge broken line": (
        line('{"text": "' + "x" * 9_000_000),
        r"f\.jsonl:2 is not JSON \(Unterminated string",
    ),
    "a huge number": (
        line('{"text": ' + "9" * 10_000 + "}"),
        r"f\.jsonl:2 is not JSON \(Exceeds the limit",
    ),
    "a NUL byte": (line(b'{"text": "a\0b"}'), r"f\.jsonl is binary or UTF-16"),
    "a NUL byte far in": (
        line(OK.encode() * 300 + b'{"text": "a\0b"}'),
        r"f\.jsonl:302 is not JSON \(Invalid control",
    ),
    "a bare tab": (line(b'{"text": "a\tb"}'), r"f\.jsonl:2 is not JSON \(Invalid control"),
    # records
    "unknown keys": (record(body="x"), r"f\.jsonl:2: expected `text`.* found `body`"),
    "text is a number": (record(text=1), r"f\.jsonl:2: `text` must be a string, found a number"),
    "text is a list": (record(text=["a"]), r"f\.jsonl:2: `text` must be a string, found a list"),
    "text is null": (record(text=None), r"f\.jsonl:2: expected `text`.* found `text`"),
    "text is NaN": (line('{"text": NaN}'), r"f\.jsonl:2: `text` must be a string, found a number"),
    "text is true": (record(text=True), r"f\.jsonl:2: `text` must be a string, found a boolean"),
    "a prompt alone": (record(prompt="p"), r"f\.jsonl:2: expected `text`.* found `prompt`"),
    "an empty completion": (
        record(prompt="p", completion=" "),
        r"f\.jsonl:2: `completion` is empty",
    ),
    "a completion of objects": (
        record(prompt="p", completion={}),
        r"f\.jsonl:2: `completion` must be a string, found an empty object",
    ),
    "messages is a string": (
        record(messages="hi"),
        r"f\.jsonl:2: `messages` must be a list of turns, found a string",
    ),
    "no messages": (record(messages=[]), r"f\.jsonl:2: `messages` must be .* found an empty list"),
    "a turn is a string": (record(messages=["hi"]), r"f\.jsonl:2: turn 1 .* found a string"),
    "an unknown role": (
        record(messages=[{"role": "robot", "content": "x"}]),
        r"f\.jsonl:2: turn 1 of `messages` has the unknown role 'robot'",
    ),
    "a role is a list": (
        record(messages=[{"role": [], "content": "x"}]),
        r"f\.jsonl:2: turn 1 of `messages` has the unknown role \[\]",
    ),
    "no role": (record(messages=[{"content": "x"}]), r"f\.jsonl:2: turn 1 .* unknown role None"),
    "no assistant": (record(messages=[USER]), r"f\.jsonl:2: no assistant turn"),
    "content is a number": (
        record(messages=[USER, {"role": "assistant", "content": 3}]),
        r"f\.jsonl:2: turn 2 of `messages` needs a string as `content`, found a number",
    ),
    "an image": (
        record(messages=[{"role": "user", "content": [{"type": "image"}]}, ANSWER]),
        r"f\.jsonl:2: turn 1 of `messages` has a part that is not text",
    ),
    "tools are a number": (
        record(messages=[USER, ANSWER], tools=3),
        r"f\.jsonl:2: `tools` must be a list",
    ),
    "tools are no JSON": (
        record(messages=[USER, ANSWER], tools="{"),
        r"f\.jsonl:2: `tools` is not JSON",
    ),
    "ShareGPT without value": (
        record(conversations=[{"from": "human"}, {"from": "gpt", "value": "a"}]),
        r"f\.jsonl:2: turn 1 of `conversations` needs a string as `value`, found nothing",
    ),
    # files
    "a missing file": (path("none.txt"), r"none\.txt does not exist"),
    "a missing folder": (path("none/"), "none does not exist"),
    "an unknown user's file": (
        given("--train_file", "~nobody-here/a.txt"),
        r"~nobody-here/a\.txt does not exist",
    ),
    "a pattern without files": (path("*.nothing"), r"\*\.nothing matches no non-empty file"),
    "an empty file": (file("e.txt", b""), r"e\.txt is empty"),
    "an empty document": (file("b.txt", b" \n\t\n"), r"no readable text in .*b\.txt: .* blank"),
    "blank lines": (file("b.jsonl", b"\n\n \n"), r"no readable text in .*b\.jsonl: .* blank"),
    "binary": (file("b.txt", bytes(range(256))), r"b\.txt is binary or UTF-16"),
    "UTF-16 without a mark": (
        file("u.txt", "hello".encode("utf-16-le")),
        r"u\.txt is binary or UTF-16",
    ),
    "random bytes": (
        file("r.txt", bytes(range(1, 256)) * 9),
        r"r\.txt: \d+% of its bytes are not UTF-8 text: .*--allow_undecodable",
    ),
    "a gzip file": (file("z.txt", gzip.compress(b"text")), r"z\.txt is no text but gzip-comp"),
    "JSON that is no JSONL": (file("a.json", b"[]"), r"a\.json: JSON is read line by line"),
    "a link to itself": (
        link("self.txt", "self.txt"),
        r"cannot read .*self\.txt: Too many levels of symbolic links",
    ),
    "a link to nothing": (link("dead.txt", "nowhere"), r"dead\.txt does not exist"),
    "a folder of link loops": (only_links, "no readable text in the folder .*loop"),
    "a pipe": (fifo, r"fifo\.txt is not a regular file"),
    "a device": (given("--train_file", "/dev/null"), "/dev/null is not a regular file"),
    "a name too long": (path("x" * 300), "cannot read .*x: File name too long"),
    "a NUL in the name": (path("a\0b"), "--train_file .* is not UTF-8 text"),
    # models
    "no such model": (
        given("--model_name_or_path", "/no/such/model"),
        "--model_name_or_path /no/such/model is no folder",
    ),
    "an empty model folder": (
        given("--model_name_or_path", "FOLDER/empty"),
        r"/empty has no config\.json",
    ),
    "half a config": (model(cut("config.json")), r"config\.json' is not a valid JSON file"),
    "a config that is a list": (
        model(write("config.json", "[]")),
        r"broken: its config\.json: (Unrecognized model|list indices)",  # newer, older
    ),
    "a config that is null": (model(write("config.json", "null")), "broken.* 'NoneType'"),
    "no heads": (model(edit_config(num_attention_heads=0)), "broken.* by zero"),
    "layers of words": (
        model(edit_config(num_hidden_layers="many")),
        "broken.*'num_hidden_layers' expected int",
    ),
    "an unknown architecture": (
        model(edit_config(model_type="none")),
        "broken.* has model type `none`",
    ),
    "negative layers": (
        model(edit_config(num_hidden_layers=-1)),
        r"broken: its config\.json has -1 layers",
    ),
    "a layer size of words": (
        model(edit_config(hidden_size="big")),
        "broken.*'hidden_size' expected int",
    ),
    "heads that do not divide": (
        model(edit_config(num_key_value_heads=3)),
        r"4 of the model's weights have another shape in .*broken \(.*k_proj\.weight \(16, 32\)",
    ),
    "half the weights": (
        model(cut("model.safetensors")),
        "cannot load a model from .*broken.* incomplete metadata",
    ),
    "weights of another shape": (
        model(reshape),
        r"1 of the model's weights have another shape in .*broken \(model\.norm\.weight \(7,\)\)",
    ),
    "no weights": (
        model(lambda f: (f / "model.safetensors").unlink()),
        r"broken.* no file named model\.safetensors",
    ),
    "weights that run code": (
        model(pickled),
        "broken holds a file that is damaged or would run code",
    ),
    "half a tokenizer": (
        model(cut("tokenizer.json")),
        "no tokenizer could be loaded from .*broken",
    ),
    "a broken chat template": (
        model(write("chat_template.jinja", "{% for m in"), "--train_file", "CHAT"),
        r"chat\.jsonl:1: the chat template refuses .* unexpected 'end of template'",
    ),
    "a model with code of its own": (
        model(own_code),
        "broken.* code of its own; .* --trust_remote_code",
    ),
    "a config that is a pipe": (model(config_pipe), r"broken has no config\.json"),
    "no config": (model(lambda f: (f / "config.json").unlink()), r"broken has no config\.json"),
    "a file as a model": (
        given("--model_name_or_path", "FOLDER/model/config.json"),
        r"config\.json is no folder: give a model's folder or hub id",
    ),
    **{
        f"a name too long for {option}": (given(f"--{option}", "FOLDER/" + "x" * 300), message)
        for option, message in {
            "model_name_or_path": "is no folder",
            "tokenizer_name": "is no folder",
            "resume_from_checkpoint": "no such folder",
            "dataset_name": "does not exist",
            "output_dir": "File name too long",
            "cache_dir": "File name too long",
        }.items()
    },
    "an unknown RoPE": (
        model(edit_config(rope_parameters={"rope_type": "none", "rope_theta": 1.0})),
        r"broken: its config\.json: 'none'",
    ),
    "a quantised model": (
        model(edit_config(quantization_config={"quant_method": "gptq", "bits": 4})),
        r"broken is quantised \(gptq\), and .*: give the model that it was made from",
    ),
    "a model that bitsandbytes quantised": (
        model(edit_config(quantization_config={"load_in_4bit": True})),
        r"broken is quantised",
    ),
    "an adapter beside a model": (
        model(write("adapter_config.json", '{"base_model_name_or_path": "a/b"}')),
        r"broken holds an adapter \(adapter_config\.json\)",
    ),
    "head groups that do not divide": (
        given("--head_groups", "3"),
        "--head_groups 3 must divide the model's 2 key/value heads",
    ),
    "a GGUF file of text": (
        given("--model_name_or_path", "FOLDER/bad.gguf"),
        r"bad\.gguf does not start with the GGUF magic bytes",
    ),
    # recipes and flags
    "a missing recipe": (
        given("--config", "FOLDER/none.yaml"),
        r"cannot read .*none\.yaml: No such file",
    ),
    "half a recipe": (recipe("seq_len: [1,\nfoo"), r"r\.yaml is not valid YAML: .* line 2"),
    "a recipe that is a list": (recipe("- a\n- b"), "must hold `key: value` lines"),
    "an unknown key": (recipe("seq_length: 4"), "unknown key 'seq_length'; did you mean seq_len"),
    "a key that is a list": (recipe("? [a]\n: 1"), r"r\.yaml: unknown key \"\['a'\]\""),
    "a word for a number": (recipe("seq_len: many"), "--seq_len.*: invalid int value: 'many'"),
    "a binary recipe": (recipe(b"\xff\xfe\0\0"), r"r\.yaml is not UTF-8 text: .* byte 0xff"),
    "a recipe that runs code": (
        recipe("seq_len: !!python/object/apply:os.mkdir ['FOLDER/ran']"),
        r"r\.yaml is not valid YAML: .* the tag '.*os\.mkdir'",
    ),
    "no tokens": (given("--seq_len", "0"), "--seq_len must be at least 1"),
    "an unknown flag": (given("--seqlen", "5"), "unknown option --seqlen; did you mean --seq_len"),
    "a choice that is none": (
        given("--class_type", "fast"),
        "--class_type.*: invalid choice: 'fast'",
    ),
    # datasets, caches, outputs
    "rows that give no batch": (
        given("--dataloader_drop_last", "--per_device_train_batch_size", "1000"),
        r"\d+ rows give no batch of 1000.*lower --per_device_train_batch_size",
    ),
    "evaluation rows that give no batch": (
        given("--dataloader_drop_last", "--per_device_eval_batch_size", "9", "--eval_file", "CHAT"),
        "1 rows give no batch of 9.*lower --per_device_eval_batch_size",
    ),
    "a name that is no text": (
        given("--output_dir", "FOLDER/\udcff"),
        "--output_dir .*udcff' is not UTF-8 text",
    ),
    "a missing dataset": (given("--dataset_name", "./none"), "the dataset ./none does not exist"),
    "half a dataset": (dataset(cut_arrow), "cannot load the dataset .*saved .* message body"),
    "a split of a dataset without splits": (
        dataset(lambda f: None, "--dataset_split", "gone"),
        "the dataset .*saved has no splits: leave out --dataset_split gone",
    ),
    "a dataset's broken state": (
        dataset(write("state.json", "{")),
        "cannot load the dataset .*saved .*JSONDecodeError",
    ),
    "a cache that is a file": (given("--cache_dir", "FOLDER/bad.gguf"), r"bad\.gguf.* --cache_dir"),
    "an output that is a file": (
        given("--output_dir", "FOLDER/bad.gguf"),
        r"cannot create --output_dir .*bad\.gguf: File exists",
    ),
    "an output under a file": (
        given("--output_dir", "FOLDER/bad.gguf/x"),
        r"cannot create --output_dir .*bad\.gguf/x: Not a directory",
    ),
    "no checkpoint to resume": (
        given("--resume_from_checkpoint", "last"),
        "nothing to resume: .*run holds no checkpoint-N folder",
    ),
}


WORKS: dict[str, tuple[Make, str]] = {
    "one character": (file("o.txt", b"x"), "1 documents, 3 tokens -> 1 rows"),  # and its two ends
    "mixed encodings": (
        file("m.txt", "né ".encode() * 2000 + "né ".encode("latin-1") * 50),
        r"m\.txt: replaced 50 undecodable bytes",
    ),
    "a kernel of a stranger's choice": (
        model(
            edit_config(
                attn_implementation="kernels-community/flash-attn",
                experts_implementation="kernels-community/moe",
                distributed_config={"tp_size": 2},
            )
        ),
        "patched: 2 scheduled decoder layers",
    ),
    "the same for Hugging Face's code": (
        model(edit_config(attn_implementation="evil/kernel"), "--class_type", "vanilla"),
        "nothing patched; sdpa attention",
    ),
    "a RoPE that need not be scaled": (
        given("--rope_scaling", "yarn"),
        "--rope_scaling yarn does nothing up to 4096 positions",
    ),
}
"""Odd input that a run takes, and what it prints about it."""


@pytest.fixture
def command(flags, tmp_path) -> Callable[[Make], list[str]]:
    """command(make) -> the flags of the small run with this case's changes."""

    def command(make: Make) -> list[str]:
        shutil.copytree(Path(flags[1]), tmp_path / "model")
        (tmp_path / "empty").mkdir()
        (tmp_path / "bad.gguf").write_text("not a model")
        chat = tmp_path / "chat.jsonl"
        chat.write_text(json.dumps({"messages": [USER, ANSWER]}))
        words = [str(chat) if word == "CHAT" else word for word in make(tmp_path)]
        base = flags
        if "--dataset_name" in words:
            at = flags.index("--train_file")
            base = [*flags[:at], *flags[at + 2 :]]
        return [*base, "--output_dir", str(tmp_path / "run"), *words]

    return command


@pytest.mark.parametrize(("make", "message"), CASES.values(), ids=CASES)
def test_one_clear_line(command, tmp_path, make, message) -> None:
    words = command(make)
    with pytest.raises(UserError, match=message) as error:
        train.main(words)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "ran").exists() and not (tmp_path / "broken" / "ran").exists()
    left = {p.name for p in (tmp_path / "run").glob("*")} | {p.name for p in tmp_path.glob("run*")}
    assert left <= {"run", ".lock"}


@pytest.mark.parametrize(("make", "printed"), WORKS.values(), ids=WORKS)
def test_what_a_run_takes(command, tmp_path, make, printed, capsys) -> None:
    train.main(command(make))
    assert re.search(printed, capsys.readouterr().out)
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


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


def test_none_is_lost() -> None:
    """A repeated name would replace a case in silence."""
    assert (len(CASES), len(WORKS)) == (110, 5)
