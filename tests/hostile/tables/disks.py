"""Disks that are full, read-only, broken or too small, and output that nobody can read."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

from hostile.cases import (
    FULL,
    IO,
    QUOTA,
    READ_ONLY,
    always,
    at,
    closed,
    closed_pipe,
    fails,
    file_event,
    from_the_start,
    limit,
    on,
    output_to,
    prints,
    refuse,
    step,
    table,
    unlimit,
    works,
)
from hostile.files import EVAL, Make, both, earlier, given

SMALL = given("--max_steps 6 --save_total_limit 1")
GO_ON = both(SMALL, given("--on_save_error continue"))
STOPPED = "checkpoint-4 was not saved in .*--resume_from_checkpoint last"
WENT_ON = "checkpoint-4 was not saved in .*; training goes on"
REASONS = {
    FULL: "No space left on device",
    QUOTA: "Disk quota exceeded",
    IO: "Input/output error",
    READ_ONLY: "Read-only file system",
}


def files(soft: int, hard: int) -> Callable[[], None]:
    """From now on the process may have so many open files."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FILES = ("config.json", "tokenizer_config.json", "trainer_state.json", "manifest.json")


def tmpfs(flag: str, kib: int, name: str = "small") -> Make:
    """A folder on a disk of so many KiB."""

    def make(folder: Path) -> list[str]:
        disk = folder / name
        disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], check=True
        )
        return [flag, str(disk / "run")]

    return make


def read_only(flag: str) -> Make:
    """A folder on a disk that cannot be written."""

    def make(folder: Path) -> list[str]:
        words = tmpfs(flag, 100, "fixed")(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(folder / "fixed")], check=True)
        return words

    return make


