"""Where a model comes from: published architectures with random weights, by name (presets.yaml), or
pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
)
"""Maps the name of a preset to the fields of its configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place that a pretrained model comes from."""

    name: str | None = None
    """A local folder, a .gguf file or a hub id; None: a preset, with random weights."""
    trust_remote_code: bool = False
    """Whether code that a model repository ships may run."""
    flag: str = "--model_name_or_path"
    """The option that named it, for messages."""
    frozen: bool = False
    """Whether its weights are not trained: under adapters, or of a model that only computes."""
    in_nf4: bool = False
    """Whether its weights are to be in 4 bits, by `--quantize nf4`."""
