"""What transformers would refuse to save after training is repaired, or refused, before step 1."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_run import prepare, run
from transformers import AutoModelForCausalLM

from longctx.errors import UserError
from longctx.train.output.rehearsal import rehearse_save


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*prepare(tmp_path_factory.mktemp("small")), "--max_steps", "2"]


def with_settings(flags: list[str], folder: Path, name: str, **settings: Any) -> list[str]:
    """Flags for a copy of the model that says `settings` in one of its files."""
    model = Path(shutil.copytree(flags[1], folder / "model"))
    path = model / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))
    return [*flags, "--model_name_or_path", str(model)]


SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "output_attentions": ("config.json", {"output_attentions": True}, "is set to false"),
    "attentions in generation": (
        "generation_config.json",
        {"output_attentions": True, "return_dict_in_generate": False},
        "",
    ),
    "several sequences": (
        "generation_config.json",
        {"num_return_sequences": 3},
        r"generation_config\.json is left out",
    ),
    "no new tokens": (
        "generation_config.json",
        {"max_new_tokens": -3},
        r"generation_config\.json is left out",
    ),
    "an unknown cache": (
        "generation_config.json",
        {"cache_implementation": "bogus"},
        r"generation_config\.json is left out",
    ),
    "half a file": ("generation_config.json", {"eos_token_id": {"a": 1}}, ""),
    "sampling in config": ("config.json", {"temperature": 0.5, "top_p": 0.3}, ""),
    "sampling": ("generation_config.json", {"temperature": 0.5}, ""),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_cannot_be_saved_as_it_is(flags, tmp_path, capsys, name) -> None:
    file, settings, said = SETTINGS[name]
    run(with_settings(flags, tmp_path, file, **settings), tmp_path / "run")
    assert re.search(said, capsys.readouterr().out)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.fixture
def before_rehearsal(monkeypatch):
    """before_rehearsal(work): `work(trainer)` is done when the model is loaded, as a person's own
    script would."""

    def set_work(work) -> None:
        def rehearse(trainer) -> None:
            work(trainer)
            rehearse_save(trainer)

        monkeypatch.setattr("longctx.train.trainer.checkpoints.rehearse_save", rehearse)

    return set_work


def test_settings_that_only_a_save_refuses(flags, tmp_path, before_rehearsal, capsys) -> None:
    before_rehearsal(lambda trainer: setattr(trainer.model.generation_config, "temperature", 0.3))
    run(flags, tmp_path / "run")
    assert "do_sample is set to true in its generation_config" in capsys.readouterr().out
    saved = json.loads((tmp_path / "run" / "final" / "generation_config.json").read_text())
    assert saved["do_sample"] and saved["temperature"] == 0.3


def test_what_cannot_be_repaired_ends_before_step_1(flags, tmp_path, before_rehearsal) -> None:
    before_rehearsal(lambda trainer: setattr(trainer.model.config, "mine", object()))
    with pytest.raises(UserError, match="could not be saved: .* not JSON serializable"):
        run(flags, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}


def test_a_disk_that_cannot_take_even_that(flags, tmp_path, before_rehearsal) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    before_rehearsal(lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1])))
    try:
        with pytest.raises(UserError, match="cannot write to .*run .File too large"):
            run(flags, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
