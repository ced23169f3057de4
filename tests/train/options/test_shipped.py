"""Files that come with longctx: found by name from any folder, after the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from paths import ROOT
from transformers import get_scheduler

from longctx.errors import UserError
from longctx.train.engines.deepspeed import DeepSpeed
from longctx.train.options.config import parse_flags
from longctx.train.options.shipped import OPTIONS, find
from longctx.train.start.options import parse_args

FLAGS = {
    "--deepspeed zero3": "ds_configs/zero3.json",
    "--fsdp true --fsdp_config fsdp2.json": "fsdp_configs/fsdp2.json",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("config", "recipes/llama-3.2-1b_32k.yaml"),  # whose name has dots
        ("deepspeed", "ds_configs/zero3_cpu.json"),
        ("fsdp_config", "fsdp_configs/fsdp2.json"),
    ],
)
def test_a_name_with_and_without_folder_and_suffix(option: str, path: str) -> None:
    name = Path(path).name
    for written in (path, name, name.removesuffix(OPTIONS[option][1])):
        assert find(option, written).samefile(ROOT / path)


def test_the_users_own_file_comes_first() -> None:
    """A folder of the name, such as a run's, is none."""
    Path("quickstart").mkdir()
    assert find("config", "quickstart").samefile(ROOT / "recipes/quickstart.yaml")
    Path("zero3.json").write_text("{}")
    assert find("deepspeed", "zero3.json") == Path("zero3.json")
    assert find("deepspeed", "zero3").samefile(ROOT / "ds_configs/zero3.json")


def test_which_of_two_files_of_a_name_is_taken_is_said_once(capsys) -> None:
    """`longctx recipes smollm2_32k > smollm2_32k.yaml`, changed, and then named without .yaml."""
    Path("smollm2_32k.yaml").write_text("seed: 7\n")
    for _ in range(2):
        assert find("config", "smollm2_32k").samefile(ROOT / "recipes/smollm2_32k.yaml")
    said = "--config smollm2_32k is the file that comes with longctx; "
    said += "write --config smollm2_32k.yaml for the one in this folder\n"
    assert capsys.readouterr() == ("", said)
    assert find("config", "smollm2_32k.yaml") == Path("smollm2_32k.yaml")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("option", "written", "says"),
    [
        ("config", "quickstrt", "did you mean quickstart? `longctx recipes` lists all"),
        ("config", "recipes/quickstrt.yaml", "did you mean quickstart.yaml?"),
        ("deepspeed", "zero4", "did you mean zero3?"),
        ("fsdp_config", "nothing", "among longctx's own; `longctx recipes` lists all"),
    ],
)
def test_an_unknown_name(option: str, written: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        find(option, written)
    assert str(error.value).startswith(f"--{option}: cannot read {written}: ")
    assert says in str(error.value)


@pytest.mark.parametrize("written", ["a/quickstart.yaml", "/no/where", "x" * 300 + "/y", "."])
def test_a_path_is_for_the_option_to_read(written: str) -> None:
    assert find("config", written) == Path(written)


@pytest.mark.parametrize("flags", FLAGS)
def test_options_of_engines_take_names(flags: str) -> None:
    option = flags.split()[-2].lstrip("-")
    found = getattr(parse_flags(["--preset", "tiny", *flags.split()]), option)
    assert Path(found).samefile(ROOT / FLAGS[flags])


def test_the_quick_start_trains_from_its_first_step_on() -> None:
    """A warmup would begin with a learning rate of 0."""
    args = parse_args(["quickstart", "--use_cpu", "true"])[2]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    warmup, steps = args.get_warmup_steps(args.max_steps), args.max_steps
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps)
    assert schedule.get_last_lr() == [args.learning_rate]


def test_settings_and_words_for_no_are_no_names() -> None:
    for value in ('{"zero_optimization": {}}', "no", "false"):
        assert parse_flags(["--preset", "tiny", "--deepspeed", value]).deepspeed == value


def test_a_launchers_yaml_names_a_file_that_is_found_in_any_folder(monkeypatch) -> None:
    """accelerate reads the file when it makes its plugin, after the engine has read it."""
    name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    monkeypatch.setenv(name, "ds_configs/zero3.json")
    engine = DeepSpeed()
    engine.read(parse_flags(["--preset", "tiny"]))
    assert engine.settings["zero_optimization"]["stage"] == 3
    assert Path(os.environ[name]).samefile(ROOT / "ds_configs/zero3.json")
