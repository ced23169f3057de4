"""Published architectures with random weights, by name (presets.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""Name -> the fields of a configuration."""
