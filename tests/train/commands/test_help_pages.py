"""`longctx help` lists the pages of docs/ and shows them in a terminal; whatever names a page that
way names one that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

from longctx.errors import UserError
from longctx.train import cli
from longctx.train.commands import help as command

DOCS = sorted((ROOT / "docs").glob("*.md"))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.run(["help", *words])
    return capsys.readouterr().out


def test_every_page_is_listed_with_its_line_and_every_command_too(capsys) -> None:
    said = shown(capsys)
    for name in [*(page.stem.lower() for page in DOCS), *cli.COMMANDS]:
        assert re.search(rf"^  {name} +\S", said, flags=re.M), name


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_is_shown_whole_and_with_no_link_that_leads_nowhere(page: Path, capsys) -> None:
    said = shown(capsys, page.stem)
    title = page.read_text().splitlines()[0].removeprefix("# ")
    assert title.replace("`", "") in " ".join(said.split())
    assert len(said) > 0.6 * len(page.read_text())
    assert "\x1b" not in said and not re.search(r"\]\(|\.md\)|\.\./", said)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("[lora.md](lora.md) and [adapters](lora.md#names)",
         "`longctx help lora` and adapters (`longctx help lora`)"),
        ("[words](README.md#words), [below](#below)", "words (`longctx help readme`), below"),
        ("[a file](../longctx/train/cli.py) ![p](front.png)", "a file *(image: p)*"),
        ("[`state.md`](https://host.example/x)", "`state.md` (https://host.example/x)"),
        ("`[0](x)`\n```\ny[1](lora.md)\n```\n", "`[0](x)`\n```\ny[1](lora.md)\n```\n"),
    ],
)  # fmt: skip
def test_links(text: str, plain: str) -> None:
    assert command.without_links(text) == plain


@pytest.mark.parametrize("written", ["first-ten-minutes", "docs/First_Ten_Minutes.md"])
def test_names_as_people_write_them(written: str, capsys) -> None:
    assert "The first ten minutes" in shown(capsys, written)


def test_commands_and_unknown_topics(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["help", "report"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: longctx report")
    assert "longctx plan --help" in shown(capsys, "plan")  # a page and a command
    for written, near in (("lroa", "lora"), ("trian", "train")):
        with pytest.raises(UserError, match=f"no page '{written}'; did you mean .*help {near}"):
            cli.run(["help", written])
    with pytest.raises(UserError, match="no page 'xyzzy'; `longctx help` lists all"):
        cli.run(["help", "xyzzy"])


def test_a_long_page_goes_through_the_pager(monkeypatch, capsys) -> None:
    monkeypatch.delenv("LESS", raising=False)
    monkeypatch.setattr(command, "on_terminal", lambda: True)
    monkeypatch.setattr("pydoc.pager", lambda text: print(f"PAGED {len(text)}"))
    assert int(shown(capsys, "lora").split("PAGED ")[1]) > 1000
    assert command.os.environ["LESS"] == command.LESS
    monkeypatch.setenv("LINES", "100000")
    assert "PAGED" not in shown(capsys, "lora")


def test_texts_name_pages_that_are_there_and_no_file_that_a_wheel_lacks() -> None:
    texts = [path for name in ("longctx", "recipes", "docs", "kernels", "notebooks")
             for path in (ROOT / name).rglob("*") if path.suffix in
             (".py", ".yaml", ".jinja", ".md", ".ipynb")]  # fmt: skip
    known = {*command.PAGES, *cli.COMMANDS, "topic", "page"}
    for path in texts:
        text = path.read_text()
        assert {*re.findall(r"`longctx help (\w+)", text.lower())} <= known, path
        if path.suffix == ".py":
            text = re.sub(r'"""(?:.|\n)*?"""', "", text)  # those who read code have the pages
        if path.suffix in (".py", ".yaml", ".jinja"):
            assert not re.search(r"\bdocs/\w+\.md", text), path
