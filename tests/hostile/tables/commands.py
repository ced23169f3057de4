"""`longctx cache`, `doctor`, `plan`, `eval`, `verify` and the command itself, with odd words, files
and folders."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from hostile.cases import (
    at,
    before,
    bound_by_permissions,
    environment,
    fails,
    finds,
    limit,
    prints,
    table,
)
from hostile.files import (
    EVAL,
    Change,
    Make,
    base,
    cut,
    edit,
    empty,
    file,
    flip,
    forged,
    given,
    immutable,
    in_file,
    instead,
    planted,
    remove,
    write,
)

CACHE = "longctx cache --cache_dir"
RESULT = {"name": "x", "loss_by_position": [{"loss": 1.0}], "needles": [{"found": 1.0}]}


def results(data: object) -> Make:
    """An evaluation that adds to this file."""

    def make(folder: Path) -> list[str]:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        (folder / "mine.json").write_bytes(raw)
        return given(EVAL + " --output FOLDER/mine.json")(folder)

    return make


def nested(result: dict[str, object], depth: int) -> bytes:
    """A result with something so deep in it."""
    inner = json.dumps(result)[:-1] + ', "x": ' + "[" * depth + "]" * depth
    return f"[{inner}}}]".encode()


def cached(change: Change, words: str = "--prune --days 1") -> Make:
    """A cache folder in which something is odd, and old enough to be pruned."""

    def make(folder: Path) -> list[str]:
        odd = folder / "cache"
        change(odd)
        for path in odd.rglob("*"):
            with suppress(PermissionError):
                os.utime(path, (0, 0), follow_symlinks=False)
        return ["longctx", "cache", "--cache_dir", str(odd), *words.split()]

    return make


def verified(change: Change, name: str = "checkpoint-4") -> Make:
    """`longctx verify` on a folder of the earlier run, changed."""

    def make(folder: Path) -> list[str]:
        run = shutil.copytree(base(folder) / "run", folder / "run")
        change(run / name)
        return ["longctx", "verify", str(run / name)]

    return make


def planned(change: Change) -> Make:
    """`longctx plan` for a model, changed."""

    def make(folder: Path) -> list[str]:
        copy = shutil.copytree(base(folder) / "model", folder / "broken")
        change(copy)
        return ["longctx", "plan", "--model_name_or_path", str(copy), "--gpu", "h100"]

    return make


PLAN = "longctx plan --preset tiny --seq_len 512 --gpu h100 --host_memory_gib 8"
ZERO = '{"zero_optimization": {"stage": 3, "reduce_bucket_size": %s}}'
OURS = "rows-v1-" + "0" * 20 + ".arrow"
SAVED = (
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("training_args.bin", "manifest.json"),
)

COMMANDS = {
    # the command
    "no words": (given("longctx"), prints("usage: longctx COMMAND")),
    "help": (given("longctx --help"), prints("usage: longctx COMMAND")),
    "an unknown command": (
        given("longctx repot"),
        fails("unknown command 'repot'; did you mean longctx report"),
    ),
    "an empty command": (given("longctx ''"), fails("unknown command ''")),
    "a command of two lines": (given("longctx 'a\nerror: b'"), fails("unknown command")),
    "a command that colours": (given("longctx '\x1b[31m'"), fails("unknown command")),
    "a command of a page": (given("longctx " + "x" * 5000), fails("unknown command")),
    "a flag for a command": (given("longctx --prune"), fails("unknown command '--prune'")),
    **{
        f"{name} --help": (given(f"longctx {name} --help"), prints(f"usage: longctx {name}"))
        for name in ("cache", "doctor", "eval", "plan", "report", "verify")
    },
    **{
        f"{name} with an unknown option": (
            given(f"longctx {name} --nonsense"),
            fails("--nonsense|required: "),
        )
        for name in ("cache", "doctor", "eval", "plan", "report", "verify")
    },
    # cache
    "cache: a folder": (given(f"{CACHE} FOLDER/cache"), prints("--prune would free")),
    "cache: a missing folder": (
        given(f"{CACHE} FOLDER/none"),
        fails("cannot read the cache folder"),
    ),
    "cache: a name too long": (
        given(f"{CACHE} {'x' * 300}"),
        fails("cannot read the cache folder .*File name too long"),
    ),
    "cache: a file": (given(f"{CACHE} BASE/data/1.txt"), fails("cannot read the cache folder")),
    "cache: no name": (given(f"{CACHE} ''"), prints("would free 0.00 GiB, 0 files")),
    "cache: a device": (given(f"{CACHE} /dev/null"), fails("cannot read the cache folder")),
    "cache: a folder of others' files": (
        given(f"{CACHE} BASE/data --prune"),
        prints("freed 0.00 GiB"),
    ),
    "cache: --days 0": (given("longctx cache --days 0"), fails("--days must be at least 1")),
    "cache: --days -1": (given("longctx cache --days -1"), fails("--days must be at least 1")),
    "cache: --days many": (given("longctx cache --days many"), fails("--days")),
    "cache: --days 1.5": (given("longctx cache --days 1.5"), fails("--days")),
    "cache: --days of a page": (
        given(f"{CACHE} FOLDER/cache --prune --days {'9' * 400}"),
        prints("freed"),
    ),
    "cache: an extra word": (given("longctx cache stray"), fails("stray")),
    "cache: all is old": (cached(lambda f: None), prints("freed 0.00 GiB, 7 files")),
    "cache: a link named as ours": (
        cached(lambda f: (f / OURS).symlink_to(f.parent / "cache")),
        prints("freed"),
    ),
    "cache: a link to nothing named as ours": (
        cached(lambda f: (f / OURS).symlink_to("nowhere")),
        prints("freed"),
    ),
    "cache: a folder named as ours": (cached(lambda f: (f / OURS).mkdir()), prints("freed")),
    "cache: a pipe named as ours": (cached(lambda f: os.mkfifo(f / OURS)), prints("freed")),
    "cache: names that are no UTF-8": (
        cached(lambda f: Path(os.fsdecode(bytes(f) + b"/caf\xe9")).write_text("x")),
        prints("freed"),
    ),
    "cache: names that colour": (
        cached(lambda f: (f / "\x1b[31m").write_text("x")),
        prints("freed"),
    ),
    "cache: an undeletable file": (
        cached(lambda f: immutable(next(f.glob("rows-*.arrow")))),
        fails("cannot delete from .*Operation not permitted"),
    ),
    "cache: a folder that may not be changed": (
        cached(lambda f: f.chmod(0o555)),
        fails("cannot delete from .*Permission denied"),
        bound_by_permissions,
    ),
    "cache: a folder nobody may read": (
        cached(lambda f: f.chmod(0)),
        fails("cannot read the cache folder .*Permission denied"),
        bound_by_permissions,
    ),
    # doctor
    **{
        f"doctor: {what}": (given(f"longctx doctor --output_dir {name}"), prints(said))
        for what, name, said in (
            ("a folder", "FOLDER/new", "other small models train here"),
            ("a name too long", "x" * 300, "may not be written"),
            ("a file", "BASE/data/1.txt", "1.txt may not be written"),
            ("below a file", "BASE/data/1.txt/x", "may not be written"),
        )
    },
    "doctor: a circle of links": (
        lambda f: (f / "a").symlink_to("a") or ["longctx", "doctor", "--cache_dir", str(f / "a")],
        prints("may not be written"),
    ),
    # plan
    **{
        f"plan: {what}": (given(f"{PLAN} {words}"), fails(said))
        for what, words, said in (
            ("a negative cut", "--head_groups -1", "--head_groups must be at least 1"),
            ("tiles of nothing", "--tile_tokens 0", "--tile_tokens must be at least 1"),
            ("steps of a lifetime", "--gradient_accumulation_steps 2147483647", "rows a step"),
            ("a page over weights", "--html BASE/model/model.safetensors", "did not write it"),
            ("a page over a config", "--html BASE/model/config.json", "did not write it"),
            ("a page that is a device", "--html /dev/full", "it is no regular file"),
        )
    },
    "plan: a page over its recipe": (
        lambda f: (
            file("r.yaml", "seq_len: 512\n")(f)
            and given(f"{PLAN} --config FOLDER/r.yaml --html FOLDER/r.yaml")(f)
        ),
        fails("r.yaml: it is there already and longctx did not write it"),
    ),
    "plan: a page through a planted link": (
        lambda f: (
            file("mine", "x")(f)
            and (f / "p.html").symlink_to("mine")
            or given(f"{PLAN} --html FOLDER/p.html")(f)
        ),
        fails("p.html: it is a link"),
    ),
    "plan: a page": (given(f"{PLAN} --html FOLDER/p.html"), prints("wrote .*p.html")),
    **{
        f"plan: as rank 1 of {what}": (given(PLAN), prints("tokens/s"), environment(**said))
        for what, said in {
            "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "accelerate": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "LOCAL_RANK": "1"},
            "MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "Slurm": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        }.items()
    },
    **{
        f"plan: {what}": (
            lambda f, text=text: (
                file("e.json", text)(f)
                and given(f"{PLAN} --gpus 2 --deepspeed FOLDER/e.json --extend_context")(f)
            ),
            fails(said),
        )
        for what, text, said in (
            ("a bucket of words", ZERO % '"many"', "reduce_bucket_size must be a number"),
            ("a negative bucket", ZERO % "-1", "reduce_bucket_size must be a number"),
            ("a bucket of NaN", ZERO % "NaN", "reduce_bucket_size must be a number"),
            ("settings that are a list", '{"zero_optimization": [3]}', "must be an object"),
        )
    },
    **{
        f"plan: {name} {value}": (
            planned(edit("config.json", **{name: value})),
            fails("config.json"),
        )
        for name, value in (
            ("num_hidden_layers", 9999),
            ("num_hidden_layers", 10**15),
            ("hidden_size", 10**15),
            ("intermediate_size", 0),
            ("intermediate_size", 10**15),
            ("vocab_size", 0),
            ("num_attention_heads", -1),
            ("num_key_value_heads", 0),
            ("head_dim", 10**15),
        )
    },
    # eval
    "eval: a model": (given(EVAL), prints("needles found in all")),
    "eval: no model": (given("longctx eval"), fails("model|required")),
    "eval: no text": (given("longctx eval BASE/model"), fails("--eval_file")),
    "eval: a missing model": (
        given("longctx eval /none --eval_file BASE/data"),
        fails("/none is no folder"),
    ),
    "eval: a missing text": (
        given("longctx eval BASE/model --eval_file none.txt"),
        fails("none.txt does not exist"),
    ),
    "eval: a short text": (
        given("longctx eval BASE/model --eval_file BASE/data --seq_len 4096"),
        fails("no document of .* has 4096 tokens"),
    ),
    "eval: an endless device": (
        given("longctx eval BASE/model --eval_file /dev/zero"),
        fails("/dev/zero"),
    ),
    **{
        f"eval: {words}": (given(f"{EVAL} {words}"), fails(said))
        for words, said in {
            "--seq_len 0": "--seq_len must be at least 1",
            "--seq_len 63": "--seq_len must be at least 64",
            "--seq_len 64": "too few for a needle",
            "--seq_len many": "--seq_len",
            "--windows 0": "--windows must be at least 1",
            "--windows -1": "--windows must be at least 1",
            "--repeats 0": "--repeats must be at least 1",
            "--dtype float7": "--dtype",
            "--rope_scaling cubic": "--rope_scaling",
            "--plot FOLDER/p.png": "--plot draws what --output holds",
            "--output FOLDER/e.json --plot FOLDER/p.xyz": "p.xyz.*name it",
            "--output FOLDER/e.json --plot FOLDER": "cannot write",
            "--output FOLDER": "cannot write .*no regular file",
            "--output /dev/full": "cannot write /dev/full: it is no regular file",
            "--output BASE/long.txt": "long.txt would overwrite .*long.txt",
            "--output FOLDER/e.png --plot FOLDER/e.png": "e.png would overwrite .*e.png",
            f"--output FOLDER/{'x' * 300}": "cannot write .*File name too long",
            "--output BASE/data/1.txt/x": "cannot write",
            "--output BASE/data/1.txt": "1.txt holds no results of longctx eval",
            "--nonsense 1": "--nonsense",
        }.items()
    },
    "eval: results of nothing": (results([]), prints("needles found in all")),
    "eval: a result of another": (results([RESULT]), prints("needles found in all")),
    **{
        f"eval: results that are {what}": (
            results(data),
            fails("mine.json (holds no results|is not UTF-8)"),
        )
        for what, data in {
            "an object": {"a": 1},
            "null": None,
            "a number": 7,
            "words": "x",
            "of numbers": [1],
            "without needles": [{"name": "x", "loss_by_position": [{"loss": 1}]}],
            "cut": b'[{"name": "x',
            "empty": b"",
            "binary": b"\xff\xfe\0",
            "nested too deeply": b"[" * 100_000,
            "nested more deeply than can be written": nested(RESULT, 990),
            "an empty object": {},
            "an empty word": "",
            "names that are lists": [RESULT | {"name": ["x"]}],
            "names that are numbers": [RESULT | {"name": 7}],
        }.items()
    },
    "eval: a name of markup": (
        given(f"{EVAL} --name '<script>$x$' --output FOLDER/e.json --plot FOLDER/p.svg"),
        prints("<script>"),
    ),
    "eval: a name of dollars": (
        given(f"{EVAL} --name '$\\frac{{' --output FOLDER/e.json --plot FOLDER/p.png"),
        prints("needles found in all"),
    ),
    "eval: a name that is no UTF-8": (
        lambda f: [
            *given(f"{EVAL} --output FOLDER/e.json --plot FOLDER/p.svg --name")(f),
            os.fsdecode(b"caf\xe9"),
        ],
        prints("needles found in all"),
    ),
    "eval: a name that colours": (
        given(f"{EVAL} --name '\x1b[31m'"),
        prints(r"\\x1b\[31m: 1 windows"),
    ),
    "eval: a name of two lines": (given(f"{EVAL} --name 'a\nb'"), prints("needles found in all")),
    "eval: a plot beside a hostile result": (
        lambda f: (
            results([RESULT | {"name": "$\\frac{", "loss_by_position": [{"loss": "low"}]}])(f)
            + ["--plot", str(f / "p.png")]
        ),
        fails("holds results that cannot be drawn"),
    ),
    "eval: a plot beside results of the same name": (
        lambda f: (
            results([RESULT | {"name": "a"}])(f) + ["--name", "a", "--plot", str(f / "p.png")]
        ),
        prints("needles found in all"),
    ),
    "eval: a plot over the text": (
        lambda f: (
            file("t.svg", "A sentence of ordinary words. " * 1000)(f)
            and given(f"{EVAL} --eval_file FOLDER/t.svg --output FOLDER/e.json")(f)
            + ["--plot", str(f / "t.svg")]
        ),
        fails("t.svg would overwrite .*t.svg"),
    ),
    "eval: a plot that is a folder": (
        lambda f: (
            (f / "p.png").mkdir() or given(f"{EVAL} --output FOLDER/e.json --plot FOLDER/p.png")(f)
        ),
        fails("cannot write .*p.png: it is no regular file"),
    ),
    "eval: results cut short": (
        given(EVAL + " --output FOLDER/e.json"),
        fails("cannot write .*e.json: File too large"),
        at(before("longctx.train.report.evaluate.write_results"), limit(2000)),
    ),
    "eval: results in a pipe": (
        lambda f: os.mkfifo(f / "p") or given(f"{EVAL} --output FOLDER/p")(f),
        fails("cannot write .*/p: it is no regular file"),
    ),
    "eval: results in a folder that may not be changed": (
        lambda f: (f / "shut").mkdir(0o555) or given(f"{EVAL} --output FOLDER/shut/e.json")(f),
        fails("cannot write .*e.json: Permission denied"),
        bound_by_permissions,
    ),
    "eval: chats instead of text": (
        lambda f: (
            file("c.jsonl", '{"prompt": "a", "completion": "b"}\n')(f)
            and given(f"{EVAL} --eval_file FOLDER/c.jsonl")(f)
        ),
        fails("no document of .*c.jsonl"),
    ),
    "eval: a home that cannot be written": (
        given(EVAL),
        prints("needles found in all"),
        environment(HOME="/proc"),
    ),
    # verify
    "verify: a whole checkpoint": (verified(lambda c: None), prints("checkpoint-4")),
    "verify: a final model": (verified(lambda c: None, "final"), prints("final")),
    "verify: nothing": (given("longctx verify"), fails("folder|required")),
    "verify: a missing folder": (given("longctx verify none"), fails("none")),
    "verify: a name too long": (given("longctx verify " + "x" * 300), fails("x is no folder")),
    "verify: a file": (given("longctx verify BASE/data/1.txt"), fails("1.txt")),
    "verify: a folder of text": (given("longctx verify BASE/data"), fails("manifest")),
    "verify: a whole run": (given("longctx verify BASE/run"), prints("checkpoint-4.*whole")),
    **{
        f"verify: a flipped bit in {name}": (verified(in_file(name, flip)), finds(name))
        for name in SAVED
    },
    **{
        f"verify: the last bit of {name} flipped": (
            verified(in_file(name, lambda p: flip(p, 1.0))),
            finds(name),
        )
        for name in SAVED
    },
    **{f"verify: {name} cut": (verified(cut(name)), finds(name)) for name in SAVED},
    **{f"verify: {name} missing": (verified(remove(name)), finds(name)) for name in SAVED},
    "verify: an empty manifest": (
        verified(in_file("manifest.json", empty)),
        finds("manifest.json"),
    ),
    "verify: a manifest of nothing": (verified(write("manifest.json", "{}")), finds("manifest")),
    "verify: a file planted beside": (
        verified(write("pytorch_model.bin", "x")),
        prints("pytorch_model.bin: not saved with them"),
    ),
    "verify: code planted within": (verified(planted("optimizer.pt")), finds("manifest")),
    "verify: a manifest of files elsewhere": (
        verified(write("manifest.json", '{"../../../etc/passwd": 1}')),
        finds("manifest|passwd"),
    ),
    **{
        f"verify: a manifest whose {part} {what}": (
            verified(forged(**{part: value})),
            finds("checkpoint-4: DAMAGED: manifest.json is forged"),
        )
        for part, what, value in (
            ("files", "are a list", []),
            ("files", "are sizes alone", {"config.json": 4}),
            ("files", "lead out of the folder", {"../../../../etc/passwd": [1, "0"]}),
            ("files", "are absolute", {"/dev/zero": [0, "0"]}),
            ("run", "is a list", [1]),
        )
    },
    "verify: a name that colours": (
        verified(forged(files={"\x1b[31mred": [1, "0"]})),
        finds(r"DAMAGED: \\x1b\[31mred is missing"),
    ),
    "verify: a planted name that colours": (
        verified(write("\x1b[31mred", "x")),
        prints(r"\\x1b\[31mred: not saved with them"),
    ),
    "verify: a thousand planted names": (
        verified(lambda c: [(c / f"{n:050d}").touch() for n in range(1000)]),
        prints("not saved with them"),
    ),
    "verify: a folder that colours": (
        lambda f: [
            "longctx",
            "verify",
            str(shutil.copytree(base(f) / "run/final", f / "\x1b[31mred\n")),
        ],
        prints(r"\\x1b\[31mred\\n: \d+ files are whole"),
    ),
    **{
        f"verify: {name} is {what}": (verified(instead(name, make)), finds(f"DAMAGED: .*{name}"))
        for name in ("manifest.json", "config.json", "trainer_state.json")
        for what, make in {
            "a pipe": os.mkfifo,
            "an endless device": lambda p: p.symlink_to("/dev/zero"),
            "a folder": Path.mkdir,
            "a link to itself": lambda p: p.symlink_to(p.name),
        }.items()
    },
    "verify: a manifest nested deeply": (
        verified(write("manifest.json", "[" * 10**6)),
        finds("manifest.json is unreadable"),
    ),
    "verify: a manifest of 300 MB": (
        verified(lambda c: os.truncate(c / "manifest.json", 300 << 20)),
        finds("manifest.json is unreadable"),
    ),
    "verify: a file of a petabyte": (
        verified(
            lambda c: (
                os.truncate(c / "config.json", 8 << 40),
                forged(files={"config.json": [8 << 40, "0"]})(c),
            )
        ),
        finds("config.json cannot be read: larger than its disk"),
    ),
    "cache: a folder that colours": (
        lambda f: [
            *("longctx", "cache", "--cache_dir"),
            str(shutil.copytree(f / "cache", f / "\x1b[31mred")),
        ],
        prints(r"\\x1b\[31mred"),
    ),
    "verify: an unreadable file": (
        verified(in_file("optimizer.pt", lambda p: p.chmod(0))),
        finds("optimizer.pt"),
        bound_by_permissions,
    ),
}

CASES = table("commands", COMMANDS)
