"""`longctx recipes` lists what comes with longctx, and prints one of it."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from longctx.errors import UserError
from longctx.train import cli

FOLDERS = ("recipes", "ds_configs", "fsdp_configs")


def test_all_files_are_listed_and_recipes_say_what_they_are(capsys) -> None:
    cli.run(["recipes"])
    said = " ".join(capsys.readouterr().out.split())  # however wide the table is
    assert re.search("quickstart What `longctx train` runs without options: [^.]* machine.", said)
    assert "trl_sft.py TRL's SFTTrainer with longctx's schedule: " in said
    recipes = [path.stem for path in (ROOT / "recipes").glob("*.yaml")]
    engines = [path.name for folder in FOLDERS[1:] for path in (ROOT / folder).glob("*.yaml")]
    assert len(recipes) > 8 and len(engines) > 5
    assert {*recipes, *engines, "zero3_cpu", "fsdp2_offload"} <= {*said.split()}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("quickstart", "recipes/quickstart.yaml"),
        ("quickstart.yaml", "recipes/quickstart.yaml"),
        ("trl_sft.py", "recipes/trl_sft.py"),
        ("zero3.json", "ds_configs/zero3.json"),
        ("fsdp2.yaml", "fsdp_configs/fsdp2.yaml"),
    ],
)
def test_a_file_is_printed_as_it_is(name: str, path: str, capsys) -> None:
    cli.run(["recipes", name])
    assert capsys.readouterr().out == (ROOT / path).read_text()


@pytest.mark.parametrize(
    ("name", "guess"), [("zero3.jsn", "did you mean zero3.json? "), ("nothing", "")]
)
def test_an_unknown_name(name: str, guess: str) -> None:
    with pytest.raises(UserError) as error:
        cli.run(["recipes", name])
    assert str(error.value) == f"no recipe {name!r}; {guess}`longctx recipes` lists all"
