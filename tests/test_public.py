"""The public door: every name is there, and nothing heavy is loaded before one is used."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from paths import PYTHONPATH, ROOT

import longctx
from longctx.patching.patch import OPTIONS
from longctx.settings import PatchOptions


@pytest.mark.parametrize("name", longctx.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    thing = getattr(longctx, name)
    assert thing.__name__.removeprefix("longctx.") == name and thing.__doc__
    assert name in dir(longctx)


@pytest.mark.parametrize("name", longctx.losses.__all__)
def test_every_loss_is_there_and_explained(name: str) -> None:
    thing = getattr(longctx.losses, name)
    assert thing.__name__ == name and thing.__doc__
    assert name in (longctx.losses.__doc__ or "")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'patsch'"):
        _ = longctx.patsch


def test_what_type_checkers_read_is_what_runs() -> None:
    """The imports under TYPE_CHECKING name the modules that the lazy imports take names from."""
    tree = ast.parse(Path(longctx.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    found = {alias.name: node.module for node in imports for alias in node.names}
    assert found == longctx._HOMES | dict.fromkeys(longctx._PACKAGES, "longctx")
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # exported
    assert (Path(longctx.__file__).parent / "py.typed").exists()


def test_patch_has_the_options_and_defaults_of_train() -> None:
    options = {option.name: option.default for option in fields(PatchOptions)}
    shown = inspect.signature(longctx.patch).parameters
    options["parts"] = "schedule"  # None there, where Liger-Kernel has no schedule
    assert {name: shown[name].default for name in OPTIONS} == {n: options[n] for n in OPTIONS}
    assert shown.keys() == {"model", "any_model", "strict", *OPTIONS, "unknown"}


def test_linear_kl_has_the_options_of_linear_jsd() -> None:
    jsd, kl = (inspect.signature(x).parameters for x in (longctx.linear_jsd, longctx.linear_kl))
    assert kl.keys() - jsd.keys() == {"reverse", "unknown"} and jsd.keys() - kl.keys() == {"beta"}
    assert all(kl[name] == jsd[name] for name in kl.keys() & jsd.keys())
    jsd, kl = (
        inspect.signature(x).parameters for x in (longctx.LinearJSDLoss, longctx.LinearKLLoss)
    )
    assert kl.keys() - jsd.keys() == {"reverse"} and jsd.keys() - kl.keys() == {"beta"}
    assert all(kl[name] == jsd[name] for name in kl.keys() & jsd.keys())


USERS_SCRIPT = """
import torch
import longctx
from transformers import LlamaForCausalLM

model: LlamaForCausalLM = longctx.patch(LlamaForCausalLM.from_pretrained("x"), keep="o")
optimizer = longctx.exact_adamw(model, lr=1e-5, tokens=131072)
optimizer.clip(1.0)
longctx.patch(model, keep="everything")  # line 9
longctx.patch(model, kep="x")
longctx.exact_adamw(model, lr=1e-5)
longctx.rms_nrom(torch.ones(8), torch.ones(8))
longctx.linear_kl(*[torch.ones(2, 2)] * 4, beta=1.0)
longctx.RMSNorm("8")
"""
WRONG = {9: "arg-type", 10: "arg-type", 11: "call-arg", 12: "attr-defined", 13: "arg-type"}
WRONG |= {14: "arg-type"}
"""Line of the script -> mypy's code of what is wrong there."""


@pytest.mark.ci
def test_mypy_finds_what_is_wrong_in_a_users_script(tmp_path: Path) -> None:
    """With Hugging Face's and torch's own types left out, which would be read for half a minute."""
    pytest.importorskip("mypy")
    script, config = tmp_path / "script.py", tmp_path / "mypy.ini"
    script.write_text(USERS_SCRIPT)
    sections = ["[mypy]\nfollow_imports = skip\nignore_missing_imports = true\n"]
    sections += ["[mypy-longctx.*]\nfollow_imports = silent\n"]
    config.write_text("".join(sections))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "cache"), str(script)], capture_output=True, text=True, env=env
    )
    found = re.findall(r"script\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, flags=re.M)
    assert {int(line): code for line, code in found} == WRONG, done.stdout + done.stderr


@pytest.mark.ci
def test_patching_loads_no_module_of_the_program() -> None:
    """A user who patches a model in a loop of their own imports at most 225 modules of ours."""
    script = """
import sys, torch, longctx
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
longctx.patch(model)
longctx.exact_adamw(model, lr=1e-5, tokens=16)
longctx.EfficiencyCallback, longctx.losses, longctx.rope
ids = torch.zeros(1, 16, dtype=torch.long)
model(input_ids=ids, labels=ids).loss.backward()
ours = [name for name in sys.modules if name.split(".")[0] == "longctx"]
program = [name for name in ours if name.startswith("longctx.train")]
print(len(ours), *program, *({"datasets", "deepspeed", "rich"} & {*sys.modules}))
"""
    run, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": PYTHONPATH}
    out = subprocess.run(run, check=True, capture_output=True, text=True, env=env).stdout
    count, *others = out.splitlines()[-1].split()
    assert not others and int(count) <= 225, out


def test_importing_longctx_loads_nothing_heavy() -> None:
    code = "import sys, longctx; print({'torch', 'transformers', 'triton'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "set()\n", done.stderr
