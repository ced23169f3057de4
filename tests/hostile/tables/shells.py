"""What only a fresh process shows: other locales, real pipes and terminals, the first imports."""

from __future__ import annotations

from paths import ROOT

from hostile.cases import ends, fails, prints, table, works
from hostile.files import both, file, given

CAFE = "caf\N{LATIN SMALL LETTER E WITH ACUTE} "
SIX = given("--max_steps 6")
AT_IMPORT = (
    "import os, runpy, signal, sys; "
    "sys.addaudithook(lambda e, a: e == 'import' and a[0] == 'longctx.train.trainer.trainer' "
    "and os.kill(os.getpid(), signal.SIG{})); "
    ""
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)

SHELLS = {
    "LANG=C": (
        both(
            file(
                CAFE + ".txt",
                CAFE * 400,
            )
        ),
        works("1 document"),
        "LANG=C LC_ALL=C PROGRAM",
    ),
    "ASCII output": (
        both(file("a.txt", CAFE * 400), given("--show_example")),
        prints("one row of 64 tokens"),
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii PROGRAM",
    ),
    "| head -1": (SIX, works(steps=6), "PROGRAM | head -1"),
    "| true": (SIX, works(steps=6), "PROGRAM 2>&1 | true"),
    "> /dev/full": (SIX, works(steps=6), "PROGRAM > /dev/full"),
    "> /dev/full 2>&1": (SIX, works(steps=6), "PROGRAM > /dev/full 2>&1"),
    ">&-": (SIX, works(steps=6), "PROGRAM >&-"),
    "2>&-": (SIX, works(steps=6), "PROGRAM 2>&-"),
    ">&- 2>&-": (SIX, works(steps=6), "PROGRAM >&- 2>&-"),
    "<&- >&- 2>&-": (SIX, works(steps=6), "PROGRAM <&- >&- 2>&-"),
    "an error, >&- 2>&-": (given("--seq_len 0"), ends(1), "PROGRAM >&- 2>&-"),
    "nohup": (SIX, works(steps=6), "nohup PROGRAM"),
    "setsid": (SIX, works(steps=6), "setsid -w PROGRAM"),
    "a nice terminal": (SIX, works(steps=6), "script -qec 'PROGRAM' /dev/null"),
    "a hundred open files": (SIX, works(steps=6), "ulimit -n 100; PROGRAM"),
    "a stack of 256 KiB": (SIX, works(steps=6), "ulimit -s 256; PROGRAM"),
    "no home": (SIX, works(steps=6), "env -u HOME PROGRAM"),
    "python -O": (SIX, works(steps=6), "PYTHONOPTIMIZE=1 PROGRAM"),
    "another folder": (SIX, works(steps=6), "cd / && PROGRAM"),
    "longctx | head -1": (given("longctx --help"), prints("usage"), "PROGRAM | head -1"),
    "longctx > /dev/full": (given("longctx --help"), prints(), "PROGRAM > /dev/full"),
    "longctx in LANG=C": (
        given("longctx report none"),
        fails("no such folder"),
        "LC_ALL=C PROGRAM",
    ),
    **{
        f"{name} while importing": (
            lambda folder: ["train.py"],
            ends(status),
            f'python -c "{AT_IMPORT.format(name)}" {ROOT}/train.py --help; exit $?',
        )
        for name, status in {"TERM": 143, "HUP": 129}.items()
    },
}
CASES = table("shells", SHELLS)
