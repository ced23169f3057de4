"""What no program may do, whatever it was given, and what its case says that it must."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hostile.cases import Case
from longctx.errors import MOST_CHARACTERS
from longctx.train.output import FINAL, METRICS, RECORD, STAGING, checkpoint_step
from longctx.train.output.manifest import Damaged, check_files

ERROR = "error: "
ERROR_CHARS = len(ERROR) + MOST_CHARACTERS
GROWTH_BYTES = 700 << 20
"""Of memory over the warm process's: the small run takes about 100 MiB."""
CANARY = "ran"
"""What every payload would make."""
HASHED_BYTES = 64 << 20
OUTSIDE = ("cache", "tmp", "home", "out.txt", "err.txt")
Snapshot = dict[str, Any]


def snapshot(folder: Path) -> Snapshot:
    """Every path and what it holds, but the cache and what the program prints."""
    found: Snapshot = {}
    for root, folders, names in os.walk(folder):
        if root == str(folder):
            folders[:] = [name for name in folders if name not in OUTSIDE]
            names = [name for name in names if name not in OUTSIDE]
        for name in [*names, *folders]:
            path = Path(root, name)
            found[str(path.relative_to(folder))] = _content(path)
    return found


def _content(path: Path) -> Any:
    try:
        info = path.lstat()
    except OSError:  # a path too long
        return None
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(info.st_mode):
        return stat.S_IFMT(info.st_mode)
    if info.st_size > HASHED_BYTES:
        return info.st_size, info.st_mtime_ns
    return hashlib.sha1(path.read_bytes()).hexdigest()


def judge(
    case: Case, words: list[str], folder: Path, earlier: Snapshot, ended: Any, model: Path
) -> tuple[str, list[str]]:
    """The line that says what happened, and what of it must not happen."""
    out, err = ((folder / name).read_text(errors="replace") for name in ("out.txt", "err.txt"))
    lines = [*out.strip().splitlines(), *err.strip().splitlines()] or [""]
    said = [line for line in lines if re.search(case.expected.says or "$^", line)]
    outcome = (said or lines)[-1][:300]
    problems = _ending(case, ended, out, err)
    if ended.status != case.expected.status:  # what it did then was no mistake
        return outcome, problems + [
            f"left behind: {n}" for n in _leftovers(case, folder, earlier)[:3]
        ]
    now = snapshot(folder)
    pages = [folder / name for name in now if name.endswith(".html") and name not in earlier]
    problems += [
        *(f"left behind: {name}" for name in _leftovers(case, folder, earlier)),
        *_earlier_files(case, earlier, now),
        *_published(folder, earlier, now, _output_dir(words)),
        *(problem for page in pages for problem in page_problems(page)),
    ]
    if case.expected.steps is not None and not problems:
        problems += _trained(case, words, folder, model)
    if case.expected.leaves is not None:
        output = _output_dir(words)
        left = tuple(sorted(p.name for p in output.iterdir() if p.is_dir())) if output else ()
        if left != tuple(sorted(case.expected.leaves)):
            problems.append(f"the output folder holds {', '.join(left)}")
    return outcome, problems


def _ending(case: Case, ended: Any, out: str, err: str) -> list[str]:
    problems = []
    if ended.status is None:
        problems.append(f"hangs after {ended.s:.0f} s")
    elif ended.status != case.expected.status:
        problems.append(f"exit status {ended.status}, not {case.expected.status}")
    if "Traceback (most recent call last)" in out + err:
        problems.append(f"a traceback: {(err.strip() or out.strip()).splitlines()[-1][:200]}")
    if ended.orphans:
        problems.append(f"{ended.orphans} processes live on")
    if ended.grown_bytes > GROWTH_BYTES and not case.shell:
        problems.append(f"took {ended.grown_bytes >> 20} MiB of memory")
    if case.lost_output:
        return problems
    if case.expected.one_line:
        problems += _error_line(case, err) if ended.status else []
    elif not re.search(case.expected.says, out + err):
        problems.append(f"does not say {case.expected.says!r}")
    return problems


def _error_line(case: Case, err: str) -> list[str]:
    lines = err.strip("\n").split("\n")
    last = lines[-1]
    if not last.startswith(ERROR):
        return [f"no line that begins with {ERROR!r} ends it: {last[:200]!r}"]
    problems = []
    if sum(line.startswith(ERROR) for line in lines) > 1:
        problems.append("more than one error")
    if len(last) > ERROR_CHARS:
        problems.append(f"an error of {len(last)} characters")
    if not re.search(case.expected.says, last):
        problems.append(f"the error is not {case.expected.says!r}")
    if not last.isprintable():
        problems.append("unprintable characters in the error")
    return problems


