"""Files of packed bases with random damage: a run trains to finite losses, or ends in one line that
names what is wrong before its first step."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_packed import saved_in_mxfp4
from small_run import prepare, run

from longctx.errors import UserError
from profiling.packed_folder import in_fp8

pytest.importorskip("peft")
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("plain_kernels")]

FORMATS: dict[str, Callable[[Path], Any]] = {
    "MXFP4": lambda folder: _mxfp4(folder),
    "FP8, blocks": lambda folder: in_fp8(folder, block=(8, 16)),
    "FP8, matrices": lambda folder: in_fp8(folder, block=None),
    "compressed-tensors, rows": lambda folder: in_fp8(folder, block=(1, 0), compressed=True),
    "compressed-tensors, blocks": lambda folder: in_fp8(folder, block=(8, 16), compressed=True),
}
Tensors, Settings = dict[str, torch.Tensor], dict[str, Any]
VALUES = (None, [], {}, "x", -1, 0, 3.5, [8], [0, 0], [128, 128], [7, 5], ["a"], True, "fp8", "int")
NUMBERS = (float("nan"), float("inf"), -1.0, 0.0, -0.0, 1e38, 1e-45)
DTYPES = (torch.float16, torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2)
DTYPES += (torch.int8, torch.uint8, torch.int64, torch.bool)


def _mxfp4(folder: Path) -> None:
    written = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    saved_in_mxfp4(folder, intermediate_size=96, **{name: written[name] for name in names})


class Damage:
    """One change of a model's tensors or of its `quantization_config`."""

    def __init__(self, seed: int, tensors: Tensors, config: Settings) -> None:
        self._random, self._tensors, self._config = random.Random(seed), tensors, config

    def __call__(self) -> str:
        """Makes the change and says which."""
        kinds = [*(self.drop, self.rename, self.swap, self.extra, self.dtype, self.shape)]
        kinds += [self.number, self.setting, self.setting, self.no_setting, self.settings]
        return self._random.choice(kinds)()

    def _name(self, of: str = "") -> str:
        parts = ("_scale", "_blocks", "proj.weight", "experts")
        return self._random.choice(
            [n for n in self._tensors if of in n and any(part in n for part in parts)]
        )

    def drop(self) -> str:
        del self._tensors[name := self._name()]
        return f"no {name}"

    def rename(self) -> str:
        name = self._name()
        self._tensors[f"{name}.x"] = self._tensors.pop(name)
        return f"{name} has another name"

    def swap(self) -> str:
        one, other, given = self._name(), self._name(), self._tensors
        given[one], given[other] = given[other].clone(), given[one].clone()
        return f"{one} and {other} change places"

    def extra(self) -> str:
        self._tensors[name := f"{self._name()}_2"] = torch.ones(3)
        return f"{name} as well"

    def dtype(self) -> str:
        name, dtype = self._name(), self._random.choice(DTYPES)
        self._tensors[name] = self._tensors[name].float().to(dtype)
        return f"{name} in {dtype}"

    def shape(self) -> str:
        x = self._tensors[name := self._name()]
        changed = (x.flatten(), x[None], x.reshape(-1)[: x.numel() // 2], x.reshape(-1)[:0])
        changed += (x.mT if x.dim() > 1 else x.view(-1, 1),)
        self._tensors[name] = made = self._random.choice(changed).contiguous().clone()
        return f"{name} of shape {tuple(made.shape)}"

    def number(self) -> str:
        x = self._tensors[name := self._name("_scale")]
        at, is_byte = self._random.randrange(x.numel()), x.dtype == torch.uint8
        value = self._random.choice((0, 1, 254, 255) if is_byte else NUMBERS)
        x.view(-1)[at] = value
        return f"{name} has {value}"

    def setting(self) -> str:
        where = self._config["quantization_config"]
        while True:
            key, value = self._random.choice([*where]), self._random.choice(VALUES)
            if isinstance(where[key], dict) and where[key] and self._random.random() < 0.9:
                where = where[key]
                continue
            where[key] = value
            return f"{key} {value!r}"

    def no_setting(self) -> str:
        settings = self._config["quantization_config"]
        del settings[key := self._random.choice([*settings])]
        return f"no {key}"

    def settings(self) -> str:
        kinds = [{"quant_method": name} for name in ("mxfp4", "fp8", "compressed-tensors", ["fp8"])]
        value = self._random.choice([None, [], "fp8", 5, {}, *kinds])
        self._config["quantization_config"] = value
        return f"quantization_config {value!r}"


@pytest.fixture(scope="module")
def flags_of(tmp_path_factory) -> Callable[[str], list[str]]:
    made: dict[str, list[str]] = {}

    def flags_of(form: str) -> list[str]:
        if form not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[form] = prepare(folder)
            FORMATS[form](folder / "model")
        return made[form]

    return flags_of


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", range(12))
def test_damage_is_trained_over_or_named(seed, form, flags_of, tmp_path) -> None:
    flags = flags_of(form)
    whole = Path(flags[flags.index("--model_name_or_path") + 1])
    damaged = tmp_path / "model"
    shutil.copytree(whole, damaged)
    tensors = load_file(damaged / "model.safetensors")
    config = json.loads((damaged / "config.json").read_text())
    what = Damage(seed, tensors, config)()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (damaged / "config.json").write_text(json.dumps(config))
    flags = [str(damaged) if word == str(whole) else word for word in flags]
    try:
        steps = run(flags, tmp_path / "run", "--lora_r", "4", "--max_steps", "1")
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) > 20, what
    else:
        assert all(torch.tensor(step["loss"]).isfinite() for step in steps), what
