"""Names and kinds of files: links, loops, devices, pipes, sockets, odd and endless names."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from hostile.cases import bound_by_permissions, fails, prints, table, works
from hostile.files import Change, Make, base, both, file, given

TEXT = "A text of ordinary words that is long enough to be trained on. " * 20


def text(name: str | bytes, flag: str = "--train_file") -> Make:
    """A text file of this name."""

    def make(folder: Path) -> list[str]:
        path = Path(os.fsdecode(bytes(folder) + b"/" + os.fsencode(name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXT)
        return [flag, str(path)]

    return make


def special(make_it: Change, name: str = "odd.txt", flag: str = "--train_file") -> Make:
    """Something that is no file, in the place of one."""

    def make(folder: Path) -> list[str]:
        make_it(folder / name)
        return [flag, str(folder / name)]

    return make


def link(to: str) -> Change:
    return lambda path: path.symlink_to(to)


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the name of a socket is short
        server.bind(path.name)


def unreadable(path: Path) -> None:
    path.write_text(TEXT)
    path.chmod(0)


def folder_of(*changes: Change, name: str = "texts") -> Make:
    def make(folder: Path) -> list[str]:
        (folder / name).mkdir()
        for change in changes:
            change(folder / name)
        return ["--train_file", str(folder / name)]

    return make


def holding(name: str, data: str = TEXT) -> Change:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(data)

    return write


def linked(name: str, to: str) -> Change:
    return lambda folder: (folder / name).symlink_to(folder / to)


def chain(path: Path, links: int = 60) -> None:
    for i in range(links):
        (path.parent / f"{i}.txt").symlink_to(path.parent / f"{i + 1}.txt")
    (path.parent / f"{links}.txt").write_text(TEXT)
    path.symlink_to(path.parent / "0.txt")


def deep(folder: Path, depth: int = 50) -> None:
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(depth):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    Path("a.txt").write_text(TEXT)
    os.chdir(here)


def put(name: str, what: str = "model", flag: str = "--model_name_or_path") -> Make:
    """The model (or the data) under another name."""

    def make(folder: Path) -> list[str]:
        copy = shutil.copytree(base(folder) / what, folder / name)
        return [flag, str(copy)]

    return make


NAMES = {
    "spaces": "a  b .txt",
    "a line break": "a\nb.txt",
    "a carriage return": "a\rb.txt",
    "a tab": "a\tb.txt",
    "a quote": "a'b\".txt",
    "a backslash": "a\\b.txt",
    "a dollar": "$(mkdir ran)`mkdir ran`;.txt",
    "a colour": "\x1b[31mred\x1b[0m.txt",
    "a bell": "\x07.txt",
    "brackets of a glob": "[ab]*?.txt",
    "braces": "{a,b}.txt",
    "a percent": "%s%n%d.txt",
    "Rich markup": "[bold red]x[/y].txt",
    "HTML": "<img src=x onerror=alert(1)>.txt",
    "a leading dash": "-rf.txt",
    "a leading dot": ".hidden.txt",
    "a colon": "a:1.txt",
    "a hash": "a#b.txt",
    "only an ending": ".txt",
    "dots": "...txt",
    "an emoji": "\N{PILE OF POO}.txt",
    "right to left": "\u202etxt.a.txt",
    "two kinds of one letter": "e\u0301\u00e9.txt",
    "255 bytes": "n" * 251 + ".txt",
    "a replacement": "FOLDER-BASE.txt".lower(),
}

PATHS = {
    **{f"a name with {what}": (text(name), works("1 document")) for what, name in NAMES.items()},
    "a name that is no UTF-8": (text(b"caf\xe9.txt"), fails(r"caf\\udce9\.txt")),
    "a folder that is no UTF-8": (text(b"caf\xe9/a.txt"), fails(r"caf\\udce9")),
    "a name too long": (given("--train_file FOLDER/" + "x" * 300), fails("File name too long")),
    **{
        f"a name too long for --{option}": (given(f"--{option} FOLDER/" + "x" * 300), fails(said))
        for option, said in {
            "model_name_or_path": "is no folder",
            "tokenizer_name": "is no folder",
            "resume_from_checkpoint": "no such folder",
            "dataset_name": "does not exist",
            "config": "File name too long",
            "cache_dir": "File name too long",
        }.items()
    },
    "a path too long": (given("--train_file FOLDER" + "/x" * 3000), fails("File name too long")),
    "a NUL in a name": (
        lambda f: ["--train_file", "a\0b"],
        fails("--train_file .* is not UTF-8 text"),
    ),
    "a missing file": (given("--train_file FOLDER/none.txt"), fails(r"none\.txt does not exist")),
    "a missing folder": (given("--train_file FOLDER/none/"), fails("none does not exist")),
    "a missing name of two lines": (given("--train_file 'FOLDER/a\nb'"), fails("does not exist")),
    "a missing name that colours": (given("--train_file '\x1b31m'"), fails("does not exist")),
    "a missing name that is no UTF-8": (
        lambda f: ["--train_file", os.fsdecode(b"/caf\xe9.txt")],
        fails("is not UTF-8 text"),
    ),
    "a pattern without files": (
        given("--train_file FOLDER/*.nothing"),
        fails("matches no non-empty"),
    ),
    "a broken pattern": (given("--train_file 'FOLDER/[z-a'"), fails("does not exist|matches no")),
    "a pattern of everything": (given("--train_file 'BASE/data/**/*'"), works("12 documents")),
    "a file below a file": (
        given("--train_file BASE/data/1.txt/x"),
        fails("Not a directory|does not"),
    ),
    # kinds
    "a link": (special(link("../base/data/1.txt")), works("1 document")),
    "a link to itself": (special(link("odd.txt")), fails("Too many levels of symbolic links")),
    "a link to nothing": (special(link("nowhere")), fails("odd.txt does not exist")),
    "a chain of sixty links": (special(chain), fails("Too many levels of symbolic links")),
    "a pipe": (special(lambda p: os.mkfifo(p)), fails("odd.txt is not a regular file")),
    "a socket": (special(listen), fails("odd.txt is not a regular file")),
    "a link to a pipe": (
        special(lambda p: (os.mkfifo(p.with_name("pipe")), p.symlink_to("pipe"))),
        fails("odd.txt is not a regular file"),
    ),
    "a terminal": (given("--train_file /dev/tty"), fails("/dev/tty is not a regular file")),
    "randomness": (given("--train_file /dev/urandom"), fails("/dev/urandom is not a regular")),
    "standard input": (given("--train_file /dev/stdin"), fails("/dev/stdin is not a regular file")),
    "a file of /proc": (
        given("--train_file /proc/self/environ"),
        fails("/proc/self/environ is empty"),
    ),
    "a folder of /proc": (
        given("--train_file /proc/self/fd"),
        fails("no readable text|cannot read /proc"),
    ),
    "a file nobody may read": (
        special(unreadable),
        fails("cannot read .*Permission denied"),
        bound_by_permissions,
    ),
    "a folder nobody may read": (
        folder_of(holding("a.txt"), lambda f: f.chmod(0)),
        fails("cannot read .*Permission denied"),
        bound_by_permissions,
    ),
    "a folder nobody may enter": (
        folder_of(holding("a.txt"), lambda f: f.chmod(0o444)),
        fails("cannot read .*Permission denied"),
        bound_by_permissions,
    ),
    "one unreadable file among others": (
        folder_of(holding("a.txt"), lambda f: unreadable(f / "b.txt")),
        fails("cannot read .*b.txt: Permission denied"),
        bound_by_permissions,
    ),
    # folders
    "an empty folder": (folder_of(), fails("no readable text in the folder .*texts")),
    "a folder of empty files": (folder_of(holding("a.txt", "")), fails("no readable text")),
    "a folder of images": (
        folder_of(holding("a.png"), holding("b.jpg")),
        fails("no readable text"),
    ),
    "a folder of link loops": (
        folder_of(linked("again", "."), linked("self.txt", "self.txt")),
        fails("no readable text in the folder .*texts"),
    ),
    "a loop beside a text": (
        folder_of(holding("a.txt"), linked("again", ".")),
        works("1 document"),
    ),
    "a dead link beside a text": (
        folder_of(holding("a.txt"), linked("b.txt", "nowhere")),
        works("1 document"),
    ),
    "a pipe beside a text": (
        folder_of(holding("a.txt"), lambda f: os.mkfifo(f / "b.txt")),
        works("1 document"),
    ),
    "a hidden folder": (folder_of(holding(".git/a.txt")), fails("no readable text")),
    "one file by many names": (
        folder_of(holding("a.txt"), linked("b.txt", "a.txt"), linked("c.txt", "a.txt")),
        works("1 document"),
    ),
    "a folder in a folder, 50 deep": (folder_of(deep), fails("File name too long")),
    "two thousand files": (
        folder_of(lambda f: [(f / f"{i}.txt").write_text("a b c d") for i in range(2000)]),
        works("2,000 documents"),
    ),
    # other places
    "an output folder of two lines": (given("--output_dir 'FOLDER/run\nrun'"), works()),
    "an output folder of HTML": (given("--output_dir 'FOLDER/<script>alert(1)</script>'"), works()),
    "an output folder of markup": (
        given("--output_dir 'FOLDER/[bold red]run'"),
        works(r"\[bold red\]run"),
    ),
    "an output folder of a glob": (given("--output_dir 'FOLDER/run[1]*'"), works()),
    "an output folder that is no UTF-8": (
        lambda f: ["--output_dir", os.fsdecode(bytes(f) + b"/caf\xe9")],
        fails("is not UTF-8 text"),
    ),
    "an output folder called checkpoint-7": (given("--output_dir FOLDER/checkpoint-7"), works()),
    "an output folder called final": (given("--output_dir FOLDER/final"), works()),
    "an output folder that is a file": (
        both(file("f", "x", "--output_dir")),
        fails("cannot create --output_dir .*/f: File exists"),
    ),
    "an output folder below a file": (
        given("--output_dir BASE/data/1.txt/x"),
        fails("cannot create --output_dir .*: Not a directory"),
    ),
    "an output folder that is a pipe": (
        special(lambda p: os.mkfifo(p), "pipe", "--output_dir"),
        fails("cannot create --output_dir .*pipe: File exists"),
    ),
    "an output folder that links to itself": (
        special(link("loop"), "loop", "--output_dir"),
        fails("cannot create --output_dir .*loop"),
    ),
    "an output folder that links to nothing": (
        special(link("nowhere"), "gone", "--output_dir"),
        fails("cannot create --output_dir .*gone"),
    ),
    "an output folder that links to a folder": (
        special(
            lambda p: ((p.parent / "disk").mkdir(), p.symlink_to("disk")), "run", "--output_dir"
        ),
        works(),
    ),
    "an output folder whose name is too long": (
        given("--output_dir FOLDER/" + "x" * 300),
        fails("cannot create --output_dir .*File name too long"),
    ),
    "an output folder of a name of 250 bytes": (given("--output_dir FOLDER/" + "x" * 250), works()),
    "an output folder of a NUL": (lambda f: ["--output_dir", "a\0b"], fails("--output_dir")),
    "an output folder that may not be written": (
        special(lambda p: p.mkdir(0o555), "closed", "--output_dir"),
        fails("cannot write to .*closed"),
        bound_by_permissions,
    ),
    "an output folder in one that may not be": (
        both(
            special(lambda p: p.mkdir(0o555), "closed"),
            given("--output_dir FOLDER/closed/run --train_file BASE/data"),
        ),
        fails("cannot create --output_dir .*Permission denied"),
        bound_by_permissions,
    ),
    "a lock that is a folder": (
        lambda f: (f / "run/.lock").mkdir(parents=True) or [],
        fails("cannot write to .*run"),
    ),
    "a lock that links elsewhere": (
        lambda f: (f / "run").mkdir() or (f / "run/.lock").symlink_to(f / "mine.txt") or [],
        fails("lock is a link"),
    ),
    "a cache that is a file": (file("c", "x", "--cache_dir"), fails("/c.*--cache_dir")),
    "a cache that links to itself": (
        special(link("loop"), "loop", "--cache_dir"),
        fails("--cache_dir"),
    ),
    "a cache that may not be written": (
        both(
            special(lambda p: p.mkdir(0o555), "closed", "--cache_dir"),
        ),
        fails("cannot write to .*closed.*--cache_dir"),
        bound_by_permissions,
    ),
    "a cache of two lines": (given("--cache_dir 'FOLDER/a\nb'"), works("12 documents")),
    "a cache that is no UTF-8": (
        lambda f: ["--cache_dir", os.fsdecode(bytes(f) + b"/caf\xe9")],
        fails("is not UTF-8 text"),
    ),
    "a model of odd letters": (put("m [x] 'é'"), works()),
    "a model whose name is HTML": (put("<script>alert(1)<"), works()),
    "a model of two lines": (put("a\nb"), works()),
    "a model that is no UTF-8": (put(os.fsdecode(b"caf\xe9")), fails("is not UTF-8 text")),
    "a model by a link": (
        special(lambda p: p.symlink_to("../base/model"), "linked", "--model_name_or_path"),
        works(),
    ),
    "a model that is a pipe": (
        special(lambda p: os.mkfifo(p), "pipe", "--model_name_or_path"),
        fails("pipe"),
    ),
    "a model that is a file": (file("m", "x", "--model_name_or_path"), fails("/m is no folder")),
    "a model whose config is a pipe": (
        both(
            put("piped"),
            lambda f: (
                ((f / "piped/config.json").unlink(), os.mkfifo(f / "piped/config.json")) and []
            ),
        ),
        fails("config.json"),
    ),
    "a recipe that is a pipe": (
        special(lambda p: os.mkfifo(p), "r.yaml", "--config"),
        fails("r.yaml"),
    ),
    "a recipe that links to itself": (
        special(link("r.yaml"), "r.yaml", "--config"),
        fails("r.yaml"),
    ),
    "a recipe nobody may read": (
        special(unreadable, "r.yaml", "--config"),
        fails("--config: cannot read .*Permission denied"),
        bound_by_permissions,
    ),
    "a dataset that is a pipe": (
        special(lambda p: os.mkfifo(p), "d", "--dataset_name"),
        fails("/d"),
    ),
    "a settings file that is a pipe": (
        special(lambda p: os.mkfifo(p), "ds", "--deepspeed"),
        fails("ds"),
    ),
    "an example with names that colour": (
        both(text("\x1b[31m.txt"), given("--show_example")),
        prints("one row of 64 tokens"),
    ),
    "an example with names of markup": (
        both(text("[bold]x[/y].txt"), given("--show_example")),
        prints("one row of 64 tokens"),
    ),
    "an example with names that are no UTF-8": (
        both(text(b"caf\xe9.txt"), given("--show_example")),
        fails("is not UTF-8 text"),
    ),
    **{
        f"{flag} too long": (given(f"{flag} {'x' * 300}"), fails(says))
        for flag, says in {
            "--config": "cannot read x+: no such file|File name too long",
            "--cache_dir": "File name too long",
            "--plan": "--plan: cannot read x+.*File name too long",
            "--resume_from_checkpoint": "no such folder",
            "--tokenizer_name": "no tokenizer could be loaded",
        }.items()
    },
}

CASES = table("paths", PATHS)