def full_disk(flag: str, kib: int = 64) -> Make:
    """A folder on a disk on which nothing is left."""

    def make(folder: Path) -> list[str]:
        words = tmpfs(flag, kib, "full")(folder)
        Path(words[1]).mkdir()
        with open(folder / "full" / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass
        return words

    return make


def save(name: str):
    """Before a file of checkpoint-4 is written."""
    return file_event("open", f"*/.incomplete-checkpoint-4/*/{name}")


DISKS = {
    # at a file, whatever the reason
    **{
        f"{reason} at {name}, stop": (
            SMALL,
            fails(f"checkpoint-4 was not saved in .*{reason}"),
            always(save(name), refuse(code)),
        )
        for code, reason in REASONS.items()
        for name in FILES
    },
    **{
        f"{reason} at {name}, go on": (
            GO_ON,
            works(f"checkpoint-4 was not saved in .*{reason}", steps=6).leaving(
                "checkpoint-6", "final"
            ),
            always(save(name), refuse(code)),
        )
        for code, reason in REASONS.items()
        for name in FILES
    },
    "no folder for a checkpoint": (
        GO_ON,
        works(WENT_ON, steps=6).leaving("checkpoint-6", "final"),
        always(file_event("mkdir", "*/.incomplete-checkpoint-4*"), refuse(FULL)),
    ),
    "a checkpoint that cannot be renamed": (
        GO_ON,
        works(WENT_ON, steps=6).leaving("checkpoint-6", "final"),
        always(file_event("rename", "*/.incomplete-checkpoint-4/checkpoint-4"), refuse(IO)),
    ),
    "an old checkpoint that cannot be renamed": (
        SMALL,
        works("checkpoint-2", steps=6),
        always(file_event("rename", "*/run/checkpoint-2"), refuse(IO)),
    ),
    "final that cannot be written": (
        SMALL,
        fails("final was not saved in .*No space left on device"),
        always(file_event("mkdir", "*/.incomplete-final"), refuse(FULL)),
    ),
    "final that cannot be renamed": (
        SMALL,
        fails("final was not saved in .*Input/output error"),
        always(file_event("rename", "*/.incomplete-final"), refuse(IO)),
    ),
    "metrics that cannot be written": (
        SMALL,
        prints("is missing in .*metrics.jsonl: No space left on device"),
        always(file_event("open", "*/metrics.jsonl"), refuse(FULL)),
    ),
    "metrics that cannot be renamed": (
        earlier(words="--max_steps 6 --resume_from_checkpoint last"),
        works(steps=6),
        always(file_event("rename", "*/metrics.tmp"), refuse(IO)),
    ),
    # at a byte, while C++ and Rust write
    **{
        f"files end at {size} bytes, stop": (SMALL, fails(STOPPED), at(step(3), limit(size)))
        for size in (4096, 20_000, 60_000, 100_000, 130_000)
    },
    **{
        f"files end at {size} bytes, go on": (
            GO_ON,
            works(WENT_ON, steps=6).leaving("checkpoint-6", "final"),
            at(step(3), limit(size)),
            at(step(5), unlimit),
        )
        for size in (4096, 20_000, 60_000, 100_000, 130_000)
    },
    "files end at 300 bytes from the start": (
        SMALL,
        fails("cannot write to|was not saved|cache"),
        from_the_start(limit(300)),
    ),
    "files end at 20000 bytes from the start": (
        SMALL,
        fails("checkpoint-2 was not saved"),
        from_the_start(limit(20_000)),
    ),
    "files end at 20000 bytes in a fresh cache": (
        both(SMALL, given("--cache_dir FOLDER/fresh")),
        fails("fresh.*--cache_dir|checkpoint-2 was not saved"),
        from_the_start(limit(4000)),
    ),
    "files end in final": (
        SMALL,
        fails("final was not saved in"),
        at(on("on_train_end"), limit(20_000)),
    ),
    # a small disk
    "a disk of 100 KiB": (tmpfs("--output_dir", 100), fails("no space for the checkpoint")),
    "a disk of 300 KiB": (
        tmpfs("--output_dir", 300),
        fails("no space for the checkpoint|was not saved"),
    ),
    "a disk of 600 KiB": (both(SMALL, tmpfs("--output_dir", 600)), fails(STOPPED)),
    "a disk of 900 KiB": (both(SMALL, tmpfs("--output_dir", 900)), works(steps=6)),
    "a disk of 600 KiB, go on": (
        both(GO_ON, tmpfs("--output_dir", 600)),
        works(WENT_ON, steps=6).leaving("checkpoint-2", "final"),
    ),
    "a disk of 4 MiB": (both(SMALL, tmpfs("--output_dir", 4096)), works(steps=6)),
    "a full disk": (full_disk("--output_dir"), fails("no space for the checkpoint|cannot write")),
    "a read-only disk": (
        read_only("--output_dir"),
        fails("cannot create --output_dir .*Read-only"),
    ),
    "a full disk for the cache": (full_disk("--cache_dir"), fails("No space left.*--cache_dir")),
    "a small disk for the cache": (tmpfs("--cache_dir", 12), fails("--cache_dir")),
    "a read-only disk for the cache": (read_only("--cache_dir"), fails("Read-only.*--cache_dir")),
    "a full disk for temporary files": (
        SMALL,
        works(steps=6),
        always(file_event("mkdir", "*/tmp/tmp????????"), refuse(FULL)),
    ),
    # a cache that breaks
    **{
        f"{reason} while {what} are written": (
            given("--cache_dir FOLDER/fresh"),
            fails(f"{reason}.*--cache_dir"),
            always(file_event("open", f"*/fresh/{what}-*"), refuse(code)),
        )
        for code, reason in REASONS.items()
        for what in ("documents", "tokens", "rows")
    },
    "a checksum that cannot be written": (
        given("--cache_dir FOLDER/fresh"),
        fails("--cache_dir"),
        always(file_event("open", "*.xxh3*"), refuse(FULL)),
    ),
    # output that nobody can read
    "a full disk behind > log": (SMALL, works(steps=6), output_to(1, device="/dev/full")),
    "a full disk behind 2> log": (SMALL, works(steps=6), output_to(2, device="/dev/full")),
    "a full disk behind both": (SMALL, works(steps=6), output_to(1, 2, device="/dev/full")),
    "a closed pipe": (SMALL, works(steps=6), closed_pipe(1)),
    "a closed pipe behind both": (SMALL, works(steps=6), closed_pipe(1, 2)),
    "a full disk behind an error": (
        given("--seq_len 0"),
        fails(""),
        output_to(1, 2, device="/dev/full"),
    ),
    "a closed pipe behind an error": (given("--seq_len 0"), fails(""), closed_pipe(1, 2)),
    "a full disk behind a progress bar": (
        given("--max_steps 6 --disable_tqdm false"),
        works(steps=6),
        output_to(1, 2, device="/dev/full"),
    ),
    "a full disk behind --help": (
        given("train.py --help"),
        prints(),
        output_to(1, device="/dev/full"),
    ),
    "a closed pipe behind an example": (given("--show_example"), prints(), closed_pipe(1)),
    "a closed pipe behind longctx": (given("longctx"), prints(), closed_pipe(1)),
    "a closed pipe behind longctx cache": (
        given("longctx cache --cache_dir FOLDER/cache"),
        prints(),
        closed_pipe(1),
    ),
    "a full disk behind longctx cache": (
        given("longctx cache --cache_dir FOLDER/cache"),
        prints(),
        output_to(1, device="/dev/full"),
    ),
    "a full disk behind longctx report": (
        given("longctx report BASE/run --output FOLDER/p.html"),
        prints(),
        output_to(1, device="/dev/full"),
    ),
    "closed stdin": (SMALL, works(steps=6), closed(0)),
    "a page on a full disk": (
        both(
            lambda f: [w for w in full_disk("--output")(f)][:0],
            given("longctx report BASE/run --output FOLDER/full/p.html"),
        ),
        fails("cannot write .*p.html: No space left"),
    ),
    "a page cut short": (
        given("longctx report BASE/run --output FOLDER/p.html"),
        fails("cannot write .*p.html"),
        from_the_start(limit(5000)),
    ),
    "results on a full disk": (
        given(EVAL + " --output FOLDER/e.json"),
        fails("cannot write .*e.json: No space left"),
        always(file_event("open", "*/.*.tmp"), refuse(FULL)),
    ),
    "workers without open files": (
        given("--dataloader_num_workers 8"),
        fails("--dataloader_num_workers 8: they need .* open files, and 80 are allowed"),
        from_the_start(files(80, 80)),
    ),
    "workers with few open files, which may be more": (
        given("--dataloader_num_workers 2"),
        works(),
        from_the_start(files(60, 4096)),
    ),
}
CASES = table("disks", DISKS)
