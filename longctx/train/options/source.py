"""Where a model comes from: published architectures with random weights, by name (presets.yaml), or
pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
)
"""Maps the name of a preset to the fields of its configuration."""
PUBLISHED: dict[str, dict[str, Any]] = {
    name: fields.pop("published") for name, fields in PRESETS.items() if "published" in fields
}
"""Maps the name of a preset to its public files' `quantization_config`, if they have one."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place that a pretrained model comes from."""

    name: str | None = None
    """A local folder, a .gguf file or a hub id; None: a preset, with random weights."""
    preset: str | None = None
    """The preset's name, where there is no other."""
    trust_remote_code: bool = False
    """Whether code that a model repository ships may run."""
    flag: str = "--model_name_or_path"
    """The option that named it, for messages."""
    frozen: bool = False
    """Whether its weights are not trained: under adapters, or of a model that only computes."""
    in_nf4: bool = False
    """Whether its weights are to be in 4 bits, by `--quantize nf4`."""
    keeps_packed: bool = False
    """Whether weights that its files have packed, in MXFP4 or FP8, may stay so: what computes with
    them, and what places them, knows such weights."""

    def under(self, *, shards: bool) -> ModelSource:
        """Returns the source under an engine, which may cut weights up (`shards`): dense ones."""
        return replace(self, keeps_packed=self.keeps_packed and not shards)
