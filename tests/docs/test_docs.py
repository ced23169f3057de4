"""The documentation, read as by somebody who tries all that it says: commands parse, files exist,
links resolve, code compiles, and figures are those of the plan and of profiling/results."""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from figures import MARK
from paths import ROOT

import longctx.train.report.plan as plan_command
from longctx.errors import UserError
from longctx.train.cli import COMMANDS
from longctx.train.options.config import parse_flags
from longctx.train.program import Parser

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
RESULTS = ROOT / "profiling/results"
names = {page: str(page.relative_to(ROOT)) for page in [*PAGES, *RECIPES]}


def each(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("page", paths, ids=[names[page] for page in paths])


def prose(text: str) -> str:
    """The text without blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)


def test_the_readme_is_short() -> None:
    shown = MARK.sub("", (ROOT / "README.md").read_text())
    assert len(shown.split()) <= 1500


# --- links and files -------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in found}


def dead_links(text: str, folder: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        path = (folder / name).resolve()
        if name and not path.exists():
            dead.append(link)
        elif anchor and anchor not in anchors(path.read_text() if name else text):
            dead.append(link)
    return dead


def missing_files(text: str) -> list[str]:
    """Python and Markdown files, and paths from the root, that are named and are not there."""
    others = (".git", ".venv", ".hypothesis", "build")  # other tests write there meanwhile
    own_folders = [f for f in ROOT.iterdir() if f.name not in others]
    paths = [*own_folders, *(path for folder in own_folders for path in folder.rglob("*"))]
    known = {path.name for path in paths if path.suffix in (".py", ".md")}
    named = re.findall(r"(?<![\w/.*$~-])[\w./-]+\.(?:py|md)\b", text)
    roots = "profiling|recipes|notebooks|longctx|kernels|tests|docs|scripts|ds_configs|fsdp_configs"
    paths = re.findall(rf"(?<![\w/.*$~-])(?:{roots})/[\w./-]*\w", text)
    # renamed since, and says so; written by the reader; stand for any file
    own = {"first_run.py", "first.py", "test_x.py", "x.py"}
    missing = [
        name
        for name in named
        if not re.search("[A-Z]{4}", name.replace("README", "").replace("CONTRIBUTING", ""))
        and name.rpartition("/")[2] not in known | own
    ]
    return missing + [
        path
        for path in paths
        if not re.search("[A-Z]{4}", path.replace("README", "")) and Path(path).name not in own
        if not any((ROOT / f"{path}{end}").exists() for end in ("", ".py", ".json", ".yaml"))
    ]


@each(PAGES)
def test_links_resolve_and_files_exist(page) -> None:
    assert not dead_links(page.read_text(), page.parent)
    assert not missing_files(page.read_text())


@each(RECIPES)
def test_recipes_name_files_that_exist(page) -> None:
    text = re.sub(r"(\w/)\n# ", r"\1", page.read_text())  # a path over two lines
    lines = [line for line in text.splitlines() if line.startswith("#")]
    assert not missing_files("\n".join(lines).replace("/shared/", "")), page


# --- commands --------------------------------------------------------------------------------


class Parsed(Exception):
    """A command's flags were understood."""


OTHERS = {
    "pip": {"-e", "--no-deps", "-w"},
    "pytest": {"-n", "-m", "--dist"},
    "accelerate": {
        "--config_file",
        "--num_processes",
        "--num_machines",
        "--machine_rank",
        "--main_process_ip",
        "--main_process_port",
    },
    "torchrun": {
        "--nproc_per_node",
        "--nnodes",
        "--node_rank",
        "--master_addr",
        "--master_port",
    },
    "sbatch": {"--signal"},
    "scontrol": set(),
}
"""Flags of other people's programs that these pages may name."""


def commands(text: str) -> Iterator[list[str]]:
    """Command lines in blocks of code, in comments of recipes and between backticks."""
    text = re.sub(r"\\\n[# ]*", "", text)
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line[4:] for line in text.splitlines() if re.match(r"    \w", line)]
    lines += [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        for part in re.split(r"&&|;| \| | > \S+", line.split("  #")[0]):
            try:
                words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$\w+", "1", part))
            except ValueError:
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and words[0] in ("longctx", "python", *OTHERS):
                yield [word for word in words if word != "..."]


def parse(words: list[str]) -> None:
    """Raises where a flag is not one of the program's."""
    program, flags = words[0], words[1:]
    if program in OTHERS:
        starts = [i for i, word in enumerate(flags) if word.endswith(".py") or word == "-m"]
        script = starts[0] if starts and program != "pytest" else len(flags)
        found = {word.split("=")[0] for word in flags[:script] if word.startswith("-")}
        assert found <= OTHERS[program], words
        program, flags = "python", flags[script:]
    if flags[:2] == ["-m", "longctx"]:
        program, flags = "longctx", flags[2:]
    if program == "longctx":
        if flags and flags[0] in COMMANDS:
            parse_command(flags[0], flags[1:])
    elif flags and flags[0] == "train.py":
        parse_flags(flags[1:])
    elif flags and flags[0].endswith(".py") and flags[0] != "first.py":
        written = (ROOT / flags[0]).read_text()
        if "runner.main(" in written:  # whose options are the runner's
            written += (ROOT / "profiling/bench/runner.py").read_text()
        for flag in flags[1:]:
            passes_on = "parse_known_args" in written
            known = f'"{flag.split("=")[0]}"' in written
            assert passes_on or known or not flag.startswith("--"), words


def parse_command(name: str, flags: list[str]) -> None:
    if not flags or flags == ["FLAGS", "--gpu", "NAME"]:
        return
    if name == "plan":
        words = [flag for flag in flags if flag != "FLAGS"]
        values = [] if len(words) > 1 or words[0] not in ("--html", "--gpu") else ["NAME"]
        parse_flags(plan_command._parse([*words, *values])[1])
        return
    with pytest.raises((Parsed, UserError, argparse.ArgumentError)) as ended:
        if name == "train":
            with suppress(SystemExit):  # --help
                parse_flags(flags)
            raise Parsed
        importlib.import_module(COMMANDS[name]).main(flags)
    incomplete = "arguments are required|expected (at least )?one argument"  # a flag in a sentence
    assert ended.errisinstance(Parsed) or re.search(incomplete, str(ended.value)), ended.value


@pytest.fixture
def parsing_alone(monkeypatch):
    """longctx's commands end where their flags are parsed."""

    def parse_args(self, args=None, namespace=None):
        argparse.ArgumentParser.parse_args(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", parse_args)
    real = argparse.ArgumentParser.parse_args
    monkeypatch.setattr("longctx.train.options.parser.OptionParser.parse_args", real)
    monkeypatch.chdir(ROOT)


@each([*PAGES, *RECIPES])
def test_every_commands_flags_parse(page, parsing_alone) -> None:
    for words in commands(page.read_text()):
        parse(words)


# --- Python ----------------------------------------------------------------------------------


@each(PAGES)
def test_python_compiles_and_names_exist(page) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("longctx", "peft"):
                    assert hasattr(importlib.import_module(node.value.id), node.attr), node.attr


# --- figures ---------------------------------------------------------------------------------

PLANNED = [
    (page, number)
    for page in RECIPES
    for number in range(len(re.findall("^# +longctx plan", page.read_text(), flags=re.M)))
]
"""Recipes, and the number of each command of theirs that a prediction stands before."""
SAID = {
    "step_s": r"([\d.]+) s a step",
    "gpu_gib": r"([\d.]+) GiB of (?:the|each) GPU",
    "host_gib": r"([\d.]+) GiB\s+of the host",
}


@pytest.mark.parametrize(("page", "number"), PLANNED, ids=[f"{p.stem} {n}" for p, n in PLANNED])
def test_predicted_figures_of_recipes_are_todays(page, number, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    text = "\n".join(re.findall(r"^# *(.*)$", page.read_text(), flags=re.M))
    before, after = (re.split("^longctx plan", text, flags=re.M)[number + i] for i in (0, 1))
    command = "longctx plan" + re.sub(r"\\\n *", "", after).splitlines()[0]
    flags = [flag for flag in shlex.split(command)[2:] if flag != "--sweep"]
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        plan_command.main([*flags, "--json"])
    planned = json.loads(out.getvalue())
    assert planned["fits"]
    predicted = before[before.rindex("prediction") :]
    found = {key: re.search(pattern, predicted) for key, pattern in SAID.items()}
    assert found["gpu_gib"] and found["host_gib"]
    for key, match in found.items():
        if match:
            decimals = len(match[1].partition(".")[2])
            assert match[1] == f"{planned[key]:.{decimals}f}", key


def test_what_the_page_of_the_plan_prints_is_todays(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs/plan.md").read_text()
    block = r"^```\nlongctx plan ([^`]*)\n```\n(?:(?!^```).)*?^```\n(\S+, custom, .*?)^```"
    shown = re.findall(block, text, flags=re.M | re.S)
    assert len(shown) == 2
    for flags, output in shown:
        with suppress(SystemExit):
            plan_command.main(shlex.split(flags.replace("\\\n", "")))
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.strip().splitlines()] == output.splitlines()


def test_the_first_ratios_are_those_of_their_rows() -> None:
    """README's first table: what people use, ours, and in bold what the two come to."""
    lines = re.findall(r"^\|.*", (ROOT / "README.md").read_text().split("\n## ")[0], flags=re.M)
    found = []
    for line in lines[2:]:
        _, peer, ours, gain = (cell.strip() for cell in line.strip("|").split("|"))
        for ratio, what in re.findall(r"([\d.]+)(?= times as (fast|long))", gain):
            pattern = r"([\d.]+) s" if what == "fast" else r"([\d,]+) tokens"
            pair = [float(re.search(pattern, x)[1].replace(",", "")) for x in (peer, ours)]
            quotient = pair[0] / pair[1] if what == "fast" else pair[1] / pair[0]
            assert abs(quotient - float(ratio)) < 0.005 * (1 + quotient), line
            found.append(ratio)
        for share in re.findall(r"in (\d+)%", gain):
            theirs, own = (float(re.search(r"([\d.]+) GiB", x)[1]) for x in (peer, ours))
            assert round(100 * own / theirs) == int(share), line
    assert len(found) == len(lines) - 4  # and two rows of memory alone


def accuracy(
    rows: list[dict[str, Any]], key: str, plan: str = "predicted"
) -> tuple[int, float, float]:
    """Cells, mean and largest error (%) of a predicted figure."""
    errors = [
        100 * abs(row[f"{plan}_{key}"] / row[f"measured_{key}"] - 1)
        for row in rows
        if row.get(f"measured_{key}") and row.get(f"{plan}_{key}")
    ]
    return len(errors), sum(errors) / len(errors), max(errors)


def test_the_plans_accuracy_is_that_of_its_cells_and_stands_once() -> None:
    rows = json.loads((RESULTS / "plan_cells.json").read_text())["rows"]
    groups = {"": "whole steps and layers", "engines: ": "engines", "adapters: ": "adapters"}
    groups |= {"other families: ": "other families", "the front: ": "the front"}
    for other in ("experts and mixers", "short rows and small models"):
        groups[f"{other}: "] = other
    words = {"GPU peak": "gpu_gib", "host memory": "host_gib", "seconds": "step_s"}
    text = (ROOT / "docs/plan.md").read_text()
    pattern = r"^\| ([a-z ]*: )?(GPU peak|host memory|seconds) \| (\d+) \| ([\d.]+)% \| ([\d.]+)%"
    table = re.findall(pattern, text, flags=re.M)
    assert len(table) >= 9
    for group, of, cells, mean, worst in table:
        shown = [row for row in rows if row["of"] == groups[group]]
        count, average, largest = accuracy(shown, words[of])
        assert (cells, mean, worst) == (str(count), f"{average:.1f}", f"{largest:.1f}"), (group, of)
    for page in PAGES:
        assert not re.search(r"off by\s+[\d.]+%\s+in\s+the\s+mean", page.read_text()), page


def test_what_the_plan_is_off_in_its_sentences_is_that_of_its_cells() -> None:
    """Its own choices of today, and mixtures and hybrids without the two rows that are far off."""
    rows = json.loads((RESULTS / "plan_cells.json").read_text())["rows"]
    text = " ".join((ROOT / "docs/plan.md").read_text().split())
    pattern = r"([\d.]+)% (?:off in the mean )?over ([a-z' ]+) \((\d+) cells, worst ([\d.]+)%\)"
    groups = {"the front's seconds": "the front", "whole steps": "whole steps and layers"}
    found = re.findall(pattern, text)
    assert len(found) == 4
    for mean, of, cells, worst in found:
        shown = [row for row in rows if row["of"] == groups.get(of, of)]
        count, average, largest = accuracy(shown, "step_s", "own_choice")
        assert (cells, mean, worst) == (str(count), f"{average:.1f}", f"{largest:.1f}"), of
    far = ("olmoe-1b-7b", "granite-4.0-h-tiny, 1 x 16384")
    shown = [row for row in rows if row["of"] == "experts and mixers"]
    shown = [row for row in shown if not any(name in row["cell"] for name in far)]
    count, average, _ = accuracy(shown, "step_s")
    assert f"the seconds of {count} rows are {average:.1f}% off" in text


def test_cells_that_are_called_refused_need_more_than_their_budget() -> None:
    rows = json.loads((RESULTS / "plan_cells.json").read_text())["rows"]
    refused = [row for row in rows if row["cell"].endswith("refused")]
    for row in refused:
        budget = re.search(r"in ([\d.]+) GiB", row["cell"])
        assert budget and row["predicted_gpu_gib"] > float(budget[1])
    if any(row["fits"] for row in refused):  # then the page says why
        assert re.search(r"`fits`\s+is `true`", (ROOT / "docs/plan.md").read_text())


def test_what_was_wrong_once_is_found() -> None:
    assert missing_files("the choice is in `auto.py`") == ["auto.py"]
    assert dead_links("[a](no.md), [b](#no), [c](docs/README.md#no)", ROOT) == [
        "no.md",
        "#no",
        "docs/README.md#no",
    ]
    assert wide_lines(f"{'wide ' * 30}\nnarrow\n| {'a cell ' * 30}|") == ["wide " * 30]
    assert foreign_k("a row of 1379K tokens") == ["1379K"] and not foreign_k("128K")
    with pytest.raises(AssertionError):
        parse(["scontrol", "--signal"])
    with pytest.raises(UserError):
        parse(["python", "train.py", "--seq_lenn", "4096"])


# --- words -----------------------------------------------------------------------------------


def foreign_k(text: str) -> list[str]:
    """Lengths such as 135K on a page that does not say that K is 1024."""
    if "K is 1024" in text:
        return []
    lengths = re.findall(r"\b(\d+)K\b", prose(text))
    return [f"{n}K" for n in lengths if int(n) & (int(n) - 1)]


WIDEST = 120


def wide_lines(text: str) -> list[str]:
    """Lines that an editor would break. A row of a table is always one line."""
    return [line for line in text.splitlines() if len(line) > WIDEST and not line.startswith("|")]


@each(PAGES)
def test_no_line_is_wider_than_an_editor(page) -> None:
    assert not wide_lines(page.read_text())


@each(PAGES)
def test_words(page) -> None:
    text = page.read_text()
    assert not foreign_k(text)
    riddles = r"(?i)linear maps|that is (?:also )?said|are said\b|matrix products|\bproducts\b"
    assert not re.findall(riddles, prose(text)), page


def test_what_ci_runs_is_what_contributing_says() -> None:
    ran = (ROOT / ".ci/run").read_text()
    said = (ROOT / "CONTRIBUTING.md").read_text()
    paragraph = next(p for p in said.split("\n\n") if p.startswith("`.ci/run`"))
    for command in ("ruff", "mypy", 'pytest -n 2 --dist loadfile -m "not ci"', "-m ci"):
        assert command in ran and command in paragraph
    assert 'pytest -n 2 --dist loadfile -m "not ci"' in (ROOT / "README.md").read_text()
    assert "does all of this" not in paragraph
    for command in ("run_all.py", "pre-commit"):
        assert command not in ran and command in paragraph.split("neither")[1]


def test_the_index_lists_every_page() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    assert not [page.name for page in PAGES[4:] if f"]({page.name})" not in listed
                and page.name != "README.md"]  # fmt: skip