def _leftovers(case: Case, folder: Path, earlier: Snapshot) -> list[str]:
    """Temporary files, and what a payload would have made."""
    found = []
    killed = case.expected.status < 0
    for root, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = str(Path(root, name).relative_to(folder))
            temporary = not killed and (name.startswith(STAGING) or name.endswith(".tmp"))
            if (
                path not in earlier
                and (temporary or name == CANARY or Path(path).parent == Path("tmp"))
                and not {*Path(path).parts} & {*case.expected.keeps}
            ):
                found.append(path)
    return found


def _earlier_files(case: Case, earlier: Snapshot, now: Snapshot) -> list[str]:
    """A run that fails changes nothing; one that works changes nothing beside its own folder."""
    problems = []
    for name, content in earlier.items():
        path = Path(name)
        if path.name in (".lock", METRICS, RECORD) or now.get(name) == content:
            continue
        if case.expected.status == 1 or path.parts[0] != "run":
            if path.suffix in (".html", ".json", ".png") and case.expected.status == 0:
                continue  # what commands write
            problems.append(f"{'changed' if name in now else 'deleted'}: {name}")
    return problems[:3]


def _published(folder: Path, earlier: Snapshot, now: Snapshot, output: Path | None) -> list[str]:
    """Checkpoints and final models that this run has published, and that are not whole."""
    problems = []
    for name in now:
        path = folder / name
        published = path.name == FINAL or checkpoint_step(path) is not None
        staged = any(part.startswith(STAGING) for part in path.parts)
        if not published or staged or path == output or not os.path.isdir(path):
            continue
        inside = {n: c for n, c in now.items() if Path(n).is_relative_to(name)}
        if all(earlier.get(n) == content for n, content in inside.items()):
            continue
        if problem := _model_problem(path):
            problems.append(f"published {name}: {problem}")
    return problems


def _model_problem(path: Path) -> str | None:
    try:
        if check_files(path) is None:
            return "it has no manifest"
        adapter = path / "adapter_config.json"
        json.loads((adapter if adapter.exists() else path / "config.json").read_bytes())
        json.loads((path / "tokenizer.json").read_bytes())
        for weights in path.glob("*.safetensors"):
            read_weights(weights)
    except (Damaged, OSError, ValueError) as error:
        return str(error)
    return None


def read_weights(path: Path) -> dict[str, bytes]:
    """Names and bytes of a safetensors file. Raises ValueError for one that is cut."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    end = max(entry["data_offsets"][1] for entry in header.values())
    if len(data) != 8 + size + end:
        raise ValueError(f"{path.name} has {len(data)} of {8 + size + end} bytes")
    body = data[8 + size :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}


def _trained(case: Case, words: list[str], folder: Path, model: Path) -> list[str]:
    """Whether a run that says that it worked has trained."""
    output = _output_dir(words)
    assert output, "a case that trains says where"
    try:
        lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
        steps = [line["step"] for line in lines if "loss" in line]
        trained = read_weights(output / FINAL / "model.safetensors")
    except OSError as error:
        return [f"nothing was trained: {error}"]
    problems = []
    if steps != list(range(1, (case.expected.steps or 0) + 1)):
        problems.append(f"logged the steps {steps}, not 1 to {case.expected.steps}")
    before = read_weights(model / "model.safetensors")
    same = [name for name in trained if before.get(name) == trained[name]]
    if len(same) > len(trained) / 2:
        problems.append(f"{len(same)} of {len(trained)} weights have not changed")
    return problems


def _output_dir(words: list[str]) -> Path | None:
    """The last one counts."""
    return next(
        (Path(b) for a, b in zip(words[-2::-1], words[:0:-1], strict=True) if a == "--output_dir"),
        None,
    )


# --- pages -----------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Finds whatever could run or fetch something."""

    ACTIVE = {"script", "iframe", "object", "embed", "base", "link", "form", "foreignobject"}

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in self.ACTIVE:
            self.problems.append(f"<{tag}>")
        for name, value in attributes:
            fetches = name in ("src", "srcset", "action", "data", "background", "poster")
            links = name in ("href", "xlink:href") and not (value or "").startswith("#")
            if name.startswith("on") or fetches or links:
                self.problems.append(f"<{tag} {name}={value!r}>")
            if (
                name == "http-equiv"
                or "url(http" in (value or "")
                or "javascript:" in (value or "")
            ):
                self.problems.append(f"<{tag} {name}={value!r}>")


def page_problems(path: Path) -> list[str]:
    page = _Page()
    page.feed(path.read_text(errors="replace"))
    page.close()
    return [f"{path.name} holds {problem}" for problem in page.problems[:3]]
