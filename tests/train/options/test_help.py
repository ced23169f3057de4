"""`--help` is short, `--help_all` has every option that a run takes, and both are grouped."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from longctx.train.options.arguments import OPTIONS
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments, parse_flags
from longctx.train.options.help import GROUPS, OTHERS, in_groups
from longctx.train.options.limits import NOT_OURS

OURS = {f.name for kind in (ModelArguments, DataArguments, TrainArguments) for f in fields(kind)}
OURS -= {f.name for f in fields(TrainingArguments)}
COMMON = {name for name, known in OPTIONS.items() if known.group and not known.rare}
COMMON -= NOT_OURS.keys()
TAKEN = OURS | {f.name for f in fields(TrainingArguments) if f.init} - NOT_OURS.keys()


def printed(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_flags(flags)
    assert not ended.value.code
    return capsys.readouterr().out


def options(text: str) -> set[str]:
    return set(re.findall(r"^  --(\w+)", text, flags=re.M)) - {"config"}


def test_help_has_a_line_for_each_common_option(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = printed(capsys, "--help")
    assert len(text.splitlines()) <= 80 and max(map(len, text.splitlines())) <= 100
    assert options(text) == COMMON
    assert (
        "--seq_len                      Tokens in one packed row, as 131072, 128k or 1M [4096]"
        in text
    )
    assert printed(capsys, "-h", "--preset", "tiny") == text


def test_help_all_has_every_option_that_a_run_takes(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = printed(capsys, "--help_all")
    assert options(text) == TAKEN
    assert "%%" not in text
    assert "--keep {auto,x,o,h,qkv,all}" in text and "--lora_targets VALUE ..." in text


def test_help_in_a_terminal_of_no_width(monkeypatch, capsys) -> None:
    for columns in ("1", "5", "-5", "0", "wide"):
        monkeypatch.setenv("COLUMNS", columns)
        assert options(printed(capsys, "--help_all")) == TAKEN


def test_the_defaults_shown_are_those_without_a_recipe(tmp_path, capsys) -> None:
    (tmp_path / "r.yaml").write_text("seq_len: 77\n")
    assert "[4096]" in printed(capsys, "--config", str(tmp_path / "r.yaml"), "--help")


def test_every_option_of_ours_has_a_group_and_those_of_transformers_a_line_of_ours() -> None:
    assert {OPTIONS[name].group for name in OURS} <= {*GROUPS}
    assert COMMON >= {name for name, known in OPTIONS.items() if known.says}
    assert not COMMON & NOT_OURS.keys()


def test_an_option_that_no_group_knows_is_listed_at_the_end() -> None:
    found = in_groups(["seq_len", "brand_new", "keep"], everything=True)
    assert found == {"model": ["seq_len"], "memory": ["keep"], OTHERS: ["brand_new"]}
    assert OTHERS not in in_groups(["seq_len", "brand_new"], everything=False)
